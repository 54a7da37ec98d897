"""Ranks that hold parts of one model, or train copies of it, and plan together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hyper_parallel as hp
from hyper_parallel.core.planner.model.choices import recompute_all
from hyper_parallel.core.planner.model.profile import Region
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel
from support.process_worker import keep_platform_groups

WAYS = ("fully_shard", "other batches", "copies", "tensor parallel", "uneven parts")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(x)))


def _made(way: str) -> tuple[nn.Module, torch.Tensor]:
    """A model of three blocks, and this rank's batch."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block(65 if way == "uneven parts" else 64) for _ in range(3)))
    batch = torch.randn(256, 16)
    if way == "other batches" and dist.get_rank() == 1:
        batch = batch[:200]
    if way in ("fully_shard", "other batches"):
        for block in model:
            fully_shard(block)
        fully_shard(model)
    elif way == "copies":
        model = DistributedDataParallel(model)
    else:
        mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        mesh.get_group()
        keep_platform_groups()
        plan = hp.ShardPlan(
            parameters={"*.up.*": ("tp",), "*.up.weight": ("tp", None), "*.down.weight": (None, "tp")},
            inputs={"": ((None, None),)},
            outputs={"*.up": (None, "tp"), "*.down": (None, None)},
        )
        hp.shard_module(model, mesh, plan)  # the bias of `down` is the first rank's, and zeros on the others
    return model, batch


def _regions(way: str) -> list[str]:
    return [f"module.{index}" if way == "copies" else str(index) for index in range(3)]


def _loss(y: Any) -> Any:
    return y.square().mean()


def refused_by_one_rank(way: str) -> str:
    """What each rank is told where the first has less room than the others."""
    model, batch = _made(way)
    reserve = "8MiB" if dist.get_rank() == 0 else 0
    try:
        plan = hp.plan_memory(
            model, batch, loss_fn=_loss, budget="4MiB", progress=False, reserve=reserve, regions=_regions(way)
        )
    except hp.BudgetError as error:
        said = str(error)
    else:
        said = str(plan)
    dist.barrier()
    return said


def trained_under_a_plan(way: str) -> dict[str, Any]:
    """What each rank chose, whether the gradients are those of the plain step, and what it met that was not planned."""
    model, batch = _made(way)
    # What a rank sends is let go by a thread of the transport's own: a peak is one such tensor higher in some steps.
    plan = hp.plan_memory(model, batch, loss_fn=_loss, budget="85%", progress=False, regions=_regions(way))
    wanted = _gradients(model, batch)
    plan.apply(model)
    got = _gradients(model, batch)
    stats = plan.stats(model)
    plan.verify(model, batch).remove(model)
    names = [[op.key for op in region.ops] for region in plan.profile.regions]
    return {
        "chosen": str((plan.decision, names)),
        "is empty": plan.is_empty,
        "equal": all(map(torch.equal, wanted, got)),
        "stats": stats,
    }


def _gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    _loss(model(batch)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [grad.to_local().clone() if hasattr(grad, "to_local") else grad.clone() for grad in gradients]


def steps_that_one_rank_wants() -> int:
    """How many more steps each rank takes to time what regions cost, where only the first was seen to wait for the host."""
    model, batch = _made("fully_shard")
    profiled = ProfiledModel(model, batch, _loss)
    taken: list[Any] = []
    profiled._step_ms_again = lambda *args, **ways: taken.append(ways) or 1.0  # type: ignore[method-assign, func-returns-value]
    regions = [
        Region(
            path=each,
            call=0,
            ops=(),
            inputs=(),
            forward_ms=0.3,
            backward_ms=0.0,
            forward_peak_bytes=0,
            backward_peak_bytes=0,
        )
        for each in "012"
    ]
    profiled._host_cost(regions, list(map(recompute_all, regions)), 1.0, 2.0 if dist.get_rank() == 0 else 1.0)
    return len(taken)
