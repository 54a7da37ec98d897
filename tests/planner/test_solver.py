"""The solver against brute force on small problems, and its gaps on large ones."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
from types import SimpleNamespace

import pytest

from hyper_parallel._base.errors import ArgumentError, FrameworkMissingError
from hyper_parallel.core.planner.model.choices import Decision, RegionDecision, plain, recompute_all
from hyper_parallel.core.planner.model.problem import Cost, Problem, evaluate
from hyper_parallel.core.planner.model.profile import Input, Link, Region, StorageFacts, Turn
from hyper_parallel.core.planner.solve import linear_model as solver_model
from hyper_parallel.core.planner.solve import solver
from hyper_parallel.core.planner.solve.block import base_of
from hyper_parallel.core.planner.solve.solver import BudgetError, Solution, smallest_peak, solve
from hyper_parallel.core.planner.solve.split import _carried, nearest, tidied
from support.campaign import share
from support.interpreter import run_fresh
from support.planner_cases import NO_HURRY, all_costs, op, problem, random_problem, region, smaller, transformer

pytest.importorskip("scipy")

EXACT = 1e-6  # relative: HiGHS stops at a gap of 1e-6 ms, and steps take a few ms and more
MIB = 2**20


# ---- against brute force ----------------------------------------------------------------------------------------------------------


def wrong_with_exact(given: Problem) -> str | None:
    """What is wrong with the answers to a small problem, by trying every decision."""
    costs = all_costs(given)
    if not costs:
        return _wrong_with_none(given)
    smallest = min(cost.peak_bytes for cost, _ in costs)
    decision, cost = smallest_peak(given)
    if evaluate(given, decision) != cost or cost.peak_bytes != smallest:
        return f"smallest peak {smallest}, found {cost.peak_bytes}"
    try:
        found = solve(given, time_limit_s=NO_HURRY)
    except BudgetError as error:
        if smallest <= given.budget_bytes:
            return "it fits, and was refused"
        if error.smallest_bytes != smallest:
            return f"smallest budget {smallest}, error says {error.smallest_bytes}"
        return wrong_with_exact(dataclasses.replace(given, budget_bytes=smallest))
    best = _best(costs, given)
    return _wrong_with_bound(given, found, best) or (
        None
        if found.cost.step_ms <= best * (1 + EXACT) and found.proved_optimal
        else f"best step {best}, found {found.cost.step_ms}, proved: {found.proved_optimal}"
    )


def wrong_with_bound(given: Problem) -> str | None:
    """As above for the way that large problems go: it need not find the best, but must not claim too much."""
    costs = all_costs(given)
    if not costs:
        return _wrong_with_none(given)
    if min(cost.peak_bytes for cost, _ in costs) > given.budget_bytes:
        return None
    found, best = solve(given, time_limit_s=NO_HURRY), _best(costs, given)
    if found.cost.step_ms > 1.5 * best:
        return f"best step {best}, found {found.cost.step_ms}"
    return _wrong_with_bound(given, found, best)


def _best(costs: list[tuple[Cost, Decision]], given: Problem) -> float:
    return min(cost.step_ms for cost, _ in costs if cost.peak_bytes <= given.budget_bytes)


def _wrong_with_bound(given: Problem, found: Solution, best: float) -> str | None:
    if evaluate(given, found.decision) != found.cost:
        return "the cost is not that of the decision"
    if found.cost.peak_bytes > given.budget_bytes:
        return f"a peak of {found.cost.peak_bytes}"
    if found.lower_bound_ms > best * (1 + EXACT):
        return f"a bound of {found.lower_bound_ms}, and {best} can be had"
    if found.gap != pytest.approx((found.cost.step_ms - found.lower_bound_ms) / found.cost.step_ms):
        return f"a gap of {found.gap}"
    return None


def _wrong_with_none(given: Problem) -> str | None:
    try:
        solve(given)
    except BudgetError:
        return "no budget helps, and one was asked for"
    except ArgumentError:
        return None
    return "no decision can be carried out, and one was found"


def smallest_failing(given: Problem, wrong) -> Problem:
    for each in smaller(given):
        if wrong(each):
            return smallest_failing(each, wrong)
    return given


def try_all(seeds, wrong) -> None:
    for seed in seeds:
        given = random_problem(seed)
        text = wrong(given)
        if text:
            less = smallest_failing(given, wrong)
            pytest.fail(f"seed {seed}: {text}; smaller: {wrong(less)}\n{less}")


def test_small_problems_are_solved_exactly() -> None:
    try_all(share(20_000, 1_000), wrong_with_exact)


def test_bounds_hold_where_a_problem_is_taken_for_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "_SMALL", -1)
    try_all(share(20_000, 200), wrong_with_bound)


def test_bounds_hold_without_a_whole_number_for_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "_SMALL", -1)
    monkeypatch.setattr(solver, "_MEDIUM", -1)
    try_all(share(20_000, 200), wrong_with_bound)


@pytest.fixture(params=["small", "medium", "large"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a problem is solved, whatever its size."""
    if request.param != "small":
        monkeypatch.setattr(solver, "_SMALL", -1)
    if request.param == "large":
        monkeypatch.setattr(solver, "_MEDIUM", -1)
    return request.param


