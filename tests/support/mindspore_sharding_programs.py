"""Models that are not easy to shard, each beside one process that runs the batches of all ranks one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import hyper_parallel as hp
from support.mindspore_sharding import Block, Model, batch_of, by_tape, fill, part_of, rank, shard, size, square_mean


class Program(NamedTuple):
    """A model, which of its cells are units beside itself, and the loss of a rank and microbatch."""

    model: Callable[[], nn.Cell]
    units: Callable[[nn.Cell], Sequence[Any]] = lambda model: model.blocks
    loss: Callable[[nn.Cell, Tensor, int, int], Tensor] = lambda model, x, at, micro: square_mean(model(x))
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody writes to it
    weights: Sequence[Sequence[float]] | None = None  # by rank and microbatch
    num_micro: int = 1
    reduce: str | None = None


class Uneven(nn.Cell):
    """A number, a single one, more ranks than rows, nothing at all, and a dim in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.number = Parameter(Tensor(0.5), name="number")
        self.single = Parameter(ops.ones((1,)), name="single")
        self.wide = Parameter(ops.ones((1, 1, 7)), name="wide")
        self.rows = nn.Dense(4, 3)
        self.blocks = nn.CellList([Block(3)])

    def construct(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.rows(x)) * self.number * self.single + self.wide.sum()


class Tied(nn.Cell):
    """One weight in two units, and twice in a third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(4, 4), nn.Dense(4, 4)
        self.second.weight = self.first.weight
        self.blocks = nn.CellList([self.first, self.second])
        self.last = nn.Dense(4, 4, has_bias=False)
        self.last.weight = self.first.weight

    def construct(self, x: Tensor) -> Tensor:
        return self.last(ops.tanh(self.second(ops.tanh(self.first(x)))))


class Branches(nn.Cell):
    """What a rank uses is up to `use`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dense(4, 4)
        self.left, self.right, self.never = nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 4)
        self.blocks = nn.CellList([self.inner])

    def construct(self, x: Tensor, use: Sequence[str] = ("left",)) -> Tensor:
        x = self.inner(x)
        for name in use:
            x = x + ops.tanh(getattr(self, name)(x))
        return x


