"""The rules of the engine, each by its number, on small programs of the simulated device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hyper_parallel._base import trace
from hyper_parallel.core.swap.engine import Limits, SwapEngine
from hyper_parallel.core.swap.slot import Handle
from hyper_parallel.core.swap.states import SlotState
from support.simulated_device import SimulatedDevice
from support.simulated_stream import IDLE, LAGGING_COPIES, PROMPT
from support.simulated_tier import SimulatedTier


class Setup:
    """An engine on a simulated device, with forwards of equal layers."""

    def __init__(self, profile: Any = PROMPT, window: int = 1_000, prefetch: int = 1_000, **options: Any) -> None:
        self.device = SimulatedDevice(0, profile=profile)
        self.tier = SimulatedTier(self.device, options.pop("tier_name", "host"), options.pop("budget", 1 << 30))
        self.engine = SwapEngine(self.device, [self.tier], Limits(window, prefetch, **options))

    def save(self, group: Any, num_bytes: int, label: str) -> Handle:
        buffer = self.device.create(num_bytes, label, label=label)
        return Handle(self.engine.save(buffer, num_bytes, group, label, lambda: buffer.version))

    def forward(self, num_layers: int, num_saved: int = 2, num_bytes: int = 10) -> list[Handle]:
        handles = []
        for layer in range(num_layers):
            group = self.engine.new_group(f"layer {layer}")
            handles += [self.save(group, num_bytes, f"{layer}.{index}") for index in range(num_saved)]
        return handles

    def backward(self, handles: list[Handle]) -> None:
        while handles:
            self.use(handles.pop())

    def use(self, handle: Handle) -> None:
        seen: list[Any] = []
        self.device.kernel(reads=[self.engine.acquire(handle)], fn=seen.append)
        self.device.finish()
        assert seen == [handle.slot.label]

    def join(self) -> None:
        self.engine.join()

    def close(self) -> None:
        self.engine.join()
        self.device.check_clean()


def states(handles: list[Handle]) -> list[SlotState]:
    return [handle.slot.state for handle in handles]


def test_rule_5_the_compute_stream_is_looked_up_at_every_use() -> None:
    setup = Setup(IDLE)
    group = setup.engine.new_group("layer")
    handles = []
    for stream in setup.device.compute_streams:
        with setup.device.computing_on(stream):
            handles.append(setup.save(group, 10, f"made on {stream.name}"))
    assert [handle.slot.stream for handle in handles] == setup.device.compute_streams
    for stream, handle in zip(setup.device.compute_streams, handles, strict=True):
        with setup.device.computing_on(stream):
            setup.use(handle)
    del handle
    handles.clear()
    setup.close()


def test_rule_7_a_buffer_comes_from_the_pool_of_the_stream_that_uses_it() -> None:
    setup = Setup(prefetch=4_000)
    stream = setup.device.compute_streams[1]
    with setup.device.computing_on(stream):
        handles = setup.forward(2)
    setup.join()
    with setup.device.computing_on(stream):
        assert setup.engine.acquire(handles[-1]).stream == stream
    assert all(handle.slot.buffer.stream == stream for handle in handles[:-1]), "prefetched, wherever that was launched"
    with setup.device.computing_on(stream):
        setup.backward(handles)
    setup.close()


def test_rule_6_a_source_is_held_until_its_copy_is_done_and_dropped_then() -> None:
    setup = Setup(IDLE)
    handles = setup.forward(1)
    assert states(handles) == [SlotState.D2H] * 2
    assert setup.device.allocated_bytes == 20
    setup.device.finish()
    setup.engine.poll()
    assert states(handles) == [SlotState.HOST] * 2
    assert setup.device.allocated_bytes == 0
    setup.backward(handles)
    setup.close()


def test_rule_6_a_full_window_makes_compute_wait_and_keeps_the_promise() -> None:
    setup = Setup(LAGGING_COPIES, window=25)
    handles = setup.forward(4)
    assert setup.engine.stats.num_window_waits > 0
    assert setup.engine.stats.peak_in_flight_bytes <= 25
    assert not setup.engine.stats.kept
    setup.backward(handles)
    setup.close()


def test_rule_6_with_keep_nothing_waits_and_new_residuals_stay() -> None:
    setup = Setup(IDLE, window=25, on_full="keep")
    handles = setup.forward(4)
    assert setup.engine.stats.num_window_waits == 0
    assert setup.engine.stats.kept == {"the link is behind": 6}
    assert states(handles) == [SlotState.D2H] * 2 + [SlotState.DEVICE] * 6
    setup.device.finish()
    more = setup.forward(1)
    assert states(more) == [SlotState.D2H] * 2, "the link has caught up"
    setup.backward(more)
    setup.backward(handles)
    setup.close()


def test_rule_6_a_storage_larger_than_the_window_goes_alone() -> None:
    setup = Setup(IDLE, window=5)
    handles = setup.forward(1, num_saved=1)
    assert states(handles) == [SlotState.D2H]
    setup.backward(handles)
    setup.close()


def test_rule_8_past_the_budget_a_storage_stays_and_is_counted() -> None:
    setup = Setup(budget=25)
    handles = setup.forward(2)
    assert setup.engine.stats.kept == {"no room in host": 2}
    assert setup.engine.stats.kept_bytes == 20
    assert setup.tier.used_bytes == 20
    setup.backward(handles)
    setup.close()


def test_rule_8_an_engine_without_tiers_keeps_everything() -> None:
    setup = Setup()
    setup.engine.tiers = []
    handles = setup.forward(1)
    assert setup.engine.stats.kept == {"no room in any tier": 2}
    setup.backward(handles)
    setup.close()


def loads_during(setup: Setup, handles: list[Handle], num_used: int) -> list[str]:
    with trace.recording() as record:
        for _ in range(num_used):
            setup.use(handles.pop())
    return [event.fields["label"] for event in record.events("swap.load")]


def test_rule_9_loads_come_in_the_reverse_of_the_forward_across_groups() -> None:
    setup = Setup(prefetch=4_000)
    handles = setup.forward(3)
    setup.join()
    assert loads_during(setup, handles, 1) == ["2.1", "2.0", "1.1", "1.0", "0.1", "0.0"]
    setup.backward(handles)
    setup.close()


def ask_in_order(setup: Setup, handles: list[Handle], order: str) -> list[str]:
    """Ask for the handles of one layer by their labels' last letters; the labels in the order in which their loads were launched."""
    with trace.recording() as record:
        for letter in order:
            setup.use(next(handle for handle in handles if str(handle.slot.label).endswith(letter)))
    return [event.fields["label"] for event in record.events("swap.load")]


