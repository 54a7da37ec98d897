"""A small model in stages, trained by a pipeline on several ranks and by a plain loop in one process.

Everything here runs in the workers of `support.processes`.
"""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pytorch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.parallel.pipeline.running import Pipeline
from hyper_parallel.core.parallel.pipeline.schedule import Schedule
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


def batches(num_microbatches: int, num_steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch(num_microbatches, step) for step in range(num_steps)]


def plain(num_stages: int, num_microbatches: int, num_steps: int) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of one process that goes through the microbatches in a loop, for each stage by name."""
    modules = stages_of(num_stages)
    losses = []
    for whole in batches(num_microbatches, num_steps):
        total = 0.0
        for tokens, target in zip(*(part.chunk(num_microbatches) for part in whole), strict=True):
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


def train(name: str, num_ranks: int, num_microbatches: int, num_steps: int = 2) -> tuple[float, list[str]]:
    """The largest difference of losses and gradients from those of one process, and what is wrong otherwise, on this rank."""
    schedule = SCHEDULES[name](num_ranks, num_microbatches)
    pipeline = pipeline_of(schedule)
    losses = [pipeline.step(tokens, target=target).item() for tokens, target in batches(num_microbatches, num_steps)]
    expected_losses, expected = plain(schedule.num_stages, num_microbatches, num_steps)
    error = max(abs(one - other) for one, other in zip(losses, expected_losses, strict=True))
    wrong = []
    for stage in pipeline.stages.values():
        found, truth = gradients_of(stage.module), expected[stage.index]
        if found.keys() != truth.keys():
            wrong.append(f"stage {stage.index}: {sorted(found.keys() ^ truth.keys())}")
        error = max([error, *((found[key] - truth[key]).abs().max().item() for key in truth if key in found)])
    return error, wrong


def train_by(schedule: Schedule) -> list[str]:
    """What is wrong where ranks follow a schedule of two ranks and four microbatches; the error if it is refused."""
    try:
        pipeline = pipeline_of(schedule)
    except hp.ScheduleError as error:
        return [f"ScheduleError: {error}"]
    tokens, target = batch(4, 0)
    loss = pipeline.step(tokens, target=target).item()
    expected_losses, expected = plain(schedule.num_stages, 4, 1)
    wrong = [] if abs(loss - expected_losses[0]) <= 1e-12 else [f"loss {loss}"]
    for stage in pipeline.stages.values():
        found, truth = gradients_of(stage.module), expected[stage.index]
        wrong += [f"stage {stage.index}, {key}" for key in truth if (found[key] - truth[key]).abs().max() > 1e-12]
    return wrong


def pipeline_of(schedule: Schedule) -> Pipeline:
    modules = stages_of(schedule.num_stages)
    rank = hp.get_platform().get_rank()
    stages = [PipelineStage(modules[i], i, schedule.num_stages) for i in schedule.placement.stages_on(rank)]
    return Pipeline(stages, schedule, loss_fn=loss_fn)


def undeferred(name: str) -> dict[int, tuple[str, ...]]:
    """The weights of each of this rank's stages whose gradients did not wait."""
    pipeline = pipeline_of(SCHEDULES[name](2, 4))
    tokens, target = batch(4, 0)
    pipeline.step(tokens, target=target)
    return {stage.index: stage.undeferred() for stage in pipeline.stages.values()}


def objects_over_steps(name: str, num_steps: int) -> list[int]:
    """How many tensors are alive after each step, with the collector off."""
    pipeline = pipeline_of(SCHEDULES[name](2, 4))
    counts = []
    gc.collect()
    gc.disable()
    try:
        for step in range(num_steps):
            tokens, target = batch(4, step)
            pipeline.step(tokens, target=target)
            for stage in pipeline.stages.values():
                stage.module.zero_grad()
            counts.append(sum(isinstance(found, torch.Tensor) for found in gc.get_objects()))
    finally:
        gc.enable()
    return counts


def like_pytorch(name: str) -> list[str]:
    """What differs from PyTorch's own runtime of a schedule with this name, on the same stages and microbatches."""
    classes = {
        "gpipe": pytorch.ScheduleGPipe,
        "one_f_one_b": pytorch.Schedule1F1B,
        "interleaved": pytorch.ScheduleInterleaved1F1B,
        "zbv": pytorch.ScheduleZBVZeroBubble,
        "dualpipe_v": pytorch.ScheduleDualPipeV,
    }
    schedule = SCHEDULES[name](2, 4)
    rank = dist.get_rank()
    numbers = schedule.placement.stages_on(rank)
    modules = stages_of(schedule.num_stages)
    theirs = [pytorch.PipelineStage(modules[i], i, schedule.num_stages, torch.device("cpu")) for i in numbers]
    is_single = issubclass(classes[name], pytorch.schedules.PipelineScheduleSingle)
    run = classes[name](theirs[0] if is_single else theirs, 4, loss_fn=loss_fn)
    tokens, target = batch(4, 0)
    losses: list[torch.Tensor] = []
    first, last = 0 in numbers, schedule.num_stages - 1 in numbers
    run.step(*([tokens] if first else []), **({"target": target, "losses": losses} if last else {}))
    ours = pipeline_of(schedule)
    loss = ours.step(tokens, target=target)
    wrong = []
    if last and abs(loss.item() - sum(losses).item() / 4) > 1e-12:
        wrong.append(f"loss {loss.item()}, PyTorch's {sum(losses).item() / 4}")
    for index in numbers:
        expected, found = gradients_of(modules[index]), gradients_of(ours.stages[index].module)
        wrong += [f"stage {index}: {sorted(expected.keys() ^ found.keys())}"] if expected.keys() != found.keys() else []
        wrong += [
            f"stage {index}, {key}"
            for key in expected
            if not torch.allclose(expected[key], found[key], rtol=0, atol=1e-12)
        ]
    return wrong


def fail_in(name: str, kind: str, rank: int, way: str) -> None:
    """One rank fails in the forward or the backward of its first stage; what the others say of it is what they raise."""
    pipeline = pipeline_of(SCHEDULES[name](2, 4))
    me = dist.get_rank()

    def fail(*_: object) -> None:
        if way == "dies":
            os._exit(3)
        raise ValueError("on purpose")

    if me == rank:
        module = next(iter(pipeline.stages.values())).module
        if kind == "forward":
            module.register_forward_hook(fail)
        else:
            next(weight for weight in module.parameters() if weight.requires_grad).register_hook(fail)
    tokens, target = batch(4, 0)
    pipeline.step(tokens, target=target)
