"""The disk as the tier below pinned memory: an accelerator's copies go through a staging block and a thread.

    offload:  device --(offload stream)--> staging --(disk thread)--> file
    load:     file --(disk thread)--> staging --(load stream, enqueued by the thread)--> device

To the engine nothing changes: `StagedDevice` is a device, `StagedDisk` a tier, and an event of a staged copy is done
when its last step is. The orders of the README hold for the same reasons on the device's side; on the file's side one
thread does everything in order (O3, O4, O9).

What differs: a stream cannot wait for a thread. Where the engine lets a compute stream wait for a staged copy, the host
waits until the thread has enqueued its part (a load), or is done (an offload).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from hyper_parallel.core.swap.arena import PinnedArena
from hyper_parallel.core.swap.device import Buffer, Event, HostBlock, Moment, Stream, SwapDevice
from hyper_parallel.core.swap.disk import DiskBlock, DiskTier
from hyper_parallel.core.swap.disk_stream import DiskEvent, DiskStream


@final
class StagedBlock:
    """A place in a file, and the pinned block through which it will be written; None once that is launched."""

    __slots__ = ("disk", "last_uses", "num_bytes", "staging", "tier")

    def __init__(self, tier: StagedDisk, disk: DiskBlock, staging: HostBlock) -> None:
        self.tier = tier
        self.disk = disk
        self.staging: HostBlock | None = staging
        self.num_bytes = disk.num_bytes
        self.last_uses: tuple[Event, ...] = ()


@final
class StagedDisk:
    """The disk tier of an accelerator. `staging` bounds how much is on its way between device and file at one time."""

    name = "disk"

    def __init__(self, disk: DiskTier, staging: PinnedArena) -> None:
        self.disk = disk
        self.staging = staging
        self.directory = disk.directory

    def take(self, num_bytes: int) -> StagedBlock | None:
        block = self.disk.take(num_bytes)
        if block is None:
            return None
        staging = self.staging.take(num_bytes)
        if staging is None:  # all of it is under way: the storage stays where it is, as past any budget
            self.disk.give(block)
            return None
        return StagedBlock(self, block, staging)

    def give(self, block: Any) -> None:
        # The file's part is safe at once: the thread that may still write it does everything in order.
        self.disk.give(block.disk)
        if block.staging is not None:  # no offload was launched
            self.staging.give(block.staging)

    def close(self) -> None:
        """Close the files and unpin the staging memory; nothing may be in them."""
        self.disk.close()
        self.staging.trim()

    @property
    def used_bytes(self) -> int:
        return self.disk.used_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.disk.reserved_bytes + self.staging.reserved_bytes


class StagedEvent:
    """The end of a staged load: the thread has read the file and enqueued the copy, and the copy is done."""

    __slots__ = ("copied", "read")

    def __init__(self) -> None:
        self.read: DiskEvent | None = None  # of the job that enqueues the copy
        self.copied: Event | None = None  # set by that job

    @property
    def error(self) -> BaseException | None:
        return None if self.read is None else self.read.error

    def query(self) -> bool:
        if self.read is None or not self.read.query():
            return False
        return self.read.error is not None or (self.copied is not None and self.copied.query())

    def join(self) -> None:
        self.join_enqueued()
        if self.copied is not None:
            self.copied.join()

    def join_enqueued(self) -> None:
        if self.read is not None:
            self.read.join()


@final
class StagedStream:
    """A stream of the device that also understands events of the disk thread."""

    __slots__ = ("_staged", "raw")

    def __init__(self, raw: Stream) -> None:
        self.raw = raw
        self._staged: Event | None = None

    def launched(self, event: Event) -> None:
        """Note that the last thing given to this stream ends with `event`, not with what the stream itself holds."""
        self._staged = event

    def record_event(self) -> Event:
        event, self._staged = self._staged, None
        return self.raw.record_event() if event is None else event

    def wait_event(self, event: Any) -> None:
        if isinstance(event, StagedEvent):
            event.join_enqueued()
            if event.copied is not None:
                self.raw.wait_event(event.copied)
        elif isinstance(event, DiskEvent):
            event.join()
        else:
            self.raw.wait_event(event)

    def record_time(self) -> Moment:
        # The device's own clock is right for waits of the host in between, too: its stream stands still only when it
        # has run dry.
        return self.raw.record_time()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StagedStream) and bool(self.raw == other.raw)

    def __hash__(self) -> int:
        return hash(self.raw)


@final
class StagedDevice:
    """A device whose blocks may be places in files.

    `memory_of`: the bytes of a pinned block. `load_staging`: what loads pass through; the thread alone takes from it
    and gives back before it takes again, so that it is as large as the largest storage. Shared with the offloads it
    could be empty when a load comes: blocks of offloads that are queued behind it would hold it all.
    """

    def __init__(self, device: SwapDevice, load_staging: PinnedArena, memory_of: Callable[[Any], memoryview]) -> None:
        self._device = device
        self._load_staging = load_staging
        self._memory_of = memory_of
        self._disk = DiskStream("disk tier")
        self._offload = StagedStream(device.offload_stream())
        self._load = StagedStream(device.load_stream())

    def current_stream(self) -> StagedStream:
        return StagedStream(self._device.current_stream())

    def offload_stream(self) -> StagedStream:
        return self._offload

    def load_stream(self) -> StagedStream:
        return self._load

    def stream_of(self, stream: Any) -> StagedStream | None:
        """Return a stream of the user's, as the device itself takes it."""
        raw = self._device.stream_of(stream)
        return None if raw is None else StagedStream(raw)

    def bytes_in_use(self) -> int | None:
        return self._device.bytes_in_use()

    def allocate(self, num_bytes: int, stream: Any) -> Buffer:
        return self._device.allocate(num_bytes, _raw(stream))

    def launch_offload(self, block: Any, source: Buffer, stream: Any) -> None:
        if not isinstance(block, StagedBlock):
            self._device.launch_offload(block, source, _raw(stream))
            return
        staging = block.staging
        if staging is None:
            raise ValueError("a place in a file is offloaded to once")
        for event in staging.last_uses:
            stream.raw.wait_event(event)  # O3 for the staging memory
        self._device.launch_offload(staging, source, stream.raw)
        copied = stream.raw.record_event()
        staging.last_uses = (copied,)
        block.staging = None  # the thread gives it back, whatever happens to the write

        def content() -> memoryview:
            copied.join()
            return self._memory_of(staging)

        written = self._disk.launch_write(block.disk, content)
        self._disk.launch_call("give staging memory back", lambda: block.tier.staging.give(staging))
        stream.launched(written)

    def launch_load(self, buffer: Buffer, block: Any, stream: Any) -> None:
        if not isinstance(block, StagedBlock):
            self._device.launch_load(buffer, block, _raw(stream))
            return
        staging: list[HostBlock] = []

        def target() -> memoryview:
            taken = self._load_staging.take(block.num_bytes)
            if taken is None:
                raise MemoryError(f"no pinned memory for a load of {block.num_bytes} bytes")
            staging.append(taken)
            for use in taken.last_uses:
                use.join()  # O3: an earlier load may still read what the file is now read into
            return self._memory_of(taken)

        event = StagedEvent()
        read = self._disk.launch_read(block.disk, target)

        def enqueue() -> None:
            try:
                if read.error is not None:
                    raise read.error
                self._device.launch_load(buffer, staging[0], stream.raw)
                event.copied = stream.raw.record_event()
                staging[0].last_uses = (event.copied,)
            finally:
                for taken in staging:
                    self._load_staging.give(taken)

        event.read = self._disk.launch_call(f"load of {block.num_bytes} bytes", enqueue)
        stream.launched(event)


def _raw(stream: object) -> Any:
    """Return the device's own stream; slots that were saved before the disk was configured have it already."""
    return stream.raw if isinstance(stream, StagedStream) else stream
