"""Small models that are planned in tests: Hugging Face ones, and two of our own."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

LENGTH, VOCABULARY = 64, 128
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
    "use_cache": False,
}


class Residual(nn.Module):
    """Norm, two products, dropout and a change in place."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)
        self.act, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.act(self.up(self.norm(x)))))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 96)
        self.blocks = nn.ModuleList(Residual(96) for _ in range(5))
        self.last = nn.Linear(96, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


class Convolution(nn.Module):
    """Blocks of another size each, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        channels = [3, 8, 12, 16]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.GELU(), nn.Conv2d(b, b, 3, padding=1)
                )
                for a, b in itertools.pairwise(channels)
            )
        )
        self.head = nn.Linear(channels[-1], 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(x).mean((2, 3))).square().mean()


NAMES = ("llama", "gpt2", "mixtral", "mlp", "convolution")


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mlp":
        return Mlp()
    if name == "convolution":
        return Convolution()
    import transformers as hf

    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)).train()
    if name == "gpt2":
        config = hf.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, use_cache=False)
        return hf.GPT2LMHeadModel(config).train()
    return hf.MixtralForCausalLM(hf.MixtralConfig(**{**_LLAMA, "intermediate_size": 96}, num_local_experts=4)).train()


def batch(name: str, number: int = 0, size: int = 2) -> Any:
    generator = torch.Generator().manual_seed(number)
    if name == "mlp":
        return torch.randn(64 * size, 32, generator=generator)
    if name == "convolution":
        return torch.randn(2 * size, 3, 16, 16, generator=generator)
    ids = torch.randint(1, VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def loss_of(model: nn.Module, inputs: Any) -> torch.Tensor:
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def gradients(model: nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
    """Of one step with fixed random numbers, from no gradients."""
    model.zero_grad()
    torch.manual_seed(7)
    loss_of(model, inputs).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
