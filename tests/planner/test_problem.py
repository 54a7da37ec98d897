"""What a decision costs: each rule of the README by an example that was worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.planner.model.choices import (
    RegionBytes,
    RegionDecision,
    allowed,
    check,
    extra_bytes,
    kept_bytes,
    plain,
    recompute_all,
    recompute_ms,
    swapped_bytes,
)
from hyper_parallel.core.planner.model.problem import (
    Peak,
    Problem,
    cost,
    displaced_bytes,
    evaluate,
    peak,
    room_for_copies,
)
from hyper_parallel.core.planner.model.profile import Input, Link, Region, StorageFacts, Turn
from hyper_parallel.core.planner.plan.table import residual_parts, text_of
from support.campaign import share
from support.planner_cases import all_costs, candidates, is_carried_out, loads, op, problem, random_problem, region

KEPT_INPUT, OTHER_INPUT = Input(StorageFacts(100, True)), Input(StorageFacts(200, False))


def managed(ops: str, inputs: str = "") -> RegionDecision:
    """s: save, w: swap, r: recompute, -: nothing."""
    words = {"s": "save", "w": "swap", "r": "recompute", "-": None}
    return RegionDecision(False, tuple(words[each] for each in ops), tuple(words[each] for each in inputs))


def swapping(num_bytes: int, *, ms: float = 10.0, back_ms: float = 20.0, **others):
    """A region with one residual, and the decision that swaps it."""
    return region(op(num_bytes), forward_ms=ms, backward_ms=back_ms, **others), managed("w")


# ---- choices ----------------------------------------------------------------------------------------------------------------------


def test_what_is_chosen_is_counted_where_it_goes() -> None:
    ops = (op(1, 0.5), op(20, 0.25, (0,)), op(300, 4.0, (1,), needed=False), op(0, 0.0, (2,)), op(4000, 8.0, (3,)))
    block = region(*ops, inputs=(KEPT_INPUT, OTHER_INPUT))
    decision = managed("srs-w", "ws")
    check(block, decision)
    assert kept_bytes(block, decision) == 1 + 300 + 200
    assert swapped_bytes(block, decision) == 4000 + 100
    assert extra_bytes(block, decision) == 300 + 200, "neither is a residual of the plain step"
    assert recompute_ms(block, decision) == 0.25


def test_a_plain_region_keeps_its_residuals_and_nothing_else() -> None:
    block = region(op(1, 1.0), op(20, 1.0, needed=False), inputs=(KEPT_INPUT, OTHER_INPUT))
    decision = plain(block)
    check(block, decision)
    assert kept_bytes(block, decision) == 101
    assert (swapped_bytes(block, decision), extra_bytes(block, decision), recompute_ms(block, decision)) == (0, 0, 0)


def test_all_results_of_an_op_are_stored_together() -> None:
    block = region(op(makes=(StorageFacts(1, True), StorageFacts(20, False), StorageFacts(300, True))))
    assert kept_bytes(block, plain(block)) == 301
    assert kept_bytes(block, managed("s")) == swapped_bytes(block, managed("w")) == 321
    assert extra_bytes(block, managed("s")) == extra_bytes(block, managed("w")) == 20


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (managed("ss", "s"), "one entry for each op"),
        (managed("sss", "ss"), "one entry for each op"),
        (managed("s-s", "s"), "Backward needs a result"),
        (managed("-rs", "s"), "run again without what it reads"),
        (managed("rss", "-"), "needs all its inputs"),
        (managed("sss", "-"), "Backward needs an input"),
        (managed("sss", "r"), "does not have this choice"),
        (managed("ssw", "s"), "does not have this choice"),
        (RegionDecision(True, ("save", None, None), (None,)), "no choices"),
        (RegionDecision(True, (None, None, None), ("save",)), "no choices"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(decision: RegionDecision, message: str) -> None:
    ops = (op(1, needed=False), op(1, reads=(0,)), op(1, choices=("save", "recompute"), reads=(1,)))
    block = region(*ops, inputs=(KEPT_INPUT,))
    check(block, managed("-sr", "s"))
    with pytest.raises(ArgumentError, match=message):
        check(block, decision)


def test_an_input_is_swapped_only_where_it_may_be() -> None:
    block = region(op(1), inputs=(Input(StorageFacts(5, True), may_swap=False),))
    check(block, managed("s", "s"))
    with pytest.raises(ArgumentError, match=r"does not have this choice.\nExpected save, got swap; block, input 0"):
        check(block, managed("s", "w"))


def test_an_input_that_is_no_residual_is_needed_only_to_run_again() -> None:
    block = region(op(1), inputs=(OTHER_INPUT, Input(StorageFacts(0, False))))
    check(block, managed("s", "--"))
    check(block, managed("r", "ss"))
    for inputs in ("-s", "s-"):
        with pytest.raises(ArgumentError, match="needs all its inputs"):
            check(block, managed("r", inputs))


def test_a_region_that_must_be_managed_is_not_left_plain() -> None:
    block = region(op(1), may_be_plain=False)
    with pytest.raises(ArgumentError, match="must be managed"):
        check(block, plain(block))


def test_a_view_runs_again_and_is_never_stored() -> None:
    view = op(0, 0.0, (0,))
    assert allowed(view) == ("recompute",)
    assert allowed(op(0, choices=("save",))) == ("save",), "what cannot run again"
    block = region(op(1, needed=False), view, op(1, reads=(1,)))
    check(block, managed("rrr"))
    with pytest.raises(ArgumentError, match="does not have this choice"):
        check(block, managed("-sr"))


def test_all_that_the_rules_allow_and_nothing_else_is_carried_out() -> None:
    for seed in range(20):
        for block in random_problem(seed).profile.regions:
            for decision in candidates(block):
                try:
                    check(block, decision)
                except ArgumentError:
                    assert not is_carried_out(block, decision), seed
                else:
                    assert is_carried_out(block, decision), seed


def test_recomputing_all_keeps_the_inputs_and_what_cannot_run_again() -> None:
    ops = (op(1, needed=False), op(2, reads=(0,), choices=("save", "swap")), op(3, needed=False), op(4, reads=(1,)))
    block = region(*ops, inputs=(KEPT_INPUT, OTHER_INPUT))
    decision = recompute_all(block)
    check(block, decision)
    assert decision == managed("-s-r", "ss"), "what only saved ops read is not needed"


def test_a_region_where_nothing_can_run_again_needs_no_inputs() -> None:
    assert recompute_all(region(op(1, choices=("save",)), inputs=(OTHER_INPUT,))) == managed("s", "-")


# ---- peaks: every term has a digit of its own -------------------------------------------------------------------------------------


def peak_problem(**others) -> Problem:
    first = region(op(300), inputs=(Input(StorageFacts(4, True)),))
    second = region(op(50_000, needed=False), op(1, reads=(0,)), **others)
    return problem(first, second, base_bytes=7, window=200_000, prefetch=400_000, margin_bytes=2_000_000)


def test_p1_backward_has_what_regions_before_it_keep_and_its_own_peak() -> None:
    given = peak_problem(outside_bytes=20, backward_peak_bytes=1000, forward_peak_bytes=999)
    found = evaluate(given, (managed("s", "s"), managed("sr"))).peak
    assert found == Peak("backward", 1, 7, 20, 304, 1000, 50_000, 0, 2_000_000)
    assert found.num_bytes == 2_051_331


def test_p2_forward_has_what_regions_before_it_keep_and_its_own_peak() -> None:
    given = peak_problem(outside_bytes=20, backward_peak_bytes=999, forward_peak_bytes=1000)
    found = evaluate(given, (managed("s", "s"), managed("sr"))).peak
    assert found == Peak("forward", 1, 7, 20, 304, 1000, 50_000, 0, 2_000_000)


def test_p3_the_turn_has_what_all_regions_keep() -> None:
    blocks = (
        region(op(300), inputs=(Input(StorageFacts(4, True)),)),
        region(op(50_000, needed=False), op(1, reads=(0,))),
    )
    given = problem(*blocks, base_bytes=7, turn=Turn(0.0, 6_000_000))
    assert evaluate(given, (managed("s", "s"), managed("sr"))).peak == Peak(
        "turn", None, 7, 0, 50_304, 6_000_000, 0, 0, 0
    )


@pytest.mark.parametrize("swapped", [(managed("w", "s"), managed("rr")), (managed("s", "w"), managed("rr"))])
def test_p4_loads_count_in_backward_as_soon_as_anything_is_swapped(swapped: tuple[RegionDecision, ...]) -> None:
    given = peak_problem()
    assert evaluate(given, (managed("s", "s"), managed("rr"))).peak.in_flight_bytes == 0
    found = evaluate(given, swapped).peak
    assert (found.moment, found.in_flight_bytes) == ("backward", 400_000)


def test_p4_the_window_counts_in_forward_and_in_the_turn() -> None:
    swapped = (managed("w", "s"), managed("rr"))
    found = evaluate(peak_problem(forward_peak_bytes=10**6), swapped).peak
    assert (found.moment, found.in_flight_bytes) == ("forward", 200_000)
    blocks = (
        region(op(300), inputs=(Input(StorageFacts(4, True)),)),
        region(op(50_000, needed=False), op(1, reads=(0,))),
    )
    given = problem(*blocks, turn=Turn(0.0, 10**6), window=200_000, prefetch=400_000)
    found = evaluate(given, swapped).peak
    assert (found.moment, found.in_flight_bytes) == ("turn", 200_000)


def test_p4_a_turn_that_is_clear_has_no_window_and_comes_after_all_offloads() -> None:
    block = region(op(40), forward_ms=10.0, backward_ms=1.0)
    last = region(op(1), forward_ms=5.0, backward_ms=1.0)
    given = problem(block, last, turn=Turn(3.0, 100), window=1000, prefetch=0, link=Link(1.0, 1.0))
    clear = dataclasses.replace(given, turn_is_clear=True)
    decision = (managed("w"), plain(last))
    assert [evaluate(each, decision).forward_end_ms for each in (given, clear)] == [(10.0, 15.0), (10.0, 40.0)]
    assert [evaluate(each, decision).backward_start_ms[0] for each in (given, clear)] == [80.0, 83.0]
    assert [each.in_flight_bytes("turn") for each in (given, clear)] == [1000, 0]
    assert clear.in_flight_bytes("forward") == 1000, "until the last region's forward is over it counts"


def early_and_late(*, temporary: int, forward_peak: int, before: int = 0) -> Region:
    """Four residuals of 100 bytes; what the first op needs while it runs; the results are read by the next op."""
    ops = [op(100, 1.0, (index - 1,) if index else ()) for index in range(4)]
    ops[0] = dataclasses.replace(ops[0], temporary_bytes=temporary)
    return region(*ops, forward_peak_bytes=forward_peak, before_peak_bytes=before)


def test_p4_the_last_region_takes_over_of_the_window_what_it_has_told_wherever_its_highest_point_is() -> None:
    assert displaced_bytes(early_and_late(temporary=0, forward_peak=400)) == 200, "the last two are still to be told"
    assert displaced_bytes(early_and_late(temporary=300, forward_peak=400)) == 0, (
        "the first op is as high, and nothing is told"
    )
    assert displaced_bytes(early_and_late(temporary=150, forward_peak=400)) == 150
    assert displaced_bytes(early_and_late(temporary=0, forward_peak=401)) == 0, "nobody knows where that is"
    assert displaced_bytes(early_and_late(temporary=0, forward_peak=400, before=300)) == 100
    assert displaced_bytes(region()) == 0


def test_parts_of_an_op_are_there_as_soon_as_it_runs_and_told_only_then() -> None:
    whole = op(10, 5.0, needed=False, choices=("recompute",))
    parts = [op(100, 0.0, (0,), part=number) for number in range(4)]
    assert displaced_bytes(region(whole, *parts, forward_peak_bytes=410)) == 0, "all are there before one is told"
    apart = [op(100, 1.0, (0,)) for _ in range(4)]
    assert displaced_bytes(region(whole, *apart, forward_peak_bytes=410)) == 300, "the last one is still to be told"


def test_p4_only_the_last_region_takes_over_and_only_where_the_turn_is_clear() -> None:
    block = early_and_late(temporary=0, forward_peak=400)
    given = problem(block, block, window=1000)
    clear = dataclasses.replace(given, turn_is_clear=True)
    assert [each.in_flight_bytes("forward", 1) for each in (given, clear)] == [1000, 800]
    assert [each.in_flight_bytes("forward", 0) for each in (given, clear)] == [1000, 1000]


def test_what_the_budget_leaves_for_copies_makes_the_peak_the_budget() -> None:
    for seed in range(200):
        given = random_problem(seed)
        for loaded in itertools.islice(itertools.product(*map(loads, given.profile.regions)), 5):
            room = room_for_copies(given, loaded)
            forward, backward = room[0], min(room[1:])
            assert len(room) == 1 + len(given.profile.regions)
            if forward >= 0 and backward >= 0:
                fits = dataclasses.replace(given, window_bytes=forward, prefetch_bytes=0)
                assert peak(fits, loaded, swaps=True).num_bytes == given.budget_bytes
                fits = dataclasses.replace(given, window_bytes=0, prefetch_bytes=backward)
                assert peak(fits, loaded, swaps=True).num_bytes == given.budget_bytes


def test_what_is_swapped_and_no_residual_is_extra_and_not_kept() -> None:
    given = peak_problem(backward_peak_bytes=10**7)
    assert evaluate(given, (managed("s", "s"), managed("wr"))).peak.extra_bytes == 50_000
    assert evaluate(given, (managed("w", "w"), managed("sr"))).peak.kept_bytes == 0


def test_a_region_does_not_count_what_it_keeps_in_its_own_backward() -> None:
    given = problem(region(op(300), backward_peak_bytes=1000), turn=Turn(0.0, 0))
    assert evaluate(given, (managed("s"),)).peak_bytes == 1000


# ---- times ------------------------------------------------------------------------------------------------------------------------


def test_without_a_decision_the_step_is_the_sum_of_its_parts() -> None:
    first = region(op(1), forward_ms=1.0, backward_ms=20.0, before_ms=300.0, after_ms=4000.0)
    second = region(op(1), forward_ms=0.5, backward_ms=0.25, before_ms=0.125, after_ms=0.0625)
    given = problem(first, second, turn=Turn(50_000.0))
    found = evaluate(given, (plain(first), plain(second)))
    assert found.step_ms == 54_321.9375
    assert found.forward_start_ms == (300.0, 301.125)
    assert found.forward_end_ms == (301.0, 301.625)
    assert found.backward_start_ms == (50_301.9375, 50_301.625)
    assert found.backward_end_ms == (50_321.9375, 50_301.875)
    assert found.stall_ms == 0


def test_t1_a_forward_waits_until_no_more_than_the_window_is_to_be_copied() -> None:
    block, decision = swapping(25, before_ms=5.0)
    found = evaluate(problem(block, turn=Turn(1000.0), window=7), (decision,))
    assert found.offload_end_ms == (30.0,), "offloads start with the region: 5 + 25"
    assert found.forward_end_ms == (23.0,), "7 are still to be copied"
    assert found.forward_stall_ms == (8.0,)


def test_t1_a_small_offload_hides_behind_the_forward() -> None:
    block, decision = swapping(10)
    found = evaluate(problem(block, turn=Turn(1000.0)), (decision,))
    assert found.forward_end_ms == (10.0,)
    assert found.forward_stall_ms == (0.0,)


def test_t1_offloads_go_one_after_the_other() -> None:
    (first, swap), (second, _) = swapping(25), swapping(3, before_ms=2.0)
    found = evaluate(problem(first, second, turn=Turn(1000.0), window=20), (swap, swap))
    assert found.forward_end_ms == (10.0, 22.0)
    assert found.offload_end_ms == (25.0, 28.0), "the second waits for the first, not for its own start at 12"


def test_t1_a_region_that_swaps_nothing_waits_for_the_window_too() -> None:
    (first, swap), second = swapping(40), region(op(1), forward_ms=1.0)
    found = evaluate(problem(first, second, turn=Turn(1000.0), window=20), (swap, managed("s")))
    assert found.forward_end_ms == (20.0, 21.0)
    again = evaluate(problem(first, second, turn=Turn(1000.0), window=30), (swap, plain(second)))
    assert again.forward_end_ms == (10.0, 11.0)


def test_t2_loads_start_with_the_end_of_the_turn_last_region_first() -> None:
    (first, swap), (second, _) = swapping(5), swapping(7, back_ms=1.0)
    found = evaluate(problem(first, second, turn=Turn(100.0), prefetch=5), (swap, swap))
    assert found.load_end_ms == (132.0, 127.0), "the turn ends at 120"
    assert found.backward_start_ms == (132.0, 127.0)
    assert found.backward_stall_ms == (4.0, 7.0)


def test_t2_no_more_than_the_prefetch_limit_comes_before_its_time() -> None:
    (first, swap), second = swapping(15), region(op(1), backward_ms=30.0)
    last = region(op(1), backward_ms=40.0)
    given = problem(first, second, last, turn=Turn(100.0), prefetch=6)
    found = evaluate(given, (swap, plain(second), plain(last)))
    # The turn ends at 135 (the first forward waits 5 for its offload); backwards start at 135 and 175; at 175 no more than 6 may be there.
    assert found.backward_start_ms[1] == 175.0
    assert found.load_end_ms[0] == 175.0 + 15 - 6
    assert found.backward_start_ms[0] == 205.0, "which is in time"


@pytest.mark.parametrize(("prefetch", "start_ms"), [(0, 180.0), (5, 175.0), (18, 162.0), (19, 161.0), (1000, 161.0)])
def test_t2_a_limit_that_is_too_small_makes_loads_late(prefetch: int, start_ms: float) -> None:
    (first, swap), second, last = swapping(20), region(op(1), backward_ms=1.0), region(op(1), backward_ms=30.0)
    given = problem(first, second, last, turn=Turn(100.0), window=1000, prefetch=prefetch)
    found = evaluate(given, (swap, plain(second), plain(last)))
    assert found.backward_start_ms == (start_ms, 160.0, 130.0)


def test_t2_the_limit_counts_the_bytes_of_all_regions_before() -> None:
    blocks = [swapping(20)[0], swapping(20, back_ms=1.0)[0], swapping(1, back_ms=1.0)[0], swapping(1, back_ms=50.0)[0]]
    swap = managed("w")
    given = problem(*blocks, turn=Turn(100.0), window=1000, prefetch=5)
    found = evaluate(given, (swap, swap, plain(blocks[2]), plain(blocks[3])))
    # At 190 no more than 5 of these 40 bytes may be there, though the link had nothing to do since 140.
    assert found.backward_start_ms == (225.0, 205.0, 190.0, 140.0)


def test_t3_a_backward_takes_what_is_recomputed_and_the_overhead_of_managing() -> None:
    block = region(op(1, 4.0), op(1, 0.5, (0,)), backward_ms=20.0)
    given = problem(block, region_overhead_ms=0.25)
    for decision, step_ms in (
        (plain(block), 30.0),
        (managed("ss"), 30.25),
        (managed("sr"), 30.75),
        (managed("rr"), 34.5),  # which the framework does by itself
    ):
        assert evaluate(given, (decision,)).step_ms == step_ms


def test_t3_a_region_without_swaps_does_not_wait_for_loads() -> None:
    (first, swap), second = swapping(500), region(op(1), backward_ms=20.0)
    given = problem(first, second, turn=Turn(600.0), window=1000, prefetch=1000)
    found = evaluate(given, (swap, plain(second)))
    assert found.backward_start_ms == (1120.0, 620.0)
    assert found.backward_stall_ms == (480.0, 0.0)


def test_t4_the_step_ends_with_what_lies_before_the_first_region() -> None:
    block = region(op(1), forward_ms=1.0, backward_ms=2.0, after_ms=4.0)
    found = evaluate(problem(block), (plain(block),))
    assert (found.backward_end_ms, found.step_ms) == ((3.0,), 7.0)


def test_what_is_still_on_its_way_out_cannot_come_back() -> None:
    (first, swap), second = swapping(35), region(op(1), forward_ms=1.0, backward_ms=2.0)
    given = problem(first, second, turn=Turn(4.0), window=1000, prefetch=1000)
    found = evaluate(given, (swap, plain(second)))
    assert found.backward_start_ms == (70.0, 15.0), "offloaded at 35, loaded at 70; the other one does not wait"


def test_the_two_ways_of_the_link_have_their_own_speeds() -> None:
    block, swap = swapping(40)
    found = evaluate(problem(block, link=Link(2.0, 8.0)), (swap,))
    assert (found.offload_end_ms, found.load_end_ms) == ((20.0,), (25.0,))


def test_a_step_without_regions_is_its_turn() -> None:
    found = evaluate(problem(turn=Turn(3.0, 40), base_bytes=7), ())
    assert (found.step_ms, found.peak_bytes) == (3.0, 47)


def literal_times(given: Problem, chosen: list[RegionBytes]) -> tuple[float, list[float]]:
    """T1-T4 word by word: T2 looks at every region after k."""
    regions, num = given.profile.regions, len(chosen)
    out, into = given.link.out_bytes_per_ms, given.link.in_bytes_per_ms
    swap = [each.swapped_bytes for each in chosen]
    end, offloaded, offload_ends = 0.0, 0.0, []
    for k, each in enumerate(regions):
        start = end + each.before_ms
        offloaded = max(offloaded, start) + swap[k] / out
        end = start + each.forward_ms
        if any(swap[: k + 1]):
            is_over = given.turn_is_clear and k == num - 1
            end = max(end, offloaded - (0 if is_over else given.window_bytes) / out)
        offload_ends.append(offloaded)
    over = loaded = end + given.profile.turn.ms
    starts = [0.0] * num
    for k in reversed(range(num)):
        starts[k] = over
        if swap[k]:
            allowed_at = [starts[m] + (sum(swap[k:m]) - given.prefetch_bytes) / into for m in range(k + 1, num)]
            loaded = max([loaded + swap[k] / into, offload_ends[k] + swap[k] / into, *allowed_at])
            starts[k] = max(over, loaded)
        overhead = given.region_overhead_ms if chosen[k].is_managed else 0.0
        over = starts[k] + chosen[k].recompute_ms + overhead + regions[k].backward_ms + regions[k].after_ms
    return over, starts


def test_times_are_those_of_the_rules_word_by_word() -> None:
    num_waiting = 0
    blocks = [each for seed in range(60) for each in random_problem(seed).profile.regions if loads(each)]
    for seed in share(20_000, 2_000):
        rng = random.Random(seed)
        given = problem(
            *rng.choices(blocks, k=rng.randint(1, 9)),
            link=Link(rng.uniform(0.3, 5.0), rng.uniform(0.3, 5.0)),
            turn=Turn(rng.choice((0.0, 5.0))),
            window=rng.randint(0, 20),
            prefetch=rng.randint(0, 20),
            region_overhead_ms=0.5,
        )
        chosen = [rng.choice(list(loads(each))) for each in given.profile.regions]
        found = cost(given, chosen)
        step_ms, starts = literal_times(given, chosen)
        assert found.step_ms == pytest.approx(step_ms, rel=1e-12), seed
        assert found.backward_start_ms == pytest.approx(starts, rel=1e-12), seed
        num_waiting += found.stall_ms > 1e-9
    assert num_waiting > 100, "few of these cases wait for anything"


# ---- what is refused --------------------------------------------------------------------------------------------------------------


def test_nothing_is_swapped_without_a_link() -> None:
    block, swap = swapping(1)
    with pytest.raises(ArgumentError, match="no link to the host"):
        evaluate(problem(block, link=None), (swap,))


def test_there_is_one_entry_for_each_region() -> None:
    with pytest.raises(ArgumentError, match="one entry for each region.\nExpected 1, got 2"):
        evaluate(problem(region()), (managed(""), managed("")))


def test_what_cannot_be_carried_out_has_no_cost() -> None:
    with pytest.raises(ArgumentError, match="Backward needs a result"):
        evaluate(problem(region(op(1))), (managed("-"),))


@pytest.mark.parametrize("name", ["window_bytes", "prefetch_bytes", "region_overhead_ms", "margin_bytes"])
def test_sizes_of_a_problem_are_not_negative(name: str) -> None:
    sizes = {"window_bytes": 0, "prefetch_bytes": 0, name: -1}
    with pytest.raises(ArgumentError, match=f"`{name}` is negative"):
        Problem(problem().profile, 0, **sizes)


def test_random_problems_have_answers_to_choose_from() -> None:
    num_answers = [len(all_costs(random_problem(seed))) for seed in range(50)]
    assert sum(num > 50 for num in num_answers) > 25


def test_a_part_is_said_to_cost_its_share_of_what_makes_all_parts_again() -> None:
    mib = 2**20
    whole = op(mib, 8.0, needed=False, choices=("recompute",))
    parts = [dataclasses.replace(op(n * mib, 0.0, (0,), part=n), name=f"compiled[{n}]") for n in (1, 3)]
    for ms, expected in ((8.0, ["6.00", "recompute"]), (12.0, ["9.00", "swap"])):
        profile = problem(region(dataclasses.replace(whole, forward_ms=ms), *parts), link=Link(mib, mib)).profile
        line = next(line for line in text_of(residual_parts(profile)).splitlines() if "compiled[3]" in line)
        assert line.split()[-2:] == expected
