"""Swapping on the devices that are here: the CPU with files, and CUDA with pinned memory. One text for both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.core.swap import engines
from hyper_parallel.core.swap.config import configure_swap
from support.swapping_state import check_nothing_left as check_nothing_left

KINDS = ["cpu", "cuda"]


class Swapping:
    """A device, small limits, and the numbers of what was moved since it was made."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.directory = directory
        self._before = engines.total_stats()

    @contextlib.contextmanager
    def configured(self, **options: Any) -> Iterator[None]:
        options.setdefault("min_bytes", 1)
        options.setdefault("window_bytes", "64KiB")
        options.setdefault("prefetch_bytes", "256KiB")
        if self.kind == "cpu":
            options.setdefault("disk_dir", self.directory)
        with configure_swap(**options):
            yield

    @property
    def offloaded_bytes(self) -> int:
        return engines.total_stats().offloaded_bytes - self._before.offloaded_bytes

    @property
    def loaded_bytes(self) -> int:
        return engines.total_stats().loaded_bytes - self._before.loaded_bytes

    def kept(self, reason: str) -> int:
        return engines.total_stats().kept[reason] - self._before.kept[reason]

    def randn(self, *size: int, requires_grad: bool = False, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*size, generator=generator).to(self.kind).requires_grad_(requires_grad)


def gradients(loss: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of `loss(*inputs)`, on fresh leaves."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    loss(*leaves).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]
