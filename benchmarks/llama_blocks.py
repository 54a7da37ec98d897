"""The model that is measured: Llama-3 blocks of any size with random weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn


class Shape(NamedTuple):
    """Sizes of the model and of a batch."""

    blocks: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    length: int
    batch: int

    @property
    def head(self) -> int:
        return self.dim // self.heads


# Llama-3-8B's blocks, as the specification of the project measures them; and something that a laptop runs in seconds.
H200 = Shape(blocks=16, dim=4096, ffn=14336, heads=32, kv_heads=8, length=8192, batch=2)
SMALL = Shape(blocks=6, dim=256, ffn=896, heads=8, kv_heads=2, length=512, batch=2)


class Block(nn.Module):
    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        options = {"device": device, "dtype": dtype}
        kv_dim = shape.kv_heads * shape.head
        self.norm1, self.norm2 = nn.RMSNorm(shape.dim, **options), nn.RMSNorm(shape.dim, **options)
        self.q = nn.Linear(shape.dim, shape.dim, bias=False, **options)
        self.k, self.v = (nn.Linear(shape.dim, kv_dim, bias=False, **options) for _ in range(2))
        self.o = nn.Linear(shape.dim, shape.dim, bias=False, **options)
        self.gate, self.up = (nn.Linear(shape.dim, shape.ffn, bias=False, **options) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False, **options)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(batch, length, heads, self.shape.head)
            for layer, heads in (
                (self.q, self.shape.heads),
                (self.k, self.shape.kv_heads),
                (self.v, self.shape.kv_heads),
            )
        )
        q, k, v = (each.transpose(1, 2) for each in (_rotate(q, cos, sin), _rotate(k, cos, sin), v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, dim))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Llama(nn.Module):
    """A stack of blocks; `forward` gives a loss."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape, device, dtype) for _ in range(shape.blocks))
        half = shape.head // 2
        angle = torch.arange(shape.length, device=device)[:, None] * 1e4 ** (-torch.arange(half, device=device) / half)
        self.register_buffer("cos", torch.cos(angle).to(dtype)[None, :, None], persistent=False)
        self.register_buffer("sin", torch.sin(angle).to(dtype)[None, :, None], persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x.float().square().mean()


def make(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Llama, torch.Tensor]:
    """A model with gradients already allocated, and a batch."""
    torch.manual_seed(0)
    model = Llama(shape, device, dtype)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, torch.randn(shape.batch, shape.length, shape.dim, device=device, dtype=dtype)
