"""A coordinator with two threads and no framework: order, failures at every hook, deadlines, its own thread."""

from __future__ import annotations

import contextvars
import copy
import gc
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hyper_parallel import HookCoordinator, HyperParallelError, get_torch_platform, overlap_forward_backward
from hyper_parallel.core.parallel.pipeline.failures import OtherSideError
from hyper_parallel.platform.communication.sync_hook import COMM, COMPUTE, Hook, meet
from hyper_parallel.platform.selection import _forget
from support.campaign import share

LONG = 30.0  # no test waits for it


@pytest.fixture(autouse=True)
def pytorch_is_chosen() -> Any:
    """MindSpore, which other tests of this process import, would have one side work at a time."""
    pytest.importorskip("torch")
    get_torch_platform()
    yield
    _forget()


def hooks(num_layers: int, is_backward: bool) -> list[Hook]:
    found = [Hook(name, is_backward) for _ in range(num_layers) for name in "ABCD"]
    return found[::-1] if is_backward else found


def chunk(
    coordinator: HookCoordinator, num_layers: int, is_backward: bool, before_hook: Callable[[int], object]
) -> Callable[[], str]:
    """A side that comes to all hooks of its layers; `before_hook(k)` is called before the k-th."""

    def run() -> str:
        for at, hook in enumerate(hooks(num_layers, is_backward)):
            before_hook(at)
            meet(hook, coordinator)
        before_hook(4 * num_layers)
        return "backward" if is_backward else "forward"

    return run


def enqueued(num_forward: int, num_backward: int, pause: Callable[[], object]) -> list[tuple[str, int]]:
    """Who enqueued which of its parts, in order, with these layers on each side; a part is written down when it is through."""
    coordinator = HookCoordinator(LONG)
    log: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[int], None]:
        def before_hook(at: int) -> None:
            pause()
            log.append((name, at))

        return before_hook

    results = overlap_forward_backward(
        chunk(coordinator, num_forward, False, note("forward")),
        chunk(coordinator, num_backward, True, note("backward")),
        coordinator,
    )
    assert results == ("forward", "backward")
    return log


def order_of(num_forward: int, num_backward: int) -> list[tuple[str, int]]:
    """Parts of both sides that have an order: all but what comes before the first meeting and after the last."""
    log = []
    for at in range(1, min(4 * num_forward, 4 * num_backward - 1)):
        two = [("forward", at), ("backward", at + 1)]
        log += two if at % 2 else two[::-1]  # forward communicates after A and C, when backward has come to C and A
    return log


@pytest.mark.parametrize("seed", share(10_000, 40))
def test_communication_comes_first_at_every_hook_whatever_the_delays(seed: int) -> None:
    draw = random.Random(seed)
    num_forward, num_backward = draw.randint(0, 8), draw.randint(0, 8)
    log = enqueued(num_forward, num_backward, lambda: time.sleep(draw.choice((0, 0, 1e-5, 1e-4))))
    ordered = order_of(num_forward, num_backward)
    assert [entry for entry in log if entry in ordered] == ordered
    assert len(log) == 4 * num_forward + 4 * num_backward + 2


@pytest.mark.parametrize(("num_forward", "num_backward"), [(f, b) for f in range(1, 9) for b in (1, f, 8)])
def test_the_order_is_the_same_for_one_to_eight_layers_on_either_side(num_forward: int, num_backward: int) -> None:
    log = enqueued(num_forward, num_backward, lambda: None)
    ordered = order_of(num_forward, num_backward)
    assert [entry for entry in log if entry in ordered] == ordered


class Stop(BaseException):
    pass


EVERY_HOOK = [
    (side, at) for side in ("forward", "backward") for at in range(9)
]  # two layers, and the end of the function


