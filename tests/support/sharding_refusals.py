"""What a sharded model refuses in words, and that the step after it is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

import hyper_parallel as hp
from support.sharding import Settings, float64, shard, what_is_left, wrong_gradients
from support.sharding_programs import Stack, blocks_and_all, children_and_all, tied_across


def batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(batch(dist.get_rank())).square().mean()


class InForward:
    """Does something to a block's weight in the midst of its forward."""

    def __init__(self, change: Callable[[nn.Linear], object]) -> None:
        self.change = change

    def __call__(self, model: Any) -> None:
        handle = model.blocks[1].register_forward_pre_hook(lambda block, args: self.change(block.up) and None)
        try:
            loss_of(model).backward()
        finally:
            handle.remove()


def _write(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.5)


def _new_data(layer: nn.Linear) -> None:
    layer.weight.data = torch.zeros(layer.weight.shape)


def _replace(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.zeros(layer.weight.shape))


def replaced_outside(model: Any) -> None:
    kept = model.blocks[1].up.weight
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(15, 5))
    try:
        loss_of(model)
    finally:
        model.blocks[1].up.weight = kept


def other_values(model: nn.Module) -> None:
    whole = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    functional_call(model, whole, (batch(0),))


def changed_before_backward(change: Callable[[nn.Parameter], object]) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        loss = loss_of(model)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                change(parameter)
        try:
            loss.backward()
        finally:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), values, strict=True):
                    parameter.copy_(value)

    return run


def _data_times_2(parameter: nn.Parameter) -> None:
    parameter.data = parameter.detach() * 2


def frozen_in_a_step(part: str, reduce: str) -> Callable[[Any], None]:
    def run(model: Any) -> None:
        try:
            with hp.accumulate(model, last=False, reduce=reduce):
                loss_of(model).backward()
            model.get_submodule(part).requires_grad_(False)
            with hp.accumulate(model, last=True, reduce=reduce):
                loss_of(model).backward()
        finally:
            model.requires_grad_(True)

    return run


def mixed_weights(model: nn.Module) -> None:
    with hp.accumulate(model, last=False, weight=2.0):
        loss_of(model).backward()
    try:
        with hp.accumulate(model, last=True):
            loss_of(model).backward()
    finally:
        with hp.accumulate(model, last=True, weight=2.0):
            pass


def without_forward(model: Any) -> None:
    model.blocks[0].up(torch.randn(3, 5))


def a_copy(model: nn.Module) -> None:
    copy.deepcopy(model)(batch(0))


def to_shards(model: nn.Module) -> None:
    torch.autograd.grad(loss_of(model), list(model.parameters()))


def backward_of_backward(model: nn.Module) -> None:
    x = batch(0).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    grad.square().sum().backward()


CASES: dict[str, tuple[Callable[[Any], object], str]] = {
    "written in forward": (InForward(_write), "was written to inside forward"),
    "new data in forward": (InForward(_new_data), "was written to inside forward"),
    "replaced in forward": (InForward(_replace), "was replaced inside forward"),
    "replaced by a whole parameter": (replaced_outside, "was replaced by something else"),
    "functional_call with other values": (other_values, "was replaced by something else"),
    "written before backward": (changed_before_backward(lambda p: p.mul_(2)), "between a forward and its backward"),
    "new data before backward": (changed_before_backward(_data_times_2), "between a forward and its backward"),
    "a unit frozen in a step": (frozen_in_a_step("blocks.1", "each"), "were frozen"),
    "a unit frozen in a step, sent last": (frozen_in_a_step("blocks.1", "last"), "were frozen"),
    "a layer frozen in a step": (frozen_in_a_step("blocks.1.up", "each"), "were frozen"),
    "a layer frozen in a step, sent last": (frozen_in_a_step("blocks.1.up", "last"), "were frozen"),
    "weights in some microbatches": (mixed_weights, "either all have a weight"),
    "a part of a unit called": (without_forward, "plain tensor among its distributed ones"),
    "a copy called": (a_copy, "is a copy of one that is sharded"),
    "autograd.grad of shards": (to_shards, "not have been used in the graph"),
    "backward of a backward": (backward_of_backward, "storage of size 0"),
}


def refused(title: str, zero: int) -> tuple[str, list[str]]:
    """What it says, and what is wrong with the step after it."""
    with float64():
        torch.manual_seed(0)
        whole = Stack()
        sharded = copy.deepcopy(whole)
        shard(blocks_and_all(sharded), Settings(zero))
        said = "nothing was raised"
        try:
            CASES[title][0](sharded)
        except Exception as error:
            said = str(error)
        sharded.zero_grad()
        loss_of(sharded).backward()
        for rank in range(dist.get_world_size()):
            (whole(batch(rank)).square().mean() / dist.get_world_size()).backward()
        return said, [*wrong_gradients(whole, sharded), *what_is_left(sharded)]


def untied() -> str:
    """One of two places that share a parameter gets another."""
    with float64():
        model: Any = tied_across()
        shard(children_and_all(model))
        model.head.weight = nn.Parameter(model.head.weight.detach() * 3)
        try:
            model(torch.zeros(2, 3, dtype=torch.long))
        except RuntimeError as error:
            return str(error)
        return "nothing was raised"
