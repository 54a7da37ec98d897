"""What the engine did, in numbers."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeAlias, final

from hyper_parallel._base.log import get_logger
from hyper_parallel.core.swap.device import Event, Moment, Stream

_logger = get_logger("swap")

Copy: TypeAlias = Literal["load", "first load", "offload"]


@dataclass
class SwapStats:
    """What an engine counted since the process started."""

    offloaded_bytes: int = 0
    loaded_bytes: int = 0
    num_offloads: int = 0
    num_loads: int = 0
    num_late_loads: int = 0  # compute stood still for them
    num_window_waits: int = 0  # how often compute was made to wait for an offload
    load_stall_ms: float = 0.0  # how long compute stood still for loads that were late
    offload_stall_ms: float = 0.0  # and for offloads: for room in the window, or because a program waited by hand
    peak_in_flight_bytes: int = 0  # most bytes of sources held for copies under way
    kept_bytes: int = 0  # eligible, and left on the device
    kept: Counter[str] = field(default_factory=Counter)  # why -> how many

    def add(self, other: SwapStats) -> None:
        for number in fields(self):
            mine, theirs = getattr(self, number.name), getattr(other, number.name)
            setattr(self, number.name, max(mine, theirs) if number.name.startswith("peak") else mine + theirs)

    def as_dict(self) -> dict[str, Any]:
        return {**{number.name: getattr(self, number.name) for number in fields(self)}, "kept": dict(self.kept)}


class Pause(NamedTuple):
    """A time in which the link stood still: from the end of one copy to the begin of the next."""

    since: Moment
    until: Moment

    def ms(self) -> float:
        return self.until.ms_since(self.since)


@final
class LinkUse:
    """Measures when one direction of the link had nothing to do; its own stream takes the times.

    To measure is a wish, as in `StallTimes`. All calls are under the engine's lock.
    """

    MAX_PENDING = 512

    def __init__(self) -> None:
        self._since: Moment | None = None  # the end of the last copy
        self._pending: deque[Pause] = deque()
        self._works = True

    def begin(self, stream: Stream) -> Pause | None:
        """Note that a copy begins; return the pause before it.

        To be called when all that the copy waits for is in its stream, and before the copy.
        """
        since, self._since = self._since, None
        until = self._record(stream)
        if since is None or until is None:
            return None
        pause = Pause(since, until)
        if len(self._pending) < self.MAX_PENDING:
            self._pending.append(pause)
        return pause

    def end(self, stream: Stream) -> None:
        """Note that the copy ends here. To be called after it."""
        self._since = self._record(stream)

    def collect(self) -> float:
        """Return the milliseconds of pauses in the forward that is over.

        Counted are pauses that are over and were not asked for before.
        """
        self._since = None  # until the next forward the link has nothing to do
        paused_ms = 0.0
        try:
            while self._pending and self._pending[0].until.query():
                paused_ms += self._pending.popleft().ms()
        except Exception:
            self._works = False
        return paused_ms

    def _record(self, stream: Stream) -> Moment | None:
        if not self._works:
            return None
        try:
            return stream.record_time()
        except Exception:
            self._works = False  # a stream of files has no clock: it is a thread
            return None


@final
class StallTimes:
    """Measures how long compute stands still; its own streams take a moment before the wait and one after it.

    The host never waits for a time. One is read when its stream has long passed it, whenever the engine looks for
    finished copies; a wait that is not over yet is counted later, or, if the process ends before, not at all. To
    measure is a wish: where it fails, nothing else does.

    `begin` and `end` are called from any thread; `collect` under the engine's lock.
    """

    LATE_MS = 0.02  # what is measured around a wait that costs nothing
    MAX_PENDING = 1024  # beyond it waits are not measured: a host so far ahead of its device must not pile up moments

    def __init__(self, stats: SwapStats) -> None:
        self._stats = stats
        self._pending: deque[tuple[Copy, Moment, Moment, Pause | None]] = deque()
        self._offload_ms = 0.0
        self._has_said = False

    def begin(self, stream: Stream, awaited: Event) -> Moment | None:
        """Take the moment before `stream` waits for an event; None if that is done, with nothing to measure."""
        try:
            if len(self._pending) >= self.MAX_PENDING or awaited.query():
                return None
            return stream.record_time()
        except Exception as error:
            self._give_up(error)
            return None

    def end(self, copy: Copy, stream: Stream, begin: Moment | None, pause: Pause | None = None) -> None:
        """Take the moment after the wait, with what `begin` gave; `pause` is that of the link, before the load."""
        if begin is not None:
            try:
                self._pending.append((copy, begin, stream.record_time(), pause))
            except Exception as error:
                self._give_up(error)

    def collect(self) -> int:
        """Count what is over by now; return how many loads were late though the link had nothing to do before them."""
        num_late = 0
        while self._pending:
            copy, begin, end, pause = self._pending[0]
            stalled_ms = paused_ms = 0.0
            try:
                if not end.query():
                    break
                stalled_ms = end.ms_since(begin)
                paused_ms = self.LATE_MS if pause is None else pause.ms()
            except Exception as error:
                self._give_up(error)
            self._pending.popleft()
            if copy == "offload":
                self._stats.offload_stall_ms += stalled_ms
                self._offload_ms += stalled_ms
                continue
            self._stats.load_stall_ms += stalled_ms
            is_late = stalled_ms > self.LATE_MS
            self._stats.num_late_loads += is_late
            num_late += is_late and copy == "load" and paused_ms >= self.LATE_MS
        return num_late

    def take_offload_ms(self) -> float:
        """Return how long compute stood still for offloads, of what was collected since this was last asked."""
        stalled_ms, self._offload_ms = self._offload_ms, 0.0
        return stalled_ms

    def _give_up(self, error: Exception) -> None:
        if not self._has_said:
            self._has_said = True
            _logger.info("a wait of compute was not measured: %s; said once", error)
