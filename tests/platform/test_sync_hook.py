"""Forward and backward that meet at hooks in their graphs: one text, every framework."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import HookCoordinator, overlap_forward_backward
from hyper_parallel.platform.selection import _choose, _forget
from support.backends import Backend
from support.campaign import share

covers = pytest.mark.covers
LONG = 60.0
NAME = "differentiable_sync_hook"


class Recorder:
    """A coordinator of a user's own: writes down what it is told, and lets everybody pass."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.calls: list[tuple[str, str]] = []

    def notify_dispatched(self, role: str) -> None:
        self.calls.append(("leave", role))

    def rendezvous(self, role: str) -> None:
        self.calls.append(("enter", role))


@pytest.fixture(autouse=True)
def is_chosen(request: pytest.FixtureRequest) -> Any:
    if "backend" in request.fixturenames:
        _choose(request.getfixturevalue("backend").platform.platform_type)
    yield
    _forget()


def through_hooks(platform: Any, x: Any, names: str, coordinator: Any) -> Any:
    for name in names:
        x = platform.differentiable_sync_hook(x, name, coordinator) * 2.0
    return x


@covers(NAME)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_hook_is_the_identity_on_value_and_gradient(backend: Backend, platform: Any, enabled: bool) -> None:
    x = backend.tensor([[1.0, -2.0], [0.5, 3.0]])
    for name in "ABCD":
        coordinator = Recorder(enabled)
        assert np.array_equal(
            backend.numbers(platform.differentiable_sync_hook(x, name, coordinator)), backend.numbers(x)
        )
        (grad,) = backend.grad_of(
            lambda t, name=name, c=coordinator: platform.differentiable_sync_hook(t * t, name, c) * 3.0, x
        )
        assert np.array_equal(grad, 6.0 * backend.numbers(x))
        assert bool(coordinator.calls) is enabled


@covers(NAME)
def test_forward_and_backward_tell_their_own_roles_and_backward_the_reverse(backend: Backend, platform: Any) -> None:
    comm, compute = "comm", "compute"
    coordinator = Recorder()
    backend.grad_of(lambda x: through_hooks(platform, x, "ABCD", coordinator), backend.tensor([1.0]))
    forward = [(compute, comm), (comm, compute)] * 2
    backward = [(entered, left) for left, entered in reversed(forward)]
    expected = [call for left, entered in forward + backward for call in (("leave", left), ("enter", entered))]
    assert coordinator.calls == expected


@covers(NAME)
def test_a_graph_made_while_the_coordinator_was_disabled_meets_later(backend: Backend, platform: Any) -> None:
    coordinator = Recorder(enabled=False)
    with backend.recording():
        x = platform.new_zero_parameter((2,), "float32", True, None)
        loss = through_hooks(platform, x, "AB", coordinator).sum()
        coordinator.enabled = True
        backend.backward(loss)
    assert [role for what, role in coordinator.calls if what == "enter"] == ["comm", "compute"]
    assert backend.get_grad(x).tolist() == [4.0, 4.0]


@covers(NAME)
def test_wrong_arguments_of_a_hook_are_refused_in_words(backend: Backend, platform: Any) -> None:
    x, coordinator = backend.tensor([1.0]), HookCoordinator()
    for wrong in ("E", "a", "AB", ""):
        with pytest.raises(ValueError, match="'A' \\(before dispatch\\)"):
            platform.differentiable_sync_hook(x, wrong, coordinator)
    with pytest.raises(TypeError, match="name of a hook"):
        platform.differentiable_sync_hook(x, 1, coordinator)
    with pytest.raises(TypeError, match="takes a tensor"):
        platform.differentiable_sync_hook([1.0], "A", coordinator)
    distributed = type("DistributedTensor", (platform.Tensor,), {"to_local": None})
    if backend.name.startswith("torch"):
        with pytest.raises(TypeError, match="this rank's own values"):
            platform.differentiable_sync_hook(x.as_subclass(distributed), "A", coordinator)
    for nobody in (None, HookCoordinator, "coordinator"):
        with pytest.raises(TypeError, match="takes a coordinator"):
            platform.differentiable_sync_hook(x, "A", nobody)


