"""What planning may not change beside the parameters, gradients and buffers of a model (those: `test_plan.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import hyper_parallel as hp  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(x)))


def loss_of(output: Any) -> Any:
    return output.square().mean()


def make(num_blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(num_blocks))))


def batch() -> Any:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


def plan_for(model: Any, inputs: Any, budget: str = "80%") -> hp.MemoryPlan:
    return hp.plan_memory(model, inputs, loss_fn=loss_of, budget=budget, progress=False)


def verify(model: Any, inputs: Any) -> None:
    plan = plan_for(model, inputs.detach())
    plan.verify(model, inputs)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "plan_memory": plan_for,
    "explain": lambda model, inputs: hp.explain(model, inputs, loss_fn=loss_of, progress=False),
    "largest": lambda model, inputs: hp.largest(
        model, lambda n: {1: inputs[:1].detach()}.get(n, inputs), "1MiB", at_most=2, loss_fn=loss_of, progress=False
    ),
    "verify": verify,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_batch_that_requires_a_gradient_keeps_the_one_it_had(call: str, has_gradient: bool) -> None:
    model, inputs = make(), batch().requires_grad_()
    if has_gradient:
        loss_of(model(inputs)).backward()
    gradient = inputs.grad
    before = None if gradient is None else gradient.clone()
    CALLS[call](model, inputs)
    assert inputs.grad is gradient
    assert before is None or torch.equal(before, gradient)


def test_the_gradient_of_a_batch_is_part_of_what_is_alive_before_a_step() -> None:
    model, inputs = make(), batch()
    without = hp.explain(model, inputs, loss_fn=loss_of, progress=False).profile.base_bytes
    inputs.requires_grad_()
    profile = hp.explain(model, inputs, loss_fn=loss_of, progress=False).profile
    assert profile.base_bytes == without + inputs.nbytes
