"""A step that leaves no trace: the model, its gradients, buffers and random generators are afterwards as they were."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel._base.put_back import PutBack
from hyper_parallel.core.planner.plan.batch_words import telling_of_the_batch
from hyper_parallel.platform.torch.planner.model_state import ModelState
from hyper_parallel.platform.torch.regions.left_as_found import left_as_found
from hyper_parallel.platform.torch.regions.local_parts import is_distributed, local_tensor
from hyper_parallel.platform.torch.regions.surroundings import is_replaying
from hyper_parallel.platform.trees import leaves, map_leaves

LossFn = Callable[[Any], Any]


_states: weakref.WeakKeyDictionary[nn.Module, ModelState] = weakref.WeakKeyDictionary()  # of models that are preserved


class preserved(left_as_found):  # noqa: N801 - used like a function
    """Opens a block in which gradients are zeros that are allocated already, and nobody trains.

    Afterwards all is as before, also after Ctrl-C.

    Gradients that were there, of the batch as well, go to the host meanwhile, and their memory is used: a step shall
    not have them twice. That takes seconds, and is done once: a block inside of another one puts back everything but
    them, so that all steps begin alike.

    >>> with preserved(model) as block, block as state:  # doctest: +SKIP
    ...     ...

    Raises:
        ArgumentError (a ValueError): something cannot be put back.
        StateError: an optimizer of the model would step within; or a step wrote what no op shows.
    """

    def __init__(self, model: nn.Module, batch: object = None, loss_fn: LossFn | None = None) -> None:
        outer = _states.get(model)
        self._block = _Preserved(model, batch, loss_fn) if outer is None else _PreservedAgain(outer)
        super().__init__(self._block)

    def __enter__(self) -> _PreservedAgain:
        return self._block


class _PreservedAgain(PutBack):
    def __init__(self, state: ModelState) -> None:
        self._state = state

    def __enter__(self) -> ModelState:
        super().__enter__()
        return self._state

    def put_back(self) -> None:
        self._state.put_back()


class _Preserved(_PreservedAgain):
    """The outermost block of `preserved`.

    What a user has hung on gradients that are there does not run, since it may be an optimizer that steps in backward.
    What FSDP and DDP have hung there is part of a step, and runs. A step of an optimizer by any other way is refused
    before it changes anything.
    """

    def __init__(self, model: nn.Module, batch: object, loss_fn: LossFn | None) -> None:
        super().__init__(ModelState(model, loss_fn, batch=batch, is_for_planning=True))
        self._model = model
        self._trained = trained_tensors(model, (batch, self._state.tensors()))
        self._gradients = [_Gradient(tensor) for tensor in self._trained]
        hooks = [found for tensor in self._trained if (found := tensor._post_accumulate_grad_hooks)]
        self._hooks = [(entries, dict(entries)) for entries in hooks]
        self._mine = {id(tensor) for tensor in self._trained}
        self._has_profiler = torch.autograd._profiler_enabled()

    def change(self) -> None:
        for gradient in self._gradients:
            gradient.begin()
        _states[self._model] = self._state
        if self._trained:
            register_optimizer_step_pre_hook(self._refuse)
        for hooks, _ in self._hooks:
            for key in [key for key, hook in hooks.items() if not _is_of_framework(hook)]:
                del hooks[key]

    def put_back(self) -> None:
        if torch.autograd._profiler_enabled() and not self._has_profiler:  # a meter that Ctrl-C has ended
            torch.autograd._disable_profiler()
        forget_before_step(self._refuse)
        for hooks, entries in self._hooks:
            hooks.clear()  # in place, and in their order: handles of these hooks know this very dict
            hooks.update(entries)
        _states.pop(self._model, None)
        for gradient in self._gradients:
            gradient.end()
        self._state.end()

    def _refuse(self, optimizer: Any, args: object, kwargs: object) -> None:
        if any(id(tensor) in self._mine for group in optimizer.param_groups for tensor in group["params"]):
            raise StateError(
                "An optimizer steps inside of the model's forward or backward: planning would train the model.",
                expected="a step that leaves the parameters as they are",
                got=f"{type(optimizer).__name__}.step()",
                do="Plan before the optimizer is tied to the backward, or tie it with "
                "`register_post_accumulate_grad_hook`: that waits while planning.",
            )


def forget_before_step(hook: object) -> None:
    """Take a hook of `register_optimizer_step_pre_hook` away.

    This also works where an interrupt came before anybody had its handle.
    """
    # Equal, not the same: each look at a method makes a new object, and one that is kept would keep what it belongs to.
    for key in [key for key, known in _global_optimizer_pre_hooks.items() if known == hook]:
        del _global_optimizer_pre_hooks[key]


def trained_tensors(model: nn.Module, batch: object) -> list[torch.Tensor]:
    """List the tensors that a backward leaves a gradient on, each once.

    They are parameters, and what the batch has of that kind.
    """
    found = [*model.parameters(), *(tensor for tensor in tensors_of(batch) if tensor.is_leaf)]
    return list({id(tensor): tensor for tensor in found if tensor.requires_grad}.values())


def _is_of_framework(hook: object) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").startswith(("torch.distributed.fsdp", "torch.nn.parallel"))


class _Gradient:
    """The gradient of one tensor while steps run that leave no trace."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._original = tensor.grad
        self._copy: torch.Tensor | None = None

    def begin(self) -> None:
        original = self._original
        if original is None or original.layout != torch.strided or original.requires_grad:
            self._tensor.grad = torch.zeros_like(self._tensor)
            return
        with torch.no_grad():
            copied = original.clone() if original.device.type == "cpu" else original.to("cpu")
            self._copy = copied
            original.zero_()

    def end(self) -> None:
        self._tensor.grad = self._original
        if self._copy is not None and self._original is not None:
            with torch.no_grad():
                self._original.copy_(self._copy)
            self._copy = None