@covers(NAME)
def test_outside_of_an_overlap_hooks_are_passed(backend: Backend, platform: Any) -> None:
    coordinator = HookCoordinator(timeout=0.01)
    (grad,) = backend.grad_of(lambda x: through_hooks(platform, x, "ABCD", coordinator), backend.tensor([1.0]))
    assert grad.tolist() == [16.0]
    with platform.no_grad():
        assert backend.numbers(through_hooks(platform, backend.tensor([1.0]), "A", coordinator)).tolist() == [2.0]


class Chunk:
    """Layers with hooks, and a note of each part that is run, forward (the hook before it) and backward (the hook after it)."""

    def __init__(self, backend: Backend, num_layers: int, coordinator: Any, log: list[tuple[str, int]]) -> None:
        self.backend, self.platform, self.coordinator = backend, backend.platform, coordinator
        values = np.linspace(0.5, 1.5, 4 * num_layers)
        self.weights = [self.platform.new_zero_parameter((3,), "float32", True, None) for _ in values]
        with self.platform.no_grad():
            for weight, value in zip(self.weights, values, strict=True):
                self.platform.load_into_param(weight, backend.tensor(np.full(3, value)))
        self.log, self.fail = log, None  # type: tuple[Any, Any]
        outer = self

        class Note(self.platform.Function):  # type: ignore[misc, name-defined]
            @staticmethod
            def forward(ctx: Any, x: Any, number: int) -> Any:
                ctx.number = number
                outer.passed("forward", number)
                return x * 1.0

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                outer.passed("backward", ctx.number)
                return grad * 1.0, None

        self.note = Note

    def passed(self, side: str, number: int) -> None:
        at = number if side == "forward" else len(self.weights) - 1 - number
        self.log.append((side, at))
        if self.fail is not None:
            self.fail(side, at)

    def __call__(self) -> Any:
        x = self.backend.tensor([0.5, -1.0, 2.0])
        for number, weight in enumerate(self.weights):
            x = self.note.apply(x * weight, number)
            x = self.platform.differentiable_sync_hook(x, "ABCD"[number % 4], self.coordinator)
        return (x * x).sum()

    def gradients(self) -> list[np.ndarray]:
        return [self.backend.get_grad(weight) for weight in self.weights]


def expected_gradients(backend: Backend, num_layers: int) -> list[np.ndarray]:
    chunk = Chunk(backend, num_layers, HookCoordinator(LONG), [])
    if num_layers:
        backend.backward(chunk())
    return chunk.gradients()


def check_overlap(
    backend: Backend, num_forward: int, num_backward: int, pause: Callable[[], object] | None = None
) -> None:
    """Parts of both sides are enqueued in the order of the hooks; gradients are those of one side after the other."""
    coordinator, log = HookCoordinator(LONG), []  # type: tuple[Any, list[tuple[str, int]]]
    with backend.recording():
        before, now = (Chunk(backend, number, coordinator, log) for number in (num_backward, num_forward))
        wanted = expected_gradients(backend, num_backward), expected_gradients(backend, num_forward)
        loss = before() if num_backward else None
        log.clear()
        if pause is not None:
            before.fail = now.fail = lambda side, at: pause()
        next_loss, result = overlap_forward_backward(
            now, lambda: backend.backward(loss) if num_backward else "none", coordinator
        )
        assert result == (None if num_backward else "none")
        # A part stands before its hook, which backward passes first. Of the k-th of each the one that communicates is enqueued first.
        ordered = [
            entry
            for at in range(1, min(4 * num_forward, 4 * num_backward - 1))
            for entry in sorted([("forward", at), ("backward", at)], reverse=at % 2 == 1)
        ]
        assert [entry for entry in log if entry in ordered] == ordered
        if num_forward:
            backend.backward(next_loss)
    for chunk, gradients in zip((before, now), wanted, strict=True):
        assert all(np.array_equal(got, want) for got, want in zip(chunk.gradients(), gradients, strict=True))


@covers(NAME)
@pytest.mark.parametrize(
    ("num_forward", "num_backward"),
    [*((number, number) for number in range(1, 9)), (3, 1), (1, 3), (8, 5), (5, 8), (1, 8), (8, 1), (2, 0), (0, 2)],
)
def test_an_overlap_takes_turns_and_gives_the_gradients_of_one_after_the_other(
    backend: Backend, platform: Any, num_forward: int, num_backward: int
) -> None:
    check_overlap(backend, num_forward, num_backward)


