"""What a step may change of a model beside gradients, noted before it and put back.

Python's own state and generators are noted whole, and buffers are copied. Of all other tensors, the weights first of
all, a copy would be too much: an op that writes one copies it just before, while `_Watch` is on. Steps begin alike, so
that one step shows what all of them write. What writes past the ops (NumPy, a kernel of one's own) is found by sums
over the bytes.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel._base.errors import ArgumentError, StateError
from hyper_parallel.core.regions.python_state import PythonState, check_no_iterators, is_iterator
from hyper_parallel.platform.torch.regions.attributes import TORCH
from hyper_parallel.platform.torch.regions.compiled_code import is_compiled
from hyper_parallel.platform.torch.regions.local_parts import local_tensor
from hyper_parallel.platform.trees import leaves

_SMALL_BYTES = 1 << 16  # for a step that may be repeated, so small a tensor is copied in any case
_REACH = 3  # objects in objects of the user's that are noted
_FRAMEWORK = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "hyper_parallel",
)  # whose modules keep state of their own
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and "hooks" in name)


class ModelState:
    """A model between steps, and what its steps lead to beside it.

    `put_back` can be called after each of several steps.

    Args:
        others: what belongs to a step as well: the loss function.
        batch: what is in it is put back, too.
        written: names of parameters that a forward is known to write.
        is_for_planning: its last step is followed by `end`; without it, for a step that may have to be repeated.

    Raises:
        ArgumentError (a ValueError): something of it cannot be put back; it is named.

    Attributes:
        is_watched: whether a step has shown what steps write
        written: names of the parameters that it has written
    """

    written: Sequence[str] = ()

    def __init__(
        self,
        model: nn.Module,
        *others: Any,
        batch: object = None,
        written: Iterable[str] = (),
        is_for_planning: bool = False,
    ) -> None:
        modules = [module for module in model.modules() if not type(module).__module__.startswith(_FRAMEWORK)]
        _check_initialized(model)
        hooks = [hook for module in modules for name in _HOOKS for hook in getattr(module, name, {}).values()]
        given = () if is_iterator(batch) else (batch,)  # the model says that it takes none
        self._python = PythonState(modules, TORCH, holds=True, values=[*hooks, *others, *given], reach=_REACH)
        names = {id(module): name for name, module in model.named_modules()}
        check_no_iterators(self._python, {id(batch): "batch", **names})
        named, buffers = dict(model.named_parameters()), list(model.buffers())  # a walk of all modules each
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._random = RandomStates((*named.values(), *buffers))
        parameters = {name: _Tensor(parameter, name) for name, parameter in named.items()}
        known = {id(tensor) for tensor in (*named.values(), *buffers)}
        found = {
            id(tensor): tensor for tensor in (*self._python.tensors, *leaves(batch)) if isinstance(tensor, torch.Tensor)
        }
        self._tensors = [
            *parameters.values(),
            *(_Tensor(tensor, "a tensor that the model has") for key, tensor in found.items() if key not in known),
        ]
        self.is_watched = not is_for_planning
        self._shows_ops = not any(map(is_compiled, model.modules()))  # compiled code shows none
        for name in parameters if is_for_planning and not self._shows_ops else written:
            parameters[name].copy()
        if is_for_planning:
            self._parameters = list(parameters.values())
            self._sums = _sums(self._parameters)
            self._lists = [(entries, list(entries.items())) for module in modules for entries in _lists(module)]
        else:  # nothing has shown which of the others are written
            for noted in self._tensors:
                noted.copy_small()

    @contextlib.contextmanager
    def next_step(self) -> Iterator[None]:
        """Open a block for a step: in the first that comes to its end, what ops write is copied before."""
        if self.is_watched:
            yield
            return
        with _Watch(self._tensors) if self._shows_ops else contextlib.nullcontext():
            yield
        self.is_watched = True
        self.written = [
            noted.name for noted in self._parameters if noted.is_copied and (self._shows_ops or noted.is_other())
        ]

    def tensors(self) -> list[torch.Tensor]:
        """List all that is not copied beforehand."""
        return [noted.tensor for noted in self._tensors]

    def check_unwritten(self) -> None:
        """Raise `StateError` if a tensor was written and not copied before, as far as its version says."""
        for noted in self._tensors:
            if noted.is_changed():
                raise StateError(
                    "Memory ran out after parameters were changed, so that the step cannot be repeated."
                    if isinstance(noted.tensor, nn.Parameter)
                    else "Memory ran out after the step had changed one of its inputs in place, "
                    "so that it cannot be repeated.",
                    expected="a function that runs forward and backward",
                    got=f"one that changes {noted.name}",
                    do="Step the optimizer after `plan.run`; plan with a batch as large as this one.",
                )

    def put_back(self) -> None:
        self._python.put_back()
        for noted in self._tensors:
            noted.put_back()
        for buffer, before in self._buffers:
            _replace_values(buffer, before)
        self._random.restore()

    def end(self) -> None:
        """Put everything back after the last step, when all that planning has put on the model is off again.

        Raises:
            StateError: something could not be put back.
        """
        self.put_back()
        for entries, items in self._lists:
            if list(entries.items()) != items:
                entries.clear()
                entries.update(items)
        now = _sums(self._parameters)
        changed = [
            noted for noted, before, after in zip(self._parameters, self._sums, now, strict=True) if before != after
        ]
        if changed:
            raise StateError(
                "A step changed what planning cannot put back: "
                "no op shows that it was written (NumPy, or a kernel of one's own, did).",
                expected="values as before",
                got=f"others in {changed[0].name}" + (f" and {len(changed) - 1} more" if len(changed) > 1 else ""),
                do="Load the values again, and plan with the writing switched off, or done by PyTorch's ops.",
            )


class _Tensor:
    """One tensor that is not copied unless it is written."""

    __slots__ = ("_copy", "_memory", "_requires_grad", "_version", "_was_leaf", "name", "tensor")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.tensor = tensor
        self.name = name
        self._memory = local_tensor(tensor).data  # the same memory, with a version of its own
        self._requires_grad = tensor.requires_grad
        self._was_leaf = tensor.is_leaf
        self._version = _version(tensor)
        self._copy: torch.Tensor | None = None

    @property
    def is_copied(self) -> bool:
        return self._copy is not None

    @property
    def memory(self) -> torch.Tensor:
        return self._memory

    def copy_small(self) -> None:
        if not isinstance(self.tensor, nn.Parameter) and self._memory.nbytes <= _SMALL_BYTES and self._copy is None:
            self._copy = self._memory.clone()

    def copy(self) -> None:
        if self._copy is None:
            memory = self._memory
            self._copy = memory.clone() if memory.device.type == "cpu" else memory.to("cpu")

    def is_changed(self) -> bool:
        return self._copy is None and _version(self.tensor) != self._version

    def is_other(self) -> bool:
        """Say whether it has other values than its copy."""
        return self._copy is not None and not torch.equal(self._memory.to("cpu"), self._copy)

    def put_back(self) -> None:
        tensor, memory = self.tensor, self._memory
        now = local_tensor(tensor)
        if now is tensor and _place(now) != _place(memory):
            tensor.data = memory
        if self._was_leaf and not tensor.is_leaf:
            tensor.detach_()
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if self._copy is not None:
            _replace_values(memory, self._copy)


class _Watch(TorchDispatchMode):
    """Copies what an op writes of these tensors before it does."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[_Tensor]) -> None:
        super().__init__()
        self._by_storage: dict[int, list[_Tensor]] = {}
        for noted in tensors:
            if (key := _storage(noted.memory)) is not None:
                self._by_storage.setdefault(key, []).append(noted)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch would put a wrapper around the handler, which loads its compiler at the first op of a step. Frames of
        # that stay for the collector, and with them the batch.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for place, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[place] if place < len(args) else kwargs.get(argument.name)
                    for tensor in leaves(value):
                        if isinstance(tensor, torch.Tensor) and (key := _storage(local_tensor(tensor))) is not None:
                            for noted in self._by_storage.get(key, ()):
                                noted.copy()
        return func(*args, **kwargs)


