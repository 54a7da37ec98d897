"""A linear program in the making, and HiGHS to solve it, with or without whole numbers.

SciPy is imported when something is solved: the package needs it nowhere else.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from hyper_parallel._base.errors import FrameworkMissingError
from hyper_parallel._base.extras import install_words
from hyper_parallel.core.planner.solve.quiet import quiet_solver

Terms: TypeAlias = Iterable[tuple[int, float]]

INFINITY = math.inf
_FAILED = 4  # neither solved, nor infeasible, nor at a limit


class Clock:
    """Seconds that are left.

    It is a safety net only: what is found must not depend on the machine's speed, so work is bounded by counts.
    """

    def __init__(self, limit_s: float) -> None:
        self._start = time.perf_counter()
        self._limit_s = limit_s

    @property
    def passed_s(self) -> float:
        return time.perf_counter() - self._start

    @property
    def left_s(self) -> float:
        return max(self._limit_s - self.passed_s, 0.0)

    def part(self, share: float) -> Clock:
        """Set a share of the time apart, for work that must leave time for what comes after it."""
        return Clock(share * self.left_s)


@dataclass(frozen=True)
class Answer:
    """What HiGHS said of one model.

    Attributes:
        is_infeasible: proved: there is no solution
        value: of the best solution, None without one
        bound: proved: no solution is below it
        duals: for each row, by how much the value grows where the row's side does; of linear programs only
    """

    is_infeasible: bool
    value: float | None
    bound: float
    x: Any = None
    duals: Any = None


class Model:
    """A linear program: minimise the sum of cost times variable, each variable and each row within its bounds."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._lows: list[float] = []
        self._highs: list[float] = []
        self._integral: list[int] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._row_lows: list[float] = []
        self._row_highs: list[float] = []
        self.constant = 0.0  # added to the value

    def variable(self, low: float = 0.0, high: float = INFINITY, *, cost: float = 0.0, is_integer: bool = False) -> int:
        self._costs.append(cost)
        self._lows.append(low)
        self._highs.append(high)
        self._integral.append(int(is_integer))
        return len(self._costs) - 1

    def binary(self) -> int:
        return self.variable(0.0, 1.0, is_integer=True)

    def add_cost(self, variable: int, cost: float) -> None:
        self._costs[variable] += cost

    def set_costs(self, terms: Terms) -> None:
        """Set these costs, and none for any other variable."""
        self._costs = [0.0] * len(self._costs)
        for variable, cost in terms:
            self._costs[variable] += cost

    def fix(self, variable: int, value: float) -> None:
        self._lows[variable] = self._highs[variable] = value

    def row(self, terms: Terms, low: float = -INFINITY, high: float = INFINITY) -> int:
        index = len(self._row_lows)
        self._row_lows.append(low)
        self._row_highs.append(high)
        for variable, value in terms:
            self._rows.append(index)
            self._columns.append(variable)
            self._values.append(value)
        return index

    def solve_relaxed(self, clock: Clock) -> Answer:
        """Solve without whole numbers."""
        optimize, sparse = _scipy("optimize"), _scipy("sparse")
        matrix = self._matrix(sparse)
        lows, highs = np.array(self._row_lows), np.array(self._row_highs)
        is_equal = lows == highs
        has_low, has_high = ~is_equal & np.isfinite(lows), ~is_equal & np.isfinite(highs)
        found = _with_or_without_presolve(
            optimize.linprog,
            self._costs,
            clock,
            A_ub=sparse.vstack([matrix[has_high], -matrix[has_low]]).tocsr(),
            b_ub=np.concatenate([highs[has_high], -lows[has_low]]),
            A_eq=matrix[is_equal],
            b_eq=lows[is_equal],
            bounds=np.column_stack([self._lows, self._highs]),
            method="highs",
        )
        if found.status != 0:
            return Answer(found.status == 2, None, -INFINITY)
        duals = np.zeros(len(lows))
        duals[is_equal] = found.eqlin.marginals
        duals[has_high] += found.ineqlin.marginals[: has_high.sum()]
        duals[has_low] -= found.ineqlin.marginals[has_high.sum() :]
        value = float(found.fun) + self.constant
        return Answer(False, value, value, found.x, duals)

    def solve(self, clock: Clock, *, gap: float, node_limit: int) -> Answer:
        """Solve with whole numbers. `gap` is relative to the value, its constant included."""
        optimize, sparse = _scipy("optimize"), _scipy("sparse")
        # HiGHS stops by a gap that is relative to what it sees: a variable that is 1 carries the constant.
        costs, lows, highs = [*self._costs, self.constant], [*self._lows, 1.0], [*self._highs, 1.0]
        found = _with_or_without_presolve(
            optimize.milp,
            costs,
            clock,
            {"mip_rel_gap": gap, "node_limit": node_limit},
            constraints=optimize.LinearConstraint(self._matrix(sparse, 1), self._row_lows, self._row_highs),
            bounds=optimize.Bounds(lows, highs),
            integrality=[*self._integral, 0],
        )
        bound = -INFINITY if found.mip_dual_bound is None else float(found.mip_dual_bound)
        if found.x is None:
            return Answer(found.status == 2, None, bound)
        if found.status == 0 and not any(self._integral):
            bound = float(found.fun)  # for a linear program HiGHS leaves the bound of whole numbers at 0
        return Answer(False, float(found.fun), bound, found.x)

    def _matrix(self, sparse: Any, more_columns: int = 0) -> Any:
        shape = (len(self._row_lows), len(self._costs) + more_columns)
        return sparse.csr_matrix((self._values, (self._rows, self._columns)), shape=shape)


def _with_or_without_presolve(
    solver: Callable[..., Any], costs: list[float], clock: Clock, options: dict[str, Any] | None = None, **others: Any
) -> Any:
    """Solve, and once more without presolve where that failed.

    HiGHS 1.12 fails now and then where its presolve took nearly everything away; without presolve it does not.
    """
    for presolve in (True, False):
        limits = {"presolve": presolve, "time_limit": max(clock.left_s, 0.01)}
        with quiet_solver():
            found = solver(costs, options={**(options or {}), **limits}, **others)
        if found.status != _FAILED:
            break
    return found


def _scipy(part: str) -> Any:
    try:
        return importlib.import_module(f"scipy.{part}")
    except ImportError as error:
        raise FrameworkMissingError(
            "Planning memory needs the package `scipy`.",
            got=str(error),
            do=install_words("planner"),
        ) from error
