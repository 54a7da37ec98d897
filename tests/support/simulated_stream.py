"""Virtual streams: queues that run late or early, as a seed says, and clocks that say what comes after what.

A *lane* is a stream itself; a `SimulatedStream` is a handle of it. A clock has one component per lane: the number of its operations that
have surely happened. Enqueueing on a lane, recording and waiting for events, and what the host has seen done advance clocks; how far a
lane has really got does not.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from support.simulated_memory import Operation


class DeadlockError(AssertionError):
    """The host waits for something that no stream will ever do."""


class Profile(NamedTuple):
    """How likely a stream is, at each call, to run its next operation; 0: only when the host waits, 1: all that is ready."""

    compute: float
    offload: float
    load: float


PROMPT = Profile(compute=1.0, offload=1.0, load=1.0)
IDLE = Profile(compute=0.0, offload=0.0, load=0.0)
LAGGING_COPIES = Profile(compute=1.0, offload=0.0, load=0.0)
LAGGING_COMPUTE = Profile(compute=0.0, offload=1.0, load=1.0)
_EAGERNESS = (0.0, 0.02, 0.2, 0.5, 0.8, 1.0)


class Lane:
    def __init__(self, scheduler: Scheduler, name: str, index: int, num_lanes: int, eagerness: float) -> None:
        self.scheduler = scheduler
        self.name = name
        self.index = index
        self.eagerness = eagerness
        self.runs_in_host = False
        self.is_stalled = False
        self.queue: deque[Operation | SimulatedEvent] = deque()  # an event in it is a wait for that event
        self.num_enqueued = 0  # == num_done + len(queue)
        self.num_done = 0
        # Virtual: times_ms[n] is when the first n entries are done; len(times_ms) == num_done + 1.
        self.times_ms = [0.0]
        self.last_operation: Operation | None = None
        self.clock = [0] * num_lanes  # what has surely happened before whatever is enqueued next
        self.host_clock_seen: tuple[int, ...] = ()
        self.free_memory: dict[
            int, list[int]
        ] = {}  # size -> starts, the last freed last; only this lane allocates from it

    def append(self, entry: Operation | SimulatedEvent) -> None:
        self.queue.append(entry)
        self.num_enqueued += 1
        if type(entry) is Operation:
            self.last_operation = entry
        if self.runs_in_host:
            self.scheduler.join(self, self.num_enqueued)
            self.scheduler.learn(self.clock)

    def step(self) -> bool:
        """Run the next entry if there is one and it is ready."""
        if not self.queue or self.is_stalled:
            return False
        entry = self.queue[0]
        if type(entry) is SimulatedEvent:
            if entry.lane.num_done < entry.position:
                return False
            self.queue.popleft()
            self.num_done += 1
            self.times_ms.append(max(self.times_ms[-1], entry.lane.times_ms[entry.position]))
        else:
            self.queue.popleft()
            self.num_done += 1
            self.times_ms.append(self.times_ms[-1] + entry.duration_ms)
            self.scheduler.execute(entry)
        return True

    def describe(self) -> str:
        entry = self.queue[0]
        if self.is_stalled:
            return f"{self.name} is stalled before {entry!r}"
        return f"{self.name} waits for {entry!r}" if type(entry) is SimulatedEvent else f"{self.name} is ready"


class Scheduler:
    """Lets lanes run. `enter` is called at the head of every call of the device, with the lock held, and may raise."""

    def __init__(
        self,
        seed: int,
        names: Sequence[str],
        eagerness: Sequence[float] | None,
        execute: Callable[[Operation], None],
        enter: Callable[[str], None],
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.execute = execute
        self.enter = enter
        eagerness = eagerness or [self.random.choice(_EAGERNESS) for _ in names]
        self.lanes = [Lane(self, name, index, len(names), eagerness[index]) for index, name in enumerate(names)]
        self._offered = list(self.lanes)  # in which order lanes are offered a chance to run
        self.random.shuffle(self._offered)
        self.host_clock = (0,) * len(names)  # what some host thread has seen done

    def progress(self) -> None:
        chance = self.random.random
        for lane in self._offered:
            while lane.queue and chance() < lane.eagerness and lane.step():
                pass

    def join(self, lane: Lane, position: int) -> None:
        """Run lanes, in any order, until `lane` has done that many entries."""
        chance = self.random.random
        while lane.num_done < position:
            busy = [other for other in self._offered if other.queue]
            while busy:
                other = busy.pop(int(chance() * len(busy)))
                if other.step():
                    break
            else:
                stuck = ", ".join(other.describe() for other in self._offered if other.queue)
                raise DeadlockError(f"{lane.name} never gets to {position} (seed {self.seed}): {stuck}.")

    def tell(self, lane: Lane) -> None:
        """What is enqueued from now on comes after all that the host has seen done."""
        if lane.host_clock_seen is not self.host_clock:
            advance_clock(lane.clock, self.host_clock)
            lane.host_clock_seen = self.host_clock

    def learn(self, clock: Sequence[int]) -> None:
        self.host_clock = tuple(map(max, self.host_clock, clock))


class SimulatedStream:
    """Implements `Stream`. As in PyTorch, asking twice for a stream gives two handles that are equal but not identical."""

    __slots__ = ("lane",)

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and other.lane is self.lane

    def __hash__(self) -> int:
        return hash(self.lane)

    def __repr__(self) -> str:
        return f"<stream {self.lane.name}>"

    @property
    def name(self) -> str:
        return self.lane.name

    def record_event(self) -> SimulatedEvent:
        lane, scheduler = self.lane, self.lane.scheduler
        with scheduler.lock:
            scheduler.enter("record_event")
            scheduler.tell(lane)
            return SimulatedEvent(lane)

    def wait_event(self, event: Any) -> None:
        lane, scheduler = self.lane, self.lane.scheduler
        with scheduler.lock:
            scheduler.enter("wait_event")
            if event.lane.scheduler is not scheduler:
                raise ValueError(f"{self!r} cannot wait for {event!r}: it belongs to another device.")
            advance_clock(lane.clock, event.clock)
            lane.append(event)
            if lane.runs_in_host:
                event.check_error()

    def record_time(self) -> SimulatedMoment:
        scheduler = self.lane.scheduler
        with scheduler.lock:
            scheduler.enter("record_time")
            return SimulatedMoment(self.lane)


class SimulatedMoment:
    """Implements `Moment`, in virtual time: it depends on what waits for what and on durations, not on how the seed lets lanes run.

    Unlike an event that was asked, a moment that was asked teaches the host nothing: no order may rest on a measurement.
    """

    __slots__ = ("lane", "position")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.position = lane.num_enqueued

    def query(self) -> bool:
        scheduler = self.lane.scheduler
        with scheduler.lock:
            scheduler.enter("query_time")
            return self.lane.num_done >= self.position

    def ms_since(self, earlier: Any) -> float:
        scheduler = self.lane.scheduler
        with scheduler.lock:
            scheduler.enter("ms_since")
            return self.lane.times_ms[self.position] - earlier.lane.times_ms[earlier.position]


class SimulatedEvent:
    """Implements `Event`."""

    __slots__ = ("clock", "lane", "operation", "position")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.position = lane.num_enqueued  # done when the lane has done that many entries
        self.clock = tuple(lane.clock)
        self.operation = lane.last_operation

    def __repr__(self) -> str:
        return f"<event at {self.position} of {self.lane.name}, which is at {self.lane.num_done}>"

    @property
    def error(self) -> BaseException | None:
        """Why the last copy before the event failed, once it has run."""
        return self.operation.error if self.operation is not None else None

    def check_error(self) -> None:
        if self.error is not None:
            raise copy.copy(self.error)  # raised as it is, each raise would add to one traceback

    def query(self) -> bool:
        scheduler = self.lane.scheduler
        with scheduler.lock:
            scheduler.enter("query")
            is_done = self.lane.num_done >= self.position
            if is_done:
                scheduler.learn(self.clock)
            return is_done

    def join(self) -> None:
        scheduler = self.lane.scheduler
        with scheduler.lock:
            scheduler.enter("join")
            scheduler.join(self.lane, self.position)
            scheduler.learn(self.clock)
            self.check_error()


def advance_clock(clock: list[int], other: Sequence[int]) -> None:
    for index, tick in enumerate(other):
        if tick > clock[index]:
            clock[index] = tick
