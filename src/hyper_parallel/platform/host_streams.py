"""Streams and events of the CPU, for both frameworks.

An operation on the CPU has finished when its call returns, so a stream that runs its work at once, in the calling
thread, keeps every ordering rule there is: what was recorded before a wait has happened. What remains is bookkeeping:
which stream is current (per thread, as on an accelerator) and when an event was recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hyper_parallel._base.errors import ArgumentTypeError, StateError, describe


class HostEvent:
    """An event of the CPU: done as soon as it is recorded."""

    def __init__(self) -> None:
        self._recorded_ns: int | None = None

    def record(self, stream: HostStream | None = None) -> None:
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: HostStream | None = None) -> None:
        """Return at once: what was recorded before has finished.

        An event that was never recorded orders nothing, as on CUDA.
        """

    def synchronize(self) -> None:
        """Return at once, as `wait` does."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Return the milliseconds from this event to a later one."""
        if self._recorded_ns is None or end_event._recorded_ns is None:
            raise StateError(
                "Both events must be recorded before the time between them is known.", do="Call `record()`."
            )
        return (end_event._recorded_ns - self._recorded_ns) / 1e6


class HostStream:
    """A stream of the CPU: its work runs at once, in the calling thread."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: HostEvent) -> None:
        if not hasattr(event, "record"):
            raise ArgumentTypeError("A stream waits for an event.", expected="an event", got=describe(event))

    def wait_stream(self, stream: HostStream) -> None:
        if not hasattr(stream, "record_event"):
            raise ArgumentTypeError("A stream waits for another stream.", expected="a stream", got=describe(stream))

    def synchronize(self) -> None:
        """Return at once: nothing of this stream is ever unfinished."""

    def query(self) -> bool:
        return True


_default = HostStream()
_current = threading.local()


def current_host_stream() -> HostStream:
    """Return the stream that this thread works on."""
    stream: HostStream = getattr(_current, "stream", _default)
    return stream


@contextmanager
def host_stream_context(stream: HostStream | None) -> Iterator[None]:
    """Make `stream` current in this thread; `None` changes nothing, as on CUDA."""
    if stream is None:
        yield
        return
    if not isinstance(stream, HostStream):
        raise ArgumentTypeError(
            "The stream does not belong to this device.", expected="a stream of the CPU", got=describe(stream)
        )
    before = current_host_stream()
    _current.stream = stream
    try:
        yield
    finally:
        _current.stream = before
