"""A device that exists in numbers only: streams are clocks, and memory is a count of bytes.

Copies take as long as the link says. It implements `core/swap/device.py`, so the real engine runs on it and decides
what it would decide on hardware. Rules of its clock:

C1. A stream is one number, the moment at which all it was given is done. What it is given starts then and takes a known
    time.
C2. An event is that number when it was recorded; a stream that waits for one later than its own moves on to it. Nothing
    that is given later changes the time of an event, since a stream works in order.
C3. The host is in step with compute: its clock is the compute stream's, less `host_lead_ms`. An event, or a moment, is
    done for the host when it is not later than that clock; `join` and `sync` bring the host's clock to where compute
    is. A host that runs ahead (on CUDA it does, up to the depth of the launch queue) sees copies done later, so the
    engine holds sources longer; infinity means that it sees none done before the next `sync`. Time spent by the host
    itself is nothing.
C4. Memory is taken and given back in the order of the host's calls, which is that of compute, and is dated with
    compute's clock.
C5. A copy takes its bytes over the speed of its direction. The part of it during which the other direction is busy with
    what it was given before goes at `Link.both_bytes_per_ms`. The later of two copies pays; what is under way keeps its
    time (C2).
"""

from __future__ import annotations

import heapq
import itertools
import math
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeAlias, final

from hyper_parallel.core.planner.model.profile import Link

Direction: TypeAlias = Literal["offload", "load"]
NO_REGION = -1


class Use(IntEnum):
    """What memory is for at a moment."""

    BASE = 0  # alive when forward begins
    OUTSIDE = 1  # kept for backward by what runs outside of all regions
    SAVED = 2  # kept on the device between a region's forward and its backward
    WORKING = 3  # of the region that runs now, and what it hands on to the next
    WINDOW = 4  # sources that only the engine still holds, since their offload is under way
    PREFETCHED = 5  # buffers of loads that nobody has asked for yet


class Place(NamedTuple):
    """Where a step is: in which phase, of which region, at which op."""

    phase: Literal["forward", "turn", "replay", "backward"]
    region: int  # index in the profile, or NO_REGION
    op: int | None = None


class Change(NamedTuple):
    """A change of memory: it was taken (more than 0 bytes) or given back."""

    ms: float
    use: Use
    region: int
    num_bytes: int


class Copy(NamedTuple):
    """One copy over the link, of something of a region."""

    direction: Direction
    region: int
    start_ms: float
    end_ms: float
    num_bytes: int


class Stall(NamedTuple):
    """A wait: compute stood still for a copy in that direction while a region ran."""

    kind: Direction
    region: int
    start_ms: float
    ms: float


@final
class VirtualEvent:
    """Implements `Event` and `Moment`."""

    __slots__ = ("_device", "direction", "ms")

    error: BaseException | None = None  # a copy of numbers cannot fail

    def __init__(self, device: VirtualDevice, ms: float, direction: Direction | None) -> None:
        self._device = device
        self.ms = ms
        self.direction = direction  # of the stream it was recorded on; None: compute

    def query(self) -> bool:
        return self.ms <= self._device.host_ms()

    def join(self) -> None:
        self._device.join(self.ms)

    def ms_since(self, earlier: Any) -> float:
        return self.ms - float(earlier.ms)


@final
class VirtualStream:
    """Implements `Stream`."""

    __slots__ = ("_device", "direction", "now_ms")

    def __init__(self, device: VirtualDevice, direction: Direction | None) -> None:
        self._device = device
        self.direction = direction
        self.now_ms = 0.0

    def record_event(self) -> VirtualEvent:
        return VirtualEvent(self._device, self.now_ms, self.direction)

    record_time = record_event

    def wait_event(self, event: Any) -> None:
        if event.ms > self.now_ms:
            if self.direction is None and event.direction is not None:
                region = self._device.memory.place.region
                stall = Stall(event.direction, region, self.now_ms, event.ms - self.now_ms)
                self._device.stalls.append(stall)
            self.now_ms = event.ms

    def run(self, ms: float) -> None:
        """Give the stream work that takes that long."""
        self.now_ms += ms


