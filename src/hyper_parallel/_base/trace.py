"""A record of what happened, in order, for those who look later: the report, the simulated device, tests.

`emit` costs one global read and a comparison while nobody records. While someone does, an event is a tuple in a bounded
ring: the newest `capacity` events are kept and the number of lost ones is known.

Guarantees: events of one thread keep their order; `emit` never raises and never blocks on a lock.
Assumes: the fields are small and immutable (names, numbers), since they are kept as they are.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One thing that happened: `time_ns` is a monotonic clock, `number` counts from 0 in one recording."""

    number: int
    time_ns: int
    thread: int
    kind: str
    fields: dict[str, Any]


class Recording:
    """The events of one `recording()` block."""

    def __init__(self, capacity: int) -> None:
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._numbers = itertools.count()  # its __next__ is atomic in CPython: no lock on the hot path

    def append(self, kind: str, fields: dict[str, Any]) -> None:
        self._ring.append(Event(next(self._numbers), time.perf_counter_ns(), threading.get_ident(), kind, fields))

    def events(self, kind: str | None = None) -> list[Event]:
        """Return the kept events in order: all, or those of one kind (`"swap."`, with a final dot: of each kind that
        starts so).
        """
        kept = sorted(self._ring)
        if kind is None:
            return kept
        if kind.endswith("."):
            return [event for event in kept if event.kind.startswith(kind)]
        return [event for event in kept if event.kind == kind]

    @property
    def num_lost(self) -> int:
        kept = sorted(self._ring)
        return kept[-1].number + 1 - len(kept) if kept else 0


_active: tuple[Recording, ...] = ()
_lock = threading.Lock()  # guards changes of _active, never a read


def emit(kind: str, /, **fields: Any) -> None:
    """Record an event in every recording that is open now. Nothing happens without one."""
    if _active:
        for recording_ in _active:
            recording_.append(kind, fields)


def is_recording() -> bool:
    """Say whether anyone listens: lets a caller skip the work of building fields."""
    return bool(_active)


@contextmanager
def recording(capacity: int = 100_000) -> Iterator[Recording]:
    """Record events of all threads while the block runs.

    Example:
        >>> with recording() as record:
        ...     emit("swap.offload", bytes=4096)
        >>> [(event.kind, event.fields["bytes"]) for event in record.events()]
        [('swap.offload', 4096)]
    """
    global _active  # one tuple, replaced whole, so that `emit` reads it without a lock
    mine = Recording(capacity)
    with _lock:
        _active = (*_active, mine)
    try:
        yield mine
    finally:
        with _lock:
            _active = tuple(other for other in _active if other is not mine)
