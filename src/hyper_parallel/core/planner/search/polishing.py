"""A choice made better on the timeline: what one region does is tried for another, as long as there is time.

The solver does not see that what a region swaps comes in bursts, so its answer waits here and there where another order
of the same decisions would not, or where one block more could be swapped. Blocks are alike, and what was chosen for one
can be carried out in another.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hyper_parallel.core.planner.model.choices import Decision, RegionBytes, RegionDecision, bytes_of
from hyper_parallel.core.planner.model.profile import StepProfile, alike

# Of a decision, what each of its regions puts on device, link and clock, and the time to beat: the time of a step;
# None: it does not fit, or is not faster.
Judge = Callable[[Decision, list[RegionBytes], float], float | None]


def polished(
    profile: StepProfile,
    decision: Decision,
    step_ms: float,
    judge: Judge,
    until: float,
    others: Sequence[Decision] = (),
) -> Decision:
    """A decision that takes no longer than the given one, of `step_ms`.

    Args:
        judge: see `Judge`.
        until: when to stop, of `time.monotonic`.
        others: whose regions have ideas, too.
    """
    return _Search(profile, [decision, *others], step_ms, judge).run(until)


_Move: TypeAlias = Callable[[list[RegionDecision]], Decision]


@dataclass(frozen=True)
class _Copy:
    """A region does this."""

    at: int
    choice: RegionDecision

    def __call__(self, decision: list[RegionDecision]) -> Decision:
        return (*decision[: self.at], self.choice, *decision[self.at + 1 :])


@dataclass(frozen=True)
class _Exchange:
    """Two regions do what the other one did."""

    left: int
    right: int

    def __call__(self, decision: list[RegionDecision]) -> Decision:
        changed = list(decision)
        changed[self.left], changed[self.right] = decision[self.right], decision[self.left]
        return tuple(changed)


class _Search:
    """Invariant: `_decision` takes `_step_ms`.

    `_kinds`: numbers of regions that are alike, and what any of them was seen to do.
    """

    def __init__(self, profile: StepProfile, known: Sequence[Decision], step_ms: float, judge: Judge) -> None:
        self._regions = profile.regions
        self._kinds = [
            (indices, dict.fromkeys(decision[index] for decision in known for index in indices))
            for indices in alike(profile.regions)
        ]
        self._judge = judge
        self._decision = list(known[0])
        self._step_ms = step_ms
        self._loads: dict[tuple[int, RegionDecision], RegionBytes] = {}
        self._seen: set[Decision] = {known[0]}

    def run(self, until: float) -> Decision:
        while self._sweep(until):
            pass
        return tuple(self._decision)

    def _sweep(self, until: float) -> bool:
        """Try every move once, each from where the one before it led; whether there is more to do."""
        has_improved = False
        for move in self._moves():
            if time.monotonic() >= until:
                return False
            decision = move(self._decision)
            if decision in self._seen:
                continue
            self._seen.add(decision)
            loads = [self._load(index, each) for index, each in enumerate(decision)]
            step_ms = self._judge(decision, loads, self._step_ms)
            if step_ms is not None and step_ms < self._step_ms * (1 - 1e-6):
                self._decision, self._step_ms = list(decision), step_ms
                has_improved = True
        return has_improved

    def _moves(self) -> list[_Move]:
        """Copies, those that save most recomputation first; then exchanges."""
        copies = [_Copy(index, choice) for indices, choices in self._kinds for index in indices for choice in choices]
        copies.sort(key=lambda copy: self._saved_ms(copy.at, copy.choice), reverse=True)
        pairs = [pair for indices, _ in self._kinds for pair in itertools.combinations(indices, 2)]
        return [*copies, *(_Exchange(*pair) for pair in pairs)]

    def _saved_ms(self, index: int, choice: RegionDecision) -> float:
        return self._load(index, self._decision[index]).recompute_ms - self._load(index, choice).recompute_ms

    def _load(self, index: int, decision: RegionDecision) -> RegionBytes:
        key = index, decision
        if key not in self._loads:
            self._loads[key] = bytes_of(self._regions[index], decision)
        return self._loads[key]
