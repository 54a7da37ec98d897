"""What the last region of a forward does to copies under way: its own residuals take their place, and none is left in the loss."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import policies as p
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.regions.functions import engine_key
from hyper_parallel.core.regions.policy import RegionPolicy
from hyper_parallel.core.swap.engine import SwapEngine
from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper
from hyper_parallel.platform.torch.regions.saved_values import Saved
from support.swapping import Swapping

WIDTH = 16
SWAP = p.swap(p.matmuls)


def always(answer: bool) -> Any:
    return lambda ctx, op, *args, **kwargs: answer


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4))
    )


class Seen:
    """How far the window has to shrink, by the group that asks for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.by_step: list[list[tuple[str, int]]] = []
        is_forward = [False]
        plain = SwapEngine._let_leave

        def noted(engine: SwapEngine, group: Any, at_most_bytes: int = 0) -> None:
            plain(engine, group, at_most_bytes)
            if is_forward[0]:
                assert engine._window.held_bytes <= at_most_bytes
                self.by_step[-1].append((group.label, at_most_bytes))

        patch.setattr(SwapEngine, "_let_leave", noted)
        self._is_forward = is_forward

    def step(self, blocks: nn.Module, x: torch.Tensor) -> None:
        self.by_step.append([])
        self._is_forward[0] = True
        loss = blocks(x).square().sum()
        self._is_forward[0] = False
        loss.backward()


@pytest.mark.parametrize("last", [always(True), always(False), p.save(p.matmuls)], ids=["saves", "recomputes", "both"])
def test_from_the_second_step_on_the_window_is_empty_when_the_last_region_ends(
    swapping: Swapping, monkeypatch: pytest.MonkeyPatch, last: Any
) -> None:
    blocks = model().to(swapping.kind)
    plain = copy.deepcopy(blocks)
    for number in range(4):
        blocks[number] = checkpoint_wrapper(blocks[number], policy_fn=last if number == 3 else SWAP)
    seen = Seen(monkeypatch)
    for seed in range(3):
        seen.step(blocks, swapping.randn(8, WIDTH, seed=seed))
        plain(swapping.randn(8, WIDTH, seed=seed)).square().sum().backward()
    assert swapping.offloaded_bytes > 0
    for mine, theirs in zip(blocks.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert seen.by_step[0] == [], "which region is the last is not known yet"
    assert seen.by_step[1] == seen.by_step[2]
    labels, left = zip(*seen.by_step[1], strict=True)
    assert len(set(labels)) == 1
    assert sorted(left, reverse=True) == list(left)
    assert len(left) > 1, "it shrinks with what the region holds, and is empty at the end"
    assert left[-1] == 0


def test_when_a_region_has_run_again_the_engine_hears_of_that_high_point(
    swapping: Swapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    arrive = SwapEngine.arrive

    def noted(engine: SwapEngine, group: Any) -> None:
        happened.append("told")
        arrive(engine, group)

    def silu(x: torch.Tensor) -> torch.Tensor:
        happened.append("ran")
        return nn.functional.silu(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return silu(self.linear(x)) * x

    monkeypatch.setattr(SwapEngine, "arrive", noted)
    blocks = nn.Sequential(*(checkpoint_wrapper(Block(), policy_fn=SWAP) for _ in range(2))).to(swapping.kind)
    loss = blocks(swapping.randn(8, WIDTH, requires_grad=True)).sum()
    happened.clear()
    loss.backward()
    assert happened == ["ran", "told", "ran", "told"]


class Told(RegionPolicy):
    """A policy that says that its region is the last one of a forward that swaps."""

    ends_forward = True

    def answer(self, context: Any, op: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE


def test_a_region_that_says_that_it_is_the_last_empties_the_window_in_the_first_step(
    swapping: Swapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = model().to(swapping.kind)
    for number in range(4):
        blocks[number] = checkpoint_wrapper(blocks[number], policy_fn=Told() if number == 3 else SWAP)
    seen = Seen(monkeypatch)
    seen.step(blocks, swapping.randn(8, WIDTH))
    assert seen.by_step[0][-1][1] == 0


def test_every_residual_that_stays_is_told_once_and_none_that_is_swapped(
    swapping: Swapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr(SwapEngine, "keep", lambda engine, group, num_bytes: kept.append(num_bytes))
    linear = nn.Linear(WIDTH, 3 * WIDTH)

    def block(x: torch.Tensor) -> torch.Tensor:
        y = linear(x).sin()[:, :WIDTH].tanh()  # what the linear gives is needed, and swapped: 3 times the size
        return y * y.exp() + y.sin() * y.cos()

    linear.to(swapping.kind)
    region = checkpoint_wrapper(block, policy_fn=p.choose(p.swap(p.matmuls), p.save(p.ops("aten.tanh"))))
    region(swapping.randn(8, WIDTH, requires_grad=True)).sum().backward()
    assert swapping.offloaded_bytes == 8 * 3 * WIDTH * 4
    assert kept
    assert set(kept) == {8 * WIDTH * 4}, "never the swapped one"
    assert len(kept) == 4, "tanh, and three that are recomputed, each once; tanh is saved by four ops"


def test_a_forward_that_raises_leaves_no_saved_value_behind(swapping: Swapping) -> None:
    survivors: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        survivors.append(y)
        y.exp().sin().cos()
        raise ValueError("in the middle of a block")

    first = checkpoint_wrapper(nn.Linear(WIDTH, WIDTH).to(swapping.kind), policy_fn=SWAP)
    second = checkpoint_wrapper(block, policy_fn=always(True))
    gc.collect()
    before = sum(type(each) is Saved for each in gc.get_objects())
    with pytest.raises(ValueError, match="in the middle"):
        second(first(swapping.randn(8, WIDTH, requires_grad=True)))
    gc.collect()
    assert sum(type(each) is Saved for each in gc.get_objects()) == before
    assert survivors


def test_a_last_region_that_swaps_leaves_the_window_alone(swapping: Swapping, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = model().to(swapping.kind)
    for number in range(4):
        blocks[number] = checkpoint_wrapper(blocks[number], policy_fn=SWAP)
    seen = Seen(monkeypatch)
    with swapping.configured(window_bytes="1KiB"):  # no room for a tail
        for _ in range(3):
            seen.step(blocks, swapping.randn(8, WIDTH))
    assert swapping.offloaded_bytes > 0
    assert seen.by_step == [[], [], []]


def test_a_new_module_has_another_key_than_one_that_is_gone() -> None:
    keys = [engine_key("block", nn.Module()) for _ in range(100)]
    assert len(set(keys)) == 100