def device_of(model: nn.Module) -> torch.device:
    """Find the one device of a model.

    Raises:
        ValueError: its parameters are on several, or on the meta device.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise ArgumentError(
            "A plan is made for the device that a model is on.",
            expected="all parameters on one device with memory",
            got=", ".join(sorted(map(str, devices))) or "no parameters",
            where=type(model).__name__,
        )
    return next(iter(devices))


class Arguments(NamedTuple):
    """A batch of arguments and keywords both."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a batch of what a forward was given, as a user would give it to `plan_memory`.

    Its graph, if it has one, is not part of it.
    """
    args, kwargs = map_leaves(_detached, args), map_leaves(_detached, kwargs)
    if args and kwargs:
        return Arguments(args, kwargs)
    return kwargs or (args[0] if len(args) == 1 and isinstance(args[0], torch.Tensor) else args)


def _detached(value: object) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def some_loss(output: object) -> torch.Tensor:
    """Make a loss where nobody has named one: the model's own, or the sum of all that it gives."""
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.numel() == 1 and own.requires_grad:
        return own
    return torch.stack([tensor.float().sum() for tensor in tensors_of(output) if tensor.requires_grad]).sum()


def autocast_of(device: torch.device) -> Callable[[], Any]:
    """Note the autocast that is on now, and give what opens the same one later."""
    is_on, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=is_on)


def is_alone() -> bool:
    """Say whether this process trains alone, and not as one rank of several."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def groups_of(model: nn.Module) -> list[Any]:
    """List the groups of ranks that hold parts of a model, or train copies of it together.

    There is one for each axis of the meshes that its parameters lie on, and that of each `DistributedDataParallel`.
    Every rank of them has to ask.
    """
    meshes = dict.fromkeys(parameter.device_mesh for parameter in model.parameters() if is_distributed(parameter))
    found = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    found += [module.process_group for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return list({tuple(dist.get_process_group_ranks(group)): group for group in found}.values())


def check_alone(what: str) -> None:
    """Refuse what one rank would do while the others go on.

    Raises:
        StateError: there are others.
    """
    if not is_alone():
        raise StateError(
            f"{what} is for a process that trains alone: "
            "the other ranks would wait for this one in their next collective.",
            expected="one rank",
            got=f"{dist.get_world_size()} of them",
            do="Plan for the longest batch on all ranks: plan_memory, or largest.",
        )


def is_first_forward() -> bool:
    """Say whether this is the forward of a step: not a region's that runs again, and not an evaluation."""
    return torch.is_grad_enabled() and not is_replaying()


class PatchedForward:
    """A model whose forward asks `handler(original, args, kwargs)`; `remove` undoes it.

    It is an attribute of the instance: hooks of the model are called once, around all that the handler does.
    """

    def __init__(self, model: nn.Module, handler: Callable[..., Any]) -> None:
        self._model = weakref.ref(model)
        self._before = model.__dict__.get("forward")
        model.forward = _Forward(model, self._before, handler)

    def remove(self) -> None:
        model = self._model()
        if model is not None and isinstance(model.__dict__.get("forward"), _Forward):
            del model.forward
            if self._before is not None:
                model.forward = self._before


