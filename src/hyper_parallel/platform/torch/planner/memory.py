"""How much memory a device has left."""

from __future__ import annotations

import torch

from hyper_parallel.core.swap.host_memory import read_host_memory


def free_bytes(device: torch.device) -> int:
    """Count what can still be allocated: free on the device, and held by the framework's allocator without being
    used.
    """
    if device.type == "cpu":
        memory = read_host_memory()
        limits = [memory.available_bytes] + ([] if memory.limit_bytes is None else [memory.limit_bytes])
        return min(limits)
    handle = getattr(torch, device.type)
    free, _ = handle.mem_get_info(device)
    return int(free + handle.memory_reserved(device) - handle.memory_allocated(device))
