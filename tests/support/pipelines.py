"""A small model in stages, trained by a pipeline on several ranks and by a plain loop in one process.

Everything here runs in the workers of `support.processes`.
"""

from __future__ import annotations

import torch
from torch import nn

from hyper_parallel.core.parallel.pipeline.running import Microbatch, Pipeline
from hyper_parallel.core.parallel.pipeline.stage import PipelineStage
from support.schedule_names import SCHEDULES

WIDTH = 8
BATCH_PER_MICROBATCH = 3
LENGTH = 4

class Block(nn.Module):
    """Norm, attention, a residual, a weight that is used twice, a bias that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(torch.nn.functional.silu(self.up(x)))
        return torch.tanh(self.twice(torch.tanh(self.twice(x)))) + x


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.block = Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.block(self.embedding(tokens))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


def stages_of(num: int) -> list[nn.Module]:
    """The modules of all stages, in float64, the same on every rank."""
    torch.manual_seed(7)
    if num == 1:
        return [nn.Sequential(First(), Last()).double()]
    return [First().double(), *(Block().double() for _ in range(num - 2)), Last().double()]


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(num_microbatches: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(16, (num_microbatches * BATCH_PER_MICROBATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def plain(num_stages: int, num_microbatches: int, num_steps: int) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of one process that goes through the microbatches in a loop, for each stage by name."""
    modules = stages_of(num_stages)
    losses = []
    for step in range(num_steps):
        total = 0.0
        for tokens, target in zip(*(part.chunk(num_microbatches) for part in batch(num_microbatches, step)), strict=True):
            x = tokens
            for module in modules:
                x = module(x)
            loss = loss_fn(x, target) / num_microbatches
            loss.backward()
            total += loss.item()
        losses.append(total)
    return losses, [gradients_of(module) for module in modules]


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


def train(name: str, num_ranks: int, num_microbatches: int, num_steps: int = 2) -> tuple[list[float], float, list[str]]:
    """Losses, the largest error of a gradient, and what is wrong otherwise, on this rank."""
    import hyper_parallel as hp

    schedule = SCHEDULES[name](num_ranks, num_microbatches)
    modules = stages_of(schedule.num_stages)
    rank = hp.get_platform().get_rank()
    stages = [PipelineStage(modules[i], i, schedule.num_stages) for i in schedule.placement.stages_on(rank)]
    pipeline = Pipeline(stages, schedule, loss_fn=loss_fn)
    losses = []
    for step in range(num_steps):
        tokens, target = batch(num_microbatches, step)
        losses.append(pipeline.step(tokens, target=target).item())
    expected_losses, expected = plain(schedule.num_stages, num_microbatches, num_steps)
    error = max(abs(one - other) for one, other in zip(losses, expected_losses, strict=True))
    wrong = []
    for stage in stages:
        found, truth = gradients_of(stage.module), expected[stage.index]
        if found.keys() != truth.keys():
            wrong.append(f"stage {stage.index}: {sorted(found.keys() ^ truth.keys())}")
        error = max([error, *((found[key] - truth[key]).abs().max().item() for key in truth if key in found)])
    return losses, error, wrong + [f"{s.index}: {s.undeferred()}" for s in stages]
