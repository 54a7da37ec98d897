"""The models of `tests/data/plans`: plan files that commit 021f411 of this repository has made and saved.

A plan file names the model's parameters and the ops of its blocks, so these classes must stay as they are.
Each plan was made by `plan_memory(make(name), batch(name), loss_fn=loss_of, budget=..., progress=False)`, with
`configure_swap(min_bytes=1024)` where it swaps, on a CPU with PyTorch 2.13.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn

FOLDER = Path(__file__).resolve().parents[1] / "data" / "plans"
NAMES = ("recompute", "swap", "mixed")
MIN_SWAP_BYTES = 1024


class Feed(nn.Module):
    """A block of two linear layers with a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(32), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Attend(nn.Module):
    """A block of attention, then a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(32), nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, dim // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def make(name: str) -> nn.Module:
    """With random weights: a plan is not made for their values."""
    blocks = {"recompute": [Feed] * 3, "swap": [Attend] * 3, "mixed": [Attend, Feed, Attend, Feed, Attend]}
    return nn.Sequential(*(block() for block in blocks[name]))


def batch(name: str) -> torch.Tensor:
    return torch.linspace(-1, 1, 8 * 64 * 32).reshape(8, 64, 32)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()
