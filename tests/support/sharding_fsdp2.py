"""Our engine beside PyTorch's FSDP2: the same model and batches in one run, in float32, every bit of every value."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

import hyper_parallel as hp
from support.process_worker import kept_mesh
from support.sharding import Run, mesh_of
from support.sharding_programs import Stack


class Case(NamedTuple):
    param: str | None = None
    reduce: str | None = None
    zero: int = 3
    num_microbatches: int = 1
    frozen: tuple[str, ...] = ()
    max_norm: float | None = None


CASES = {
    "plain": Case(),
    "zero=2": Case(zero=2),
    "computing in bfloat16": Case("bfloat16", "float32"),
    "computing in bfloat16, zero=2": Case("bfloat16", "float32", zero=2),
    "several microbatches": Case(num_microbatches=4),
    "several microbatches in bfloat16": Case("bfloat16", "float32", num_microbatches=4),
    "frozen": Case(frozen=("first", "blocks.1", "blocks.2.up")),
    "clipped": Case(max_norm=0.1),
    "clipped, in bfloat16": Case("bfloat16", "float32", max_norm=0.1),
}


def differences(title: str) -> list[str]:
    case = CASES[title]
    torch.manual_seed(3)
    ours = Stack()
    for name in case.frozen:
        ours.get_submodule(name).requires_grad_(False)
    theirs = copy.deepcopy(ours)
    _shard_both(ours, theirs, case)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    wrong = []
    for number in range(3):
        run = Run(dist.get_rank(), number, is_sharded=True, reduce="each")
        losses = [_step(run, model, case) for model in (ours, theirs)]
        if losses[0] != losses[1]:
            wrong.append(f"step {number}: losses {losses[0]}, FSDP2's {losses[1]}")
        if case.max_norm is not None:
            norms = [hp.get_platform().clip_grad_norm_(m.parameters(), case.max_norm) for m in (ours, theirs)]
            found, expected = (float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) for norm in norms)
            if found != expected:
                wrong.append(f"step {number}: norm {found}, FSDP2's {expected}")
        wrong += [f"step {number}: gradient of {name}" for name in _unequal(ours, theirs, "grad")]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        wrong += [f"step {number}: {name}" for name in _unequal(ours, theirs, None)]
    return wrong


def _shard_both(ours: nn.Module, theirs: nn.Module, case: Case) -> None:
    mesh = mesh_of()
    precision = hp.MixedPrecision(param=case.param, reduce=case.reduce)
    policy = MixedPrecisionPolicy(*(None if name is None else getattr(torch, name) for name in case[:2]))
    native = kept_mesh((dist.get_world_size(),), ("dp",))
    for module in [*ours.blocks, ours]:
        hp.fully_shard(module, mesh=mesh, zero=case.zero, precision=precision)
    for module in [*theirs.blocks, theirs]:
        fsdp2(module, mesh=native, mp_policy=policy, reshard_after_forward=case.zero == 3)


def _step(run: Run, model: nn.Module, case: Case) -> list[float]:
    run.losses = []
    for number in range(case.num_microbatches):
        x = run.data(3, 4, of=number)
        if hasattr(model, "set_is_last_backward"):  # FSDP2
            run.backward(model(x).float().square().mean())
            continue
        with hp.accumulate(model, last=number == case.num_microbatches - 1, reduce="each"):
            run.backward(model(x).float().square().mean())
    return run.losses


def _unequal(ours: nn.Module, theirs: nn.Module, attribute: str | None) -> list[str]:
    return [
        name
        for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True)
        if not torch.equal(*(_bits(p if attribute is None else p.grad) for p in (found, expected)))
    ]


def _bits(value: Any) -> torch.Tensor:
    return torch.empty(0) if value is None else value.detach().full_tensor()
