"""One step under a plan, moment by moment: the real swap engine on a device that exists in numbers only.

What a profile does not say is taken to be like this, and the numbers are as good as that:

- An op takes memory for its results and temporaries when it starts, and gives back the temporaries when it ends. Who
  reads an op reads all of its results.
- What a region leaves behind (`freed_after=None`) is held until the next region begins, or the turn. The inputs of a
  region are there when it begins, and are its own: nothing is counted both there and in the region before.
- What runs between regions has its memory (`outside_bytes`) from its own start in forward to its own end in backward.
- A managed region holds its arguments, what the policy saved, and the residuals that it will recompute until its
  forward ends (README of core/activation_checkpoint, "What holds what"). A residual that is swapped leaves when its op
  is done; what only the replay needs, and inputs, leave when the forward ends.
- The replay comes first in a region's backward: inputs, then op by op what is taken and what runs again.
- Then backward goes through the ops from the last to the first; each takes as large a part of `backward_ms` as it took
  of the forward. A residual is asked for at the last op that reads it, and given back when backward has passed the op
  that made it. What else the region has, and what `backward_peak_bytes` has beside residuals, is in use until its
  backward is over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.planner.model.choices import Decision, check, plain
from hyper_parallel.core.planner.model.holding import Holding, SwappedBytes
from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.model.virtual_device import (
    NO_REGION,
    Change,
    Copy,
    Place,
    Stall,
    Use,
    VirtualBuffer,
    VirtualDevice,
    VirtualTier,
)
from hyper_parallel.core.swap.engine import Limits, SwapEngine
from hyper_parallel.core.swap.slot import Group, Handle, Slot
from hyper_parallel.core.swap.states import SlotState

# -- what comes out ----------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """Bytes in use from `ms` on, by what they are for: see `Use`, in whose order these are."""

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


@dataclass(frozen=True)
class Timeline:
    """One step under a plan, when the engine has learned what it learns.

    Times are from the start of the step; regions are numbers, see `paths`.

    Attributes:
        peak_bytes: most bytes in use at one time, base included
        peak_ms, peak_place: when and where that was first
        forward_ms: until the last region's forward is over
        turn_ms: from there until the last region's backward begins
        backward_ms: from there on
        copies: in the order of launching; one may end after the step
        host_bytes: most host memory in use
    """

    paths: tuple[str, ...]
    peak_bytes: int
    peak_ms: float
    peak_place: Place
    forward_ms: float
    turn_ms: float
    backward_ms: float
    copies: tuple[Copy, ...]
    stalls: tuple[Stall, ...]
    host_bytes: int
    _levels: dict[tuple[Use, int], int] = field(repr=False)  # when the step began
    _changes: tuple[Change, ...] = field(repr=False)

    @property
    def step_ms(self) -> float:
        return self.forward_ms + self.turn_ms + self.backward_ms

    def bytes_by(self, column_of: Callable[[Use, int], int], num_columns: int) -> list[tuple[float, tuple[int, ...]]]:
        """List the bytes in use, whenever they change.

        Of changes at one time the highest sum and the last are listed: so the peak is, too.

        Args:
            column_of: for a use and a region (or NO_REGION) the column in which their bytes are counted.
        """
        levels = [0] * num_columns
        for (use, region), level in self._levels.items():
            levels[column_of(use, region)] += level
        changes = ((ms, column_of(use, region), num_bytes) for ms, use, region, num_bytes in self._changes)
        return _merged(_running(levels, changes))

    @cached_property
    def moments(self) -> list[Moment]:
        """List the bytes in use by what they are for, whenever they change."""
        return [Moment(ms, *row) for ms, row in self.bytes_by(lambda use, _: use, len(Use))]

    @cached_property
    def region_bytes(self) -> list[list[tuple[float, int]]]:
        """List for each region what it has on the device, whatever for, whenever that changes."""
        changes: list[list[tuple[float, int, int]]] = [[] for _ in self.paths]
        for ms, _, region, num_bytes in self._changes:
            if region != NO_REGION:
                changes[region].append((ms, 0, num_bytes))
        curves = []
        for index, mine in enumerate(changes):
            level = sum(level for (_, region), level in self._levels.items() if region == index)
            curves.append([(ms, num_bytes) for ms, (num_bytes,) in _merged(_running([level], mine))])
        return curves


def _running(levels: list[int], changes: Iterable[tuple[float, int, int]]) -> Iterator[tuple[float, tuple[int, ...]]]:
    yield 0.0, tuple(levels)
    for ms, index, num_bytes in changes:
        levels[index] += num_bytes
        yield ms, tuple(levels)


def _merged(rows: Iterator[tuple[float, tuple[int, ...]]]) -> list[tuple[float, tuple[int, ...]]]:
    """Keep at most two rows for each time: the one with the highest sum, and the last."""
    merged = [next(rows)]
    highest = 0  # where in `merged` the highest of this time is: last, or last but one
    for ms, row in rows:
        if ms != merged[-1][0]:
            highest = len(merged)
        elif sum(row) >= sum(merged[highest][1]):
            del merged[highest:]
        else:
            del merged[highest + 1 :]
        merged.append((ms, row))
    return merged


# -- a step ------------------------------------------------------------------------------------------------------------


class _TimelineRegion:
    """One region in one step: it holds what a real region holds, and calls the engine as one does."""

    def __init__(
        self, index: int, holding: Holding, device: VirtualDevice, engine: SwapEngine, ahead_bytes: int | None
    ) -> None:
        self._index = index
        self._ahead_bytes = ahead_bytes
        self._holding = holding
        self._device = device
        self._memory = device.memory
        self._engine = engine
        self._group: Group | None = None
        self._tells = False  # the engine of what is not swapped
        # By the number of a swapped value: what somebody beside the engine holds of it, and who will ask for it.
        self._buffers: dict[int, VirtualBuffer] = {}
        self._slots: dict[int, Slot] = {}
        self._replay_handles: dict[int, Handle] = {}
        self._handles: dict[int, Handle] = {}

    # Forward.

    def forward(self, ms: float) -> None:
        """Run the region's forward. `ms`: what it takes where there is no op to take it."""
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
            taken = [value for value in holding.swapped if value.taken_until is not None]
            taken.sort(key=lambda value: value.made_by)  # inputs first; plant: inputs-first
            self._engine.expect(self._group, [self._slots[value.number] for value in taken])  # plant: tell-order
        self._let_go(holding.end)
        kept_bytes = holding.freed_bytes[holding.kept]
        self._memory.rename((Use.WORKING, self._index), (Use.SAVED, self._index), kept_bytes)
        if self._tells and self._group is not None:
            self._engine.end_forward(self._group)  # plant: tell-end

    def hand_on(self) -> None:
        """Let go of what the region left behind: the next region begins, or the turn."""
        self._let_go(self._holding.handed_on)

    def _make(self, values: list[SwappedBytes]) -> None:
        for value in values:
            self._buffers[value.number] = self._device.buffer(value.num_bytes, Use.WORKING, self._index)

    def _keep(self, moment: int) -> None:
        """Give the engine what is swapped at this moment, and tell it of what stays."""
        holding = self._holding
        if moment in holding.opens_group:
            self._open_group()
        if moment < holding.num_ops and holding.makes_residual[moment] and self._engine.has_groups():
            self._open_group()
            self._tells = True
        for value in holding.saved_after[moment]:
            group, buffer = self._open_group(), self._buffers[value.number]
            slot = self._engine.save(buffer, value.num_bytes, group, holding.path, _never_changed)
            self._slots[value.number] = slot
            if value.taken_until is not None:
                self._replay_handles[value.number] = Handle(slot, group)
            if value.taken_until is None or value.asked_at is not None:
                self._handles[value.number] = Handle(slot, group)
        if self._tells and self._group is not None and moment < holding.num_ops and holding.told_bytes[moment]:
            self._engine.keep(self._group, holding.told_bytes[moment])  # plant: tell-kept

    def _open_group(self) -> Group:
        if self._group is None:
            self._group = self._engine.new_group(self._holding.path, self._ahead_bytes)
        return self._group

    def _let_go(self, moment: int) -> None:
        self._change(Use.WORKING, -self._holding.freed_bytes[moment])
        for value in self._holding.dropped_after[moment]:
            buffer, slot = self._buffers.pop(value.number), self._slots[value.number]
            if slot.source is not None:
                buffer.rename(Use.WINDOW if slot.state is SlotState.D2H else Use.SAVED, self._index)
            del buffer

    # Backward.

    def backward(self, ms: float) -> None:
        """Run the region's backward. `ms`: what it takes where there is no op to take it."""
        holding = self._holding
        self._slots.clear()  # from now on only handles hold them
        if holding.wanted:
            self._memory.place = Place("replay", self._index)
            if max(holding.arrives_at, default=-1) >= holding.replays_at:  # plant: arrives-first
                self._arrive()
            if not holding.swapped:  # plant: nothing-swapped
                self._arrive()
            self._replay()
            if self._group is not None:  # plant: tell-replayed
                self._engine.arrive(self._group)
        self._memory.place = Place("backward", self._index)
        self._work(holding.backward_bytes)
        self._ask(reversed(holding.asked_at[holding.end]), self._handles)
        for op in reversed(range(holding.num_ops)):
            self._memory.place = Place("backward", self._index, op)
            self._backward_of(op)
        self._memory.place = Place("backward", self._index)
        if not holding.num_ops:
            self._device.compute.run(ms)
        self._work(-holding.backward_bytes)
        self._change(Use.SAVED, sum(holding.saved_residual_bytes) - holding.freed_bytes[holding.kept])
        for mine in (self._handles, self._replay_handles, self._buffers):
            mine.clear()
        self._group = None

    def _backward_of(self, op: int) -> None:
        holding = self._holding
        if op in holding.arrives_at:
            self._arrive()
        self._ask(reversed(holding.asked_at[op]), self._handles)
        self._device.compute.run(holding.backward_ms[op])
        self._change(Use.WORKING, -holding.recomputed_bytes[op])
        self._change(Use.SAVED, -holding.saved_residual_bytes[op])
        for value in holding.made_by[op]:
            if self._handles.pop(value.number, None) is not None:  # plant: drop-handle
                del self._buffers[value.number]

    def _replay(self) -> None:
        holding = self._holding
        self._take(holding.made_by[holding.end])
        for op in range(holding.num_ops):  # past the last one that runs there is nothing but to let go: it stops there
            self._memory.place = Place("replay", self._index, op)
            if op in holding.runs:
                self._change(Use.WORKING, holding.replay_bytes[op] + holding.temporary_bytes[op])  # plant: replay-works
                self._device.compute.run(holding.replay_ms[op])
                self._change(Use.WORKING, -holding.temporary_bytes[op])
            else:
                self._take(holding.made_by[op])
            self._forget(op)
        self._forget(holding.end)

    def _take(self, values: list[SwappedBytes]) -> None:
        self._ask((value for value in values if value.taken_until is not None), self._replay_handles)

    def _forget(self, moment: int) -> None:
        self._change(Use.WORKING, -self._holding.replay_freed_bytes[moment])
        for value in self._holding.taken_until[moment]:  # plant: replay-lets-go
            del self._buffers[value.number]

    def _arrive(self) -> None:
        if self._tells and self._group is not None:  # plant: tell-arrival
            self._engine.arrive(self._group)

    def _ask(self, values: Iterable[SwappedBytes], handles: dict[int, Handle]) -> None:
        for value in values:
            buffer: VirtualBuffer = self._engine.acquire(handles[value.number])
            if buffer.use in (Use.WINDOW, Use.PREFETCHED):
                buffer.rename(Use.WORKING, self._index)
            self._buffers[value.number] = buffer
            del buffer

    def _work(self, num_bytes: int) -> None:
        """Take what kernels of a backward need while they run.

        The engine is asked between kernels, and does not see it.
        """
        self._change(Use.WORKING, num_bytes)
        self._device.hidden_bytes += num_bytes

    def _change(self, use: Use, num_bytes: int) -> None:
        self._memory.change(use, self._index, num_bytes)


