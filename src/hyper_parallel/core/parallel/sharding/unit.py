"""`Unit`: parameters that are gathered together, and the leases that keep them whole. Rules: README.md."""

from __future__ import annotations

import weakref
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from hyper_parallel._base import trace
from hyper_parallel._base.errors import StateError
from hyper_parallel.core.parallel.sharding.accumulation import Accumulation
from hyper_parallel.core.parallel.sharding.memory import UnitMemory

if TYPE_CHECKING:
    from hyper_parallel.core.parallel.sharding.order import Order

__all__ = ["Call", "CallState", "Lease", "Unit"]


class Lease(IntEnum):
    """Why a unit is whole."""

    FORWARD = 0
    BACKWARD = 1
    RERUN = 2  # a forward that runs again in backward
    AHEAD = 3  # gathered ahead
    STEP = 4  # until the step ends
    SCHEDULE = 5


class CallState(Enum):
    """Where the backward of one forward stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Call:
    """One forward of a unit that a backward may follow. It lives as long as the graph of that forward.

    Assumes: only the graph holds it. The unit knows it weakly, so that a graph that is dropped is not waited for.
    """

    __slots__ = ("__weakref__", "state", "unit", "version")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.version = unit.gathered_version
        self.state = CallState.WAITING


class Unit:
    """Some modules' parameters, which are gathered and reduced together.

    Guarantees: memory is whole exactly while there is a lease, and a gather is begun exactly when the first one is
    taken. All changes are made under the lock of `order`.

    Args:
        name: the module, for errors.
        memory: what carries it out.
        order: which unit comes after which; one for all units of a process.
        zero: 1 and 2 keep the unit whole until a step ends, 3 does not. 1 adds gradients up over a step before they are
            sent, 2 and 3 send those of each microbatch.
        prefetch: how many units are gathered ahead.
    """

    def __init__(self, name: str, memory: UnitMemory, order: Order, *, zero: int, prefetch: int) -> None:
        self.name = name
        self.memory = memory
        self.order = order
        self.zero = zero
        self.prefetch = prefetch
        self.accumulation = Accumulation()
        self.gathered_version = memory.version()
        self.borrowed: tuple[Unit, ...] = ()  # units that have parameters which this one's modules use as well
        self.next_in_forward: Unit | None = None  # as the last forward was
        self.last_in_forward: Unit | None = None
        self._leases = [0] * len(Lease)
        self._is_gathering = False
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        order.add(self)

    def __repr__(self) -> str:
        leases = ", ".join(lease.name.lower() for lease in Lease if self.has(lease)) or "sharded"
        return f"<Unit {self.name or 'the whole module'}: {leases}>"

    # -- leases --------------------------------------------------------------------------------------------------------

    def has(self, lease: Lease) -> bool:
        return self._leases[lease] > 0

    @property
    def is_leased(self) -> bool:
        return any(self._leases)

    def acquire(self, lease: Lease) -> None:
        """Take a lease. The first one begins the gather; `make_whole` waits for it."""
        if not self.is_leased:
            trace.emit("sharding.gather", unit=self.name, bytes=self.memory.whole_bytes, why=lease.name)
            self.memory.begin_gather()
            self.gathered_version = self.memory.version()  # behind it: what was put elsewhere is taken in there
            self._is_gathering = True
        self._leases[lease] += 1

    def make_whole(self) -> None:
        """Wait until the parameters are whole."""
        if self._is_gathering:
            self._is_gathering = False
            self.memory.end_gather()
            trace.emit("sharding.whole", unit=self.name, bytes=self.memory.whole_bytes)

    def release(self, lease: Lease) -> None:
        """Give a lease back. With the last one the memory goes."""
        if not self.has(lease):
            raise StateError(f"`{self.name}` was given back more often than it was taken.", got=lease.name)
        was_shown = self.is_shown
        self._leases[lease] -= 1
        if was_shown and not self.is_shown:
            self.memory.show_shards()
        if not self.is_leased:
            self._let_go()

    def give_back(self, *leases: Lease) -> None:
        """Give back what is there of these leases."""
        for lease in leases:
            for _ in range(self._leases[lease]):
                self.release(lease)

    @property
    def is_shown(self) -> bool:
        """Whether modules have the whole parameters now."""
        leases = self._leases
        return bool(leases[Lease.FORWARD] or leases[Lease.BACKWARD] or leases[Lease.RERUN])

    def _let_go(self) -> None:
        trace.emit("sharding.free", unit=self.name, bytes=self.memory.whole_bytes)
        if self._is_gathering:
            self._is_gathering = False
            self.memory.forget_gather()
        else:
            self.memory.free()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def add_call(self) -> Call:
        """Note a forward that a backward may follow. It adds to the gradients of borrowed parameters, too."""
        call = Call(self)
        for unit in (self, *self.borrowed):
            unit._calls.add(call)
        return call

    @property
    def has_waiting_calls(self) -> bool:
        """Whether a forward is alive whose backward has not begun."""
        return any(call.state is CallState.WAITING for call in tuple(self._calls))

    @property
    def has_open_calls(self) -> bool:
        """Whether a backward may still add to the gradients."""
        return any(call.state is not CallState.ENDED for call in tuple(self._calls))

    def check_unchanged(self, call: Call) -> None:
        """Raise where the shards are not those that the forward of this call was made with."""
        if self.memory.version() != call.version:
            raise StateError(
                "Weights were changed between a forward and its backward: the gradients would be wrong.",
                where=f"unit {self.name or 'of the whole module'}",
                do="Run backward before the optimizer steps, or forward again.",
            )

    # -- what is gathered for other reasons ----------------------------------------------------------------------------

    def unshard(self) -> None:
        """Keep the unit whole until `reshard`: what a schedule does around several forwards and backwards."""
        with self.order.lock:
            self.acquire(Lease.SCHEDULE)

    def reshard(self) -> None:
        with self.order.lock:
            self.release(Lease.SCHEDULE)

    def give_gradients(self) -> None:
        """Give the sums of this step to the shards."""
        divisor = self.accumulation.divisor
        self.memory.give_gradients(self.memory.num_ranks if divisor is None else divisor)

    def end_step(self) -> None:
        """Let go of what was kept for later microbatches, if no forward waits for its backward."""
        if not self.has_waiting_calls:
            self.give_back(Lease.STEP)

    def forget_step(self, *, with_schedule: bool = False) -> None:
        """Give up all that a step that failed has left. Whoever runs a schedule gives up its leases as well."""
        for call in tuple(self._calls):
            call.state = CallState.ENDED
        self.give_back(*(lease for lease in Lease if with_schedule or lease is not Lease.SCHEDULE))
        self.memory.drop_gradients()
        self.order.forget_reduce(self)
