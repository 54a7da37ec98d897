"""When everything in a schedule happens, given what each action costs.

A rank computes one action at a time, in the order of its list, and begins as soon as what the action needs is there.
Beside the compute, and not in its way, run transfers (one at a time from a rank to a rank in a direction), gathers and
reductions of parameters (one at a time per rank each). A receive that is posted costs nothing: its consumer waits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hyper_parallel.core.parallel.pipeline.actions import COMPUTE, SENDS, TRANSFERS, Action, Kind, partner
from hyper_parallel.core.parallel.pipeline.keeping import Keeping
from hyper_parallel.core.parallel.pipeline.play import Done, inputs_of, send_after

if TYPE_CHECKING:
    from hyper_parallel.core.parallel.pipeline.schedule import Schedule

__all__ = ["Bar", "Timeline", "simulate"]


class Bar(NamedTuple):
    """A compute action and its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a simulation tells.

    Attributes:
        bars: the compute actions of each rank, in time.
        time: when the last rank is done with everything.
        peak: what each rank keeps for backward at most, in the unit of `activations`.
        memory: what each rank keeps, as moments at which it changes: (time, kept from then on).
    """

    bars: tuple[tuple[Bar, ...], ...]
    time: float
    peak: tuple[float, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(math.fsum(bar.end - bar.start for bar in bars) for bars in self.bars)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank does not compute, from the first moment of the step to the last."""
        return tuple(self.time - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle time over the time that ranks compute: 0.25 means a quarter more time than without waiting."""
        busy = math.fsum(self.busy)
        return math.fsum(self.idle) / busy if busy else 0.0


def simulate(schedule: Schedule, cost: Callable[[Action], float], keeping: Keeping) -> Timeline:
    """Simulate a schedule that was checked."""
    run = _Run(schedule, cost)
    run.to_the_end()
    memory = tuple(_memory(bars, keeping) for bars in run.bars)
    peak = tuple(max(kept for _, kept in moments) for moments in memory)
    return Timeline(tuple(map(tuple, run.bars)), run.time, peak, memory)


class _Run:
    """One simulation, rank by rank as far as each can go."""

    def __init__(self, schedule: Schedule, cost: Callable[[Action], float]) -> None:
        num_ranks = schedule.num_ranks
        self._schedule = schedule
        self._cost = cost
        self._has_transfers = any(action.kind in TRANSFERS for actions in schedule.ranks for action in actions)
        self._positions = [0] * num_ranks
        self._clock = [0.0] * num_ranks
        self._there: dict[Done, float] = {}  # when what was done is at hand for those who need it
        self._waiting: dict[Done, list[int]] = defaultdict(list)
        # When a line, or a rank's gathers, are free again.
        self._free: dict[tuple[object, ...], float] = defaultdict(float)
        self._unsharded: dict[tuple[int, int], float] = {}  # (rank, stage): when its parameters are whole
        self.bars: list[list[Bar]] = [[] for _ in range(num_ranks)]
        self.time = 0.0

    def to_the_end(self) -> None:
        ready = list(range(self._schedule.num_ranks))
        while ready:
            ready += self._go_on(ready.pop())

    def _go_on(self, rank: int) -> list[int]:
        actions = self._schedule.ranks[rank]
        woken: list[int] = []
        while self._positions[rank] < len(actions):
            action = actions[self._positions[rank]]
            if action.kind in COMPUTE:
                needs = [need for need, _ in inputs_of(action, self._schedule.placement, has_transfers=True)]
                for need in needs:
                    if need not in self._there:
                        self._waiting[need].append(rank)
                        return woken
                woken += self._compute(rank, action, max((self._there[need] for need in needs), default=0.0))
            elif action.kind in SENDS:
                woken += self._send(rank, action, self._clock[rank])
            elif action.kind in (Kind.UNSHARD, Kind.REDUCE):
                end = self._beside((rank, action.kind), self._clock[rank], self._cost(action))
                if action.kind is Kind.UNSHARD:
                    self._unsharded[rank, action.stage] = end
            self._positions[rank] += 1
        return woken

    def _compute(self, rank: int, action: Action, at_hand: float) -> list[int]:
        whole = max(self._unsharded.get((rank, part.stage), 0.0) for part in action.parts or (action,))
        start = max(self._clock[rank], at_hand, whole)
        end = start + self._cost(action)
        self._clock[rank] = end
        self.time = max(self.time, end)
        self.bars[rank].append(Bar(action, start, end))
        woken: list[int] = []
        for part in action.parts or (action,):
            kind = Kind.INPUT_GRAD if part.kind is Kind.BACKWARD else part.kind
            woken += self._note((part.stage, kind, part.microbatch), end)
            send = None if self._has_transfers else send_after(part, self._schedule.placement)
            if send is not None:  # among compute actions alone it goes without saying
                woken += self._send(rank, send, end)
        return woken

    def _send(self, rank: int, send: Action, now: float) -> list[int]:
        receive = partner(send)
        other = self._schedule.placement.rank_of(receive.stage, receive.microbatch or 0)
        end = self._beside((rank, other, send.kind), now, self._cost(send))
        return self._note(receive[:3], end)

    def _beside(self, line: tuple[object, ...], now: float, cost: float) -> float:
        """Let something run beside the compute, after what was before it on the same line."""
        end = max(now, self._free[line]) + cost
        self._free[line] = end
        self.time = max(self.time, end)
        return end

    def _note(self, done: Done, end: float) -> list[int]:
        self._there[done] = end
        return self._waiting.pop(done, [])


def _memory(bars: Sequence[Bar], keeping: Keeping) -> tuple[tuple[float, float], ...]:
    kept = 0.0
    moments = [(0.0, 0.0)]
    for bar in bars:
        for moment, change in ((bar.start, keeping.added(bar.action)), (bar.end, -keeping.freed(bar.action))):
            if change:
                kept += change
                moments.append((moment, kept / keeping.unit))
    return tuple(moments)
