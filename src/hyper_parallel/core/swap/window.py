"""Sources whose offload is under way, held in order and counted in bytes (O2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hyper_parallel.core.swap.device import Buffer, Event, Stream
from hyper_parallel.core.swap.slot import Slot


class InFlight:
    """One copy under way: the memory it needs, and the event that tells it is done."""

    __slots__ = ("buffer", "event", "num_bytes", "slot", "stream")

    def __init__(self, slot: Slot | None, stream: Stream, buffer: Buffer, event: Event, num_bytes: int) -> None:
        self.slot = slot
        self.stream = stream  # the one whose pool the memory returns to
        self.buffer = buffer
        self.event = event
        self.num_bytes = num_bytes


class Window:
    """The copies under way, first in, first out. Invariant: `held_bytes == sum(entry.num_bytes)`.

    It is counted first, and then one call of C does it: Ctrl-C comes before both or after both.
    """

    def __init__(self) -> None:
        self._entries: deque[InFlight] = deque()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: InFlight) -> None:
        self.held_bytes += entry.num_bytes
        self._entries.append(entry)

    def oldest(self) -> InFlight | None:
        return self._entries[0] if self._entries else None

    def pop_oldest(self) -> InFlight:
        entry = self._entries[0]
        self.held_bytes -= entry.num_bytes  # plant: window-bytes
        self._entries.popleft()
        return entry

    def pop_finished(self) -> Iterator[InFlight]:
        """Take out the oldest entries whose copies are done; the first that is not ends the look.

        One stream finishes in order. With streams of the user's a later copy may be done before, and is then held a
        little longer.
        """
        while self._entries and self._entries[0].event.query():  # plant: finished-only
            yield self.pop_oldest()

    def remove(self, event: Event) -> None:
        """Forget the entry of an event that someone has waited for."""
        for entry in self._entries:
            if entry.event is event:
                self.held_bytes -= entry.num_bytes
                self._entries.remove(entry)
                return
