"""A small model to train, and one step of it: what tests of swapping and of regions have in common."""

from __future__ import annotations

import torch
from torch import nn

from support.swapping import Swapping


class Block(nn.Module):
    """A residual block with a norm, a fused projection that is split into views, dropout and a gate."""

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        attention = (q @ k.transpose(-1, -2)).softmax(-1)
        return x + self.dropout(self.out(attention @ v)) * self.scale


def make_model(swapping: Swapping, num_blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks))).to(swapping.kind)


def train(model: nn.Module, x: torch.Tensor, seed: int = 1) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    leaf = x.detach().clone().requires_grad_()
    model(leaf).square().mean().backward()
    return [leaf.grad, *(parameter.grad.clone() for parameter in model.parameters())]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
