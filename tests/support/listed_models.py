"""Small models with a list of blocks, each with a way of its own to call them; and what ranks do with such models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hyper_parallel as hp
from support import hugging_face_families as families
from support.schedule_names import SCHEDULES

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, *given: Any, **_: Any) -> Any:
        return torch.tanh(self.linear(hidden)) + hidden


class Listed(nn.Module):
    """Embeddings, four blocks, a head. `calls` is what comes between."""

    def __init__(self, calls: Callable[[Listed, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(16, WIDTH), nn.Parameter(torch.randn(8, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 16)
        self.calls = calls

    def forward(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.words(ids) + self.places[: ids.shape[1]]
        hidden = self.calls(self, hidden if scale is None else hidden * scale)
        return self.head(hidden)


def in_order(model: Listed, hidden: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        hidden = block(hidden)
    return hidden


def by_keyword(model: Listed, hidden: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        hidden = block(hidden=hidden)
    return hidden


def twice(model: Listed, hidden: torch.Tensor) -> torch.Tensor:
    return in_order(model, in_order(model, hidden))


def backwards(model: Listed, hidden: torch.Tensor) -> torch.Tensor:
    for block in reversed(model.blocks):
        hidden = block(hidden)
    return hidden


def with_change_between(model: Listed, hidden: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        hidden = block(hidden) * 2
    return hidden


def with_first_hidden(model: Listed, hidden: torch.Tensor) -> torch.Tensor:
    first = hidden
    for block in model.blocks:
        hidden = block(hidden, first)
    return hidden


def with_notes(model: Listed, hidden: torch.Tensor) -> torch.Tensor:
    notes: dict[int, torch.Tensor] = {}
    for block in model.blocks:
        hidden = block(hidden, notes)
    return hidden


def with_weight_under_no_grad(model: Listed, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        places = model.places[:1] * 2
    for block in model.blocks:
        hidden = block(hidden, places)
    return hidden


def with_words_after(model: Listed, hidden: torch.Tensor) -> torch.Tensor:
    return in_order(model, hidden) @ model.words.weight.T @ model.words.weight


def ids() -> torch.Tensor:
    return torch.arange(24).reshape(4, 6) % 16


def one_process(num_stages: int, num_microbatches: int) -> hp.Schedule:
    """All forwards, then all backwards, of all stages on one rank."""
    forward = [f"{stage}F{number}" for number in range(num_microbatches) for stage in range(num_stages)]
    backward = [f"{stage}B{number}" for number in range(num_microbatches) for stage in reversed(range(num_stages))]
    return hp.Schedule.of([[*forward, *backward]])


# -- on ranks --------------------------------------------------------------------------------------------------------


def train_family(family: str, name: str, way: str, num_ranks: int = 2) -> list[str]:
    """What differs from one process where ranks train a Hugging Face model, given a batch in one of three ways."""
    with families.float64():
        expected_model, model = families.make(family), families.make(family)
        batch = families.batch(num_rows=8)
        batch["labels"][:2] = -100  # a microbatch whose labels all do not count, the first one
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][5, 6:] = 0
        loss, gradients = families.looped(expected_model, batch, 4)
        schedule = SCHEDULES[name](num_ranks, 4)
        stages = hp.split_stages(model, schedule.num_stages)
        mine = [stages[index] for index in schedule.placement.stages_on(hp.get_platform().get_rank())]
        pipeline = hp.Pipeline(mine, schedule)
        if way == "a dict":
            found = pipeline.step(batch)
        elif way == "keywords":
            found = pipeline.step(**batch)
        else:
            found = pipeline.step(batch.pop("input_ids"), **batch)
        wrong = [] if abs(found.item() - loss) <= 1e-12 else [f"loss {found.item()}, expected {loss}"]
        for stage in mine:
            for key, weight in stage.module.named_parameters():
                truth = gradients[stage.tied.get(key, key)]
                if (truth is None) != (weight.grad is None) or (
                    truth is not None and not torch.allclose(weight.grad, truth, rtol=0, atol=1e-12)
                ):
                    wrong.append(f"stage {stage.index}, {key}")
        return wrong


def filled_copies(name: str) -> list[tuple[str, float]]:
    """Each rank fills its own stages of a model without data; sums of the tied weight's numbers after a step."""
    with torch.device("meta"):
        model = families.make("gpt2")
    schedule = SCHEDULES[name](2, 4)
    stages = hp.split_stages(model, schedule.num_stages)
    rank = hp.get_platform().get_rank()
    torch.manual_seed(rank)
    mine = [stages[index] for index in schedule.placement.stages_on(rank)]
    for stage in mine:
        stage.init_parameters()
    pipeline = hp.Pipeline(mine, schedule)
    pipeline.step(families.batch())
    return [(stage.tied[key], stage.weight(key).sum().item()) for stage in mine for key in sorted(stage.tied)]


def measured_costs() -> list[float]:
    """The figures by which this rank has cut a model, though each rank takes other times."""
    stages = hp.split_stages(families.make("llama"), 4, by="cost", batch=families.batch())
    return stages.costs


def batch_on_the_first_rank_only() -> str:
    schedule = SCHEDULES["one_f_one_b"](2, 2)
    rank = hp.get_platform().get_rank()
    pipeline = hp.Pipeline(hp.split_stages(families.make("llama"), 2)[rank], schedule)
    try:
        pipeline.step(**(families.batch() if rank == 0 else {}))
    except ValueError as error:
        return str(error)
    return ""