@final
class VirtualMemory:
    """Counts bytes of the device by use and region, and keeps the changes since `begin`.

    Invariant: num_bytes == sum(levels) + sum(of all changes) <= peak_bytes.
    """

    __slots__ = ("_clock", "changes", "levels", "num_bytes", "peak_bytes", "peak_ms", "peak_place", "place")

    def __init__(self, clock: VirtualStream) -> None:
        self._clock = clock
        self.place = Place("forward", NO_REGION)  # what the owner of the device runs now
        self.num_bytes = 0
        self.changes: list[Change] = []
        self.levels: dict[tuple[Use, int], int] = {}
        self.begin()

    def begin(self) -> None:
        """Start over with peak and changes; what is in use stays, in `levels`."""
        levels = dict(self.levels)
        for _, use, region, num_bytes in self.changes:
            levels[use, region] = levels.get((use, region), 0) + num_bytes
        self.levels = {key: level for key, level in levels.items() if level}
        self.changes = []
        self.peak_bytes, self.peak_ms, self.peak_place = self.num_bytes, self._clock.now_ms, self.place

    def change(self, use: Use, region: int, num_bytes: int) -> None:
        """Take that many bytes, or give them back if it is less than 0."""
        if num_bytes:
            self.num_bytes += num_bytes
            self.changes.append(Change(self._clock.now_ms, use, region, num_bytes))
            if self.num_bytes > self.peak_bytes:
                self.peak_bytes, self.peak_ms, self.peak_place = self.num_bytes, self._clock.now_ms, self.place

    def rename(self, before: tuple[Use, int], after: tuple[Use, int], num_bytes: int) -> None:
        """Count the same bytes for another use from now on."""
        if num_bytes and before != after:
            ms = self._clock.now_ms
            self.changes.append(Change(ms, *before, -num_bytes))
            self.changes.append(Change(ms, *after, num_bytes))


@final
class VirtualBuffer:
    """Memory that goes back with the last reference, as the engine expects of a buffer."""

    __slots__ = ("_memory", "num_bytes", "region", "use")

    def __init__(self, memory: VirtualMemory, num_bytes: int, use: Use, region: int) -> None:
        self._memory = memory
        self.num_bytes = num_bytes
        self.use = use
        self.region = region
        memory.change(use, region, num_bytes)

    def rename(self, use: Use, region: int) -> None:
        self._memory.rename((self.use, self.region), (use, region), self.num_bytes)
        self.use, self.region = use, region

    def __del__(self) -> None:
        self._memory.change(self.use, self.region, -self.num_bytes)


@final
class VirtualBlock:
    """A piece of host memory, with the events of its last copies."""

    __slots__ = ("last_uses", "num_bytes", "region")

    def __init__(self, num_bytes: int, last_uses: tuple[Any, ...]) -> None:
        self.num_bytes = num_bytes
        self.last_uses = last_uses
        self.region = NO_REGION  # of the source that was copied here


@final
class VirtualTier:
    """Host memory of exact sizes. `budget_bytes=None`: it has no end.

    Of free blocks the one is taken whose last copy is done first. A real arena may take another one. That makes a
    difference only after loads that were under way when backward turned out not to need them: whoever writes their
    blocks waits for them.
    """

    name = "host"

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes  # plant: host-room
        self.used_bytes = 0
        self.peak_bytes = 0
        self._numbers = itertools.count()
        self._free: dict[
            int, list[tuple[float, int, tuple[Any, ...]]]
        ] = {}  # size -> heap of (end of last use, number, last uses)

    @property
    def reserved_bytes(self) -> int:
        return self.peak_bytes

    def take(self, num_bytes: int) -> VirtualBlock | None:
        if self.budget_bytes is not None and self.used_bytes + num_bytes > self.budget_bytes:
            return None
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        free = self._free.get(num_bytes)
        return VirtualBlock(num_bytes, heapq.heappop(free)[-1] if free else ())

    def give(self, block: Any) -> None:
        self.used_bytes -= block.num_bytes
        last_ms = max((event.ms for event in block.last_uses), default=0.0)
        heapq.heappush(self._free.setdefault(block.num_bytes, []), (last_ms, next(self._numbers), block.last_uses))