class _Forward:
    """The forward of a `PatchedForward`.

    It is not a closure, so that a copy of the model can be refused: it would run the forward of the original.
    """

    def __init__(self, model: nn.Module, before: object, handler: Callable[..., Any]) -> None:
        self._model = weakref.ref(model)
        self._before = before
        self._handler = handler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        original = self._before or functools.partial(type(model).forward, model)
        return self._handler(original, args, kwargs)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise StateError(
            'A model cannot be copied or saved whole while a plan with on_oom="replan", '
            "or one that `run` was called on, is applied.",
            do="Call `plan.remove(model)` first, or save `model.state_dict()`.",
        )


def call(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch: a tensor, a tuple of arguments, a dict of keywords, or both."""
    if isinstance(batch, Arguments):
        return model(*batch.args, **batch.kwargs)
    with telling_of_the_batch(batch, type(model).forward, "torch.as_tensor(array)"):
        if isinstance(batch, dict) or hasattr(batch, "keys"):
            return model(**batch)
        if isinstance(batch, (tuple, list)):
            return model(*batch)
        return model(batch)


def loss_of(output: object, loss_fn: LossFn | None) -> torch.Tensor:
    """Find the scalar that backward starts from.

    Raises:
        ValueError, TypeError: there is none; the message says what `loss_fn` should give.
    """
    if loss_fn is not None:
        loss = loss_fn(output)
    else:
        loss = getattr(output, "loss", None)
        if loss is None and isinstance(output, dict):
            loss = output.get("loss")
        if loss is None:
            loss = output
    if not isinstance(loss, torch.Tensor):
        raise ArgumentTypeError(
            "No loss was found in what the model gives.",
            expected="a scalar tensor",
            got=describe(loss),
            do="Give loss_fn, for example loss_fn=lambda out: out.logits.float().mean().",
        )
    if loss.numel() != 1 or not loss.requires_grad:
        raise ArgumentError(
            "The loss cannot be differentiated.",
            expected="one number that depends on a parameter",
            got=f"{describe(loss)}, requires_grad={loss.requires_grad}",
            do="Give a loss_fn that returns a scalar, and call it on a model in training.",
        )
    return loss


class KeptOutput:
    """What a model gave, as a training loop has it.

    In `out = model(batch)` it is there until the next forward has given another.

    Of the step before only the sizes are known; their memory is taken anew, so that each step stands for itself and an
    allocator's meter sees it go.

    Attributes:
        sizes: of what the output has for itself; None before a step was seen
    """

    def __init__(self, model: nn.Module, batch: object, device: torch.device) -> None:
        self.sizes: list[int] | None = None
        self._device = device
        held = (*model.parameters(), *model.buffers(), *tensors_of(batch))
        self._held = [weakref.ref(tensor) for tensor in held]
        self._earlier: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        unit = 1 if self._device.type == "cpu" else 512  # what an accelerator's allocator hands out
        return sum(-(-size // unit) * unit for size in self.sizes or ())

    def begin(self) -> None:
        """Begin a step: the output of the one before is there."""
        self._earlier = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in self.sizes or ()]

    def replace(self, output: Any) -> None:
        """Take what forward has given now in place of the output before."""
        self._earlier.clear()
        if self.sizes is None:
            held = {_storage_of(tensor) for ref in self._held if (tensor := ref()) is not None}
            own = leaves(output) if _is_tree(output) else leaves(getattr(output, "__dict__", ()))
            found = {_storage_of(leaf): leaf for leaf in own if isinstance(leaf, torch.Tensor)}
            self.sizes = [
                local_tensor(tensor).untyped_storage().nbytes()
                for key, tensor in found.items()
                if key is not None and key not in held and tensor.device == self._device
            ]


def _is_tree(output: object) -> bool:
    return isinstance(output, torch.Tensor) or next(leaves(output), None) is not output


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return local_tensor(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a sparse one has none
        return None


def run_step(
    model: nn.Module, batch: object, loss_fn: LossFn | None, kept: KeptOutput, meter: Any = None, *, keeps: bool = False
) -> float:
    """Run one forward and backward, and give the loss.

    "start", "turn" and "end" are marked where a meter is given, and the output is kept as long as `keeps` says.

    Under the caller's autocast each forward casts its weights anew, and lets go of them at its end, as in a training
    loop that has its own around it.
    """
    mark: Callable[[str], None] = (lambda name: None) if meter is None else meter.mark
    torch.clear_autocast_cache()
    if keeps:
        kept.begin()
    mark("start")
    try:
        output = call(model, batch)
        kept.replace(output)
        loss = loss_of(output, loss_fn)
        if not keeps:
            output = None
    finally:
        torch.clear_autocast_cache()
    mark("turn")
    loss.backward()
    number = float(loss.detach())  # not before: on an accelerator it waits for all that was launched
    del output
    mark("end")
    return number


def tensors_of(batch: object) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