def _never_changed() -> int:
    return 0


class _Steps:
    """Runs steps of a model one after the other, on one device with one engine.

    So the engine learns as it does in training.
    """

    def __init__(
        self,
        profile: StepProfile,
        decision: Decision,
        limits: Limits,
        *,
        min_bytes: int = 0,
        host_bytes: int | None = None,
        host_lead_ms: float = 0.0,
        ahead_bytes: Sequence[int] = (),
    ) -> None:
        self._profile = profile
        self._ahead_bytes: list[int | None] = [*ahead_bytes] or [None] * len(profile.regions)
        self._device = VirtualDevice(profile.link, host_lead_ms)
        self._tier = VirtualTier(host_bytes)
        self._engine = SwapEngine(self._device, [self._tier], copy.copy(limits))  # plant: limits
        pairs = zip(profile.regions, decision, strict=True)
        self._holdings = [Holding(region, chosen, min_bytes) for region, chosen in pairs]
        self._outside_bytes = 0
        self._device.memory.change(Use.BASE, NO_REGION, profile.base_bytes)

    def run(self) -> Timeline:
        """Run one step."""
        device, turn = self._device, self._profile.turn
        device.sync()
        device.begin()
        calls = [
            _TimelineRegion(index, holding, device, self._engine, ahead_bytes)
            for index, (holding, ahead_bytes) in enumerate(zip(self._holdings, self._ahead_bytes, strict=True))
        ]
        start_ms = device.compute.now_ms
        self._forward(calls)
        turn_ms = device.compute.now_ms
        device.memory.place = Place("turn", NO_REGION)
        if calls:
            calls[-1].hand_on()  # what the last region leaves behind is in the turn's own peak
        device.memory.change(Use.WORKING, NO_REGION, turn.peak_bytes)
        device.compute.run(turn.ms)
        device.memory.change(Use.WORKING, NO_REGION, -turn.peak_bytes)
        backward_ms = device.compute.now_ms
        self._backward(calls)
        return self._timeline(start_ms, turn_ms, backward_ms, device.compute.now_ms)

    def _forward(self, calls: list[_TimelineRegion]) -> None:
        before: _TimelineRegion | None = None
        for index, (region, call) in enumerate(zip(self._profile.regions, calls, strict=True)):
            self._device.memory.place = Place("forward", index)
            self._set_outside(region.outside_bytes)  # plant: outside-first
            self._device.compute.run(region.before_ms)
            if before is not None:
                before.hand_on()
            call.forward(region.forward_ms)
            before = call

    def _backward(self, calls: list[_TimelineRegion]) -> None:
        regions = self._profile.regions
        for index in reversed(range(len(calls))):
            calls[index].backward(regions[index].backward_ms)
            self._device.compute.run(regions[index].after_ms)
            self._set_outside(regions[index - 1].outside_bytes if index else 0)

    def _set_outside(self, num_bytes: int) -> None:
        self._device.memory.change(Use.OUTSIDE, NO_REGION, num_bytes - self._outside_bytes)
        self._outside_bytes = num_bytes

    def _timeline(self, start_ms: float, turn_ms: float, backward_ms: float, end_ms: float) -> Timeline:
        device, memory = self._device, self._device.memory
        return Timeline(
            paths=tuple(region.path for region in self._profile.regions),
            peak_bytes=memory.peak_bytes,
            peak_ms=memory.peak_ms - start_ms,
            peak_place=memory.peak_place,
            forward_ms=turn_ms - start_ms,
            turn_ms=backward_ms - turn_ms,
            backward_ms=end_ms - backward_ms,
            copies=tuple(
                entry._replace(start_ms=entry.start_ms - start_ms, end_ms=entry.end_ms - start_ms)
                for entry in device.copies
            ),
            stalls=tuple(stall._replace(start_ms=stall.start_ms - start_ms) for stall in device.stalls),
            host_bytes=self._tier.peak_bytes,
            _levels=memory.levels,
            _changes=tuple(Change(ms - start_ms, use, region, size) for ms, use, region, size in memory.changes),
        )


