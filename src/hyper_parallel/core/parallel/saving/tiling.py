"""Whether boxes tile a tensor: every element is in exactly one of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hyper_parallel.core.dtensor.boxes import Box

__all__ = ["fault_of_tiling"]


def fault_of_tiling(boxes: Sequence[Box], shape: Sequence[int]) -> str | None:
    """Say in words why boxes do not tile a tensor of this shape; None where they do.

    A tensor without elements is tiled by no box.

    Example:
        >>> fault_of_tiling([Box((0,), (2,)), Box((1,), (2,))], (4,))
        'Box(starts=(0,), sizes=(2,)) and Box(starts=(1,), sizes=(2,)) overlap'
    """
    for box in boxes:
        if len(box.starts) != len(shape) or len(box.sizes) != len(shape):
            return f"{box} has another number of dims than {list(shape)}"
        for start, size, length in zip(box.starts, box.sizes, shape, strict=True):
            if start < 0 or size < 1 or start + size > length:
                return f"{box} is no part of {list(shape)}"
    pair = _overlap(list(boxes), len(shape))
    if pair is not None:
        return f"{pair[0]} and {pair[1]} overlap"
    covered, whole = sum(box.num_elements for box in boxes), math.prod(shape)
    return None if covered == whole else f"{covered} of {whole} elements are there"


def _overlap(boxes: list[Box], ndim: int) -> tuple[Box, Box] | None:
    """Find two boxes that share an element.

    Boxes of a layout lie in a grid: along some dim they fall apart into groups, and each group along another. So this
    takes about as long as sorting. Pairs are looked at only where no dim separates anything.
    """
    todo = [boxes]
    while todo:
        group = todo.pop()
        if len(group) < 2:
            continue
        for dim in range(ndim):
            parts = _apart(group, dim)
            if len(parts) > 1:
                todo += parts
                break
        else:
            pair = _first_pair(group)
            if pair is not None:
                return pair
    return None


def _apart(boxes: Iterable[Box], dim: int) -> list[list[Box]]:
    """Put boxes whose ranges along a dim are connected into one group."""
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.starts[dim]):
        if box.starts[dim] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.starts[dim] + box.sizes[dim])
    return groups


def _first_pair(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    for index, box in enumerate(boxes):
        for other in boxes[:index]:
            if not box.sizes or box.intersection(other) is not None:
                return other, box
    return None
