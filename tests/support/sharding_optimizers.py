"""Optimizers, clipping, transforms and compiled blocks on a sharded model, beside one process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
from support.sharding import Settings, float64, shard, what_is_left, wrong_gradients, wrong_values
from support.sharding_programs import Stack, blocks_and_all
from support.sharding_refusals import batch, loss_of


@contextmanager
def _two(zero: int = 3) -> Iterator[tuple[nn.Module, nn.Module]]:
    with float64():
        torch.manual_seed(0)
        whole = Stack()
        sharded = copy.deepcopy(whole)
        shard(blocks_and_all(sharded), Settings(zero))
        yield whole, sharded


def _backward(whole: nn.Module) -> None:
    for rank in range(dist.get_world_size()):
        (whole(batch(rank)).square().mean() / dist.get_world_size()).backward()


def in_backward(zero: int) -> list[str]:
    """The optimizer steps when a shard has its gradient, as its hook: with the shard itself, once."""
    with _two(zero) as (whole, sharded):
        seen: list[bool] = []
        for parameter in sharded.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(found: Any, optimizer: Any = optimizer, parameter: Any = parameter) -> None:
                seen.append(found is parameter)
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        other = torch.optim.SGD(whole.parameters(), lr=0.1)
        for _ in range(2):
            loss_of(sharded).backward()
            _backward(whole)
            other.step()
            other.zero_grad()
        assert seen == [True] * 2 * len(list(sharded.parameters()))
        return [*wrong_values(whole, sharded), *what_is_left(sharded)]


def clipped_and_fused() -> list[str]:
    """Shards without elements on some ranks in norms, and in fused and other steps of AdamW."""
    wrong = []
    with float64():
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 3))
        sharded = copy.deepcopy(whole)
        shard(list(sharded))
        for norm in (1.0, 2.0, float("inf")):
            whole.zero_grad()
            sharded.zero_grad()
            loss_of(sharded).backward()
            _backward(whole)
            found: Any = hp.get_platform().clip_grad_norm_(sharded.parameters(), 0.01, norm)
            expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm)
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            if abs(found - expected) > 1e-12:
                wrong.append(f"norm {norm}: {found}, not {expected}")
            wrong += wrong_gradients(whole, sharded)
        for fused in (True, False):
            for model in (whole, sharded):
                torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused).step()
            wrong += wrong_values(whole, sharded)
    return wrong


def transforms() -> list[str]:
    """`torch.func` for a model's input, and an ordinary step after it."""
    wrong = []
    with _two() as (whole, sharded):
        x = batch(dist.get_rank())
        for name, transform in {
            "grad": lambda model: torch.func.grad(lambda value: model(value).square().mean())(x),
            "vmap": lambda model: torch.func.vmap(model)(x),
            "jvp": lambda model: torch.func.jvp(lambda value: model(value).sum(), (x,), (x,))[1],
            "jacrev": lambda model: torch.func.jacrev(model)(x[0]),
        }.items():
            if (transform(sharded) - transform(whole)).abs().max() > 1e-12:
                wrong.append(name)
        loss_of(sharded).backward()
        _backward(whole)
        return [*wrong, *wrong_gradients(whole, sharded), *what_is_left(sharded)]


def in_threads() -> list[str]:
    """A whole step in another thread, and a backward in another one than its forward."""
    wrong = []
    for is_all in (True, False):
        with _two() as (whole, sharded):
            loss = None if is_all else loss_of(sharded)
            work = (lambda model=sharded: loss_of(model).backward()) if loss is None else loss.backward
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            _backward(whole)
            wrong += [*wrong_gradients(whole, sharded), *what_is_left(sharded)]
    return wrong


def compiled(way: str) -> list[str]:
    torch._dynamo.reset()
    with float64():
        torch.manual_seed(0)
        whole: Any = Stack(2)
        sharded: Any = copy.deepcopy(whole)
        if way == "before":
            for number, block in enumerate(sharded.blocks):
                sharded.blocks[number] = torch.compile(block, backend="eager")
        shard(blocks_and_all(sharded))
        if way == "after":
            for block in sharded.blocks:
                block.compile(backend="eager")
        for _ in range(2):
            loss_of(sharded).backward()
            _backward(whole)
        return [*wrong_gradients(whole, sharded), *what_is_left(sharded)]