@pytest.mark.parametrize("kind", [ValueError, Stop, KeyboardInterrupt])
@pytest.mark.parametrize(("failing", "at"), EVERY_HOOK)
def test_an_error_at_any_hook_is_raised_when_both_sides_have_ended(failing: str, at: int, kind: type) -> None:
    coordinator = HookCoordinator(LONG)
    error, ended = kind("broken"), []

    def side(name: str) -> Callable[[], None]:
        def fail(now: int) -> None:
            if name == failing and now == at:
                raise error

        run = chunk(coordinator, 2, name == "backward", fail)

        def until_its_end() -> None:
            try:
                run()
            finally:
                ended.append(name)

        return until_its_end

    with pytest.raises(kind) as caught:
        overlap_forward_backward(side("forward"), side("backward"), coordinator)
    assert caught.value is error
    assert sorted(ended) == ["backward", "forward"]
    other = "forward" if failing == "backward" else "backward"
    let_go = [note for note in getattr(error, "__notes__", []) if f"The {other} side raised as well" in note]
    # Backward is one hook ahead: where it fails at its end, or forward at its own, the other side may be through.
    if at < 7:
        assert let_go
        assert isinstance(error.__context__, OtherSideError)
        assert error.__context__.__cause__ is None, "no cycle"
    assert not coordinator.enabled
    assert overlap_forward_backward(lambda: 1, lambda: 2, coordinator) == (1, 2)


@pytest.mark.parametrize(("late", "at"), [(side, at) for side, at in EVERY_HOOK if at < 8])
def test_a_side_that_does_not_come_to_a_hook_in_time_is_named_with_both_last_hooks(late: str, at: int) -> None:
    coordinator = HookCoordinator(timeout=0.02)
    gave_up = threading.Event()
    stuck = []

    def side(name: str) -> Callable[[], None]:
        def wait_for_ever(now: int) -> None:
            if name == late and now == at:
                stuck.append(gave_up.wait(LONG))

        run = chunk(coordinator, 2, name == "backward", wait_for_ever)

        def until_its_end() -> None:
            try:
                run()
            finally:
                if name != late:
                    gave_up.set()

        return until_its_end

    # Backward passes D, its first hook, and waits at C.
    expected = "hook C of backward" if late == "forward" and at == 0 else "hook"
    with pytest.raises(TimeoutError) as caught:
        overlap_forward_backward(side("forward"), side("backward"), coordinator)
    assert stuck == [True], "the late side has ended as well"
    assert isinstance(caught.value, HyperParallelError)
    text = str(caught.value)
    assert f"for the {late} side" in text
    assert "0.02 s" in text
    assert expected in text
    assert f"{late} has met no hook" in text if at == 0 else f"{late} was last at hook" in text
    assert "in wait (threading.py" in text, "where the late side is"


@pytest.mark.parametrize("seed", share(3_000, 12))
def test_a_failure_at_any_hook_ends_both_sides_with_one_to_eight_layers_on_either(seed: int) -> None:
    """An error, one that is no `Exception`, or a side that stays away, at a random hook; afterwards the coordinator is as new."""
    draw = random.Random(seed)
    numbers = {"forward": draw.randint(1, 8), "backward": draw.randint(1, 8)}
    failing, kind = draw.choice(list(numbers)), draw.choice([ValueError, Stop, None])
    at = draw.randint(0, 4 * numbers[failing])
    coordinator = HookCoordinator(LONG if kind else 0.2)
    gave_up, ended = threading.Event(), []
    error = None if kind is None else kind("broken")

    def side(name: str) -> Callable[[], None]:
        def fail(now: int) -> None:
            if (name, now) != (failing, at):
                return
            if error is not None:
                raise error
            gave_up.wait(LONG)

        run = chunk(coordinator, numbers[name], name == "backward", fail)

        def until_its_end() -> None:
            try:
                run()
            finally:
                ended.append(name)
                if name != failing:
                    gave_up.set()

        return until_its_end

    raised: BaseException | None = None
    try:
        overlap_forward_backward(side("forward"), side("backward"), coordinator)
    except BaseException as caught:
        raised = caught
    if error is not None:
        assert raised is error
    elif raised is None:
        assert ended[0] != failing, "the other one was through and did not wait"
    else:
        assert isinstance(raised, TimeoutError), raised
        assert f"for the {failing} side" in str(raised)
    assert sorted(ended) == ["backward", "forward"]
    assert not coordinator.enabled
    assert overlap_forward_backward(lambda: 1, lambda: 2, coordinator) == (1, 2)


