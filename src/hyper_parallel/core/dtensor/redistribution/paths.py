"""Ways from one layout to another, as lists of layouts. Which of them is taken is a matter of cost.

A way has three parts: reductions (each run of `partial.py` by an all-reduce, by a reduce-scatter, or both), movement,
and what makes values partial at the end. Each two neighbours of a way are one step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from enum import Enum
from typing import TypeAlias

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.redistribution.partial import PartialWork, partial_work
from hyper_parallel.core.dtensor.redistribution.steps import (
    IDENTITY,
    Kind,
    Step,
    fill_step,
    moved_axes,
    place_step,
    step_between,
)

__all__ = ["ways"]


class Scattered(Enum):
    """Choices which axes of a run are reduced by a reduce-scatter; the rest are by an all-reduce."""

    FITTING = "those that come next in a dim of the target, at once"
    ONE_BY_ONE = "the same, one after the other"
    ALL = "all of them, and what splits no dim of the target is gathered afterwards"
    NONE = "none"


Way: TypeAlias = "tuple[Layout, ...]"
Axes: TypeAlias = "tuple[str, ...]"


def ways(source: Layout, target: Layout, shape: tuple[int, ...]) -> list[tuple[Step, ...]]:
    """List candidates as steps; every one of them is right."""
    source, target = _without_single_ranks(source), _without_single_ranks(target)
    work = partial_work(source, target)
    placeable = _placeable(work)
    found: dict[Way, None] = {}
    for end in _ends_of_movement(source, target, work, placeable, shape):
        for way in _ways_to(source, end, work, shape):
            found[_cut_short(_without_repeats(way), target, work, placeable)] = None
    return [
        (
            *(step_between(before, after, shape) for before, after in itertools.pairwise(way)),
            *_steps_that_make_partial(way[-1], target, work, placeable, shape),
        )
        for way in found
    ]


def _ways_to(source: Layout, target: Layout, work: PartialWork, shape: tuple[int, ...]) -> Iterator[Way]:
    if not work.runs:
        yield source, target
        yield tuple(_one_axis_at_a_time(source, target))
        return
    if len(work.runs) == 1:
        yield source, target
        for sliced in (_sliced(source, target, all_of_them=False), _sliced(source, target, all_of_them=True)):
            yield source, sliced, target
    for all_sliced in (False, True):
        for scattered in Scattered:
            reduced = tuple(_reduced(source, target, work, shape, scattered, all_sliced))
            yield (*reduced, target)
            yield (*reduced, *_one_axis_at_a_time(reduced[-1], target))


def _reduced(
    source: Layout, target: Layout, work: PartialWork, shape: tuple[int, ...], scattered: Scattered, all_sliced: bool
) -> Iterator[Layout]:
    """Yield the layouts of reducing run after run, each on as little as can be sliced off before."""
    now = source
    yield now
    for run in work.runs:
        now = _sliced(now, target, all_of_them=all_sliced)
        yield now
        rest: Axes = run
        if scattered is Scattered.ONE_BY_ONE:
            for axis in _next_of(now, target, run):
                now, _ = _scattered_in_place(now, target, (axis,))
                yield now
            rest = tuple(axis for axis in run if now.partial_op(axis) is not None)
        elif scattered is not Scattered.NONE and source.ndim:
            now, rest = _scattered_in_place(now, target, run)
            if rest and scattered is Scattered.ALL:
                now = _scattered_anywhere(now, target, rest, shape)
                rest = ()
            yield now
        if rest:
            now = now.without_partial(*rest)
            yield now
    yield _sliced(now, target, all_of_them=False)


def _scattered_in_place(now: Layout, target: Layout, run: Axes) -> tuple[Layout, Axes]:
    """Let the axes of a run that come next in a dim of the target split it, and those after them that every rank has.

    The rest of the run is left partial, and is the second value.

    The rest of the run is left partial.
    """
    left = set(run)
    dims = _grown(now, target, left | _free(now))
    left -= {axis for axes in dims for axis in axes}
    partial = tuple((axis, op) for axis, op in now.partial if axis not in run or axis in left)
    return now.replace(axes_per_dim=dims, partial=partial), tuple(axis for axis in run if axis in left)


def _next_of(now: Layout, target: Layout, run: Axes) -> Axes:
    """Return the axes of a run that `_scattered_in_place` would use, each after those that must be there before it."""
    there, _ = _scattered_in_place(now, target, run)
    return tuple(axis for axes in there.axes_per_dim for axis in axes if axis in run)


def _scattered_anywhere(now: Layout, target: Layout, rest: Axes, shape: tuple[int, ...]) -> Layout:
    dims = list(now.axes_per_dim)
    for axis in rest:
        wanted = target.dim_of(axis)
        dim = _best_dim(now.replace(axes_per_dim=dims, partial=()), axis, shape) if wanted is None else wanted
        dims[dim] = (*dims[dim], axis)
    return now.replace(axes_per_dim=dims, partial=tuple(pair for pair in now.partial if pair[0] not in rest))


def _best_dim(layout: Layout, axis: str, shape: tuple[int, ...]) -> int:
    """Return the first dim that an axis splits evenly, or else the longest."""

    def chunk(dim: int) -> float:
        return shape[dim] / math.prod(layout.mesh.size(name) for name in layout.axes_per_dim[dim])

    size = layout.mesh.size(axis)
    for dim in range(layout.ndim):
        if chunk(dim) % size == 0 and shape[dim]:
            return dim
    return max(range(layout.ndim), key=chunk)


def _sliced(now: Layout, target: Layout, *, all_of_them: bool) -> Layout:
    """Split by axes of the target that every rank has: where they come next, or (`all_of_them`) anywhere."""
    free = _free(now)
    dims = _grown(now, target, free)
    if all_of_them:
        dims = [
            (*axes, *(axis for axis in wanted if axis in free and axis not in axes))
            for axes, wanted in zip(dims, target.axes_per_dim, strict=True)
        ]
    return now.with_dims(*dims)


def _grown(now: Layout, target: Layout, usable: set[str]) -> list[Axes]:
    """Continue the axes per dim as in the target, for as long as there are usable axes."""
    dims = []
    for axes, wanted in zip(now.axes_per_dim, target.axes_per_dim, strict=True):
        num = len(axes)
        if wanted[:num] == axes:
            while num < len(wanted) and wanted[num] in usable:
                num += 1
            dims.append(wanted[:num])
        else:
            dims.append(axes)
    return dims


def _free(layout: Layout) -> set[str]:
    """Return the axes on which every rank has the same."""
    return {axis for axis in layout.mesh.axis_names if layout.dim_of(axis) is None and layout.partial_op(axis) is None}


def _one_axis_at_a_time(source: Layout, target: Layout) -> Iterator[Layout]:
    """Yield the layouts of moving one axis after the other.

    Slices come first, since they make everything after them smaller, then all-to-alls, then gathers; what is left goes
    in one step.
    """
    now = source
    yield now
    while now is not target:
        following = _sliced(now, target, all_of_them=False)
        if following is now:
            following = _with_an_axis_moved(now, target) or _with_an_axis_gathered(now, target) or target
        now = following
        yield now


def _with_an_axis_moved(now: Layout, target: Layout) -> Layout | None:
    """Move the innermost axis of a dim to another dim, where the target has it next."""
    for dim, wanted in enumerate(target.axes_per_dim):
        have = now.axes_per_dim[dim]
        if wanted[: len(have)] != have or len(wanted) == len(have):
            continue
        axis = wanted[len(have)]
        of_dim = now.dim_of(axis)
        if of_dim is not None and of_dim != dim and now.axes_per_dim[of_dim][-1] == axis:
            dims = list(now.axes_per_dim)
            dims[of_dim] = dims[of_dim][:-1]
            dims[dim] = (*have, axis)
            return now.with_dims(*dims)
    return None


def _with_an_axis_gathered(now: Layout, target: Layout) -> Layout | None:
    """Drop the innermost axis of a dim, if the target is not split by it."""
    for dim, have in enumerate(now.axes_per_dim):
        if have and target.dim_of(have[-1]) is None:
            dims = list(now.axes_per_dim)
            dims[dim] = have[:-1]
            return now.with_dims(*dims)
    return None


def _placeable(work: PartialWork) -> Axes:
    """Return the axes that may split a tensor until the end and make it partial then.

    A rank that has a piece of a sum to be made needs no other piece: it puts zeros around its own (R5). Sums beside
    products would put their identities into each other's way, so these are filled one by one.
    """
    made = [(axis, op) for axis, op in work.made if op in IDENTITY]
    return tuple(axis for axis, _ in made) if len({op for _, op in made}) == 1 else ()


def _ends_of_movement(
    source: Layout, target: Layout, work: PartialWork, placeable: Axes, shape: tuple[int, ...]
) -> list[Layout]:
    """Return the layouts where movement may end and the making of partial values begin.

    Axes that are to be placed split the end: those that split the source or are reduced, whose ranks have different
    pieces anyway, or in a second end all of them, so that replicas share the work.
    """
    reduced = {axis for run in work.runs for axis in run}
    first = tuple(axis for axis in placeable if source.dim_of(axis) is not None or axis in reduced)
    chosen = [first] if first == placeable or not target.ndim else [first, placeable]
    return [_split_further(source, target, axes, work, shape) for axes in chosen]


def _split_further(source: Layout, target: Layout, axes: Axes, work: PartialWork, shape: tuple[int, ...]) -> Layout:
    partial = tuple(pair for pair in target.partial if pair[0] in work.kept)
    end = target.replace(partial=partial)
    # Axes in another order than the source has them would have to move.
    order = [axis for names in source.axes_per_dim for axis in names]
    for axis in sorted(axes, key=lambda axis: order.index(axis) if axis in order else len(order)):
        dim = source.dim_of(axis)
        if dim is None and not target.ndim:
            continue
        dims = list(end.axes_per_dim)
        at = _best_dim(end, axis, shape) if dim is None else dim
        dims[at] = (*dims[at], axis)
        end = end.with_dims(*dims)
    return end


def _cut_short(way: Way, target: Layout, work: PartialWork, placeable: Axes) -> Way:
    """Return the way up to the first layout from which only placing is left.

    There ranks side by side make up the target.
    """
    if placeable:
        for index, layout in enumerate(way):
            if len(layout.partial) == len(work.kept) and set(moved_axes(layout, target)) <= set(placeable):
                return way[: index + 1]
    return way


def _steps_that_make_partial(
    now: Layout, target: Layout, work: PartialWork, placeable: Axes, shape: tuple[int, ...]
) -> list[Step]:
    steps: list[Step] = []
    placed = [(axis, op) for axis, op in work.made if axis in placeable and now.dim_of(axis) is not None]
    after = now.replace(axes_per_dim=target.axes_per_dim, partial=(*now.partial, *placed))
    if placed:
        steps.append(place_step(now, after, shape, placed[0][1]))
    elif after is not now:
        steps.append(step_between(now, after, shape))
    now = after
    # R6: from the first axis of the mesh to the last, so that the innermost identity stands.
    for axis, op in work.made:
        if (axis, op) in placed or op not in IDENTITY:
            continue
        after = now.replace(partial=(*now.partial, (axis, op)))
        last = steps[-1] if steps else None
        if last is not None and last.kind is Kind.FILL and last.fill == IDENTITY[op]:
            steps[-1] = fill_step(last.source, after, shape, (*last.axes, axis), op)
        else:
            steps.append(fill_step(now, after, shape, (axis,), op))
        now = after
    return steps


def _without_single_ranks(layout: Layout) -> Layout:
    """Leave out axes of one rank, which split nothing and reduce nothing."""
    if 1 not in layout.mesh.shape:
        return layout
    size = layout.mesh.size
    return layout.replace(
        axes_per_dim=[tuple(axis for axis in axes if size(axis) > 1) for axes in layout.axes_per_dim],
        partial=tuple((axis, op) for axis, op in layout.partial if size(axis) > 1),
    )


def _without_repeats(way: Way) -> Way:
    return tuple(layout for index, layout in enumerate(way) if index == 0 or layout is not way[index - 1])
