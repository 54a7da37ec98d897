"""The steps that plans are made of, and what each of them means for one rank.

A step leads from one layout to another. Which collective that takes is read off the two layouts (`step_between`); which
pieces go where follows from the boxes alone, so that a step is right for whatever two layouts it is made of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from hyper_parallel.core.dtensor.boxes import Box, box_of
from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["AllToAllStep", "Kind", "Step", "fill_step", "moved_axes", "place_step", "step_between"]


class Kind(Enum):
    SLICE = "slice"  # local: keeps a part of what is there
    PLACE = "place"  # local: what is there becomes a part, and the rest is filled with 0 (sum) or 1 (prod)
    FILL = "fill"  # local: all ranks but coordinate 0 hold 0 (sum) or 1 (prod)
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"  # sends equal pieces
    ALL_TO_ALL_V = "all-to-all-v"  # sends a box of its own from each rank to each


IDENTITY = {"sum": 0, "prod": 1}  # what changes nothing when it is reduced


class AllToAllStep(NamedTuple):
    """The part of one rank in an all-to-all-v."""

    ranks: tuple[int, ...]
    me: int  # this rank's position in `ranks`
    sends: tuple[Box | None, ...]  # for each rank the box of the local tensor before that it is sent
    receives: tuple[Box | None, ...]  # for each rank the box of the local tensor after where its piece goes
    shape: tuple[int, ...]  # that of the local tensor after
    num_summands: int  # `ranks` are so many blocks of equal length, each of which sends one summand


@dataclass(frozen=True, eq=False)
class Step:
    """One step, for all ranks. `group` and the methods `at_…` say what it is for the rank at a coordinate.

    Attributes:
        axes: a group is the ranks that differ on these axes alone, the last varying fastest.
        dim: of the pieces that are gathered, or of those that are scattered.
        split_dim: of the pieces that an all-to-all sends.
        op: the reduction; an average is a sum and a `divisor`.
        fill: what `PLACE` and `FILL` put where nothing is.
    """

    kind: Kind
    source: Layout
    target: Layout
    shape: tuple[int, ...]
    axes: tuple[str, ...] = ()
    dim: int = 0
    split_dim: int = 0
    op: str | None = None
    divisor: int = 1
    fill: int = 0
    _all_to_all_steps: dict[tuple[int, ...], AllToAllStep] = field(default_factory=dict, repr=False)

    @property
    def is_local(self) -> bool:
        return self.kind in (Kind.SLICE, Kind.PLACE, Kind.FILL)

    @property
    def group_size(self) -> int:
        return math.prod(self.source.mesh.size(axis) for axis in self.axes)

    @property
    def reduced_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.source.partial if self.target.partial_op(axis) is None)

    def group(self, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that take part, in the order of their pieces."""
        mesh = self.source.mesh
        return mesh.ranks_along(self.axes, mesh.rank_at(coordinate))

    def box_before(self, coordinate: tuple[int, ...]) -> Box:
        return box_of(self.source, self.shape, coordinate)

    def box_after(self, coordinate: tuple[int, ...]) -> Box:
        return box_of(self.target, self.shape, coordinate)

    def at_slice(self, coordinate: tuple[int, ...]) -> Box:
        """Return which box of the local tensor is kept."""
        return self.box_after(coordinate).inside(self.box_before(coordinate))

    def at_place(self, coordinate: tuple[int, ...]) -> tuple[Box, tuple[int, ...], tuple[int, ...]] | None:
        """Return which box of the local tensor is placed, the shape after, and where in it the box begins.

        None if there is nothing to place.
        """
        after, before = self.box_after(coordinate), self.box_before(coordinate)
        both = after.intersection(before)
        return None if both is None else (both.inside(before), after.sizes, both.offset_in(after))

    def at_fill(self, coordinate: tuple[int, ...]) -> bool:
        """Say whether this rank holds the identity."""
        mesh = self.source.mesh
        return any(coordinate[mesh.axis_index(axis)] for axis in self.axes)

    def at_all_to_all(self, coordinate: tuple[int, ...]) -> AllToAllStep:
        """Work out who sends what to whom.

        A rank receives each element of its box from the rank that is where itself is on all axes outside of the group.
        That rank is itself for what it holds, it is the same one in the eyes of both, and no rank sends more than its
        own row of replicas needs.
        """
        found = self._all_to_all_steps.get(coordinate)
        if found is None:
            found = self._all_to_all_steps.setdefault(coordinate, self._all_to_all_step(coordinate))
        return found

    def _all_to_all_step(self, coordinate: tuple[int, ...]) -> AllToAllStep:
        mesh = self.source.mesh
        ranks = self.group(coordinate)
        before, after = self.box_before(coordinate), self.box_after(coordinate)
        sends: list[Box | None] = []
        receives: list[Box | None] = []
        for rank in ranks:
            peer = mesh.coordinate_of(rank)
            sent = self.box_after(peer).intersection(before)
            received = self.box_before(peer).intersection(after)
            sends.append(None if sent is None else sent.inside(before))
            receives.append(None if received is None else received.inside(after))
        return AllToAllStep(
            ranks,
            ranks.index(mesh.rank_at(coordinate)),
            tuple(sends),
            tuple(receives),
            after.sizes,
            math.prod(mesh.size(axis) for axis in self.reduced_axes),
        )

    def __repr__(self) -> str:
        over = f" over {'·'.join(self.axes)}" if self.axes else ""
        by = f" {self.op}" if self.op else ""
        return f"{self.kind.value}{by}{over}: {self.source} -> {self.target}"


