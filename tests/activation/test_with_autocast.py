"""Mixed precision: `torch.autocast` and `torch.amp.GradScaler` around wrapped blocks, as they are around plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from support import wrapped
from support.swapping import Swapping, check_nothing_left
from support.training import Block, same
from support.wrapped import Wrap

pytestmark = pytest.mark.usefixtures("one_thread")


# Not around each other: the casts are what is looked at.
WAYS = {name: wrap for name, wrap in wrapped.WAYS.items() if name != "mix in a swap wrapper"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Network(nn.Module):
    """Blocks between two layers that stay as they are."""

    def __init__(self, wrap: Wrap | None, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(16, 32)
        self.blocks = nn.Sequential(*((wrap or (lambda block: block))(block()) for _ in range(3)))
        self.after = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.blocks(self.before(x)))


def results_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


# -- autocast -----------------------------------------------------------------------------------------------------------------


def step(model: nn.Module, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with torch.autocast(x.device.type, **options):
        out = model(x)
    out.float().square().mean().backward()
    return [out.detach(), *results_of(model)]


def check_like_plain(run: Callable[[Wrap | None], list[torch.Tensor]], swapping: Swapping) -> None:
    """The same bits in each way as without a wrapper."""
    expected = run(None)
    for name, wrap in WAYS.items():
        assert same(run(wrap), expected), name
        assert name == "recompute" or swapping.offloaded_bytes > 0
        check_nothing_left()


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_around_the_model_gives_the_plain_gradients(swapping: Swapping, dtype: str) -> None:
    x = swapping.randn(2, 8, 16)

    def run(wrap: Wrap | None) -> list[torch.Tensor]:
        model = Network(wrap).to(swapping.kind)
        found = step(model, x, dtype=DTYPES[dtype])
        assert found[0].dtype == DTYPES[dtype]
        return found + step(model, x, dtype=DTYPES[dtype])

    check_like_plain(run, swapping)


def test_autocast_without_its_cache(swapping: Swapping) -> None:
    x = swapping.randn(2, 8, 16)
    options = {"dtype": torch.bfloat16, "cache_enabled": False}
    check_like_plain(lambda wrap: step(Network(wrap).to(swapping.kind), x, **options), swapping)


class WithIsland(nn.Module):
    """A block in which one part keeps the precision of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Block()
        self.norm = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inside(x)
        with torch.autocast(x.device.type, enabled=False):
            h = self.norm(h.float()).softmax(-1)
        return x + self.inside(h)


class Itself(nn.Module):
    """A block that turns autocast on itself, inside of the region."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            h = self.inside(x)
        return h.float().tanh()


@pytest.mark.parametrize("block", [WithIsland, Itself])
def test_a_block_that_turns_autocast_on_or_off_itself(swapping: Swapping, block: Callable[[], nn.Module]) -> None:
    x = swapping.randn(2, 8, 16)
    options = {"dtype": torch.bfloat16, "enabled": block is WithIsland}
    check_like_plain(lambda wrap: step(Network(wrap, block).to(swapping.kind), x, **options), swapping)


@pytest.mark.parametrize("in_forward", [True, False], ids=["and forward", "and not forward"])
def test_backward_under_autocast_recomputes_under_that_of_the_forward(swapping: Swapping, in_forward: bool) -> None:
    x = swapping.randn(2, 8, 16)

    def run(wrap: Wrap | None) -> list[torch.Tensor]:
        model = Network(wrap).to(swapping.kind)
        torch.manual_seed(1)
        with torch.autocast(swapping.kind, torch.bfloat16, enabled=in_forward):
            loss = model(x).float().square().mean()
        with torch.autocast(swapping.kind, torch.bfloat16):
            loss.backward()
        return results_of(model)

    check_like_plain(run, swapping)


@pytest.mark.parametrize("block", [Block, WithIsland, Itself])
def test_several_steps_in_one_autocast(swapping: Swapping, block: Callable[[], nn.Module]) -> None:
    x = swapping.randn(2, 8, 16)

    def run(wrap: Wrap | None) -> list[torch.Tensor]:
        model, found = Network(wrap, block).to(swapping.kind), []
        with torch.autocast(swapping.kind, torch.bfloat16):
            for seed in range(3):
                model.zero_grad(set_to_none=True)
                torch.manual_seed(seed)
                model(x).float().square().mean().backward()
                found += results_of(model)
                with torch.no_grad():
                    found.append(model(x))
        return found

    check_like_plain(run, swapping)


def test_one_forward_with_autocast_and_one_without_may_be_alive_together(swapping: Swapping) -> None:
    x = swapping.randn(2, 8, 16)

    def run(wrap: Wrap | None) -> list[torch.Tensor]:
        model = Network(wrap).to(swapping.kind)
        torch.manual_seed(1)
        with torch.autocast(swapping.kind, torch.bfloat16):
            low = model(x).float().square().mean()
        full = model(x).square().mean()
        low.backward()
        full.backward()
        return results_of(model)

    check_like_plain(run, swapping)


# -- GradScaler ---------------------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    numbers: list[torch.Tensor]  # parameters after each step, and the optimizer's own
    scales: list[float]
    was_skipped: list[bool]


def train_scaled(model: nn.Module, swapping: Swapping, bad_step: int | None = None, clips: bool = False) -> Trained:
    """Four steps in float16; one of them may overflow."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler(swapping.kind, init_scale=1024.0, growth_interval=2)
    found = Trained([], [], [])
    for number in range(4):
        optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        x = swapping.randn(2, 8, 16, seed=number)
        with torch.autocast(swapping.kind, torch.float16):
            loss = model(x).float().square().mean() * (float("inf") if number == bad_step else 1.0)
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            found.numbers.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        after = [parameter.detach().clone() for parameter in model.parameters()]
        found.numbers.extend(after)
        found.scales.append(scaler.get_scale())
        found.was_skipped.append(same(before, after))
    return found


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
def test_steps_with_a_grad_scaler_are_those_of_the_plain_model(swapping: Swapping, clips: bool) -> None:
    def run(wrap: Wrap | None) -> list[torch.Tensor]:
        found = train_scaled(Network(wrap).to(swapping.kind), swapping, clips=clips)
        assert found.scales == [1024.0, 2048.0, 2048.0, 4096.0]
        assert not any(found.was_skipped)
        return found.numbers

    check_like_plain(run, swapping)


def test_a_step_that_overflows_is_skipped_and_the_next_is_right(swapping: Swapping) -> None:
    def run(wrap: Wrap | None) -> list[torch.Tensor]:
        found = train_scaled(Network(wrap).to(swapping.kind), swapping, bad_step=1)
        assert found.was_skipped == [False, True, False, False]
        assert found.scales == [1024.0, 512.0, 512.0, 1024.0]
        return found.numbers

    check_like_plain(run, swapping)
