"""Which engine swaps a tensor of which device."""

from __future__ import annotations

import os
from typing import Any

import mindspore

from hyper_parallel.core.swap import engines
from hyper_parallel.platform.mindspore.swap.device import (
    AcceleratorDevice,
    CpuDevice,
    PinnedSlab,
    memory_of,
)


def engine_of(device: str) -> tuple[Any, int] | None:
    """Return the device's engine and the smallest storage worth a copy; None where nothing can be swapped."""
    if device.startswith("CPU"):
        return engines.disk_engine(CpuDevice, _host_bytes())
    if device == "meta":
        return None
    return engines.host_engine(device, _accelerator, PinnedSlab, PinnedSlab.free, memory_of, _device_bytes())


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_bytes() -> int:
    return int(mindspore.hal.get_device_properties(mindspore.get_current_device().device_id).total_memory)


def _accelerator() -> Any:
    return AcceleratorDevice()
