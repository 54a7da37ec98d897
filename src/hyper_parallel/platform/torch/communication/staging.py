"""Sends and receives of tensors on an accelerator through gloo, which reads and writes host memory only.

gloo's collectives copy such tensors to the host by themselves. Its `send` and `recv` do not: the process ends with "Bad
address". So what is sent is copied to the host before, and what arrives is copied to the device when the handle is
waited for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class StagedWork:
    """A send or receive with its host memory, which gloo uses until the work is done."""

    __slots__ = ("host", "native")

    def __init__(self, native: Any, host: torch.Tensor) -> None:
        self.native = native
        self.host = host

    def wait(self) -> None:
        self.native.wait()

    def is_completed(self) -> bool:
        return bool(self.native.is_completed())


class Arrival:
    """The second half of a receive: from the host to the tensor that was given.

    Called once, when gloo has written the host memory. It makes the current stream copy, as every use of the tensor
    after it does.
    """

    def __init__(self, target: torch.Tensor, host: torch.Tensor) -> None:
        self._target = target
        self._host = host
        # hazard: what the caller's stream still does with the old values comes first, though another stream may be the
        # current one at the wait.
        self._before = torch.get_device_module(target.device).current_stream(target.device).record_event()

    def __call__(self) -> None:
        device = self._target.device
        torch.get_device_module(device).current_stream(device).wait_event(self._before)
        with torch.no_grad():
            # Pinned memory goes back to PyTorch's own allocator, which keeps it until this copy is done.
            self._target.copy_(self._host, non_blocking=True)


def launch_staged_send(tensor: torch.Tensor, dst: int, group: object, tag: int) -> StagedWork:
    """Wait until the values are on the host, which gloo sends from at once, and start sending."""
    host = _host_memory_for(tensor)
    host.copy_(tensor, non_blocking=True)
    torch.get_device_module(tensor.device).current_stream(tensor.device).synchronize()
    return StagedWork(dist.isend(host, dst, group=group, tag=tag), host)


def launch_staged_receive(target: torch.Tensor, src: int, group: object, tag: int) -> tuple[StagedWork, Arrival]:
    host = _host_memory_for(target)
    arrival = Arrival(target, host)
    return StagedWork(dist.irecv(host, src, group=group, tag=tag), host), arrival


def _host_memory_for(tensor: torch.Tensor) -> torch.Tensor:
    # Without pinned memory a copy blocks the host, and is right as well.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
