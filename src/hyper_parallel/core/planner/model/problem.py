"""The question that the solver is given, and what an answer to it costs. See the README beside it for rules P and T.

`evaluate` is the one meaning of these rules. The solver states them again as inequalities; it is held to this file by
evaluating whatever it finds, and by a comparison with brute force in the tests.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.planner.model.choices import Decision, RegionBytes, bytes_of, check
from hyper_parallel.core.planner.model.profile import Link, Region, StepProfile

Moment: TypeAlias = Literal["forward", "backward", "turn"]

# Stands for the link where there is none: nothing is swapped then, and nothing divided by zero.
_NO_LINK = Link(out_bytes_per_ms=1.0, in_bytes_per_ms=1.0)


@dataclass(frozen=True)
class Problem:
    """The question for the solver: within `budget_bytes`, which decision takes the least time?

    Attributes:
        budget_bytes: for everything: the profile's base, activations, copies in flight, the margin
        window_bytes: of offloads that may be under way when forward goes on
        prefetch_bytes: of loads that may be there before they are needed
        region_overhead_ms: what a region that is neither plain nor recomputed whole costs beside the ops it runs again
        margin_bytes: added to every peak
        copies_meet: whether offloads may still be under way in backward; see P4
        turn_is_clear: whether the last region's forward ends with all offloads, so that none is under way in the turn;
            see P4
    """

    profile: StepProfile
    budget_bytes: int
    window_bytes: int
    prefetch_bytes: int
    region_overhead_ms: float = 0.0
    margin_bytes: int = 0
    copies_meet: bool = False
    turn_is_clear: bool = False

    def __post_init__(self) -> None:
        for name in ("window_bytes", "prefetch_bytes", "region_overhead_ms", "margin_bytes"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"`{name}` is negative.", expected="0 or more", got=str(getattr(self, name)))

    @property
    def link(self) -> Link:
        return self.profile.link or _NO_LINK

    @property
    def can_swap(self) -> bool:
        return self.profile.link is not None

    def in_flight_bytes(self, moment: Moment, region: int | None = None) -> int:
        """Give what P4 counts at a moment, where anything is swapped."""
        if moment == "backward":
            return self.prefetch_bytes + (self.window_bytes if self.copies_meet else 0)
        if moment == "turn" and self.turn_is_clear:
            return 0
        return max(self.window_bytes - self.displaced_bytes(region), 0)

    def displaced_bytes(self, region: int | None) -> int:
        """Give how much less of the window is in flight at the highest point of a region's forward.

        More than 0 in the last region only, whose residuals take the place of what is on its way out.
        """
        if not self.turn_is_clear or region is None or region != len(self.profile.regions) - 1:
            return 0
        return displaced_bytes(self.profile.regions[region])


@functools.lru_cache(maxsize=8)
def displaced_bytes(region: Region) -> int:
    """Count what the last region's forward has made others leave, at the least, when its memory is highest.

    At every moment that is what was told to the engine by then, and what is missing there to the highest point. A
    residual is told to the engine when an op saves it, at the latest by the last op that reads it. Where the ops do not
    explain the measured highest point it is 0: that point may be where nothing was told yet.
    """
    sizes, freed, told = ([0] * len(region.ops) for _ in range(3))
    for index, op in enumerate(region.ops):
        sizes[region.made_with(index)] += op.num_bytes
    last_read = list(range(len(sizes)))
    for index, op in enumerate(region.ops):
        for read in op.reads:
            last_read[read] = index
    for index, op in enumerate(region.ops):
        for value in op.makes:
            if value.is_residual:
                told[last_read[index]] += value.num_bytes
            elif value.freed_after is not None:
                freed[value.freed_after] += value.num_bytes
    alive_bytes, told_bytes = sum(given.value.num_bytes for given in region.inputs), 0
    moments = []  # what is alive while an op runs, and what was told before it
    for index, op in enumerate(region.ops):
        moments.append((alive_bytes + sizes[index] + op.temporary_bytes, told_bytes))
        alive_bytes += sizes[index] - freed[index]
        told_bytes += told[index]
    highest = max((alive for alive, _ in moments), default=0)
    if region.forward_peak_bytes > highest:
        return 0
    missing = [highest - alive + told for alive, told in moments]
    return max(min([*missing, region.forward_peak_bytes - region.before_peak_bytes], default=0), 0)


@dataclass(frozen=True)
class Peak:
    """The highest moment of a step and what it is made of.

    Attributes:
        region: of which the forward or backward it is; None in the turn
        kept_bytes: by the regions before
        own_bytes: the measured peak of this moment, above what was alive when it began
    """

    moment: Moment
    region: int | None
    base_bytes: int
    outside_bytes: int
    kept_bytes: int
    own_bytes: int
    extra_bytes: int
    in_flight_bytes: int
    margin_bytes: int

    @property
    def num_bytes(self) -> int:
        alive = self.base_bytes + self.outside_bytes + self.kept_bytes + self.own_bytes
        return alive + self.extra_bytes + self.in_flight_bytes + self.margin_bytes


@dataclass(frozen=True)
class Cost:
    """What a step costs under a decision; times from the start of forward, one entry for each region."""

    peak: Peak
    step_ms: float
    forward_start_ms: tuple[float, ...]
    forward_end_ms: tuple[float, ...]
    offload_end_ms: tuple[float, ...]
    load_end_ms: tuple[float, ...]
    backward_start_ms: tuple[float, ...]
    backward_end_ms: tuple[float, ...]
    forward_stall_ms: tuple[float, ...]  # waiting until no more than the window is left to be copied
    backward_stall_ms: tuple[float, ...]  # waiting for its loads

    @property
    def peak_bytes(self) -> int:
        return self.peak.num_bytes

    @property
    def stall_ms(self) -> float:
        return sum(self.forward_stall_ms) + sum(self.backward_stall_ms)


def evaluate(problem: Problem, decision: Decision) -> Cost:
    """Compute the peak and the time of a step under this decision.

    Raises:
        ArgumentError: the decision cannot be carried out (see `choices.check`), or swaps where there is no link.
    """
    regions = problem.profile.regions
    if len(decision) != len(regions):
        raise ArgumentError(
            "A decision has one entry for each region.", expected=str(len(regions)), got=str(len(decision))
        )
    for region, chosen in zip(regions, decision, strict=True):
        check(region, chosen)
    return cost(problem, [bytes_of(region, chosen) for region, chosen in zip(regions, decision, strict=True)])


def cost(problem: Problem, by_region: Sequence[RegionBytes]) -> Cost:
    """Do as `evaluate` does, from what each region puts on device, link and clock."""
    if not problem.can_swap and any(region_bytes.swapped_bytes for region_bytes in by_region):
        raise ArgumentError("Something is swapped, and the profile has no link to the host.")
    starts, ends, offloads = _forward(problem, by_region)
    load_ends, back_starts, overs = _backward(problem, by_region, ends, offloads)
    regions = problem.profile.regions
    before = [*overs[1:], _turn_end(problem, ends)] if regions else []
    return Cost(
        peak=peak(problem, by_region),
        step_ms=overs[0] if regions else _turn_end(problem, ends),
        forward_start_ms=tuple(starts),
        forward_end_ms=tuple(ends),
        offload_end_ms=tuple(offloads),
        load_end_ms=tuple(load_ends),
        backward_start_ms=tuple(back_starts),
        backward_end_ms=tuple(over - region.after_ms for over, region in zip(overs, regions, strict=True)),
        forward_stall_ms=tuple(
            end - (start + region.forward_ms) for start, end, region in zip(starts, ends, regions, strict=True)
        ),
        backward_stall_ms=tuple(start - over for start, over in zip(back_starts, before, strict=True)),
    )


def peak(problem: Problem, by_region: Sequence[RegionBytes], *, swaps: bool | None = None) -> Peak:
    """Find the highest moment by P1 to P4, the first of equals.

    `swaps`: whether P4 is paid; without it, where anything is swapped.
    """
    if swaps is None:
        swaps = any(region_bytes.swapped_bytes for region_bytes in by_region)
    moments: list[tuple[int, Moment, int | None, tuple[int, int, int, int, int]]] = []

    def add(moment: Moment, index: int | None, *parts: int) -> None:
        outside, kept, own, extra = parts
        in_flight = problem.in_flight_bytes(moment, index) if swaps else 0
        moments.append((sum(parts) + in_flight, moment, index, (outside, kept, own, extra, in_flight)))

    kept = 0
    for index, (region, region_bytes) in enumerate(zip(problem.profile.regions, by_region, strict=True)):
        add("forward", index, region.outside_bytes, kept, region.forward_peak_bytes, region_bytes.extra_bytes)  # P2
        add("backward", index, region.outside_bytes, kept, region.backward_peak_bytes, region_bytes.extra_bytes)  # P1
        kept += region_bytes.kept_bytes
    add("turn", None, 0, kept, problem.profile.turn.peak_bytes, 0)  # P3
    _, when, at, parts = max(moments, key=lambda entry: entry[0])
    return Peak(when, at, problem.profile.base_bytes, *parts, problem.margin_bytes)


def room_for_copies(problem: Problem, by_region: Sequence[RegionBytes]) -> list[int]:
    """Count the room for copies in flight: first in forward and turn together, then in the backward of each region."""
    free = problem.budget_bytes - problem.margin_bytes - problem.profile.base_bytes
    forward, backward = [], []
    kept = 0
    for index, (region, region_bytes) in enumerate(zip(problem.profile.regions, by_region, strict=True)):
        alive = region.outside_bytes + kept + region_bytes.extra_bytes
        room = free - alive - region.forward_peak_bytes
        forward.append(room + problem.displaced_bytes(index) if room > 0 else room)
        backward.append(free - alive - region.backward_peak_bytes)
        kept += region_bytes.kept_bytes
    room_in_turn = free - kept - problem.profile.turn.peak_bytes
    if room_in_turn < 0 or not problem.turn_is_clear:
        forward.append(room_in_turn)
    return [min(forward), *backward]


def _forward(problem: Problem, by_region: Sequence[RegionBytes]) -> tuple[list[float], list[float], list[float]]:
    """Apply T1.

    The window never holds up a region while nothing is swapped: its offloads are over when it starts.
    """
    out = problem.link.out_bytes_per_ms
    num = len(by_region)
    starts, ends, offloads = [], [], []
    end = offload_end = 0.0
    for index, (region, region_bytes) in enumerate(zip(problem.profile.regions, by_region, strict=True)):
        start = end + region.before_ms
        offload_end = max(offload_end, start) + region_bytes.swapped_bytes / out
        window_bytes = 0 if problem.turn_is_clear and index == num - 1 else problem.window_bytes
        end = max(start + region.forward_ms, offload_end - window_bytes / out)
        starts.append(start)
        ends.append(end)
        offloads.append(offload_end)
    return starts, ends, offloads


def _backward(
    problem: Problem, by_region: Sequence[RegionBytes], ends: list[float], offloads: list[float]
) -> tuple[list[float], list[float], list[float]]:
    """Apply T2 and T3: when each region's loads are there, its backward starts, and all up to it is over.

    T2 speaks of every region m after k; to look at the next one is enough. What holds up region k+1 for the sake of
    region m holds up region k by as much and its own bytes, since loads come one after the other. A region that swaps
    nothing passes on what it was given, and never waits: the loads before it were waited for by those that asked for
    them.
    """
    link = problem.link
    regions = problem.profile.regions
    load_ends, starts, overs = [0.0] * len(regions), [0.0] * len(regions), [0.0] * len(regions)
    load_end = over = start_after = _turn_end(problem, ends)
    for index in reversed(range(len(regions))):
        region, region_bytes = regions[index], by_region[index]
        copy_ms = region_bytes.swapped_bytes / link.in_bytes_per_ms
        if region_bytes.swapped_bytes:
            early_ms = problem.prefetch_bytes / link.in_bytes_per_ms
            # What is still on its way out cannot come back.
            load_end = max(load_end, start_after - early_ms, offloads[index]) + copy_ms
        start = max(over, load_end) if region_bytes.swapped_bytes else over
        overhead = problem.region_overhead_ms if region_bytes.is_managed else 0.0
        over = start + region_bytes.recompute_ms + overhead + region.backward_ms + region.after_ms
        load_ends[index], starts[index], overs[index] = load_end, start, over
        start_after = start
    return load_ends, starts, overs


def _turn_end(problem: Problem, ends: list[float]) -> float:
    return (ends[-1] if ends else 0.0) + problem.profile.turn.ms
