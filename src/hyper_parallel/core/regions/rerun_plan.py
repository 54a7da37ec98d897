"""What a recomputation must run: a pure function of which op reads and writes which value."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

V = TypeVar("V", bound=Hashable)
V_co = TypeVar("V_co", bound=Hashable, covariant=True)


class Op(Protocol[V_co]):
    """An op of a record, as the plan sees it."""

    @property
    def reads(self) -> Sequence[V_co | None]:
        """The values it read, made by ops before it or by none; None for what is not tracked."""

    @property
    def makes(self) -> Sequence[V_co]:
        """The values it wrote, each written by no other op."""

    @property
    def must_run(self) -> bool:
        """Whether it runs in every recomputation that gets to it, needed or not."""


class ReplayPlan(NamedTuple):
    """Ops to run, by index, and the values that are taken from where they are available."""

    runs: frozenset[int]
    takes: frozenset[Hashable]


def plan_replay(
    ops: Sequence[Op[V]], wanted: Iterable[V], is_available: Callable[[V], bool], *, stops: bool = False
) -> ReplayPlan:
    """The least that makes every wanted value, when available ones are taken and others are made by their op.

    A value that is not available and that no op makes is taken as well: whoever runs the plan reports it.

    Args:
        stops: whether the recomputation ends when it has met every wanted value. Then nothing is run or taken for ops that
            must run and come later.
    """
    # From the last op to the first: who reads a value comes after the op that makes it, so that all needs are known there.
    needed: set[V | None] = set(wanted)
    made: set[V] = set()
    runs: list[int] = []
    goes_on = not stops  # whether the recomputation gets as far as this op, and further
    for index in range(len(ops) - 1, -1, -1):
        op = ops[index]
        is_run = False
        for value in op.makes:
            if value in needed:
                goes_on = True
                if not is_available(value):
                    is_run = True
                    made.add(value)
        if is_run or (goes_on and op.must_run):
            runs.append(index)
            needed.update(op.reads)
    needed -= made
    needed.discard(None)
    return ReplayPlan(frozenset(runs), frozenset(needed))
