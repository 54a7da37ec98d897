"""Plans whose regions are not watched: what an applied plan does where an accelerator waits for the host."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.planner.model.choices import RECOMPUTE, SAVE, RegionDecision, plain
from hyper_parallel.core.planner.solve.block import base_of
from hyper_parallel.platform.torch.planner.applying import Applied
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel


class Experts(nn.Module):
    """Each token goes to one of four experts: how many one gets depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(16), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, None])
        return x + out.view_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.gelu(self.out(a.transpose(1, 2).reshape(2, 8, 16)))


def model_of(kind: type[nn.Module], device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(kind() for _ in range(3)))).to(device)


def deciding(region: Any, saved: tuple[str, ...]) -> RegionDecision:
    """Save these ops, and recompute what else can be."""
    wanted = {
        index: SAVE if any(word in op.name for word in saved) else RECOMPUTE
        for index, op in enumerate(region.ops)
        if op.is_needed
    }
    kept = frozenset(index for index, choice in wanted.items() if choice == SAVE)
    decision: RegionDecision = base_of(region, kept, can_swap=False).decision
    return decision


def steps(model: nn.Module, device: str, num: int = 4) -> list[torch.Tensor]:
    """Losses and gradients of some steps, each with another batch."""
    found = []
    for seed in range(num):
        torch.manual_seed(seed)
        loss = model(torch.randn(2, 8, 16, device=device)).square().mean()
        loss.backward()
        found.append(loss.detach())
    return [*found, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def observers(applied: Applied) -> list[Any]:
    calls = [call for wrapper in applied.wrappers for call in wrapper._planned_call._calls]
    return [call[0].observer for call in calls if call is not None and call[0] is not None]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [Attention, Experts])
