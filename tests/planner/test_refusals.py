"""What cannot be planned is told in words that help, and before much is done."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel.core.planner.solver import BudgetError  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(x)))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(3))))


def loss_of(output: Any) -> Any:
    return output.square().mean()


def plan_for(model: Any, budget: int | str = "80%", rows: int = 64, **others: Any) -> hp.MemoryPlan:
    arguments = {"loss_fn": loss_of, "budget": budget, "progress": False, **others}
    return hp.plan_memory(model, torch.ones(rows, 16), **arguments)


@pytest.mark.parametrize("verify", [True, False])
def test_the_smallest_budget_is_not_above_the_plain_peak(verify: bool) -> None:
    model = make()  # so small that the margin of a plan is more than what it saves
    plain_bytes = plan_for(model, "100%", rows=4).profile.peak_bytes
    assert plan_for(model, plain_bytes, rows=4).is_empty
    with pytest.raises(BudgetError, match=f"at least {plain_bytes} bytes .*the plain step: ") as caught:
        plan_for(model, plain_bytes - 1, rows=4, verify=verify)
    assert caught.value.smallest_bytes == plain_bytes
