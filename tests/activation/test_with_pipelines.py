"""Several forwards alive in one module: pipeline schedules, any order, and threads. Everything belongs to one forward."""

from __future__ import annotations

import functools
import queue
import random
import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper
from support.campaign import share
from support.region_programs import check_no_mode_left
from support.swapping import Swapping, check_nothing_left
from support.training import Block, same
from support.wrapped import WAYS, Wrap

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STAGES = 3


# -- a pipeline in one process --------------------------------------------------------------------------------------------------


class Action(NamedTuple):
    """One stage does one thing for one micro-batch."""

    is_forward: bool
    stage: int
    batch: int

    def __str__(self) -> str:
        return f"{'F' if self.is_forward else 'B'}{self.batch}@{self.stage}"


class Pipeline:
    """Stages that hand tensors over as processes do: without their graphs."""

    def __init__(self, wrap: Wrap, swapping: Swapping, dropout: float = 0.1) -> None:
        torch.manual_seed(0)
        self.stages = [wrap(Block(16, dropout)).to(swapping.kind) for _ in range(NUM_STAGES)]
        self._swapping = swapping
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}
        self._outputs: dict[tuple[int, int], torch.Tensor] = {}
        self._grads: dict[tuple[int, int], torch.Tensor] = {}
        self.inputs_grad: dict[int, torch.Tensor] = {}

    def run(self, actions: list[Action]) -> list[torch.Tensor]:
        """The gradients of inputs and parameters."""
        for action in actions:
            self.do(action)
        return self.results()

    def do(self, action: Action) -> None:
        (self._forward if action.is_forward else self._backward)(action.stage, action.batch)

    def _forward(self, stage: int, batch: int) -> None:
        given = self._outputs[stage - 1, batch] if stage else self._swapping.randn(2, 4, 16, seed=batch)
        leaf = self._inputs[stage, batch] = given.detach().requires_grad_()
        torch.manual_seed(100 * stage + batch)  # dropout is that of this micro-batch in every schedule
        self._outputs[stage, batch] = self.stages[stage](leaf)

    def _backward(self, stage: int, batch: int) -> None:
        out = self._outputs.pop((stage, batch))
        if stage == NUM_STAGES - 1:
            out.square().mean().backward()
        else:
            out.backward(self._grads.pop((stage, batch)))
        del out
        grad = self._inputs.pop((stage, batch)).grad
        if stage == 0:
            self.inputs_grad[batch] = grad
        else:
            self._grads[stage - 1, batch] = grad

    def results(self) -> list[torch.Tensor]:
        inputs = [self.inputs_grad[batch] for batch in sorted(self.inputs_grad)]
        return [*inputs, *(parameter.grad for stage in self.stages for parameter in stage.parameters())]


def gpipe(num_batches: int, last_first: bool) -> list[Action]:
    """All forwards, then all backwards."""
    forwards = [Action(True, stage, batch) for batch in range(num_batches) for stage in range(NUM_STAGES)]
    order = reversed(range(num_batches)) if last_first else range(num_batches)
    return forwards + [Action(False, stage, batch) for batch in order for stage in reversed(range(NUM_STAGES))]


def one_forward_one_backward(num_batches: int) -> list[Action]:
    """Each stage fills up, then takes turns: the first has the most forwards alive. In the order in which the stages can do it."""
    queues = []
    for stage in range(NUM_STAGES):
        num_first = min(NUM_STAGES - stage, num_batches)
        turns = [(True, batch) for batch in range(num_first)]
        for batch in range(num_batches):
            turns.append((False, batch))
            if batch + num_first < num_batches:
                turns.append((True, batch + num_first))
        queues.append([Action(is_forward, stage, batch) for is_forward, batch in turns])
    return _in_order(queues, lambda ready: ready[0])


def random_order(seed: int, num_batches: int, most_alive: int) -> list[Action]:
    """Any order in which nothing is done before what it needs."""
    choose = random.Random(seed)
    waiting = [
        Action(is_forward, s, b) for is_forward in (True, False) for s in range(NUM_STAGES) for b in range(num_batches)
    ]
    done: list[Action] = []
    while waiting:
        num_alive = sum(1 if action.is_forward else -1 for action in done)
        ready = [action for action in waiting if _can(action, done)]
        fitting = [action for action in ready if not action.is_forward or num_alive < most_alive]
        # With too many alive none may be begun: then the one that is nearest to its end goes on.
        action = choose.choice(fitting) if fitting else max(ready, key=lambda each: (each.stage, -each.batch))
        waiting.remove(action)
        done.append(action)
    return done


def _in_order(queues: list[list[Action]], pick: Callable[[list[Action]], Action]) -> list[Action]:
    done: list[Action] = []
    while any(queues):
        action = pick([turns[0] for turns in queues if turns and _can(turns[0], done)])
        queues[action.stage].pop(0)
        done.append(action)
    return done


def _can(action: Action, done: list[Action]) -> bool:
    if action.is_forward:
        return action.stage == 0 or Action(True, action.stage - 1, action.batch) in done
    if Action(True, action.stage, action.batch) not in done:
        return False
    return action.stage == NUM_STAGES - 1 or Action(False, action.stage + 1, action.batch) in done