def test_rule_9_loads_of_a_group_come_in_the_order_that_was_told() -> None:
    for told in itertools.permutations(range(4)):
        setup = Setup(prefetch=4_000)
        before = setup.forward(1)
        group = setup.engine.new_group("region")
        handles = [setup.save(group, 10, f"region.{index}") for index in range(4)]
        setup.engine.expect(group, [handles[index].slot for index in told])
        setup.join()
        with trace.recording() as record:
            setup.use(handles[told[0]])
        launched = [event.fields["label"] for event in record.events("swap.load")]
        assert launched == [*(f"region.{index}" for index in told), "0.1", "0.0"]
        handles.clear()
        before.clear()
        setup.close()


def test_rule_9_what_the_order_does_not_list_comes_after_it_in_reverse() -> None:
    setup = Setup(prefetch=4_000)
    group = setup.engine.new_group("region")
    handles = [setup.save(group, 10, letter) for letter in "abcde"]
    setup.engine.expect(group, [handles[1].slot, handles[2].slot, handles[1].slot])  # twice is once
    setup.join()
    assert ask_in_order(setup, handles, "bceda") == list("bceda")
    handles.clear()
    setup.close()


def test_rule_9_what_is_saved_after_the_order_was_told_comes_first_in_reverse() -> None:
    setup = Setup(prefetch=4_000)
    group = setup.engine.new_group("region")
    handles = [setup.save(group, 10, letter) for letter in "abc"]
    setup.engine.expect(group, [handles[0].slot])
    handles += [setup.save(group, 10, letter) for letter in "de"]
    setup.join()
    assert ask_in_order(setup, handles, "edacb") == list("edacb")
    handles.clear()
    setup.close()


