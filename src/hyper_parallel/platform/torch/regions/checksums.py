"""Checksums of tensors: two that differ in a bit, or in the order of their elements, have different ones."""

from __future__ import annotations

import torch

from hyper_parallel.platform.torch.regions.local_parts import local_tensor
from hyper_parallel.platform.torch.regions.placeholders import View

_CHUNK = 1 << 20  # elements at a time: a checksum should not need the memory of what it checks
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Two numbers on the tensor's device: the sum of its bit patterns, and the sum weighted by position, modulo 2**64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().contiguous().reshape(-1)
    bits = bits.view(_INTEGERS[bits.element_size()]) if bits.dtype is not torch.bool else bits.view(torch.uint8)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for begin in range(0, bits.numel(), _CHUNK):
        chunk = bits[begin : begin + _CHUNK].to(torch.int64)
        weights = torch.arange(begin + 1, begin + 1 + chunk.numel(), device=tensor.device)
        total[0] += chunk.sum()
        total[1] += (chunk * weights).sum()
    return total


def storage_checksum(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """That of all bytes of a tensor's storage, which has so many."""
    whole = View(torch.uint8, torch.Size([num_bytes]), (1,), 0, False, False)
    return checksum(whole.on(local_tensor(tensor).untyped_storage(), tensor.device))


def find_difference(expected: list[torch.Tensor], got: list[torch.Tensor]) -> int | None:
    """The first place where two lists of checksums differ. Waits for the device once per device."""
    devices = {each.device for each in expected}
    different = []
    for device in devices:
        places = [i for i, each in enumerate(expected) if each.device == device]
        same = (torch.stack([expected[i] for i in places]) == torch.stack([got[i] for i in places])).all(1).tolist()
        different += [place for place, is_same in zip(places, same, strict=True) if not is_same]
    return min(different, default=None)