def test_of_two_errors_the_first_is_raised_and_the_other_attached() -> None:
    coordinator = HookCoordinator(LONG)
    first_raised = threading.Event()

    def forward() -> None:
        try:
            raise ValueError("first")
        finally:
            first_raised.set()

    def backward() -> None:
        first_raised.wait(LONG)
        while coordinator._run.failure is None:
            time.sleep(1e-4)
        raise KeyError("second")

    with pytest.raises(ValueError, match="first") as caught:
        overlap_forward_backward(forward, backward, coordinator)
    assert caught.value.__notes__ == ["The backward side raised as well: KeyError: 'second'"]
    assert isinstance(caught.value.__context__, KeyError)


def test_an_error_that_has_a_cause_keeps_it() -> None:
    coordinator = HookCoordinator(LONG)

    def forward() -> None:
        raise ValueError("outer") from OSError("the cause")

    with pytest.raises(ValueError, match="outer") as caught:
        overlap_forward_backward(forward, chunk(coordinator, 1, True, lambda at: time.sleep(0.001)), coordinator)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_failure_that_a_side_swallows_is_raised_all_the_same() -> None:
    coordinator = HookCoordinator(timeout=0.02)

    def forward() -> str:
        try:
            meet(Hook("A", False), coordinator)
        except TimeoutError:
            return "all is well"
        return "met"

    given_up = threading.Event()
    with pytest.raises(TimeoutError):
        overlap_forward_backward(forward, lambda: given_up.wait(0.2), coordinator)


def test_abort_frees_whoever_waits_and_is_what_is_raised() -> None:
    coordinator = HookCoordinator(LONG)
    reason = ConnectionError("a rank is gone")

    def backward() -> None:
        coordinator.abort(reason)
        coordinator.abort(KeyError("later"))

    with pytest.raises(ConnectionError) as caught:
        overlap_forward_backward(chunk(coordinator, 1, False, lambda at: None), backward, coordinator)
    assert caught.value is reason


def test_an_interrupt_while_backward_runs_on_waits_for_it() -> None:
    coordinator = HookCoordinator(LONG)
    forward_is_over, ended = threading.Event(), []

    def backward() -> None:
        forward_is_over.wait(LONG)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        while coordinator._run.failure is None:
            time.sleep(1e-3)
        ended.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            overlap_forward_backward(forward_is_over.set, backward, coordinator)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [True]


def test_both_sides_run_at_the_same_time_before_their_first_hook() -> None:
    both = threading.Barrier(2)
    coordinator = HookCoordinator(LONG)
    assert set(overlap_forward_backward(lambda: both.wait(LONG), lambda: both.wait(LONG), coordinator)) == {0, 1}


def test_one_thread_serves_all_overlaps_of_a_coordinator_and_ends_with_it() -> None:
    coordinator = HookCoordinator(LONG)
    threads = {overlap_forward_backward(lambda: 0, threading.current_thread, coordinator)[1] for _ in range(3)}
    (thread,) = threads
    assert thread is not threading.current_thread()
    assert thread.daemon
    del coordinator
    gc.collect()
    thread.join(LONG)
    assert not thread.is_alive()


def test_what_the_sides_hold_is_let_go_after_a_failure() -> None:
    coordinator = HookCoordinator(LONG)

    class Model:
        pass

    freed = threading.Event()

    def overlap() -> None:
        import weakref

        model = Model()
        weakref.finalize(model, freed.set)

        def backward() -> None:
            raise ValueError(str(model))

        overlap_forward_backward(chunk(coordinator, 1, False, lambda at: model), backward, coordinator)

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="Model"):
            overlap()
        deadline = time.monotonic() + LONG  # the worker lets go of a job a moment after it is done
        while not freed.is_set() and time.monotonic() < deadline:
            time.sleep(1e-3)
        assert freed.is_set()
    finally:
        gc.enable()