def test_rule_9_an_empty_order_and_no_order_are_the_reverse_of_saving() -> None:
    for is_told in (False, True):
        setup = Setup(prefetch=4_000)
        group = setup.engine.new_group("region")
        handles = [setup.save(group, 10, letter) for letter in "abc"]
        if is_told:
            setup.engine.expect(group, [handles[0].slot, handles[1].slot])
            setup.engine.expect(group, [])  # the last word counts
        setup.join()
        assert ask_in_order(setup, handles, "cba") == list("cba")
        handles.clear()
        setup.close()


def test_rule_9_a_slot_of_another_group_comes_where_it_is_listed_and_dead_ones_do_not_disturb_the_order() -> None:
    setup = Setup(prefetch=4_000)
    others = setup.forward(1)
    group = setup.engine.new_group("region")
    handles = [setup.save(group, 10, letter) for letter in "abcd"]
    dying = [setup.save(group, 10, "dead before"), setup.save(group, 10, "dead after")]
    del dying[0]
    told = [handles[1].slot, others[0].slot, dying[0].slot, handles[2].slot]
    setup.engine.expect(group, told)
    dying.clear()
    told.clear()
    setup.join()
    assert ask_in_order(setup, handles, "bcda") == ["b", "0.0", *"cda", "0.1"]
    handles.clear()
    setup.backward(others)
    setup.close()


def test_rule_9_a_second_backward_keeps_the_order() -> None:
    setup = Setup(prefetch=4_000)
    group = setup.engine.new_group("region")
    handles = [setup.save(group, 10, letter) for letter in "abcd"]
    setup.engine.expect(group, [handles[0].slot, handles[1].slot])
    setup.join()
    assert ask_in_order(setup, handles, "abdc") == list("abdc")
    assert ask_in_order(setup, handles, "abdc") == list("abdc")
    assert setup.device.loaded_bytes == 2 * 40
    handles.clear()
    setup.close()


def test_rule_9_an_order_told_in_the_middle_of_backward_is_that_of_the_rest() -> None:
    setup = Setup(prefetch=20)  # a quarter of it: one of ten bytes beside what is asked for
    group = setup.engine.new_group("region")
    handles = [setup.save(group, 10, letter) for letter in "abcdef"]
    setup.join()
    assert ask_in_order(setup, handles, "f") == list("fe")
    setup.engine.limits.prefetch_bytes = 4_000
    setup.engine._depth_bytes = 4_000
    setup.engine.expect(group, [handles[1].slot, handles[0].slot, handles[5].slot])
    assert ask_in_order(setup, handles, "b") == list("badc"), "neither what was asked for nor what is loaded already"
    assert ask_in_order(setup, handles, "aedc") == []
    handles.clear()
    setup.close()


def test_rule_9_a_group_brought_back_by_hand_comes_in_the_order_that_was_told() -> None:
    setup = Setup(prefetch=1)
    group = setup.engine.new_group("region")
    handles = [setup.save(group, 10, letter) for letter in "abc"]
    setup.engine.expect(group, [handles[1].slot])
    setup.join()
    with trace.recording() as record:
        setup.engine.launch_group_load(group)
    assert [event.fields["label"] for event in record.events("swap.load")] == list("bca")
    handles.clear()
    setup.close()


def test_rule_10_the_tail_is_what_the_order_says_and_is_known_again_by_where_it_was_saved() -> None:
    setup = Setup(window=40)
    for step in range(2):
        group = setup.engine.new_group("region")
        handles = [setup.save(group, 10, letter) for letter in "abcd"]
        setup.engine.expect(group, [handles[0].slot, handles[1].slot])
        if step == 0:
            ask_in_order(setup, handles, "abdc")
            handles.clear()
    setup.join()
    assert states(handles) == [SlotState.DEVICE] * 2 + [SlotState.HOST] * 2
    assert setup.engine.stats.kept == {"needed first in backward": 2}
    handles.clear()
    setup.close()


def test_rule_9_the_depth_is_in_bytes() -> None:
    setup = Setup(prefetch=100)  # of which a quarter to begin with: two of ten bytes
    handles = setup.forward(6)
    setup.join()
    first = loads_during(setup, handles, 1)
    assert first[0] == "5.1"
    assert sum(handle.slot.num_bytes for handle in handles if handle.slot.state is SlotState.H2D) <= 37
    setup.backward(handles)
    setup.close()


