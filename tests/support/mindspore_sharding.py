"""Sharded cells on real ranks, beside one process that has the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore._c_expression import run_backward
from mindspore.common.initializer import initializer
from mindspore.graph.api import _pynative_executor

import hyper_parallel as hp
from hyper_parallel.platform.mindspore.communication import Communication
from support.process_worker import keep_platform_groups

rank, size = Communication.get_rank, Communication.get_world_size


class Norm(nn.Cell):
    """MindSpore's own normalizations compute in float32 on the CPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = Parameter(initializer("ones", (width,)), name="gamma")

    def construct(self, x: Tensor) -> Tensor:
        return x / ((x * x).mean(-1, keep_dims=True) + 1.0).sqrt() * self.gamma


class Block(nn.Cell):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.up, self.down = nn.Dense(width, 3 * width), nn.Dense(3 * width, width)

    def construct(self, x: Tensor) -> Tensor:
        return x + self.down(ops.tanh(self.up(self.norm(x))))


class Model(nn.Cell):
    def __init__(self, width: int = 5, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Dense(4, width)
        self.blocks = nn.CellList([Block(width) for _ in range(depth)])
        self.last = nn.Dense(width, 2)

    def construct(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@functools.cache
def mesh_of(shape: tuple[int, ...] = (), names: tuple[str, ...] = ("dp",)) -> hp.DeviceMesh:
    mesh = hp.init_device_mesh("cpu", shape or (size(),), mesh_dim_names=names)
    for name in names:
        mesh.get_group(name)
    keep_platform_groups()
    return mesh


def fill(model: nn.Cell, seed: int = 0, dtype: Any = np.float32) -> nn.Cell:
    """Give a model values that are the same on every rank."""
    random = np.random.default_rng(seed)
    for parameter in model.get_parameters():
        values = random.standard_normal(parameter.shape).astype(dtype) / 2
        parameter.set_dtype(mindspore.float64 if dtype is np.float64 else mindspore.float32)
        parameter.set_data(Tensor(values))
    return model


def batch_of(number: int, rows: int, width: int = 4, dtype: Any = np.float32) -> Tensor:
    return Tensor(np.random.default_rng(100 + number).standard_normal((rows, width)).astype(dtype))


def mine(batch: Tensor) -> Tensor:
    rows = batch.shape[0] // size()
    return Tensor(batch.asnumpy()[rows * rank() : rows * (rank() + 1)])


def square_mean(output: Tensor) -> Tensor:
    return (output * output).mean()


def shard(model: nn.Cell, inner: Sequence[nn.Cell], **options: Any) -> nn.Cell:
    mesh = options.pop("mesh", None) or mesh_of()
    for cell in inner:
        hp.fully_shard(cell, mesh=mesh, **options)
    return hp.fully_shard(model, mesh=mesh, **options)


def locals_of(model: nn.Cell) -> list[Parameter]:
    """What MindSpore's optimizers step on."""
    return [parameter.to_local() for parameter in model.trainable_params()]


def adam(parameters: Sequence[Parameter], kind: str) -> Callable[[Sequence[np.ndarray]], object]:
    """Adam's step; MindSpore's own has no float64, and takes no parameter without elements."""
    if kind == "float32":
        native = nn.Adam([parameter for parameter in parameters if parameter.size], learning_rate=1e-2)
        return lambda grads: native(tuple(Tensor(grad) for grad in grads if grad.size))
    state = [(np.zeros(p.shape), np.zeros(p.shape)) for p in parameters]
    count = 0

    def step(grads: Sequence[np.ndarray]) -> None:
        nonlocal count
        count += 1
        for parameter, (mean, square), grad in zip(parameters, state, grads, strict=True):
            mean[...] = 0.9 * mean + 0.1 * grad
            square[...] = 0.999 * square + 0.001 * grad * grad
            change = mean / (1 - 0.9**count) / (np.sqrt(square / (1 - 0.999**count)) + 1e-8)
            parameter.set_data(Tensor(parameter.asnumpy() - 1e-2 * change))

    return step


def value_and_grad(function: Callable[..., Tensor], model: nn.Cell, *args: Any) -> tuple[float, list[np.ndarray]]:
    value, grads = mindspore.value_and_grad(function, None, model.trainable_params())(*args)
    return float(value), [grad.asnumpy() for grad in grads]


def by_tape(function: Callable[..., Tensor], model: nn.Cell, *args: Any) -> tuple[float, list[Any]]:
    """The same by the tape, which adds to `_grad`; None where there is none."""
    _pynative_executor.set_grad_flag(True)
    try:
        loss = function(*args)
        run_backward((loss,), (ops.ones_like(loss),), False, False, (), True, accumulate_grad=True)
    finally:
        _pynative_executor.set_grad_flag(False)
    grads = [getattr(p, "_local", p)._grad for p in model.trainable_params()]
    return float(loss), [None if grad is None else grad.asnumpy().copy() for grad in grads]


def part_of(values: np.ndarray, parameter: Any) -> np.ndarray:
    """This rank's part of a whole array, as the parameter is cut."""
    layout = parameter.layout
    for dim, axes in enumerate(layout.axes_per_dim):
        if "dp" in axes:
            num = layout.mesh.size("dp")
            at = layout.mesh.get_local_rank("dp")
            length = -(-values.shape[dim] // num)
            start = min(at * length, values.shape[dim])
            return values[(slice(None),) * dim + (slice(start, start + length),)]
    return values


def steps(zero: int, how: str = "value_and_grad", num: int = 3, kind: str = "float32", prefetch: int = 1) -> float:
    dtype = np.dtype(kind).type
    whole, sharded = fill(Model(), dtype=dtype), fill(Model(), dtype=dtype)
    shard(sharded, sharded.blocks, zero=zero, prefetch=prefetch)
    names = [parameter.name for parameter in whole.trainable_params()]
    assert names == [parameter.name for parameter in sharded.trainable_params()]
    ours, theirs = adam(locals_of(sharded), kind), adam(whole.trainable_params(), kind)
    worst = 0.0
    differentiate = {"value_and_grad": value_and_grad, "tape": by_tape}[how]
    for number in range(num):
        batch = batch_of(number, 4 * size(), dtype=dtype)
        loss, expected = value_and_grad(lambda x: square_mean(whole(x)), whole, batch)
        own, found = differentiate(lambda x: square_mean(sharded(x)), sharded, mine(batch))
        mean = Tensor([own], mindspore.float64)
        Communication.all_reduce(mean, None)
        worst = max(worst, abs(float(mean.asnumpy()[0]) / size() - loss))
        for parameter, grad, full in zip(sharded.trainable_params(), found, expected, strict=True):
            part = part_of(full, parameter)
            assert grad.shape == part.shape == tuple(parameter.to_local().shape)
            worst = max(worst, float(np.abs(grad - part).max(initial=0.0)))
        ours(found)
        theirs(expected)
        for parameter in sharded.trainable_params():
            parameter.to_local()._grad = None
    for p, q in zip(whole.trainable_params(), sharded.trainable_params(), strict=True):
        worst = max(worst, float(np.abs(p.asnumpy() - q.full_tensor().asnumpy()).max()))
    return worst
