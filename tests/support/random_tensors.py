"""Random tensor programs: views of every kind, ordinary operators, tensors that the user keeps."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

VIEWS: list[Callable[[torch.Tensor, random.Random], torch.Tensor]] = [
    lambda t, r: t[r.randrange(2) :: r.choice((1, 2))],
    lambda t, r: t.transpose(0, 1),
    lambda t, r: t.expand(2, *t.shape)[r.randrange(2)],
    lambda t, r: t.as_strided((8, 8), (1, 8), 0) if t.is_contiguous() and t.numel() >= 64 else t,
    lambda t, r: t.reshape(-1).view(t.shape) if t.is_contiguous() else t,
    lambda t, r: t.narrow(1, 0, max(t.shape[1] // 2, 1)),
    lambda t, r: t.unsqueeze(0).squeeze(0),
    lambda t, r: t.diagonal().unsqueeze(1),
    lambda t, r: t.chunk(2, 0)[0],
    lambda t, r: t.flip(0),
]
OPERATORS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a.exp(),
    lambda a, b: a.sin() * a,
    lambda a, b: (a @ a.transpose(-1, -2)).tanh(),
    lambda a, b: a * a.mean(),
    lambda a, b: torch.softmax(a, -1),
    lambda a, b: a / (a.abs() + 1),
    lambda a, b: torch.nn.functional.gelu(a),
    lambda a, b: a * b if a.shape == b.shape else a * b.sum(),
    lambda a, b: torch.cat([a, a.sigmoid()], 0),
    lambda a, b: a.cumsum(0).sqrt() if bool((a > 0).all()) else a.square(),
]


class TensorProgram:
    """`loss(x)` is the same function at every call; `kept` holds the tensors that the user keeps from the last call."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.kept: list[torch.Tensor] = []

    def input(self, device: str) -> torch.Tensor:
        return torch.randn(16, 16, generator=torch.Generator().manual_seed(self.seed)).to(device)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        choose = random.Random(self.seed)
        self.kept = []
        tensors = [x, x * 1.5]
        for _ in range(choose.randint(3, 9)):
            tensor = choose.choice(tensors[-3:])
            for _ in range(choose.randint(0, 2)):
                view = choose.choice(VIEWS)(tensor, choose)
                tensor = view if view.dim() == 2 and view.numel() else tensor
            result = choose.choice(OPERATORS)(tensor, choose.choice(tensors))
            result = result * (1 / (1 + result.detach().abs().max()))  # keeps numbers small over many steps
            tensors.append(result)
            if choose.random() < 0.3:
                self.kept.append(choose.choice([tensor, result]))
        return torch.stack([tensor.sum() for tensor in tensors[1:]]).sum()
