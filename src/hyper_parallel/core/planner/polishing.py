"""A choice made better on the timeline: what one region does is tried for another, as long as there is time.

The solver does not see that what a region swaps comes in bursts, so its answer waits here and there where another order of the same decisions
would not, or where one block more could be swapped. Blocks are alike, and what was chosen for one can be carried out in another.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from hyper_parallel.core.planner.choices import Decision, Load, RegionDecision, load
from hyper_parallel.core.planner.profile import Region, StepProfile

Judge = Callable[[Decision, list[Load]], float | None]  # the time of a step; None: it does not fit, or cannot be better


def polished(profile: StepProfile, decision: Decision, step_ms: float, judge: Judge, until: float) -> Decision:
    """A decision that takes no longer than the given one, of `step_ms`. `until`: when to stop, of `time.monotonic`.

    `judge` is asked with the decision and what each region puts on device, link and clock.
    """
    return _Search(profile, decision, step_ms, judge).run(until)


class _Search:
    def __init__(self, profile: StepProfile, decision: Decision, step_ms: float, judge: Judge) -> None:
        self._regions = profile.regions
        self._kinds = _kinds(profile.regions)
        self._judge = judge
        self._decision = list(decision)
        self._step_ms = step_ms
        self._loads: dict[tuple[int, RegionDecision], Load] = {}
        self._seen: set[Decision] = {decision}

    def run(self, until: float) -> Decision:
        while time.monotonic() < until and self._improve(until):
            pass
        return tuple(self._decision)

    def _improve(self, until: float) -> bool:
        """Whether a better one was found among the neighbours, those that recompute least first."""
        ranked = sorted(self._neighbours(), key=lambda each: sum(one.recompute_ms for one in each[1]))
        for decision, loads in ranked:
            if time.monotonic() > until:
                return False
            step_ms = self._judge(decision, loads)
            if step_ms is not None and step_ms < self._step_ms * (1 - 1e-6):
                self._decision, self._step_ms = list(decision), step_ms
                return True
        return False

    def _neighbours(self) -> Iterator[tuple[Decision, list[Load]]]:
        current = self._decision
        for indices in self._kinds:
            choices = dict.fromkeys(current[index] for index in indices)
            copies = (((index, choice),) for index in indices for choice in choices if choice != current[index])
            exchanges = (
                ((left, current[right]), (right, current[left]))
                for left, right in itertools.combinations(indices, 2)
                if current[left] != current[right]
            )
            for changes in itertools.chain(copies, exchanges):
                changed = list(current)
                for index, choice in changes:
                    changed[index] = choice
                decision = tuple(changed)
                if decision not in self._seen:
                    self._seen.add(decision)
                    yield decision, [self._load(index, each) for index, each in enumerate(decision)]

    def _load(self, index: int, decision: RegionDecision) -> Load:
        key = index, decision
        if key not in self._loads:
            self._loads[key] = load(self._regions[index], decision)
        return self._loads[key]


def _kinds(regions: tuple[Region, ...]) -> list[list[int]]:
    """Numbers of regions that are alike: each can do what any other does."""
    kinds: dict[object, list[int]] = {}
    for index, region in enumerate(regions):
        kinds.setdefault(region.shape(), []).append(index)
    return list(kinds.values())
