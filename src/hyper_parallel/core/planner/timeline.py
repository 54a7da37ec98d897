"""One step under a plan, moment by moment: the real swap engine on a device that exists in numbers only.

What is not in a profile is taken to be like this, and the numbers are as good as that:

- An op takes its results and its temporaries when it starts, and gives the temporaries back when it ends. Who reads an op reads all of its results.
- What a region leaves behind (`freed_after=None`) is held until the next region begins, or until the turn is over. Then the inputs of the next
  one are there: they are counted as its own, not as results of the region before.
- A residual that is swapped leaves when its op is done; what only the replay needs, and inputs, leave when the region's forward ends.
- A managed region holds its inputs, what a policy saved, and the residuals that it will recompute until its forward ends (README of
  core/activation_checkpoint, "What holds what").
- The replay comes first in a region's backward, without pause: inputs, then op by op what is taken and what runs again.
- Then backward goes through the ops from last to first; each takes as large a part of `backward_ms` as it took of the forward. A swapped
  residual is asked for where backward gets to the last op that reads it. `backward_peak_bytes` and all that the region keeps are in use
  until its backward is over.
- Outside of regions memory is taken when what lies before a region begins to run, and given back when the same is over in backward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.activation_checkpoint.replay_plan import plan_replay
from hyper_parallel.core.planner.choices import SAVE, SWAP, Decision, RegionDecision, check, plain
from hyper_parallel.core.planner.profile import Op, Region, StepProfile, Value
from hyper_parallel.core.planner.virtual_device import (
    NO_REGION,
    Change,
    Direction,
    Place,
    Use,
    VirtualBuffer,
    VirtualDevice,
    VirtualTier,
)
from hyper_parallel.core.swap.engine import Limits, SwapEngine
from hyper_parallel.core.swap.slot import Group, Handle, Slot
from hyper_parallel.core.swap.states import SlotState

# -- what comes out -------------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """Bytes in use from `ms` on, by what they are for (see `Use`)."""

    ms: float
    base_bytes: int
    outside_bytes: int
    saved_bytes: int
    working_bytes: int
    window_bytes: int
    prefetched_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(self[1:])


class Copy(NamedTuple):
    """One copy over the link."""

    direction: Direction
    region: int
    path: str
    start_ms: float
    end_ms: float
    num_bytes: int


class Stall(NamedTuple):
    """Compute stood still for a copy in that direction while a region ran."""

    kind: Direction
    region: int
    path: str
    start_ms: float
    ms: float


class PeakMoment(NamedTuple):
    """The first moment at which most bytes were in use. `region` and `path` are None in the turn, `op` is None between ops."""

    num_bytes: int
    ms: float
    phase: Literal["forward", "turn", "replay", "backward"]
    region: int | None
    path: str | None
    op: int | None


@dataclass(frozen=True)
class Timeline:
    """One step, when the engine has learned what it learns. Times are from the start of the step.

    Attributes:
        peak: where it is, base included
        forward_ms: until the last region's forward is over
        turn_ms: from there to the first backward of a region
        backward_ms: from there on
        copies, stalls: in the order of their starts; a copy may have been launched in the step before, or end in the next
        host_bytes: most host memory in use
    """

    peak: PeakMoment
    forward_ms: float
    turn_ms: float
    backward_ms: float
    copies: tuple[Copy, ...]
    stalls: tuple[Stall, ...]
    host_bytes: int
    _levels: dict[tuple[Use, int], int] = field(repr=False)  # in use when the step began
    _changes: tuple[Change, ...] = field(repr=False)
    _num_regions: int = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        return self.peak.num_bytes

    @property
    def step_ms(self) -> float:
        return self.forward_ms + self.turn_ms + self.backward_ms

    @property
    def stall_ms(self) -> float:
        return sum(stall.ms for stall in self.stalls)

    @cached_property
    def moments(self) -> list[Moment]:
        """The bytes in use, whenever they change. Of changes at one time the highest and the last are kept, so that the peak is among them."""
        levels = [0] * len(Use)
        for (use, _), num_bytes in self._levels.items():
            levels[use] += num_bytes
        rows = _merged(_running(levels, ((change.ms, change.use, change.num_bytes) for change in self._changes)))
        return [Moment(ms, *row) for ms, row in rows]

    @cached_property
    def region_bytes(self) -> list[list[tuple[float, int]]]:
        """For each region the bytes that are its own, whatever for, whenever they change."""
        levels = [0] * self._num_regions
        changes: list[list[tuple[float, int, int]]] = [[] for _ in levels]
        for (_, region), num_bytes in self._levels.items():
            if region != NO_REGION:
                levels[region] += num_bytes
        for ms, _, region, num_bytes in self._changes:
            if region != NO_REGION:
                changes[region].append((ms, 0, num_bytes))
        curves = [_merged(_running([level], mine)) for level, mine in zip(levels, changes, strict=True)]
        return [[(ms, row[0]) for ms, row in curve] for curve in curves]


_Row = tuple[int, ...]


def _running(levels: list[int], changes: Iterable[tuple[float, int, int]]) -> Iterator[tuple[float, _Row]]:
    yield 0.0, tuple(levels)
    for ms, index, num_bytes in changes:
        levels[index] += num_bytes
        yield ms, tuple(levels)


def _merged(rows: Iterator[tuple[float, _Row]]) -> list[tuple[float, _Row]]:
    """At most two rows for each time: the highest, and the last if it is lower."""
    merged: list[tuple[float, _Row]] = []
    at, highest = next(rows)
    last = highest
    for ms, row in rows:
        if ms != at:
            merged += [(at, highest)] if last == highest else [(at, highest), (at, last)]
            at, highest = ms, row
        elif sum(row) >= sum(highest):
            highest = row
        last = row
    return merged + ([(at, highest)] if last == highest else [(at, highest), (at, last)])


# -- what a decision means for the memory of a region -------------------------------------------------------------------------


class _ReplayOp(NamedTuple):
    """An op as `plan_replay` sees it: ops are their own results, and input i is ~i."""

    reads: tuple[int, ...]
    makes: tuple[int]
    must_run: bool = False


class _Swapped(NamedTuple):
    """A value that the engine gets. Moments are those of `_Holding`.

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


