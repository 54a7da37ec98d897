"""An op that makes what backward needs, and also what it does not: its residuals are chosen by themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hyper_parallel.core.planner.model.choices import RECOMPUTE, SAVE, RegionDecision, check, kept_bytes, recompute_all
from hyper_parallel.core.planner.model.profile import Region
from hyper_parallel.platform.torch.planner.applying import Applied
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel

ROWS, WIDTH = 16, 64


class Dropping(nn.Module):
    """As on a GPU: one op gives the result, which nothing in backward needs, and the mask, which it does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped, _ = torch.native_dropout(self.layer(x), 0.5, True)
        return x + dropped


class Normalised(nn.Module):
    """All that its op with several results makes is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x)).sin()


def model_of(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(kind() for _ in range(2))))


def regions_of(model: nn.Module) -> tuple[Region, ...]:
    batch = torch.randn(ROWS, WIDTH)
    found: tuple[Region, ...] = ProfiledModel(model, batch, lambda y: y.square().mean()).profile().regions
    return found


def gradients(model: nn.Module, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def keeping_masks(region: Region) -> RegionDecision:
    ops = tuple(SAVE if op.part is not None else None for op in region.ops)
    return RegionDecision(False, ops, tuple(SAVE if each.value.is_residual else None for each in region.inputs))


def test_of_a_dropout_the_mask_is_chosen_and_not_its_result() -> None:
    (_, region) = regions_of(model_of(Dropping))  # the first is given the batch, which is held elsewhere
    (mask,) = (op for op in region.ops if op.part is not None)
    whole = region.ops[mask.reads[0]]
    assert "native_dropout" in whole.name
    assert whole.choices == (RECOMPUTE,)
    assert not whole.is_needed
    assert SAVE in mask.choices
    assert mask.num_bytes == ROWS * WIDTH, "a byte for each element"
    decision = keeping_masks(region)
    check(region, decision)
    assert kept_bytes(region, decision) == ROWS * WIDTH + 4 * ROWS * WIDTH, "the mask, and what the layer was given"


def test_an_op_of_which_all_is_needed_is_chosen_as_one() -> None:
    assert [op.part for op in regions_of(model_of(Normalised))[0].ops if op.part is not None] == []


@pytest.mark.parametrize("is_unwatched", [False, True])
@pytest.mark.parametrize("keeps", [True, False], ids=["masks kept", "masks made again"])
def test_gradients_are_those_of_the_plain_model(keeps: bool, is_unwatched: bool) -> None:
    model = model_of(Dropping)
    plain, regions = copy.deepcopy(model), regions_of(model)
    decision = [keeping_masks(region) if keeps else recompute_all(region) for region in regions]
    applied = Applied(model, regions, decision, "error", by_framework=False, is_unwatched=is_unwatched)
    try:
        for seed in range(4):
            assert all(map(torch.equal, gradients(model, seed), gradients(plain, seed)))
        assert sum(applied.mismatches.counts.values()) == 0
    finally:
        applied.remove()