class Gate(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(ops.ones((4,)), name="weight")

    def construct(self, x: Tensor, is_open: bool) -> Tensor:
        return x * self.weight if is_open else x


class Gated(nn.Cell):
    """A unit that is first, and of which some ranks use nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.CellList([Gate()])
        self.last = nn.Dense(4, 2)

    def construct(self, x: Tensor, is_open: bool) -> Tensor:
        return self.last(self.blocks[0](x, is_open))


class Repeated(nn.Cell):
    """A unit that runs twice in a forward, and one within another of the same unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.CellList([Block(4), Block(4)])

    def construct(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[1](self.blocks[0](x)))


class Pair(nn.Cell):
    """Takes and gives containers; an output is nobody's, another is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.numbers = nn.Dense(4, 4), nn.Dense(4, 4), nn.Embedding(5, 4)

    def construct(self, x: Tensor, *, others: dict[str, Any]) -> Any:
        words = self.numbers(others["words"])
        return {"a": (self.a(x), self.b(x)), "same": x, "words": words[: x.shape[0]]}


class Containers(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(4, 4)
        self.blocks = nn.CellList([Pair(), Pair()])

    def construct(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            found = block(x, others={"words": Tensor([0, 1, 4, 1, 2, 3], mindspore.int32), "none": None})
            x = found["a"][0] + found["same"] + found["words"]
        return x


def frozen(*names: str) -> nn.Cell:
    model = Model()
    for parameter in model.get_parameters():
        if any(parameter.name.startswith(name) for name in names):
            parameter.requires_grad = False
    return model


def used_on_some_ranks(model: nn.Cell, x: Tensor, at: int, micro: int) -> Tensor:
    return square_mean(model(x, ("left", "right") if at == 0 else ("left",)))


def twice(model: nn.Cell, x: Tensor, at: int, micro: int) -> Tensor:
    return square_mean(model(x)) + square_mean(model(x * 2))


def in_parts(model: nn.Cell, x: Tensor, at: int, micro: int) -> Tensor:
    """The head is called for each part of what the body gave, as a loss in chunks does."""
    x = model.blocks[0](model.first(x))
    return sum((square_mean(model.last(part)) for part in ops.split(x, 2)), Tensor(0.0, mindspore.float64))


def over_nothing(model: nn.Cell, x: Tensor, at: int, micro: int) -> Tensor:
    """No number where a microbatch has no weight."""
    loss = square_mean(model(x))
    return loss * float("nan") if (at, micro) == (1, 0) else loss


def checkpointed(inside: bool) -> Callable[[], nn.Cell]:
    def made() -> nn.Cell:
        model = Model()
        for number in range(len(model.blocks)):
            if inside:
                model.blocks[number].up = hp.checkpoint_wrapper(model.blocks[number].up)
            else:
                model.blocks[number] = hp.checkpoint_wrapper(model.blocks[number])
        return model

    return made


class Recomputed(Model):
    def construct(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = mindspore.recompute(block, x, use_reentrant=False)
        return self.last(x)


PROGRAMS = {
    "a plain model": Program(Model),
    "gathered two ahead": Program(lambda: Model(depth=3), options={"prefetch": 2}),
    "nothing ahead": Program(Model, options={"prefetch": 0}),
    "one unit": Program(Model, units=lambda model: ()),
    "several cells in one unit": Program(Model, units=lambda model: [list(model.blocks)]),
    "uneven": Program(Uneven),
    "tied": Program(Tied),
    "frozen parameters": Program(lambda: frozen("first", "blocks.0.up.weight")),
    "a frozen unit": Program(lambda: frozen("blocks.0")),
    "all frozen but one": Program(lambda: frozen("first", "blocks", "last.weight")),
    "used on some ranks": Program(Branches, loss=used_on_some_ranks),
    "a unit that some ranks pass by": Program(Gated, loss=lambda model, x, at, micro: square_mean(model(x, at == 0))),
    "two forwards": Program(Model, loss=twice),
    "a unit that runs twice": Program(Repeated),
    "a head in parts": Program(Model, units=lambda model: [*model.blocks, model.first, model.last], loss=in_parts),
    "containers": Program(Containers),
    "four microbatches": Program(Model, num_micro=4),
    "microbatches sent once": Program(Model, num_micro=3, reduce="last"),
    "microbatches sent each": Program(Model, num_micro=3, reduce="each"),
    "weights": Program(Model, num_micro=2, weights=((3, 1), (0.5, 2))),
    "a microbatch of nothing": Program(Model, num_micro=2, weights=((3, 1), (0, 2)), loss=over_nothing),
    "units that are checkpointed": Program(checkpointed(inside=False)),
    "regions inside of units": Program(checkpointed(inside=True)),
    "units that MindSpore recomputes": Program(Recomputed),
}


def compare(title: str, zero: int, by: str = "value_and_grad") -> list[str]:
    """What differs from one process, in words."""
    program = PROGRAMS[title]
    whole, sharded = fill(program.model(), dtype=np.float64), fill(program.model(), dtype=np.float64)
    shard(sharded, program.units(sharded), zero=zero, **program.options)
    wrong = []
    for step in range(2):
        losses, expected = _expected(program, whole, step)
        found_losses, found = _found(program, sharded, step, by)
        if not np.allclose(losses[rank()], found_losses, rtol=1e-12, equal_nan=True):
            wrong.append(f"step {step}: losses {found_losses}, expected {losses[rank()]}")
        for parameter, full, grad in zip(sharded.trainable_params(), expected, found, strict=True):
            if grad is None:
                wrong += [f"step {step}: no gradient of {parameter.name}"] if np.abs(full).max() > 0 else []
                continue
            part = part_of(full, parameter)
            if part.shape != grad.shape or not np.abs(part - grad).max(initial=0.0) <= 1e-12:
                wrong.append(f"step {step}: gradient of {parameter.name}: {grad}, expected {part}")
        for parameter, full in zip(whole.trainable_params(), expected, strict=True):
            parameter.set_data(Tensor(parameter.asnumpy() - 0.1 * full))
        for parameter, grad in zip(sharded.trainable_params(), found, strict=True):
            local = parameter.to_local()
            local._grad = None
            if local.size and grad is not None:
                local.set_data(Tensor(local.asnumpy() - 0.1 * grad))
    return wrong + left_over(sharded)


def left_over(model: nn.Cell) -> list[str]:
    """Units that are still whole, and cells that have no shards."""
    from hyper_parallel.core.parallel.sharding.fully_shard import units_in

    wrong = [f"{unit} is whole" for unit in units_in(model) if unit.is_leased]
    for unit in units_in(model):
        memory: Any = unit.memory
        wrong += [f"{p.name} has memory" for p in memory.parameters if p.whole.untyped_storage().nbytes()]
    return wrong + [p.name for p in model.get_parameters() if not hasattr(p, "layout") and "moving" not in p.name]


def _microbatch(program: Program, step: int, at: int, micro: int) -> Tensor:
    return batch_of(1000 * step + 10 * at + micro, 6, dtype=np.float64)


def _expected(program: Program, whole: nn.Cell, step: int) -> tuple[list[list[float]], list[np.ndarray]]:
    losses: list[list[float]] = []
    sums: list[Any] = [0.0] * len(whole.trainable_params())
    total = 0.0
    for at in range(size()):
        losses.append([])
        for micro in range(program.num_micro):
            weight = 1.0 if program.weights is None else program.weights[at % 2][micro]
            x = _microbatch(program, step, at, micro)
            value, grads = mindspore.value_and_grad(
                lambda x, at=at, micro=micro: program.loss(whole, x, at, micro), None, whole.trainable_params()
            )(x)
            losses[at].append(float(value))
            total += weight
            if weight:
                sums = [known + weight * grad.asnumpy() for known, grad in zip(sums, grads, strict=True)]
    divisor = size() if program.weights is None else total
    return losses, [values / divisor for values in sums]


def _found(program: Program, sharded: nn.Cell, step: int, by: str) -> tuple[list[float], list[Any]]:
    losses, found = [], []
    for micro in range(program.num_micro):
        weight = None if program.weights is None else program.weights[rank() % 2][micro]
        x = _microbatch(program, step, rank(), micro)

        def loss(x: Tensor, micro: int = micro) -> Tensor:
            return program.loss(sharded, x, rank(), micro)

        with hp.accumulate(sharded, last=micro == program.num_micro - 1, weight=weight, reduce=program.reduce):
            if by == "tape":
                value, found = by_tape(loss, sharded, x)
            elif by == "hp":
                made, grads = hp.value_and_grad(loss, sharded)(x)
                value, found = float(made), [grad.asnumpy() for grad in grads]
            else:
                made, grads = mindspore.value_and_grad(loss, None, sharded.trainable_params())(x)
                value, found = float(made), [grad.asnumpy() for grad in grads]
        losses.append(value)
    return losses, found
