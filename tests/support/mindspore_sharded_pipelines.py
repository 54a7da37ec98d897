"""Pipelines on MindSpore whose stages are sharded over data parallel ranks, beside one process with the whole batch."""

from __future__ import annotations

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

import hyper_parallel as hp
from support.mindspore_sharding import Block, batch_of, fill, mesh_of, part_of
from support.mindspore_sharding_programs import left_over

SCHEDULES = {
    "one_f_one_b": lambda p, m: hp.schedules.one_f_one_b(p, m),
    "zbv": lambda p, m: hp.schedules.zbv(p, m),
}


def train(name: str, zero: int) -> list[str]:
    """What differs from one process in two steps, in words."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    whole = fill(nn.SequentialCell([Block(4) for _ in range(4)]), dtype=np.float64)
    model = fill(nn.SequentialCell([Block(4) for _ in range(4)]), dtype=np.float64)
    schedule = SCHEDULES[name](2, 4)
    stages = hp.split_stages(model, schedule.num_stages)
    mine = [stages[index] for index in schedule.placement.stages_on(mesh.get_local_rank("pp"))]
    for stage in mine:
        for block in stage.module:
            hp.fully_shard(block, mesh=mesh, zero=zero)
    pipeline = hp.Pipeline(mine, schedule, loss_fn=lambda x, y: ops.mse_loss(x, y), mesh=mesh)
    at, wrong = mesh.get_local_rank("dp"), []
    for step in range(2):
        x, y = batch_of(step, 16, dtype=np.float64), batch_of(10 + step, 16, dtype=np.float64)
        pipeline.step(_part(x, at), target=_part(y, at))
        _, expected = mindspore.value_and_grad(lambda x, y: ops.mse_loss(whole(x), y), None, whole.trainable_params())(
            x, y
        )
        others = dict(zip([p.name for p in whole.trainable_params()], expected, strict=True))
        for stage in mine:
            for parameter in stage.module.trainable_params():
                local = parameter.to_local()
                part = part_of(others[parameter.name].asnumpy(), parameter)
                if np.abs(local._grad.asnumpy() - part).max(initial=0.0) > 1e-12:
                    wrong.append(f"step {step}: gradient of {parameter.name}")
                local.set_data(Tensor(local.asnumpy() - 0.1 * part))
                local._grad = None
        for parameter, grad in zip(whole.trainable_params(), expected, strict=True):
            parameter.set_data(Tensor(parameter.asnumpy() - 0.1 * grad.asnumpy()))
    for stage in mine:
        wrong += left_over(stage.module)
    return wrong


def _part(batch: Tensor, at: int) -> Tensor:
    return Tensor(batch.asnumpy()[8 * at : 8 * at + 8])
