"""Two forms of one problem: with a variable for each op (`whole`), and with one for each base of a pool (`chosen`).

The first has all answers and is large; without whole numbers it gives the bound. The second has the answers that can be
made of the bases in the pool, is small, and is solved with whole numbers. Prices of the one say which bases the other
lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.planner.model.profile import Region
from hyper_parallel.core.planner.solve.block import PLAIN, WHOLE, Base, RegionRows, add_region_rows, base_of
from hyper_parallel.core.planner.solve.linear_model import Answer, Clock, Model
from hyper_parallel.core.planner.solve.rows import Case, Places, add_lone_waits, add_rows

_Terms = list[tuple[int, float]]


@dataclass(frozen=True)
class PlaceRows:
    """The rows of one region that say what it puts into its places. Their duals are its prices."""

    kept: int
    most_swapped: int
    least_swapped: int
    extra: int
    recompute: int


@dataclass(frozen=True)
class Prices:
    """What a unit of bytes, or a millisecond, of a region costs the step."""

    store: float
    free: float  # in place of `store`, where it may be swapped
    forced: float  # where it must
    extra: float
    recompute: float


@dataclass(frozen=True)
class Whole:
    """The form with a variable for each op: the rows of every region."""

    model: Model
    places: Places
    region_rows: list[RegionRows]
    links: list[PlaceRows]


@dataclass(frozen=True)
class Chosen:
    """The form with a column for each base of the pool and region, which is 0 or 1."""

    model: Model
    places: Places
    columns: list[list[int]]
    links: list[PlaceRows]


class Pool:
    """The bases that a region may have.

    Regions of one shape share what is stored; each has its own times.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        shapes: dict[tuple[Any, ...], int] = {}
        self._kind = [shapes.setdefault(region.shape(), len(shapes)) for region in case.regions]
        self._stored: list[dict[frozenset[int], None]] = [{} for _ in shapes]
        self._bases: dict[tuple[int, frozenset[int]], Base] = {}

    def add(self, index: int, stored: frozenset[int]) -> bool:
        """Add a base, and say whether it was new."""
        known = self._stored[self._kind[index]]
        stored = self.base(index, stored).stored
        if stored in known:
            return False
        known[stored] = None
        return True

    def bases(self, index: int) -> list[Base]:
        return [self.base(index, stored) for stored in self._stored[self._kind[index]]]

    def base(self, index: int, stored: frozenset[int]) -> Base:
        if (index, stored) not in self._bases:
            self._bases[index, stored] = base_of(self._case.regions[index], stored, self._case.swaps)
        return self._bases[index, stored]


def whole(case: Case, budget_bytes: int, *, is_exact: bool = False) -> Whole:
    """Build the form with a variable for each op.

    `is_exact`: there is also one for whether it is swapped, and not only for how much of the region is.
    """
    model = Model()
    places = add_rows(model, case, budget_bytes)
    overhead_ms = case.problem.region_overhead_ms
    rooms = case.rooms(budget_bytes)
    by_region, links = [], []
    for index, region in enumerate(case.regions):
        rows = add_region_rows(
            model, region, case.swaps, case.unit, rooms[index], is_exact=is_exact, has_whole=overhead_ms > 0
        )
        by_region.append(rows)
        is_plain = [] if rows.plain is None else [rows.plain]
        store = [*rows.store, *((variable, region.residual_bytes / case.unit) for variable in is_plain)]
        recompute = [*rows.recompute, *((variable, -overhead_ms) for variable in rows.unmanaged)]
        links.append(
            _link(model, places, index, store, rows.free, rows.forced, rows.extra, recompute, overhead_ms, is_exact)
        )
    if case.swaps:
        add_lone_waits(model, case, places, [rows.unmanaged for rows in by_region])
    return Whole(model, places, by_region, links)


def chosen(case: Case, budget_bytes: int, pool: Pool, *, overrun_cost: float | None = None) -> Chosen:
    """Build the form with a variable for each base of the pool and region."""
    model = Model()
    places = add_rows(model, case, budget_bytes, overrun_cost=overrun_cost)
    overhead_ms = case.problem.region_overhead_ms
    rooms = case.rooms(budget_bytes)
    columns, links, unmanaged = [], [], []
    for index in range(len(case.regions)):
        bases = pool.bases(index)
        columns.append([model.binary() for _ in bases])
        for column, base in zip(columns[-1], bases, strict=True):
            if base.region_bytes.extra_bytes > max(rooms[index], 0):
                model.fix(column, 0.0)
        model.row([(column, 1.0) for column in columns[-1]], 1.0, 1.0)
        pairs = list(zip(columns[-1], bases, strict=True))
        managed = [(column, base) for column, base in pairs if base.stored != PLAIN]
        unmanaged.append([column for column, base in pairs if base.stored in (PLAIN, WHOLE)])
        links.append(
            _link(
                model,
                places,
                index,
                [(column, base.store_bytes / case.unit) for column, base in pairs],
                [(column, base.free_bytes / case.unit) for column, base in managed],
                [(column, base.region_bytes.swapped_bytes / case.unit) for column, base in managed],
                [(column, base.region_bytes.extra_bytes / case.unit) for column, base in managed],
                [
                    (column, base.region_bytes.recompute_ms + (0.0 if base.stored == WHOLE else overhead_ms))
                    for column, base in managed
                ],
                0.0,
                False,
            )
        )
    if case.swaps:
        add_lone_waits(model, case, places, unmanaged)
    return Chosen(model, places, columns, links)


