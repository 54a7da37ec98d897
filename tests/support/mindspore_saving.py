"""Programs that save and load on ranks of MindSpore; names and values are those of `saving_programs`."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

import hyper_parallel as hp
from support.process_worker import keep_platform_groups

SHAPES: dict[str, tuple[tuple[int, ...], Any]] = {
    "one": ((7, 5), mindspore.float32),
    "two": ((5, 6, 3), mindspore.float32),
    "small": ((9, 4), mindspore.bfloat16),
    "number": ((), mindspore.float32),
    "thin": ((1, 11), mindspore.float16),
}
PLANS = {"plain": None, "dp": ("dp", None), "tp": (None, "dp")}


def values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Small whole numbers: exact in every dtype, so that the two frameworks hold the same bits."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return generator.integers(-100, 100, shape).astype(np.float32)


class Net(nn.Cell):
    def __init__(self, *, is_zero: bool) -> None:
        super().__init__()
        for name, (shape, dtype) in SHAPES.items():
            values = np.zeros(shape, np.float32) if is_zero else values_of(name, shape)
            setattr(self, name, Parameter(Tensor(values).astype(dtype), name=name))


def model_of(plan: str, *, is_zero: bool) -> Any:
    net = Net(is_zero=is_zero)
    splits = PLANS[plan]
    if splits is None:
        return net
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    parameters = {
        name: tuple(splits[dim] if dim < 2 else None for dim in range(len(shape)))
        for name, (shape, _) in SHAPES.items()
    }
    made = hp.shard_module(net, mesh, hp.ShardPlan(parameters=parameters))
    keep_platform_groups()
    return made


def optimizer_of(model: Any, *, is_zero: bool) -> Any:
    local = [value.to_local() if isinstance(value, hp.DTensor) else value for value in model.trainable_params()]
    made = nn.Adam(
        [value for value in local if value.dtype == mindspore.float32], learning_rate=0.5 if is_zero else 0.25
    )
    if not is_zero:
        for value in made.parameters_and_names():
            if value[0].startswith("moment"):
                value[1].set_data(Tensor(np.full(value[1].shape, float(len(value[0])), np.float32)))
    return made


def kept(model: Any, optimizer: Any) -> dict[str, np.ndarray]:
    found = {}
    for name, value in [
        *model.parameters_and_names(),
        *(() if optimizer is None else optimizer.parameters_and_names()),
    ]:
        local = value.to_local() if isinstance(value, hp.DTensor) else value
        found[name] = local.astype(mindspore.float32).asnumpy().copy()
    return found


def save_all(folder: str) -> None:
    for plan in PLANS:
        model = model_of(plan, is_zero=False)
        optimizer = optimizer_of(model, is_zero=False)
        hp.save(Path(folder, f"mindspore {plan}"), model=model, optimizer=optimizer, extra={"plan": plan}, timeout=30)


def load_all(folder: str) -> list[str]:
    wrong = []
    for plan in PLANS:
        model = model_of(plan, is_zero=False)
        whole = kept(model, optimizer_of(model, is_zero=False))
        for saved in sorted(os.listdir(folder)):
            target = model_of(plan, is_zero=True)
            is_own = saved.startswith("mindspore")
            optimizer = optimizer_of(target, is_zero=True) if is_own else None
            hp.load(Path(folder, saved), model=target, optimizer=optimizer, timeout=30)
            for name, values in kept(target, optimizer).items():
                if not np.array_equal(values, whole[name]):
                    wrong.append(f"{saved} into {plan}: {name}")
    return wrong


def load_on_pytorch(folder: str, save_to: str) -> list[str]:
    """On a rank of PyTorch: load what MindSpore saved, and save the same model for the way back."""
    import torch

    wrong = []
    names = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
    expected = {
        name: torch.from_numpy(np.asarray(values_of(name, shape))).to(names[str(dtype).lower()])
        for name, (shape, dtype) in SHAPES.items()
    }
    for saved in sorted(os.listdir(folder)):
        net = torch.nn.Module()
        for name, value in expected.items():
            net.register_parameter(name, torch.nn.Parameter(torch.zeros_like(value)))
        extra = hp.load(Path(folder, saved), model=net, timeout=30)
        if f"mindspore {extra['plan']}" != saved:
            wrong.append(f"{saved}: {extra}")
        wrong += [
            f"{saved}: {name}" for name, value in net.state_dict().items() if not torch.equal(value, expected[name])
        ]
    hp.save(Path(save_to, "pytorch"), model=net, timeout=30)
    return wrong
