"""The simulated device finds what it is built to find, and nothing else.

`ORDERS` has one small program per order of `core/swap/README.md`, written directly against the device. Each is run with the order and
without it: with it no schedule races and every value is right; without it every schedule is reported as a race, and some give wrong values.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hyper_parallel.core.swap import device as protocols
from support.simulated_device import ENGINE_CALLS, SimulatedBuffer, SimulatedDevice
from support.simulated_memory import POISON, TORN, UNINITIALIZED, Garbage, RaceError, RangeMap
from support.simulated_stream import (
    IDLE,
    LAGGING_COMPUTE,
    LAGGING_COPIES,
    PROMPT,
    DeadlockError,
    SimulatedEvent,
    SimulatedMoment,
    SimulatedStream,
)
from support.simulated_tier import SimulatedBlock, SimulatedTier

SEEDS = range(60)


# The orders, one program each. A program returns what kernels saw and what they should have seen.

Seen = list[Any]
Program = Callable[[SimulatedDevice, SimulatedTier, bool], tuple[Seen, Seen]]


def last_use(block: SimulatedBlock) -> SimulatedEvent:
    """The event of the copy that was launched last."""
    return block.last_uses[-1]


def wait_last_uses(stream: SimulatedStream, block: SimulatedBlock) -> None:
    for event in block.last_uses:
        stream.wait_event(event)


def offload(device: SimulatedDevice, tier: SimulatedTier, source: SimulatedBuffer, but: str = "") -> SimulatedBlock:
    """Offload as the README says, `but` for one order."""
    block, stream = tier.take(source.num_bytes), device.offload_stream()
    if but != "O1":
        stream.wait_event(device.current_stream().record_event())
    if but != "O3":
        wait_last_uses(stream, block)
    device.launch_offload(block, source, stream)
    block.last_uses = (stream.record_event(),)
    return block


def load(device: SimulatedDevice, block: SimulatedBlock, but: str = "") -> SimulatedBuffer:
    """Launch the load of a block; its event is `last_use(block)`."""
    current, stream = device.current_stream(), device.load_stream()
    buffer = device.allocate(block.num_bytes, current)
    if but != "O5":
        stream.wait_event(current.record_event())
    if but != "O4":
        wait_last_uses(stream, block)
    device.launch_load(buffer, block, stream)
    block.last_uses = (stream.record_event(),)
    return buffer


def the_offload_reads_what_the_kernel_wrote(device, tier, keep):
    a = device.create(64, 1, "a")
    device.kernel(reads=[a], writes=[a], fn=lambda value: value + 1, name="increment")
    block = offload(device, tier, a, but="" if keep else "O1")
    device.finish()
    return [device.read(block)], [2]


def the_source_is_reused_after_the_offload_read_it(device, tier, keep):
    a = device.create(64, 1, "a")
    block = offload(device, tier, a)
    if keep:
        device.current_stream().wait_event(last_use(block))
    del a
    b = device.create(64, 2, "b")
    device.finish()
    return [device.read(block), device.read(b)], [1, 2]


def the_block_is_written_again_after_the_load_read_it(device, tier, keep):
    first = offload(device, tier, device.create(64, 1, "a"))
    device.current_stream().wait_event(last_use(first))
    buffer = load(device, first)
    loaded = last_use(first)
    source = device.create(64, 2, "b")
    tier.give(first)  # its slot died while the load was going on
    second = offload(device, tier, source, but="" if keep else "O3")
    device.current_stream().wait_event(loaded)
    device.finish()
    return [device.read(buffer), device.read(second)], [1, 2]


def the_load_reads_what_the_offload_wrote(device, tier, keep):
    a = device.create(64, 1, "a")
    buffer = load(device, offload(device, tier, a), but="" if keep else "O4")
    device.finish()
    return [device.read(buffer)], [1]


def the_load_writes_after_earlier_users_of_the_memory(device, tier, keep):
    block = offload(device, tier, device.create(64, 1, "a"))
    last_use(block).join()
    scratch, seen = device.create(64, 2, "scratch"), []
    device.kernel(reads=[scratch], fn=seen.append, name="use scratch")
    del scratch
    buffer = load(device, block, but="" if keep else "O5")
    device.finish()
    return [device.read(buffer), *seen], [1, 2]


def a_kernel_reads_after_the_load_wrote(device, tier, keep):
    block = offload(device, tier, device.create(64, 1, "a"))
    device.current_stream().wait_event(last_use(block))
    buffer, seen = load(device, block), []
    if keep:
        device.current_stream().wait_event(last_use(block))
    device.kernel(reads=[buffer], fn=seen.append, name="use")
    device.finish()
    return seen, [1]


def the_buffer_is_reused_after_the_load_wrote_it(device, tier, keep):
    block = offload(device, tier, device.create(64, 1, "a"))
    device.current_stream().wait_event(last_use(block))
    buffer = load(device, block)  # nobody ever asks for it
    if keep:
        last_use(block).join()
    del buffer
    b, seen = device.create(64, 2, "b"), []
    device.kernel(reads=[b], fn=seen.append, name="use b")
    device.finish()
    return seen, [2]


def a_buffer_is_used_on_its_own_stream(device, tier, keep):
    block = offload(device, tier, device.create(64, 1, "a"))
    device.current_stream().wait_event(last_use(block))
    user, seen = device.compute_streams[1], []
    if keep:
        with device.computing_on(user):
            buffer = load(device, block)
    else:
        buffer = load(device, block)
    with device.computing_on(user):
        user.wait_event(last_use(block))
        device.kernel(reads=[buffer], fn=seen.append, name="use")
    del buffer
    b = device.create(64, 2, "b")
    device.finish()
    return [*seen, device.read(b)], [1, 2]


def a_freed_block_is_written_again_after_the_offload_wrote_it(device, tier, keep):
    # With one offload stream its own order does this; a second stream shows what `last_uses` is for.
    first = offload(device, tier, device.create(64, 1, "a"))
    device.current_stream().wait_event(last_use(first))
    tier.give(first)
    other = device.compute_streams[1]
    with device.computing_on(other):
        b = device.create(64, 2, "b")
        second = tier.take(64)
        if keep:
            wait_last_uses(other, second)
        device.launch_offload(second, b, other)
    device.finish()
    return [device.read(second)], [2]


ORDERS: dict[str, Program] = {
    "O1": the_offload_reads_what_the_kernel_wrote,
    "O2": the_source_is_reused_after_the_offload_read_it,
    "O3": the_block_is_written_again_after_the_load_read_it,
    "O4": the_load_reads_what_the_offload_wrote,
    "O5": the_load_writes_after_earlier_users_of_the_memory,
    "O6": a_kernel_reads_after_the_load_wrote,
    "O7": the_buffer_is_reused_after_the_load_wrote_it,
    "O8": a_buffer_is_used_on_its_own_stream,
    "O9": a_freed_block_is_written_again_after_the_offload_wrote_it,
}
every_order = pytest.mark.parametrize("order", ORDERS)


@every_order
@pytest.mark.parametrize("poison", [True, False], ids=["poison", "no poison"])
def test_a_kept_order_races_in_no_schedule_and_every_value_is_right(order, poison):
    for seed in SEEDS:
        device = SimulatedDevice(seed, poison_on_reuse=poison)
        seen, expected = ORDERS[order](device, SimulatedTier(device), True)
        assert (device.races, seen) == ([], expected), f"seed {seed}"


@every_order
@pytest.mark.parametrize("poison", [True, False], ids=["poison", "no poison"])
def test_a_missing_order_is_a_race_in_every_schedule(order, poison):
    for seed in SEEDS:
        device = SimulatedDevice(seed, poison_on_reuse=poison)
        with pytest.raises(RaceError):
            ORDERS[order](device, SimulatedTier(device), False)


@every_order
def test_a_missing_order_gives_wrong_values_in_some_schedules_only(order):
    outcomes = set()
    for seed in range(300):
        device = SimulatedDevice(seed, raise_races=False)
        seen, expected = ORDERS[order](device, SimulatedTier(device), False)
        assert device.races, f"seed {seed}"
        outcomes.add(seen == expected)
    assert outcomes == {True, False}


def test_a_race_names_both_operations_their_streams_the_addresses_and_the_owners():
    device = SimulatedDevice()
    tier = SimulatedTier(device)
    a = device.create(64, 1, "a")
    with pytest.raises(RaceError) as caught:
        offload(device, tier, a, but="O1")
    message = str(caught.value)
    for part in ("'offload of a' (operation 1 of offload) reads a at device [0x0, 0x40)", "'create a'", "compute0"):
        assert part in message
    assert (caught.value.earlier.stream, caught.value.later.stream) == ("compute0", "offload")


def test_a_race_that_somebody_swallowed_still_fails_the_check_for_cleanliness():
    device = SimulatedDevice()
    a = device.create(64, 1, "a")
    with contextlib.suppress(Exception):
        offload(device, SimulatedTier(device), a, but="O1")
    with pytest.raises(AssertionError, match="Race"):
        device.check_clean()


def test_a_race_with_a_freed_buffer_is_found_in_each_part_of_its_memory():
    device = SimulatedDevice(raise_races=False)
    offload(device, SimulatedTier(device), device.create(64, 1, "a"))
    parts = [device.allocate(32, device.current_stream()) for _ in range(2)]
    assert [part.range.start for part in parts] == [0, 32]
    assert len(device.races) == 2


def test_a_racing_launch_enqueues_nothing():
    device = SimulatedDevice()
    a = device.create(64, 1, "a")
    with pytest.raises(RaceError):
        offload(device, SimulatedTier(device), a, but="O1")
    device.finish()
    assert [operation.name for operation in device.trace] == ["create a"]
    assert device.offloaded_bytes == 0


# Streams and events.


def test_a_stream_runs_its_operations_in_order_under_every_seed():
    for seed in SEEDS:
        device = SimulatedDevice(seed)
        for n in range(20):
            with device.computing_on(device.compute_streams[n % 2]):
                device.kernel(name=str(n))
        device.finish()
        for stream in device.compute_streams:
            names = [int(operation.name) for operation in device.trace if operation.stream == stream.name]
            assert names == sorted(names)
            assert len(names) == 10


def test_two_streams_without_events_run_in_either_order():
    first = set()
    for seed in SEEDS:
        device = SimulatedDevice(seed)
        for stream in device.compute_streams:
            with device.computing_on(stream):
                device.kernel(name="k")
        device.finish()
        first.add(device.trace[0].stream)
    assert first == {"compute0", "compute1"}


def test_what_waits_for_an_event_runs_after_what_came_before_the_event():
    for seed in SEEDS:
        device = SimulatedDevice(seed)
        device.kernel(name="before")
        device.compute_streams[1].wait_event(device.current_stream().record_event())
        with device.computing_on(device.compute_streams[1]):
            device.kernel(name="after")
        device.finish()
        assert [operation.name for operation in device.trace] == ["before", "after"]


def test_an_event_is_done_exactly_when_the_operations_before_it_have_run():
    for seed in SEEDS:
        device = SimulatedDevice(seed)
        device.kernel(name="before")
        event = device.current_stream().record_event()
        device.kernel(name="after")
        is_done = event.query()
        assert is_done == any(operation.name == "before" for operation in device.trace)
        event.join()
        assert event.query()


def test_an_event_of_an_idle_stream_is_done():
    assert SimulatedDevice(profile=IDLE).load_stream().record_event().query()


def test_what_the_host_has_seen_done_comes_before_what_it_enqueues_then():
    device = SimulatedDevice(profile=PROMPT)
    tier = SimulatedTier(device)
    a = device.create(64, 1, "a")
    assert device.current_stream().record_event().query()
    offload(device, tier, a, but="O1")
    assert device.races == []


def test_a_query_that_says_not_yet_orders_nothing():
    device = SimulatedDevice(profile=IDLE)
    a = device.create(64, 1, "a")
    assert not device.current_stream().record_event().query()
    with pytest.raises(RaceError):
        offload(device, SimulatedTier(device), a, but="O1")


def test_the_host_may_read_only_what_it_has_seen_written():
    device = SimulatedDevice(profile=PROMPT)
    a = device.create(64, 1, "a")
    with pytest.raises(RaceError, match="the host reads a"):
        device.read(a)
    device.current_stream().record_event().join()
    assert device.read(a) == 1


def test_streams_lag_as_the_profile_says():
    for profile, ran in ((LAGGING_COPIES, ["create a"]), (LAGGING_COMPUTE, []), (PROMPT, ["create a", "offload of a"])):
        device = SimulatedDevice(profile=profile)
        a = device.create(64, 1, "a")
        offload(device, SimulatedTier(device), a)
        device.current_stream()
        assert [operation.name for operation in device.trace] == ran


def test_waiting_for_a_stream_that_never_runs_is_a_deadlock_that_names_who_waits_for_whom():
    device = SimulatedDevice()
    device.stall(device.offload_stream())
    block = offload(device, SimulatedTier(device), device.create(64, 1, "a"))
    device.load_stream().wait_event(last_use(block))
    after = device.load_stream().record_event()
    with pytest.raises(DeadlockError, match="load waits for <event at .* of offload"):
        after.join()
    with pytest.raises(DeadlockError, match="offload is stalled"):
        device.finish()


def test_an_event_of_another_device_is_refused():
    event = SimulatedDevice().current_stream().record_event()
    with pytest.raises(ValueError, match="another device"):
        SimulatedDevice().current_stream().wait_event(event)


def test_a_stream_asked_for_twice_is_equal_but_not_the_same_object():
    device = SimulatedDevice()
    assert device.current_stream() == device.current_stream() == device.compute_streams[0]
    assert device.current_stream() is not device.current_stream()
    assert len({device.current_stream(), device.current_stream(), device.load_stream()}) == 2


def test_each_host_thread_has_a_current_stream_of_its_own():
    device = SimulatedDevice()
    main, side = device.compute_streams
    found = []
    with device.computing_on(side):
        thread = threading.Thread(target=lambda: found.append(device.current_stream()))
        thread.start()
        thread.join()
        with device.host_thread("backward"):
            found.append(device.current_stream())
        assert device.current_stream() == side
    assert [*found, device.current_stream()] == [main, main, main]


def test_one_seed_gives_one_run_and_other_seeds_give_others():
    def run(seed):
        device = SimulatedDevice(seed)
        random_program(device, SimulatedTier(device), random.Random(5))
        return tuple((operation.name, operation.stream, operation.tick) for operation in device.trace)

    assert run(1) == run(1)
    assert len({run(seed) for seed in range(20)}) == 20


def test_with_compute_in_the_host_kernels_run_when_called_and_waits_block():
    device = SimulatedDevice(profile=IDLE, compute_in_host=True)
    a = device.create(64, 1, "a")
    assert device.read(a) == 1
    block = offload(device, SimulatedTier(device), a)
    assert not last_use(block).query()
    device.current_stream().wait_event(last_use(block))
    assert last_use(block).query()
    assert device.read(block) == 1


# Memory.


def test_memory_is_counted_to_the_byte_and_returned_with_the_last_reference():
    device = SimulatedDevice()
    a, b = device.create(3, 1, "a"), device.create(1000, 2, "b")
    alias = a
    assert (device.allocated_bytes, sorted(device.live_buffers())) == (1003, ["a", "b"])
    del a
    assert device.allocated_bytes == 1003
    del alias
    assert (device.allocated_bytes, device.live_buffers()) == (1000, ["b"])
    del b
    assert (device.allocated_bytes, device.peak_bytes) == (0, 1003)
    device.check_clean()


def test_an_empty_buffer_is_a_buffer():
    device = SimulatedDevice()
    tier = SimulatedTier(device)
    a = device.create(0, 1, "a")
    block = offload(device, tier, a)
    buffer = load(device, block)
    device.finish()
    assert (device.read(buffer), device.allocated_bytes, tier.used_bytes, device.offloaded_bytes) == (1, 0, 0, 0)


def test_work_in_flight_keeps_no_memory_alive():
    device = SimulatedDevice(profile=IDLE)
    block = offload(device, SimulatedTier(device), device.create(64, 1, "a"))
    assert device.allocated_bytes == 0
    assert not last_use(block).query()


def test_an_allocation_past_the_capacity_fails_and_one_up_to_it_does_not():
    device = SimulatedDevice(capacity_bytes=100)
    a = device.create(60, 1, "a")
    with pytest.raises(MemoryError, match=r"41 bytes asked for; 60 of 100 are held by \['a'\]"):
        device.allocate(41, device.current_stream())
    b = device.allocate(40, device.current_stream())
    del a
    c = device.allocate(60, device.current_stream())
    assert device.allocated_bytes == b.num_bytes + c.num_bytes == 100


def test_freed_memory_goes_to_the_next_allocation_of_its_stream_and_to_no_other_stream():
    device = SimulatedDevice()
    main, side = device.compute_streams
    a = device.allocate(64, main)
    addresses = a.range[:2]
    del a
    elsewhere = device.allocate(64, side)
    again = device.allocate(64, main)
    assert again.range[:2] == addresses
    assert elsewhere.range[:2] != addresses


def test_the_memory_freed_last_is_reused_first():
    device = SimulatedDevice()
    buffers = [device.allocate(64, device.current_stream()) for _ in range(3)]
    addresses = [buffer.range.start for buffer in buffers]
    del buffers[1]
    del buffers[0]
    assert device.allocate(64, device.current_stream()).range.start == addresses[0]


def test_a_smaller_allocation_takes_the_head_of_the_smallest_larger_piece():
    device = SimulatedDevice()
    stream = device.current_stream()
    large, small = device.allocate(100, stream), device.allocate(50, stream)
    start = small.range.start
    del large, small
    parts = [device.allocate(size, stream) for size in (20, 30)]
    assert [part.range.start for part in parts] == [start, start + 20]


def test_reused_memory_holds_poison_and_fresh_memory_nothing():
    for poison, left in ((True, POISON), (False, 1)):
        device = SimulatedDevice(poison_on_reuse=poison)
        fresh = device.allocate(32, device.current_stream())
        a = device.create(64, 1, "a")
        del a
        reused = device.allocate(64, device.current_stream())
        device.finish()
        assert (device.read(fresh), device.read(reused)) == (UNINITIALIZED, left)


def test_a_kernel_that_reads_garbage_writes_garbage():
    device = SimulatedDevice()
    fresh, result = (device.allocate(64, device.current_stream()) for _ in range(2))
    device.kernel(reads=[fresh], writes=[result], fn=lambda value: value + 1)
    device.finish()
    assert device.read(result) is UNINITIALIZED


def test_part_of_a_value_is_torn():
    device = SimulatedDevice(poison_on_reuse=False)
    a = device.create(64, 1, "a")
    del a
    half = device.allocate(32, device.current_stream())
    device.finish()
    assert device.read(half) is TORN


def test_kernels_without_a_function_give_a_number_that_depends_on_what_they_read():
    device = SimulatedDevice()
    a, b, out = (device.create(8, value) for value in (1, 2, 0))
    results = []
    for inputs in ([a, b], [a, a], [a, b]):
        device.kernel(reads=inputs, writes=[out], name="mix")
        device.finish()
        results.append(device.read(out))
    assert results[0] == results[2] != results[1]
    assert out.version == 3


def test_the_range_map_agrees_with_one_value_per_address():
    for seed in range(200):
        rng = random.Random(seed)
        ranges, plain = RangeMap(default=lambda: None, part=lambda value: value), [None] * 40
        for n in range(30):
            start, end = sorted(rng.sample(range(41), 2))
            if rng.random() < 0.5:
                ranges.put(start, end, n)
                plain[start:end] = [n] * (end - start)
            tiles = ranges.pieces(start, end)
            assert [tile.start for tile in tiles] == [start, *(tile.end for tile in tiles[:-1])]
            assert tiles[-1].end == end
            assert [tile.value for tile in tiles for _ in range(tile.start, tile.end)] == plain[start:end], (
                f"seed {seed}"
            )


# The tier.


def test_a_block_given_back_is_taken_again_first_and_carries_its_last_uses():
    device = SimulatedDevice()
    tier = SimulatedTier(device)
    first, second = tier.take(64), tier.take(64)
    first.last_uses = (device.load_stream().record_event(),)
    tier.give(second)
    tier.give(first)
    again = tier.take(64)
    assert again is not first
    assert (again.range[:2], again.last_uses) == (first.range[:2], first.last_uses)


def test_a_tier_counts_used_and_reserved_bytes_and_stays_within_its_budget():
    tier = SimulatedTier(SimulatedDevice(), budget_bytes=100)
    first = tier.take(60)
    assert tier.take(41) is None
    tier.give(first)
    assert (tier.used_bytes, tier.reserved_bytes) == (0, 60)
    second = tier.take(100)
    assert (second.num_bytes, tier.used_bytes, tier.reserved_bytes) == (100, 100, 100)


def test_a_tier_that_is_not_exact_reserves_powers_of_two():
    tier = SimulatedTier(SimulatedDevice(), "disk", exact=False)
    block = tier.take(65)
    assert (tier.name, block.num_bytes, tier.used_bytes, tier.reserved_bytes) == ("disk", 65, 65, 128)


def test_a_block_is_not_given_twice_nor_used_after_it_was_given():
    device = SimulatedDevice()
    tier = SimulatedTier(device)
    a, block = device.create(64, 1, "a"), tier.take(64)
    tier.give(block)
    with pytest.raises(ValueError, match="given back twice"):
        tier.give(block)
    with pytest.raises(ValueError, match="given back"):
        device.launch_offload(block, a, device.offload_stream())


def test_a_copy_between_different_sizes_is_refused():
    device = SimulatedDevice()
    with pytest.raises(ValueError, match="64 bytes .* and 65"):
        device.launch_offload(SimulatedTier(device).take(65), device.create(64, 1), device.offload_stream())


def test_giving_a_block_does_not_wait_for_the_device():
    device = SimulatedDevice()
    tier = SimulatedTier(device)
    block = tier.take(64)
    with device._lock:  # another thread is in the middle of a call
        thread = threading.Thread(target=tier.give, args=(block,))
        thread.start()
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert tier.used_bytes == 0


def test_the_check_for_cleanliness_names_live_buffers_and_blocks():
    device = SimulatedDevice(seed=3)
    tier = SimulatedTier(device)
    a = device.create(64, 1, "a")
    block = offload(device, tier, a)
    with pytest.raises(AssertionError, match=r"seed 3.*\n.*live buffer: a\n.*live block: block 1 at host"):
        device.check_clean()
    del a
    tier.give(block)
    device.check_clean()


# Injected failures.


def test_each_call_of_the_engine_can_be_made_to_fail_and_then_does_nothing():
    def step(device, tier):
        a = device.create(64, 1, "a")
        block = offload(device, tier, a)
        buffer = load(device, block)
        last_use(block).query()
        last_use(block).join()
        begin = device.current_stream().record_time()
        assert begin.query()
        assert begin.ms_since(begin) == 0
        del a, buffer
        tier.give(block)

    clean = SimulatedDevice()
    step(clean, SimulatedTier(clean))
    failed = set()
    for n in range(1, clean.num_engine_calls + 1):
        device = SimulatedDevice()
        tier = SimulatedTier(device)
        device.fail_call(n, OSError("injected"))
        with pytest.raises((OSError, AttributeError)):  # AttributeError: `step` does not look at what `take` gives
            step(device, tier)
        assert len(device.failed_calls) == 1
        failed.update(device.failed_calls)
        device.finish()
        assert device.offloaded_bytes == 64 * (
            device.calls["launch_offload"] - ("launch_offload" in device.failed_calls)
        )
        assert device.loaded_bytes == 64 * (device.calls["launch_load"] - ("launch_load" in device.failed_calls))
    assert failed == ENGINE_CALLS


def test_the_nth_allocation_fails_once_and_takes_no_memory():
    device = SimulatedDevice()
    device.fail_allocation(2)
    kept = [device.create(8, 1)]
    with pytest.raises(MemoryError, match="allocation 2"):
        device.create(8, 2)
    kept.append(device.allocate(8, device.current_stream()))
    assert device.allocated_bytes == 16


def test_the_nth_call_of_one_kind_fails():
    device = SimulatedDevice()
    device.fail_call(2, RuntimeError, of={"record_event"})
    stream = device.current_stream()
    stream.record_event()
    device.load_stream()
    with pytest.raises(RuntimeError):
        stream.record_event()
    stream.record_event()
    assert device.failed_calls == ["record_event"]


def test_the_nth_take_gives_none():
    device = SimulatedDevice()
    tier = SimulatedTier(device)
    tier.fail_take(2)
    assert [tier.take(8) is None for _ in range(3)] == [False, True, False]
    device.fail_call(1, OSError, of={"take"})
    assert tier.take(8) is None


def test_a_failed_copy_is_done_with_an_error_that_waiting_raises_and_a_load_of_it_fails_too():
    device = SimulatedDevice(compute_in_host=True, profile=IDLE)
    device.fail_copy(1, OSError("disk full"))
    a = device.create(64, 1, "a")
    block = offload(device, SimulatedTier(device), a)
    assert (last_use(block).query(), last_use(block).error) == (False, None)
    with pytest.raises(OSError, match="disk full"):
        device.current_stream().wait_event(last_use(block))
    assert last_use(block).query()
    buffer = load(device, block)
    with pytest.raises(OSError, match="disk full"):
        last_use(block).join()
    again = offload(device, SimulatedTier(device), a)
    last_use(again).join()
    assert (device.read(again), isinstance(device.read(buffer), Garbage), device.races) == (1, True, [])
    assert (device.offloaded_bytes, device.loaded_bytes) == (64, 0)


def test_copies_of_a_device_with_streams_of_its_own_cannot_be_made_to_fail_by_halves():
    with pytest.raises(ValueError, match="compute_in_host"):
        SimulatedDevice().fail_copy(1, OSError("disk full"))


# The whole.


def test_the_simulated_device_has_the_calls_that_the_engine_expects():
    classes = {
        protocols.SwapDevice: SimulatedDevice,
        protocols.Stream: SimulatedStream,
        protocols.Event: SimulatedEvent,
        protocols.Moment: SimulatedMoment,
        protocols.Tier: SimulatedTier,
    }
    for protocol, simulated in classes.items():
        for name, member in vars(protocol).items():
            if name.startswith("_"):
                continue
            found = inspect.getattr_static(simulated, name)
            assert isinstance(found, property) == isinstance(member, property), name
            if callable(member):
                assert list(inspect.signature(found).parameters) == list(inspect.signature(member).parameters), name
    assert {"num_bytes", "last_uses"} <= set(protocols.HostBlock.__annotations__)
    for protocol, simulated in ((protocols.HostBlock, SimulatedBlock), (protocols.Event, SimulatedEvent)):
        assert all(hasattr(simulated, name) for name in protocol.__annotations__)


# Virtual time.


@pytest.mark.parametrize("profile", [IDLE, PROMPT, None], ids=["idle", "prompt", "by the seed"])
@pytest.mark.parametrize("compute_in_host", [False, True])
def test_virtual_time_is_that_of_the_work_and_not_of_the_schedule(profile: Any, compute_in_host: bool):
    for seed in range(20):
        device = SimulatedDevice(
            seed, profile=profile, compute_in_host=compute_in_host, kernel_ms=2, copy_ms_per_byte=0.5
        )
        tier = SimulatedTier(device)
        compute = device.current_stream()
        begin = compute.record_time()
        a = device.create(10, 1)
        made = compute.record_time()
        block = offload(device, tier, a)
        device.kernel(reads=[a])
        before = compute.record_time()
        compute.wait_event(last_use(block))
        after = compute.record_time()
        device.finish()
        assert made.ms_since(begin) == 2
        assert before.ms_since(made) == 2
        assert after.ms_since(before) == 3, "the copy began with the second kernel and takes five"


def test_a_moment_is_reached_with_its_stream_and_teaches_the_host_no_order():
    device = SimulatedDevice(profile=IDLE)
    a = device.create(8, 1, "a")
    moment = device.current_stream().record_time()
    assert not moment.query()
    device.compute_streams[0].lane.step()
    assert moment.query()
    with pytest.raises(RaceError):
        device.read(a)


def random_program(device: SimulatedDevice, tier: SimulatedTier, rng: random.Random, num_steps: int = 12) -> None:
    """Offloads and loads that keep every order, with memory reused at once, slots that die early, and two compute streams."""
    blocks: list[tuple[SimulatedBlock, int]] = []
    in_flight: list[tuple[SimulatedEvent, SimulatedBuffer]] = []  # O2 and O7: held until done
    seen, expected = [], []
    for n in range(num_steps):
        with device.computing_on(rng.choice(device.compute_streams)):
            if rng.random() < 0.6 or not blocks:
                source = device.create(rng.choice([32, 64, 96]), n)
                device.kernel(reads=[source], writes=[source], fn=lambda value: value * 10, name=f"produce {n}")
                block = offload(device, tier, source)
                if rng.random() < 0.5:
                    device.current_stream().wait_event(last_use(block))
                else:
                    in_flight.append((last_use(block), source))
                blocks.append((block, n * 10))
            else:
                block, value = blocks.pop(rng.randrange(len(blocks)))
                if rng.random() < 0.8:
                    buffer = load(device, block)
                    if rng.random() < 0.3:
                        in_flight.append((last_use(block), buffer))
                    else:
                        device.current_stream().wait_event(last_use(block))
                        device.kernel(reads=[buffer], fn=seen.append, name=f"use {n}")
                        expected.append(value)
                    del buffer
                tier.give(block)
            in_flight = [(event, memory) for event, memory in in_flight if not event.query()]
            scratch = device.create(rng.choice([32, 64, 96]), "scratch")
            del scratch
    device.finish()
    in_flight.clear()
    source = None
    for block, _ in blocks:
        tier.give(block)
    assert sorted(map(str, seen)) == sorted(map(str, expected))
    assert not any(isinstance(value, Garbage) for value in seen)


@pytest.mark.parametrize("exact", [True, False], ids=["exact blocks", "rounded blocks"])
def test_programs_that_keep_every_order_are_clean_under_many_seeds(exact):
    for seed in range(300):
        device = SimulatedDevice(seed, compute_in_host=seed % 10 == 0)
        tier = SimulatedTier(device, exact=exact)
        random_program(device, tier, random.Random(seed))
        device.check_clean()


def test_threads_that_share_a_device_lose_no_byte():
    device = SimulatedDevice(num_compute_streams=4)
    tier = SimulatedTier(device)
    errors = []

    def work(index):
        try:
            with device.computing_on(device.compute_streams[index]):
                for n in range(30):
                    source = device.create(64, n)
                    block = offload(device, tier, source)
                    device.current_stream().wait_event(last_use(block))
                    del source
                    buffer = load(device, block)
                    device.current_stream().wait_event(last_use(block))
                    device.kernel(reads=[buffer], writes=[buffer])
                    del buffer
                    tier.give(block)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    device.check_clean()