def test_rule_9_a_slot_shared_by_a_later_call_does_not_turn_prefetch_to_the_earlier_one() -> None:
    setup = Setup(PROMPT, prefetch=160)  # two of ten bytes to begin with
    early = setup.engine.new_group("early")
    handles = [setup.save(early, 10, f"early {index}") for index in range(3)]
    middle = setup.engine.new_group("middle")
    handles.append(setup.save(middle, 10, "middle"))
    late = setup.engine.new_group("late")
    handles.append(setup.save(late, 10, "late"))
    shared = Handle(handles[0].slot, late)
    setup.join()
    with trace.recording() as record:
        setup.engine.acquire(shared)
    loads = [event.fields["label"] for event in record.events("swap.load")]
    assert loads[0] == "early 0"
    assert loads[1:] == ["late", "middle"], "what comes next in backward, not what was saved beside it"
    del shared
    setup.backward(handles)
    setup.close()


def late_loads(setup: Setup, num_kernels: int) -> None:
    """Five steps; backward of each group takes so many kernels, and then asks for all that the next needs at once."""
    for _ in range(5):
        handles = setup.forward(6)
        setup.device.finish()
        while handles:
            setup.device.kernel(reads=[setup.engine.acquire(handles.pop())], fn=lambda value: None)
            for _ in range(num_kernels if len(handles) % 2 else 0):
                setup.device.kernel()
        setup.device.finish()
        setup.engine.poll()  # how long compute stood still is known when it has passed
    assert setup.engine.stats.num_late_loads > 0


def test_rule_9_late_loads_deepen_the_prefetch_up_to_the_limit() -> None:
    setup = Setup(IDLE, prefetch=100)
    late_loads(setup, num_kernels=200)
    assert 100 // 8 < setup.engine.depth_bytes <= 100
    setup.engine.limits = Limits(1_000, 16)
    assert setup.engine.depth_bytes <= 16, "what was learned holds within new limits"
    setup.close()


def test_rule_9_where_the_link_never_pauses_more_prefetch_would_be_of_no_use() -> None:
    setup = Setup(IDLE, prefetch=100)
    late_loads(setup, num_kernels=0)
    assert setup.engine.depth_bytes == 100 // 8
    setup.close()


def test_rule_9_what_nothing_could_announce_does_not_deepen_the_prefetch() -> None:
    setup = Setup(IDLE, prefetch=100)
    for _ in range(5):
        handles = setup.forward(1, num_saved=1)
        setup.device.finish()
        setup.backward(handles)
    setup.engine.poll()
    assert setup.engine.stats.num_late_loads == 1, "then it is the tail"
    assert setup.engine.depth_bytes == 100 // 8
    setup.close()


def test_rule_9_what_was_loaded_on_time_is_not_late() -> None:
    setup = Setup(PROMPT, prefetch=4_000)
    handles = setup.forward(4)
    setup.join()
    setup.backward(handles)
    setup.join()
    assert setup.engine.stats.num_late_loads <= 1, "only the very first, which nothing could announce"
    setup.close()


def test_rule_10_the_tail_of_the_forward_stays_from_the_second_step_on() -> None:
    setup = Setup(window=40)
    setup.backward(setup.forward(4))
    handles = setup.forward(4)
    setup.join()
    assert states(handles) == [SlotState.HOST] * 6 + [SlotState.DEVICE] * 2, "the last layer's, half a window"
    assert setup.engine.stats.kept == {"needed first in backward": 2}
    moved = setup.device.loaded_bytes
    setup.use(handles.pop())
    setup.use(handles.pop())
    assert setup.device.loaded_bytes >= moved
    setup.backward(handles)
    setup.close()


def test_rule_10_several_forwards_alive_keep_one_tail_between_them() -> None:
    setup = Setup(window=40)
    setup.backward(setup.forward(4))
    alive = [setup.forward(4) for _ in range(3)]
    setup.join()
    kept = [handle.slot.num_bytes for handles in alive for handle in handles if handle.slot.state is SlotState.DEVICE]
    assert 0 < sum(kept) <= 20
    for handles in reversed(alive):
        setup.backward(handles)
    setup.close()


