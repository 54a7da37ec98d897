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
    LATE = "late"  # the step has ended without it: it may still come, and nobody waits for it
    RUNNING = "running"
    ENDED = "ended"


class Call:
    """One forward of a unit that a backward may follow. It lives as long as the graph of that forward.

    Assumes: only the graph holds it. The unit knows it weakly, so that a graph that is dropped is not waited for.
    """

    __slots__ = ("__weakref__", "state", "unit", "versions")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.versions = [other.gathered_version for other in (unit, *unit.borrowed)]
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
        self.hides_outputs = False  # whether a forward had outputs that nobody saw
        self.has_unsent = False  # whether gradients of earlier microbatches lie aside
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
        if not self.is_leased:  # plant: gather-once
            trace.emit("sharding.gather", unit=self.name, bytes=self.memory.whole_bytes, why=lease.name)
            self.memory.begin_gather()
            # Not before: it takes in shards that were replaced.
            self.gathered_version = self.memory.version()  # plant: gathered-version
            self._is_gathering = True
        self._leases[lease] += 1

    def let_go_if_changed(self) -> None:
        """A unit that stayed whole has the values of an earlier step once the optimizer has written to the shards."""
        if not self.is_leased or self.memory.version() == self.gathered_version:
            return
        self.give_back(Lease.STEP, Lease.AHEAD)  # plant: let-go-changed
        if self.is_leased:
            raise StateError(
                "Weights were changed while they were in use.",
                got=repr(self),
                do="Let the optimizer step when forward and backward are over.",
            )

    def make_whole(self) -> None:
        """Wait until the parameters are whole."""
        if self._is_gathering:
            # Where it finds no room, what was begun can still be forgotten.
            self.memory.end_gather()  # plant: wait-gather
            self._is_gathering = False
            trace.emit("sharding.whole", unit=self.name, bytes=self.memory.whole_bytes)

    def release(self, lease: Lease) -> None:
        """Give a lease back. With the last one the memory goes."""
        if not self.has(lease):
            raise StateError(f"`{self.name}` was given back more often than it was taken.", got=lease.name)
        was_shown = self.is_shown
        self._leases[lease] -= 1
        if was_shown and not self.is_shown:
            self.memory.show_shards()  # plant: show-shards
        if not self.is_leased:
            self._let_go()  # plant: last-lease

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
        if self._is_gathering:  # plant: gather-under-way
            self._is_gathering = False
            self.memory.forget_gather()
        else:
            self.memory.free()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def add_call(self) -> Call:
        """Note a forward that a backward may follow. It adds to the gradients of borrowed parameters, too."""
        call = Call(self)
        for unit in (self, *self.borrowed):  # plant: calls-of-borrowed
            unit._calls.add(call)
        return call

    @property
    def has_open_calls(self) -> bool:
        """Whether a backward may still add to the gradients."""
        is_open = (CallState.WAITING, CallState.RUNNING)
        return any(call.state in is_open for call in tuple(self._calls))  # plant: open-calls

    def check_unchanged(self, call: Call) -> None:
        """Raise where the shards are not those that the forward of this call was made with."""
        if [other.memory.version() for other in (self, *self.borrowed)] != call.versions:  # plant: unchanged
            raise StateError(
                "Weights were changed between a forward and its backward: the gradients would be wrong.",
                where=f"unit {self.name or 'of the whole module'}",
                do="Run backward before the optimizer steps, or forward again.",
            )

    # -- what is gathered for other reasons ----------------------------------------------------------------------------

    def unshard(self) -> None:
        """Keep the unit whole until `reshard`: what a schedule does around several forwards and backwards."""
        with self.order.lock:
            self.order.forget_what_failed(None, None)  # plant: unshard-forgets
            self.let_go_if_changed()  # plant: unshard-changed
            self.acquire(Lease.SCHEDULE)

    def reshard(self) -> None:
        with self.order.lock:
            self.release(Lease.SCHEDULE)

    def give_gradients(self) -> None:
        """Give the sums of this step to the shards."""
        divisor = self.accumulation.divisor  # plant: divisor
        self.memory.give_gradients(self.memory.num_ranks if divisor is None else divisor)

    def end_step(self) -> None:
        """Let go of what was kept for later microbatches.

        A backward that has not come is not waited for in later steps: when its graph is dropped, and so whether it is
        waited for, may differ from rank to rank.
        """
        for call in tuple(self._calls):
            if call.state is CallState.WAITING:
                call.state = CallState.LATE
        self.give_back(Lease.STEP)  # plant: end-step

    def forget_step(self, *, with_schedule: bool = False) -> None:
        """Give up all that a step that failed has left. Whoever runs a schedule gives up its leases as well."""
        for call in tuple(self._calls):
            call.state = CallState.ENDED  # plant: forget-calls
        self.give_back(
            *(lease for lease in Lease if with_schedule or lease is not Lease.SCHEDULE)
        )  # plant: forget-leases
        self.accumulation.has_lost |= self.accumulation.has_earlier  # plant: has-lost
        self.has_unsent = False
        self.memory.drop_gradients()  # plant: forget-gradients
        self.order.forget_reduce(self)  # plant: forget-reduce
