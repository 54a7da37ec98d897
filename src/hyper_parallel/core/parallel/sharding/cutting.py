"""Which part of a parameter each rank keeps, and where the parts lie in the one message that a unit sends.

Example: `cut((5, 3), 4)` cuts dim 0 into 2, 2, 1 and 0 rows. Each rank's part of the message has room for the largest,
6 elements, so that all ranks send the same number. Of the whole unit:

    rank 0: |weight rows 0, 1|bias 0|     rank 1: |weight rows 2, 3|bias 1|     ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hyper_parallel.core.dtensor.boxes import chunk_range

__all__ = ["Cut", "cut", "offsets"]


@dataclass(frozen=True)
class Cut:
    """A tensor of one shape, cut along one dim for a number of ranks; `dim` None: every rank keeps all of it."""

    shape: tuple[int, ...]
    dim: int | None
    num_ranks: int

    @cached_property
    def room(self) -> int:
        """Elements of the largest part: what each rank's part of a message has room for."""
        return math.prod(self.shape_of(0))

    def range_of(self, rank: int) -> tuple[int, int]:
        """Where the part of a rank begins along the dim, and its size."""
        if self.dim is None:
            raise ValueError("A tensor that every rank keeps whole has no ranges.")
        return chunk_range(self.shape[self.dim], self.num_ranks, rank)

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's part."""
        if self.dim is None:
            return self.shape
        size = self.range_of(rank)[1]
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def cut(shape: Sequence[int], num_ranks: int) -> Cut:
    """Choose the dim along which a parameter is cut: the first that is as long as there are ranks, else the longest.

    Chunks are of the rounded-up size, so the last ranks may get nothing of that one, too: 9 on 8 is 2, 2, 2, 2, 1.
    A tensor without dims, or with nothing in it, is kept whole by every rank.
    """
    shape = tuple(shape)
    if not shape or 0 in shape:
        return Cut(shape, None, num_ranks)
    fitting = [dim for dim, length in enumerate(shape) if length >= num_ranks]
    dim = fitting[0] if fitting else max(range(len(shape)), key=lambda at: shape[at])
    return Cut(shape, dim, num_ranks)


def offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where each of some neighbours begins, and where the last one ends: of 4, 2, 3 it is [0, 4, 6] and 9."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += size
    return starts, end
