"""The models of `frontier.py`: random weights, gradients allocated, one fixed batch each.

Each has a shape for an H200 (plain steps of 0.3 to 1.3 s, 40 to 65 GiB of activations) and one that a laptop runs in a second.

    llama      16 blocks of Llama-3-8B without embedding and head: `llama_blocks.py`
    gpt2       Hugging Face's GPT-2 with the blocks of its XL size, with dropout: random numbers are drawn in every block
    moe        attention, then the two best of eight experts for every token: how many tokens an expert gets depends on the data
    hf_llama   Hugging Face's Llama at a length of 32768, with its head: the logits are a large part of the highest point
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from llama_blocks import H200, SMALL, Block, Llama, Shape, make
from torch import nn

Sizes: TypeAlias = dict[str, Any]


class Built(NamedTuple):
    """A model that is ready to train.

    Attributes:
        batch: what it takes: a tensor, or a dict of keywords
        loss_fn: the loss in what it gives
        blocks: the list in the model itself: what is put into it is what runs
    """

    name: str
    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any], torch.Tensor]
    blocks: nn.ModuleList

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of a forward."""
        return self.loss_fn(self.model(**batch) if isinstance(batch, dict) else self.model(batch))


class Spec(NamedTuple):
    """How a model is built, and what it is asked for."""

    build: Callable[[Sizes, str, torch.dtype], Built]
    large: Sizes
    small: Sizes
    budgets: tuple[str, ...] = ("50", "35", "25", "15", "min")

    def sizes(self, device: str, changed: Sizes) -> Sizes:
        """Of a device, with those that somebody wants otherwise."""
        sizes = self.large if device == "cuda" else self.small
        unknown = changed.keys() - sizes.keys()
        if unknown:
            raise SystemExit(f"No such size: {', '.join(sorted(unknown))}; there are {', '.join(sizes)}.")
        return {**sizes, **changed}


def itself(output: torch.Tensor) -> torch.Tensor:
    return output


def loss_attribute(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def ready(model: nn.Module) -> nn.Module:
    """In train mode, gradients allocated."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model.train()


# -- llama -----------------------------------------------------------------------------------------------------------------


def llama(sizes: Sizes, device: str, dtype: torch.dtype) -> Built:
    model, x = make(Shape(**sizes), device, dtype)
    return Built("llama", model, x, itself, model.blocks)


class AnyLength(Llama):
    """Takes every sequence up to the longest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (each[:, : x.shape[1]] for each in (self.cos, self.sin))
        for block in self.blocks:
            x = block(x, cos, sin)
        return x.float().square().mean()


# -- gpt2 ------------------------------------------------------------------------------------------------------------------


def gpt2(sizes: Sizes, device: str, dtype: torch.dtype) -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=sizes["dim"], n_head=sizes["heads"], n_layer=sizes["blocks"], n_positions=sizes["length"], vocab_size=sizes["vocab"],
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, use_cache=False, attn_implementation="sdpa", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        model = ready(transformers.GPT2LMHeadModel(config).to(dtype))
    return Built("gpt2", model, token_batch(sizes, device), loss_attribute, model.transformer.h)


def token_batch(sizes: Sizes, device: str) -> dict[str, torch.Tensor]:
    tokens = torch.randint(sizes["vocab"], (sizes["batch"], sizes["length"]), device=device)
    return {"input_ids": tokens, "labels": tokens}


# -- moe -------------------------------------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, ffn, bias=False), nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """The two best of several for every token; each is given its tokens by index."""

    def __init__(self, dim: int, ffn: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, ffn) for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1, dtype=torch.float32).topk(2)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out


class ExpertBlock(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim = sizes["dim"]
        self.heads = sizes["heads"]
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mixture = Experts(dim, sizes["ffn"], sizes["experts"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mixture(self.norm2(x).view(-1, dim)).view(batch, length, dim)


class MixtureOfExperts(nn.Module):
    """A stack of blocks; `forward` gives a loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ExpertBlock(sizes) for _ in range(sizes["blocks"]))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def moe(sizes: Sizes, device: str, dtype: torch.dtype) -> Built:
    torch.manual_seed(0)
    with torch.device(device):
        model = ready(MixtureOfExperts(sizes).to(dtype))
        x = torch.randn(sizes["batch"], sizes["length"], sizes["dim"], dtype=dtype)
    return Built("moe", model, x, itself, model.blocks)


# -- hf_llama --------------------------------------------------------------------------------------------------------------


def hf_llama(sizes: Sizes, device: str, dtype: torch.dtype) -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=sizes["dim"], intermediate_size=sizes["ffn"], num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv_heads"],
        num_hidden_layers=sizes["blocks"], vocab_size=sizes["vocab"], max_position_embeddings=sizes["length"], use_cache=False,
        attn_implementation="sdpa", tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        model = ready(transformers.LlamaForCausalLM(config).to(dtype))
    return Built("hf_llama", model, token_batch(sizes, device), loss_attribute, model.model.layers)


# Logits, their logarithms and their gradients are a fifth of the plain peak, and belong to no block: no plan goes below that.
WITH_LOGITS = ("50", "35", "28", "min")

MODELS: dict[str, Spec] = {
    "llama": Spec(llama, H200._asdict(), SMALL._asdict(), budgets=("42", "30", "16", "10", "min")),
    "gpt2": Spec(
        gpt2,
        {"blocks": 24, "dim": 1600, "heads": 25, "vocab": 50257, "length": 1024, "batch": 16},
        {"blocks": 4, "dim": 128, "heads": 4, "vocab": 512, "length": 128, "batch": 4},
        budgets=WITH_LOGITS,
    ),
    "moe": Spec(
        moe,
        {"blocks": 12, "dim": 2048, "ffn": 5632, "heads": 16, "experts": 8, "length": 4096, "batch": 8},
        {"blocks": 3, "dim": 128, "ffn": 352, "heads": 4, "experts": 4, "length": 128, "batch": 4},
    ),
    "hf_llama": Spec(
        hf_llama,
        {"blocks": 8, "dim": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000, "length": 32768, "batch": 1},
        {"blocks": 4, "dim": 128, "ffn": 448, "heads": 8, "kv_heads": 2, "vocab": 512, "length": 256, "batch": 2},
        budgets=WITH_LOGITS,
    ),
}  # fmt: skip

__all__ = ["MODELS", "AnyLength", "Block", "Built", "Sizes", "Spec", "ready", "token_batch"]