class _Holding:
    """Which bytes of a region are held until when, under a decision.

    A *moment* is the number of an op (when it is done), or `end` (the forward is over), `handed_on` (the next region begins), `kept` (the
    backward is over). What the engine does not get is summed up by the moment until which it is held.
    """

    def __init__(self, region: Region, decision: RegionDecision, min_bytes: int) -> None:
        ops = region.ops
        self.path = region.path
        self.num_ops = len(ops)
        self.end, self.handed_on, self.kept = range(self.num_ops, self.num_ops + 3)
        self.forward_ms = _shares(region.forward_ms, ops)
        self.backward_ms = _shares(region.backward_ms, ops)
        self.backward_bytes = max(region.backward_peak_bytes - region.residual_bytes, 0)
        self.temporary_bytes = [op.temporary_bytes for op in ops]
        self.input_bytes = 0
        self.made_bytes = [0] * self.num_ops
        self.freed_bytes = [0] * (self.kept + 1)
        self.swapped: list[_Swapped] = []
        # Of residuals that ops made: where the first is that is kept, and whether one of them is saved. The engine is told of these.
        self.first_kept: int | None = None
        self.has_saved = False
        self.opens_group: set[int] = set()  # the moments at which something is to be swapped, be it too small or not
        self._is_plain = decision.is_plain
        self._min_bytes = max(min_bytes, 1)
        self._plan_replay(region, decision)
        uses = _last_uses(region)
        for index, op in enumerate(ops):
            for value in op.makes:
                self._hold_made(value, index, decision.ops[index], uses.get(index, index))
        for index, each in enumerate(region.inputs):
            self._hold_input(each.value, index, decision.inputs[index], uses.get(~index, self.end))
        self._sum_up_replay(region)
        self.saved_after = self._by_moment(value.saved_after for value in self.swapped)
        self.dropped_after = self._by_moment(value.dropped_after for value in self.swapped)
        self.made_by = self._by_moment(value.made_by if value.made_by >= 0 else self.end for value in self.swapped)
        self.taken_until = self._by_moment(value.taken_until for value in self.swapped)
        self.asked_at = self._by_moment(value.asked_at for value in self.swapped)

    def _plan_replay(self, region: Region, decision: RegionDecision) -> None:
        is_kept = [choice in (SAVE, SWAP) for choice in decision.ops]
        wanted = [index for index, op in enumerate(region.ops) if op.is_needed and not is_kept[index]]
        ops = [_ReplayOp((*op.reads, *(~each for each in op.reads_inputs)), (i,)) for i, op in enumerate(region.ops)]
        self.wanted = [] if self._is_plain else wanted
        self.runs, self.takes = plan_replay(ops, self.wanted, lambda value: value < 0 or is_kept[value])

    def _hold_made(self, value: Value, op: int, choice: str | None, asked_at: int) -> None:
        local = self.handed_on if value.freed_after is None else value.freed_after
        until = local
        if self._is_plain:
            until = self.kept if value.is_residual else local
        elif choice not in (SAVE, SWAP):
            until = max(local, self.end) if value.is_residual else local
        elif not value.is_residual and op not in self.takes:
            until = max(local, self.end)  # rule 15: only then it is known that nothing needs it
        elif value.num_bytes:
            leaves = op if value.is_residual else self.end
            if value.is_residual and self.first_kept is None:
                self.first_kept = op
            if choice == SWAP:
                self.opens_group.add(leaves)
            if choice == SWAP and value.num_bytes >= self._min_bytes:
                taken_until = min(local, self.end) if op in self.takes else None
                self._swap(value, op, leaves, max(local, leaves), taken_until, asked_at if value.is_residual else None)
                return
            until = self.kept
            self.has_saved |= value.is_residual
        self.made_bytes[op] += value.num_bytes
        self.freed_bytes[until] += value.num_bytes

    def _hold_input(self, value: Value, index: int, choice: str | None, asked_at: int) -> None:
        if self._is_plain:
            until = self.kept if value.is_residual else self.end if value.freed_after is None else value.freed_after
        elif not value.is_residual and not self.wanted:
            until = self.end  # until then a region has its arguments
        else:
            if choice == SWAP and value.num_bytes:
                self.opens_group.add(self.end)
            if choice == SWAP and value.num_bytes >= self._min_bytes:
                is_taken = ~index in self.takes
                taken_until = None if not is_taken else self.kept if value.is_residual else self.end
                asked = asked_at if value.is_residual and not is_taken else None
                self._swap(value, -1, self.end, self.end, taken_until, asked)
                return
            until = self.kept
        self.input_bytes += value.num_bytes
        self.freed_bytes[until] += value.num_bytes

    def _swap(self, value: Value, made_by: int, saved: int, dropped: int, taken: int | None, asked: int | None) -> None:
        self.swapped.append(_Swapped(len(self.swapped), value.num_bytes, made_by, saved, dropped, taken, asked))

    def _by_moment(self, moments: Iterable[int | None]) -> list[list[_Swapped]]:
        table: list[list[_Swapped]] = [[] for _ in range(self.kept + 1)]
        for value, moment in zip(self.swapped, moments, strict=True):
            if moment is not None:
                table[moment].append(value)
        return table

    def _sum_up_replay(self, region: Region) -> None:
        self.replay_ms = [op.forward_ms for op in region.ops]
        self.replay_bytes = [op.num_bytes for op in region.ops]
        self.replay_freed_bytes = [0] * (self.num_ops + 1)
        self.recomputed_bytes = 0
        for value in (value for index in self.runs for value in region.ops[index].makes):
            if value.is_residual:
                self.recomputed_bytes += value.num_bytes
            else:
                self.replay_freed_bytes[self.end if value.freed_after is None else value.freed_after] += value.num_bytes


