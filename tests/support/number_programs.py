"""Models that are filled and seeded on several ranks, beside one process. On PyTorch.

Everything here runs in the workers of `support.processes`, and answers what differs, in words.
"""

from __future__ import annotations

import math
import random
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel as hp
from support.filled_models import MODELS, SEED, gradients, on_meta, sequence
from support.process_worker import keep_all_groups, keep_platform_groups, kept_mesh
from support.schedule_names import SCHEDULES


def differing(model: nn.Module, right: nn.Module) -> list[str]:
    """Names of parameters and buffers that are not those of the other model, bit for bit, after they are put together."""
    expected = {**dict(right.named_parameters()), **dict(right.named_buffers())}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrong = sorted(expected.keys() ^ found.keys())
    for name in sorted(expected.keys() & found.keys()):
        value: Any = found[name]
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        if not torch.equal(whole.detach(), expected[name].detach()):
            wrong.append(name)
    return wrong


def filled(name: str, way: str) -> list[str]:
    """What differs from one process after a model was built on meta, sharded and filled."""
    right = hp.materialize(MODELS[name](), SEED)
    model = on_meta(name)
    if way == "layouts":
        mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        choice = random.Random(name)
        options = [("tp", "dp"), (("tp", "dp"), None), (None, "tp"), ("dp", None)]
        plan = {key: choice.choice(options) for key, value in model.named_parameters() if value.ndim == 2}
        hp.shard_module(model, mesh, {"parameters": plan})
        keep_platform_groups()
    elif way == "fsdp2":
        mesh = kept_mesh((4,), ("dp",))
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                for block in module:
                    fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        mesh = kept_mesh((2, 2), ("dp", "tp"))
        tp = mesh["tp"]
        for block in model:
            if isinstance(block, nn.Sequential):
                parallelize_module(block, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
                fully_shard(block, mesh=mesh["dp"])
    before = {key: id(value) for key, value in model.named_parameters()}
    hp.materialize(model, SEED)
    wrong = differing(model, right)
    if before != {key: id(value) for key, value in model.named_parameters()}:
        wrong.append("other parameters than before")
    if way == "fsdp2" and name != "sequence":
        tokens = torch.arange(6).reshape(1, 6)
        difference = (model.eval()(tokens).logits - right.eval()(tokens).logits).abs().max().item()
        wrong += [] if difference < 1e-5 else [f"logits by {difference}"]
    keep_all_groups()
    return wrong


def filled_in_stages(number: int, is_cut: bool = False) -> list[str]:
    """The same, of a sequence cut into stages, each of which is cut into parts again if wanted; and the norm."""
    whole = hp.materialize(MODELS["sequence"](), SEED).double()
    rank = torch.distributed.get_rank()
    num_parts = torch.distributed.get_world_size() // number
    stage = hp.split_stages(on_meta("sequence"), number)[rank // num_parts]
    mesh = hp.init_device_mesh("cpu", (number, num_parts), mesh_dim_names=("pp", "tp"))["tp"]
    if is_cut:
        plan = {key: ("tp", None) for key, value in stage.module.named_parameters() if value.ndim == 2}
        hp.shard_module(stage.module, mesh, {"parameters": plan})
    hp.materialize([stage], SEED)
    stage.module.double()
    expected = dict(whole.named_parameters(remove_duplicate=False))
    gradients(whole)
    wrong = []
    for key, value in stage.module.named_parameters():
        if not torch.equal(value.full_tensor() if is_cut else value, expected[key]):
            wrong.append(key)
        gradient = expected[key].grad.clone()
        value.grad = hp.distribute_tensor(gradient, value.layout) if is_cut else gradient
    right, found = float(hp.clip_grad_norm_(whole, 1.0)), float(hp.clip_grad_norm_([stage], 1.0))
    if abs(right - found) > 1e-12 * right:
        wrong.append(f"norm {found}, expected {right}")
    keep_platform_groups()
    return wrong


def filled_randomly(seed: int) -> list[str]:
    """A random sequence of modules in random stages, layouts, or PyTorch's FSDP2, on 4 ranks."""
    choice = random.Random(seed)
    sizes = [choice.choice([1, 2, 3, 5, 8]) for _ in range(9)]
    kinds = [
        lambda a, b: nn.Linear(a, b, bias=b > 2),
        lambda a, b: nn.Embedding(a, b, padding_idx=0),
        lambda a, b: nn.Conv1d(a, b, 3),
        lambda a, b: nn.MultiheadAttention(2 * a, 2),
        lambda a, b: nn.Sequential(nn.LayerNorm(a), nn.BatchNorm1d(b), nn.Linear(a, b)),
        lambda a, b: nn.LSTM(a, b),
    ]
    chosen = [choice.choice(kinds) for _ in range(8)]
    ties = choice.random() < 0.5

    def build() -> nn.Sequential:
        made = nn.Sequential(*(kind(a, b) for kind, a, b in zip(chosen, sizes, sizes[1:], strict=False)))
        made.append(nn.Embedding(5, 4)).append(nn.Linear(4, 5))
        if ties:
            made[-1].weight = made[-2].weight
        return made

    right = hp.materialize(build(), seed)
    with hp.init_on_device("meta"):
        model = build()
    rank = torch.distributed.get_rank()
    part, wrapped = model, choice.choice(["layouts", "layouts", "fsdp2", "nothing"])
    pp, dp, tp = choice.choice([(1, 2, 2), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1)])
    if pp > 1:
        begins = sorted(choice.sample(range(1, 10), pp - 1))
        stages = hp.split_stages(model, pp, by=[str(begin) for begin in begins])
        part = stages[rank // (4 // pp)].module
    if wrapped == "layouts":
        mesh = hp.init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))[("dp", "tp")]
        options = [None, "dp", "tp", ("dp", "tp"), ("tp", "dp")]
        plan: dict[str, Any] = {}
        for key, value in right.named_parameters():
            dims: list[Any] = [None] * value.ndim
            dims[choice.randrange(value.ndim)] = choice.choice(options)
            plan[key] = tuple(dims)
        hp.shard_module(
            part, mesh, {"parameters": {k: v for k, v in plan.items() if k in dict(part.named_parameters())}}
        )
    elif wrapped == "fsdp2" and pp == 1:
        mesh = kept_mesh((4,), ("dp",))
        shared = {id(model[-1]), id(model[-2])}
        for module in model:
            if choice.random() < 0.5 and id(module) not in shared:
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    hp.materialize(part if pp == 1 else [stages[rank // (4 // pp)]], seed)
    expected = dict(right.named_parameters(remove_duplicate=False))
    wrong = []
    for key, value in part.named_parameters():
        whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
        if not torch.equal(whole, expected[key]):
            wrong.append(f"{key} of seed {seed}, {wrapped}, {(pp, dp, tp)}")
    keep_platform_groups()
    keep_all_groups()
    return wrong


def pipeline_on_meta(name: str) -> list[str]:
    """A pipeline that is made before its stages have values, filled, and trained for a step beside one process."""
    whole = hp.materialize(sequence(), SEED)
    schedule = SCHEDULES[name](2, 4)
    stages = hp.split_stages(on_meta("sequence"), schedule.num_stages)
    mine = [stages[index] for index in schedule.placement.stages_on(torch.distributed.get_rank())]
    run = hp.materialize(hp.Pipeline(mine, schedule, loss_fn=nn.functional.mse_loss), SEED)
    tokens, target = torch.arange(16).reshape(8, 2) % 7, torch.ones(8, 2, 7)
    loss = run.step(tokens, target=target)
    right = nn.functional.mse_loss(whole(tokens), target)
    right.backward()
    wrong = [] if torch.allclose(loss, right, rtol=1e-6) else [f"loss {loss}, expected {right}"]
    norms = [float(hp.clip_grad_norm_(each, 1.0)) for each in (run, whole)]
    return wrong if math.isclose(*norms, rel_tol=1e-5) else [*wrong, f"norms {norms}"]


def trained_with_fsdp2(begins_with_values: bool) -> list[str]:
    """PyTorch's FSDP2 over a mesh without names: filled, trained for steps, and filled again."""
    right = hp.materialize(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), SEED)
    with hp.init_on_device("cpu" if begins_with_values else "meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    fully_shard(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, right)]
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    wrong = []
    for _ in range(2):
        for each in (model, right):
            hp.materialize(each, SEED)
        wrong += differing(model, right)
        for _ in range(3):
            losses = []
            for each, optimizer in zip((model, right), optimizers, strict=True):
                losses.append(each(x).square().mean())
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            wrong += [] if torch.allclose(*losses, rtol=1e-4) else [f"losses {losses}"]
    keep_all_groups()
    return wrong


class Alive(TorchDispatchMode):
    """The bytes of tensors that were made in here and are alive, and the most there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                self._note(each.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += num_bytes
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def most_bytes() -> tuple[int, int, int]:
    """The most bytes at a time while a sharded model is filled, those of the parts, and those of the largest module."""
    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with hp.init_on_device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    hp.shard_module(model, mesh, {"parameters": {"*": ("tp", None)}})
    with Alive() as alive:
        hp.materialize(model, SEED)
    keep_platform_groups()
    parts = sum(value._local_tensor.nbytes for value in model.parameters())
    return alive.most, parts, 64 * 64 * 4


def stages_with_one_name() -> str:
    """Stages made by hand, whose modules have the same names on all ranks."""
    rank = torch.distributed.get_rank()
    try:
        hp.materialize(hp.PipelineStage(nn.Sequential(nn.Linear(2, 2)), rank, 2), SEED)
    except ValueError as error:
        return str(error)
    return "filled"


def other_seeds() -> str:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = hp.shard_module(nn.Linear(4, 4), mesh, {"parameters": {"weight": ("tp", None)}})
    try:
        hp.materialize(model, torch.distributed.get_rank())
    except ValueError as error:
        return str(error)
    finally:
        keep_platform_groups()
    return "filled"


def drawn_seed() -> list[float]:
    torch.manual_seed(torch.distributed.get_rank())
    return hp.materialize(nn.Linear(3, 1, bias=False)).weight.flatten().tolist()


def draws(differ_on: Any, with_mesh: bool) -> tuple[float, float, float, int]:
    """What each generator of this rank draws first after `manual_seed`, and its seed."""
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if with_mesh else None
    seed = hp.manual_seed(3, mesh, **({} if differ_on is None else {"differ_on": differ_on}))
    keep_platform_groups()
    return torch.rand(()).item(), random.random(), float(np.random.random()), seed
