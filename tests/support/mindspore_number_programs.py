"""What `number_programs` is for PyTorch, on MindSpore: cells that are filled and clipped on ranks, beside one process.

Everything here runs in the workers of `support.processes`, and answers what differs, in words.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

import hyper_parallel as hp
from support.process_worker import keep_platform_groups

SEED = 5
WIDTH = 6


class OwnScale(nn.Cell):
    """A cell that fills itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = ms.Parameter(Tensor(np.ones(WIDTH, np.float32)), name="scale")

    def reset_parameters(self) -> None:
        self.scale.set_data(Tensor(np.random.rand(WIDTH).astype(np.float32)))

    def construct(self, x: Tensor) -> Tensor:
        return x * self.scale


def sequence() -> nn.SequentialCell:
    """An embedding, blocks, a cell that fills itself, a head with the embedding's weight."""
    blocks = [nn.SequentialCell(nn.Dense(WIDTH, 10), nn.LayerNorm((10,)), nn.Dense(10, WIDTH)) for _ in range(2)]
    model = nn.SequentialCell(nn.Embedding(7, WIDTH), *blocks, OwnScale(), nn.Dense(WIDTH, 7))
    model[-1].weight = model[0].embedding_table
    return model


def on_meta() -> nn.SequentialCell:
    with hp.init_on_device("meta"):
        return sequence()


def values_of(model: nn.Cell) -> dict[str, np.ndarray]:
    return {path: _whole(value) for path, value in _by_path(model)}


def _by_path(model: nn.Cell) -> list[tuple[str, Any]]:
    return [
        (f"{path}.{key}" if path else key, value)
        for path, cell in model.cells_and_names()
        for key, value in cell._params.items()
    ]


def _whole(value: Any) -> np.ndarray:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).asnumpy()


def filled_in_layouts() -> list[str]:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    right = values_of(hp.materialize(on_meta(), SEED))
    model = on_meta()
    model = hp.shard_module(model, mesh, {"parameters": {"1.0.weight": ("tp", None), "2.2.weight": (None, "tp")}})
    hp.materialize(model, SEED)
    wrong = [path for path, value in values_of(model).items() if not np.array_equal(value, right[path])]
    keep_platform_groups()
    return wrong


def filled_in_stages() -> list[str]:
    """Values of the stages, and the norm over them, beside one process."""
    whole = hp.materialize(on_meta(), SEED)
    right = values_of(whole)
    rank = hp.get_platform().get_rank()
    stage = hp.split_stages(on_meta(), 2)[rank]
    hp.materialize([stage], SEED)
    found = values_of(stage.module)
    wrong = [path for path, value in found.items() if not np.array_equal(value, right[path])]
    for model in (whole, stage.module):
        for path, value in _by_path(model):
            path = {"4.weight": "0.embedding_table"}.get(path, path)
            random = np.random.RandomState(sum(map(ord, path)))
            value._grad = Tensor(random.standard_normal(value.shape).astype(np.float32))
    for order in (1.0, 2.0, math.inf):
        expected = float(hp.clip_grad_norm_(whole, 1e9, order).asnumpy())
        norm = float(hp.clip_grad_norm_([stage], 1e9, order).asnumpy())
        if abs(norm - expected) > 1e-6 * expected:
            wrong.append(f"norm of order {order}: {norm}, expected {expected}")
    hp.clip_grad_norm_(whole, 0.5)
    hp.clip_grad_norm_([stage], 0.5)
    pairs = {path: value._grad.asnumpy() for path, value in _by_path(whole)}
    wrong += [
        f"gradient of {path}"
        for path, value in _by_path(stage.module)
        if not np.allclose(value._grad.asnumpy(), pairs[path], rtol=1e-5, atol=1e-8)
    ]
    return wrong


def norms_with_gaps() -> list[float]:
    """Norms where rank 1 has no gradient of a part, and where rank 0 has NaN in its part."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    cell = hp.shard_module(nn.Dense(2, 2, has_bias=False), mesh, {"parameters": {"weight": ("tp", None)}})
    rank = hp.get_platform().get_rank()
    if rank == 0:
        cell.weight._grad = Tensor(np.full((1, 2), 3.0, np.float32))
    found = [float(hp.clip_grad_norm_(cell, 1e9, order).asnumpy()) for order in (1.0, math.inf)]
    cell.weight._grad = Tensor(np.full((1, 2), math.nan if rank == 0 else 1.0, np.float32))
    found += [float(hp.clip_grad_norm_(cell, 1e9, order).asnumpy()) for order in (2.0, math.inf)]
    keep_platform_groups()
    return found


def draws() -> list[float]:
    """What this rank draws after `manual_seed` without a mesh and with one on which ranks do not differ."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = []
    for given in (None, mesh):
        hp.manual_seed(3, given)
        found += [float(ops.rand(1).asnumpy()[0]), float(np.random.random())]
    keep_platform_groups()
    return found
