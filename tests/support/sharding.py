"""Sharded models on real ranks, beside one process that has the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
from support.process_worker import keep_platform_groups


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 5, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def mesh_of() -> hp.DeviceMesh:
    mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    mesh.get_group("dp")
    keep_platform_groups()
    return mesh


def steps(zero: int = 3, prefetch: int = 1, num: int = 3) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    whole = Model()
    sharded = copy.deepcopy(whole)
    mesh = mesh_of()
    for block in sharded.blocks:
        hp.fully_shard(block, mesh=mesh, zero=zero, prefetch=prefetch)
    hp.fully_shard(sharded, mesh=mesh, zero=zero, prefetch=prefetch)
    names = [name for name, _ in whole.named_parameters()]
    assert names == [name for name, _ in sharded.named_parameters()]
    ours = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    rank, size = dist.get_rank(), dist.get_world_size()
    worst = 0.0
    for _ in range(num):
        batch = torch.randn(4 * size, 4)
        loss = whole(batch).square().mean()
        loss.backward()
        mine = sharded(batch[4 * rank : 4 * rank + 4]).square().mean()
        mine.backward()
        for (name, p), q in zip(whole.named_parameters(), sharded.parameters(), strict=True):
            assert q.grad is not None, name
            worst = max(worst, float((p.grad - q.grad.full_tensor()).abs().max()))
        ours.step(); theirs.step(); ours.zero_grad(); theirs.zero_grad()
    for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
        worst = max(worst, float((p - q.full_tensor()).abs().max()))
    torch.set_default_dtype(torch.float32)
    return worst
