"""Plans solved in other processes while the device measures something else.

`solved` is pure: the same profile, budget and margin give the same plan. So the first answer for each budget can be on its way while rivals are
measured, and the device, which costs more than any CPU, does not stand still for it. What must be solved again after a real step is solved
where it is asked for.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.plan import proof
from hyper_parallel.core.planner.plan.plan import MemoryPlan
from hyper_parallel.core.planner.solve.solver import BudgetError


class Solver:
    """Stands in for `proof.solved`, counts, and knows some answers already. `num_workers=0`: it only counts.

    `proves_smallest=False`: where a budget is refused, the smallest peak is the predicted one; to prove it takes up to five more plans.

    Attributes:
        num_solved, seconds: answers so far, and how long they took where they were found
        waited_s: of that, and of waiting for answers from elsewhere, what the caller has spent
    """

    def __init__(self, num_workers: int, *, proves_smallest: bool) -> None:
        self._solved = proof.solved
        self._proves_smallest = proves_smallest
        self._known: dict[int, Future[Any]] = {}  # by budget, of `_profile`
        self._profile: StepProfile | None = None
        self.num_solved, self.seconds, self.waited_s = 0, 0.0, 0.0
        self._pool: ProcessPoolExecutor | None = None
        if num_workers:
            context = multiprocessing.get_context("spawn")  # a fork of a process that uses a device cannot be trusted
            self._pool = ProcessPoolExecutor(num_workers, mp_context=context)
            for _ in range(num_workers):  # imports take seconds
                self._pool.submit(time.sleep, 0.1)

    @contextlib.contextmanager
    def installed(self) -> Iterator[Solver]:
        prove_smallest = proof._proved_smallest
        proof.solved = self.solved
        if not self._proves_smallest:
            proof._proved_smallest = lambda profile, profiled, smallest_bytes: smallest_bytes
        try:
            yield self
        finally:
            proof.solved, proof._proved_smallest = self._solved, prove_smallest
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, profile: StepProfile, budgets_bytes: Iterable[int]) -> None:
        """Have the first answer for each budget looked for; those of the profile before are forgotten."""
        self._profile, self._known = profile, {}
        if self._pool is not None:
            self._known = {each: self._pool.submit(_first_answer, profile, each) for each in budgets_bytes}

    def solved(self, profile: StepProfile, allowed_bytes: int, **ways: Any) -> MemoryPlan:
        begin = time.perf_counter()
        seconds = None
        try:
            is_first = profile is self._profile and ways == {"margin_bytes": proof.first_margin(profile)}
            known = self._known.pop(allowed_bytes, None) if is_first else None
            answer = None if known is None else known.result()
            if answer is not None:
                seconds, rest = answer
                return MemoryPlan(profile, rest[0], rest[1], allowed_bytes, rest[2], gap=rest[3])
            return self._solved(profile, allowed_bytes, **ways)
        finally:
            spent = time.perf_counter() - begin
            self.num_solved += 1
            self.waited_s += spent
            self.seconds += spent if seconds is None else seconds


def _first_answer(profile: StepProfile, allowed_bytes: int) -> tuple[float, Any] | None:
    """Seconds, and what a plan is made of; None: nothing fits, which the caller will see for itself."""
    begin = time.perf_counter()
    try:
        plan = proof.solved(profile, allowed_bytes, margin_bytes=proof.first_margin(profile))
    except BudgetError:
        return None
    return time.perf_counter() - begin, (plan.decision, plan.setting, plan.predicted, plan.gap)