def test_rule_11_forwards_may_end_in_any_order() -> None:
    setup = Setup(window=15)
    first, second, third = setup.forward(2), setup.forward(2), setup.forward(2)
    for handles in (second, third, first):
        setup.backward(handles)
    setup.close()


def test_rule_12_a_second_backward_loads_again_and_prefetches_too() -> None:
    setup = Setup(prefetch=4_000)
    handles = setup.forward(3)
    setup.join()
    for handle in reversed(handles):
        setup.use(handle)
    assert states(handles) == [SlotState.HOST] * 6
    again = list(handles)
    assert loads_during(setup, again, 1) == ["2.1", "2.0", "1.1", "1.0", "0.1", "0.0"]
    for handle in reversed(handles[:-1]):
        setup.use(handle)
    assert setup.device.loaded_bytes == 2 * 60
    del handle
    again.clear()
    handles.clear()
    setup.close()


def test_handles_of_one_storage_share_one_load() -> None:
    setup = Setup()
    group = setup.engine.new_group("layer")
    first = setup.save(group, 10, "shared")
    handles = [first, Handle(first.slot), Handle(first.slot)]
    del first
    setup.join()
    for handle in handles:
        setup.use(handle)
    assert setup.device.loaded_bytes == 10
    assert handles[0].slot.state is SlotState.HOST, "every handle has asked: nothing is held"
    del handle
    handles.clear()
    setup.close()


def test_out_of_memory_gives_up_what_was_only_prefetched() -> None:
    setup = Setup(prefetch=4_000)
    handles = setup.forward(4)
    setup.join()
    setup.use(handles[-1])  # prefetches everything else
    assert all(handle.slot.state is SlotState.H2D for handle in handles[:-1])
    setup.device.capacity_bytes = setup.device.allocated_bytes
    setup.engine._launch_load(handles[-1].slot)
    assert handles[-1].slot.state is SlotState.H2D
    setup.device.capacity_bytes = 1 << 30
    setup.backward(handles)
    setup.close()


def test_out_of_memory_that_cannot_be_helped_reaches_the_user_and_leaves_the_slot_as_it_was() -> None:
    setup = Setup()
    handles = setup.forward(1, num_saved=1)
    setup.join()
    setup.device.capacity_bytes = 5
    with pytest.raises(MemoryError):
        setup.engine.acquire(handles[0])
    assert states(handles) == [SlotState.HOST]
    setup.device.capacity_bytes = 1 << 30
    setup.backward(handles)
    setup.close()


def test_the_disk_tier_shows_as_such_in_the_state() -> None:
    setup = Setup(tier_name="disk")
    handles = setup.forward(1)
    setup.join()
    assert states(handles) == [SlotState.DISK] * 2
    setup.backward(handles)
    setup.close()


# -- the turn: where forward ends and backward begins -------------------------------------------------------------------------


def test_when_backward_begins_the_sources_of_earlier_groups_leave_though_the_host_is_ahead() -> None:
    setup = Setup(IDLE)  # no copy runs before somebody waits for it
    handles = setup.forward(3, num_saved=1)
    assert setup.engine.in_flight_bytes == 30
    setup.engine.acquire(handles[-1])
    assert states(handles) == [SlotState.H2D, SlotState.H2D, SlotState.D2H], "the newest group stays as it is"
    assert [handle.slot.source is None for handle in handles] == [True, True, False]
    handles.clear()
    setup.close()


def test_a_group_that_swapped_nothing_begins_backward_and_the_loads_of_those_before_it() -> None:
    setup = Setup(PROMPT)
    handles = setup.forward(2, num_saved=1)
    last = setup.engine.new_group("saved only")
    setup.join()
    assert states(handles) == [SlotState.HOST, SlotState.HOST]
    setup.engine.arrive(last)
    assert states(handles) == [SlotState.H2D, SlotState.H2D]
    assert setup.engine._turn._tail == set(), "there is time to bring them back"
    setup.backward(handles)
    setup.close()


