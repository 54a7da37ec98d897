"""A transformer of MindSpore cells, one step of it by either way of differentiating, and what is live."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops, set_seed, value_and_grad
from mindspore._c_expression import run_backward
from mindspore.graph.api import _pynative_executor

DRIVERS = ["value_and_grad", "tape"]
NUM_WORDS = 40


def dropout(p: float) -> nn.Dropout:
    """One whose kernel is made anew for each call.

    MindSpore's kernel of the CPU that is used again looks for the best number of threads meanwhile, and its numbers depend on that: two plain
    runs of one program differ. Like this they are equal, so that another run can be compared with them.
    """
    made = nn.Dropout(p=p)
    made.dropout.add_prim_attr("random_cache", False)
    return made


class Block(nn.Cell):
    def __init__(self, width: int, p: float = 0.1, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before = nn.LayerNorm((width,))
        self.qkv = nn.Dense(width, 3 * width)
        self.out = nn.Dense(width, width)
        self.between = nn.LayerNorm((width,))
        self.up = nn.Dense(width, 4 * width)
        self.down = nn.Dense(4 * width, width)
        self.dropout = dropout(p)

    def construct(self, x: Any) -> Any:
        batch, length, width = x.shape
        size = width // self.num_heads
        q, k, v = (
            each.reshape(batch, length, self.num_heads, size).transpose(0, 2, 1, 3)
            for each in ops.chunk(self.qkv(self.before(x)), 3, axis=-1)
        )
        attention = ops.softmax(ops.matmul(q, k.transpose(0, 1, 3, 2)) / size**0.5, -1)
        attention = ops.dropout(attention, 0.1, training=self.training)
        x = x + self.dropout(self.out(ops.matmul(attention, v).transpose(0, 2, 1, 3).reshape(batch, length, width)))
        return x + self.dropout(self.down(ops.gelu(self.up(self.between(x)))))


class Transformer(nn.Cell):
    """Its output layer has the weights of its embedding."""

    def __init__(
        self,
        wrap: Callable[[nn.Cell], nn.Cell] = lambda cell: cell,
        width: int = 16,
        num_blocks: int = 4,
        p: float = 0.1,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, width)
        self.blocks = nn.CellList([wrap(Block(width, p)) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm((width,))

    def construct(self, words: Any) -> Any:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return ops.matmul(self.norm(x), self.embedding.embedding_table.T)


def seed(number: int) -> None:
    """Seeds and their counters; `set_seed` alone leaves the counters of kinds of ops that it has not met."""
    set_seed(number)
    sys.modules["mindspore.common.seed"]._KERNEL_SEED.clear()


def new_transformer(wrap: Callable[[nn.Cell], nn.Cell] = lambda cell: cell, **sizes: Any) -> Transformer:
    seed(5)
    model = Transformer(wrap, **sizes)
    model.set_train()
    return model


def batch(step: int, length: int = 8, num_rows: int = 2) -> tuple[Tensor, Tensor]:
    words = np.random.RandomState(step).randint(0, NUM_WORDS, (num_rows, length + 1)).astype(np.int32)
    return Tensor(words[:, :-1]), Tensor(words[:, 1:].reshape(-1))


def loss_of(model: Transformer, words: Tensor, targets: Tensor) -> Tensor:
    return ops.cross_entropy(model(words).reshape(-1, NUM_WORDS), targets)


def differentiate(
    loss: Callable[..., Tensor], inputs: tuple[Tensor, ...], weights: list[Parameter], driver: str
) -> tuple[Tensor, list[Tensor]]:
    """The loss, and its gradients by the inputs that require one (all of float) and the weights."""
    positions = tuple(i for i, tensor in enumerate(inputs) if "Float" in str(tensor.dtype))
    if driver == "value_and_grad":
        value, gradients = value_and_grad(loss, positions or None, ParameterTuple(weights) if weights else None)(
            *inputs
        )
        parts = gradients if positions and weights else ((gradients, ()) if positions else ((), gradients))
        return value, [*(parts[0] if isinstance(parts[0], tuple) else (parts[0],)), *parts[1]]
    leaves = [tensor.data for tensor in inputs]
    for position in positions:
        leaves[position].requires_grad_()
    wanted = (*(leaves[position] for position in positions), *weights)
    _pynative_executor.set_grad_flag(True)
    try:
        value = loss(*leaves)
        # Not accumulated into the leaves: MindSpore's CPU cannot add one gradient to two of them.
        found = run_backward((value,), (ops.ones_like(value),), False, False, wanted, True, accumulate_grad=False)
    finally:
        _pynative_executor.set_grad_flag(False)
    return value, [ops.zeros_like(each) if grad is None else grad for each, grad in zip(wanted, found, strict=True)]


def train(model: Transformer, num_steps: int, driver: str = "value_and_grad", **sizes: int) -> list[list[np.ndarray]]:
    """Loss and gradients of each step, with an optimizer between."""
    weights = model.trainable_params()
    optimizer = nn.AdamWeightDecay(weights, learning_rate=1e-3)
    done = []
    for step in range(num_steps):
        words, targets = batch(step, **sizes)
        value, gradients = differentiate(lambda w, t: loss_of(model, w, t), (words, targets), weights, driver)
        done.append([value.asnumpy().copy(), *(gradient.asnumpy().copy() for gradient in gradients)])
        optimizer(tuple(gradients))
    return done


def same(left: list[list[np.ndarray]], right: list[list[np.ndarray]]) -> bool:
    return len(left) == len(right) and all(
        len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(left, right, strict=True)
    )


def num_live_tensors() -> int:
    gc.collect()
    return sum(Tensor in type(each).__mro__ for each in gc.get_objects())