def run_step(
    profile: StepProfile,
    decision: Decision,
    limits: Limits,
    *,
    min_bytes: int = 0,
    num_steps: int = 3,
    host_bytes: int | None = None,
    host_lead_ms: float = 0.0,
    ahead_bytes: Sequence[int] = (),
) -> Timeline:
    """Run a step under a decision, and show the last of `num_steps`: in the others the engine learns.

    Args:
        limits: of the engine.
        min_bytes: what is smaller stays on the device.
        host_bytes: what the host has room for; None: enough.
        host_lead_ms: how far the host runs ahead of the device; see C3 in `virtual_device`.
        ahead_bytes: for each region, what may be loaded for others during its backward; without it the engine decides.

    Raises:
        ValueError: the decision cannot be carried out (`choices.check`), or swaps where there is no link.

    Example:
        >>> from hyper_parallel.core.planner.model.choices import SAVE, RegionDecision
        >>> from hyper_parallel.core.planner.model.profile import ProfiledOp, Region, StepProfile, StorageFacts
        >>> op = ProfiledOp("", "exp", 0, 0, forward_ms=1.0, makes=(StorageFacts(8, is_residual=True),))
        >>> region = Region(
        ...     "block", 0, (op,), (), forward_ms=1.0, backward_ms=2.0, forward_peak_bytes=8, backward_peak_bytes=12
        ... )
        >>> profile = StepProfile((region,), base_bytes=100, peak_bytes=112, step_ms=3.0)
        >>> timeline = run_step(profile, (RegionDecision(False, (SAVE,), ()),), Limits(0, 0))
        >>> timeline.peak_bytes, timeline.step_ms, timeline.peak_place.phase
        (112, 3.0, 'backward')
    """
    if num_steps < 1:
        raise ArgumentError("There is no step to show.", expected="num_steps of 1 or more", got=str(num_steps))
    _check(profile, decision)
    steps = _Steps(
        profile,
        decision,
        limits,
        min_bytes=min_bytes,
        host_bytes=host_bytes,
        host_lead_ms=host_lead_ms,
        ahead_bytes=ahead_bytes,
    )
    for _ in range(num_steps - 1):
        steps.run()
    return steps.run()


def plain_step(profile: StepProfile) -> Timeline:
    """Run the step without any plan."""
    return _Steps(profile, tuple(plain(region) for region in profile.regions), Limits(0, 0)).run()


def _check(profile: StepProfile, decision: Decision) -> None:
    if len(decision) != len(profile.regions):
        raise ArgumentError(
            "A decision has one entry for each region.", expected=str(len(profile.regions)), got=str(len(decision))
        )
    for region, chosen in zip(profile.regions, decision, strict=True):
        check(region, chosen)
        if profile.link is None and chosen.swaps:
            raise ArgumentError("Something is swapped, and the profile has no link to the host.", where=region.path)
