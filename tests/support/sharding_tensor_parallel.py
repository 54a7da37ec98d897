"""Parameters that tensor parallelism has cut already: the data axis cuts them once more, inside its parts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import hyper_parallel as hp
from support.process_worker import keep_platform_groups
from support.sharding import Of, float64

WIDTH = 5  # divides by neither axis


def _forward(self: Any, x: Any) -> Any:
    return self.rows(torch.tanh(self.columns(x)))


def model_of() -> nn.Module:
    return Of(_forward, columns=nn.Linear(WIDTH, 6), rows=nn.Linear(6, WIDTH))


def differences(zero: int) -> list[str]:
    """On four ranks, dp 2 x tp 2: losses, gradients and values of three steps against one process."""
    with float64():
        mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name in mesh.axis_names:
            mesh.get_group(name)
        torch.manual_seed(0)
        whole = model_of()
        sharded: Any = copy.deepcopy(whole)
        tp = mesh["tp"]
        for layer, dim in ((sharded.columns, 0), (sharded.rows, 1)):
            layer.weight = hp.distribute_tensor(layer.weight, tp, [hp.Shard(dim)])
            place = hp.Shard(0) if dim == 0 else hp.Replicate()
            layer.bias = hp.distribute_tensor(layer.bias, tp, [place])
        for layer in (sharded.columns, sharded.rows):
            hp.fully_shard(layer, mesh=mesh, zero=zero)
        ours = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
        wrong = []
        for step in range(3):
            batches = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
            for batch in batches:
                (whole(batch).square().mean() / 2).backward()
            mine = batches[mesh.get_local_rank("dp")]
            loss = sharded(hp.distribute_tensor(mine, tp, [hp.Replicate()])).square().mean()
            loss.backward()
            if abs(float(loss.detach().full_tensor() - whole(mine).detach().square().mean())) > 1e-12:
                wrong.append(f"step {step}: loss")
            for (name, expected), found in zip(whole.named_parameters(), sharded.parameters(), strict=True):
                if found.grad is None or (found.grad.full_tensor() - expected.grad).abs().max() > 1e-12:
                    wrong.append(f"step {step}: gradient of {name}")
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for (name, expected), found in zip(whole.named_parameters(), sharded.parameters(), strict=True):
            if (found.detach().full_tensor() - expected).abs().max() > 1e-12:
                wrong.append(name)
        keep_platform_groups()  # looking at whole tensors made one of all ranks
        return wrong