@pytest.mark.parametrize("seed", share(10_000, 4))
def test_an_overlap_takes_turns_whatever_the_delays(backend: Backend, platform: Any, seed: int) -> None:
    draw = random.Random(seed)
    pause = lambda: time.sleep(draw.choice((0, 0, 1e-5, 1e-4)))  # noqa: E731 - an argument
    check_overlap(backend, draw.randint(0, 8), draw.randint(0, 8), pause)


class Stop(BaseException):
    pass


@covers(NAME)
@pytest.mark.parametrize("kind", [ValueError, Stop])
@pytest.mark.parametrize(("failing", "at"), [(side, at) for side in ("forward", "backward") for at in range(4)])
def test_an_error_at_any_hook_in_a_graph_ends_both_sides(
    backend: Backend, platform: Any, failing: str, at: int, kind: type[BaseException]
) -> None:
    coordinator, log = HookCoordinator(LONG), []  # type: tuple[Any, list[tuple[str, int]]]
    error = kind("broken")

    def fail(side: str, now: int) -> None:
        if (side, now) == (failing, at):
            raise error

    with backend.recording():
        before, now = Chunk(backend, 1, coordinator, log), Chunk(backend, 1, coordinator, log)
        loss = before()
        before.fail = now.fail = fail
        with pytest.raises(kind, match="broken") as caught:
            overlap_forward_backward(now, lambda: backend.backward(loss), coordinator)
    assert caught.value is error
    other = "forward" if failing == "backward" else "backward"
    if at < 3:  # after the last hook the other side may be through
        assert any(f"The {other} side raised as well" in note for note in error.__notes__)
    again(backend, coordinator)


@covers(NAME)
@pytest.mark.parametrize(("late", "at"), [(side, at) for side in ("forward", "backward") for at in range(4)])
def test_a_side_that_is_late_at_a_hook_in_a_graph_is_named(backend: Backend, platform: Any, late: str, at: int) -> None:
    coordinator = HookCoordinator(timeout=0.3)

    def stay(side: str, now: int) -> None:
        if (side, now) == (late, at):
            wait_for_failure(coordinator)

    with backend.recording():
        before, now = Chunk(backend, 1, coordinator, []), Chunk(backend, 1, coordinator, [])
        loss = before()
        before.fail = now.fail = stay
        with pytest.raises(TimeoutError, match=f"(?s)for the {late} side.*hook . of "):
            overlap_forward_backward(now, lambda: backend.backward(loss), coordinator)
    again(backend, coordinator)


def wait_for_failure(coordinator: Any, other_has_ended: threading.Event | None = None) -> None:
    end = time.monotonic() + LONG
    while coordinator._run.failure is None and time.monotonic() < end:
        if other_has_ended is not None and other_has_ended.is_set():
            return
        time.sleep(1e-3)


