"""Unmodified Hugging Face models, sharded, over thirty steps with accumulation and clipping; beside one process."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
from support.process_worker import keep_platform_groups

STEPS, MICROBATCHES, WORDS = 30, 2, 67
MODELS = ("llama", "mixtral")


def _made(name: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 16,
    }  # fmt: skip
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"  # the grouped product has no float64
    return MixtralForCausalLM(config)


class _Float64:
    """`torch`, for a model's file: what it takes in float32, whatever it is, it takes in float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@contextmanager
def _all_in(dtype: torch.dtype, name: str) -> Iterator[None]:
    """Norms and routers of these models are always in float32: there 1e-16 becomes 1e-8."""
    file: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    as_float: Any = torch.Tensor.float
    if dtype is torch.float64:
        file.torch, torch.Tensor.float = _Float64(), torch.Tensor.double  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        file.torch, torch.Tensor.float = torch, as_float  # type: ignore[method-assign]


def curve(name: str, dtype_name: str, zero: int) -> tuple[list[float], list[float]]:
    """The losses of thirty steps on all ranks, and those of one process, which the first rank makes."""
    dtype = getattr(torch, dtype_name)
    model = _made(name).to(dtype)
    mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    mesh.get_group("dp")
    keep_platform_groups()
    for layer in model.model.layers:
        hp.fully_shard(layer, mesh=mesh, zero=zero)
    hp.fully_shard(model, mesh=mesh, zero=zero)
    with _all_in(dtype, name):
        ours = _losses(model, dist.get_world_size(), dist.get_rank())
        alone = _losses(_made(name).to(dtype), dist.get_world_size(), None) if dist.get_rank() == 0 else []
    return ours, alone


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The models' own is taken in float32, whatever they are."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _losses(model: Any, num_ranks: int, rank: int | None) -> list[float]:
    """`rank` None: the whole batch in this process. A token that is not valid counts nowhere."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step % 3)  # few batches, so that they are learned
        words = torch.randint(0, WORDS, (MICROBATCHES, num_ranks, 10), generator=generator)
        valid = torch.rand(words.shape, generator=generator) < 0.8
        valid[..., :2] = True
        labels = words.masked_fill(~valid, -100)
        num_all = int((labels[..., 1:] != -100).sum())
        total = torch.zeros((), dtype=torch.float64)
        for number in range(MICROBATCHES):
            mine = slice(None) if rank is None else slice(rank, rank + 1)
            inputs, wanted = words[number, mine], labels[number, mine]
            num_valid = int((wanted[:, 1:] != -100).sum())
            if rank is None:
                loss = _loss(model(input_ids=inputs).logits, wanted)
                (loss * (num_valid / num_all)).backward()
            else:
                with hp.accumulate(model, last=number == MICROBATCHES - 1, weight=num_valid):
                    loss = _loss(model(input_ids=inputs).logits, wanted)
                    loss.backward()
            total += loss.detach().double() * num_valid / num_all
        if rank is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            hp.get_torch_platform().clip_grad_norm_(list(model.parameters()), 0.5)
            dist.all_reduce(total)
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