def _shares(ms: float, ops: Sequence[Op]) -> list[float]:
    """A time, shared out as the ops of a forward share theirs."""
    total_ms = sum(op.forward_ms for op in ops)
    return [ms * op.forward_ms / total_ms if total_ms else ms / len(ops) for op in ops]


def _last_uses(region: Region) -> dict[int, int]:
    """The last op that reads an op's results, or input i (as ~i), also through views."""
    uses: dict[int, int] = {}
    for index in reversed(range(len(region.ops))):
        op = region.ops[index]
        used_at = index if op.makes else uses.get(index, index)
        for read in (*op.reads, *(~each for each in op.reads_inputs)):
            uses[read] = max(uses.get(read, 0), used_at)
    return uses


# -- a step -------------------------------------------------------------------------------------------------------------------


class _Call:
    """One region in one step: holds what a real one holds, and calls the engine as one does."""

    def __init__(self, index: int, holding: _Holding, device: VirtualDevice, engine: SwapEngine) -> None:
        self._index = index
        self._holding = holding
        self._device = device
        self._memory = device.memory
        self._engine = engine
        self._group: Group | None = None
        self._tells_arrival = False
        # By the number of a swapped value: what somebody beside the engine holds of it, and who will ask for it.
        self._buffers: dict[int, VirtualBuffer] = {}
        self._slots: dict[int, Slot] = {}
        self._replay_handles: dict[int, Handle] = {}
        self._handles: dict[int, Handle] = {}

    # Forward.

    def forward(self, ms: float) -> None:
        """`ms`: what the forward takes where there is no op to take it."""
        holding = self._holding
        self._change(Use.WORKING, holding.input_bytes)
        self._make(holding.made_by[holding.end])
        for op in range(holding.num_ops):
            self._memory.place = Place("forward", self._index, op)
            self._change(Use.WORKING, holding.made_bytes[op] + holding.temporary_bytes[op])
            self._make(holding.made_by[op])
            self._device.compute.run(holding.forward_ms[op])
            self._change(Use.WORKING, -holding.temporary_bytes[op])
            self._keep(op)
            self._let_go(op)
        self._memory.place = Place("forward", self._index)
        if not holding.num_ops:
            self._device.compute.run(ms)
        self._keep(holding.end)
        if holding.wanted and self._group is not None:
            self._engine.expect(self._group, self._taken_slots())
        self._let_go(holding.end)
        kept = holding.freed_bytes[holding.kept]
        self._memory.rename((Use.WORKING, self._index), (Use.SAVED, self._index), kept)

    def hand_on(self) -> None:
        """The next region begins, or the turn is over."""
        self._let_go(self._holding.handed_on)

    def _make(self, values: list[_Swapped]) -> None:
        for value in values:
            self._buffers[value.number] = self._device.buffer(value.num_bytes, Use.WORKING, self._index)

    def _keep(self, moment: int) -> None:
        """Give to the engine what is swapped now."""
        holding = self._holding
        if moment in holding.opens_group or (moment == holding.first_kept and self._engine.has_groups()):
            self._open_group()
        if moment == holding.first_kept:
            self._tells_arrival = holding.has_saved and self._group is not None
        for value in holding.saved_after[moment]:
            group = self._open_group()
            slot = self._engine.save(self._buffers[value.number], value.num_bytes, group, holding.path, _never_changed)
            self._slots[value.number] = slot
            if value.taken_until is not None:
                self._replay_handles[value.number] = Handle(slot, group)
            if value.taken_until is None or value.asked_at is not None:
                self._handles[value.number] = Handle(slot, group)

    def _open_group(self) -> Group:
        if self._group is None:
            self._group = self._engine.new_group(self._holding.path)
        return self._group

    def _taken_slots(self) -> list[Slot]:
        taken = [value for value in self._holding.swapped if value.taken_until is not None]
        return [self._slots[value.number] for value in sorted(taken, key=lambda value: value.made_by)]  # inputs first

    def _let_go(self, moment: int) -> None:
        self._change(Use.WORKING, -self._holding.freed_bytes[moment])
        for value in self._holding.dropped_after[moment]:
            buffer, slot = self._buffers.pop(value.number), self._slots[value.number]
            if slot.source is not None:
                buffer.rename(Use.WINDOW if slot.state is SlotState.D2H else Use.SAVED, self._index)
            del buffer

    # Backward.

    def backward(self, ms: float) -> None:
        """`ms`: what the backward takes where there is no op to take it."""
        holding = self._holding
        self._memory.place = Place("backward", self._index)
        if self._tells_arrival and self._group is not None:
            self._engine.arrive(self._group)
        if holding.wanted:
            self._replay()
        self._memory.place = Place("backward", self._index)
        self._change(Use.WORKING, holding.backward_bytes)
        self._ask(holding.asked_at[holding.end], self._handles)
        for op in reversed(range(holding.num_ops)):
            self._memory.place = Place("backward", self._index, op)
            self._ask(reversed(holding.asked_at[op]), self._handles)
            self._device.compute.run(holding.backward_ms[op])
        self._memory.place = Place("backward", self._index)
        if not holding.num_ops:
            self._device.compute.run(ms)
        self._change(Use.WORKING, -holding.backward_bytes - holding.recomputed_bytes)
        self._change(Use.SAVED, -holding.freed_bytes[holding.kept])
        for mine in (self._handles, self._replay_handles, self._slots, self._buffers):
            mine.clear()
        self._group = None

    def _replay(self) -> None:
        holding = self._holding
        self._memory.place = Place("replay", self._index)
        self._take(holding.made_by[holding.end])
        last = max(holding.wanted)
        for op in range(last + 1):
            if op in holding.runs:
                self._memory.place = Place("replay", self._index, op)
                self._change(Use.WORKING, holding.replay_bytes[op] + holding.temporary_bytes[op])
                self._device.compute.run(holding.replay_ms[op])
                self._change(Use.WORKING, -holding.temporary_bytes[op])
            else:
                self._take(holding.made_by[op])
            self._forget(op)
        for moment in range(last + 1, holding.end + 1):  # it stops when it has met all that is wanted
            self._forget(moment)

    def _take(self, values: list[_Swapped]) -> None:
        self._ask((value for value in values if value.taken_until is not None), self._replay_handles)

    def _forget(self, moment: int) -> None:
        self._change(Use.WORKING, -self._holding.replay_freed_bytes[moment])
        for value in self._holding.taken_until[moment]:
            del self._buffers[value.number]

    def _ask(self, values: Iterable[_Swapped], handles: dict[int, Handle]) -> None:
        for value in values:
            buffer: VirtualBuffer = self._engine.acquire(handles[value.number])
            if buffer.use in (Use.WINDOW, Use.PREFETCHED):
                buffer.rename(Use.WORKING, self._index)
            self._buffers[value.number] = buffer
            del buffer

    def _change(self, use: Use, num_bytes: int) -> None:
        self._memory.change(use, self._index, num_bytes)