def only_swapped(num_bytes: int) -> Region:
    return region(op(num_bytes, choices=("swap",)), forward_ms=10.0, backward_ms=10.0, may_be_plain=False)


def test_a_plain_region_gives_time_to_copy_what_the_window_left_over(way: str) -> None:
    """Region 0 leaves 10 to be copied, region 1 copies them; else region 2 would have to wait for 10."""
    blocks = only_swapped(20), region(op(1)), only_swapped(20), region(op(1), forward_ms=100.0)
    given = problem(*blocks, turn=Turn(100.0), window=10, prefetch=1000, budget=1012, region_overhead_ms=3.0)
    found = solve(given)
    assert found.cost.step_ms == 130 + 100 + 60 + 2 * 3.0
    assert found.lower_bound_ms <= found.cost.step_ms


def test_a_plain_region_gives_time_to_load_what_the_prefetch_limit_allows(way: str) -> None:
    """While region 2 runs backward, 10 of region 0 may come; else it would have to wait for 10 more."""
    blocks = only_swapped(20), region(op(1), backward_ms=10.0), region(op(1), backward_ms=10.0)
    given = problem(*blocks, turn=Turn(100.0), window=1000, prefetch=10, budget=1012, region_overhead_ms=3.0)
    found = solve(given)
    assert found.cost.step_ms == 30 + 100 + 30 + 3.0


# ---- what a solution is -----------------------------------------------------------------------------------------------------------


def test_a_budget_above_the_plain_peak_changes_nothing_and_needs_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_model, "_scipy", None)
    profile = transformer(3, differ=False)
    given = Problem(profile, profile.peak_bytes, MIB, MIB, region_overhead_ms=1.0)
    found = solve(given)
    assert all(each.is_plain for each in found.decision)
    assert (found.gap, found.proved_optimal) == (0.0, True)
    assert found.cost.step_ms == pytest.approx(profile.step_ms)


def test_without_regions_the_turn_fits_or_not() -> None:
    given = problem(base_bytes=7, turn=Turn(3.0, 40), budget=47)
    assert solve(given).decision == ()
    with pytest.raises(BudgetError, match="at least 47 bytes"):
        solve(dataclasses.replace(given, budget_bytes=46))


def test_a_region_without_ops_is_solved_as_well() -> None:
    given = problem(region(may_be_plain=False), region(op(5, 1.0)), budget=5)
    assert solve(given).cost.step_ms == 60.0


def test_the_cheapest_to_run_again_is_dropped_first() -> None:
    given = problem(region(op(10, 5.0), op(10, 1.0), op(10, 3.0)), budget=20, link=None)
    found = solve(given)
    assert found.decision[0].ops == ("save", "recompute", "save")
    assert found.cost.step_ms == 31.0


