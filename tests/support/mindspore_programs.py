"""Random programs of MindSpore ops: a tree of calls, some of them regions or swapped, that gives the same bits however it is run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.platform.mindspore.activation_checkpoint import checkpoint, checkpoint_wrapper, swap_wrapper
from support.mindspore_training import DRIVERS, differentiate, dropout, seed

_ANSWERS = [
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.MUST_SWAP,
    CheckpointPolicy.MUST_RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE,
]
SIZE = 4


class InjectedError(Exception):
    """Raised where a test wants it."""


class Injector:
    """Raises at the n-th op or policy call that it is told of."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0

    def step(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise InjectedError(f"at step {self.at}")


# Each op takes two values of [SIZE, SIZE] and the weights of its call, and gives one of that shape.
OPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda a, b, w: a + b,
    "mul": lambda a, b, w: a * b,
    "tanh": lambda a, b, w: ops.tanh(a),
    "exp": lambda a, b, w: ops.exp(a * 0.1),
    "sigmoid": lambda a, b, w: ops.sigmoid(a),
    "relu": lambda a, b, w: ops.relu(a),
    "gelu": lambda a, b, w: ops.gelu(a),
    "softmax": lambda a, b, w: ops.softmax(a, -1),
    "matmul": lambda a, b, w: ops.matmul(a, w) * 0.5,
    "matmul of a view": lambda a, b, w: ops.matmul(a.transpose(1, 0), b) * 0.2,
    "norm": lambda a, b, w: ops.LayerNorm(1, 1)(a, w[0], w[1])[0],
    "bias": lambda a, b, w: ops.bias_add(a, w[0] * 1),
    "view": lambda a, b, w: a.reshape(SIZE * SIZE).reshape(SIZE, SIZE),
    "transpose": lambda a, b, w: a.transpose(1, 0) * b,
    "slices": lambda a, b, w: ops.cat([a[: SIZE // 2], b[SIZE // 2 :]], 0),
    "chunks": lambda a, b, w: ops.cat([each * each for each in ops.chunk(a, 2, axis=1)], 1),
    "row": lambda a, b, w: a + b[0],
    "where": lambda a, b, w: ops.where(a > b, a, b * 2),
    "maximum": lambda a, b, w: ops.maximum(a, b),
    "half": lambda a, b, w: (a.astype(mindspore.float16) * 0.5).astype(mindspore.float32),
    "detached": lambda a, b, w: ops.stop_gradient(a) * b,
    "mean": lambda a, b, w: a - a.mean(0),
    "sum": lambda a, b, w: a * 0.1 + b.sum(1, keepdims=True),
    "dropout": lambda a, b, w: ops.dropout(a, 0.5),
    "noise": lambda a, b, w: a + ops.rand(SIZE, SIZE),
    "host noise": lambda a, b, w: a * float(np.random.rand()),
    "divide": lambda a, b, w: a / (ops.abs(b) + 1),
    "power": lambda a, b, w: a**2 * 0.1,
    "constant": lambda a, b, w: a * Tensor(np.full((SIZE, SIZE), 0.25, np.float32)),
}


class Step(NamedTuple):
    """`op` of the values at two places, or a call of the steps in `inside`."""

    op: str
    first: int
    second: int
    weight: int
    inside: tuple[Step, ...] = ()
    how: int = 0  # seed of how the call is run


class Program:
    """Made of a seed. `run` is its function; `plain` calls every part as it is."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._random = random.Random(number)
        self.steps = self._steps(self._random.randint(3, 8), depth=0)
        self.driver = DRIVERS[number % 2]
        values = np.random.RandomState(number)
        self.inputs = tuple(Tensor(values.randn(SIZE, SIZE).astype(np.float32)) for _ in range(2))
        self.weights = [
            Parameter(Tensor(values.randn(SIZE, SIZE).astype(np.float32)), name=f"weight{i}") for i in range(2)
        ]
        self.dropout = dropout(0.3)
        self.dropout.set_train()

    def _steps(self, number: int, depth: int) -> tuple[Step, ...]:
        made = []
        for _ in range(number):
            kind = self._random.choice([*OPS, "cell"])
            inside: tuple[Step, ...] = ()
            if depth < 2 and self._random.random() < 0.35:
                kind = "call"
                inside = self._steps(self._random.randint(2, 6), depth + 1)
            picks = [self._random.randrange(8) for _ in range(2)]
            made.append(
                Step(kind, picks[0], picks[1], self._random.randrange(2), inside, self._random.randrange(10**6))
            )
        return tuple(made)

    def gradients(self, injector: Injector | None = None, *, plain: bool = False) -> list[np.ndarray]:
        seed(self.number + 1)
        value, gradients = differentiate(
            lambda *inputs: self._call(self.steps, inputs, injector, plain, how=self.number).sum(),
            self.inputs,
            self.weights,
            self.driver,
        )
        # What comes after the step shows where the generators were left.
        after = [ops.rand(3), Tensor(np.random.rand(3).astype(np.float32))]
        return [each.asnumpy().copy() for each in (value, *gradients, *after)]

    def _call(self, steps: tuple[Step, ...], inputs: Any, injector: Injector | None, plain: bool, how: int) -> Any:
        def function(*values: Any) -> Any:
            return self._run(steps, values, injector, plain)

        if plain:
            return function(*inputs)
        choices = random.Random(how)
        kind = choices.randrange(6)
        options: dict[str, Any] = {"early_stop": choices.random() < 0.8, "swap_inputs": choices.random() < 0.3}
        if choices.random() < 0.7:
            options["policy_fn"] = _policy(choices.randrange(10**6), injector)
        if kind == 0:
            return function(*inputs)
        if kind == 1:
            return swap_wrapper(function)(*inputs)
        if kind == 2:
            return swap_wrapper(checkpoint_wrapper(function, **options))(*inputs)
        if kind == 3:
            return checkpoint_wrapper(swap_wrapper(function), **options)(*inputs)
        return checkpoint(function, *inputs, **options)

    def _run(self, steps: tuple[Step, ...], inputs: Any, injector: Injector | None, plain: bool) -> Any:
        values = list(inputs)
        for step in steps:
            if injector is not None:
                injector.step()
            first, second = (values[place % len(values)] for place in (step.first, step.second))
            if step.op == "call":
                values.append(self._call(step.inside, (first, second), injector, plain, step.how))
            elif step.op == "cell":
                values.append(self.dropout(first))
            else:
                values.append(OPS[step.op](first, second, self.weights[step.weight]))
        return values[-1] + values[len(values) // 2]

    def __str__(self) -> str:
        return f"program {self.number}, {self.driver}: {self.steps}"


def _policy(number: int, injector: Injector | None) -> Callable[..., Any]:
    def policy(ctx: Any, op: str, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if injector is not None:
            injector.step()
        return _ANSWERS[(number + len(op) * 7 + ctx.occurrence) % len(_ANSWERS)]

    return policy


def make_cell(width: int) -> nn.Cell:
    """A small block for long runs."""
    return nn.SequentialCell(
        nn.LayerNorm((width,)), nn.Dense(width, width), nn.GELU(), dropout(0.2), nn.Dense(width, width)
    )