def step_between(source: Layout, target: Layout, shape: tuple[int, ...]) -> Step:
    """Find the step from one layout to another.

    The target is partial where the source is, or has what is left of it reduced.

    What is reduced by one step commutes, see `partial.py`. Neither layout mentions axes of one rank.
    """
    reduced = tuple(axis for axis, _ in source.partial if target.partial_op(axis) is None)
    changed = [dim for dim in range(source.ndim) if source.axes_per_dim[dim] != target.axes_per_dim[dim]]
    if reduced:
        return _reducing_step(source, target, shape, reduced, changed)
    moved = moved_axes(source, target)
    if not moved:
        return Step(Kind.SLICE, source, target, shape)
    if len(changed) == 1:
        dim = changed[0]
        before, after = source.axes_per_dim[dim], target.axes_per_dim[dim]
        if before[: len(after)] == after and _is_even(source, shape, dim):
            return Step(Kind.ALL_GATHER, source, target, shape, before[len(after) :], dim)
    if len(changed) == 2:
        for dim, split_dim in (changed, changed[::-1]):
            kept = target.axes_per_dim[dim]
            axes = source.axes_per_dim[dim][len(kept) :]
            if (
                source.axes_per_dim[dim] == kept + axes
                and target.axes_per_dim[split_dim] == source.axes_per_dim[split_dim] + axes
                and _is_even(source, shape, dim)
                and _is_even(target, shape, split_dim)
            ):
                return Step(Kind.ALL_TO_ALL, source, target, shape, axes, dim, split_dim)
    return Step(Kind.ALL_TO_ALL_V, source, target, shape, moved)


def place_step(source: Layout, target: Layout, shape: tuple[int, ...], op: str) -> Step:
    """Make the step in which axes that split the source make the target partial by `op`.

    Each rank puts the identity around what it has of its new box.

    Of the axes of the source only these may be moved (`moved_axes`): then the ranks along them have each element once.
    """
    return Step(Kind.PLACE, source, target, shape, fill=IDENTITY[op])


def fill_step(source: Layout, target: Layout, shape: tuple[int, ...], axes: tuple[str, ...], op: str) -> Step:
    """Make the step in which axes that replicate the source make the target partial by `op`.

    Coordinate 0 keeps the values.
    """
    return Step(Kind.FILL, source, target, shape, axes, fill=IDENTITY[op])


def _reducing_step(
    source: Layout, target: Layout, shape: tuple[int, ...], reduced: tuple[str, ...], changed: list[int]
) -> Step:
    ops = [op for axis, op in source.partial if axis in reduced]
    op = "sum" if "avg" in ops else ops[0]
    divisor = math.prod(source.mesh.size(axis) for axis in reduced if source.partial_op(axis) == "avg")
    if not changed:
        return Step(Kind.ALL_REDUCE, source, target, shape, reduced, op=op, divisor=divisor)
    if len(changed) == 1:
        dim = changed[0]
        before, after = source.axes_per_dim[dim], target.axes_per_dim[dim]
        axes = after[len(before) :]
        if after == before + axes and set(axes) == set(reduced) and _is_even(target, shape, dim):
            return Step(Kind.REDUCE_SCATTER, source, target, shape, axes, dim, op=op, divisor=divisor)
    # The reduced axes come first: the ranks of one summand then lie together, see `AllToAllStep.num_summands`.
    axes = (*reduced, *(axis for axis in moved_axes(source, target) if axis not in reduced))
    return Step(Kind.ALL_TO_ALL_V, source, target, shape, axes, op=op, divisor=divisor)


def moved_axes(source: Layout, target: Layout) -> tuple[str, ...]:
    """Return the axes of the source along which pieces must travel.

    As long as the lists of a dim have axes of equal size its chunks are the same before and after. There an axis that
    is in both lists moves nothing, and one that gives its place to another moves alone.
    """
    size = source.mesh.size
    moved: set[str] = set()
    for before, after in zip(source.axes_per_dim, target.axes_per_dim, strict=True):
        for index, axis in enumerate(before):
            if index >= len(after) or size(axis) != size(after[index]):
                moved.update(before[index:])
                break
            if axis != after[index]:
                moved.add(axis)
    return tuple(axis for axis in source.mesh.axis_names if axis in moved)


def _is_even(layout: Layout, shape: tuple[int, ...], dim: int) -> bool:
    return shape[dim] % math.prod(layout.mesh.size(axis) for axis in layout.axes_per_dim[dim]) == 0
