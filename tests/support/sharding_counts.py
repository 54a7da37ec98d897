"""How many collectives a step takes, and which: counted where every one of them is launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.platform.torch.communication import Communication
from support.sharding import Of, Run, Settings, shard
from support.sharding_reruns import WAYS


@contextmanager
def counted() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    transport: Any = Communication.transport
    launch = transport.launch

    def counting(call: str, *arguments: Any, **others: Any) -> Any:
        found[call] += 1
        return launch(call, *arguments, **others)

    transport.launch = counting
    try:
        yield found
    finally:
        del transport.launch


def three_units() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def microbatches(zero: int, reduce: str | None, prefetch: int = 1) -> list[tuple[int, int]]:
    """Gathers and reductions of each of two steps of four microbatches."""
    model = three_units()
    shard(list(model), Settings(zero, prefetch))
    optimizer = torch.optim.AdamW(model.parameters())
    answers = []
    for step in range(2):
        run = Run(0, step, is_sharded=True)
        with counted() as found:
            for number in range(4):
                with hp.accumulate(model, last=number == 3, reduce=reduce):
                    run.backward(model(run.data(2, 8, of=number)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        answers.append((found.pop("all_gather_into_tensor"), found.pop("reduce_scatter_tensor")))
        assert not found, found
    return answers


def reruns(way: str, zero: int) -> tuple[int, int]:
    """Gathers and reductions of one step whose three units run again in backward."""
    blocks = three_units()
    model = Of(_in_regions, blocks=blocks)
    model.way = WAYS[way]
    shard(list(blocks), Settings(zero))
    run = Run(0, 0, is_sharded=True)
    with counted() as found:
        run.backward(model(run.data(2, 8).requires_grad_()).square().mean())
    return found["all_gather_into_tensor"], found["reduce_scatter_tensor"]


def _in_regions(self: Any, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        x = self.way(block, x)
    return x
