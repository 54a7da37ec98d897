"""This is the one place that says which box of the global tensor a rank holds; everything else asks here.

A dim of length L split by an axis of n ranks gives each a chunk of ceil(L / n), the last ones less or nothing: 5 on 4
is 2, 2, 1, 0, as PyTorch's `chunk`. Further axes split each chunk again in the same way. So the largest box is always
that of coordinate 0, and an empty box lies where the chunk before it ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["Box", "box_of", "boxes_of", "chunk_range", "local_shape", "max_local_shape"]


class Box(NamedTuple):
    """A part of a tensor that is rectangular: [start, start + size) in every dim."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.starts, self.sizes, strict=True))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes

    def intersection(self, other: Box) -> Box | None:
        """Return what both boxes have, or None if that is nothing."""
        starts = tuple(map(max, self.starts, other.starts))
        sizes = tuple(end - start for start, end in zip(starts, map(min, self.ends, other.ends), strict=True))
        return None if any(size <= 0 for size in sizes) else Box(starts, sizes)

    def offset_in(self, outer: Box) -> tuple[int, ...]:
        """Return where this box begins, counted from the beginning of a box around it."""
        return tuple(start - begin for start, begin in zip(self.starts, outer.starts, strict=True))

    def inside(self, outer: Box) -> Box:
        """Return the same box in the local indices of a box around it."""
        return Box(self.offset_in(outer), self.sizes)


def chunk_range(length: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Return start and size of one chunk of a dim: `chunk_range(5, 4, 1)` is (2, 2), and of chunk 3 it is (5, 0)."""
    size = -(-length // num_chunks)
    start = min(size * index, length)
    return start, min(size, length - start)


@lru_cache(maxsize=65536)
def box_of(layout: Layout, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Box:
    """Return the box of a tensor of this global shape that the rank at this coordinate of the mesh holds.

    Raises:
        ValueError: the shape has another number of dims than the layout, or the coordinate lies outside of the mesh.

    Example:
        >>> from hyper_parallel import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        >>> box_of(mesh.layout("dp", None), (5, 3), (2,))
        Box(starts=(4, 0), sizes=(1, 3))
    """
    check_shape(layout, shape)
    mesh = layout.mesh
    mesh.rank_at(coordinate)  # raises where it is outside
    starts, sizes = [], []
    for length, axes in zip(shape, layout.axes_per_dim, strict=True):
        start, size = 0, length
        for axis in axes:
            index = mesh.axis_index(axis)
            further, size = chunk_range(size, mesh.shape[index], coordinate[index])
            start += further
        starts.append(start)
        sizes.append(size)
    return Box(tuple(starts), tuple(sizes))


def boxes_of(layout: Layout, shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
    """Yield every rank of the mesh with its box, in the mesh's order."""
    for rank in layout.mesh.ranks:
        yield rank, box_of(layout, shape, layout.mesh.coordinate_of(rank))


def local_shape(layout: Layout, shape: Sequence[int], coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of what the rank at this coordinate holds."""
    return box_of(layout, tuple(shape), coordinate).sizes


def max_local_shape(layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the largest local tensor: what padding pads to."""
    return box_of(layout, tuple(shape), (0,) * layout.mesh.ndim).sizes


def check_shape(layout: Layout, shape: Sequence[int]) -> None:
    """Raise where a global shape does not fit the layout."""
    if len(shape) != layout.ndim or any(length < 0 for length in shape):
        raise ArgumentError(
            "The global shape does not fit the layout.",
            expected=f"{layout.ndim} dims, none of them negative", got=str(tuple(shape)), where=repr(layout),
        )  # fmt: skip
