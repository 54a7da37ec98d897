"""Models that are filled, seeded and clipped on several ranks, beside one process. On PyTorch.

Everything here runs in the workers of `support.processes`, and answers what differs, in words.
"""

from __future__ import annotations

import copy
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel as hp
from support import pipelines
from support.process_worker import keep_all_groups, keep_platform_groups, kept_mesh
from support.schedule_names import SCHEDULES

SEED = 5
WIDTH = 6  # does not divide by 4


class Head(nn.Linear):
    """A last layer whose weight may be that of the embedding, which begins with other numbers."""


def sequence() -> nn.Sequential:
    """An embedding, blocks, a head with the embedding's weight and a bias of its own."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, 10), nn.LayerNorm(10), nn.Linear(10, WIDTH)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(7, WIDTH), *blocks, Head(WIDTH, 7))
    model[-1].weight = model[0].weight
    return model


def hugging_face(name: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    sizes: dict[str, Any] = {
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    }
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    if name == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=3))
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequence": sequence,
    "llama": lambda: hugging_face("llama"),
    "gpt2": lambda: hugging_face("gpt2"),
    "mixtral": lambda: hugging_face("mixtral"),
}


def on_meta(name: str) -> nn.Module:
    with hp.init_on_device("meta"):
        return MODELS[name]()


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
        hp.shard_module(part, mesh, {"parameters": {k: v for k, v in plan.items() if k in dict(part.named_parameters())}})
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


def stages_with_one_name() -> str:
    """Stages made by hand, whose modules have the same names on all ranks."""
    rank = torch.distributed.get_rank()
    try:
        hp.materialize(hp.PipelineStage(nn.Sequential(nn.Linear(2, 2)), rank, 2), SEED)
    except ValueError as error:
        return str(error)
    return "filled"


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


def _equal(first: Any, second: Any) -> bool:
    return torch.equal(*(getattr(each, "_local_tensor", each) for each in (first, second)))


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


# -- norms --------------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, *, without: str | None = None) -> None:
    """Give every parameter a gradient that its name says, as large as it is whole; none to one of them."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(len(name) * 1000 + sum(map(ord, name)))
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        if name == without:
            parameter.grad = None


def clipped(way: str, norm_type: float, case: str) -> tuple[float, float, float]:
    """The norm beside that of one process, and the largest difference of gradients afterwards.

    Cases: "all", "missing" (one parameter has no gradient), "nan" (one rank has one in its part).
    """
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).double()
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
        fully_shard(sharded, mesh=kept_mesh((4,), ("dp",)))
        for value, source in zip(sharded.parameters(), plain.parameters(), strict=True):
            value.grad = torch.distributed.tensor.distribute_tensor(
                source.grad.clone(), value.device_mesh, value.placements, src_data_rank=None
            )
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