def test_something_small_in_a_chain_is_saved_to_cut_it_short() -> None:
    """Running all of it again takes 12 ms; with the one byte between saved, 2."""
    chain = region(op(100, 5.0, needed=False), op(1, 5.0, (0,), needed=False), op(50, 2.0, (1,)))
    found = solve(problem(chain, budget=1, link=None))
    assert found.decision[0].ops == (None, "save", "recompute")
    assert found.cost.step_ms == 32.0


def test_what_the_link_can_take_for_nothing_is_swapped() -> None:
    given = problem(region(op(5, 4.0), op(20, 4.0)), region(op(1)), budget=21, turn=Turn(50.0))
    found = solve(given)
    assert found.decision[0].ops == ("swap", "save")
    assert found.cost.step_ms == 110.0


def test_nothing_is_swapped_where_what_is_in_flight_does_not_fit() -> None:
    blocks = region(op(5, 4.0), op(20, 4.0)), region(op(1))
    given = problem(*blocks, budget=21, turn=Turn(50.0), window=20, prefetch=20)
    assert solve(given).cost.step_ms == 114.0


def test_it_is_never_slower_than_recomputing_every_block() -> None:
    for seed in range(30):
        profile = transformer(1 + seed % 5, differ=True, seed=seed, gigabytes_per_s=random.Random(seed).uniform(1, 60))
        decision = tuple(recompute_all(each) for each in profile.regions)
        given = Problem(profile, 0, 64 * MIB, 64 * MIB, region_overhead_ms=0.2)
        checkpointed = evaluate(given, decision)
        found = solve(dataclasses.replace(given, budget_bytes=checkpointed.peak_bytes), time_limit_s=0.0)
        assert found.cost.peak_bytes <= checkpointed.peak_bytes
        assert found.cost.step_ms <= checkpointed.step_ms, "whatever the clock says"


def test_a_gap_that_is_good_enough_ends_the_search() -> None:
    given = problem(*(region(op(7, 2.0), op(11, 3.0)) for _ in range(4)), budget=30, link=None)
    found = solve(given, gap=0.5)
    assert 0.0 <= found.gap <= 0.5


# ---- budgets that cannot be met ---------------------------------------------------------------------------------------------------


def no_way() -> Problem:
    blocks = region(op(10, 1.0, choices=("save",))), region(op(5, 1.0), backward_peak_bytes=40, outside_bytes=3)
    return problem(*blocks, budget=52, base_bytes=2, link=None, margin_bytes=1)


def test_the_error_names_the_smallest_budget_and_what_it_is_made_of() -> None:
    with pytest.raises(BudgetError) as caught:
        solve(no_way())
    assert str(caught.value) == (
        "No choice of what to save, swap and recompute fits into the budget.\n"
        "Expected at least 56 bytes (56 B), got 52 (52 B); backward of block: 40 B by itself, 10 B kept by the "
        "blocks before, 3 B kept outside of all blocks, 2 B alive when forward begins, 1 B of margin.\n"
        "Raise the budget, or make the batch or the sequence smaller."
    )
    assert isinstance(caught.value, ValueError)
    assert solve(dataclasses.replace(no_way(), budget_bytes=caught.value.smallest_bytes)).cost.peak_bytes == 56


def test_the_error_says_where_it_is_not_a_region() -> None:
    given = problem(region(op(1, choices=("swap",)), may_be_plain=False), turn=Turn(0.0, 9), window=7, prefetch=2)
    with pytest.raises(
        BudgetError, match=r"between forward and backward \(the loss\): 9 B by itself, 7 B for copies in flight"
    ):
        solve(dataclasses.replace(given, budget_bytes=15))


def test_the_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(BudgetError("Too small.", got="1", smallest_bytes=7)))  # noqa: S301
    assert (str(error), error.smallest_bytes) == ("Too small.\nGot 1.", 7)


