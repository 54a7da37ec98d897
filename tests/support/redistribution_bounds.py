"""The fewest elements that ranks must receive to get from one layout to another, by looking at every element.

Without a reduction a rank must receive what it needs and does not have. With one, n ranks that hold a part of an element need n - 1
messages to reduce it, however they do it, and each rank that needs the result but the one where it came to be needs one more. (On
one axis these are the (n-1)/n of a reduce-scatter for each rank, and twice that of an all-reduce.)

Values that are to become partial by a sum or a product need to be with one rank of the axis alone, the others hold zeros or ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hyper_parallel import Layout
from hyper_parallel.core.dtensor.boxes import box_of
from hyper_parallel.core.dtensor.redistribution.partial import partial_work

Mask = np.ndarray[Any, np.dtype[np.bool_]]


def held(layout: Layout, shape: tuple[int, ...]) -> Mask:
    """Which elements each rank holds, at its place in the mesh: an array of the mesh's shape and then the tensor's."""
    mask = np.zeros((*layout.mesh.shape, *shape), bool)
    for rank in layout.mesh.ranks:
        coordinate = layout.mesh.coordinate_of(rank)
        box = box_of(layout, shape, coordinate)
        mask[(*coordinate, *(slice(start, end) for start, end in zip(box.starts, box.ends, strict=True)))] = True
    return mask


def least_received_by_each(source: Layout, target: Layout, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Without partial axes: elements that each rank must receive, in the mesh's shape."""
    missing = held(target, shape) & ~held(source, shape)
    return missing.reshape(*source.mesh.shape, -1).sum(-1)


def least_received(source: Layout, target: Layout, shape: tuple[int, ...]) -> int:
    """Elements that all ranks together must receive."""
    work = partial_work(source, target)
    mesh = source.mesh
    has, needs = held(source, shape), held(target, shape)
    # Ranks beside each other on an axis that becomes partial by a sum or a product are as good as one: any of them may have it.
    # (Where both are made, each would have to keep out of the other's way; ranks then get all of their box.)
    made = [(axis, op) for axis, op in work.made if op in ("sum", "prod")]
    alike = tuple(mesh.axis_index(axis) for axis, _ in made) if len({op for _, op in made}) == 1 else ()
    has_it = has.any(alike, keepdims=True)
    needs = needs.any(alike, keepdims=True)
    num = int(np.prod([mesh.size(axis) for run in work.runs for axis in run], dtype=int))
    if num == 1:
        return int((needs & ~has_it).sum())
    # Each place on the axes that stay partial has a tensor of its own.
    kept = {mesh.axis_index(axis) for axis in work.kept}
    others = tuple(index for index in range(mesh.ndim) if index not in kept)
    results = needs.sum(others)
    some_rank_has_its_part = (needs & has_it).any(others)
    return int(((num - 1) + results - some_rank_has_its_part)[results > 0].sum())