def test_two_coordinators_run_at_once_in_two_threads() -> None:
    logs: dict[int, list[tuple[str, int]]] = {}

    def overlap(number: int) -> None:
        logs[number] = enqueued(number, 3, lambda: time.sleep(1e-5))

    threads = [threading.Thread(target=overlap, args=(number,)) for number in (2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    for number in (2, 4):
        ordered = order_of(number, 3)
        assert [entry for entry in logs[number] if entry in ordered] == ordered


def test_an_overlap_inside_of_a_side_needs_a_coordinator_of_its_own() -> None:
    outer, inner = HookCoordinator(LONG), HookCoordinator(LONG)

    def both(coordinator: HookCoordinator) -> tuple[str, str]:
        return overlap_forward_backward(
            chunk(coordinator, 1, False, lambda at: None), chunk(coordinator, 1, True, lambda at: None), coordinator
        )

    pair = ("forward", "backward")
    assert overlap_forward_backward(lambda: both(inner), lambda: 2, outer) == (pair, 2)
    assert overlap_forward_backward(lambda: 1, lambda: both(inner), outer) == (1, pair)
    for side in ((lambda: both(outer), lambda: 2), (lambda: 1, lambda: both(outer))):
        with pytest.raises(RuntimeError, match="one overlap at a time"):
            overlap_forward_backward(*side, outer)


def test_hooks_in_another_thread_of_backward_are_those_of_the_backward_side() -> None:
    # On a device autograd may run nodes in a thread that it keeps for it.
    coordinator = HookCoordinator(LONG)
    log: list[tuple[str, int]] = []
    in_a_thread_of_its_own = chunk(coordinator, 2, True, lambda at: log.append(("backward", at)))

    def backward() -> str:
        thread = threading.Thread(target=in_a_thread_of_its_own)
        thread.start()
        thread.join(LONG)
        return "backward"

    forward = chunk(coordinator, 2, False, lambda at: log.append(("forward", at)))
    assert overlap_forward_backward(forward, backward, coordinator) == ("forward", "backward")
    ordered = order_of(2, 2)
    assert [entry for entry in log if entry in ordered] == ordered


def test_a_region_that_is_recomputed_in_backward_meets_as_well() -> None:
    # Its forward hooks come on the backward side; it may stop after C, where backward goes on with D.
    coordinator = HookCoordinator(LONG)

    def backward() -> str:
        for hook in (*[Hook(name, False) for name in "ABC"], *[Hook(name, True) for name in "DCBA"]):
            meet(hook, coordinator)
        return "backward"

    assert overlap_forward_backward(chunk(coordinator, 3, False, lambda at: None), backward, coordinator) == (
        "forward",
        "backward",
    )


def test_context_variables_of_the_caller_are_those_of_both_sides() -> None:
    variable = contextvars.ContextVar("variable", default="nothing")
    token = variable.set("the caller's")
    try:
        assert overlap_forward_backward(variable.get, variable.get, HookCoordinator(LONG)) == ("the caller's",) * 2
    finally:
        variable.reset(token)


# By hand: two threads that call the methods themselves.


def in_two_threads(one: Callable[[], Any], two: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None, None]

    def run(number: int, function: Callable[[], Any]) -> None:
        try:
            results[number] = function()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(n, f)) for n, f in enumerate((one, two))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    return results


def test_by_hand_who_communicates_comes_first_each_time() -> None:
    coordinator = HookCoordinator(LONG)
    for _ in range(2):  # other threads, the same coordinator
        log: list[str] = []

        def sides(role: str, log: list[str] = log) -> Callable[[], None]:
            def run() -> None:
                for _ in range(20):
                    coordinator.rendezvous(role)
                    log.append(role)
                    coordinator.notify_dispatched(role)

            return run

        in_two_threads(sides(COMM), sides(COMPUTE))
        assert log == [COMM, COMPUTE] * 20


def test_by_hand_one_that_comes_alone_is_told_when_the_deadline_has_passed() -> None:
    coordinator = HookCoordinator(timeout=0.01)
    with pytest.raises(TimeoutError, match=r"second has met no hook"):
        coordinator.rendezvous(COMM)
    with pytest.raises(RuntimeError, match="SideTimeoutError"):
        coordinator.rendezvous(COMPUTE)
    coordinator.enabled = True  # begins anew
    with pytest.raises(TimeoutError):
        coordinator.rendezvous(COMPUTE)


def test_by_hand_abort_frees_the_other_thread() -> None:
    coordinator = HookCoordinator(LONG)

    def abort() -> None:
        while coordinator._run.meeting.sides[0].wants is None:
            time.sleep(1e-4)
        coordinator.abort(ValueError("broken"))

    waited, _ = in_two_threads(lambda: coordinator.rendezvous(COMM), abort)
    assert isinstance(waited, OtherSideError)
    assert "ValueError: broken" in str(waited)
    assert isinstance(waited.__cause__, ValueError)


def test_a_third_thread_is_told_that_a_coordinator_is_for_two() -> None:
    coordinator, have_met, third_has_come = HookCoordinator(LONG), threading.Barrier(3), threading.Event()

    def side(role: str) -> Callable[[], None]:
        def run() -> None:
            coordinator.rendezvous(role)
            coordinator.notify_dispatched(role)
            have_met.wait(LONG)
            third_has_come.wait(LONG)

        return run

    threads = [threading.Thread(target=side(role)) for role in (COMM, COMPUTE)]
    for thread in threads:
        thread.start()
    have_met.wait(LONG)
    with pytest.raises(RuntimeError, match="third thread"):
        coordinator.rendezvous(COMM)
    third_has_come.set()
    for thread in threads:
        thread.join(LONG)


def test_disabled_nobody_waits() -> None:
    coordinator = HookCoordinator(LONG)
    assert not coordinator.enabled
    meet(Hook("A", False), coordinator)
    coordinator.enabled = False
    coordinator.rendezvous(COMM)
    coordinator.notify_dispatched(COMM)
    seen = overlap_forward_backward(lambda: coordinator.enabled, lambda: coordinator.enabled, coordinator)
    assert seen == (True, True)
    assert not coordinator.enabled


# Arguments, copies, processes.


@pytest.mark.parametrize("wrong", ["long", None, True, 0, -1, float("nan"), float("inf"), 1e30])
def test_a_timeout_is_a_number_of_seconds(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"(?s)xpected.*got"):
        HookCoordinator(wrong)


def test_other_arguments_are_refused_in_words() -> None:
    coordinator = HookCoordinator()
    assert coordinator.timeout == 300.0
    for wrong in ("compute ", None, 3):
        with pytest.raises(ValueError, match="'compute' or 'comm'"):
            coordinator.rendezvous(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'compute' or 'comm'"):
            coordinator.notify_dispatched(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="exception"):
        coordinator.abort(ValueError)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="True or False"):
        coordinator.enabled = 1  # type: ignore[assignment]
    with pytest.raises(TypeError, match="`backward` is called"):
        overlap_forward_backward(lambda: 1, 2, coordinator)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="HookCoordinator"):
        overlap_forward_backward(lambda: 1, lambda: 2, None)  # type: ignore[arg-type]


def test_a_copied_model_meets_at_the_same_coordinator_and_a_pickled_one_at_its_own() -> None:
    coordinator = HookCoordinator(7.0)
    assert copy.deepcopy({"layers": [coordinator]})["layers"][0] is coordinator
    assert copy.copy(coordinator) is coordinator
    pickled = pickle.loads(pickle.dumps(coordinator))  # noqa: S301 - our own
    assert pickled.timeout == 7.0
    assert "7" in repr(pickled)


def test_a_forked_child_runs_overlaps_on_a_thread_of_its_own() -> None:
    coordinator = HookCoordinator(LONG)

    def answer() -> int:
        pair = overlap_forward_backward(
            chunk(coordinator, 1, False, lambda at: None), chunk(coordinator, 1, True, lambda at: None), coordinator
        )
        return 7 if pair == ("forward", "backward") else 1

    assert answer() == 7
    child = 0

    def fork() -> None:
        nonlocal child
        child = os.fork()
        if child == 0:
            os._exit(code_of(answer))

    def code_of(function: Callable[[], int]) -> int:
        try:
            return function()
        except BaseException:
            return 2

    # While an overlap runs, as a DataLoader of the forward side does.
    overlap_forward_backward(fork, lambda: None, coordinator)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert answer() == 7