@pytest.mark.parametrize("saved", [(), ("mm",), ("mm", "attention", "norm")])
def test_a_plan_whose_regions_are_not_watched_gives_the_gradients_of_the_plain_model(
    kind: type[nn.Module], saved: tuple[str, ...], device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model = model_of(kind, device)
    expected = steps(copy.deepcopy(model), device)
    batch = torch.randn(2, 8, 16, device=device)
    regions = ProfiledModel(model, batch, lambda out: out.square().mean()).profile().regions
    decision = [*(deciding(region, saved) for region in regions[:-1]), plain(regions[-1])]
    applied = Applied(model, regions, decision, "error", by_framework=False, is_unwatched=True)
    try:
        found = steps(model, device)
        assert [each.is_unwatched for each in observers(applied)] == [True, True]
    finally:
        applied.remove()
    assert all(map(torch.equal, found, expected))


def test_a_plan_that_was_taken_off_keeps_nothing_of_the_model_nor_of_a_call() -> None:
    model = model_of(Attention, "cpu")
    regions = ProfiledModel(model, torch.randn(2, 8, 16), lambda out: out.square().mean()).profile().regions
    gc.collect()
    gc.disable()
    try:
        applied = Applied(model, regions, [deciding(region, ("mm",)) for region in regions], "error", is_unwatched=True)
        batch = torch.randn(2, 8, 16)
        for _ in range(2):
            model(batch).square().mean().backward()
        left = [weakref.ref(batch), *map(weakref.ref, model.parameters())]
        del batch
        assert left[0]() is None
        applied.remove()
        del model, applied
        assert [each() for each in left] == [None] * len(left)
    finally:
        gc.enable()


def test_a_plan_that_swaps_watches_its_regions_and_so_does_one_on_a_cpu() -> None:
    model = model_of(Attention, "cpu")
    batch = torch.randn(2, 8, 16)
    regions = ProfiledModel(model, batch, lambda out: out.square().mean()).profile().regions
    saving = [deciding(region, ("mm",)) for region in regions]
    swaps = tuple("swap" if each == SAVE else each for each in saving[0].ops)
    swapping = [RegionDecision(False, swaps, saving[0].inputs), *saving[1:]]
    for decision, asked, found in ((saving, None, False), (saving, True, True), (swapping, True, False)):
        applied = Applied(model, regions, decision, "error", is_unwatched=asked)
        assert [each is not None for each in observers(applied)] == [found] * 3
        applied.remove()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_plan_that_swaps_nothing_is_not_watched_on_an_accelerator_cuda() -> None:
    model = model_of(Attention, "cuda")
    batch = torch.randn(2, 8, 16, device="cuda")
    regions = ProfiledModel(model, batch, lambda out: out.square().mean()).profile().regions
    applied = Applied(model, regions, [deciding(region, ("mm",)) for region in regions], "error")
    steps(model, "cuda", num=2)
    assert [each.is_unwatched for each in observers(applied)] == [True] * 3
    applied.remove()


def test_ops_that_nobody_planned_have_the_region_watched_and_are_counted_in_every_step() -> None:
    model = model_of(Attention, "cpu")
    batch = torch.randn(2, 8, 16)
    regions = ProfiledModel(model, batch, lambda out: out.square().mean()).profile().regions
    decision = [deciding(region, ("mm",)) for region in regions]
    inner: Any = model[0]
    inner[0].out.register_forward_hook(lambda module, args, output: output * 1.5)
    applied = Applied(model, regions, decision, "recompute", is_unwatched=True)
    counts = []
    for _ in range(3):
        steps(model, "cpu", num=1)
        counts.append(applied.mismatches.counts["ops that were not planned"])
    assert [each is not None and each.is_unwatched for each in observers(applied)] == [False, True, True]
    assert counts == [1, 2, 3]
    applied.remove()


class Dropping(nn.Module):
    """Leaves out layers of its own at random, counts its calls, and takes a number from elsewhere."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        for layer in self.layers:
            if random.random() < 0.5:
                x = x + layer(x).tanh() * (self.scale / self.num_calls)
        return x


def by_framework(model: nn.Module) -> Applied:
    regions = ProfiledModel(model, torch.randn(2, 8, 16), lambda out: out.square().mean()).profile().regions
    decision = [deciding(region, ()) for region in regions]
    assert all(each.is_whole for each in decision)
    return Applied(model, regions, decision, "error", by_framework=True)


def test_what_blocks_drop_at_random_and_what_they_count_is_as_in_forward_where_pytorch_recomputes_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Dropping() for _ in range(3))))
    with mock.patch.object(random, "random", return_value=0.0):
        applied = by_framework(model)
    plain = copy.deepcopy(model)
    counts: list[list[int]] = []
    found = []
    for each in (plain, model):
        random.seed(1)
        found.append([*steps(each, "cpu"), torch.tensor(random.random())])
        counts.append([block.num_calls for block in each.modules() if type(block) is Dropping])
    applied.remove()
    assert counts[0] == counts[1]
    assert all(map(torch.equal, *found))


def test_a_number_that_is_another_one_where_pytorch_recomputes_a_block_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Dropping() for _ in range(3))))
    monkeypatch.setattr(random, "random", lambda: 0.0)
    applied = by_framework(model)
    model(torch.randn(2, 8, 16)).sum().backward()  # the first call is watched
    for block in model[0]:
        block.num_calls = 0
    loss = model(torch.randn(2, 8, 16)).sum()
    monkeypatch.setattr(Dropping, "scale", 2.0)
    with pytest.raises(StateError, match=r"Expected mul\(tensor, 1\.0\), got mul\(tensor, 2\.0\)"):
        loss.backward()
    applied.remove()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.layer(x)).tanh()


def test_a_block_that_pytorch_would_recompute_writes_its_running_statistics_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Normed() for _ in range(3))))
    applied = by_framework(model)
    plain = copy.deepcopy(model)
    assert all(map(torch.equal, steps(plain, "cpu"), steps(model, "cpu")))
    applied.remove()
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))
