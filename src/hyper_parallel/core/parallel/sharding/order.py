"""`Order`: what happens to units before and after forward and backward, and which comes next. Rules: README.md."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import NamedTuple

from hyper_parallel._base import trace
from hyper_parallel.core.parallel.sharding.unit import Call, CallState, Lease, Unit

__all__ = ["ORDER", "Order"]


@dataclass
class _Pass:
    """One backward of the framework, from the first unit in it to its end.

    `end` is what the framework runs then. It drops it where backward raises, so that a broken pass is known by it.
    """

    thread: int
    end: weakref.ref[Callable[[], None]]
    units: dict[Unit, None] = field(default_factory=dict)  # that have a part in it, in the order in which they came
    to_reduce: dict[Unit, None] = field(default_factory=dict)  # of them, those whose gradients were not sent yet
    calls: dict[Call, None] = field(default_factory=dict)  # whose backward has begun in it


class _Forward(NamedTuple):
    """A forward that has begun, and the Python frame that runs as long as it does."""

    unit: Unit
    frame: FrameType | None


class _InThread(threading.local):
    """Where the forward of one thread is."""

    def __init__(self) -> None:
        self.stack: list[_Forward] = []  # one within another
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

    def before_forward(self, unit: Unit, pass_id: int | None, frame: FrameType | None = None) -> None:
        """Make a unit whole.

        Args:
            pass_id: in which backward this is a rerun; None: in none.
            frame: what runs as long as this forward. Without it, Ctrl-C is noticed when the outermost unit begins
                again.
        """
        with self.lock:
            self.forget_what_failed(unit, pass_id)  # plant: forward-forgets
            taken: list[Unit] = []
            try:
                for other in (unit, *unit.borrowed):
                    if pass_id is not None:
                        self._pass(pass_id, other).units[other] = None  # plant: rerun-in-pass
                    other.let_go_if_changed()  # plant: forward-changed
                    other.acquire(Lease.FORWARD)
                    taken.append(other)
                    self._use(other)
                if pass_id is None:
                    self._note_before(unit)
                    self._gather_ahead(unit, lambda other: other.next_in_forward)  # plant: ahead-in-forward
            except BaseException:  # no room for it: this forward does not begin, and none will end
                for other in taken:
                    other.release(Lease.FORWARD)  # plant: forward-has-not-begun
                raise
            self._forward.stack.append(_Forward(unit, frame))

    def after_forward(self, unit: Unit, call: Call | None, pass_id: int | None, *, is_seen: bool = True) -> None:
        """Let go of a unit, unless something else needs it whole.

        Args:
            call: the forward that ended, if a backward may follow.
            is_seen: whether its outputs are known, so that the unit is told when that backward reaches them. If not, it
                stays whole until then.
        """
        with self.lock:
            stack = self._forward.stack
            if all(forward.unit is not unit for forward in stack):
                return  # an interrupted forward was forgotten meanwhile
            while stack.pop().unit is not unit:
                pass
            unit.hides_outputs |= call is not None and not is_seen  # plant: hides-outputs
            for other in (unit, *unit.borrowed):
                if pass_id is not None:
                    if not other.has(Lease.RERUN):  # until its backward has ended: it is not gathered twice
                        other.acquire(Lease.RERUN)  # plant: stay-for-pass
                elif call is not None and (other.zero < 3 or not is_seen) and not other.has(Lease.STEP):
                    other.acquire(Lease.STEP)  # plant: stay-for-step
                other.release(Lease.FORWARD)  # plant: forward-ends
            if pass_id is None:
                self._note_after(unit)

    def _use(self, unit: Unit) -> None:
        unit.give_back(Lease.AHEAD)  # plant: ahead-used
        self._ahead.pop(unit, None)
        unit.make_whole()  # plant: wait-whole
        unit.memory.show_whole()  # plant: show-whole

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
                here.before.next_in_forward = None  # plant: last-of-forward
            here.before = here.after = None
            self._forget_ahead()  # plant: forward-forgets-ahead

    def _gather_ahead(self, unit: Unit, following: Callable[[Unit], Unit | None]) -> None:
        wanted: dict[Unit, None] = {}
        other = following(unit)
        while len(wanted) < unit.prefetch and other is not None and other is not unit and other not in wanted:
            wanted[other] = None
            other = following(other)
        # What did not come, as the order was another one this time, goes first.
        self._forget_ahead(but=wanted)  # plant: ahead-did-not-come
        for other in wanted:
            if not other.is_leased:
                other.acquire(Lease.AHEAD)
                self._ahead[other] = None

    def _forget_ahead(self, but: Collection[Unit] = ()) -> None:
        for unit in [unit for unit in self._ahead if unit not in but]:
            del self._ahead[unit]
            unit.give_back(Lease.AHEAD)

    def forget_what_failed(self, unit: Unit | None, pass_id: int | None) -> None:
        """Drop what errors and Ctrl-C have left, before something new begins in this thread."""
        stack = self._forward.stack
        if stack:  # plant: interrupted-forwards
            self._forget_interrupted_forwards(unit if pass_id is None else None)
        if self._passes:  # plant: broken-passes
            self._forget_broken_passes(is_outside=not stack and pass_id is None)

    def _forget_interrupted_forwards(self, unit: Unit | None) -> None:
        """Ctrl-C came, and no hook was told. `unit` begins now, and may be the outermost one, which begins again."""
        stack = self._forward.stack
        while stack and (not _runs(stack[-1].frame) if stack[-1].frame is not None else stack[0].unit is unit):
            forgotten = stack.pop().unit
            for other in (forgotten, *forgotten.borrowed):  # plant: interrupted-borrowed
                other.forget_step()
        if not stack:
            self._forward.before = self._forward.after = None

    # -- backward ------------------------------------------------------------------------------------------------------

    def before_backward(self, call: Call, pass_id: int) -> None:
        """Make the units of a call whole for backward."""
        with self.lock:
            unit = call.unit
            running = self._pass(pass_id, unit)
            if call.state is CallState.RUNNING:  # plant: begins-once
                return
            unit.check_unchanged(call)  # plant: check-unchanged
            unit.accumulation.check_weight(unit.name)  # plant: check-weight
            call.begin()
            running.calls[call] = None  # plant: calls-of-pass
            for other in (unit, *unit.borrowed):
                running.units[other] = running.to_reduce[other] = None  # plant: units-of-pass
            for other in (unit, *unit.borrowed):
                other.acquire(Lease.BACKWARD)
                self._use(other)
            self._gather_ahead(unit, lambda other: other.last_in_forward)  # plant: ahead-in-backward

    def gradient_came(self, unit: Unit, pass_id: int) -> None:
        """Note a pass that has made a gradient of a unit whose outputs are not known. Its end looks for others."""
        with self.lock:
            self._pass(pass_id, unit).units[unit] = None  # plant: gradient-came

    def _pass(self, pass_id: int, unit: Unit) -> _Pass:
        found = self._passes.get(pass_id)
        if found is None:
            self.forget_what_failed(None, pass_id)  # plant: pass-forgets
            end = partial(self.end_of_backward, pass_id)
            unit.memory.at_end_of_backward(end)
            found = self._passes[pass_id] = _Pass(threading.get_ident(), weakref.ref(end))
        return found

    def after_backward(self, call: Call, pass_id: int) -> None:
        """Let go of the units of a call, and send their gradients if no other call will add to them."""
        with self.lock:
            if call.state is not CallState.RUNNING:  # plant: ends-once
                return
            call.end()
            for unit in (call.unit, *call.unit.borrowed):
                unit.release(Lease.BACKWARD)
                if not unit.calls:  # plant: last-call
                    unit.give_back(Lease.RERUN)  # plant: rerun-ends
                    self._reduce(unit, self._pass(pass_id, unit))  # plant: reduce-early

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
                    call.end()
                    for unit in (call.unit, *call.unit.borrowed):
                        unit.release(Lease.BACKWARD)  # plant: pass-ends-backward
            for unit in ended.units:
                unit.give_back(Lease.RERUN)  # plant: pass-ends-rerun
            del self._passes[pass_id]
            if not self._passes:  # plant: outermost-pass
                for unit in self._unannounced():
                    ended.units[unit] = ended.to_reduce[unit] = None
                self._forget_ahead()  # plant: pass-forgets-ahead
            for unit in tuple(ended.to_reduce):
                self._reduce(unit, ended)
            self._end_reduce()  # plant: pass-waits-reduce
            for unit in ended.units:
                if unit.accumulation.is_last and all(unit not in other.units for other in self._passes.values()):
                    unit.end_step()  # plant: pass-ends-step

    def _unannounced(self) -> list[Unit]:
        """Find units that have gradients though no output of theirs said that backward comes, and none is running.

        A module may hide an output, in an attribute or an object that nobody looks into. A unit that ever did is always
        among them: whether this rank has used it says nothing of the others.
        """
        elsewhere = {unit for other in self._passes.values() for unit in other.units}
        return [  # plant: unannounced
            unit
            for unit in self.units()
            if unit not in elsewhere and (unit.hides_outputs or unit.memory.has_new_gradients)
        ]

    def _reduce(self, unit: Unit, running: _Pass) -> None:
        if unit not in running.to_reduce:
            return
        del running.to_reduce[unit]
        state = unit.accumulation
        if not unit.memory.is_trained:  # plant: reduce-trained
            return
        if state.holds or unit.has_unsent:  # plant: hold-first
            unit.memory.hold_gradients(state.weight)
            unit.has_unsent = True
            if state.holds and not state.is_last:
                return
        self._send(unit)

    def _send(self, unit: Unit) -> None:
        is_weighted = unit.has_unsent or unit.accumulation.holds  # what lies aside has its weight already
        self._end_reduce()  # plant: one-at-a-time
        trace.emit("sharding.reduce", unit=unit.name, bytes=unit.memory.reduced_bytes)
        unit.memory.begin_reduce(None if is_weighted else unit.accumulation.weight)  # plant: weight-once
        unit.has_unsent = False  # plant: sent
        self._reducing = unit

    def _end_reduce(self) -> None:
        unit, self._reducing = self._reducing, None
        if unit is not None:
            unit.memory.end_reduce()  # plant: wait-reduce
            trace.emit("sharding.reduced", unit=unit.name)
            if unit.accumulation.is_last:  # plant: give-in-last
                unit.give_gradients()

    def forget_reduce(self, unit: Unit) -> None:
        """What is on its way of a unit was dropped."""
        if self._reducing is unit:
            self._reducing = None

    def _forget_broken_passes(self, *, is_outside: bool) -> None:
        """A backward that raised never came to its end. Outside of all, none of this thread can still run."""
        mine = threading.get_ident()
        for number, other in list(self._passes.items()):
            if other.end() is None or (is_outside and other.thread == mine):  # plant: is-broken
                del self._passes[number]
                for unit in (*other.units, *self._unannounced()):
                    unit.forget_step()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def reduce_now(self, units: Sequence[Unit]) -> None:
        """Send the gradients of these units, as a schedule says, and add them to this rank's sums."""
        with self.lock:
            for unit in units:
                # Gradients of weights that waited come without a pass.
                if unit.has_unsent or (unit.memory.is_trained and unit.memory.holds_gradients):
                    self._send(unit)  # plant: finish-sends
            self._end_reduce()  # plant: finish-waits

    def finish_step(self, units: Sequence[Unit]) -> None:
        """Send and give what the last microbatch of a step has not: gradients of units that had no part in it."""
        with self.lock:
            self.reduce_now(units)
            for unit in units:
                if unit.memory.has_sums:
                    unit.give_gradients()  # plant: finish-gives
                unit.end_step()  # plant: finish-ends


def _runs(frame: FrameType | None) -> bool:
    """Whether a frame is among those that run now in this thread."""
    here: FrameType | None = sys._getframe()
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


ORDER = Order()
