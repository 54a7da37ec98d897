"""Finds what has to happen to partial values between two layouts: what is kept, reduced, or becomes partial.

Rules L4 and R3 to R6 of `core/dtensor/README.md`.
"""

from __future__ import annotations

from typing import NamedTuple

from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["PartialWork", "partial_work"]


class PartialWork(NamedTuple):
    """What happens to partial values.

    Invariant: kept, runs and made are disjoint, but an axis that changes its op is in a run and made.

    Attributes:
        kept: axes that stay partial
        runs: axes that are reduced, run after run; ops commute within a run
        made: axes that become partial, with the op, in the order of the mesh
    """

    kept: tuple[str, ...]
    runs: tuple[tuple[str, ...], ...]
    made: tuple[tuple[str, str], ...]


def partial_work(source: Layout, target: Layout) -> PartialWork:
    if not source.partial and not target.partial:
        return PartialWork((), (), ())
    ops = dict(source.partial)
    kept = [axis for axis, op in source.partial if target.partial_op(axis) == op]
    while True:
        reduced = [(axis, op) for axis, op in source.partial if axis not in kept]
        made = [(axis, op) for axis, op in target.partial if axis not in kept]
        wrong = [axis for axis in kept if _cannot_stay(source, axis, ops[axis], reduced, made)]
        if not wrong:
            break
        kept = [axis for axis in kept if axis not in wrong]
    runs: list[list[str]] = []
    for axis, op in reversed(reduced):  # L4: the last axis of the mesh first
        if runs and _commute(ops[runs[-1][-1]], op):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return PartialWork(tuple(kept), tuple(tuple(reversed(run)) for run in runs), tuple(made))


def _cannot_stay(
    source: Layout, axis: str, op: str, reduced: list[tuple[str, str]], made: list[tuple[str, str]]
) -> bool:
    """Say whether an axis cannot stay partial.

    It stays only while the axes before it in the mesh, whose reductions come after its own, let it.
    """
    index = source.mesh.axis_index
    return any(index(outer) < index(axis) and not _commute(outer_op, op) for outer, outer_op in reduced) or any(
        # Other ranks would hold ones ("no factor"), and the sum of ones over this axis is not one.
        index(outer) < index(axis) and outer_op == "prod" and op == "sum"
        for outer, outer_op in made
    )


def _commute(first: str, second: str) -> bool:
    return first == second or {first, second} <= {"sum", "avg"}
