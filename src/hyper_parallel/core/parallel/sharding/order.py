"""`Order`: what happens to units before and after forward and backward, and which comes next. Rules: README.md."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from hyper_parallel._base import trace
from hyper_parallel._base.errors import StateError
from hyper_parallel.core.parallel.sharding.unit import Call, CallState, Lease, Unit

__all__ = ["ORDER", "Order"]


@dataclass
class _Pass:
    """One backward of the framework, from the first unit in it to its end."""

    thread: int
    units: dict[Unit, None] = field(default_factory=dict)  # that have a part in it, in the order in which they came
    to_reduce: dict[Unit, None] = field(default_factory=dict)  # of them, those whose gradients were not sent yet
    calls: dict[Call, None] = field(default_factory=dict)  # whose backward has begun in it


class _InThread(threading.local):
    """Where the forward of one thread is."""

    def __init__(self) -> None:
        self.stack: list[Unit] = []  # units in forward, one within another
        self.before: Unit | None = None  # whose forward began last
        self.after: Unit | None = None  # whose forward ended last


class Order:
    """Which units are in forward and backward now. One object for all units of a process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._forward = _InThread()
        self._passes: dict[int, _Pass] = {}  # one within another, too: PyTorch's reentrant checkpoint
        self._reducing: Unit | None = None  # whose gradients are on their way
        self._units: list[weakref.ref[Unit]] = []  # all there are, in the order in which they were made
        self._ahead: dict[Unit, None] = {}  # units that were gathered ahead, and not used yet

    def add(self, unit: Unit) -> None:
        self._units = [known for known in self._units if known() is not None]
        self._units.append(weakref.ref(unit))

    def units(self) -> list[Unit]:
        """List all units there are, in the order in which they were made."""
        return [unit for known in self._units if (unit := known()) is not None]

    # -- forward -------------------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit, pass_id: int | None, *, is_within: bool = False) -> None:
        """Make a unit whole.

        Args:
            pass_id: in which backward this is a rerun; None: in none.
            is_within: whether a forward of the same unit runs around this one.
        """
        with self.lock:
            stack = self._forward.stack
            if stack and stack[0] is unit and pass_id is None and not is_within:
                self._forget_interrupted_forward()
            if not stack and pass_id is None and self._passes:
                self._forget_broken_passes()
            for other in (unit, *unit.borrowed):
                self._gather_anew_if_changed(other)
                other.acquire(Lease.FORWARD)
                self._use(other)
            if pass_id is None:
                self._note_before(unit)
                self._gather_ahead(unit, lambda other: other.next_in_forward)
            stack.append(unit)

    def after_forward(self, unit: Unit, call: Call | None, pass_id: int | None, *, is_seen: bool = True) -> None:
        """Let go of a unit, unless something else needs it whole.

        Args:
            call: the forward that ended, if a backward may follow.
            is_seen: whether its outputs are known, so that the unit is told when that backward reaches them. If not, it
                stays whole until then.
        """
        with self.lock:
            stack = self._forward.stack
            if unit not in stack:
                return  # an interrupted forward was forgotten meanwhile
            while stack.pop() is not unit:
                pass
            for other in (unit, *unit.borrowed):
                if pass_id is not None:
                    self._stay_for_pass(other, pass_id)
                elif call is not None and (other.zero < 3 or not is_seen) and not other.has(Lease.STEP):
                    other.acquire(Lease.STEP)
                other.release(Lease.FORWARD)
            if pass_id is None:
                self._note_after(unit)

    def _use(self, unit: Unit) -> None:
        unit.give_back(Lease.AHEAD)
        self._ahead.pop(unit, None)
        unit.make_whole()
        unit.memory.show_whole()

    def _gather_anew_if_changed(self, unit: Unit) -> None:
        """A unit that stayed whole has the values of an earlier step once the optimizer has written to the shards."""
        if not unit.is_leased or unit.memory.version() == unit.gathered_version:
            return
        unit.give_back(Lease.STEP, Lease.AHEAD)
        if unit.is_leased:
            raise StateError(
                "Weights were changed while they were in use.",
                got=repr(unit),
                do="Let the optimizer step when forward and backward are over.",
            )

    def _note_before(self, unit: Unit) -> None:
        here = self._forward
        if here.before is not None:
            here.before.next_in_forward = unit
        here.before = unit

    def _note_after(self, unit: Unit) -> None:
        here = self._forward
        unit.last_in_forward, here.after = here.after, unit
        if not here.stack:
            if here.before is not None:
                here.before.next_in_forward = None
            here.before = here.after = None
            self._forget_ahead()

    def _gather_ahead(self, unit: Unit, following: Callable[[Unit], Unit | None]) -> None:
        other = following(unit)
        for _ in range(unit.prefetch):
            if other is None or other is unit:
                return
            if not other.is_leased:
                other.acquire(Lease.AHEAD)
                self._ahead[other] = None
            other = following(other)

    def _forget_ahead(self) -> None:
        for unit in self._ahead:
            unit.give_back(Lease.AHEAD)
        self._ahead.clear()

    def _stay_for_pass(self, unit: Unit, pass_id: int) -> None:
        """What a rerun made whole stays so until the backward of the unit has ended: it is not gathered twice."""
        self._pass(pass_id, unit).units[unit] = None
        if not unit.has(Lease.RERUN):
            unit.acquire(Lease.RERUN)

    def _forget_interrupted_forward(self) -> None:
        """The outermost unit begins again and had not ended: Ctrl-C came, and no hook was told."""
        stack = self._forward.stack
        for unit in stack:
            for other in (unit, *unit.borrowed):
                other.forget_step()
        stack.clear()
        self._forward.before = self._forward.after = None
        self._forget_ahead()

    # -- backward ------------------------------------------------------------------------------------------------------

    def before_backward(self, call: Call, pass_id: int) -> None:
        """Make the units of a call whole for backward."""
        with self.lock:
            if call.state is CallState.RUNNING:
                return
            unit = call.unit
            unit.check_unchanged(call)
            call.state = CallState.RUNNING
            self._pass(pass_id, unit).calls[call] = None
            for other in (unit, *unit.borrowed):
                other.acquire(Lease.BACKWARD)
                self._use(other)
                self._join(other, pass_id)
            self._gather_ahead(unit, lambda other: other.last_in_forward)

    def gradient_came(self, unit: Unit, pass_id: int) -> None:
        """Note that a pass has made a gradient of a unit whose outputs are not known."""
        with self.lock:
            self._join(unit, pass_id)

    def _join(self, unit: Unit, pass_id: int) -> None:
        running = self._pass(pass_id, unit)
        running.units[unit] = None
        running.to_reduce[unit] = None

    def _pass(self, pass_id: int, unit: Unit) -> _Pass:
        found = self._passes.get(pass_id)
        if found is None:
            found = self._passes[pass_id] = _Pass(threading.get_ident())
            unit.memory.at_end_of_backward(partial(self.end_of_backward, pass_id))
        return found

    def after_backward(self, call: Call, pass_id: int) -> None:
        """Let go of the units of a call, and send their gradients if no other call will add to them."""
        with self.lock:
            if call.state is not CallState.RUNNING:
                return
            call.state = CallState.ENDED
            for unit in (call.unit, *call.unit.borrowed):
                unit.release(Lease.BACKWARD)
                if not unit.has_open_calls:
                    unit.give_back(Lease.RERUN)
                    self._reduce(unit, self._pass(pass_id, unit))

    def reduce_at_once(self, units: Sequence[Unit], pass_id: int) -> None:
        """Send the gradients of units and wait for the sums: where autograd takes them before backward goes on."""
        with self.lock:
            running = self._pass(pass_id, units[0])
            for unit in units:
                self._reduce(unit, running)
            self._end_reduce()

    def end_of_backward(self, pass_id: int) -> None:
        """End what a pass has left open, and give the shards their gradients."""
        with self.lock:
            ended = self._passes.get(pass_id)
            if ended is None:
                return
            for call in ended.calls:
                if call.state is CallState.RUNNING:
                    call.state = CallState.ENDED
                    for unit in (call.unit, *call.unit.borrowed):
                        unit.release(Lease.BACKWARD)
            for unit in ended.units:
                unit.give_back(Lease.RERUN)
            self._join_unannounced(ended)
            for unit in tuple(ended.to_reduce):
                self._reduce(unit, ended)
            self._end_reduce()
            del self._passes[pass_id]
            self._forget_ahead()
            for unit in ended.units:
                if unit.accumulation.is_last:
                    unit.end_step()

    def _join_unannounced(self, ended: _Pass) -> None:
        """Find units that have gradients though no output of theirs said that backward comes.

        A module may hide an output, in an attribute or an object that nobody looks into.
        """
        elsewhere = {unit for other in self._passes.values() if other is not ended for unit in other.units}
        for unit in self.units():
            if unit not in elsewhere and unit.memory.has_new_gradients:
                ended.units[unit] = None
                ended.to_reduce[unit] = None

    def _reduce(self, unit: Unit, running: _Pass) -> None:
        if unit not in running.to_reduce:
            return
        del running.to_reduce[unit]
        memory, state = unit.memory, unit.accumulation
        if not memory.is_trained:
            return
        if state.holds:
            memory.hold_gradients(state.weight)
            if not state.is_last:
                return
        self._begin_reduce(unit)

    def _begin_reduce(self, unit: Unit) -> None:
        self._end_reduce()
        trace.emit("sharding.reduce", unit=unit.name, bytes=unit.memory.reduced_bytes)
        # What was put aside has its weight already.
        unit.memory.begin_reduce(None if unit.accumulation.holds else unit.accumulation.weight)
        self._reducing = unit

    def _end_reduce(self) -> None:
        unit, self._reducing = self._reducing, None
        if unit is not None:
            unit.memory.end_reduce()
            trace.emit("sharding.reduced", unit=unit.name)
            if unit.accumulation.is_last:
                unit.give_gradients()

    def forget_reduce(self, unit: Unit) -> None:
        """What is on its way of a unit was dropped."""
        if self._reducing is unit:
            self._reducing = None

    # -- steps ---------------------------------------------------------------------------------------------------------

    def reduce_now(self, units: Sequence[Unit]) -> None:
        """Send the gradients of these units, as a schedule says, and add them to this rank's sums."""
        with self.lock:
            for unit in units:
                if unit.memory.is_trained and unit.memory.holds_gradients:
                    self._begin_reduce(unit)
            self._end_reduce()

    def finish_step(self, units: Sequence[Unit]) -> None:
        """Send and give what the last microbatch of a step has not: gradients of units that had no part in it."""
        with self.lock:
            self.reduce_now(units)
            for unit in units:
                if unit.memory.has_sums:
                    unit.give_gradients()
                unit.end_step()

    def _forget_broken_passes(self) -> None:
        """A backward that raised never came to its end: what it left is dropped when its thread begins a forward."""
        mine = threading.get_ident()
        python_threads = {thread.ident for thread in threading.enumerate() if not isinstance(thread, _NOT_OF_PYTHON)}
        for pass_id, broken in list(self._passes.items()):
            if broken.thread == mine or broken.thread not in python_threads:
                del self._passes[pass_id]
                for unit in broken.units:
                    unit.forget_step()


# A thread that the framework made, in which backward runs on an accelerator.
_NOT_OF_PYTHON = threading._DummyThread

ORDER = Order()
