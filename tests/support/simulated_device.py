"""A device of virtual streams: seeded delays, a byte-exact caching allocator, injected failures, and a race check.

The engine runs on it as it runs on CUDA: it implements the protocols of `hyper_parallel.core.swap.device`. What it guarantees:

- An operation runs after those before it on its stream and after the events its stream waits for, and otherwise as late or as
  early as the seed and the profile say. Streams make progress only inside calls, so one seed gives one run.
- Memory belongs to whoever holds the last reference to its buffer. When that is gone it is back in the pool of its stream at
  once, in host order, whatever is still in flight, and the next allocation of that size on that stream gets the same addresses.
- Every access is checked when it is enqueued (`simulated_memory.History`): a missing wait is found in every schedule in which no
  `query` or `join` of the host happens to make up for it.

Calls may come from several threads; one lock is around everything. What any thread has seen done counts as known to all: on one
host, "done" is a fact about time, and whatever is enqueued later comes later.

    device = SimulatedDevice(seed=7)
    a = device.create(64, value=1, label="a")
    device.kernel(reads=[a], writes=[a], fn=lambda value: value + 1)
    device.finish()
    assert device.read(a) == 2
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from support.simulated_memory import POISON, Access, Contents, FailedCopy, Garbage, History, Operation, RaceError, Range
from support.simulated_stream import Lane, Profile, Scheduler, SimulatedStream

STREAM_CALLS = frozenset({"current_stream", "offload_stream", "load_stream"})
EVENT_CALLS = frozenset({"record_event", "wait_event", "query", "join"})
TIME_CALLS = frozenset({"record_time", "query_time", "ms_since"})
MEMORY_CALLS = frozenset({"allocate", "launch_offload", "launch_load", "take"})
# What `fail_call` counts unless it is told otherwise; `give` is not among them, as it cannot fail.
ENGINE_CALLS = STREAM_CALLS | EVENT_CALLS | TIME_CALLS | MEMORY_CALLS


class SimulatedBuffer:
    """Device memory; it goes back to its pool with the last reference."""

    __slots__ = ("__weakref__", "_freed", "num_bytes", "range", "stream", "version")

    def __init__(self, num_bytes: int, stream: SimulatedStream, range_: Range, freed: deque[Any]) -> None:
        self.num_bytes = num_bytes
        self.stream = stream  # whose pool it came from
        self.range = range_
        self.version = 0  # kernels that were given it to write
        self._freed = freed

    @property
    def label(self) -> str:
        return self.range.owner

    def __repr__(self) -> str:
        return f"<buffer {self.range}>"

    def __del__(self) -> None:
        # In any thread, at any moment, also inside a call of the device: an append needs no lock.
        self._freed.append((self.stream.lane, self.range, self.num_bytes))


class SimulatedDevice:
    """Implements `SwapDevice`.

    `capacity_bytes`: what may be allocated at one time. `profile`: how fast streams are; drawn from the seed when not given.
    `poison_on_reuse`: memory that had an owner before is filled with POISON by a kernel on the stream it is allocated on.
    `raise_races=False`: races are only listed in `races`, and the run goes on with whatever values they lead to.
    `compute_in_host`: kernels run when called, and a wait of a compute stream blocks the host, as on a CPU.
    `kernel_ms`, `copy_ms_per_byte`: how long work takes in virtual time, for a host that takes none.
    `counts_bytes`: the engine may ask how much memory is in use.
    """

    def __init__(
        self,
        seed: int = 0,
        capacity_bytes: int = 1 << 40,
        *,
        num_compute_streams: int = 2,
        profile: Profile | None = None,
        poison_on_reuse: bool = True,
        raise_races: bool = True,
        compute_in_host: bool = False,
        kernel_ms: float = 1.0,
        copy_ms_per_byte: float = 1.0,
        counts_bytes: bool = False,
    ) -> None:
        self.counts_bytes = counts_bytes
        self.seed = seed
        self.capacity_bytes = capacity_bytes
        self.kernel_ms = kernel_ms
        self.copy_ms_per_byte = copy_ms_per_byte
        self.peak_bytes = 0
        self.offloaded_bytes = 0  # by copies that have run, and not failed
        self.loaded_bytes = 0
        self.trace: list[Operation] = []  # in the order in which they ran
        self.calls: Counter[str] = Counter()
        self.failed_calls: list[str] = []  # those that were made to fail
        self.races: list[str] = []  # swallowed ones, too; as text, because an error holds frames and they hold memory
        self.tiers: list[Any] = []
        self._poison_on_reuse = poison_on_reuse
        self._raise_races = raise_races
        self._failures: list[_Failure] = []
        self._num_copies = 0
        self._failing_copies: dict[int, BaseException] = {}  # number of the copy -> why it fails
        self._contents = Contents()
        self._history = History()
        names = [*(f"compute{n}" for n in range(num_compute_streams)), "offload", "load"]
        eagerness = [*[profile.compute] * num_compute_streams, profile.offload, profile.load] if profile else None
        self._scheduler = Scheduler(seed, names, eagerness, self._execute, self._enter)
        self._lock = self._scheduler.lock
        *compute_lanes, self._offload_lane, self._load_lane = self._scheduler.lanes
        for lane in compute_lanes:
            lane.runs_in_host = compute_in_host
        self.compute_streams = [SimulatedStream(lane) for lane in compute_lanes]
        self._current: dict[object, SimulatedStream] = {}  # per host thread
        self._host_thread = threading.local()
        self._freed: deque[tuple[Lane, Range, int]] = deque()
        self._live: dict[int, Range] = {}
        self._next_address = 0
        self._num_allocations = 0
        self._allocated_bytes = 0

    # What the engine calls.

    def current_stream(self) -> SimulatedStream:
        with self._lock:
            self._enter("current_stream")
            return SimulatedStream(self._current_lane())

    def offload_stream(self) -> SimulatedStream:
        with self._lock:
            self._enter("offload_stream")
            return SimulatedStream(self._offload_lane)

    def load_stream(self) -> SimulatedStream:
        with self._lock:
            self._enter("load_stream")
            return SimulatedStream(self._load_lane)

    def stream_of(self, stream: Any) -> Any:
        return stream

    def bytes_in_use(self) -> int | None:
        return self.allocated_bytes if self.counts_bytes else None

    def allocate(self, num_bytes: int, stream: Any) -> SimulatedBuffer:
        with self._lock:
            self._enter("allocate")
            return self._allocate(num_bytes, stream.lane, "")

    def launch_offload(self, block: Any, source: Any, stream: Any) -> None:
        with self._lock:
            self._enter("launch_offload")
            _check_copy(block, source)
            self._enqueue(
                stream.lane, f"offload of {source.label}", [source.range], [block.range], self._next_copy(source)
            )

    def launch_load(self, buffer: Any, block: Any, stream: Any) -> None:
        with self._lock:
            self._enter("launch_load")
            _check_copy(block, buffer)
            self._enqueue(
                stream.lane, f"load of {buffer.label}", [block.range], [buffer.range], self._next_copy(buffer)
            )

    # What the program under test calls.

    def create(self, num_bytes: int, value: Any, label: str = "") -> SimulatedBuffer:
        """A buffer of the current stream and a kernel that writes `value` into it."""
        with self._lock:
            self._enter("create")
            lane = self._current_lane()
            buffer = self._allocate(num_bytes, lane, label)
            self._enqueue(lane, f"create {buffer.label}", [], [buffer.range], lambda: value)
            return buffer

    def kernel(
        self,
        reads: Sequence[SimulatedBuffer] = (),
        writes: Sequence[SimulatedBuffer] = (),
        fn: Callable[..., Any] | None = None,
        name: str = "kernel",
    ) -> None:
        """Enqueue `writes = fn(*reads)` on the current stream; for several writes `fn` gives as many values.

        Without `fn` the result is a number made of the name and the values read. A kernel that reads garbage writes it on and
        does not call `fn`; one that writes nothing always calls it, so that a test sees what was read.
        """
        with self._lock:
            self._enter("kernel")
            read, written = [buffer.range for buffer in reads], [buffer.range for buffer in writes]
            self._enqueue(self._current_lane(), name, read, written, fn)
            for buffer in writes:
                buffer.version += 1

    def read(self, memory: Any) -> Any:
        """What a buffer or a block holds now. The host reads it, and races unless it has seen the last write done."""
        with self._lock:
            self._enter("read")
            conflict = self._history.find_conflict(memory.range, False, self._scheduler.host_clock)
            if conflict is not None:
                self._report_race(conflict, None, f"the host reads {memory.range}")
            return self._contents.read(memory.range)

    def finish(self) -> None:
        """Run everything that is enqueued; the host has then seen it done."""
        with self._lock:
            for lane in self._scheduler.lanes:
                self._scheduler.join(lane, lane.num_enqueued)
                self._scheduler.learn(lane.clock)

    @contextlib.contextmanager
    def computing_on(self, stream: SimulatedStream) -> Iterator[None]:
        """Make `stream` the current one of this host thread."""
        thread = self._thread()
        before = self._current.get(thread, self.compute_streams[0])
        self._current[thread] = stream
        try:
            yield
        finally:
            self._current[thread] = before

    @contextlib.contextmanager
    def host_thread(self, name: str) -> Iterator[None]:
        """Act as another host thread, with a current stream of its own, without starting one."""
        before = getattr(self._host_thread, "name", None)
        self._host_thread.name = name
        try:
            yield
        finally:
            self._host_thread.name = before

    # Failures.

    def fail_call(
        self, n: int, exception: BaseException | type[BaseException], of: Collection[str] = ENGINE_CALLS
    ) -> None:
        """Make the n-th call from now on (1: the next) of those in `of` raise before it does anything; `take` returns None."""
        self._failures.append(_Failure(n, exception, frozenset(of)))

    def fail_allocation(self, n: int) -> None:
        """Make the n-th allocation from now on fail for want of memory, the program's own ones (`create`) included."""
        self.fail_call(n, MemoryError(f"injected: allocation {n} fails"), of=("allocate", "create"))

    def fail_copy(self, n: int, exception: BaseException) -> None:
        """Make the n-th copy launched from now on fail when it runs: its event is done and has an `error`, as with a full disk.

        Only with `compute_in_host`: where a stream can wait without the host, nobody would look at the error in time.
        """
        if not self.compute_streams[0].lane.runs_in_host:
            raise ValueError(
                "Copies of a device with streams of its own cannot fail by halves; use compute_in_host=True."
            )
        self._failing_copies[self._num_copies + n] = exception

    def stall(self, stream: SimulatedStream) -> None:
        """The stream never runs anything again; a host that waits for it gets a DeadlockError."""
        stream.lane.is_stalled = True

    # Accounts.

    @property
    def allocated_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return self._allocated_bytes

    @property
    def num_engine_calls(self) -> int:
        """After a run without failures: how many n there are for `fail_call`."""
        return sum(self.calls[call] for call in ENGINE_CALLS)

    def live_buffers(self) -> list[str]:
        with self._lock:
            self._take_back()
            return [range_.owner for range_ in self._live.values()]

    def check_clean(self) -> None:
        """Run everything, then fail for races, live buffers and live blocks, and name them."""
        self.finish()
        left = [*self.races, *(f"live buffer: {label}" for label in self.live_buffers())]
        left += [f"live block: {block}" for tier in self.tiers for block in tier.live_blocks()]
        if left:
            raise AssertionError("\n".join([f"The simulated device (seed {self.seed}) is not clean:", *left]))

    # Inside; the lock is held.

    def _enter(self, call: str) -> None:
        failure = self._enter_or_fail(call)
        if failure is not None:
            raise failure.exception

    def _enter_or_fail(self, call: str) -> _Failure | None:
        """The head of every call: streams get their chance to run, and the call may be one that is made to fail."""
        self.calls[call] += 1
        if self._freed:
            self._take_back()
        self._scheduler.progress()
        due = None
        for failure in self._failures:
            if call in failure.of:
                failure.remaining -= 1
                if failure.remaining == 0:
                    due = failure
        if due is not None:
            self.failed_calls.append(call)
        return due

    def _thread(self) -> object:
        return getattr(self._host_thread, "name", None) or threading.get_ident()

    def _current_lane(self) -> Lane:
        return self._current.get(self._thread(), self.compute_streams[0]).lane

    def _next_copy(self, buffer: SimulatedBuffer) -> _Copy:
        self._num_copies += 1
        return _Copy(buffer.num_bytes, self._failing_copies.get(self._num_copies))

    def _allocate(self, num_bytes: int, lane: Lane, label: str) -> SimulatedBuffer:
        if self._allocated_bytes + num_bytes > self.capacity_bytes:
            raise MemoryError(
                f"The simulated device is full: {num_bytes} bytes asked for; {self._allocated_bytes} of "
                f"{self.capacity_bytes} are held by {[range_.owner for range_ in self._live.values()]}."
            )
        self._num_allocations += 1
        size = max(num_bytes, 1)  # an empty buffer has an address, too
        start, is_reused = self._find_memory(size, lane.free_memory)
        range_ = Range(start, start + size, label or f"buffer {self._num_allocations}", "device")
        if is_reused and self._poison_on_reuse:
            self._enqueue(lane, f"poison {range_.owner}", [], [range_], _poison)
        self._allocated_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._allocated_bytes)
        self._live[start] = range_
        return SimulatedBuffer(num_bytes, SimulatedStream(lane), range_, self._freed)

    def _find_memory(self, size: int, free: dict[int, list[int]]) -> tuple[int, bool]:
        """The last freed piece of that size, or the head of the smallest larger one, or new addresses, which never run out."""
        if not free.get(size):
            larger = min((other for other, starts in free.items() if other > size and starts), default=0)
            if not larger:
                start = self._next_address
                self._next_address += size
                return start, False
            start = free[larger].pop()
            free.setdefault(larger - size, []).append(start + size)
            return start, True
        return free[size].pop(), True

    def _take_back(self) -> None:
        while self._freed:
            lane, range_, num_bytes = self._freed.popleft()
            lane.free_memory.setdefault(range_.end - range_.start, []).append(range_.start)
            self._allocated_bytes -= num_bytes
            del self._live[range_.start]

    def _enqueue(
        self, lane: Lane, name: str, reads: list[Range], writes: list[Range], fn: Callable[..., Any] | None
    ) -> None:
        self._scheduler.tell(lane)
        lane.clock[lane.index] += 1
        operation = Operation(name, lane.name, lane.index, lane.clock[lane.index], reads, writes, fn)
        operation.duration_ms = self._duration_ms(fn)
        accesses = [Access(operation, range_, False) for range_ in reads]
        accesses += [Access(operation, range_, True) for range_ in writes]
        for access in accesses:
            conflict = self._history.find_conflict(access.range, access.is_write, lane.clock)
            if conflict is not None:
                self._report_race(conflict, operation, str(access))
        for access in accesses:
            self._history.note(access)
        lane.append(operation)

    def _duration_ms(self, fn: Callable[..., Any] | None) -> float:
        if isinstance(fn, _Copy):
            return fn.num_bytes * self.copy_ms_per_byte
        return 0.0 if fn is _poison else self.kernel_ms  # poison is ours, and no work of the program

    def _report_race(self, conflict: Access, later: Operation | None, what: str) -> None:
        message = (
            f"Race (seed {self.seed}): {what}, and nothing orders it after an earlier access: {conflict}. "
            f"Wait for an event recorded on {conflict.operation.stream} after that."
        )
        self.races.append(message)
        if self._raise_races:
            raise RaceError(message, conflict.operation, later)

    def _execute(self, operation: Operation) -> None:
        values = [self._contents.read(range_) for range_ in operation.reads]
        fn, operation.fn = operation.fn, None  # what it closes over lives no longer than it must
        writes = operation.writes
        garbage = [value for value in values if isinstance(value, Garbage)]
        if garbage and writes and type(fn) is not _Copy:
            results = garbage[:1] * len(writes)
        elif fn is None:
            results = [zlib.crc32(repr((operation.name, values)).encode())] * len(writes)
        else:
            result = fn(*values)
            results = [result] if len(writes) == 1 else result
        if type(fn) is _Copy:
            self._finish_copy(operation, fn.num_bytes, results[0])
        for range_, result in zip(writes, results if writes else (), strict=True):
            self._contents.write(range_, result)
        self.trace.append(operation)

    def _finish_copy(self, operation: Operation, num_bytes: int, result: Any) -> None:
        if isinstance(result, FailedCopy):
            operation.error = result.error
        elif operation.reads[0].space == "device":
            self.offloaded_bytes += num_bytes
        else:
            self.loaded_bytes += num_bytes


class _Copy:
    __slots__ = ("error", "num_bytes")

    def __init__(self, num_bytes: int, error: BaseException | None) -> None:
        self.num_bytes = num_bytes
        self.error = error

    def __call__(self, value: Any) -> Any:
        return value if self.error is None else FailedCopy(self.error)


class _Failure:
    def __init__(self, remaining: int, exception: BaseException | type[BaseException], of: frozenset[str]) -> None:
        self.remaining = remaining  # counts on below 0 once it has happened
        self.exception = exception
        self.of = of


def _check_copy(block: Any, buffer: SimulatedBuffer) -> None:
    if not block.is_live:
        raise ValueError(f"A copy uses a block that was given back: {block.range}.")
    if block.num_bytes != buffer.num_bytes:
        raise ValueError(f"A copy of {buffer.num_bytes} bytes ({buffer.range}) and {block.num_bytes} ({block.range}).")


def _poison() -> Garbage:
    return POISON
