"""Pipelines whose stages are sharded over data parallel ranks, beside one process with the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
from hyper_parallel._base import trace
from support.process_worker import keep_platform_groups

SCHEDULES = {
    "one_f_one_b": lambda p, m: hp.schedules.one_f_one_b(p, m),
    "interleaved": lambda p, m: hp.schedules.interleaved(p, m, 2),
    "zbv": lambda p, m: hp.schedules.zbv(p, m),
    "dualpipe_v": lambda p, m: hp.schedules.dualpipe_v(p, m),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _mesh() -> hp.DeviceMesh:
    mesh = hp.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    mesh.get_group("pp"), mesh.get_group("dp")
    keep_platform_groups()
    return mesh


def train(name: str, zero: int, *, with_coordinator: bool = False) -> tuple[float, list[int], list[str]]:
    """Train two steps. Give the largest difference to one process, gathers and reductions of a step, leases left."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)))
        whole = copy.deepcopy(model)
        mesh = _mesh()
        schedule = SCHEDULES[name](2, 8)
        stages = hp.split_stages(model, schedule.num_stages)
        mine = [stages[index] for index in schedule.placement.stages_on(mesh.get_local_rank("pp"))]
        for stage in mine:
            for block in stage.module:
                hp.fully_shard(block, mesh=mesh, zero=zero)
        coordinator = hp.HookCoordinator(timeout=30.0) if with_coordinator else None
        pipeline = hp.Pipeline(mine, schedule, loss_fn=nn.functional.mse_loss, mesh=mesh, coordinator=coordinator)
        ours = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
        theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
        place, size = mesh.get_local_rank("dp"), mesh.size("dp")
        worst, counts = 0.0, [0, 0]
        for _ in range(2):
            x, y = torch.randn(2, 16 * size, 6)
            with trace.recording() as record:
                pipeline.step(x[16 * place :][:16], target=y[16 * place :][:16])
            counts = [len(record.events("sharding.gather")), len(record.events("sharding.reduce"))]
            nn.functional.mse_loss(whole(x), y).backward()
            worst = max(worst, _difference(mine, whole, gradients=True))
            ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
        worst = max(worst, _difference(mine, whole, gradients=False))
        units = [unit for stage in mine for unit in _units(stage.module)]
        return worst, counts, [repr(unit) for unit in units if unit.is_leased]
    finally:
        torch.set_default_dtype(torch.float32)


def _units(module: nn.Module) -> list[Any]:
    from hyper_parallel.core.parallel.sharding.fully_shard import units_in

    return units_in(module)


def _difference(stages: list[hp.PipelineStage], whole: nn.Module, *, gradients: bool) -> float:
    others, worst = dict(whole.named_parameters()), 0.0
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            ours: Any = parameter.grad if gradients else parameter
            theirs: Any = others[name].grad if gradients else others[name]
            worst = max(worst, float((ours.full_tensor() - theirs).abs().max()))
    return worst