def _never_changed() -> int:
    return 0


class _Steps:
    """Runs steps of a model, one after the other, on one device with one engine."""

    def __init__(
        self, profile: StepProfile, decision: Decision, engine: SwapEngine, device: VirtualDevice, min_bytes: int
    ) -> None:
        self._profile = profile
        self._device = device
        self._engine = engine
        pairs = zip(profile.regions, decision, strict=True)
        self._holdings = [_Holding(region, chosen, min_bytes) for region, chosen in pairs]
        self._outside_bytes = 0
        device.memory.change(Use.BASE, NO_REGION, profile.base_bytes)

    def run(self) -> tuple[float, float, float]:
        """One step; how long forward, turn and backward took."""
        self._device.sync()
        self._device.begin()
        compute, memory = self._device.compute, self._device.memory
        calls = [_Call(i, holding, self._device, self._engine) for i, holding in enumerate(self._holdings)]
        start_ms = compute.now_ms
        self._forward(calls)
        turn_ms = compute.now_ms
        turn = self._profile.turn
        memory.place = Place("turn", NO_REGION)
        memory.change(Use.WORKING, NO_REGION, turn.peak_bytes)
        compute.run(turn.ms)
        memory.change(Use.WORKING, NO_REGION, -turn.peak_bytes)
        if calls:
            calls[-1].hand_on()
        backward_ms = compute.now_ms
        self._backward(calls)
        return turn_ms - start_ms, backward_ms - turn_ms, compute.now_ms - backward_ms

    def _forward(self, calls: list[_Call]) -> None:
        before: _Call | None = None
        for index, (region, call) in enumerate(zip(self._profile.regions, calls, strict=True)):
            self._device.memory.place = Place("forward", index)
            self._set_outside(region.outside_bytes)
            self._device.compute.run(region.before_ms)
            if before is not None:
                before.hand_on()
            call.forward(region.forward_ms)
            before = call

    def _backward(self, calls: list[_Call]) -> None:
        regions = self._profile.regions
        for index in reversed(range(len(calls))):
            calls[index].backward(regions[index].backward_ms)
            self._device.compute.run(regions[index].after_ms)
            self._set_outside(regions[index - 1].outside_bytes if index else 0)

    def _set_outside(self, num_bytes: int) -> None:
        self._device.memory.change(Use.OUTSIDE, NO_REGION, num_bytes - self._outside_bytes)
        self._outside_bytes = num_bytes