class RandomStates:
    """The global generators that a step may draw from. Those that modules have are part of Python's state."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        devices = {tensor.device for tensor in tensors}
        self._devices = {
            device: getattr(torch, device.type).get_rng_state(device) for device in devices if device.type != "cpu"
        }
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else (numpy, numpy.random.get_state())

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            getattr(torch, device.type).set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None:
            numpy, state = self._numpy
            numpy.random.set_state(state)


def _check_initialized(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedTensorMixin):
            raise ArgumentError(
                "A lazy module has no parameters yet, and planning would make them.",
                expected="parameters with values",
                got="an uninitialized one",
                where=name,
                do="Run the model once before planning: `model(batch)`.",
            )


def _lists(module: nn.Module) -> list[dict[Any, Any]]:
    """List the hooks and modules of a module.

    When planning has ended nothing of planning's may be among them.
    """
    return [module._modules, *(hooks for name in _HOOKS if isinstance(hooks := getattr(module, name, None), dict))]


def _replace_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(values)


def _version(tensor: torch.Tensor) -> int:
    local = local_tensor(tensor)
    return 0 if local.is_inference() else local._version


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse, or another kind without memory of its own
        return None


def _place(tensor: torch.Tensor) -> Any:
    if tensor.layout != torch.strided:
        return tensor.layout
    return _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _sums(tensors: Iterable[_Tensor]) -> list[int]:
    """Sum up the bytes of each tensor, to one number: no memory is taken for it."""
    sums = [_sum(noted.memory) for noted in tensors]
    devices: dict[Any, list[int]] = {}
    for index, total in enumerate(sums):
        devices.setdefault(total.device, []).append(index)
    result = [0] * len(sums)
    for indices in devices.values():  # an accelerator is waited for once
        numbers = torch.stack([sums[index] for index in indices]).tolist()
        for index, number in zip(indices, numbers, strict=True):
            result[index] = number
    return result


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    try:
        parts = tensor.detach().view(-1).view(torch.uint8)
    except RuntimeError:  # sparse, or not in one piece
        return torch.zeros((), dtype=torch.int64)
    begin = -parts.storage_offset() % 8
    end = begin + max(parts.numel() - begin, 0) // 8 * 8
    # Words as large as the sum: others would be copied to be added.
    return parts[begin:end].view(torch.int64).sum() + parts[:begin].sum() + parts[end:].sum()
