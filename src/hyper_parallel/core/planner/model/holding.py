"""What a decision means for the memory of a region: what is held until when, and what the swap engine gets.

Pure bookkeeping, before any step runs; what it takes for granted is in the list of `timeline`, which runs the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hyper_parallel.core.planner.model.choices import SAVE, SWAP, Choice, RegionDecision
from hyper_parallel.core.planner.model.profile import ProfiledOp, Region, StorageFacts
from hyper_parallel.core.regions.rerun_plan import plan_replay


class _ReplayOp(NamedTuple):
    """An op as `plan_replay` sees it: ops are their own results, and input i is ~i."""

    reads: tuple[int, ...]
    makes: tuple[int]
    must_run: bool = False


class SwappedBytes(NamedTuple):
    """A storage of a region that the swap engine gets. Moments are those of `Holding`.

    Attributes:
        number: among those of its region
        made_by: an op, or -1 for an input
        saved_after: when the engine gets it
        dropped_after: when everybody else has let go of it
        taken_until: when the replay, which takes it, lets go of it; None: the replay does not take it
        asked_at: the op whose backward asks for it; None: none does
    """

    number: int
    num_bytes: int
    made_by: int
    saved_after: int
    dropped_after: int
    taken_until: int | None
    asked_at: int | None


class Holding:
    """Which bytes of a region are held until when, under a decision.

    It is made once for a region and used in every step.

    A *moment* is the number of an op (when it is done), or `end` (the forward is over), `handed_on` (the next region
    begins), `kept` (until backward). What the engine does not get is summed up by the moment until which it is held.
    """

    def __init__(self, region: Region, decision: RegionDecision, min_bytes: int) -> None:
        ops = region.ops
        self.path = region.path
        self.num_ops = len(ops)
        self.end, self.handed_on, self.kept = range(self.num_ops, self.num_ops + 3)
        self.forward_ms = _shares(region.forward_ms, ops)
        self.backward_ms = _shares(region.backward_ms, ops)
        self.backward_bytes = max(region.backward_peak_bytes - region.residual_bytes, 0)  # plant: backward-own
        self.temporary_bytes = [op.temporary_bytes for op in ops]
        self.input_bytes = 0
        self.made_bytes = [0] * self.num_ops
        self.freed_bytes = [0] * (self.kept + 1)
        self.saved_residual_bytes = [0] * self.num_ops  # of what is kept: residuals, by the op that made them
        self.swapped: list[SwappedBytes] = []
        self.opens_group: set[int] = set()  # the moments at which something is to be swapped, be it too small or not
        # Of residuals that an op made and that are not swapped: the engine hears of them.
        self.told_bytes = [0] * self.num_ops
        self.makes_residual = [False] * self.num_ops
        self.arrives_at: set[int] = set()  # the ops whose backward asks for a saved residual that an op made
        self._is_plain = decision.is_plain
        self._min_bytes = max(min_bytes, 1)  # plant: smallest
        # Parts of an op are made by it, and given back when its backward is over.
        self._made_with = [region.made_with(index) for index in range(self.num_ops)]
        uses = _last_uses(region)
        self._plan_replay(region, decision, uses)
        for index, op in enumerate(ops):
            for value in op.makes:
                self._hold_made(value, index, decision.ops[index], uses.get(index, index))
        for index, given in enumerate(region.inputs):
            self._hold_input(given.value, index, decision.inputs[index], uses.get(~index, self.end))
        self.made_by = self._by_moment(value.made_by if value.made_by >= 0 else self.end for value in self.swapped)
        self.saved_after = self._by_moment(value.saved_after for value in self.swapped)
        self.dropped_after = self._by_moment(value.dropped_after for value in self.swapped)
        self.taken_until = self._by_moment(value.taken_until for value in self.swapped)
        self.asked_at = self._by_moment(value.asked_at for value in self.swapped)  # plant: asked-at

    def _plan_replay(self, region: Region, decision: RegionDecision, uses: dict[int, int]) -> None:
        is_kept = [choice in (SAVE, SWAP) for choice in decision.ops]
        wanted = [index for index, op in enumerate(region.ops) if op.is_needed and not is_kept[index]]
        ops = [
            _ReplayOp((*op.reads, *(~number for number in op.reads_inputs)), (i,)) for i, op in enumerate(region.ops)
        ]
        self.wanted = [] if self._is_plain else wanted
        self.runs, self.takes = plan_replay(ops, self.wanted, lambda value: value < 0 or is_kept[value])
        self.replays_at = max((uses.get(index, index) for index in self.wanted), default=-1)
        self.replay_ms = [op.forward_ms for op in region.ops]
        self.replay_bytes = [0] * self.num_ops
        self.replay_freed_bytes = [0] * (self.num_ops + 1)
        self.recomputed_bytes = [0] * self.num_ops
        for index in self.runs:
            self.replay_bytes[self._made_with[index]] += region.ops[index].num_bytes
            for value in region.ops[index].makes:
                if value.is_residual:
                    self.recomputed_bytes[self._made_with[index]] += value.num_bytes  # plant: parts-freed
                else:
                    until = self.end if value.freed_after is None else value.freed_after
                    self.replay_freed_bytes[until] += value.num_bytes  # plant: replay-freed

    def _hold_made(self, value: StorageFacts, op: int, choice: Choice | None, asked_at: int) -> None:
        local = until = self.handed_on if value.freed_after is None else value.freed_after  # plant: left-behind
        if value.is_residual and value.num_bytes and not self._is_plain:
            self.makes_residual[op] = True
            if choice != SWAP or value.num_bytes < self._min_bytes:
                self.told_bytes[op] += value.num_bytes
        if self._is_plain:
            until = self.kept if value.is_residual else local
        elif choice not in (SAVE, SWAP):
            until = max(local, self.end) if value.is_residual else local  # plant: recomputed-until
        elif not value.is_residual and op not in self.takes:
            until = max(local, self.end)  # rule 15: only then it is known that nothing needs it; plant: unneeded-until
        elif value.num_bytes:
            leaves = op if value.is_residual else self.end  # plant: leaves
            if choice == SWAP:
                self.opens_group.add(leaves)
            if choice == SWAP and value.num_bytes >= self._min_bytes:
                taken_until = min(local, self.end) if op in self.takes else None
                asked = asked_at if value.is_residual else None
                self._swap(value, self._made_with[op], leaves, max(local, leaves), taken_until, asked)
                return
            until = self.kept
            if value.is_residual:
                self.arrives_at.add(asked_at)
        self.made_bytes[self._made_with[op]] += value.num_bytes  # plant: parts-made
        self.freed_bytes[until] += value.num_bytes
        # The record has what the replay takes.
        if until == self.kept and value.is_residual and op not in self.takes:  # plant: record-holds
            self.saved_residual_bytes[self._made_with[op]] += value.num_bytes  # plant: residual-freed

    def _hold_input(self, value: StorageFacts, index: int, choice: Choice | None, asked_at: int) -> None:
        if self._is_plain:
            until = self.kept if value.is_residual else self.end if value.freed_after is None else value.freed_after
        elif not value.is_residual and not self.wanted:
            until = self.end  # until then a region has its arguments; plant: arguments-until
        else:
            until = self.kept
            if choice == SWAP and value.num_bytes:
                self.opens_group.add(self.end)
            if choice == SWAP and value.num_bytes >= self._min_bytes:
                is_taken = ~index in self.takes
                taken_until = None if not is_taken else self.kept if value.is_residual else self.end
                is_asked = value.is_residual and not is_taken
                self._swap(value, -1, self.end, self.end, taken_until, asked_at if is_asked else None)
                return
        self.input_bytes += value.num_bytes
        self.freed_bytes[until] += value.num_bytes

    def _swap(
        self, value: StorageFacts, made_by: int, saved: int, dropped: int, taken: int | None, asked: int | None
    ) -> None:
        self.swapped.append(SwappedBytes(len(self.swapped), value.num_bytes, made_by, saved, dropped, taken, asked))

    def _by_moment(self, moments: Iterable[int | None]) -> list[list[SwappedBytes]]:
        table: list[list[SwappedBytes]] = [[] for _ in range(self.kept + 1)]
        for value, moment in zip(self.swapped, moments, strict=True):
            if moment is not None:
                table[moment].append(value)
        return table


def _shares(ms: float, ops: Sequence[ProfiledOp]) -> list[float]:
    """Share out a time among ops in the proportion of their forward times."""
    total_ms = sum(op.forward_ms for op in ops)
    return [ms * op.forward_ms / total_ms if total_ms else ms / len(ops) for op in ops]


def _last_uses(region: Region) -> dict[int, int]:
    """Find the last op that reads an op's results, or input i (as ~i), also through views."""
    uses: dict[int, int] = {}
    for index in reversed(range(len(region.ops))):
        op = region.ops[index]
        used_at = index if op.makes else uses.get(index, index)  # plant: use-through-view
        for read in (*op.reads, *(~number for number in op.reads_inputs)):
            uses[read] = max(uses.get(read, 0), used_at)
    return uses
