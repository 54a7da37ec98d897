"""How one case is solved: exactly where it is small, else by bases, with a bound.

1. The model with a variable for each op, without whole numbers, gives a bound and prices.
2. At these prices the cheapest base of each region is found, the model of all bases found so far gives new prices, and
   so on until it is as good as the bound: a handful of rounds.
3. Regions are fixed to a base, those first that are nearly decided, and the model is solved again; the last few regions
   are solved with whole numbers. What comes out is split into tensors and evaluated.

Work is bounded by counts, not by the clock, so that a slower machine finds the same plan; the clock only ends what
would take far longer than planned.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.planner.model.choices import Decision, recompute_all
from hyper_parallel.core.planner.model.problem import Cost, Problem, evaluate
from hyper_parallel.core.planner.solve.block import PLAIN, WHOLE, Base
from hyper_parallel.core.planner.solve.forms import Chosen, Pool, Prices, Pricing, chosen, prices, whole
from hyper_parallel.core.planner.solve.linear_model import INFINITY, Answer, Clock
from hyper_parallel.core.planner.solve.rows import Case
from hyper_parallel.core.planner.solve.split import split, tidied

_MOST_ROUNDS = 15
_ENOUGH = 2e-5  # so near to the bound, no more bases are looked for
_WORTH = 1e-5  # nor where a round made this little difference
_SHARE_FIXED = 0.4  # of the regions that are left, in each step of a dive
_RETRIES = 3  # with a smaller budget, where an answer comes out a few bytes too large


class Branching:
    """The best decision found so far for one case, and the bound below which there is none.

    It lives for one `solve`.
    """

    def __init__(self, case: Case, budget_bytes: int, clock: Clock) -> None:
        self.case = case
        self.pool = Pool(case)
        self.best: tuple[Decision, Cost] | None = None
        self.bound_ms = plain_ms(case.problem)  # nothing is faster than nothing to do
        self.is_infeasible = False
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._prices: list[Prices] = []
        self._uses_whole = case.problem.region_overhead_ms > 0

    @property
    def gap(self) -> float:
        if self.best is None:
            return INFINITY
        step_ms = self.best[1].step_ms
        return max(step_ms - self.bound_ms, 0.0) / step_ms if step_ms else 0.0

    def offer(self, found: tuple[Decision, Cost] | None) -> None:
        """Take what was found, made tidy, if it is within the budget and better than the best so far."""
        if found is None or found[1].peak_bytes > self._budget_bytes:
            return
        decision = tidied(self.case.problem, found[0], self._budget_bytes)
        found = decision, evaluate(self.case.problem, decision)
        if self.best is None or _rank(found) < _rank(self.best):
            self.best = found

    def exact(self, gap: float, node_limit: int) -> None:
        """Solve all of it with whole numbers, each tensor swapped or not."""
        budget_bytes = self._budget_bytes
        for attempt in range(_RETRIES):
            form = whole(self.case, budget_bytes, is_exact=True)
            answer = form.model.solve(self._clock, gap=gap, node_limit=node_limit)
            if attempt == 0:
                self._learn(answer)
            if answer.x is None:
                return
            decision = []
            for index, rows in enumerate(form.region_rows):
                base = self.pool.base(index, rows.stored_in(answer.x))
                free = {position for position, _ in base.free}
                swapped = [position for position in rows.swapped_in(answer.x) if position in free]
                decision.append(base.swapping(swapped) if swapped else base.decision)
            cost = evaluate(self.case.problem, tuple(decision))
            self.offer((tuple(decision), cost))
            if cost.peak_bytes <= self._budget_bytes:
                return
            budget_bytes -= cost.peak_bytes - self._budget_bytes  # the solver is exact to a few bytes only

    def relax(self) -> None:
        """Solve it without whole numbers, for the bound and the prices."""
        form = whole(self.case, self._budget_bytes)
        answer = form.model.solve_relaxed(self._clock.part(0.4))
        self._learn(answer)
        if answer.value is not None:
            self._prices = prices(form.links, answer)
        if answer.x is not None:  # a base that not even a part of a region wants only blurs the choice of the others
            x = answer.x
            self._uses_whole = any(rows.whole is not None and x[rows.whole] > _ENOUGH for rows in form.region_rows)

    def add_bases(self) -> None:
        """Fill the pool with bases that nearly reach the bound; with a few simple ones where `relax` gave no prices."""
        for index, region in enumerate(self.case.regions):
            if region.may_be_plain:
                self.pool.add(index, PLAIN)
            if self._uses_whole and recompute_all(region).is_whole:
                self.pool.add(index, WHOLE)
            self.pool.add(index, frozenset())
            self.pool.add(index, frozenset(range(len(region.ops))))
        if not self._prices:
            return
        pricing = Pricing(self.case, self._budget_bytes)
        at, last_ms = self._prices, INFINITY
        for number in range(_MOST_ROUNDS):
            cheapest = pricing.cheapest(at, self._clock.part(0.4))
            num_new = sum(self.pool.add(index, stored) for index, stored in enumerate(cheapest))
            form = chosen(self.case, self._budget_bytes, self.pool, overrun_cost=max(self.bound_ms, 1.0))
            answer = form.model.solve_relaxed(self._clock)
            if answer.value is None or answer.value <= self.bound_ms * (1 + _ENOUGH):
                return
            if number and (not num_new or answer.value > last_ms * (1 - _WORTH)):
                return
            at, last_ms = prices(form.links, answer), answer.value

    def dive(self, num_left: int, gap: float, node_limit: int) -> None:
        """Decide regions in steps, and the last `num_left` at once."""
        budget_bytes = self._budget_bytes
        for _ in range(_RETRIES):
            form = chosen(self.case, budget_bytes, self.pool)
            answer = self._decide(form, num_left, gap, node_limit)
            if answer is None or answer.x is None:
                return
            bases = [self._base(form, answer, index) for index in range(len(self.case.regions))]
            swapped = [answer.x[variable] * self.case.unit for variable in form.places.swapped]
            found = split(self.case, bases, swapped, self._budget_bytes)
            self.offer(found)
            if found is not None:
                return
            budget_bytes -= max(int(self.case.unit), 1)  # the solver is exact to a part of its unit only

    def refine(self, gap: float, node_limit: int) -> None:
        """Solve with a whole number for each op, and none for how much of a region is swapped.

        It raises the bound as well.
        """
        form = whole(self.case, self._budget_bytes)
        answer = form.model.solve(self._clock, gap=gap, node_limit=node_limit)
        self._learn(answer)
        if answer.x is None:
            return
        bases = [self.pool.base(index, rows.stored_in(answer.x)) for index, rows in enumerate(form.region_rows)]
        swapped = [answer.x[variable] * self.case.unit for variable in form.places.swapped]
        self.offer(split(self.case, bases, swapped, self._budget_bytes))

    def _learn(self, answer: Answer) -> None:
        self.is_infeasible = self.is_infeasible or answer.is_infeasible
        self.bound_ms = INFINITY if self.is_infeasible else max(self.bound_ms, answer.bound)

    def _decide(self, form: Chosen, num_left: int, gap: float, node_limit: int) -> Answer | None:
        left = list(range(len(self.case.regions)))
        while len(left) > num_left:
            answer = form.model.solve_relaxed(self._clock)
            if answer.x is None:
                return None
            x = answer.x
            decided = sorted((-round(max(x[column] for column in form.columns[index]), 9), index) for index in left)
            num_fixed = min(max(int(len(left) * _SHARE_FIXED), 1), len(left) - num_left)
            for _, index in decided[:num_fixed]:
                taken = form.columns[index][_largest(x, form.columns[index])]
                for column in form.columns[index]:
                    form.model.fix(column, 1.0 if column == taken else 0.0)
            left = [index for _, index in decided[num_fixed:]]
        return form.model.solve(self._clock, gap=gap, node_limit=node_limit)

    def _base(self, form: Chosen, answer: Answer, index: int) -> Base:
        return self.pool.bases(index)[_largest(answer.x, form.columns[index])]


def plain_ms(problem: Problem) -> float:
    """Add up a step in which nothing waits and nothing runs again."""
    spans = (
        region.before_ms + region.forward_ms + region.backward_ms + region.after_ms
        for region in problem.profile.regions
    )
    return sum(spans) + problem.profile.turn.ms


def _largest(x: Sequence[float], columns: Sequence[int]) -> int:
    return max(range(len(columns)), key=lambda number: x[columns[number]])


def _rank(found: tuple[Decision, Cost]) -> tuple[float, int]:
    return found[1].step_ms, found[1].peak_bytes