def test_a_region_that_no_choice_can_carry_out_is_named() -> None:
    given = problem(region(op(1, choices=("swap",)), may_be_plain=False), link=None)
    with pytest.raises(ArgumentError, match=r"neither be left plain nor be managed[\s\S]*block") as caught:
        solve(given)
    assert not isinstance(caught.value, BudgetError), "no budget helps"


def test_the_smallest_peak_trades_what_is_kept_for_what_is_extra() -> None:
    """Saving the 6 bytes in the middle would keep less, but the backward of this region has no room for them."""
    tight = region(op(6, 1.0, needed=False), op(20, 1.0, (0,), choices=("save", "recompute")), backward_peak_bytes=30)
    blocks = (
        dataclasses.replace(tight, ops=(dataclasses.replace(tight.ops[0], choices=("save",)), tight.ops[1])),
        region(op(1), backward_peak_bytes=8),
    )
    given = problem(*blocks, link=None)
    costs = all_costs(given)
    assert smallest_peak(given)[1].peak_bytes == min(cost.peak_bytes for cost, _ in costs) == 30


def test_the_smallest_peak_swaps_no_more_than_it_must() -> None:
    blocks = region(op(10, choices=("save", "swap"))), region(op(10, choices=("save", "swap")))
    given = problem(*blocks, turn=Turn(0.0, 3), window=1, prefetch=1)
    assert smallest_peak(given)[1].peak_bytes == 4
    larger = problem(*blocks, region(op(1), backward_peak_bytes=15), window=1, prefetch=1)
    decision, cost = smallest_peak(larger)
    assert cost.peak_bytes == 16
    assert {each.ops for each in decision[:2]} == {("swap",)}


# ---- without SciPy ----------------------------------------------------------------------------------------------------------------


def test_without_scipy_the_error_says_what_to_install() -> None:
    found = run_fresh(
        """
from hyper_parallel.core.planner.solve.solver import solve
from support.planner_cases import op, problem, region
solve(problem(region(op(5, 1.0)), budget=4))
""",
        absent=("scipy",),
    )
    assert FrameworkMissingError.__name__ in found["error"]
    assert "pip install scipy" in found["text"]


# ---- large problems ---------------------------------------------------------------------------------------------------------------

# As parts of the plain activation peak; None: a thousandth above the smallest peak there is.
BUDGETS = (None, 0.1, 0.6, 0.05, 0.3)


def large(differ: bool, part: float | None) -> Problem:
    profile = transformer(100, differ=differ)
    given = Problem(profile, 0, 256 * MIB, 256 * MIB, region_overhead_ms=0.3)
    if part is None:
        activation_bytes = (smallest_peak(given)[1].peak_bytes - profile.base_bytes) * 1001 // 1000
    else:
        activation_bytes = int(part * profile.activation_peak_bytes)
    return dataclasses.replace(given, budget_bytes=profile.base_bytes + activation_bytes)


def test_large_problems_are_as_large_as_they_should_be() -> None:
    for each in transformer(100, differ=True).regions:
        values = [value for one in each.ops for value in one.makes] + [one.value for one in each.inputs]
        assert sum(value.is_residual for value in values) == 40
    assert len({each.shape() for each in transformer(100, differ=True).regions}) == 100
    assert len({each.shape() for each in transformer(100, differ=False).regions}) == 1


@pytest.mark.parametrize(("differ", "gap"), [(False, 0.001), (True, 0.02)])
@pytest.mark.parametrize("number", share(len(BUDGETS), 3))
def test_a_hundred_blocks_with_forty_residuals_are_solved_to_a_small_gap(differ: bool, gap: float, number: int) -> None:
    given = large(differ, BUDGETS[number])
    found = solve(given, time_limit_s=NO_HURRY)
    assert found.gap <= gap
    assert evaluate(given, found.decision) == found.cost
    assert found.cost.peak_bytes <= given.budget_bytes


