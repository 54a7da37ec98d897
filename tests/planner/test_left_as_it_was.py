"""What planning may not change beside the parameters, gradients and buffers of a model (those: `test_plan.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel._base.errors import StateError  # noqa: E402
from hyper_parallel.platform.torch.planner.step_state import StepState  # noqa: E402

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


def with_optimizer_in_backward(model: Any, fired: list[Any]) -> None:
    optimizers = {each: torch.optim.AdamW([each], lr=0.1) for each in model.parameters()}

    def step(parameter: Any) -> None:
        fired.append(parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("call", CALLS)
def test_an_optimizer_that_steps_in_backward_does_not_step_while_planning(call: str) -> None:
    model, fired = make(), []
    with_optimizer_in_backward(model, fired)
    handle = model[0][0].up.weight.register_post_accumulate_grad_hook(fired.append)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    CALLS[call](model, batch())
    assert not fired
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    loss_of(model(batch())).backward()
    assert len(fired) == len(before) + 1, "the hooks are back"
    assert all(parameter.grad is None for parameter in model.parameters())
    handle.remove()
    fired.clear()
    loss_of(model(batch())).backward()
    assert len(fired) == len(before), "their handles still know them"


def test_a_refused_plan_puts_the_hooks_back_in_their_order() -> None:
    model, fired = make(), []
    parameter = model[0][0].up.weight
    for name in ("first", "second"):
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    with pytest.raises(hp.BudgetError):
        plan_for(model, batch(), "1%")
    loss_of(model(batch())).backward()
    assert fired == ["first", "second"]


def test_hooks_of_the_frameworks_data_parallel_stay_while_planning() -> None:
    model, fired = make(), []

    def reduce(_: Any) -> None:
        fired.append("reduced")

    reduce.__module__ = "torch.distributed.fsdp._runtime_utils"
    model[0][0].up.weight.register_post_accumulate_grad_hook(functools.partial(reduce))
    plan_for(model, batch())
    assert fired


def test_an_optimizer_that_steps_in_the_forward_is_refused_before_it_trains() -> None:
    class Trains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = make()
            self.optimizers = [torch.optim.SGD(self.blocks.parameters(), lr=0.1)]

        def forward(self, x: Any) -> Any:
            self.optimizers[0].step()
            return self.blocks(x)

    model = Trains()
    loss_of(model.blocks(batch())).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(StateError, match="SGD"):
        plan_for(model, batch())
    assert all(map(torch.equal, before, model.parameters()))
    loss_of(model(batch())).backward()  # nobody refuses any more


class Noisy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Any) -> Any:
        return super().forward(x) * torch.bernoulli(torch.full(x.shape, 0.9), generator=self.generator)


@pytest.mark.parametrize("call", CALLS)
def test_generators_that_modules_have_are_where_they_were(call: str) -> None:
    model = nn.Sequential(nn.Sequential(*(Noisy() for _ in range(4))))
    before = [block.generator.get_state() for block in model[0]]
    CALLS[call](model, batch().repeat(16, 1))  # large beside what regions note of generators
    assert all(map(torch.equal, before, (block.generator.get_state() for block in model[0])))


def test_a_step_that_is_repeated_draws_the_same_from_the_generators_of_modules() -> None:
    model = Noisy()
    state = StepState(model, with_gradients=False)
    first = model(batch())
    state.restore()
    assert torch.equal(first, model(batch()))
