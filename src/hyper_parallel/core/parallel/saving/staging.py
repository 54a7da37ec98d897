"""Copies of what a save in the background writes: training may change the tensors while it runs.

The memory is kept from save to save: as large as what this rank writes, and pinned where a device copies to it. Memory
that is new costs several times as long as the copy itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hyper_parallel.core.dtensor.boxes import Box
from hyper_parallel.core.parallel.saving.backend import SavingBackend
from hyper_parallel.core.parallel.saving.threads import for_each, num_threads
from hyper_parallel.platform.tensor_file import TensorSpec

__all__ = ["Source", "staged"]


@dataclass(frozen=True)
class Source:
    """A piece of a tensor that this rank writes: its name in the file, and its bytes when they are asked for."""

    spec: TensorSpec
    local: Any
    box: Box  # of the local tensor
    read: Callable[[], Any]


_ALIGNED = 64
_STRIPE_BYTES = 16 << 20
_arena: list[Any] = []


def staged(sources: Sequence[Source], backend: SavingBackend) -> list[Source]:
    """Copy all pieces, and return sources of the copies."""
    starts, end = [], 0
    for source in sources:
        starts.append(end)
        end += -(-source.spec.size_bytes // _ALIGNED) * _ALIGNED
    locals_ = [source.local for source in sources]
    if not _arena or _arena[0].size < end:
        _arena.clear()
        _arena.append(backend.host_memory(end, locals_))
    memory = _arena[0]
    backend.join_device(locals_)
    copies = []
    stripes: list[tuple[Any, Any]] = []
    for source, start in zip(sources, starts, strict=True):
        copy = memory[start : start + source.spec.size_bytes]
        copies.append(replace(source, local=None, read=partial(_same, copy)))
        if backend.launch_copy(source.local, source.box, copy):
            continue
        data = source.read()
        stripes += [
            (copy[at : at + _STRIPE_BYTES], data[at : at + _STRIPE_BYTES]) for at in range(0, copy.size, _STRIPE_BYTES)
        ]
        if len(stripes) >= 64:
            _copy(stripes)
            stripes.clear()
    _copy(stripes)
    backend.join_device(locals_)
    return copies


def _same(value: Any) -> Any:
    return value


def _copy(stripes: Sequence[tuple[Any, Any]]) -> None:
    def copy(stripe: tuple[Any, Any]) -> None:
        stripe[0][:] = stripe[1]

    is_small = sum(target.size for target, _ in stripes) < _STRIPE_BYTES
    for_each(stripes, copy, 1 if is_small else num_threads(), lambda: None)
