"""Programs that save and load on ranks, run inside the worker processes of `support.processes`, on PyTorch.

The model has tensors of all kinds, and values that follow from names alone: whoever has a box of one knows what is to
be in it, whatever the plan and the number of ranks.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
from support.process_worker import keep_platform_groups, kept_mesh

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "one.weight": ((7, 5), torch.float32),
    "one.bias": ((7,), torch.float32),
    "two.weight": ((5, 6, 3), torch.float32),
    "small": ((9, 4), torch.bfloat16),
    "long_one": ((4, 8), torch.float64),
    "number": ((), torch.float32),
    "nothing": ((0, 3), torch.float32),
    "thin": ((1, 11), torch.float16),
}
BUFFERS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "count": ((), torch.int64),
    "mask": ((6,), torch.bool),
    "table": ((3, 2), torch.complex64),
}
SECOND_STAGE = {"long_one", "number", "nothing", "thin", "mask", "table"}
# name -> (shape of the mesh, its axes, axes that split dims 0 and 1)
PLANS: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[Any, Any]]] = {
    "dp": ((-1,), ("dp",), ("dp", None)),
    "tp": ((-1,), ("tp",), (None, "tp")),
    "dp x tp": ((2, -1), ("dp", "tp"), ("dp", "tp")),
    "tp then dp in one dim": ((2, -1), ("dp", "tp"), (("tp", "dp"), None)),
    "two copies of dp": ((2, -1), ("copies", "dp"), ("dp", None)),
}
ON_RANKS = {
    1: ["plain", "dp"],
    2: ["plain", "dp", "tp", "pp", "fsdp2", "fully_shard"],
    3: ["dp", "tp", "fully_shard"],
    4: [
        "plain",
        "tp",
        "dp x tp",
        "tp then dp in one dim",
        "two copies of dp",
        "pp x dp",
        "fsdp2 x tp",
        "two copies of fully_shard",
    ],
}


def values_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype == torch.bool:
        return values > 0
    return (values * 100).to(dtype)


class Net(nn.Module):
    """The tensors of these names, right or all zeros."""

    def __init__(self, names: set[str], *, is_zero: bool) -> None:
        super().__init__()
        for table in (SHAPES, BUFFERS):
            for name, (shape, dtype) in table.items():
                if name in names:
                    values = torch.zeros(shape, dtype=dtype) if is_zero else values_of(name, shape, dtype)
                    self._put(name, values, is_parameter=table is SHAPES)

    def _put(self, name: str, values: torch.Tensor, *, is_parameter: bool) -> None:
        *path, last = name.split(".")
        owner: nn.Module = self
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        if is_parameter:
            owner.register_parameter(last, nn.Parameter(values))
        else:
            owner.register_buffer(last, values)


ALL = {*SHAPES, *BUFFERS}


def model_of(plan: str, *, is_zero: bool) -> Any:
    world, rank = dist.get_world_size(), dist.get_rank()
    if plan == "plain":
        return Net(ALL, is_zero=is_zero)
    if plan.startswith("fsdp2"):
        return _with_fsdp2(Net(ALL, is_zero=is_zero), has_tp="tp" in plan)
    if plan.endswith("fully_shard"):
        return _fully_sharded(Net(ALL, is_zero=is_zero), has_copies=plan != "fully_shard")
    if plan.startswith("pp"):
        stage = rank * 2 // world
        names = ALL & SECOND_STAGE if stage else ALL - SECOND_STAGE
        net: Any = Net(names, is_zero=is_zero)
        if world > 2:
            half = world // 2
            mesh = hp.DeviceMesh("cpu", list(range(stage * half, stage * half + half)), mesh_dim_names=("dp",))
            net = _sharded(net, mesh, ("dp", None))
        return [hp.PipelineStage(net, stage, 2)]
    shape, axes, splits = PLANS[plan]
    known = [size for size in shape if size > 0]
    sizes = tuple(size if size > 0 else world // (known[0] if known else 1) for size in shape)
    return _sharded(Net(ALL, is_zero=is_zero), hp.init_device_mesh("cpu", sizes, mesh_dim_names=axes), splits)


def _sharded(net: nn.Module, mesh: hp.DeviceMesh, splits: tuple[Any, Any]) -> nn.Module:
    parameters = {}
    for name, parameter in net.named_parameters():
        parameters[name] = tuple(splits[dim] if dim < 2 else None for dim in range(parameter.ndim))
    made = hp.shard_module(net, mesh, hp.ShardPlan(parameters=parameters))
    keep_platform_groups()
    return made


def _fully_sharded(net: nn.Module, *, has_copies: bool) -> nn.Module:
    num_copies = 2 if has_copies else 1
    mesh = hp.init_device_mesh(
        "cpu", (num_copies, dist.get_world_size() // num_copies), mesh_dim_names=("copies", "dp")
    )
    mesh.get_group("dp"), mesh.get_group("copies")
    keep_platform_groups()
    made: nn.Module = hp.fully_shard(net, mesh=mesh, replicate_axis="copies" if has_copies else None)
    return made


def _with_fsdp2(net: nn.Module, *, has_tp: bool) -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    for name in ("number", "nothing", "small", "long_one", "thin"):  # FSDP2 wants one dtype, and no numbers
        value = net._parameters.pop(name)
        net.register_buffer(name, value.detach())
    if not has_tp:
        fully_shard(net, mesh=kept_mesh((dist.get_world_size(),), ("dp",)))
        return net
    mesh = kept_mesh((2, dist.get_world_size() // 2), ("dp", "tp"))
    for path, dim in (("one.weight", 0), ("two.weight", 1)):
        owner = net.get_submodule(path.split(".")[0])
        parts = distribute_tensor(owner.weight.detach(), mesh["tp"], [Shard(dim)])
        owner.register_parameter("weight", nn.Parameter(parts))
    owner = net.get_submodule("one")
    owner.register_parameter("bias", nn.Parameter(distribute_tensor(owner.bias.detach(), mesh["tp"], [Shard(0)])))
    fully_shard(net, mesh=mesh["dp"])
    return net


def modules_of(model: Any) -> list[nn.Module]:
    return [stage.module for stage in model] if isinstance(model, list) else [model]


def optimizer_of(model: Any, *, is_zero: bool) -> torch.optim.Optimizer:
    """Adam as after three steps, without taking them: every value follows from its name."""
    named = {name: value for module in modules_of(model) for name, value in module.named_parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [value for name, value in named.items() if "weight" in name], "lr": 0.0 if is_zero else 0.5},
        {"params": [value for name, value in named.items() if "weight" not in name], "weight_decay": 0.25},
    ]
    optimizer = torch.optim.Adam([group for group in groups if group["params"]], lr=0.125, betas=(0.5, 0.75))
    if not is_zero:
        for name, value in named.items():
            if name == "thin":  # frozen: it has no state
                continue
            state = optimizer.state[value]
            state["step"] = torch.tensor(3.0)
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = _like(value, values_of(f"{name}/{kind}", tuple(value.shape), value.dtype))
    return optimizer


def _like(value: Any, whole: torch.Tensor) -> Any:
    if isinstance(value, hp.DTensor):
        return hp.distribute_tensor(whole, value.layout)
    if hasattr(value, "_local_tensor"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        made = torch.zeros_like(value)
        sizes, starts = compute_local_shape_and_global_offset(whole.shape, value.device_mesh, value.placements)
        box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        made._local_tensor.copy_(whole[box])
        return made
    return whole


def local_of(value: Any) -> torch.Tensor:
    if isinstance(value, hp.DTensor):
        return value._local.detach()
    return getattr(value, "_local_tensor", value).detach()


def kept(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """This rank's values of all tensors, and what the optimizer has beside them."""
    found: dict[str, Any] = {}
    for module in modules_of(model):
        names = {id(value): name for name, value in module.state_dict(keep_vars=True).items()}
        found |= {name: local_of(value).clone() for name, value in module.state_dict(keep_vars=True).items()}
        for value, state in () if optimizer is None else optimizer.state.items():
            if id(value) in names:
                found |= {f"{names[id(value)]}/{kind}": local_of(part).clone() for kind, part in state.items()}
    if optimizer is not None:
        found["groups"] = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what is missing, too much, or not equal bit for bit."""
    wrong = sorted(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        mine, right = found[name], expected[name]
        if not isinstance(right, torch.Tensor):
            if mine != right:
                wrong.append(f"{name}: {mine}, not {right}")
        elif mine.dtype != right.dtype or not torch.equal(mine, right):
            wrong.append(name)
    return wrong


def fill_with_zeros(model: Any) -> None:
    for module in modules_of(model):
        for value in module.state_dict(keep_vars=True).values():
            local_of(value).zero_()


def save_all(folder: str, plans: list[str]) -> None:
    for plan in plans:
        model = model_of(plan, is_zero=False)
        optimizer = optimizer_of(model, is_zero=False)
        path = Path(folder, f"{plan} on {dist.get_world_size()}")
        hp.save(path, model=model, optimizer=optimizer, extra={"plan": plan}, timeout=30)


def load_all(folder: str, plans: list[str]) -> list[str]:
    """Load every checkpoint of a folder into every plan; what is wrong, in words."""
    wrong = []
    for plan in plans:
        model = model_of(plan, is_zero=False)
        whole = kept(model, optimizer_of(model, is_zero=False))
        alone = kept(model)
        for saved in sorted(os.listdir(folder)):
            fill_with_zeros(model)
            # Under FSDP2 some parameters are buffers here, and have no state.
            is_alike = plan.startswith("fsdp2") == saved.startswith("fsdp2")
            optimizer = optimizer_of(model, is_zero=True) if is_alike else None
            extra = hp.load(Path(folder, saved), model=model, optimizer=optimizer, timeout=30)
            if extra != {"plan": saved.partition(" on ")[0]}:
                wrong.append(f"{saved}: extra {extra}")
            found = differences(kept(model, optimizer), whole if is_alike else alone)
            wrong += [f"{saved} into {plan}: {name}" for name in found]
    return wrong


# Where one rank is not as the others


def raised_by(call: Any) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def load_with_one_wrong_rank(folder: str, wrong_rank: int) -> tuple[tuple[str, str], bool, tuple[str, str]]:
    """One rank has another model: what each rank hears, whether its model is as it was, and the next load."""
    path = Path(folder, "plain on 2")
    net = Net(ALL, is_zero=True)
    if dist.get_rank() == wrong_rank:
        net.register_parameter("further", nn.Parameter(torch.zeros(2)))
    before = kept(net)
    heard = raised_by(lambda: hp.load(path, model=net, timeout=20))
    is_unchanged = differences(kept(net), before) == []
    whole_net = Net(ALL, is_zero=True)
    return heard, is_unchanged, raised_by(lambda: hp.load(path, model=whole_net, timeout=20))


def save_unlike_others(folder: str) -> list[tuple[str, str]]:
    """Ranks disagree on `extra`, on the folder, on a dtype; one has an argument that cannot be used."""
    rank = dist.get_rank()
    net = nn.Linear(3, 3)
    other = nn.Linear(3, 3).to(torch.float64 if rank else torch.float32)
    return [
        raised_by(lambda: hp.save(f"{folder}/extra", model=net, extra=rank, timeout=20)),
        raised_by(lambda: hp.save(f"{folder}/{rank}", model=net, timeout=20)),
        raised_by(lambda: hp.save(f"{folder}/dtype", model=other, timeout=20)),
        raised_by(lambda: hp.save(f"{folder}/extra", model=net, extra=object() if rank else None, timeout=20)),
        raised_by(lambda: hp.save(f"{folder}/model", model=3 if rank else net, timeout=20)),
        raised_by(lambda: hp.save(f"{folder}/good", model=net, timeout=20)),
    ]


def save_without(folder: str, absent: int, in_background: bool) -> tuple[str, str]:
    """One rank does not make the call: what the others hear. Then all do, and it works."""
    net = nn.Linear(3, 3)
    heard = "", ""
    if dist.get_rank() != absent:
        heard = raised_by(lambda: hp.save(f"{folder}/first", model=net, background=in_background, timeout=0.6))
    dist.barrier()
    hp.save(f"{folder}/second", model=net, timeout=20)
    return heard


def save_and_load_at_once(folder: str) -> tuple[str, str]:
    net = nn.Linear(3, 3)
    hp.save(f"{folder}/a", model=net, timeout=20)
    if dist.get_rank():
        return raised_by(lambda: hp.load(f"{folder}/a", model=net, timeout=20))
    return raised_by(lambda: hp.save(f"{folder}/b", model=net, timeout=20))


def stages_with_one_name_for_two(folder: str) -> tuple[str, str]:
    stage = hp.PipelineStage(nn.Sequential(nn.Linear(3, 3)), dist.get_rank(), 2)
    return raised_by(lambda: hp.save(f"{folder}/a", model=[stage], timeout=20))


def tied_stages(folder: str) -> list[str]:
    """A weight in the first and the last stage: saved once, also its state; what one process and the stages load."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    layers[3].weight = layers[0].weight
    model = nn.Sequential(*layers)
    stage = hp.split_stages(model, 2)[dist.get_rank()]
    optimizer = torch.optim.Adam(stage.module.parameters(), lr=0.1)
    for value in stage.module.parameters():
        value.grad = torch.ones_like(value)
    optimizer.step()
    expected = kept([stage], optimizer)
    hp.save(f"{folder}/a", model=[stage], optimizer=optimizer, timeout=20)
    with torch.no_grad():
        for value in stage.module.parameters():
            value.zero_()
    fresh = torch.optim.Adam(stage.module.parameters(), lr=0.2)
    hp.load(
        f"{folder}/a",
        model=hp.PipelineStage(stage.module, stage.index, 2, tied=stage.tied),
        optimizer=fresh,
        timeout=20,
    )
    return differences(kept([stage], fresh), expected)


