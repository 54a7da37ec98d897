"""How long compute stood still: exact numbers in the virtual time of the simulated device, and on a CPU the host's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.core.swap.disk import DiskTier
from hyper_parallel.core.swap.disk_stream import DiskEvent, DiskStream, HostComputeStream
from hyper_parallel.core.swap.engine import Limits, SwapEngine
from hyper_parallel.core.swap.slot import Handle
from hyper_parallel.core.swap.staged import StagedStream
from hyper_parallel.core.swap.stats import StallTimes, SwapStats
from support.simulated_device import TIME_CALLS, SimulatedDevice
from support.simulated_stream import IDLE, PROMPT
from support.simulated_tier import SimulatedTier


class Setup:
    """Kernels take 1 ms, copies 1 ms per byte, and nothing runs before the host waits for it, unless the profile says so."""

    def __init__(self, profile: Any = IDLE, window: int = 1_000, prefetch: int = 1_000) -> None:
        self.device = SimulatedDevice(profile=profile)
        self.engine = SwapEngine(self.device, [SimulatedTier(self.device)], Limits(window, prefetch))

    def save(self, group: Any, num_bytes: int = 10) -> Handle:
        buffer = self.device.create(num_bytes, "value")
        return Handle(self.engine.save(buffer, num_bytes, group, "value", lambda: buffer.version))

    def compute(self, num_ms: int) -> None:
        for _ in range(num_ms):
            self.device.kernel()

    def stalls(self) -> tuple[float, float]:
        total = SwapStats()
        self.engine.add_stats_to(total)
        return total.load_stall_ms, total.offload_stall_ms

    def close(self) -> None:
        self.device.finish()
        self.engine.join()
        self.device.check_clean()


def test_a_load_on_demand_stalls_compute_for_as_long_as_it_takes() -> None:
    setup = Setup()
    handle = setup.save(setup.engine.new_group("layer"))
    setup.engine.join()
    setup.compute(30)
    setup.engine.acquire(handle)
    setup.device.finish()
    assert setup.stalls() == (10.0, 0.0)
    del handle
    setup.close()


def test_a_prefetched_load_that_is_late_stalls_compute_for_the_rest_of_it() -> None:
    setup = Setup()
    group = setup.engine.new_group("layer")
    first, second = setup.save(group), setup.save(group)
    setup.engine.join()
    setup.compute(30)
    setup.engine.acquire(second)  # 10 ms; the load of the other begins then, for 10 more
    setup.compute(4)
    setup.engine.acquire(first)
    setup.device.finish()
    assert setup.stalls() == (10.0 + 6.0, 0.0)
    assert setup.engine.stats.num_late_loads == 2
    del first, second
    setup.close()


def test_a_load_that_is_there_in_time_is_not_even_measured() -> None:
    setup = Setup(PROMPT)
    group = setup.engine.new_group("layer")
    first, second = setup.save(group), setup.save(group)
    setup.engine.join()
    setup.compute(30)
    setup.engine.acquire(second)
    num_times = setup.device.calls["record_time"]
    setup.compute(30)
    setup.engine.acquire(first)
    assert setup.device.calls["record_time"] == num_times
    setup.device.finish()
    load_stall_ms, _ = setup.stalls()
    assert load_stall_ms <= 10, "of the first alone"
    del first, second
    setup.close()


def test_a_full_window_stalls_compute_until_the_oldest_offload_is_done() -> None:
    setup = Setup(window=10)
    group = setup.engine.new_group("layer")
    handles = [setup.save(group)]  # made at 1 ms, copied from then to 11 ms
    setup.compute(3)
    handles.append(setup.save(group))  # made at 5 ms
    setup.device.finish()
    assert setup.stalls() == (0.0, 6.0)
    handles.clear()
    setup.close()


def test_an_offload_awaited_by_hand_counts_as_one() -> None:
    setup = Setup()
    buffer = setup.device.create(10, "value")
    slot = setup.engine.hold(buffer, 10, setup.device.current_stream(), "by hand")
    del buffer
    assert setup.engine.launch_offload(slot)
    setup.compute(2)
    setup.engine.wait_offload(slot)
    setup.device.finish()
    assert setup.stalls() == (0.0, 8.0)
    with setup.device.computing_on(setup.device.compute_streams[1]):
        setup.engine.wait_offload(slot)
    setup.device.finish()
    assert setup.stalls() == (0.0, 8.0), "the second stream had nothing to wait for"
    del slot
    setup.close()


def test_both_streams_that_wait_for_an_offload_by_hand_count() -> None:
    setup = Setup()
    buffer = setup.device.create(10, "value")
    slot = setup.engine.hold(buffer, 10, setup.device.current_stream(), "by hand")
    del buffer
    assert setup.engine.launch_offload(slot)  # from 1 to 11 ms
    with setup.device.computing_on(setup.device.compute_streams[1]):
        setup.compute(4)
        setup.engine.wait_offload(slot)
    setup.device.finish()
    assert setup.stalls() == (0.0, 10.0 + 7.0)
    del slot
    setup.close()


def test_a_group_awaited_by_hand_counts_as_loads() -> None:
    setup = Setup()
    group = setup.engine.new_group("layer")
    handles = [setup.save(group), setup.save(group)]
    setup.engine.join()
    setup.compute(30)
    setup.engine.launch_group_load(group)
    setup.engine.wait_group_load(group)
    setup.device.finish()
    assert setup.stalls() == (20.0, 0.0)
    handles.clear()
    setup.close()


def test_a_wait_that_is_not_over_is_counted_later_and_nobody_waits_for_it() -> None:
    setup = Setup(window=10)
    group = setup.engine.new_group("layer")
    handles = [setup.save(group), setup.save(group)]
    assert setup.stalls() == (0.0, 0.0)
    assert setup.device.calls["join"] == 0
    setup.device.finish()
    assert setup.stalls() == (0.0, 9.0)
    assert setup.stalls() == (0.0, 9.0), "once"
    handles.clear()
    setup.close()


@pytest.mark.parametrize("call", sorted(TIME_CALLS))
@pytest.mark.parametrize("n", [1, 2])
def test_a_time_that_cannot_be_taken_is_missing_and_nothing_else_is_wrong(call: str, n: int) -> None:
    setup = Setup(window=10)
    group = setup.engine.new_group("layer")
    setup.device.fail_call(n, RuntimeError, of={call})
    handles = [setup.save(group), setup.save(group)]
    setup.device.finish()
    seen: list[Any] = []
    while handles:
        setup.device.kernel(reads=[setup.engine.acquire(handles.pop())], fn=seen.append)
    setup.device.finish()
    setup.stalls()
    assert setup.device.failed_calls == [call]
    assert seen == ["value", "value"]
    setup.close()


def test_waits_that_are_measured_do_not_pile_up_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StallTimes, "MAX_PENDING", 3)
    setup = Setup(window=10)
    group = setup.engine.new_group("layer")
    handles = [setup.save(group) for _ in range(20)]
    assert setup.engine.stats.num_window_waits == 19
    assert len(setup.engine._stalls._pending) == 3
    setup.device.finish()
    assert setup.stalls() == (0.0, 9.0 * 3)
    assert not setup.engine._stalls._pending
    handles.clear()
    setup.close()


def test_numbers_of_several_engines_add_up() -> None:
    total = SwapStats()
    for _ in range(2):
        total.add(SwapStats(load_stall_ms=1.5, offload_stall_ms=0.25))
    assert (total.load_stall_ms, total.offload_stall_ms) == (3.0, 0.5)


class HostDevice:
    """A CPU: bytes in the calling thread, files in threads, and a gate before every read of a file."""

    def __init__(self, gate: Callable[[], None]) -> None:
        self.gate = gate
        self.compute, self.offload, self.load = HostComputeStream(), DiskStream("offload"), DiskStream("load")

    def current_stream(self) -> HostComputeStream:
        return self.compute

    def offload_stream(self) -> DiskStream:
        return self.offload

    def load_stream(self) -> DiskStream:
        return self.load

    def stream_of(self, stream: Any) -> None: ...

    def bytes_in_use(self) -> None: ...

    def allocate(self, num_bytes: int, stream: Any) -> bytearray:
        return bytearray(num_bytes)

    def launch_offload(self, block: Any, source: bytearray, stream: Any) -> None:
        stream.launch_write(block, lambda: memoryview(source))

    def launch_load(self, buffer: bytearray, block: Any, stream: Any) -> None:
        def target() -> memoryview:
            self.gate()
            return memoryview(buffer)

        stream.launch_read(block, target)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    yield opened
    opened.set()


def test_on_a_cpu_it_is_the_time_that_the_host_waits(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = HostDevice(lambda: gate.wait(60))
    tier = DiskTier(tmp_path, 1 << 20)
    engine: SwapEngine = SwapEngine(device, [tier], Limits(1 << 20, 1 << 20))
    handle = Handle(engine.save(bytearray(b"abc"), 3, engine.new_group("layer"), "abc", lambda: 0))
    engine.join()
    assert engine.stats.load_stall_ms == 0

    def open_and_wait(event: DiskEvent) -> None:
        gate.set()  # not before: nothing is measured of a load that is there when it is asked for
        event.join()

    monkeypatch.setattr(device.compute, "wait_event", open_and_wait)
    assert engine.acquire(handle) == bytearray(b"abc")
    engine.poll()
    assert engine.stats.load_stall_ms > 0
    assert engine.stats.offload_stall_ms == 0
    del handle
    device.offload.close()
    device.load.close()
    tier.close()


def test_a_staged_stream_takes_the_time_of_the_stream_that_it_stands_for() -> None:
    device = SimulatedDevice(profile=PROMPT)
    stream = StagedStream(device.current_stream())
    begin = stream.record_time()
    stream.wait_event(DiskEvent(None, "done"))
    device.kernel()
    end = stream.record_time()
    device.finish()
    assert end.query()
    assert end.ms_since(begin) == 1.0
