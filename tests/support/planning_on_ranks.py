"""Ranks that hold parts of one model and plan it together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import hyper_parallel as hp


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(x)))


def refused_by_one_rank() -> str:
    """What each rank is told where the first has less room than the others."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    rank = dist.get_rank()
    try:
        plan = hp.plan_memory(
            model, torch.ones(64, 16), loss_fn=lambda y: y.square().mean(), budget="4MiB", progress=False,
            reserve="8MiB" if rank == 0 else 0, regions=["0", "1", "2"],
        )  # fmt: skip
    except hp.BudgetError as error:
        said = str(error)
    else:
        said = str(plan)
    dist.barrier()
    return said
