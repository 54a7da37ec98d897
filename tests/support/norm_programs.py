"""Gradients of models on several ranks, beside one process: norms, clipping, values with gradients. On PyTorch.

Everything here runs in the workers of `support.processes`.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hyper_parallel as hp
from support import pipelines
from support.filled_models import SEED, gradients, sequence
from support.process_worker import keep_all_groups, keep_platform_groups, kept_mesh
from support.schedule_names import SCHEDULES


def clipped(way: str, norm_type: float, case: str) -> tuple[float, float, float]:
    """The norm beside that of one process, and the largest difference of gradients afterwards.

    Cases: "all", "missing" (one parameter has no gradient), "nan" (one rank has one in its part).
    """
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    gradients(plain)
    sharded = copy.deepcopy(plain)
    rank = torch.distributed.get_rank()
    if way == "layouts":
        mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        hp.shard_module(sharded, mesh, {"parameters": {"0.weight": ("tp", "dp"), "2.weight": (None, "tp")}})
        for (_, value), source in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            value.grad = hp.distribute_tensor(source.grad.clone(), value.layout)
        keep_platform_groups()
    else:
        mesh = kept_mesh((2, 2), ("dp", "tp")) if way == "2d" else kept_mesh((4,), ("dp",))
        if way == "2d":
            parallelize_module(sharded, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(sharded, mesh=mesh["dp"])
        for value, source in zip(sharded.parameters(), plain.parameters(), strict=True):
            value.grad = distribute_tensor(source.grad.clone(), value.device_mesh, value.placements, src_data_rank=None)
    if case == "missing":
        plain[1].weight.grad = None
        sharded[1].weight.grad = None
    if case == "nan" and rank == 2:
        sharded[0].weight.grad._local_tensor.fill_(math.nan)
    right = hp.clip_grad_norm_(plain, 0.5, norm_type)
    found = hp.clip_grad_norm_(sharded, 0.5, norm_type)
    difference = max(
        (value.grad.full_tensor() - source.grad).abs().max().item()
        for value, source in zip(sharded.parameters(), plain.parameters(), strict=True)
        if source.grad is not None
    )
    keep_all_groups()
    return float(found), float(right), difference


def missing_on_one_rank() -> tuple[float, float]:
    """Rank 1 has no gradient of the only sharded parameter: nobody waits for it, and it counts as zeros."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = hp.shard_module(nn.Linear(2, 2, bias=False), mesh, {"parameters": {"weight": ("tp", None)}})
    if torch.distributed.get_rank() == 0:
        model.weight.grad = hp.DTensor.from_local(torch.full((1, 2), 3.0), model.weight.layout)
    largest = float(hp.clip_grad_norm_([model.weight], 10.0, math.inf))
    norm = float(hp.clip_grad_norm_(model, 1.0))
    keep_platform_groups()
    return largest, norm


def clipped_pipeline(name: str, norm_type: float, as_list: bool) -> tuple[float, float, float]:
    """The norm of a pipeline's gradients beside that of one process, and the largest difference of gradients."""
    whole = sequence().double()
    gradients(whole)
    schedule = SCHEDULES[name](2, 4)
    rank = torch.distributed.get_rank()
    made = hp.split_stages(copy.deepcopy(whole), schedule.num_stages)
    mine = [made[index] for index in schedule.placement.stages_on(rank)]
    run = hp.Pipeline(mine, schedule, loss_fn=pipelines.loss_fn)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for stage in mine:
        for key, weight in stage.module.named_parameters():
            weight.grad = expected[key].grad.clone()
    right = float(hp.clip_grad_norm_(whole, 0.5, norm_type))
    found = float(hp.clip_grad_norm_(mine if as_list else run, 0.5, norm_type))
    pairs = [(w.grad, expected[key].grad) for stage in mine for key, w in stage.module.named_parameters()]
    return found, right, max((mine - theirs).abs().max().item() for mine, theirs in pairs)


def values_and_gradients(way: str) -> list[str]:
    """What differs from a backward: values, gradients, and what was on the parameters before."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    models = [copy.deepcopy(plain), copy.deepcopy(plain)]
    if way == "fsdp2":
        for model in models:
            fully_shard(model, mesh=kept_mesh((2,), ("dp",)))
    elif way == "ddp":
        models = [nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) for model in models]
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    for model in models:
        model(x).sum().backward()
    before = [p.grad.clone() for p in models[1].parameters()]
    first, second = (hp.value_and_grad(lambda x, m=models[1]: m(x).square().sum(), models[1])(x * k) for k in (1, 2))
    wrong = []
    for number, (value, grads) in enumerate((first, second)):
        models[0].zero_grad()
        loss = models[0](x * (number + 1)).square().sum()
        loss.backward()
        right = [p.grad for p in models[0].parameters()]
        if not torch.equal(value, loss) or value.requires_grad:
            wrong.append("value")
        if not all(_equal(a, b) for a, b in zip(grads, right, strict=True)):
            wrong.append("gradients")
    if not all(_equal(p.grad, b) for p, b in zip(models[1].parameters(), before, strict=True)):
        wrong.append("gradients of before")
    keep_all_groups()
    return wrong


def gradients_of_parts() -> list[str]:
    """`value_and_grad` of DTensors: one that takes part, one that does not."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.ModuleList([nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)])
    hp.materialize(hp.shard_module(model, mesh, {"parameters": {"*": ("tp", None)}}), SEED)
    x = hp.distribute_tensor(torch.ones(2, 3), mesh, [hp.Replicate()])
    _, (first, second) = hp.value_and_grad(lambda x: model[0](x).sum(), model)(x)
    wrong = [] if torch.equal(first.full_tensor(), torch.full((4, 3), 2.0)) else ["the first"]
    wrong += [] if torch.equal(second.full_tensor(), torch.zeros(4, 3)) else ["the second"]
    keep_platform_groups()
    return wrong if model[0].weight.grad is None else [*wrong, "a gradient that stays"]


def _equal(first: Any, second: Any) -> bool:
    return torch.equal(*(getattr(each, "_local_tensor", each) for each in (first, second)))
