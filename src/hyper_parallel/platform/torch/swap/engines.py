"""Which engine swaps a tensor of which device."""

from __future__ import annotations

import os
from typing import Any

import torch

from hyper_parallel.core.swap import engines
from hyper_parallel.core.swap.config import current_config
from hyper_parallel.platform.torch.swap.device import (
    AcceleratorDevice,
    CpuDevice,
    PinnedSlab,
    memory_of,
)


def engine_of(device: torch.device) -> tuple[Any, int] | None:
    """Return the device's engine and the smallest storage worth a copy; None where nothing can be swapped."""
    if device.type == "cpu":
        return engines.disk_engine(CpuDevice, _host_bytes())
    if not hasattr(getattr(torch, device.type, None), "Stream"):
        return None  # the meta device, and accelerators without streams of their own
    return engines.host_engine(
        str(device),
        lambda: AcceleratorDevice(device),
        lambda num_bytes: PinnedSlab(num_bytes, device),
        PinnedSlab.free,
        memory_of,
        _device_bytes(device),
    )


def engine_in_use(device: torch.device) -> Any:
    """Return the device's engine, if something was swapped there before."""
    directory = current_config().disk_dir
    managed = engines.all_engines().get(f"cpu, {directory}" if device.type == "cpu" else str(device))
    return None if managed is None else managed.engine


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_bytes(device: torch.device) -> int:
    return int(getattr(torch, device.type).get_device_properties(device).total_memory)
