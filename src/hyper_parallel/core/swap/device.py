"""What the engine needs of a device; nothing else of a framework is ever touched.

A *stream* runs what it is given in order; an *event* marks a point in one. Nothing here blocks the host but `join`,
and, on a device whose compute runs in the calling thread (the CPU), `wait_event` on the compute stream.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

# Device memory: one whole storage. The reference is the ownership: dropping the last one frees the memory.
Buffer: TypeAlias = Any


class Event(Protocol):
    # Why the work before the event did not happen (a full disk); None on devices whose copies cannot fail by halves.
    error: BaseException | None

    def query(self) -> bool:
        """Tell whether everything before the event has happened."""

    def join(self) -> None:
        """Block the host until everything before the event has happened."""


class Moment(Protocol):
    """A point in a stream whose time can be read once it is reached. It orders nothing."""

    def query(self) -> bool:
        """Tell whether the stream has got there."""

    def ms_since(self, earlier: object) -> float:
        """Return the milliseconds from an earlier moment of the same stream to this one, which is reached."""


class Stream(Protocol):
    def record_event(self) -> Event:
        """Mark this point of the stream."""

    def wait_event(self, event: Event) -> None:
        """Make what is given to this stream from now on come after the event."""

    def record_time(self) -> Moment:
        """Take the time when the stream gets here. Of streams that compute: what copies wait for is nobody's loss."""


class HostBlock(Protocol):
    """A piece of slower memory on the host's side, of an exact size: pinned memory, or a part of a file."""

    num_bytes: int
    # The last copies that read or wrote this memory: whoever writes it next comes after them (O3, O9).
    last_uses: tuple[Event, ...]


class Tier(Protocol):
    """Slower memory: the pinned arena, or a directory."""

    name: str  # "host" or "disk"

    def take(self, num_bytes: int) -> HostBlock | None:
        """Take a block of that size; None past the budget or when the system has no more.

        It never raises for want of room.
        """

    def give(self, block: HostBlock) -> None:
        """Take a block back. Called from any thread, also in the middle of another call: it must not block.

        A block that is gone without this is free as well: Ctrl-C may come before the call.
        """

    @property
    def used_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes held from the system, in use or not."""


class SwapDevice(Protocol):
    def current_stream(self) -> Stream:
        """Return the stream the caller computes on. It is looked up at every use, never kept as "the" stream."""

    def offload_stream(self) -> Stream: ...

    def load_stream(self) -> Stream: ...

    def stream_of(self, stream: object) -> Stream | None:
        """Return a stream of the framework as the engine takes it; None where the engine's own are the only ones."""

    def bytes_in_use(self) -> int | None:
        """Return the bytes of the device's memory in use now, as its allocator counts them.

        None where that is not known, or slow to ask.
        """

    def allocate(self, num_bytes: int, stream: Stream) -> Buffer:
        """Allocate device memory from the pool of `stream`. Raises MemoryError (of any kind) when there is none."""

    def launch_offload(self, block: HostBlock, source: Buffer, stream: Stream) -> None:
        """Enqueue the copy of a whole source into a block. May raise; then nothing was enqueued."""

    def launch_load(self, buffer: Buffer, block: HostBlock, stream: Stream) -> None:
        """Enqueue the copy of a block into a buffer. May raise; then nothing was enqueued."""