def test_what_the_last_group_holds_takes_the_place_of_sources_and_none_is_left_when_its_forward_ends() -> None:
    setup = Setup(IDLE)  # no copy runs before somebody waits for it
    seen = []
    for _ in range(3):
        handles = setup.forward(3, num_saved=1)
        last = setup.engine.new_group("saves itself")
        in_flight = [setup.engine.in_flight_bytes]
        for num_bytes in (965, 10, 10, 1):
            setup.engine.keep(last, num_bytes)
            in_flight.append(setup.engine.in_flight_bytes)
        setup.engine.end_forward(last)
        seen.append([*in_flight, setup.engine.in_flight_bytes])
        setup.engine.arrive(last)
        setup.backward(handles)
    assert seen[0] == [30] * 6, "which group is the last is learned from the first step"
    assert seen[1] == seen[2] == [30, 30, 20, 10, 10, 0], "never more than the window of 1,000 bytes together"
    setup.close()


def test_a_group_that_is_not_the_last_or_swaps_itself_makes_nobody_leave() -> None:
    setup = Setup(IDLE)
    for _ in range(2):
        handles = []
        for layer in range(3):
            group = setup.engine.new_group("one block, called again and again")
            handles.append(setup.save(group, 10, f"{layer}"))
            setup.engine.keep(group, 10_000)
            setup.engine.end_forward(group)
        assert all(handle.slot.source is not None for handle in handles)
        setup.backward(handles)
    setup.close()


def test_of_calls_of_one_block_only_the_last_makes_sources_leave() -> None:
    setup = Setup(IDLE)
    seen = []
    for _ in range(3):
        handles = setup.forward(2, num_saved=1)
        groups = []
        for _ in range(3):
            groups.append(setup.engine.new_group("one block, called again and again"))
            setup.engine.keep(groups[-1], 10_000)
            setup.engine.end_forward(groups[-1])
            seen.append(setup.engine.in_flight_bytes)
        setup.engine.arrive(groups[-1])
        setup.backward(handles)
    assert seen == [20, 20, 20, 20, 20, 0, 20, 20, 0]
    setup.close()


def test_a_group_that_says_that_it_is_the_last_is_believed_in_the_first_step() -> None:
    setup = Setup(IDLE)
    handles = setup.forward(2, num_saved=1)
    last = setup.engine.new_group("saves itself", ends_forward=True)
    setup.engine.keep(last, 10_000)
    assert setup.engine.in_flight_bytes == 0
    setup.engine.arrive(last)
    setup.backward(handles)
    setup.close()


def test_groups_in_which_backward_began_are_forgotten_when_they_are_many() -> None:
    setup = Setup(IDLE)
    for number in range(200):
        setup.engine.arrive(setup.engine.new_group(f"model {number}"))
    assert len(setup.engine._turn._last) == 64
    setup.close()


def test_what_the_next_group_needs_comes_early_where_it_fits_below_the_peak_of_this_one() -> None:
    setup = Setup(PROMPT, prefetch=8)  # a depth of one byte: one load at a time
    setup.device.counts_bytes = True
    handles = setup.forward(3, num_saved=2)
    setup.engine.expect(handles[2].slot.group, [handles[3].slot, handles[2].slot])
    setup.join()
    group = handles[-1].slot.group
    setup.use(handles.pop())
    working_set = setup.device.create(100, "working set")
    setup.use(handles.pop())
    assert states(handles) == [SlotState.HOST, SlotState.HOST, SlotState.HOST, SlotState.H2D]
    del working_set
    setup.engine.arrive(group)
    assert states(handles) == [SlotState.HOST, SlotState.HOST, SlotState.H2D, SlotState.H2D]
    setup.backward(handles)
    setup.close()


@pytest.mark.parametrize(("num_bytes", "comes_early"), [(150, True), (260, False)])
def test_what_the_next_group_begins_with_comes_early_below_the_peak_of_the_whole_backward_if_this_group_leaves_the_room(
    num_bytes: int, comes_early: bool
) -> None:
    setup = Setup(PROMPT, window=10, prefetch=8)  # a window without room for a tail
    setup.device.counts_bytes = True
    seen = []
    for _ in range(3):
        handles = setup.forward(3, num_saved=2)
        setup.engine.expect(handles[0].slot.group, [handles[0].slot, handles[1].slot])
        setup.join()
        highest = setup.device.create(250, "of the last group")
        setup.use(handles.pop())
        setup.use(handles.pop())
        del highest
        setup.use(handles.pop())
        seen.append(states(handles[:2]))
        working_set = setup.device.create(num_bytes, "of this group, after it was asked first")
        setup.use(handles.pop())
        del working_set
        setup.backward(handles)
    assert seen[0] == [SlotState.HOST] * 2, "nobody knows yet what this group will need"
    assert seen[1] == seen[2] == [SlotState.H2D if comes_early else SlotState.HOST] * 2
    setup.close()