SCHEDULES = {
    "1F1B": one_forward_one_backward(6),
    "GPipe": gpipe(4, last_first=False),
    "GPipe, last first": gpipe(4, last_first=True),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_schedule_gives_the_plain_gradients(swapping: Swapping, schedule: str) -> None:
    actions = SCHEDULES[schedule]
    expected = Pipeline(lambda block: block, swapping).run(actions)
    for name, wrap in WAYS.items():
        with swapping.configured(window_bytes="8KiB", prefetch_bytes="16KiB"):
            assert same(Pipeline(wrap, swapping).run(actions), expected), name
        assert name == "recompute" or swapping.offloaded_bytes > 0
        check_nothing_left()
        check_no_mode_left()


def test_in_the_schedule_of_one_forward_one_backward_the_first_stage_has_the_most_alive() -> None:
    """What the tests above are worth."""
    alive, most = [0] * NUM_STAGES, [0] * NUM_STAGES
    for action in SCHEDULES["1F1B"]:
        alive[action.stage] += 1 if action.is_forward else -1
        most[action.stage] = max(most[action.stage], alive[action.stage])
    assert most == [3, 2, 1]
    assert alive == [0, 0, 0]


def test_every_order_of_forwards_and_backwards_gives_the_plain_gradients(swapping: Swapping) -> None:
    """200 random orders (2,000 with HYPER_PARALLEL_CAMPAIGN=full), the ways in turn; a failing one is printed."""
    names = list(WAYS)
    for seed in share(2000, 200):
        actions = random_order(seed, num_batches=2 + seed % 2, most_alive=2 + seed % 5)
        way = names[seed % len(names)]
        expected = Pipeline(lambda block: block, swapping).run(actions)
        with swapping.configured(window_bytes="4KiB" if seed % 2 else "64KiB", prefetch_bytes="8KiB"):
            found = Pipeline(WAYS[way], swapping).run(actions)
        assert same(found, expected), f"seed {seed}, {way}: {' '.join(map(str, actions))}"
        check_nothing_left()
    check_no_mode_left()


# -- threads ----------------------------------------------------------------------------------------------------------------------


class Worker(threading.Thread):
    """Does what it is given, one after the other; the first error is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        torch.set_num_threads(1)  # a thread begins with the default, and other sums with other numbers
        while (job := self.jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self.error = self.error or error

    def end(self) -> None:
        self.jobs.put(None)
        self.join(120)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_every_backward_in_another_thread_than_its_forward(swapping: Swapping, way: str, schedule: str) -> None:
    """One at a time, so that dropout can be compared: threads share the default generator."""
    actions = SCHEDULES[schedule]
    expected = Pipeline(lambda block: block, swapping).run(actions)
    pipeline = Pipeline(WAYS[way], swapping)
    forwards, backwards = Worker(), Worker()
    try:
        for action in actions:
            done = threading.Event()

            def job(action: Action = action, done: threading.Event = done) -> None:
                try:
                    pipeline.do(action)
                finally:
                    done.set()

            (forwards if action.is_forward else backwards).jobs.put(job)
            assert done.wait(60)
    finally:
        forwards.end()
        backwards.end()
    assert same(pipeline.results(), expected)
    check_nothing_left()


@pytest.mark.parametrize("way", WAYS)
def test_forwards_run_in_one_thread_while_backwards_run_in_another(swapping: Swapping, way: str) -> None:
    num_batches = 24

    def make(wrap: Wrap) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(wrap(Block(16, dropout=0.0)) for _ in range(2))).to(swapping.kind)

    plain, expected = make(lambda block: block), []
    for batch in range(num_batches):
        leaf = swapping.randn(2, 4, 16, seed=batch, requires_grad=True)
        plain(leaf).square().mean().backward()
        expected.append(leaf.grad)
    model = make(WAYS[way])
    leaves = [swapping.randn(2, 4, 16, seed=batch, requires_grad=True) for batch in range(num_batches)]
    backwards = Worker()
    room = threading.Semaphore(4)  # so many forwards are alive at most

    def backward(loss: torch.Tensor) -> None:
        try:
            loss.backward()
        finally:
            room.release()

    try:
        for leaf in leaves:
            assert room.acquire(timeout=60)
            backwards.jobs.put(functools.partial(backward, model(leaf).square().mean()))
    finally:
        backwards.end()
    assert same([leaf.grad for leaf in leaves], expected)
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    check_nothing_left()


def test_threads_whose_regions_draw_from_one_generator_recompute_their_own_numbers(swapping: Swapping) -> None:
    """Which numbers a thread gets is a matter of chance; that backward has those of its forward is not."""

    def masked(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        for _ in range(3):
            x = (x * nn.functional.dropout(torch.ones_like(x), 0.5)).tanh()
        return x

    wrong: list[tuple[int, int]] = []
    model = checkpoint_wrapper(masked)

    def work(number: int) -> None:
        torch.set_num_threads(1)
        for step in range(100):
            leaf = swapping.randn(32, 32, seed=100 * number + step, requires_grad=True)
            out = model(leaf)
            (grad,) = torch.autograd.grad(out.sum(), leaf)
            if not torch.equal(grad != 0, out.detach() != 0):  # where one of the masks is 0, both are
                wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
