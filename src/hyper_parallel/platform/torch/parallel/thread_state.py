"""What PyTorch keeps per thread: modes, gradient mode, autocast, device, streams, hooks on saved tensors.

Not here, since they are the process's: the default dtype, deterministic algorithms, precision of matrix products, and
generators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.overrides
import torch.utils._python_dispatch as dispatch

from hyper_parallel.core.parallel.pipeline.thread_state import FrameworkState
from hyper_parallel.platform.interface import PlatformType
from hyper_parallel.platform.torch.devices import Devices
from hyper_parallel.platform.torch.regions.own_generators import own_generators


class TorchThreadState(FrameworkState):
    platform_type = PlatformType.PYTORCH
    one_thread_at_a_time = False

    def __init__(self) -> None:
        kind = Devices.device_type()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [(name, *_autocast_of(name)) for name in dict.fromkeys(("cpu", kind))]
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._function_modes = torch.overrides._get_current_function_mode_stack()  # the default device is one of them
        self._dispatch_modes = dispatch._get_current_dispatch_mode_stack()
        self._default_device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # only the top ones ever run
        self._index, self._streams = _streams_of(kind)

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._index is not None:
                # Nothing to put back: every job of a thread sets its own.
                _set_streams(self._streams, self._index)
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, is_enabled, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=self._autocast_cache)
                )
            if self._hooks is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)
                stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            self._enter_modes(stack)
            yield

    def _enter_modes(self, stack: ExitStack) -> None:
        """Push the modes; do not enter them: entering a mode of a user's again may count, print or clear something."""
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = self._default_device
        stack.callback(setattr, torch._GLOBAL_DEVICE_CONTEXT, "device_context", default)
        for mode in self._function_modes:
            torch.overrides._push_mode(mode)
            stack.callback(torch.overrides._pop_mode)
        for mode in self._dispatch_modes:
            dispatch._push_mode(mode)
            stack.callback(dispatch._pop_mode, getattr(mode, "_mode_key", None))

    @contextmanager
    def as_a_side(self, *, is_caller: bool) -> Iterator[None]:
        # On an accelerator autograd would run a backward in one thread per device, for all of the process: a hook that
        # waits there would hold up the backwards of others.
        with torch.autograd.set_multithreading_enabled(False), own_generators(are_kept=is_caller):
            yield

    def generators(self) -> None:
        return None  # each side has its own already


BACKEND = TorchThreadState


def _autocast_of(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _streams_of(kind: str) -> tuple[int | None, list[Any]]:
    """Return the current device, and the current stream of each device.

    None where the accelerator has not been used, so that this does not start it.
    """
    if kind == "cpu":
        return None, []
    handle = Devices.get_device_handle()
    if not handle.is_initialized():
        return None, []
    return handle.current_device(), [handle.current_stream(index) for index in range(handle.device_count())]


def _set_streams(streams: list[Any], index: int) -> None:
    handle = Devices.get_device_handle()
    for stream in streams:
        handle.set_stream(stream)
    handle.set_device(index)
