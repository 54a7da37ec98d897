"""Streams, events, contexts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from hyper_parallel._base.errors import UnsupportedDeviceError
from hyper_parallel.platform.host_streams import HostEvent, HostStream, current_host_stream, host_stream_context
from hyper_parallel.platform.torch.devices import Devices


class Execution:
    def new_stream(self) -> Any:
        return HostStream() if Devices.device_type() == "cpu" else Devices.get_device_handle().Stream()

    def get_current_stream(self) -> Any:
        return current_host_stream() if Devices.device_type() == "cpu" else Devices.get_device_handle().current_stream()

    def new_event(self) -> Any:
        return HostEvent() if Devices.device_type() == "cpu" else Devices.get_device_handle().Event()

    def get_stream_context(self) -> Any:
        return _use_stream

    @staticmethod
    def no_grad() -> AbstractContextManager[None]:
        return torch.no_grad()

    @staticmethod
    def profiler_record(name: str) -> Any:
        return torch.profiler.record_function(name)

    @staticmethod
    def get_symmetric_memory_handler() -> Any:
        """Return PyTorch's symmetric memory (`torch.distributed._symmetric_memory`), on CUDA."""
        kind = Devices.device_type()
        if kind != "cuda":
            raise UnsupportedDeviceError(
                "Symmetric memory needs memory that every device of a node can address.",
                expected="CUDA devices",
                got=kind,
                do="Use the collectives of the platform on this device.",
            )
        from torch.distributed import _symmetric_memory

        return _symmetric_memory


def _use_stream(stream: Any) -> AbstractContextManager[Any]:
    if Devices.device_type() == "cpu":
        return host_stream_context(stream)
    return Devices.get_device_handle().stream(stream)