@pytest.mark.parametrize("seed", share(300, 3))
def test_a_failure_at_any_hook_in_graphs_of_one_to_eight_layers_leaves_the_coordinator_as_new(
    backend: Backend, platform: Any, seed: int
) -> None:
    """Unequal numbers of layers; an error, one that is no `Exception`, or a side that stays away."""
    draw = random.Random(seed)
    numbers = {"forward": draw.randint(1, 8), "backward": draw.randint(1, 8)}
    failing, kind = draw.choice(list(numbers)), [ValueError, Stop, None][seed % 3]
    at = draw.randint(0, 4 * numbers[failing] - 1)
    coordinator, gave_up, was_met = HookCoordinator(LONG if kind else 0.2), threading.Event(), []

    def fail(side: str, now: int) -> None:
        if (side, now) != (failing, at):
            return
        was_met.append(side)
        if kind is not None:
            raise kind("broken")
        wait_for_failure(coordinator, gave_up)

    def until_its_end(name: str, function: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            try:
                return function()
            finally:
                if name != failing:
                    gave_up.set()

        return run

    with backend.recording():
        before, now = (Chunk(backend, numbers[name], coordinator, []) for name in ("backward", "forward"))
        loss = before()
        before.fail = now.fail = fail
        raised: list[BaseException] = []
        try:
            overlap_forward_backward(
                until_its_end("forward", now), until_its_end("backward", lambda: backend.backward(loss)), coordinator
            )
        except BaseException as error:
            raised.append(error)
    assert was_met == [failing]
    if kind is not None:
        assert [type(each) for each in raised] == [kind]
    else:  # none where the other side was through already
        assert all(isinstance(each, TimeoutError) and f"for the {failing} side" in str(each) for each in raised)
    again(backend, coordinator)


def again(backend: Backend, coordinator: Any) -> None:
    """After a failure the same coordinator and new graphs give right gradients."""
    coordinator._timeout = LONG
    wanted = expected_gradients_in(backend, 1)
    with backend.recording():
        before, now = Chunk(backend, 1, coordinator, []), Chunk(backend, 1, coordinator, [])
        loss = before()
        overlap_forward_backward(now, lambda: backend.backward(loss), coordinator)
    assert all(np.array_equal(got, want) for got, want in zip(before.gradients(), wanted, strict=True))


def expected_gradients_in(backend: Backend, num_layers: int) -> list[np.ndarray]:
    with backend.recording():
        return expected_gradients(backend, num_layers)


@pytest.mark.parametrize("seed", share(1000, 2))
def test_dropout_on_one_side_while_the_other_recomputes_a_region(backend: Backend, platform: Any, seed: int) -> None:
    # Hooks inside of the region: what runs again waits for the other side in the middle, and that one draws.
    coordinator = HookCoordinator(LONG)
    x = backend.tensor(np.linspace(0.5, 2.0, 64))

    def layer(x: Any) -> Any:
        for name in "ABCD":
            x = backend.dropout(x, 0.1)
            x = x / (x * x + 1.0)
            x = platform.differentiable_sync_hook(x, name, coordinator)
        return x

    def chunk(weight: Any, is_region: bool) -> Any:
        y = x * weight
        for _ in range(2):
            y = platform.checkpoint(layer, y) if is_region else layer(backend.dropout(y, 0.1))
        return (y * y).sum()

    def steps(in_turn: bool) -> list[np.ndarray]:
        platform.manual_seed(seed)
        first, second, third = (parameter(backend, np.ones(64)) for _ in range(3))
        with backend.recording():
            loss = chunk(first, True)
            if in_turn:
                backend.backward(loss)
                following = chunk(second, False)
            else:
                following, _ = overlap_forward_backward(
                    lambda: chunk(second, False), lambda: backend.backward(loss), coordinator
                )
            backend.backward(following)
            backend.backward(chunk(third, False))  # and numbers go on as they do in turn
        return [backend.get_grad(weight) for weight in (first, second, third)]

    state = platform.get_rng_state()
    try:
        wanted, got = steps(True), steps(False)
    finally:
        platform.set_rng_state(state)
    for want, have in zip(wanted, got, strict=True):
        assert np.array_equal(want, have)
        assert np.isfinite(want).all()
        assert 0 < np.count_nonzero(want) < want.size


def parameter(backend: Backend, values: np.ndarray) -> Any:
    weight = backend.platform.new_zero_parameter(values.shape, "float32", True, None)
    with backend.platform.no_grad():
        backend.platform.load_into_param(weight, backend.tensor(values))
    return weight


def test_random_numbers_that_pytorch_s_own_checkpoint_recomputes_are_refused_in_an_overlap() -> None:
    import torch
    import torch.utils.checkpoint

    from hyper_parallel import checkpoint, get_torch_platform
    from hyper_parallel.platform.torch.regions.random_state import drawing

    get_torch_platform()
    x = torch.ones(8, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x.exp(), 0.5).exp()

    checkpoint(layer, x)
    assert drawing.is_used_by_regions
    for use_reentrant in (True, False):
        loss = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant).sum()
        with pytest.raises(RuntimeError, match="hp.checkpoint"):
            overlap_forward_backward(lambda: None, loss.backward, HookCoordinator(LONG))