def run_step(
    profile: StepProfile,
    decision: Decision,
    limits: Limits,
    *,
    min_bytes: int = 0,
    num_steps: int = 3,
    host_bytes: int | None = None,
    host_lead_ms: float = 0.0,
) -> Timeline:
    """One step under a decision: the last of `num_steps`, of which the others let the engine learn.

    Args:
        limits: of the engine.
        min_bytes: what is smaller stays on the device.
        host_bytes: what the host has room for; None: enough.
        host_lead_ms: how far the host runs ahead of the device; see C3 in `virtual_device`.

    Raises:
        ValueError: the decision cannot be carried out (`choices.check`), or swaps where there is no link.

    Example:
        >>> from hyper_parallel.core.planner.profile import Op, Region, StepProfile, Value
        >>> op = Op("", "exp", 0, 0, forward_ms=1.0, makes=(Value(8, is_residual=True),))
        >>> region = Region(
        ...     "block", 0, (op,), (), forward_ms=1.0, backward_ms=2.0, forward_peak_bytes=8, backward_peak_bytes=12
        ... )
        >>> profile = StepProfile((region,), base_bytes=100, peak_bytes=112, step_ms=3.0)
        >>> timeline = run_step(profile, (RegionDecision(False, ("save",), ()),), Limits(0, 0))
        >>> timeline.peak_bytes, timeline.step_ms, timeline.peak.phase
        (112, 3.0, 'backward')
    """
    _check(profile, decision, num_steps)
    device = VirtualDevice(profile.link, host_lead_ms)
    tier = VirtualTier(host_bytes)
    engine = SwapEngine(device, [tier], copy.copy(limits))
    steps = _Steps(profile, decision, engine, device, min_bytes)
    for _ in range(num_steps):
        start_ms = device.compute.now_ms
        times = steps.run()
    return _timeline(profile, device, tier, start_ms, times)


