"""Models of PyTorch that tests fill, and gradients that a parameter's name says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hyper_parallel as hp

SEED = 5
# Does not divide by 4.
WIDTH = 6


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


def gradients(model: nn.Module, *, without: str | None = None) -> None:
    """Give every parameter a gradient that its name says, as large as it is whole; none to one of them."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(len(name) * 1000 + sum(map(ord, name)))
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        if name == without:
            parameter.grad = None