def train_on_after_load(folder: str) -> list[str]:
    """FSDP2 and our DTensors under Adam: training from a checkpoint is training that did not stop."""
    from torch.distributed.fsdp import fully_shard

    wrong = []
    for kind in ("fsdp2", "ours"):
        models = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            net: Any = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
            if kind == "fsdp2":
                fully_shard(net, mesh=kept_mesh((dist.get_world_size(),), ("dp",)))
            else:
                mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
                plan = hp.ShardPlan(parameters={"*.weight": ("dp", None), "*.bias": ("dp",)}, inputs={"": (None, None)})
                net = hp.shard_module(net, mesh, plan)
            models.append((net, torch.optim.Adam(net.parameters(), lr=0.1 + seed)))
        batch = torch.randn(6, 5)

        def step(net: Any, optimizer: Any, batch: torch.Tensor = batch) -> None:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()

        step(*models[0])
        hp.save(f"{folder}/{kind}", model=models[0][0], optimizer=models[0][1], timeout=20)
        hp.load(f"{folder}/{kind}", model=models[1][0], optimizer=models[1][1], timeout=20)
        for net, optimizer in models:
            step(net, optimizer)
        wrong += differences(kept(*models[1]), kept(*models[0]))
    keep_platform_groups()
    return wrong


def save_in_background_between_collectives(folder: str) -> list[str]:
    """Saves in the background beside collectives of training; what the last checkpoint has wrong."""
    net = Net(ALL, is_zero=False)
    for step in range(4):
        saving = hp.save(f"{folder}/{step}", model=net, extra=step, background=True, keep=2, timeout=20)
        for _ in range(20):
            dist.all_reduce(torch.ones(100))
    saving.wait()
    dist.barrier()
    target = Net(ALL, is_zero=True)
    found = hp.latest(folder)
    extra = hp.load(str(found), model=target, timeout=20)
    return [
        *differences(kept(target), kept(net)),
        *([] if extra == 3 and sorted(os.listdir(folder)) == ["2", "3"] else ["x"]),
    ]
