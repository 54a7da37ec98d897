"""Sharded units and regions that are computed again in backward: a region around a unit, inside one, around a part of one.

A program is trained as in `support.sharding`, and collectives are counted: a rerun gathers nothing a second time where
the unit is whole anyhow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as pytorch
from torch import nn

import hyper_parallel as hp
from support.sharding import WIDTH, Of, Program, Run
from support.sharding_programs import Block, Stack, blocks_and_all, one

WAYS: dict[str, Callable[..., Any]] = {
    "hp.checkpoint": hp.checkpoint,
    "PyTorch's": lambda function, *args: pytorch.checkpoint(function, *args, use_reentrant=False),
    "PyTorch's reentrant": lambda function, *args: pytorch.checkpoint(function, *args, use_reentrant=True),
}


class Half(Block):
    """A block of which one half is a region."""

    def __init__(self, way: Callable[..., Any]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.way(lambda y: self.down(torch.tanh(self.up(y))), self.norm(x))


class Around(Stack):
    """A stack whose forward has a region around each block, or around several."""

    def __init__(self, way: Callable[..., Any], num_together: int) -> None:
        super().__init__()
        self.way, self.num_together = way, num_together

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for start in range(0, len(self.blocks), self.num_together):
            x = self.way(nn.Sequential(*self.blocks[start : start + self.num_together]).forward, x)
        return self.last(x)


def around(way: str, num_together: int) -> Callable[[], nn.Module]:
    return lambda: Around(WAYS[way], num_together)


def halves(way: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Stack()
        model.blocks = nn.ModuleList(Half(WAYS[way]) for _ in range(3))
        return model

    return make


def around_all(way: str) -> Callable[[], nn.Module]:
    """A region around the whole model: its unit is the outermost one in it."""
    return lambda: Of(lambda self, x: WAYS[way](self.stack, x.requires_grad_()), stack=Stack())


def nested(way: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = around(way, 2)()
        model.blocks = nn.ModuleList(Half(WAYS[way]) for _ in range(3))
        return model

    return make


def wrapped(model: Any) -> list[nn.Module]:
    """Blocks in wrappers of ours, sharded inside of them."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = hp.checkpoint_wrapper(block)
    return [*model.blocks, model]


def used_twice(way: str) -> Callable[[], nn.Module]:
    return lambda: Of(
        lambda self, x: self.head(WAYS[way](self.body, x) + self.body(WAYS[way](self.body, x))),
        body=Block(),
        head=nn.Linear(WIDTH, 2),
    )


def wide(run: Run, model: nn.Module) -> None:
    # A reentrant region wants an input that needs a gradient.
    run.backward(model(run.data(3, WIDTH).requires_grad_()).square().mean())


def accumulated(run: Run, model: nn.Module) -> None:
    for number in range(3):
        with run.microbatch(model, last=number == 2):
            run.backward(model(run.data(3, 4, of=number)).square().mean())


def _programs() -> dict[str, Program]:
    found = {"wrappers around units": Program(Stack, wrapped, one)}
    for way in WAYS:
        found |= {
            f"around each unit, {way}": Program(around(way, 1), blocks_and_all, one),
            f"around two units, {way}": Program(around(way, 2), blocks_and_all, one),
            f"a half of each unit, {way}": Program(halves(way), blocks_and_all, one),
            f"a region within a region, {way}": Program(nested(way), blocks_and_all, one),
            f"around the model, {way}": Program(around_all(way), lambda m: [*m.stack.blocks, m.stack], one),
            f"inside of one unit, {way}": Program(around(way, 1), lambda m: [m], one),
            f"a unit three times, {way}": Program(used_twice(way), lambda m: [*m.children(), m], wide),
            f"several microbatches, {way}": Program(around(way, 1), blocks_and_all, accumulated),
        }
    return found


PROGRAMS = _programs()
