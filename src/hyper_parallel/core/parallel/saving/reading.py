"""Which bytes of which files a rank reads for a box that it wants: pure, from a manifest.

Example: a rank wants rows 2 to 5 of a tensor that lies in two files, rows 0 to 3 and 4 to 7. It reads the second half
of the one item and the first half of the other, and compares the checksums of the chunks that these halves touch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hyper_parallel.core.dtensor.boxes import Box
from hyper_parallel.core.parallel.saving.checksums import CHUNK_BYTES
from hyper_parallel.core.parallel.saving.manifest import SavedItem, SavedTensor

__all__ = ["Part", "Run", "chunks_of", "parts_of", "runs_of"]


class Part(NamedTuple):
    """What an item has of a box that is wanted; `box` is in the indices of the whole tensor."""

    item: SavedItem
    box: Box


class Run(NamedTuple):
    """Bytes that lie together, counted from the beginning of an item."""

    start: int
    num_bytes: int


def parts_of(tensor: SavedTensor, box: Box) -> list[Part]:
    """Find the parts that tile a box of a tensor."""
    if box.is_empty:
        return []
    if not tensor.shape:
        return [Part(item, box) for item in tensor.items]
    return [Part(item, common) for item in tensor.items if (common := item.box.intersection(box)) is not None]


def runs_of(part: Part, element_bytes: int) -> Iterator[Run]:
    """Give the runs of a part, in order. A part that is contiguous in its item is one run."""
    inside, sizes = part.box.inside(part.item.box), part.item.box.sizes
    strides = _strides(sizes, element_bytes)
    # From which dim on the part is as wide as the item: all of these and the dim before lie together.
    dim = len(sizes)
    while dim > 0 and inside.sizes[dim - 1] == sizes[dim - 1]:
        dim -= 1
    if dim == 0:
        yield Run(0, math.prod(sizes) * element_bytes)
        return
    num_bytes = inside.sizes[dim - 1] * strides[dim - 1]
    first = inside.starts[dim - 1] * strides[dim - 1]
    ranges = [range(start, start + size) for start, size in zip(inside.starts, inside.sizes, strict=True)]
    for place in itertools.product(*ranges[: dim - 1]):
        start = sum(index * stride for index, stride in zip(place, strides, strict=False))
        yield Run(start + first, num_bytes)


def chunks_of(part: Part, element_bytes: int) -> list[int]:
    """Name the chunks of the item that the part touches."""
    inside, sizes = part.box.inside(part.item.box), part.item.box.sizes
    num_chunks = -(-math.prod(sizes) * element_bytes // CHUNK_BYTES)
    strides = _strides(sizes, element_bytes)
    first = sum(start * stride for start, stride in zip(inside.starts, strides, strict=True))
    last = sum((end - 1) * stride for end, stride in zip(inside.ends, strides, strict=True)) + element_bytes - 1
    between = range(first // CHUNK_BYTES, min(last // CHUNK_BYTES, num_chunks - 1) + 1)
    # Gaps between runs matter only where a whole chunk fits into one; to look at each run else would take long.
    widest = max((stride for dim, stride in enumerate(strides) if inside.sizes[dim] < sizes[dim]), default=0)
    gaps = max((strides[dim] * (sizes[dim] - inside.sizes[dim]) for dim in range(len(sizes))), default=0)
    if len(between) < 3 or not widest or gaps <= CHUNK_BYTES:
        return list(between)
    touched: dict[int, None] = {}
    for run in runs_of(part, element_bytes):
        end = run.start + run.num_bytes - 1
        touched.update(dict.fromkeys(range(run.start // CHUNK_BYTES, end // CHUNK_BYTES + 1)))
    return sorted(touched)


def _strides(sizes: Sequence[int], element_bytes: int) -> list[int]:
    strides = [element_bytes] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return strides