@final
class VirtualDevice:
    """Implements `SwapDevice`; `link=None` for a device whose engine is never given anything.

    Attributes:
        compute: the one compute stream; whoever runs a program on the device gives it its work
        memory: all device memory
        copies, stalls: what happened since `begin`
        hidden_bytes: of the memory in use, what kernels need only while they run
    """

    def __init__(self, link: Link | None, host_lead_ms: float = 0.0) -> None:
        self.compute = VirtualStream(self, None)
        self.memory = VirtualMemory(self.compute)
        self.hidden_bytes = 0
        self.copies: list[Copy] = []
        self.stalls: list[Stall] = []
        self._offload = VirtualStream(self, "offload")
        self._load = VirtualStream(self, "load")
        self._host_lead_ms = host_lead_ms  # plant: host-lead
        self._synced_ms = 0.0  # compute was there when the host last waited for it
        speeds = (math.inf, math.inf) if link is None else (link.out_bytes_per_ms, link.in_bytes_per_ms)
        both = math.inf if link is None or link.both_bytes_per_ms is None else link.both_bytes_per_ms
        self._bytes_per_ms: dict[Direction, float] = {"offload": speeds[0], "load": speeds[1]}
        self._both_bytes_per_ms: dict[Direction, float] = {
            "offload": min(both, speeds[0]),
            "load": min(both, speeds[1]),
        }

    # What the engine calls.

    def current_stream(self) -> VirtualStream:
        return self.compute

    def offload_stream(self) -> VirtualStream:
        return self._offload

    def load_stream(self) -> VirtualStream:
        return self._load

    def stream_of(self, stream: Any) -> None:
        return None

    def bytes_in_use(self) -> int:
        """Count what the engine sees, between two kernels."""
        return self.memory.num_bytes - self.hidden_bytes

    def allocate(self, num_bytes: int, stream: Any) -> VirtualBuffer:
        return VirtualBuffer(self.memory, num_bytes, Use.PREFETCHED, NO_REGION)

    def launch_offload(self, block: Any, source: Any, stream: Any) -> None:
        block.region = source.region
        self._copy("offload", block, stream, self._load)

    def launch_load(self, buffer: Any, block: Any, stream: Any) -> None:
        buffer.rename(Use.PREFETCHED, block.region)
        self._copy("load", block, stream, self._offload)

    def _copy(self, direction: Direction, block: VirtualBlock, stream: VirtualStream, other: VirtualStream) -> None:
        # Rule C5: what the other direction was given before slows this copy down.
        start_ms = stream.now_ms
        fast, slow = self._bytes_per_ms[direction], self._both_bytes_per_ms[direction]
        shared_ms = max(other.now_ms - start_ms, 0.0)  # plant: both-directions
        shared_bytes = min(shared_ms * slow, block.num_bytes) if shared_ms > 0 else 0.0
        alone_ms = (block.num_bytes - shared_bytes) / fast
        stream.run(shared_bytes / slow + alone_ms)
        self.copies.append(Copy(direction, block.region, start_ms, stream.now_ms, block.num_bytes))

    # What the owner calls.

    def host_ms(self) -> float:
        """Read the host's clock (C3)."""
        return max(self.compute.now_ms - self._host_lead_ms, self._synced_ms)

    def join(self, ms: float) -> None:
        """Let the host wait until then; compute, which has done all it was given, waits with it."""
        self.compute.now_ms = self._synced_ms = max(self.compute.now_ms, ms)

    def sync(self) -> None:
        """Let the host wait for compute, as it does at the end of a step."""
        self._synced_ms = self.compute.now_ms  # plant: host-waits

    def buffer(self, num_bytes: int, use: Use, region: int) -> VirtualBuffer:
        """Take device memory that the engine may be given."""
        return VirtualBuffer(self.memory, num_bytes, use, region)

    def begin(self) -> None:
        """Forget what happened so far; clocks go on."""
        self.memory.begin()
        self.copies, self.stalls = [], []
