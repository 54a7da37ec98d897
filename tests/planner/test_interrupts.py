"""Ctrl-C in planning, and in steps under a plan: model, thread and settings are as they were, and the next step is right."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import hyper_parallel as hp
from hyper_parallel.core.swap.config import current_config
from support.interrupts import Interrupt, differing, generators, interrupted, thread_state
from support.region_programs import flush_aborted_backward
from support.swapping_state import check_nothing_left

pytestmark = pytest.mark.usefixtures("on_disk")
IS_FULL = os.environ.get("HYPER_PARALLEL_CAMPAIGN") == "full"
NUM_MOMENTS = 1_500


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.up, self.norm, self.down = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x + nn.functional.dropout(self.down(self.norm(self.up(x)).relu()), 0.1)


def make() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(16, 1)), torch.randn(64, 16)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def plan(model: nn.Module, inputs: torch.Tensor, *, verify: bool = True) -> Any:
    return hp.plan_memory(model, inputs, budget="75%", loss_fn=loss_of, regions=["0", "1", "2"], verify=verify, progress=False)  # fmt: skip


def state_of(model: nn.Module) -> dict[str, Any]:
    """What planning may touch."""
    tensors = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    gradients = {name: None if each.grad is None else each.grad.tolist() for name, each in model.named_parameters()}
    return {
        "tensors": tensors,
        "gradients": gradients,
        "modules": [(name, type(each)) for name, each in model.named_modules()],
        "modes": [each.training for each in model.modules()],
        "counts": [each.num_calls for each in model.modules() if isinstance(each, Block)],
        "hooks": [(len(each._forward_hooks), len(each._forward_pre_hooks), sorted(vars(each))) for each in model.modules()],
        "optimizer hooks": list(_global_optimizer_pre_hooks),
        "generators": generators(),
        "swap setting": current_config(),
    }  # fmt: skip


def moments(all_of_it: Interrupt) -> list[int]:
    """Of so many: a fixed few at places that handle a stack; or all of these, and 1,500 others."""
    return all_of_it.moments(NUM_MOMENTS) if IS_FULL else all_of_it.moments()[::30]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in a finaliser is lost, as anywhere in Python, and said to standard error."""
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)


def test_ctrl_c_in_planning_leaves_the_model_and_the_thread_as_they_were() -> None:
    model, inputs = make()
    loss_of(model(inputs)).backward()
    plan(model, inputs)
    with Interrupt() as all_of_it:
        plan(model, inputs)
    before, on_thread = state_of(model), thread_state()
    num_done = 0
    for at in moments(all_of_it):
        interrupt = interrupted(lambda _: plan(model, inputs), at)
        if interrupt is not None:
            assert differing(on_thread, thread_state()) == [], interrupt.where
            assert differing(before, state_of(model)) == [], interrupt.where
            num_done += 1
    flush_aborted_backward()
    check_nothing_left()
    print(f"planning: {num_done} interrupts")
    assert num_done >= 2


def test_ctrl_c_in_a_step_under_a_plan_leaves_nothing_and_the_next_step_is_right() -> None:
    model, inputs = make()
    found = plan(model, inputs)
    plain, _ = make()
    found.apply(model, on_oom="replan")

    def step(trained: nn.Module, run: Callable[[Callable[[], Any]], Any] = lambda function: function()) -> Any:
        trained.load_state_dict(weights)
        trained.zero_grad()
        torch.manual_seed(5)
        run(lambda: loss_of(trained(inputs)).backward())
        return [each.grad.clone() for each in trained.parameters()]

    weights = copy.deepcopy(plain.state_dict())
    expected = step(plain)
    for _ in range(3):
        assert all(map(torch.equal, step(model, found.run), expected))
    with Interrupt() as all_of_it:
        step(model, found.run)
    before, num_done = {**thread_state(), "hooks": state_of(model)["optimizer hooks"]}, 0
    for at in moments(all_of_it):
        interrupt = interrupted(lambda _: step(model, found.run), at)
        if interrupt is not None:
            now = {**thread_state(), "hooks": state_of(model)["optimizer hooks"]}
            assert differing(before, now) == [], interrupt.where
            flush_aborted_backward()
            assert all(map(torch.equal, step(model, found.run), expected)), interrupt.where
            check_nothing_left()
            num_done += 1
    print(f"steps under a plan: {num_done} interrupts")
    assert num_done >= 2
    found.remove(model)
