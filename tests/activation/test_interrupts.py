"""Ctrl-C between any two instructions of a step leaves no mode, no hook and no flag, and the next step is right."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from hyper_parallel.core.activation_checkpoint.options import CheckpointImpl
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.regions.policy import RegionPolicy
from hyper_parallel.platform.torch.regions.unwatched_region import UnwatchedRegion
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import checkpoint_wrapper
from hyper_parallel.platform.torch.wrappers.swap_wrapper import swap_wrapper
from support.interrupts import Interrupt, differing, generators, interrupted, thread_state
from support.region_programs import flush_aborted_backward
from support.swapping import Swapping, check_nothing_left

NUM_MOMENTS = (
    1_500 if os.environ.get("HYPER_PARALLEL_CAMPAIGN") == "full" else None
)  # beside each place that handles a stack
aten = torch.ops.aten


class Block(nn.Module):
    """With random numbers of PyTorch's and Python's, and a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))) * random.random()


def mixed(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op is aten.addmm.default:
        return CheckpointPolicy.MUST_SWAP if ctx.occurrence % 2 == 0 else CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_SWAP if op is aten.gelu.default else CheckpointPolicy.PREFER_RECOMPUTE


def without_dropout(block: nn.Module) -> nn.Module:
    block.dropout = nn.Identity()  # a generator of the CPU keeps a region watched
    return block


class Unwatched(nn.Module):
    """A block under a policy that lets its forward run without a mode from the second call on."""

    is_pure = True

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = without_dropout(block)
        self.observer = UnwatchedRegion(is_dynamic=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.observer.call(self.block, _SavesProducts(self.observer), (x,), {})


class _SavesProducts(RegionPolicy):
    is_pure = True

    def __init__(self, observer: UnwatchedRegion) -> None:
        self.observer = observer

    def answer(self, context: Any, op: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is aten.addmm.default else CheckpointPolicy.MUST_RECOMPUTE


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "recomputed": checkpoint_wrapper,
    "under a policy": lambda block: checkpoint_wrapper(block, policy_fn=mixed),
    "swapped": swap_wrapper,
    "not watched": Unwatched,
    "reentrant": lambda block: checkpoint_wrapper(block, CheckpointImpl.REENTRANT),
}


class Stepping:
    """A model whose steps are interrupted."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], device: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(wrap(Block()) for _ in range(2))).to(device)
        self.x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)).to(device)
        self.blocks = [each for each in self.model.modules() if isinstance(each, Block)]
        self.is_backward = False
        self.generators: list[Any] = []

    def __call__(self, interrupt: Interrupt | None = None) -> list[torch.Tensor]:
        self.is_backward = False
        self.model.zero_grad()
        torch.manual_seed(5)
        random.seed(5)
        for block in self.blocks:
            block.num_calls = 0
        with torch.autocast(self.x.device.type, dtype=torch.bfloat16):
            loss = self.model(self.x).square().sum()
        self.generators, self.is_backward = generators(), True
        if interrupt is not None and loss.is_cuda:
            loss.register_hook(lambda gradient: interrupt.here())  # backward has a thread of its own there
        loss.backward()
        return [loss.detach(), *(each.grad.clone() for each in self.model.parameters() if each.grad is not None)]

    def left(self) -> list[str]:
        """What an interrupted backward has not put back."""
        if not self.is_backward:
            return []
        found = [] if generators() == self.generators else ["generators"]
        return found + ["a count of a module's" for block in self.blocks if block.num_calls != 1]


@pytest.fixture
def quiet() -> Iterator[None]:
    """An interrupt in a finaliser is lost, as anywhere in Python, and said to standard error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.unraisablehook", lambda _: None)
        yield


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_anywhere_leaves_nothing_on_the_thread_and_the_next_step_is_right(
    swapping: Swapping, one_thread: None, quiet: None, way: str
) -> None:
    """Reliability: Ctrl-C. At the moments of a step at which Python looks for it; in every run once at each place that handles a stack."""
    step = Stepping(WAYS[way], swapping.kind)
    expected = Stepping(without_dropout if way == "not watched" else lambda block: block, swapping.kind)()
    for _ in range(3):
        assert all(map(torch.equal, step(), expected))
    with Interrupt() as all_of_it:
        step(all_of_it)
    phases, before = Counter[bool](), thread_state()
    moments = all_of_it.moments(NUM_MOMENTS)
    for number, at in enumerate(moments):
        interrupt = interrupted(step, at)
        if interrupt is None:
            continue
        assert differing(before, thread_state()) == [], interrupt.where
        assert step.left() == [], interrupt.where
        phases[step.is_backward] += 1
        if NUM_MOMENTS or number % 5 == 0:
            flush_aborted_backward()
            assert all(map(torch.equal, step(), expected)), interrupt.where
            check_nothing_left()
    assert all(map(torch.equal, step(), expected))
    del step
    gc.collect()
    check_nothing_left()
    print(f"{way}: {phases.total()} interrupts, {phases[True]} of them in backward")
    assert phases[False] >= 5
    assert phases[True] >= (0 if way == "swapped" else 3)
