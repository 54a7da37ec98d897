"""One region as the solver sees it: what may be stored, what then runs again, and that as rows of a model.

A **base** says which results of a region are stored and which run again, and leaves open which of the stored ones are
swapped. Bases are few and worth a whole number each; the bytes swapped of a base are nearly continuous, since a region
has dozens of tensors to choose from (`split`). Most of the speed of the solver comes from keeping these two
apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hyper_parallel.core.planner.model.choices import (
    RECOMPUTE,
    SAVE,
    SWAP,
    Choice,
    RegionBytes,
    RegionDecision,
    allowed,
    bytes_of,
    extra_bytes,
    plain,
    recompute_all,
)
from hyper_parallel.core.planner.model.profile import ProfiledOp, Region
from hyper_parallel.core.planner.solve.linear_model import Model

# In the place of the stored ops: of a region that is not wrapped, and of one that is recomputed whole, its inputs kept.
PLAIN, WHOLE = frozenset({-1}), frozenset({-2})


@dataclass(frozen=True)
class Base:
    """Which results a region stores and which run again. Which of the stored ones are swapped is left open.

    Attributes:
        stored: the ops
        decision: what is stored is saved, or swapped where it can only be swapped
        region_bytes: of this decision
        free: what is saved and may be swapped: its position among ops and inputs (these come after), and its bytes
    """

    stored: frozenset[int]
    decision: RegionDecision
    region_bytes: RegionBytes
    free: tuple[tuple[int, int], ...]

    @property
    def store_bytes(self) -> int:
        return self.region_bytes.kept_bytes + self.region_bytes.swapped_bytes

    @property
    def free_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.free)

    def swapping(self, positions: Iterable[int]) -> RegionDecision:
        """Decide as the base does, with the entries at these positions swapped."""
        ops, inputs = list(self.decision.ops), list(self.decision.inputs)
        for position in positions:
            if position < len(ops):
                ops[position] = SWAP
            else:
                inputs[position - len(ops)] = SWAP
        return RegionDecision(False, tuple(ops), tuple(inputs))


def base_of(region: Region, stored: frozenset[int], can_swap: bool) -> Base:
    """Work out the base with these ops stored.

    All that backward needs and that is not stored runs again, and what this reads, and so on. Of the stored ops those
    are dropped that nobody asks for.
    """
    if stored == PLAIN:
        decision = plain(region)
        return Base(PLAIN, decision, bytes_of(region, decision), ())
    if stored == WHOLE:
        decision = recompute_all(region)
        return Base(WHOLE, decision, bytes_of(region, decision), ())
    ops = _chosen(region, stored, can_swap)
    # What runs again makes all of its parts again. Without them in store more may have to run, and so on.
    while (
        again := {part for whole, parts in region.parts().items() if ops[whole] == RECOMPUTE for part in parts} & stored
    ):
        stored -= again
        ops = _chosen(region, stored, can_swap)
    runs_again = RECOMPUTE in ops
    inputs = tuple(SAVE if runs_again or given.value.is_residual else None for given in region.inputs)
    decision = RegionDecision(False, tuple(ops), inputs)
    return Base(
        frozenset(index for index, choice in enumerate(ops) if choice in (SAVE, SWAP)),
        decision,
        bytes_of(region, decision),
        _free(region, decision) if can_swap else (),
    )


def _chosen(region: Region, stored: frozenset[int], can_swap: bool) -> list[Choice | None]:
    ops: list[Choice | None] = [None] * len(region.ops)
    wanted = {index for index, op in enumerate(region.ops) if op.is_needed}
    for index in reversed(range(len(region.ops))):
        if index in wanted:
            choices = allowed(region.ops[index])
            if RECOMPUTE in choices and (index not in stored or not _may_store(region.ops[index], can_swap)):
                ops[index] = RECOMPUTE
                wanted.update(region.ops[index].reads)
            else:
                ops[index] = SAVE if SAVE in choices else SWAP
    return ops


def _may_store(op: ProfiledOp, can_swap: bool) -> bool:
    choices = allowed(op)
    return SAVE in choices or (SWAP in choices and (can_swap or op.num_bytes == 0))


def _free(region: Region, decision: RegionDecision) -> tuple[tuple[int, int], ...]:
    """List what is saved and may be swapped instead, by position among ops and inputs."""
    ops = [
        (index, op.num_bytes)
        for index, (op, choice) in enumerate(zip(region.ops, decision.ops, strict=True))
        if choice == SAVE and SWAP in allowed(op) and op.num_bytes
    ]
    inputs = [
        (len(region.ops) + index, given.value.num_bytes)
        for index, (given, choice) in enumerate(zip(region.inputs, decision.inputs, strict=True))
        if choice == SAVE and given.may_swap and given.value.num_bytes
    ]
    return (*ops, *inputs)


def needed_reads(region: Region) -> dict[int, tuple[int, ...]]:
    """Find the ops that a choice is worth making for, and what each of them reads of these.

    Left out are ops that no residual comes from, and views: they cost nothing and are nowhere stored, so whoever reads
    one reads what it is a view of.
    """
    live: set[int] = set()
    for index in reversed(range(len(region.ops))):
        if region.ops[index].is_needed or index in live:
            live.add(index)
            live.update(region.ops[index].reads)
    wholes = region.parts()
    sources: dict[int, set[int]] = {}
    found: dict[int, tuple[int, ...]] = {}
    for index in sorted(live):
        op = region.ops[index]
        reads: set[int] = set().union(*(sources[read] for read in op.reads))
        is_view = not op.is_needed and allowed(op) == (RECOMPUTE,) and op.forward_ms == 0 and index not in wholes
        sources[index] = reads if is_view else {index}
        if not is_view:
            found[index] = tuple(sorted(reads))
    return found


@dataclass(frozen=True)
class RegionRows:
    """The variables of a region in a model, and what it puts where as terms in these. Bytes are in units of the case.

    `stored` has the variables of ops; an input is stored where it must be. `swapped` is filled where each tensor has
    its own variable, in the exact model of a small problem.
    """

    plain: int | None
    whole: int | None  # there where regions cost something that it does not
    stored: dict[int, int] = field(default_factory=dict)
    swapped: dict[int, int] = field(default_factory=dict)  # by position among ops and inputs
    store: list[tuple[int, float]] = field(default_factory=list)
    free: list[tuple[int, float]] = field(default_factory=list)
    forced: list[tuple[int, float]] = field(default_factory=list)
    extra: list[tuple[int, float]] = field(default_factory=list)
    recompute: list[tuple[int, float]] = field(default_factory=list)

    @property
    def unmanaged(self) -> list[int]:
        return [variable for variable in (self.plain, self.whole) if variable is not None]

    def stored_in(self, x: list[float]) -> frozenset[int]:
        """Read from a solution which ops are stored."""
        if self.plain is not None and x[self.plain] > 0.5:
            return PLAIN
        if self.whole is not None and x[self.whole] > 0.5:
            return WHOLE
        return frozenset(index for index, variable in self.stored.items() if x[variable] > 0.5)

    def swapped_in(self, x: list[float]) -> list[int]:
        """Read from a solution which positions are swapped."""
        return [position for position, variable in self.swapped.items() if x[variable] > 0.5]


def add_region_rows(
    model: Model,
    region: Region,
    can_swap: bool,
    unit: float,
    most_extra_bytes: int,
    *,
    is_exact: bool = False,
    has_whole: bool = False,
) -> RegionRows:
    """Add the rows of one region: the rules "How a choice is carried out" of `../model/README.md`.

    An op whose storing alone would be more than `most_extra_bytes` is not stored: without whole numbers, a part of it
    would be.
    """
    again = recompute_all(region) if has_whole else None
    has_whole = again is not None and again.is_whole and extra_bytes(region, again) <= max(most_extra_bytes, 0)
    rows = RegionRows(
        plain=model.binary() if region.may_be_plain else None,
        whole=model.binary() if has_whole else None,
    )
    if again is not None and rows.whole is not None:
        done = bytes_of(region, again)
        rows.store.append((rows.whole, done.kept_bytes / unit))
        rows.extra.append((rows.whole, done.extra_bytes / unit))
        rows.recompute.append((rows.whole, done.recompute_ms))
    maker = _RowMaker(model, region, rows, can_swap, unit, is_exact)
    maker.add_ops(most_extra_bytes)
    maker.add_inputs()
    return rows


@dataclass(frozen=True)
class _RowMaker:
    """Adds the rows of one region to a model, and the terms to its `RegionRows`."""

    model: Model
    region: Region
    rows: RegionRows
    can_swap: bool
    unit: float
    is_exact: bool
    runs: dict[int, int] = field(default_factory=dict)

    @property
    def _unmanaged(self) -> list[tuple[int, float]]:
        return [(variable, 1.0) for variable in self.rows.unmanaged]

    def add_ops(self, most_extra_bytes: int) -> None:
        reads = needed_reads(self.region)
        for index in reads:
            op = self.region.ops[index]
            more_bytes = op.num_bytes - op.residual_bytes
            if _may_store(op, self.can_swap) and more_bytes <= max(most_extra_bytes, 0):
                self.rows.stored[index] = self.model.binary()
                self._add_stored(index, self.rows.stored[index], op.num_bytes, allowed(op))
                self.rows.extra.append((self.rows.stored[index], more_bytes / self.unit))
            if RECOMPUTE in allowed(op):
                # It needs no whole number: it is as small as what is stored lets it be.
                # Parts run with the op that makes them, and it with all of them.
                whole = self.runs.get(self.region.made_with(index))
                self.runs[index] = self.model.variable(0.0, 1.0) if whole is None else whole
                self.rows.recompute.append((self.runs[index], op.forward_ms))
        for index, read in reads.items():
            if self.region.ops[index].is_needed:
                self.model.row([*self._there(index), *self._unmanaged], 1.0, 1.0)
            if index in self.runs:
                for source in read:
                    if self.runs.get(source) != self.runs[index]:
                        self.model.row([*self._there(source), (self.runs[index], -1.0)], 0.0)

    def add_inputs(self) -> None:
        runs_again: int | None = None
        for index, given in enumerate(self.region.inputs):
            if not given.value.num_bytes:
                continue
            stored = self.model.binary()
            choices = (SAVE, SWAP) if given.may_swap else (SAVE,)
            self._add_stored(len(self.region.ops) + index, stored, given.value.num_bytes, choices)
            if given.value.is_residual:
                self.model.row([(stored, 1.0), *self._unmanaged], 1.0)
            else:
                self.rows.extra.append((stored, given.value.num_bytes / self.unit))
            if runs_again is None:
                runs_again = self.model.variable(0.0, 1.0)
                for variable in dict.fromkeys(self.runs.values()):
                    self.model.row([(runs_again, 1.0), (variable, -1.0)], 0.0)
            self.model.row([(stored, 1.0), (runs_again, -1.0)], 0.0)

    def _there(self, index: int) -> list[tuple[int, float]]:
        return [(variables[index], 1.0) for variables in (self.rows.stored, self.runs) if index in variables]

    def _add_stored(self, position: int, stored: int, num_bytes: int, choices: tuple[Choice, ...]) -> None:
        num = num_bytes / self.unit
        self.rows.store.append((stored, num))
        if not num or not self.can_swap or SWAP not in choices:
            return
        if SAVE not in choices:
            self.rows.forced.append((stored, num))
        elif self.is_exact:
            swapped = self.rows.swapped[position] = self.model.binary()
            self.model.row([(stored, 1.0), (swapped, -1.0)], 0.0)
            self.rows.free.append((swapped, num))
        else:
            self.rows.free.append((stored, num))