def test_only_as_many_blocks_are_managed_as_the_budget_needs_where_that_costs_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All recomputed whole would be a few bytes too large: one block swaps its input, and pays for being managed."""
    inputs = (Input(StorageFacts(10, True), True),)
    blocks = [region(op(100, 5.0), inputs=inputs, backward_peak_bytes=120) for _ in range(6)]
    given = problem(*blocks, link=Link(100.0, 100.0), region_overhead_ms=50.0)
    whole = tuple(map(recompute_all, blocks))
    given = dataclasses.replace(given, budget_bytes=evaluate(given, whole).peak_bytes - 5)
    for small in (solver._SMALL, -1):  # exactly, and as a large problem
        monkeypatch.setattr(solver, "_SMALL", small)
        found = solve(given, time_limit_s=NO_HURRY)
        assert [each.is_managed for each in found.decision].count(True) == 1
        assert all(each.is_whole for each in found.decision if not each.is_managed and not each.is_plain)
        assert found.cost.peak_bytes <= given.budget_bytes


def test_equal_blocks_share_a_few_decisions() -> None:
    found = solve(large(False, 0.3), time_limit_s=NO_HURRY)
    assert 1 < len(set(found.decision)) <= 15


def test_the_same_problem_has_the_same_plan() -> None:
    given = large(True, 0.1)
    first = solve(given, time_limit_s=NO_HURRY)
    assert solve(given, time_limit_s=NO_HURRY).decision == first.decision


def test_the_same_problem_has_the_same_plan_in_another_process() -> None:
    program = """
