"""A forward and a backward at the same time, so that one communicates while the other computes.

The rules are in the README.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from hyper_parallel._base import trace
from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, HyperParallelError, StateError, describe
from hyper_parallel.core.parallel.pipeline.failures import OtherSideError, SideTimeoutError, attach
from hyper_parallel.core.parallel.pipeline.meeting import Meeting, Side
from hyper_parallel.core.parallel.pipeline.thread_state import Generators, ThreadState
from hyper_parallel.core.parallel.pipeline.worker import Job, Worker
from hyper_parallel.platform.communication.sync_hook import COMM, COMPUTE, hook_of_this_thread

F = TypeVar("F")
B = TypeVar("B")

_FORWARD, _BACKWARD = 0, 1
_NAMES = ("forward", "backward")


class HookCoordinator:
    """Where a forward and a backward meet, at hooks that `platform.differentiable_sync_hook` puts into a model.

    Lives as long as the model whose hooks know it; one overlap runs at a time. `overlap_forward_backward` runs one,
    with a thread that stays from call to call. The methods can be called by hand as well, from any two threads: the
    first two that call are the sides.

    Args:
        timeout: seconds that a side waits for the other one at most: at a hook, and for its turn where one side works
            at a time.

    Guarantees: no wait is longer than `timeout`; a side that fails, is interrupted or comes too late frees the other.
    """

    def __init__(self, timeout: float = 300.0) -> None:
        self._timeout = _checked_timeout(timeout)
        self._enabled: bool | None = None  # None: nobody has said; then hooks pass, and calls by hand act
        self._condition = threading.Condition()
        self._run: _Run = _ByHand()
        _coordinators.add(self)
        self._worker = Worker(self, name="hyper_parallel backward side")

    def __repr__(self) -> str:
        return f"HookCoordinator(timeout={self._timeout:g}, enabled={self.enabled})"

    def __reduce__(self) -> tuple[type[HookCoordinator], tuple[float]]:
        return HookCoordinator, (self._timeout,)

    def __copy__(self) -> HookCoordinator:
        return self

    def __deepcopy__(self, _memo: object) -> HookCoordinator:
        return self  # a copied model goes on meeting at the same place

    @property
    def timeout(self) -> float:
        return self._timeout

    @property
    def enabled(self) -> bool:
        """Whether hooks wait here: while an overlap runs. Elsewhere hooks are passed, unless this is set.

        Setting it where no overlap runs forgets what was before: sides, and a failure.
        """
        return bool(self._enabled)

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise ArgumentTypeError("A coordinator is enabled or not.", expected="True or False", got=describe(value))
        with self._condition:
            if not self._run.is_overlap:
                self._run = _ByHand()
            self._enabled = value
            self._condition.notify_all()

    def notify_dispatched(self, role: str) -> None:
        """Leave a role: the calling side has enqueued all of what it does in it.

        Raises:
            RuntimeError: the other side has failed, or `abort` was called.
        """
        _check_role(role)
        if self._enabled is False:
            return
        with self._condition:
            side = self._run.side()
            self._check_failure(side)
            self._run.note(side, f"leaves {role}")
            self._run.meeting.leave(side, role)
            self._condition.notify_all()

    def rendezvous(self, role: str) -> None:
        """Enter a role: wait until the other side is there, too.

        A side enters `"compute"` only after what the other one communicates is enqueued.

        Raises:
            TimeoutError: the other side did not come in time; both sides' last hooks are named.
            RuntimeError: the other side has failed, or `abort` was called.
        """
        _check_role(role)
        if self._enabled is False:
            return
        with self._condition:
            run = self._run
            side = run.side()
            self._check_failure(side)
            run.note(side, f"enters {role}")
            run.meeting.ask(side, role)
            self._condition.notify_all()
            if side.waits:
                run.give_turn(side)
                try:
                    self._wait(side, lambda: side.wants is None)
                    self._wait(side, lambda: not side.is_held)
                except BaseException as error:
                    run.meeting.withdraw(side)
                    self._fail(error)
                    raise
                finally:
                    self._take_turn(run, side)
            trace.emit("overlap.enter", side=side.name, role=role)

    def abort(self, exc: BaseException) -> None:
        """End the overlap that runs because of `exc`, which `overlap_forward_backward` then raises.

        Whoever waits at a hook, or comes to one later, raises as well.
        """
        if not isinstance(exc, BaseException):
            raise ArgumentTypeError(
                "An overlap is aborted because of an exception.", expected="an exception", got=describe(exc)
            )
        self._fail(exc)

    def _overlap(self, forward: Callable[[], F], backward: Callable[[], B]) -> tuple[F, B]:
        state = ThreadState()
        run = _Overlap(state)
        here, there = _End(), _End()
        before = self._begin(run)
        job: Job | None = None
        try:
            job = self._worker.begin(lambda: self._call(run, _BACKWARD, lambda: state.run(backward), there))
            with state.as_a_side(is_caller=True):
                self._call(run, _FORWARD, forward, here)
        except BaseException as error:  # an interrupt that neither side has seen
            self._fail(error)
        finally:
            self._join(job)
            run.bring_back(run.meeting.sides[_FORWARD])
            self._over(before)
        if run.failure is None:
            return here.result, there.result  # type: ignore[return-value]
        try:
            for side, end in zip(run.meeting.sides, (here, there), strict=True):
                if end.error is not None and end.error is not run.failure:
                    attach(run.failure, side.name, end.error)
            raise run.failure
        finally:
            # hazard: the error's traceback holds these frames, and they the error. A model would stay alive with it.
            run.failure = here.error = there.error = None
            del job

    def _begin(self, run: _Overlap) -> bool | None:
        with self._condition:
            if self._run.is_overlap:
                raise StateError(
                    "A coordinator runs one overlap at a time.",
                    expected="the one before it over",
                    got="another call of `overlap_forward_backward` with the same coordinator",
                    where=self._run.where(),
                    do="Give each overlap that runs at the same time a HookCoordinator of its own.",
                )
            before, self._enabled, self._run = self._enabled, True, run
            return before

    def _over(self, before: bool | None) -> None:
        with self._condition:
            self._enabled, self._run = before, _ByHand()

    def _call(self, run: _Run, number: int, function: Callable[[], object], end: _End) -> None:
        """Run one side in this thread, and tell the other one that it has ended, whatever happens."""
        side = run.meeting.sides[number]
        run.threads[number] = threading.get_ident()
        try:
            self._take_turn(run, side)
            end.result = function()
        except BaseException as error:
            end.error = error
            self._fail(error)
        finally:
            with self._condition:
                run.meeting.end(side)
                run.give_turn(side)
                self._condition.notify_all()

    def _take_turn(self, run: _Run, side: Side) -> None:
        """Wait, where one thread at a time may work, until the other side waits at a hook or has ended (rule 7).

        After a failure a side that does neither must not keep this one from raising.
        """
        with self._condition:
            deadline, has_failed = time.monotonic() + self._timeout, False
            while run.turn is not None and run.turn is not side:
                if run.failure is not None and not has_failed:
                    deadline, has_failed = time.monotonic() + self._timeout, True
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    if has_failed:
                        return
                    raise self._too_late(side)
                self._condition.wait(remaining)
            run.begin_turn(side)

    def _join(self, job: Job | None) -> None:
        """Wait for the backward side.

        It ends: each of its waits has a deadline, and after a failure none waits at all.
        """
        while job is not None and not job.is_done.is_set():
            try:
                job.is_done.wait()
            except BaseException as interrupt:
                self._fail(interrupt)

    def _wait(self, side: Side, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout
        while not is_over():
            self._check_failure(side)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._too_late(side)
            self._condition.wait(remaining)
        self._check_failure(side)

    def _check_failure(self, side: Side) -> None:
        run = self._run
        if run.failure is not None:
            raise OtherSideError(
                f"The overlap has failed, so that its {side.name} side cannot go on.",
                expected="both sides to go on",
                got=_first_line(run.failure),
                where=run.where(),
                do="Look at the error that came first.",
            ) from run.failure

    def _fail(self, error: BaseException) -> None:
        """Note a failure, unless there is one already: the first one counts."""
        with self._condition:
            if self._run.failure is None:
                self._run.failure = error
            self._condition.notify_all()

    def _too_late(self, side: Side) -> HyperParallelError:
        """The failure of a side whose wait has lasted too long; the other side is told."""
        run = self._run
        other = run.meeting.other(side)
        waits_for = "its communication is enqueued" if side.is_held else "it comes to its next hook or ends"
        error = SideTimeoutError(
            f"The {side.name} side has waited too long for the {other.name} side.",
            expected=f"that {waits_for} within {self._timeout:g} s",
            got=f"nothing; the {other.name} side is {run.place_of(other)}",
            where=run.where(),
            do="Look for what holds that side up, or give HookCoordinator a longer timeout.",
        )
        self._fail(error)
        return error


def overlap_forward_backward(
    forward: Callable[[], F], backward: Callable[[], B], coordinator: HookCoordinator
) -> tuple[F, B]:
    """Call two functions at the same time, the backward one on the coordinator's own thread, and give both results.

    They take turns at the hooks of `coordinator` in the graphs: one communicates while the other computes. The longer
    one runs on when the other has ended. Gradient mode, autocast, device, streams, modes and context variables are
    those of the caller on both sides.

    Raises:
        TypeError: an argument is not a function, or not a coordinator.
        RuntimeError: the coordinator runs another overlap.
        BaseException: what either side raised. The first one is raised when both have ended; the other's is in its
            `__notes__`, and last in its chain of `__context__`.

    Example:
        >>> coordinator = HookCoordinator(timeout=60.0)
        >>> overlap_forward_backward(lambda: "logits", lambda: "gradients", coordinator)
        ('logits', 'gradients')
    """
    for function, name in ((forward, "forward"), (backward, "backward")):
        if not callable(function):
            raise ArgumentTypeError(
                f"`{name}` is called without arguments.", expected="a function", got=describe(function)
            )
    if not isinstance(coordinator, HookCoordinator):
        raise ArgumentTypeError(
            "An overlap needs its coordinator.", expected="a HookCoordinator", got=describe(coordinator)
        )
    return coordinator._overlap(forward, backward)


class _Run:
    """What a coordinator knows of its two sides now."""

    is_overlap = False

    def __init__(self, meeting: Meeting) -> None:
        self.turn: Side | None = None  # who works now, where one thread at a time may
        self.meeting = meeting
        self.failure: BaseException | None = None
        self.threads: list[int | None] = [None, None]
        self._last = ["", ""]

    def side(self) -> Side:
        """Return the side that the calling thread belongs to."""
        raise NotImplementedError

    def begin_turn(self, side: Side) -> None:
        """Note that `side` works from now on."""

    def give_turn(self, side: Side) -> None:
        """Note that `side` waits, or has ended."""

    def note(self, side: Side, what: str) -> None:
        hook = hook_of_this_thread()
        self._last[self.meeting.sides.index(side)] = f"at {hook}, {what}" if hook is not None else what

    def where(self) -> str:
        """Say where both sides met their last hooks."""
        places = [
            f"{side.name} was last {last}" if last else f"{side.name} has met no hook"
            for side, last in zip(self.meeting.sides, self._last, strict=True)
        ]
        return "; ".join(places)

    def place_of(self, side: Side) -> str:
        if side.has_ended:
            return "over"
        thread = self.threads[self.meeting.sides.index(side)]
        frame = sys._current_frames().get(thread) if thread is not None else None
        if frame is None:
            return "not there"
        return f"in {frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


class _Overlap(_Run):
    """A run of `overlap_forward_backward`.

    The forward side is the thread that called. Every other thread is the backward side: what backward does may run in
    threads that autograd keeps for devices, or that the function starts.
    """

    is_overlap = True

    def __init__(self, state: ThreadState) -> None:
        super().__init__(Meeting(_NAMES, goes_first=_BACKWARD))
        self._state = state
        self._numbers: dict[Side, list[Generators]] = {}
        if state.one_thread_at_a_time:
            self._numbers = {side: state.generators() for side in self.meeting.sides}
            self.turn = self.meeting.sides[_BACKWARD]
        self._forward_thread = threading.get_ident()

    def side(self) -> Side:
        return self.meeting.sides[_FORWARD if threading.get_ident() == self._forward_thread else _BACKWARD]

    def begin_turn(self, side: Side) -> None:
        if self._state.one_thread_at_a_time and self.turn is not side:
            self.turn = side
            self.bring_back(side)

    def give_turn(self, side: Side) -> None:
        if self.turn is side:
            self.turn = None
            self._numbers[side] = self._state.generators()

    def bring_back(self, side: Side) -> None:
        """Let random numbers go on from where this side left them.

        A recomputation sets them back, and stops at hooks in between.
        """
        for generators in self._numbers.get(side, ()):
            generators.restore()


class _ByHand(_Run):
    """Two threads that call the coordinator themselves: the first two that do."""

    def __init__(self) -> None:
        super().__init__(Meeting(("first", "second")))

    def side(self) -> Side:
        me = threading.get_ident()
        if me not in self.threads:
            if None not in self.threads:
                self._forget_ended_threads()
            if None not in self.threads:
                raise StateError(
                    "A third thread has come to a coordinator of two.",
                    expected="the two threads that called it first",
                    got=threading.current_thread().name,
                    where=self.where(),
                    do="Set `enabled` to begin anew with other threads, "
                    "or give each pair a HookCoordinator of its own.",
                )
            self.threads[self.threads.index(None)] = me
        return self.meeting.sides[self.threads.index(me)]

    def _forget_ended_threads(self) -> None:
        alive = {thread.ident for thread in threading.enumerate()}
        for number, thread in enumerate(self.threads):
            if thread not in alive:
                self.threads[number] = None
                self.meeting.leave(self.meeting.sides[number], self.meeting.sides[number].role or COMM)


class _End:
    """How a side has ended."""

    result: object = None
    error: BaseException | None = None


_coordinators: weakref.WeakSet[HookCoordinator] = weakref.WeakSet()


def _begin_anew_after_fork() -> None:
    """Forget, in a child process, the sides that a coordinator had.

    A child has neither the other threads nor what they were about, and a lock that one of them held stays locked.
    """
    for coordinator in list(_coordinators):
        coordinator._condition = threading.Condition()
        coordinator._run, coordinator._enabled = _ByHand(), None


os.register_at_fork(after_in_child=_begin_anew_after_fork)


def _first_line(error: BaseException) -> str:
    text = str(error).partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _check_role(role: object) -> None:
    if not isinstance(role, str) or role not in (COMPUTE, COMM):
        raise ArgumentError("There is no such role.", expected=f"{COMPUTE!r} or {COMM!r}", got=describe(role))


def _checked_timeout(timeout: object) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise ArgumentTypeError("`timeout` is in seconds.", expected="a number", got=describe(timeout))
    if not math.isfinite(timeout) or not 0 < timeout <= threading.TIMEOUT_MAX:
        raise ArgumentError("Every wait has a deadline.", expected="a number of seconds above 0", got=describe(timeout))
    return float(timeout)
