"""How much memory a device has left."""

from __future__ import annotations

import mindspore

from hyper_parallel.core.swap.host_memory import read_host_memory
from hyper_parallel.platform.mindspore.planner.meters import is_cpu


def free_bytes(device: str) -> int:
    """Count what can still be allocated: free on the device, and held by the framework's allocator without being
    used.
    """
    if is_cpu(device):
        memory = read_host_memory()
        limits = [memory.available_bytes] + ([] if memory.limit_bytes is None else [memory.limit_bytes])
        return min(limits)
    # Never run: no such device was at hand.
    total = int(mindspore.hal.get_device_properties(0).total_memory)
    return total - int(mindspore.runtime.memory_allocated())
