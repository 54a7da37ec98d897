"""One step in numbers: cases worked out by hand, 500 random models against a framework that really runs them, and bugs that these find."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.planner.model.choices import Decision, RegionDecision, plain, recompute_all
from hyper_parallel.core.planner.model.profile import Input, Link, ProfiledOp, Region, StepProfile, StorageFacts, Turn
from hyper_parallel.core.planner.model.timeline import Moment, Timeline, plain_step, run_step
from hyper_parallel.core.planner.model.virtual_device import Copy, Place, Stall, Use, VirtualDevice, VirtualTier
from hyper_parallel.core.swap.engine import Limits
from support.campaign import share
from support.planted_bugs import STEPS
from support.planting import Bug, beside, unchanged
from support.simulated_models import Case, compare, random_case, smallest

PLENTY = Limits(1 << 40, 1 << 40)


def op(
    ms: float, *makes: StorageFacts, reads: tuple[int, ...] = (), inputs: tuple[int, ...] = (), temporary: int = 0
) -> ProfiledOp:
    return ProfiledOp("", "op", 0, 0, ms, makes, reads, inputs, temporary)


def region(path: str, *ops: ProfiledOp, inputs: tuple[Input, ...] = (), above: int = 0, **rest: Any) -> Region:
    """`above`: what backward has in use beside the residuals."""
    forward_ms = sum(each.forward_ms for each in ops)
    residuals = Region(path, 0, ops, inputs, 0.0, 0.0, 0, 0).residual_bytes
    return Region(path, 0, ops, inputs, forward_ms, forward_peak_bytes=0, backward_peak_bytes=residuals + above, **rest)


def step_of(*regions: Region, base: int = 0, turn: Turn | None = None, link: Link | None = None) -> StepProfile:
    return StepProfile(regions, base, 0, 0.0, turn or Turn(), link or Link(1.0, 1.0))


def managed(*ops: str | None, inputs: tuple[str | None, ...] = ()) -> RegionDecision:
    return RegionDecision(False, ops, inputs)


def levels(timeline: Timeline) -> dict[float, int]:
    """Bytes above the base, from each time on."""
    return {moment.ms: moment.num_bytes - moment.base_bytes for moment in timeline.moments}


def last_at(timeline: Timeline, ms: float) -> Moment:
    return [moment for moment in timeline.moments if moment.ms <= ms][-1]


# -- by hand --------------------------------------------------------------------------------------------------------------


def chain() -> Region:
    """An input of 4, read by a norm (8, dies at once), read by a matmul (16, kept), whose result of 2 is handed on."""
    return region(
        "block",
        op(1.0, StorageFacts(8, False, 1), inputs=(0,)),
        op(2.0, StorageFacts(16, True, 2), reads=(0,), temporary=5),
        op(1.0, StorageFacts(2, False), reads=(1,)),
        inputs=(Input(StorageFacts(4, True)),),
        backward_ms=8.0,
        above=10,
    )


def test_a_plain_step_is_the_sum_of_its_parts() -> None:
    timeline = plain_step(step_of(chain(), chain(), base=100, turn=Turn(3.0, 7)))
    assert (timeline.forward_ms, timeline.turn_ms, timeline.backward_ms) == (8.0, 3.0, 16.0)
    assert timeline.peak_bytes == 100 + 20 + 4 + 8 + 16 + 5
    assert (timeline.peak_place, timeline.peak_ms) == (Place("forward", 1, 1), 5.0)
    assert timeline.copies == timeline.stalls == ()
    assert levels(timeline) == {
        0.0: 4 + 8,  # the input and the norm
        1.0: 4 + 8 + 16 + 5,
        3.0: 4 + 16 + 2,
        4.0: 20 + 4 + 8,  # what was handed on is the input now
        5.0: 20 + 4 + 8 + 16 + 5,
        7.0: 20 + 4 + 16 + 2,
        8.0: 40 + 7,  # the turn, whose peak has in it what the last region gave
        11.0: 40 + 10,
        17.0: 20 + 4 + 10,  # backward has passed the matmul
        19.0: 20 + 10,
        25.0: 4 + 10,
        27.0: 0,
    }


def test_each_region_has_a_curve_of_its_own() -> None:
    timeline = plain_step(step_of(chain(), chain(), base=100))
    first, second = (dict(curve) for curve in timeline.region_bytes)
    assert first == {0.0: 12, 1.0: 33, 3.0: 22, 4.0: 20, 16.0: 30, 22.0: 14, 24.0: 0}
    assert second == {0.0: 0, 4.0: 12, 5.0: 33, 7.0: 22, 8.0: 30, 14.0: 14, 16.0: 0}


def test_recomputation_gives_up_residuals_and_takes_its_time() -> None:
    profile = step_of(chain(), chain(), base=100)
    timeline = run_step(profile, tuple(recompute_all(each) for each in profile.regions), PLENTY)
    assert timeline.step_ms == 4.0 + 4.0 + 2 * (3.0 + 8.0)
    assert last_at(timeline, 7.5).working_bytes == 4 + 16 + 2, (
        "a residual that is recomputed stays until the forward ends"
    )
    assert last_at(timeline, 8.5).saved_bytes == 4 + 4
    assert levels(timeline)[9.0] == 8 + 8 + 16 + 5, "norm and matmul run again, from 8 to 11"
    assert levels(timeline)[11.0] == 8 + 16 + 10, "the last op does not"
    assert timeline.peak_bytes == 100 + 4 + 4 + 8 + 16 + 5


def test_what_a_policy_keeps_for_nothing_goes_when_the_forward_ends() -> None:
    profile = step_of(chain())
    timeline = run_step(profile, (managed("save", "save", "save", inputs=("save",)),), PLENTY)
    assert last_at(timeline, 3.5).working_bytes == 4 + 8 + 16 + 2, "the norm is kept until nobody turns out to need it"
    assert last_at(timeline, 4.0).saved_bytes == 4 + 16


def test_what_cuts_a_chain_of_recomputation_stays_until_backward_is_over() -> None:
    profile = step_of(chain())
    timeline = run_step(profile, (managed("save", "recompute", None, inputs=("save",)),), PLENTY)
    assert timeline.step_ms == 4.0 + 2.0 + 8.0
    assert last_at(timeline, 5.0).saved_bytes == 4 + 8
    assert last_at(timeline, 13.5).saved_bytes == 4 + 8


def test_what_runs_outside_of_regions_has_its_memory_until_backward_is_back_there() -> None:
    first = region("a", op(1.0, StorageFacts(1, True)), backward_ms=2.0, outside_bytes=10, before_ms=5.0, after_ms=3.0)
    second = region("b", op(1.0, StorageFacts(1, True)), backward_ms=2.0, outside_bytes=14, before_ms=5.0, after_ms=3.0)
    timeline = plain_step(step_of(first, second))
    assert timeline.step_ms == 2 * (5.0 + 1.0 + 2.0 + 3.0)
    outside = [(moment.ms, moment.outside_bytes) for moment in timeline.moments]
    assert dict(outside) == {0.0: 10, 5.0: 10, 6.0: 14, 11.0: 14, 12.0: 14, 14.0: 14, 17.0: 10, 19.0: 10, 22.0: 0}


def swapping(num_regions: int, *, ms: float = 10.0) -> StepProfile:
    """Each region makes one residual of 10 bytes that dies at once. A byte takes a millisecond."""
    ops = (op(ms, StorageFacts(10, True, 0)),)
    return step_of(*(region(f"layers.{n}", *ops, backward_ms=ms) for n in range(num_regions)), base=1_000)


def swap_all(profile: StepProfile) -> Decision:
    return tuple(managed(*("swap" for _ in each.ops)) for each in profile.regions)


def test_copies_hide_behind_compute() -> None:
    profile = swapping(3)
    timeline = run_step(profile, swap_all(profile), PLENTY, num_steps=1)
    assert timeline.stalls == ()
    assert timeline.step_ms == 60.0
    assert timeline.copies == (
        Copy("offload", 0, 10.0, 20.0, 10),
        Copy("offload", 1, 20.0, 30.0, 10),
        Copy("offload", 2, 30.0, 40.0, 10),  # backward asks for it at 30, while it is still here
        Copy("load", 1, 30.0, 40.0, 10),
        Copy("load", 0, 40.0, 50.0, 10),
    )
    assert timeline.host_bytes == 30
    assert timeline.paths[timeline.copies[-1].region] == "layers.0"
    named = {
        moment.ms: (moment.working_bytes, moment.window_bytes, moment.prefetched_bytes) for moment in timeline.moments
    }
    assert named == {
        0.0: (10, 0, 0),
        10.0: (10, 10, 0),
        20.0: (10, 10, 0),
        30.0: (10, 0, 20),  # both loads have their buffers when they are launched
        40.0: (10, 0, 10),
        50.0: (10, 0, 0),
        60.0: (0, 0, 0),
    }
    assert timeline.peak_bytes == 1_030
    assert timeline.peak_place == Place("backward", 2, 0)


def test_a_full_window_stalls_compute_and_so_does_a_late_load() -> None:
    profile = swapping(2, ms=2.0)
    for num_steps in (1, 3):
        timeline = run_step(profile, swap_all(profile), Limits(10, 1 << 40), num_steps=num_steps)
        # The second is there at 4, and the first leaves from 2 to 12; it is back at 22, and asked for at 14.
        assert timeline.stalls == (Stall("offload", 1, 4.0, 8.0), Stall("load", 0, 14.0, 8.0))
        assert (timeline.forward_ms, timeline.backward_ms) == (12.0, 12.0)


def test_with_on_full_keep_what_does_not_fit_is_saved() -> None:
    profile = swapping(2, ms=2.0)
    timeline = run_step(profile, swap_all(profile), Limits(10, 1 << 40, "keep"), num_steps=1)
    assert [copy.direction for copy in timeline.copies] == ["offload", "load"]
    assert timeline.forward_ms == 4.0
    assert last_at(timeline, 4.0).saved_bytes == 10


def test_the_engine_learns_in_the_first_steps_what_is_needed_first() -> None:
    profile = swapping(3)
    first, second = (run_step(profile, swap_all(profile), Limits(40, 1 << 40), num_steps=n) for n in (1, 2))
    assert [copy.region for copy in first.copies if copy.direction == "offload"] == [0, 1, 2]
    assert [copy.region for copy in second.copies if copy.direction == "offload"] == [0, 1]
    assert last_at(second, 30.0).saved_bytes == 10


def test_the_engine_learns_to_prefetch_what_came_late() -> None:
    """The last backward is long, and the others are short: one load at a time leaves the link idle, and then comes late."""
    profile = swapping(5, ms=1.0)
    *short, last = profile.regions
    profile = step_of(*short, region("last", op(100.0, StorageFacts(10, True, 0)), backward_ms=60.0), base=1_000)
    stalls = [
        sum(each.ms for each in run_step(profile, swap_all(profile), Limits(80, 80), num_steps=n).stalls)
        for n in (1, 2, 4, 10)
    ]
    assert stalls == sorted(stalls, reverse=True)
    assert stalls[0] > 0 == stalls[-1]
    assert last.path == "layers.4"


def test_a_host_that_runs_ahead_sees_no_copy_done_and_the_window_holds_more() -> None:
    profile = swapping(4)
    in_step, ahead = (
        run_step(profile, swap_all(profile), Limits(100, 10), num_steps=1, host_lead_ms=lead)
        for lead in (0.0, float("inf"))
    )
    assert in_step.peak_bytes == 1_000 + 10 + 10
    assert ahead.peak_bytes == 1_000 + 10 + 30
    assert in_step.step_ms == ahead.step_ms


def test_small_values_and_those_without_room_on_the_host_stay() -> None:
    profile = swapping(3)
    for timeline in (
        run_step(profile, swap_all(profile), PLENTY, min_bytes=11),
        run_step(profile, swap_all(profile), PLENTY, host_bytes=9),
    ):
        assert timeline.copies == ()
        assert last_at(timeline, 30.0).saved_bytes == 30


def test_a_replay_asks_for_inputs_first_then_for_what_it_takes_in_order() -> None:
    block = region(
        "block",
        op(1.0, StorageFacts(16, False, 2), inputs=(0,)),
        op(1.0, StorageFacts(32, True, 2)),
        op(1.0, StorageFacts(64, True), reads=(0, 1)),
        inputs=(Input(StorageFacts(8, False)), Input(StorageFacts(4, True))),
        backward_ms=3.0,
    )
    later = region("later", op(1000.0, StorageFacts(1, True, 0)), backward_ms=1000.0)
    profile = step_of(block, later, link=Link(1.0, 1.0))
    chosen = managed("swap", "swap", "recompute", inputs=("swap", "swap"))
    timeline = run_step(profile, (chosen, managed("swap")), PLENTY, num_steps=1)
    # Out: the residual when it is made, what the replay needs when the forward ends, inputs. Back: what the replay takes (it reads
    # neither input), then the rest from the end.
    assert [c.num_bytes for c in timeline.copies if c.direction == "offload"] == [32, 16, 8, 4, 1]
    assert [c.num_bytes for c in timeline.copies if c.direction == "load"] == [16, 32, 4, 8]
    assert timeline.backward_ms == 1000.0 + 1.0 + 3.0


def test_a_step_without_regions_is_its_turn() -> None:
    timeline = plain_step(step_of(base=5, turn=Turn(2.0, 7)))
    assert (timeline.peak_bytes, timeline.step_ms, timeline.peak_place.phase) == (12, 2.0, "turn")


def test_a_region_without_ops_takes_its_time_all_the_same() -> None:
    empty = Region("empty", 0, (), (Input(StorageFacts(10, True)),), 3.0, 4.0, 0, 10)
    timeline = run_step(step_of(empty), (managed(inputs=("swap",)),), PLENTY, num_steps=1)
    assert (timeline.forward_ms, timeline.backward_ms) == (3.0, 4.0)
    assert timeline.copies == (Copy("offload", 0, 3.0, 13.0, 10),)


def test_plain_regions_give_what_plain_step_gives() -> None:
    profile = step_of(chain(), chain(), base=100, turn=Turn(3.0, 7))
    timeline = run_step(profile, tuple(plain(each) for each in profile.regions), PLENTY)
    assert timeline.moments == plain_step(profile).moments


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ((), "one entry for each region"),
        ((managed("swap"),), "no link"),
        ((managed(None),), "Backward needs"),
    ],
)
def test_a_decision_that_cannot_be_carried_out_is_refused(decision: Decision, message: str) -> None:
    profile = StepProfile((region("block", op(1.0, StorageFacts(1, True)), backward_ms=1.0),), 0, 0, 0.0)
    with pytest.raises(ArgumentError, match=message):
        run_step(profile, decision, PLENTY)


def test_no_step_at_all_is_refused() -> None:
    with pytest.raises(ArgumentError, match="num_steps of 1 or more"):
        run_step(step_of(), (), PLENTY, num_steps=0)


# -- the device -------------------------------------------------------------------------------------------------------------


def test_the_later_of_two_copies_pays_for_the_shared_link() -> None:
    device, tier = VirtualDevice(Link(1.0, 1.0, 0.5)), VirtualTier()
    block, other = tier.take(10), tier.take(10)
    source = device.buffer(10, Use.WORKING, 0)
    device.launch_offload(block, source, device.offload_stream())
    device.load_stream().run(4.0)
    device.launch_load(device.buffer(10, Use.PREFETCHED, 0), other, device.load_stream())
    # From 4 to 10 it moves 3 bytes, the other 7 take 7 ms.
    assert [(copy.start_ms, copy.end_ms) for copy in device.copies] == [(0.0, 10.0), (4.0, 17.0)]


def test_the_host_sees_done_what_is_not_later_than_its_own_clock() -> None:
    device = VirtualDevice(None, host_lead_ms=2.0)
    device.offload_stream().run(10.0)
    event = device.offload_stream().record_event()
    device.compute.run(11.0)
    assert not event.query()
    device.compute.run(1.0)
    assert event.query()
    late = VirtualDevice(None, host_lead_ms=float("inf"))
    late.offload_stream().run(10.0)
    event = late.offload_stream().record_event()
    late.compute.run(100.0)
    assert not event.query()
    late.sync()
    assert event.query()


def test_a_host_that_joins_lets_compute_wait() -> None:
    device = VirtualDevice(None)
    device.load_stream().run(10.0)
    event = device.load_stream().record_event()
    event.join()
    assert event.query()
    assert device.compute.now_ms == 10.0


def test_the_host_gives_the_block_that_is_free_first_and_tells_who_used_it_last() -> None:
    device, tier = VirtualDevice(None), VirtualTier(budget_bytes=20)
    first, second = tier.take(10), tier.take(10)
    assert first is not None
    assert second is not None
    assert tier.take(1) is None
    for block, ms in ((first, 8.0), (second, 4.0)):
        stream = VirtualDevice(None).load_stream()
        stream.run(ms)
        block.last_uses = (stream.record_event(),)
    for block in (second, first):
        tier.give(block)
    taken = tier.take(10)
    assert taken is not None
    assert taken.last_uses == second.last_uses
    assert (tier.used_bytes, tier.reserved_bytes) == (10, 20)
    assert device.bytes_in_use() == 0


def test_memory_goes_back_with_the_last_reference() -> None:
    device = VirtualDevice(None)
    held = [device.buffer(10, Use.WORKING, 0)]
    alias = list(held)
    held.clear()
    assert device.bytes_in_use() == 10
    alias.clear()
    assert (device.bytes_in_use(), device.memory.peak_bytes) == (0, 10)


# -- random models ------------------------------------------------------------------------------------------------------------


def explain(seed: int, error: Exception, run: Any) -> str:
    def fails(case: Case) -> bool:
        try:
            compare(case, run)
        except type(error):
            return True
        return False

    return f"seed {seed}: {error}\nA smaller case that fails, too:\n{smallest(random_case(seed), fails)}"


def test_random_models_use_the_bytes_and_the_time_that_were_predicted() -> None:
    seen: set[str] = set()
    for seed in share(20_000, 500):
        try:
            trainer = compare(random_case(seed), run_step)
        except Exception as error:
            raise AssertionError(explain(seed, error, run_step)) from error
        stats = trainer.engine.stats
        seen |= {reason for reason, number in stats.kept.items() if number}
        seen |= {name for name, number in stats.as_dict().items() if number}
    assert {
        "needed first in backward", "the link is behind", "no room in host", "num_late_loads", "num_window_waits",
        "load_stall_ms", "offload_stall_ms", "loaded_bytes",
    } <= seen, "the cases reach all that the engine may do"  # fmt: skip


def find_planted(bug: Bug, num_seeds: int = 500) -> str | None:
    """What the comparison said of the bug; None if it found nothing."""
    run = beside(bug, run_step).run_step
    for seed in range(num_seeds):
        try:
            compare(random_case(seed), run)
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("bug", STEPS, ids=lambda bug: bug.name)
def test_the_comparison_finds(bug: Bug) -> None:
    found = find_planted(bug)
    assert found is not None, "nothing found: the comparison is blind here, or the statement does nothing"
    print(found)


def test_the_comparison_finds_nothing_where_nothing_was_planted() -> None:
    for mark in ("host-room", "smallest"):  # in the two lowest modules: all above are loaded anew
        assert find_planted(Bug("none", mark, unchanged), num_seeds=50) is None


def test_a_failure_comes_with_a_smaller_case() -> None:
    bug = next(bug for bug in STEPS if "window is ignored" in bug.name)
    run = beside(bug, run_step).run_step
    for seed in range(500):
        case = random_case(seed)
        try:
            compare(case, run)
        except Exception as error:
            text = explain(seed, error, run)
            assert text.startswith(f"seed {seed}: ")
            assert text.count("Op(") < str(case).count("Op(")
            return
    raise AssertionError("the bug was not found")
