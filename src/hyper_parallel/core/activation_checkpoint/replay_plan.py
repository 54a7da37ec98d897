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
        """The values it read; None for what is not tracked."""

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
    maker: dict[V, int] = {}
    required: list[int] = []
    for index, op in enumerate(ops):
        for value in op.makes:
            maker[value] = index
        if op.must_run:
            required.append(index)
    todo: list[V | None] = list(wanted)
    last = max((maker.get(value, -1) for value in todo if value is not None), default=-1) if stops else len(ops)
    runs: set[int] = set()
    takes: set[V] = set()
    seen: set[V] = set()
    for index in required:
        if index <= last:
            runs.add(index)
            todo += ops[index].reads
    while todo:
        needed = todo.pop()
        if needed is None or needed in seen:
            continue
        seen.add(needed)
        made_by = None if is_available(needed) else maker.get(needed)
        if made_by is None:
            takes.add(needed)
        elif made_by not in runs:
            runs.add(made_by)
            todo += ops[made_by].reads
    return ReplayPlan(frozenset(runs), frozenset(takes))
