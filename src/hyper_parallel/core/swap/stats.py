"""What the engine did, in numbers."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, final

from hyper_parallel._base.log import get_logger
from hyper_parallel.core.swap.device import Event, Moment, Stream

_logger = get_logger("swap")

Copy: TypeAlias = Literal["load", "first load", "offload"]


@dataclass
class SwapStats:
    """Counted since the process started."""

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
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, max(mine, theirs) if each.name.startswith("peak") else mine + theirs)

    def as_dict(self) -> dict[str, Any]:
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "kept": dict(self.kept)}


@final
class StallTimes:
    """How long compute stands still, taken by its own streams: a moment before the wait and one after it.

    The host never waits for a time. One is read when its stream has long passed it, whenever the engine looks for finished copies; a wait
    that is not over yet is counted later, or, if the process ends before, not at all. To measure is a wish: where it fails, nothing else does.

    `begin` and `end` are called from any thread; `collect` under the engine's lock.
    """

    LATE_MS = 0.02  # what is measured around a wait that costs nothing
    MAX_PENDING = 1024  # beyond it waits are not measured: a host so far ahead of its device must not pile up moments

    def __init__(self, stats: SwapStats) -> None:
        self._stats = stats
        self._pending: deque[tuple[Copy, Moment, Moment]] = deque()
        self._has_said = False

    def begin(self, stream: Stream, awaited: Event) -> Moment | None:
        """To be called before `stream` waits for an event; None if it is done: then there is nothing to measure."""
        try:
            if len(self._pending) >= self.MAX_PENDING or awaited.query():
                return None
            return stream.record_time()
        except Exception as error:
            self._give_up(error)
            return None

    def end(self, copy: Copy, stream: Stream, begin: Moment | None) -> None:
        """To be called after the wait, with what `begin` gave."""
        if begin is not None:
            try:
                self._pending.append((copy, begin, stream.record_time()))
            except Exception as error:
                self._give_up(error)

    def collect(self) -> int:
        """Count what is over by now; how many loads of it were late and could have been earlier."""
        num_late = 0
        while self._pending:
            copy, begin, end = self._pending[0]
            stalled_ms = 0.0
            try:
                if not end.query():
                    break
                stalled_ms = end.ms_since(begin)
            except Exception as error:
                self._give_up(error)
            self._pending.popleft()
            if copy == "offload":
                self._stats.offload_stall_ms += stalled_ms
                continue
            self._stats.load_stall_ms += stalled_ms
            is_late = stalled_ms > self.LATE_MS
            self._stats.num_late_loads += is_late
            num_late += is_late and copy == "load"
        return num_late

    def _give_up(self, error: Exception) -> None:
        if not self._has_said:
            self._has_said = True
            _logger.info("a wait of compute was not measured: %s; said once", error)
