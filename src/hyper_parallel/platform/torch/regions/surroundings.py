"""What surrounds a region's function besides its arguments, and must be the same when it runs again: autocast, the default device."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from hyper_parallel._base.errors import StateError
from hyper_parallel._base.put_back import PutBack
from hyper_parallel.platform.torch.regions.local_parts import storage_key
from hyper_parallel.platform.torch.regions.module_paths import has_sharded_modules

_thread = threading.local()
_NOTHING = contextlib.nullcontext()
_call = type(torch.autocast_increment_nesting).__call__
Autocast = list[tuple[str, bool, torch.dtype]]  # for each type of device: whether it is on, and its dtype


def is_replaying() -> bool:
    """Whether this thread is running a region's function again: inner regions and swap wrappers are plain calls then."""
    return getattr(_thread, "replays", 0) > 0


class replaying:  # noqa: N801 - used like a function
    """A block in which this thread runs a region's function again."""

    __slots__ = ()

    def __enter__(self) -> None:
        _thread.replays = getattr(_thread, "replays", 0) + 1

    def __exit__(self, *_error: object) -> None:
        _thread.replays -= 1


def num_replays() -> int:
    """How many such blocks this thread is in."""
    return getattr(_thread, "replays", 0)


def set_num_replays(number: int) -> None:
    """Where an interrupt may have hit a block as it began or ended."""
    _thread.replays = number


def num_begun() -> int:
    """How many regions and swapping blocks this thread has begun: whether one is inside of another."""
    return getattr(_thread, "begun", 0)


def check_surroundings(what: str) -> None:
    """Called where a region, or a block that swaps, begins.

    Refuse what would fail later, in words that lead nowhere, or give a graph that swaps and recomputes once and never again.
    """
    _thread.begun = getattr(_thread, "begun", 0) + 1
    # `torch.func.grad` and its kin have no hooks for what they save.
    stack = torch._C._functorch.get_interpreter_stack()
    if stack and any(each.key() == torch._C._functorch.TransformType.Grad for each in stack):
        raise StateError(
            f"{what} cannot run inside of a gradient transform.",
            expected="torch.autograd.grad or backward",
            got="torch.func.grad, vjp, jacrev or hessian around it",
            do="Take the gradient by torch.autograd.grad (torch.func.functional_call works with it), or transform the plain module.",
        )
    # A graph holds kernels. What is decided in Python (random states, which block of host memory a copy goes to) would be that of the capture.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise StateError(
            f"{what} cannot be captured in a CUDA graph.",
            expected="a call outside of torch.cuda.graph and make_graphed_callables",
            got="a stream that is being captured",
            do="Capture the module inside the wrapper (torch.cuda.make_graphed_callables), or capture the model without it.",
        )


def in_words(what: str, error: BaseException | None, where: str) -> StateError | None:
    """An error for what PyTorch cannot do under saved-tensor hooks and dispatch modes, and says in words of its own depth; None for all others."""
    text = str(error) if isinstance(error, RuntimeError) and not isinstance(error, StateError) else ""
    if "saved tensor hooks" in text:
        return StateError(
            f"{what} cannot hold a gradient transform.",
            expected="torch.autograd.grad inside, or no gradient there",
            got="torch.func.grad, vjp, jacrev or hessian called inside",
            where=where,
            do="Leave this block out (do not wrap it), or take that gradient by torch.autograd.grad with create_graph=True.",
        )
    if "NestedTensorImpl" in text:
        return StateError(
            f"{what} cannot hold nested tensors of this layout.",
            expected="nested tensors with layout=torch.jagged",
            got="layout=torch.strided",
            where=where,
            do="Make them with layout=torch.jagged, or leave this block out (do not wrap it).",
        )
    return None