@pytest.mark.parametrize("names", ["AB", "ACBD", "DDDD", "BA"])
def test_layers_that_call_hooks_in_an_order_of_their_own_hold_nobody_up(backend: Backend, names: str) -> None:
    platform, coordinator = backend.platform, HookCoordinator(LONG)
    weight = parameter(backend, np.ones(2))
    with backend.recording():
        loss = through_hooks(platform, weight * 1.0, names, coordinator).sum()
        overlap_forward_backward(
            lambda: through_hooks(platform, weight * 1.0, names, coordinator),
            lambda: backend.backward(loss),
            coordinator,
        )
    assert backend.get_grad(weight).tolist() == [2.0 ** len(names)] * 2


class OnPyTorch:
    """A layer with hooks, and what an overlap of its forward and a backward of it gives."""

    def __init__(self) -> None:
        import torch

        from hyper_parallel import get_torch_platform

        self.platform = get_torch_platform()
        self.coordinator = HookCoordinator(LONG)
        self.x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
        self.weight = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()

    def layer(self, x: Any) -> Any:
        for name in "ABCD":
            x = self.platform.differentiable_sync_hook((x @ self.weight).tanh(), name, self.coordinator)
        return x

    def check(self, forward: Callable[[Any], Any]) -> None:
        import torch

        (wanted,) = torch.autograd.grad(self.layer(self.x).sum(), self.x)
        for _ in range(3):  # a region that nobody watches is one from its third call on
            loss = forward(self.x).sum()
            self.x.grad = None
            overlap_forward_backward(lambda: forward(self.x), loss.backward, self.coordinator)
            assert torch.equal(self.x.grad, wanted)


@pytest.mark.parametrize("kind", ["region", "nested regions", "PyTorch's", "PyTorch's reentrant"])
def test_a_layer_that_backward_recomputes_meets_forward_with_its_hooks(kind: str) -> None:
    import torch.utils.checkpoint

    from hyper_parallel import checkpoint

    case = OnPyTorch()
    layer = case.layer
    ways: dict[str, Callable[[Any], Any]] = {
        "region": lambda x: checkpoint(layer, x),
        "nested regions": lambda x: checkpoint(lambda y: checkpoint(layer, y), x),
        "PyTorch's": lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False),
        "PyTorch's reentrant": lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True),
    }
    case.check(ways[kind])


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning"
)  # the compiler's own look at what is between two parts
def test_compiled_code_ends_at_a_hook_and_goes_on_after_it() -> None:
    import torch

    case, seen = OnPyTorch(), Recorder(enabled=False)

    def layer(x: Any) -> Any:
        before = case.platform.differentiable_sync_hook(x.exp(), "A", seen)
        return case.platform.differentiable_sync_hook(before.tanh(), "B", seen)

    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_method"])
        return graph

    loss = torch.compile(layer, backend=backend)(case.x).sum()
    assert graphs == [["exp"], ["tanh"]]
    seen.enabled = True
    loss.backward()
    assert [role for what, role in seen.calls if what == "enter"] == ["comm", "compute"]
    with pytest.raises(Exception, match="a hook waits for another thread"):
        torch.compile(lambda x: layer(x), backend=backend, fullgraph=True)(case.x)


def test_second_derivatives_and_two_backwards_pass_through_hooks() -> None:
    import torch

    case = OnPyTorch()

    def twice(loss: Any) -> list[Any]:
        (first,) = torch.autograd.grad(loss, case.x, create_graph=True)
        return [first, *torch.autograd.grad(first.pow(2).sum(), case.x, retain_graph=True)]

    wanted = twice(case.layer(case.x).sum())
    loss = case.layer(case.x).sum()
    for _ in range(2):
        _, found = overlap_forward_backward(lambda: case.layer(case.x), lambda: twice(loss), case.coordinator)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_backward_inside_of_forward_is_on_the_forward_side() -> None:
    import torch

    case = OnPyTorch()

    def forward() -> Any:
        return torch.autograd.grad(case.layer(case.x).sum(), case.x)[0]

    wanted = forward()
    loss = case.layer(case.x).sum()
    found, _ = overlap_forward_backward(forward, loss.backward, case.coordinator)
    assert torch.equal(found, wanted)
    assert torch.equal(case.x.grad, wanted)
