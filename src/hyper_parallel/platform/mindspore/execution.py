"""Streams, events, contexts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mindspore.graph.api import _no_grad
from mindspore.profiler import mstx

from hyper_parallel._base.errors import ArgumentTypeError, UnsupportedDeviceError, describe
from hyper_parallel.platform.mindspore.devices import Devices


class Execution:
    def new_stream(self) -> Any:
        return Devices.get_device_handle().Stream()

    def get_current_stream(self) -> Any:
        return Devices.get_device_handle().current_stream()

    def new_event(self) -> Any:
        return Devices.get_device_handle().Event()

    def get_stream_context(self) -> Any:
        return Devices.get_device_handle().stream

    @staticmethod
    def no_grad() -> AbstractContextManager[None]:
        return _no_grad()

    @staticmethod
    def profiler_record(name: str) -> Any:
        """Name a range in Ascend's profiler; MindSpore's profiler of the CPU has no such ranges."""
        if not isinstance(name, str):
            raise ArgumentTypeError("A range of the profiler has a name.", expected="a str", got=describe(name))
        return _profiler_range(name)

    @staticmethod
    def get_symmetric_memory_handler() -> Any:
        raise UnsupportedDeviceError(
            "MindSpore has no symmetric memory.",
            expected="PyTorch on CUDA devices",
            got=f"MindSpore on {Devices.device_type()}",
            do="Use the collectives of the platform on this device.",
        )


@contextmanager
def _profiler_range(name: str) -> Iterator[None]:
    # A generator's context manager is a decorator too, with a fresh range per call.
    if Devices.device_type() == "cpu":
        yield
        return
    range_id = mstx.range_start(name, Devices.get_device_handle().current_stream())
    try:
        yield
    finally:
        mstx.range_end(range_id)
