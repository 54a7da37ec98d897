"""Plain sharded models, without anything random: a chain of blocks in a model, and what one step of it costs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hyper_parallel.core.parallel.sharding import order as real
from support.sharded_models import Call, Compute, Module, Region, World
from support.simulated_autograd import Autograd
from support.simulated_units import Rank, SimulatedUnitMemory

NUM_RANKS = 2


def accumulating_of(order: Any) -> Any:
    """The `accumulating` that belongs to a module with an `Order`, which may have a planted bug."""
    unit = sys.modules[order.Unit.__module__]
    return sys.modules[unit.Accumulation.__module__].accumulating


class Chain:
    """A model that computes, runs its blocks, and computes again. Sizes are those of whole units."""

    def __init__(
        self,
        *,
        zero: int,
        prefetch: int,
        num_blocks: int,
        block_bytes: int = 16,
        model_bytes: int = 16,
        runs: str = "once",
        order: Any = real,
    ) -> None:
        self.autograd = Autograd(lambda: None)
        self.rank = Rank(0, NUM_RANKS, self.autograd.at_end_of_backward)
        self.order = order.Order()
        self.accumulating = accumulating_of(order)
        self.world = World(self.autograd, self.rank, self.order, lambda _: True, lambda: None, lambda: None)
        self.units: list[Any] = []

        def unit(name: str, whole_bytes: int) -> Any:
            memory = SimulatedUnitMemory(self.rank, name, (f"{name}.p",), whole_bytes // NUM_RANKS)
            self.units.append(order.Unit(name, memory, self.order, zero=zero, prefetch=prefetch))
            return self.units[-1]

        blocks = [unit(f"block{number}", block_bytes) for number in range(num_blocks)]
        root = unit("model", model_bytes)
        steps: list[Any] = [Call(Module(each.name, each, [Compute(each), Compute(each)])) for each in blocks]
        if runs == "again in backward":
            steps = [Region(steps, in_own_pass=False)]
        elif runs == "twice":
            steps *= 2
        elif runs == "in passes of their own":
            steps = [Call(Module(each.name, each, [Compute(each), Region([Compute(each)], True)])) for each in blocks]
        self.model = Module("model", root, [Compute(root), *steps, Compute(root)])

    def microbatch(self) -> None:
        output = self.model(self.world, None)
        assert output is not None
        self.autograd.backward(output)

    def step(self, microbatches: int = 1, reduce: str | None = None) -> None:
        """One microbatch is a plain step; several accumulate."""
        if microbatches == 1:
            self.microbatch()
        for number in range(microbatches) if microbatches > 1 else ():
            with self.accumulating(self.units, last=number == microbatches - 1, weight=None, reduce=reduce):
                self.microbatch()
        for each in self.units:
            each.memory.write_shards()
        self.rank.given.clear()

    def begun(self, do: Callable[[], None]) -> tuple[int, int]:
        """How often units are gathered and reduced meanwhile."""
        begin = len(self.rank.collectives)
        do()
        begun = [each.split()[0] for each in self.rank.collectives[begin:]]
        return begun.count("gather"), begun.count("reduce")


def in_step(zero: int, reduce: str | None, *, microbatches: int = 4, **how: Any) -> tuple[int, int]:
    """Of a step that is not the first, of a model of three units."""
    chain = Chain(zero=zero, prefetch=1, num_blocks=2, **how)
    chain.step(microbatches, reduce)
    return chain.begun(lambda: chain.step(microbatches, reduce))


def of_two_forwards_before_their_backwards(order: Any = real) -> tuple[int, int]:
    chain = Chain(zero=2, prefetch=1, num_blocks=2, order=order)

    def two() -> None:
        first, second = chain.model(chain.world, None), chain.model(chain.world, None)
        assert first is not None
        assert second is not None
        chain.autograd.backward(first)
        del first
        chain.autograd.backward(second)

    return chain.begun(two)


def in_second_step_of_another_order(order: Any = real) -> tuple[int, int]:
    chain = Chain(zero=3, prefetch=1, num_blocks=3, order=order)
    chain.step()
    first, *blocks, last = chain.model.body
    chain.model.body = [first, blocks[2], blocks[0], blocks[1], last]
    chain.step()
    return chain.begun(chain.step)


def of_outputs_that_nobody_sees(order: Any = real) -> tuple[int, int]:
    chain = Chain(zero=3, prefetch=1, num_blocks=0, order=order)
    chain.model.hides_outputs = True
    return chain.begun(chain.step)


class Interrupt(BaseException):
    """Ctrl-C."""


def of_a_schedule_after_ctrl_c(order: Any = real) -> tuple[int, int]:
    chain = Chain(zero=3, prefetch=0, num_blocks=2, order=order)

    def interrupt(*_: Any) -> None:
        raise Interrupt

    chain.model.body = [*chain.model.body, interrupt]
    with suppress(Interrupt):
        chain.model(chain.world, None)
    chain.model.body.pop()
    return _of_a_schedule(chain)


def of_a_schedule_after_a_dropped_forward(order: Any = real) -> tuple[int, int]:
    chain = Chain(zero=2, prefetch=0, num_blocks=2, order=order)
    chain.model(chain.world, None)
    return _of_a_schedule(chain)


def _of_a_schedule(chain: Chain) -> tuple[int, int]:
    """Weights are written, then all units are made whole from outside, for one step."""
    for unit in chain.units:
        unit.memory.write_shards()

    def run() -> None:
        for unit in chain.units:
            unit.unshard()
        chain.microbatch()
        for unit in chain.units:
            unit.reshard()

    return chain.begun(run)


def whole_after_a_look_in_another_order(order: Any = real) -> tuple[int, int]:
    """How many units are, and how many still were before."""
    chain = Chain(zero=3, prefetch=1, num_blocks=3, order=order)
    chain.step()
    before = sum(unit.is_leased for unit in chain.units)
    first, *blocks, last = chain.model.body
    chain.model.body = [first, blocks[2], blocks[0], blocks[1], last]
    with chain.autograd.recording(False):
        chain.model(chain.world, None)
    return sum(unit.is_leased for unit in chain.units), before


def given_by_an_empty_step_after_an_error(order: Any = real) -> tuple[int, int]:
    """How many gradients of a backward that raised come to the shards later, and how many reductions are left."""
    chain = Chain(zero=3, prefetch=0, num_blocks=2, order=order)
    output = chain.model(chain.world, None)
    assert output is not None

    def interrupt() -> None:
        if chain.rank.reducing:
            raise Interrupt

    chain.autograd.before_node = interrupt
    with suppress(Interrupt):
        chain.autograd.backward(output)
    with chain.accumulating(chain.units, last=True, weight=None, reduce=None):
        pass
    return len(chain.rank.given), len(chain.rank.reducing)


# What is counted, with how many gathers and reductions there must be.
COUNTS: dict[str, tuple[Callable[[Any], tuple[int, int]], tuple[int, int]]] = {
    "zero 3": (lambda order: in_step(3, "each", order=order), (24, 12)),
    "zero 3, sent once": (lambda order: in_step(3, "last", order=order), (24, 3)),
    "zero 2": (lambda order: in_step(2, "each", order=order), (3, 12)),
    "zero 1": (lambda order: in_step(1, None, order=order), (3, 3)),
    "blocks run again in backward": (lambda order: in_step(3, None, order=order, runs="again in backward"), (24, 12)),
    "in passes of their own": (lambda order: in_step(3, None, order=order, runs="in passes of their own"), (24, 12)),
    # One of them in vain: of a unit that runs twice, only the last unit before it is known.
    "each block runs twice": (lambda order: in_step(3, None, order=order, runs="twice", microbatches=1), (11, 3)),
    # Each of the two backwards ends a step.
    "two forwards before their backwards": (of_two_forwards_before_their_backwards, (6, 6)),
    "second step of another order": (in_second_step_of_another_order, (8, 4)),
    "schedule after Ctrl-C": (of_a_schedule_after_ctrl_c, (3, 3)),
    "schedule after a dropped forward": (of_a_schedule_after_a_dropped_forward, (3, 3)),
    "whole after a look in another order": (whole_after_a_look_in_another_order, (0, 0)),
    "given by an empty step after an error": (given_by_an_empty_step_after_an_error, (0, 0)),
    "outputs that nobody sees": (of_outputs_that_nobody_sees, (1, 1)),
}


def peak_of(
    zero: int,
    prefetch: int,
    num_blocks: int,
    *,
    block_bytes: int = 16,
    model_bytes: int = 16,
    microbatches: int = 1,
    **how: Any,
) -> int:
    """The most bytes in use in a step that is not the first, with memory for the gradients of the shards from the start."""
    sizes = {"block_bytes": block_bytes, "model_bytes": model_bytes}
    chain = Chain(zero=zero, prefetch=prefetch, num_blocks=num_blocks, **sizes, **how)
    for unit in chain.units:
        unit.memory.keep_shard_gradients()
    chain.step(microbatches)
    device = chain.rank.device
    device.peak_bytes = device.allocated_bytes
    chain.step(microbatches)
    return device.peak_bytes
