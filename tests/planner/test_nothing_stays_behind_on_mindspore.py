"""Planning leaves nothing behind on MindSpore: a model that moves all that a forward can move is as one that was never planned."""

from __future__ import annotations

import array
import collections
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore")

from mindspore import Parameter, Tensor, nn, ops  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel._base.errors import StateError  # noqa: E402
from hyper_parallel.platform import selection  # noqa: E402
from hyper_parallel.platform.mindspore.planner.steps import preserved, run_step  # noqa: E402
from support.backends import MindSporeBackend  # noqa: E402

WIDTH = 8


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with MindSporeBackend().active():
        yield
    selection._forget()


def numbers(*shape: int) -> Tensor:
    return Tensor(np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape))


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(WIDTH, WIDTH, weight_init=numbers(WIDTH, WIDTH))
        self.calls = 0

    def construct(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + ops.tanh(self.dense(x)) / self.calls


class Log:
    def __init__(self) -> None:
        self.sum, self.count, self.parts = Tensor(0.0), 0, []


class Restless(nn.Cell):
    """Its forward moves whatever can be moved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.SequentialCell(*(Block() for _ in range(2)))
        self.clipped, self.indexed, self.replaced = (Parameter(numbers(WIDTH) * 2, name=each) for each in "abc")
        self.frozen = nn.Dense(WIDTH, WIDTH, weight_init=numbers(WIDTH, WIDTH))
        self.steps = Parameter(Tensor([0.0]), name="steps", requires_grad=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("buffer", numbers(WIDTH) * 0)
        self.history, self.scalar = numbers(3), Tensor(1.0)
        self.list: list[Any] = []
        self.dict: dict[str, int] = collections.Counter()
        self.set: set[int] = set()
        self.recent: Any = collections.deque(maxlen=2)
        self.log = Log()
        self.bias = np.zeros(WIDTH, dtype=np.float32)
        self.tallies = array.array("d", [0.0])
        self.generators = [random.Random(0), np.random.default_rng(0)]
        self.generator = mindspore.Generator()
        self.set_train()

    def construct(self, x: Tensor) -> Tensor:
        number = len(self.list)
        ops.assign(self.clipped, ops.clamp(self.clipped, -0.5, 0.5))
        self.indexed[0] = self.indexed[0] * 0.9
        self.replaced.set_data(self.replaced * 1.1)
        self.frozen.weight.requires_grad = number % 2 == 1
        ops.assign_add(self.steps, Tensor([1.0]))
        self.buffer[:] = self.buffer + 1.0
        self.list.append(number)
        self.dict["steps"] += 1
        self.set.add(number)
        self.recent.append(number)
        self.bias += 0.1
        self.tallies.append(1.0)
        self.generator._step(Tensor(1))
        draws = random.random() + np.random.random() + self.generators[0].random() + float(self.generators[1].random())
        x = self.norm(self.blocks(x)) * self.clipped * self.indexed * self.replaced
        x = ops.dropout(self.frozen(x), 0.3) * self.steps + self.buffer + draws + Tensor(self.bias)
        self.log.sum = self.log.sum + 1.0
        self.log.count += 1
        self.log.parts.append(number)
        self.history[0] = self.history[0] + self.log.count
        self.scalar = self.scalar * 2
        return (
            x / (1 + self.dict["steps"] + len(self.recent) + len(self.tallies)) ** 0.5
            + self.history.mean() * self.scalar
        )


class Loss:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor) -> Tensor:
        self.calls += 1
        return output.square().mean() * self.calls


def make() -> Any:
    mindspore.set_seed(0)
    random.seed(0)
    np.random.seed(0)
    return Restless()


def batch() -> Tensor:
    return Tensor(np.random.RandomState(0).rand(512, WIDTH).astype(np.float32))


def state(model: Any, loss_fn: Any) -> list[Any]:
    """All that can be moved, and what the next draws are."""
    values = [(name, each.asnumpy().tolist(), each.requires_grad) for name, each in model.parameters_and_names()]
    values += [each.asnumpy().tolist() for each in (model.buffer, model.history, model.scalar, model.log.sum)]
    values += [model.list, dict(model.dict), model.set, list(model.recent), model.log.count, model.log.parts]
    values += [model.bias.tolist(), [each.calls for each in model.blocks], loss_fn.calls, model.training]
    values += [model.generators[0].getstate(), repr(model.generators[1].bit_generator.state)]
    values.append(model.generator.get_state().asnumpy().tolist())
    return [*values, random.getstate(), repr(np.random.get_state())]


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "plan_memory": lambda model, loss_fn: hp.plan_memory(
        model, batch(), loss_fn=loss_fn, budget="90%", regions=["blocks.*"], progress=False
    ),
    "explain": lambda model, loss_fn: hp.explain(model, batch(), loss_fn=loss_fn, regions=["blocks.*"], progress=False),
    "largest": lambda model, loss_fn: hp.largest(
        model, lambda n: batch()[: 8 * n], "4MiB", at_most=1, loss_fn=loss_fn, regions=["blocks.*"], progress=False
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_model_that_was_planned_goes_on_as_one_that_was_not(call: str) -> None:
    results = []
    for plans in (False, True):
        model, loss_fn = make(), Loss()
        for number in range(2):
            if plans and number == 1:
                before = state(model, loss_fn)
                CALLS[call](model, loss_fn)
                assert state(model, loss_fn) == before
            run_step(model, batch(), loss_fn)
        results.append([state(model, loss_fn), run_step(model, batch(), loss_fn)])
    assert results[0] == results[1]


def test_an_iterator_is_named_before_a_step_runs() -> None:
    model = make()
    model.blocks[1].factors = itertools.cycle([1.0, 2.0])
    with pytest.raises(ValueError, match=r"(?s)cannot be put back.*blocks\.1\.factors.*list and an index"):
        CALLS["plan_memory"](model, Loss())
    assert model.list == []


def test_a_hook_that_a_step_puts_on_a_cell_is_off_again_and_what_it_closes_over_is_as_before() -> None:
    model, calls = make(), [0]

    def count(cell: Any, args: Any) -> None:
        calls[0] += 1
        cell.register_forward_hook(lambda cell, args, output: None)

    model.frozen.register_forward_pre_hook(count)
    with preserved(model, batch(), None):
        run_step(model, batch(), Loss())
        assert calls == [1]
    assert calls == [0]
    assert not model.frozen._lazy_forward_hook
    assert len(model.frozen._lazy_forward_pre_hook) == 1


def test_what_is_not_as_before_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from hyper_parallel.platform.mindspore.planner import model_state

    monkeypatch.setattr(model_state._Values, "put_back", lambda self: None)
    model = make()
    with pytest.raises(StateError, match="cannot put back(?s:.*)others in "), preserved(model):
        run_step(model, batch(), Loss())