def _link(
    model: Model,
    places: Places,
    index: int,
    store: _Terms,
    free: _Terms,
    forced: _Terms,
    extra: _Terms,
    recompute: _Terms,
    managed_ms: float,
    is_exact: bool,
) -> PlaceRows:
    """Tie a region's terms to its places: what is stored and not swapped is kept.

    `managed_ms` is what a region takes that `recompute` does not have.
    """
    swapped = places.swapped[index]
    most = model.row([*free, *forced, (swapped, -1.0)], 0.0, 0.0 if is_exact else float("inf"))
    return PlaceRows(
        kept=model.row([(places.kept[index], 1.0), (swapped, 1.0), *_negative(store)], 0.0, 0.0),
        most_swapped=most,
        least_swapped=model.row([(swapped, 1.0), *_negative(forced)], 0.0),
        extra=model.row([(places.extra[index], 1.0), *_negative(extra)], 0.0, 0.0),
        recompute=model.row([(places.recompute[index], 1.0), *_negative(recompute)], managed_ms, managed_ms),
    )


def _negative(terms: _Terms) -> _Terms:
    return [(variable, -value) for variable, value in terms]


def prices(links: Sequence[PlaceRows], answer: Answer) -> list[Prices]:
    """Read the prices of every region from the duals of an answer."""
    duals = answer.duals
    return [
        Prices(
            store=duals[link.kept],
            free=duals[link.kept] - duals[link.most_swapped],
            forced=duals[link.kept] - duals[link.most_swapped] + duals[link.least_swapped],
            extra=duals[link.extra],
            recompute=duals[link.recompute],
        )
        for link in links
    ]


class Pricing:
    """Finds for each region the managed base that is cheapest at given prices.

    All regions are solved at once, in one call of HiGHS. The rows of one region have whole solutions nearly always, so
    this is hardly more than a linear program.
    """

    def __init__(self, case: Case, budget_bytes: int) -> None:
        self._case = case
        self._model = Model()
        self._region_rows = []
        for region, room in zip(case.regions, case.rooms(budget_bytes), strict=False):
            rows = add_region_rows(self._model, region, case.swaps, case.unit, room)
            self._model.row(rows.extra, high=max(room, 0) / case.unit)
            self._region_rows.append(rows)

    def cheapest(self, at: Sequence[Prices], clock: Clock) -> list[frozenset[int]]:
        """Find the base of every region that is cheapest at these prices."""
        costs: _Terms = []
        for region, rows, price in zip(self._case.regions, self._region_rows, at, strict=True):
            costs += self._costs(region, rows, price)
        self._model.set_costs(costs)
        answer = self._model.solve(clock, gap=1e-4, node_limit=1)
        return [] if answer.x is None else [rows.stored_in(answer.x) for rows in self._region_rows]

    def _costs(self, region: Region, rows: RegionRows, price: Prices) -> _Terms:
        # A little for what is free at these prices: of equals, the one that stores less and runs less again.
        byte_cost = 1e-6 * (region.forward_ms + 1e-3) / (region.residual_bytes / self._case.unit + 1.0)
        other = {variable for variable, _ in (*rows.free, *rows.forced)}
        costs = [(variable, num * price.store) for variable, num in rows.store if variable not in other]
        costs += [(variable, num * price.free) for variable, num in rows.free]
        costs += [(variable, num * price.forced) for variable, num in rows.forced]
        costs += [(variable, num * byte_cost) for variable, num in rows.store]
        costs += [(variable, num * price.extra) for variable, num in rows.extra]
        costs += [(variable, ms * (price.recompute + 1e-6)) for variable, ms in rows.recompute]
        if rows.plain is not None:  # it is in the pool already
            costs.append((rows.plain, 1.0 + 2.0 * sum(abs(cost) for _, cost in costs)))
        return costs
