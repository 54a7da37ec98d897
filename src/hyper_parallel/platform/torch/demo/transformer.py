"""A small transformer that learns something, for the demo: random weights, data made on the spot."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn


class Shape(NamedTuple):
    blocks: int
    dim: int
    heads: int
    length: int
    batch: int
    vocabulary: int = 256


CPU = Shape(blocks=8, dim=128, heads=4, length=256, batch=4)
ACCELERATOR = Shape(blocks=16, dim=1024, heads=16, length=2048, batch=8)


class DemoBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.dim), nn.LayerNorm(shape.dim)
        self.qkv, self.out = nn.Linear(shape.dim, 3 * shape.dim), nn.Linear(shape.dim, shape.dim)
        self.up, self.down = nn.Linear(shape.dim, 4 * shape.dim), nn.Linear(4 * shape.dim, shape.dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(a.transpose(1, 2).reshape(batch, length, dim)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """A language model whose forward returns the loss of predicting each next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.dim)
        self.positions = nn.Embedding(shape.length, shape.dim)
        self.blocks = nn.ModuleList(DemoBlock(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Trainer:
    """Model, optimizer and data, the same each time it is made."""

    def __init__(self) -> None:
        # A build for CUDA names it on a machine without a driver, too, unless it is asked whether it can be used.
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self.shape = CPU if self.device.type == "cpu" else ACCELERATOR
        torch.manual_seed(0)
        self.model = Transformer(self.shape).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._data = torch.Generator().manual_seed(1)

    def batch(self) -> torch.Tensor:
        """Make sequences that count up by a step of their own, so that what comes next can be learned."""
        size = (self.shape.batch, 1)
        first = torch.randint(self.shape.vocabulary, size, generator=self._data)
        step = torch.randint(1, 4, size, generator=self._data)
        return ((first + step * torch.arange(self.shape.length)) % self.shape.vocabulary).to(self.device)

    def begin(self) -> None:
        """Seed both generators: from here on the same numbers are drawn, however many were drawn before."""
        torch.manual_seed(2)
        self._data.manual_seed(3)

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(self.batch())
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def describe(self) -> str:
        shape, millions = self.shape, sum(p.numel() for p in self.model.parameters()) / 1e6
        name = "CPU" if self.device.type == "cpu" else getattr(torch, self.device.type).get_device_name(self.device)
        size = f"{shape.blocks} transformer blocks, {millions:.1f} million parameters"
        return f"{size}, batch {shape.batch} x {shape.length}, on {name}"


class TorchDemo:
    """The demo's model, as the command asks for it."""

    folder: ClassVar[str] = "demo.transformer"

    def trainer(self) -> Trainer:
        return Trainer()


BACKEND = TorchDemo()
