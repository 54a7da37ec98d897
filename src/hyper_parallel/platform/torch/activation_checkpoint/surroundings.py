"""What surrounds a region's function besides its arguments, and must be the same when it runs again: autocast, the default device."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_thread = threading.local()


def is_replaying() -> bool:
    """Whether this thread is running a region's function again: inner regions and swap wrappers are plain calls then."""
    return getattr(_thread, "replays", 0) > 0


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    _thread.replays = getattr(_thread, "replays", 0) + 1
    try:
        yield
    finally:
        _thread.replays -= 1


class Surroundings:
    """The state of the thread that calls a region."""

    def __init__(self) -> None:
        self._autocast = autocast_now()
        self._has_autocast_cache = torch.is_autocast_cache_enabled()
        # What compiles the frames of a model that is compiled as a whole: its parts would run uncompiled in backward.
        self._compiler = _compiler()
        self._device = next(
            (mode.device for mode in reversed(_get_current_function_mode_stack()) if isinstance(mode, DeviceContext)),
            None,
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if any(enabled for _, enabled, _ in self._autocast):
                torch.clear_autocast_cache()  # weights that are cast in this run are cast as in the first one
            for device_type, enabled, dtype in self._autocast:
                # Also where it was off: backward may be called under autocast.
                if enabled or torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, dtype, enabled, self._has_autocast_cache))
            if self._device is not None:
                stack.enter_context(torch.device(self._device))
            if self._compiler is not None:
                stack.enter_context(_compiling(self._compiler))
            yield


def autocast_now() -> list[tuple[str, bool, torch.dtype]]:
    """For each type of device: whether autocast is on, and its dtype."""
    return [
        (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        for device_type in _device_types()
    ]


def _compiler() -> Any:
    if "torch._dynamo" not in sys.modules:
        return None
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    return callback if callable(callback) else None


@contextlib.contextmanager
def _compiling(callback: Any) -> Iterator[None]:
    before = torch._C._dynamo.eval_frame.set_eval_frame(callback)
    try:
        yield
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(before)


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