def check_not_traced(where: str) -> None:
    """Refuse a backward that is traced: what comes back from elsewhere would be constants of the graph."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise StateError(
            "A backward through a region or swapped tensors cannot be traced.",
            expected="a backward that runs",
            got="make_fx, or another tracer, around it",
            where=where,
            do="Trace the forward alone, or trace the model without wrappers.",
        )


def transform_now() -> str | None:
    """What changes the meaning of ops around a region, if anything does."""
    if torch._C._functorch.get_interpreter_stack():
        return "torch.func.vmap"
    return "forward-mode AD" if torch.autograd.forward_ad._current_level >= 0 else None


class Surroundings:
    """The state of the thread that calls a region.

    Attributes:
        transform: "torch.func.vmap" or "forward-mode AD" around the region, if any.
    """

    def __init__(self) -> None:
        self.transform = transform_now()
        self._autocast = autocast_now()
        self._has_autocast_cache = torch.is_autocast_cache_enabled()
        # What compiles the frames of a model that is compiled as a whole: its parts would run uncompiled in backward.
        self._compiler = _compiler()
        self._device = _default_device() if torch._C._len_torch_function_stack() > 0 else None

    def again(self) -> contextlib.AbstractContextManager[None]:
        """A block in which it is like that again."""
        if self._device is None and self._compiler is None:
            for device_type, enabled, _ in self._autocast:
                if enabled or torch.is_autocast_enabled(device_type):
                    return self._set_again()
            return _NOTHING
        return self._set_again()

    def _set_again(self) -> PutBack:
        return _SurroundingsAgain(self._autocast, self._has_autocast_cache, self._device, self._compiler)

    def is_ordinary(self) -> bool:
        """Whether ops mean here and now what they say, and meant it there."""
        if self.transform is not None or self._compiler is not None:
            return False
        return not any(map(torch.is_autocast_enabled, _device_types()))

    @property
    def is_compiling(self) -> bool:
        """Whether the region is part of a model that is compiled as a whole."""
        return self._compiler is not None


class _SurroundingsAgain(PutBack):
    def __init__(self, autocast: Autocast, has_cache: bool, device: object, compiler: object) -> None:
        self._then = autocast, has_cache
        self._device = None if device is None else DeviceContext(device)
        self._compiler = compiler
        self._now = autocast_now(), torch.is_autocast_cache_enabled()
        self._depth = _autocast_depth()
        self._compiler_now = _eval_frame_callback()

    def change(self) -> None:
        autocast, _ = self._then
        if any(enabled for _, enabled, _ in autocast):
            torch.clear_autocast_cache()  # weights that are cast in this run are cast as in the first one
        torch.autocast_increment_nesting()
        _set_autocast(*self._then)  # also where it was off: backward may be called under autocast
        if self._device is not None:
            self._device.__enter__()
        if self._compiler is not None:
            _set_eval_frame(self._compiler)

    def put_back(self) -> None:
        if self._compiler is not None:
            _set_eval_frame(self._compiler_now)
        if self._device is not None and any(mode is self._device for mode in _get_current_function_mode_stack()):
            self._device.__exit__(None, None, None)
        _set_autocast(*self._now)
        while _autocast_depth() > self._depth:
            torch.autocast_decrement_nesting()
        # Under the autocast of a caller the cache outlives this run, and what was cast here may be a placeholder, or have its gradient here.
        torch.clear_autocast_cache()


def _set_autocast(states: Autocast, has_cache: bool) -> None:
    for device_type, enabled, dtype in states:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(has_cache)


def _autocast_depth() -> int:
    """PyTorch tells only those that change it. In one call, so that no interrupt comes between the two."""
    return int(list(map(_call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)))[1])


def _default_device() -> Any:
    stack = _get_current_function_mode_stack()
    return next((mode.device for mode in reversed(stack) if isinstance(mode, DeviceContext)), None)


def autocast_now() -> Autocast:
    """For each type of device: whether autocast is on, and its dtype."""
    return [
        (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        for device_type in _device_types()
    ]


class ParametersOfModule:
    """What a module and those in it have as parameters and buffers when a region calls it.

    `torch.func.functional_call` gives a module others for the time of a call, `load_state_dict(assign=True)` for good, and a forward may put another tensor in
    place of a buffer: the second run gets those of the first, and what it puts there itself is gone after it. Sharded data parallel exchanges its own itself.
    """

    def __init__(self, module: nn.Module | None, modules: Iterable[nn.Module]) -> None:
        # Of each: who has it, its name, the tensor, and whether it requires a gradient. No tuples: these lists live until backward.
        self._had: tuple[list[Any], ...] = ([], [], [], [])
        self.are_lazy = False  # whether this call makes some of them: the first one of `nn.LazyLinear` and its kin
        holders, names, tensors, require_grad = self._had
        if module is None or has_sharded_modules():
            return
        for each in modules:
            if not isinstance(each._parameters, dict):  # TorchScript has them elsewhere
                continue
            for holder in (each._parameters, each._buffers) if each._buffers else (each._parameters,):
                for name, tensor in holder.items():
                    if tensor is None:
                        continue
                    holders.append(holder)
                    names.append(name)
                    if type(tensor) is not nn.Parameter and is_lazy(tensor):
                        self.are_lazy = True
                    # Of the result of something the graph is not ours to keep.
                    tensors.append(tensor if tensor.grad_fn is None else tensor.detach())
                    require_grad.append(tensor.requires_grad)

    def require_grad(self) -> tuple[bool, ...]:
        """Of each."""
        return tuple(self._had[3])

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return self._had[2]

    def by_storage(self) -> dict[int | None, torch.Tensor]:
        """All of them, by the address of their storage."""
        return {storage_key(tensor): tensor for tensor in self.tensors()}

    def again(self) -> PutBack:
        """A block in which they are there again."""
        return _ParametersAgain(self._had)


class _ParametersAgain(PutBack):
    def __init__(self, had: tuple[list[Any], ...]) -> None:
        self._had = had
        self._before = [holder.get(name) for holder, name in zip(*had[:2], strict=True)]

    def change(self) -> None:
        for now, holder, name, tensor, requires_grad in zip(self._before, *self._had, strict=True):
            # Frozen since, or no longer: autograd would save something else.
            is_same = tensor.requires_grad == requires_grad
            if now is not tensor or not is_same:
                holder[name] = tensor if is_same else tensor.detach().requires_grad_(requires_grad)

    def put_back(self) -> None:
        for now, holder, name in zip(self._before, *self._had[:2], strict=True):
            if holder.get(name) is not now:
                holder[name] = now


def call_uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of the user's that is none of the model's: a policy that is compiled would be compiled for every op."""
    if _compiler() is None:
        return function(*args, **kwargs)
    with _compiling(None):
        return function(*args, **kwargs)


def _compiler() -> Any:
    callback = _eval_frame_callback()
    return callback if callable(callback) else None


def _eval_frame_callback() -> Any:
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() if "torch._dynamo" in sys.modules else None


def _set_eval_frame(callback: object) -> Any:
    return torch._C._dynamo.eval_frame.set_eval_frame(callback)


@contextlib.contextmanager
def _compiling(callback: object) -> Iterator[None]:
    before = _set_eval_frame(callback)
    try:
        yield
    finally:
        _set_eval_frame(before)


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
