"""`torch.amp.GradScaler` over sharded parameters: one rank whose gradients are infinite stops the step of all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
from support.process_worker import keep_platform_groups
from support.sharded_pipelines import Block


def steps_of_which_one_overflows_on_one_rank() -> tuple[list[bool], float]:
    """Which of three steps changed the shards on this rank, and the scale at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    mesh.get_group("dp")
    keep_platform_groups()
    for block in model:
        hp.fully_shard(block, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    changed = []
    for step in range(3):
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        loss = model(torch.randn(2, 6)).square().mean()
        scaler.scale(loss).backward()
        if step == 1 and dist.get_rank() == 1:
            # Only in the part of one rank: the sum over ranks has brought it to all else.
            model[0].up.weight.grad.to_local()[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pairs = zip(before, model.parameters(), strict=True)
        changed.append(any(not torch.equal(old, new.to_local()) for old, new in pairs))
    return changed, scaler.get_scale()
