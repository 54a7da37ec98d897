"""Blocks wrapped in every way that there is, and programs that train them: what tests beside other libraries have in common."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper, swap_wrapper
from support.swapping import Swapping
from support.training import Block

Wrap = Callable[[nn.Module], nn.Module]
ANSWERS = (CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)


def mix(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Every answer, by op and occurrence."""
    return ANSWERS[zlib.crc32(f"{op} {ctx.occurrence}".encode()) % len(ANSWERS)]


def swap_everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP


WAYS: dict[str, Wrap] = {
    "recompute": checkpoint_wrapper,
    "mix": functools.partial(checkpoint_wrapper, policy_fn=mix),
    "swap": functools.partial(checkpoint_wrapper, policy_fn=swap_everything),
    "swap_inputs": functools.partial(checkpoint_wrapper, swap_inputs=True),
    "swap wrapper": swap_wrapper,
    "mix in a swap wrapper": lambda block: swap_wrapper(checkpoint_wrapper(block, policy_fn=mix)),
}


def blocks(wrap: Wrap, swapping: Swapping, make: Callable[[], nn.Module] = Block, num: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(wrap(make()) for _ in range(num))).to(swapping.kind)


def loss_of(model: nn.Module, swapping: Swapping, number: int = 0) -> torch.Tensor:
    torch.manual_seed(number)
    return model(swapping.randn(2, 8, 32, seed=number)).square().mean()


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def numbers_of(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def steps(model: nn.Module, swapping: Swapping, num: int = 3) -> list[torch.Tensor]:
    """Gradients of each step, and the parameters and buffers at the end."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found = []
    for number in range(num):
        optimizer.zero_grad()
        loss_of(model, swapping, number).backward()
        found += gradients_of(model)
        optimizer.step()
    return found + numbers_of(model)