def plain_step(profile: StepProfile) -> Timeline:
    """The step without any plan."""
    decision = tuple(plain(region) for region in profile.regions)
    device, tier = VirtualDevice(None), VirtualTier()
    engine = SwapEngine(device, [tier], Limits(0, 0))
    times = _Steps(profile, decision, engine, device, 0).run()
    return _timeline(profile, device, tier, 0.0, times)


def _check(profile: StepProfile, decision: Decision, num_steps: int) -> None:
    if num_steps < 1:
        raise ArgumentError("There is no step to show.", expected="num_steps of 1 or more", got=str(num_steps))
    if len(decision) != len(profile.regions):
        raise ArgumentError(
            "A decision has one entry for each region.", expected=str(len(profile.regions)), got=str(len(decision))
        )
    for region, chosen in zip(profile.regions, decision, strict=True):
        check(region, chosen)
        if profile.link is None and SWAP in (*chosen.ops, *chosen.inputs):
            raise ArgumentError("Something is swapped, and the profile has no link to the host.", where=region.path)


def _timeline(
    profile: StepProfile, device: VirtualDevice, tier: VirtualTier, start_ms: float, times: tuple[float, float, float]
) -> Timeline:
    memory = device.memory
    paths = [region.path for region in profile.regions]
    place = memory.peak_place
    region = None if place.region == NO_REGION else place.region
    peak = PeakMoment(
        memory.peak_bytes,
        memory.peak_ms - start_ms,
        place.phase,
        region,
        None if region is None else paths[region],
        place.op,
    )
    copies = [
        Copy(
            each.direction,
            each.region,
            paths[each.region],
            each.start_ms - start_ms,
            each.end_ms - start_ms,
            each.num_bytes,
        )
        for each in device.copies
    ]
    stalls = [
        Stall(each.copy, each.region, paths[each.region], each.start_ms - start_ms, each.ms) for each in device.stalls
    ]
    return Timeline(
        peak,
        *times,
        tuple(sorted(copies, key=lambda each: each.start_ms)),
        tuple(stalls),
        tier.peak_bytes,
        memory.levels,
        tuple(change._replace(ms=change.ms - start_ms) for change in memory.changes),
        len(paths),
    )