def test_a_group_that_knows_its_own_need_loads_all_of_it_and_for_others_what_it_leaves() -> None:
    setup = Setup(PROMPT, window=10, prefetch=8)
    handles = []
    for layer, ahead_bytes in enumerate((0, 20, 10)):
        group = setup.engine.new_group(f"layer {layer}", ahead_bytes)
        handles += [setup.save(group, 10, f"{layer}.{index}") for index in range(3)]
    setup.join()
    setup.use(handles.pop())
    out, back = SlotState.HOST, SlotState.H2D
    assert states(handles) == [out] * 3 + [out, out, back] + [back] * 2
    for _ in range(2):
        setup.use(handles.pop())
    assert states(handles) == [out] * 3 + [out, out, back], "the room is that of the group that backward is in"
    setup.use(handles.pop())
    assert states(handles) == [out, back, back, back, back]
    setup.backward(handles)
    setup.close()


def test_a_group_that_knows_its_own_need_asks_for_memory_in_use_only_where_something_could_be_loaded() -> None:
    setup = Setup(PROMPT, window=10, prefetch=8)
    asked: list[int] = []
    setup.device.bytes_in_use = lambda: asked.append(0) or 0  # type: ignore[method-assign, func-returns-value]
    handles = []
    for layer in range(3):
        group = setup.engine.new_group(f"layer {layer}", 20)
        handles += [setup.save(group, 10, f"{layer}.{index}") for index in range(2)]
    setup.join()
    counts = []
    while handles:
        setup.use(handles.pop())
        counts.append(len(asked))
    assert counts == [0] * 6, "the next group is there already, and the one before it is too far"
    setup.close()


def test_what_a_group_asks_for_one_by_one_comes_early_below_the_peak_of_this_group_alone() -> None:
    setup = Setup(PROMPT, prefetch=8)
    setup.device.counts_bytes = True
    handles = setup.forward(3, num_saved=4)
    setup.join()
    before = handles[4].slot.group
    setup.use(handles.pop())
    working_set = setup.device.create(100, "working set")
    for _ in range(3):
        setup.use(handles.pop())
    del working_set
    for _ in range(4):
        setup.use(handles.pop())
    setup.engine.arrive(before)
    assert states(handles).count(SlotState.H2D) <= 2, (
        "what was in use in the last group's backward is no reason in this one's"
    )
    working_set = setup.device.create(100, "working set")
    setup.engine.arrive(before)
    del working_set
    setup.engine.arrive(before)
    assert states(handles) == [SlotState.H2D] * 4
    setup.backward(handles)
    setup.close()


# -- how much of the window is used ---------------------------------------------------------------------------------------------


def forwards(setup: Setup, num_kernels: int) -> None:
    """Five steps of groups that save 40 bytes in a burst (1 ms each) and then compute."""
    for _ in range(5):
        handles = []
        for layer in range(4):
            group = setup.engine.new_group(f"layer {layer}")
            handles += [setup.save(group, 10, f"{layer}.{index}") for index in range(4)]
            for _ in range(num_kernels):
                setup.device.kernel()
        setup.device.finish()
        setup.backward(handles)


def test_bursts_that_compute_waits_for_make_the_window_larger_up_to_its_limit() -> None:
    setup = Setup(IDLE, window=40, first_window_bytes=20)
    forwards(setup, num_kernels=100)
    assert setup.engine.room_bytes == 40
    assert setup.engine.stats.peak_in_flight_bytes <= 40
    setup.close()


def test_where_the_link_is_behind_all_the_time_a_larger_window_would_be_of_no_use() -> None:
    setup = Setup(IDLE, window=40, first_window_bytes=20)
    forwards(setup, num_kernels=0)
    assert setup.engine.room_bytes == 20
    assert setup.engine.stats.num_window_waits > 0
    setup.close()