from hyper_parallel.core.planner.model.problem import Problem
from hyper_parallel.core.planner.solve.solver import solve
from support.planner_cases import transformer
profile = transformer(12, differ=True)
given = Problem(profile, profile.base_bytes + profile.activation_peak_bytes // 4, 2**28, 2**28, region_overhead_ms=0.3)
result = [[each.ops, each.inputs] for each in solve(given, time_limit_s=600.0).decision]
"""
    plans = [run_fresh(program, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    assert plans[0] == plans[1]


def test_a_clock_that_has_run_out_still_gives_what_fits() -> None:
    profile = transformer(5, differ=True)
    given = Problem(profile, 0, 256 * MIB, 256 * MIB)
    budget = smallest_peak(given)[1].peak_bytes
    found = solve(dataclasses.replace(given, budget_bytes=budget), time_limit_s=0.0)
    assert found.cost.peak_bytes <= budget
    assert found.lower_bound_ms <= found.cost.step_ms


def test_a_step_of_microseconds_is_planned_like_one_of_seconds() -> None:
    slow = transformer(12, differ=True)
    link = slow.link
    assert link is not None
    fast = dataclasses.replace(
        slow,
        regions=tuple(
            dataclasses.replace(
                each,
                ops=tuple(dataclasses.replace(one, forward_ms=one.forward_ms / 2**20) for one in each.ops),
                forward_ms=each.forward_ms / 2**20,
                backward_ms=each.backward_ms / 2**20,
            )
            for each in slow.regions
        ),
        turn=dataclasses.replace(slow.turn, ms=slow.turn.ms / 2**20),
        link=Link(link.out_bytes_per_ms * 2**20, link.in_bytes_per_ms * 2**20),
    )
    budget = slow.base_bytes + slow.activation_peak_bytes // 4
    found = [solve(Problem(each, budget, 256 * MIB, 256 * MIB), time_limit_s=NO_HURRY) for each in (slow, fast)]
    assert found[0].decision == found[1].decision
    assert found[1].gap == pytest.approx(found[0].gap, abs=1e-9)


def test_where_highs_fails_it_is_tried_without_presolve() -> None:
    tried = []

    def fails_first(costs: list[float], options: dict[str, object]) -> SimpleNamespace:
        tried.append(options["presolve"])
        return SimpleNamespace(status=4 if options["presolve"] else 0)

    assert solver_model._with_or_without_presolve(fails_first, [], solver_model.Clock(1.0)).status == 0
    assert tried == [True, False]


# ---- which tensors are swapped ----------------------------------------------------------------------------------------------------


def test_the_nearest_sum_is_found() -> None:
    for seed in share(20_000, 1_000):
        rng = random.Random(seed)
        sizes = [rng.randint(0, 30) for _ in range(rng.randint(0, 8))]
        floor, target = (rng.uniform(-3, sum(sizes) + 3) for _ in range(2))
        found = sum(sizes[index] for index in nearest(sizes, floor, target))
        sums = [sum(each) for num in range(len(sizes) + 1) for each in itertools.combinations(sizes, num)]
        above = [each for each in sums if each >= floor]
        assert found in sums
        if above:
            assert found >= floor
            assert abs(found - target) == min(abs(each - target) for each in above), seed
        else:
            assert found == sum(sizes)


def test_sums_of_large_sizes_are_found_to_a_small_part() -> None:
    rng = random.Random(0)
    sizes = [rng.randint(10**5, 5 * 10**8) for _ in range(40)]
    for part in (0.1, 0.43, 0.9):
        target = part * sum(sizes)
        found = sum(sizes[index] for index in nearest(sizes, target, target))
        assert target <= found <= target * 1.001


def test_a_region_that_decides_like_one_before_it_and_may_not_swap_does_not() -> None:
    free = region(op(10, 5.0, choices=("save", "swap", "recompute")), op(1, 1.0, (0,)))
    fixed = region(op(10, 5.0, choices=("save", "recompute")), op(1, 1.0, (0,)))
    stored = frozenset({0, 1})
    bases = [base_of(each, stored, can_swap=True) for each in (free, fixed)]
    assert bases[0].decision == bases[1].decision
    for rounds_up in (False, True):
        chosen = _carried(bases, [10.0, 10.0], [10, 20], 100.0, rounds_up)
        assert chosen[0].ops[0] == "swap"
        assert chosen[1].ops[0] == "save"


def test_inputs_are_swapped_like_results() -> None:
    blocks = [region(op(1, 5.0), inputs=(Input(StorageFacts(10, True)),)) for _ in range(2)]
    given = problem(*blocks, budget=13, turn=Turn(50.0), link=Link(100.0, 100.0))
    found = solve(given)
    assert set(found.decision) == {plain(blocks[0]), RegionDecision(False, ("save",), ("swap",))}


def test_no_more_is_swapped_than_the_budget_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_ops, small in itertools.product((1, 3), (80, -1)):
        monkeypatch.setattr(solver, "_SMALL", small)
        blocks = [region(*(op(10, 5.0) for _ in range(num_ops))) for _ in range(3)]
        given = problem(*blocks, budget=30 * num_ops - 15, turn=Turn(50.0), link=Link(100.0, 100.0))
        found = solve(given)
        assert found.cost.step_ms == 140.0
        assert [choice for each in found.decision for choice in each.ops].count("swap") == 2


def test_a_region_that_does_what_a_plain_one_does_is_plain() -> None:
    blocks = region(op(10, 5.0), op(5, needed=False)), region(op(10, 7.0))
    decision = (RegionDecision(False, ("save", "save"), ()), RegionDecision(False, ("recompute",), ()))
    given = problem(*blocks, budget=10)
    assert tidied(given, decision, 10) == (plain(blocks[0]), decision[1])
    must = tuple(dataclasses.replace(each, may_be_plain=False) for each in blocks)
    assert tidied(problem(*must, budget=20), decision, 20) == decision


@pytest.mark.parametrize(("budget", "swapped"), [(70, "w..."), (64, ".w.."), (54, "ww.."), (36, "ww.w")])
def test_what_is_saved_in_place_of_a_swap_fits_at_every_moment(budget: int, swapped: str) -> None:
    """The forward of the third region leaves the budget less 45 for the first two, the turn leaves it less 32 for all."""
    blocks = [region(op(10)), region(op(20)), region(op(1), forward_peak_bytes=45), region(op(5))]
    swap = RegionDecision(False, ("swap",), ())
    found = tidied(problem(*blocks, turn=Turn(0.0, 32)), (swap,) * 4, budget)
    assert found == tuple(swap if each == "w" else plain(block) for each, block in zip(swapped, blocks, strict=True))
