"""One rank keeps the graph of a forward that has no backward, as garbage in a cycle may be kept: the others do not."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
from support.process_worker import keep_platform_groups
from support.sharded_pipelines import Block


def steps_with_a_graph_that_one_rank_keeps(zero: int) -> float:
    """The largest difference of gradients to those of one process, in steps after such a forward."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        whole = nn.Sequential(*(Block() for _ in range(3)))
        model = copy.deepcopy(whole)
        mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        mesh.get_group("dp")
        keep_platform_groups()
        for block in model:
            hp.fully_shard(block, mesh=mesh, zero=zero)
        rank, kept, worst = dist.get_rank(), [], 0.0
        for _ in range(3):
            x = torch.randn(2 * dist.get_world_size(), 6)
            unused = model(x[:2])
            if rank == 0:
                kept.append(unused)
            del unused
            whole.zero_grad(), model.zero_grad()
            whole(x).square().mean().backward()
            model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
            for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                worst = max(worst, float((ours.grad.full_tensor() - theirs.grad).abs().max()))  # type: ignore[union-attr]
        return worst
    finally:
        torch.set_default_dtype(torch.float32)
