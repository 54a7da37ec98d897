"""When the recorded ops of a region run in backward without its function, and when the function does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import policies as p
from hyper_parallel._base.errors import StateError
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper
from support.swapping import Swapping
from support.tally import TalliesCalls

WIDTH = 8


@pytest.fixture(autouse=True)
def _device(swapping: Swapping) -> Iterator[None]:
    """All on the CPU, or all on a GPU."""
    with torch.device(swapping.kind):
        yield


class Block(TalliesCalls, nn.Module):
    """Counts its calls. `between` is done to an intermediate result."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda h: h, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.between = between
        self.scale = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        h = self.between(torch.tanh(self.up(x)) * self.scale)
        return x + self.dropout(self.down(h.sin()))


def generator_state() -> torch.Tensor:
    return torch.cuda.get_rng_state().cpu() if torch.get_default_device().type == "cuda" else torch.get_rng_state()


def trained(
    block: Block,
    *,
    num_steps: int = 5,
    before_step: Callable[[Block, int], None] = lambda block, number: None,
    batch: Callable[[int], torch.Tensor] = lambda number: torch.randn(4, WIDTH),
    **options: Any,
) -> list[int]:
    """How often the block was called in each step. Its gradients, and where the generator is left, are those of a plain copy."""
    plain = copy.deepcopy(block)
    managed = checkpoint_wrapper(block, **options)
    calls = []
    for number in range(num_steps):
        found = []
        for model, inner in ((plain, plain), (managed, block)):
            before_step(inner, number)
            torch.manual_seed(number)
            x = batch(number).requires_grad_()
            num_before = inner.num_calls
            model(x).square().sum().backward()
            calls.append(inner.num_calls - num_before)
            found.append([x.grad, *(each.grad.clone() for each in inner.parameters()), generator_state()])
            model.zero_grad()
        assert all(map(torch.equal, *found)), f"step {number}"
    return calls[1::2]


def test_from_the_third_step_on_the_function_is_called_once() -> None:
    # In the second step it runs again with placeholders, to show that it does nothing that its ops do not tell.
    assert trained(Block()) == [2, 2, 1, 1, 1]


@pytest.mark.parametrize("policy", [p.save(p.matmuls), p.swap(p.matmuls), [torch.ops.aten.addmm.default]], ids=str)
def test_so_it_is_with_policies_that_answer_the_same_each_time(policy: Any) -> None:
    assert trained(Block(), policy_fn=policy) == [2, 2, 1, 1, 1]


def test_random_numbers_are_those_of_the_forward() -> None:
    assert trained(Block(dropout=0.5)) == [2, 2, 1, 1, 1]


def test_what_no_op_tells_keeps_the_function_running() -> None:
    factor = [1.0]  # at first it has no effect that could be measured

    def unseen(h: torch.Tensor) -> torch.Tensor:
        if h.is_cuda:
            pytest.skip("NumPy writes memory of the host")
        h.detach().numpy()[:] *= factor[0]
        return h

    def before_step(block: Block, number: int) -> None:
        factor[0] = 1.0 if number < 3 else 3.0

    calls = trained(Block(unseen), before_step=before_step)
    assert min(calls) >= 2, calls


def test_a_function_of_the_user_s_that_decides_is_asked_again() -> None:
    asked: list[bool] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(ctx.is_recompute)
        return CheckpointPolicy.PREFER_RECOMPUTE

    assert trained(Block(), policy_fn=policy) == [2] * 5
    assert any(asked)


@pytest.mark.parametrize("option", ["debug", "early_stop"])
def test_who_wants_to_see_the_function_run_sees_it(option: str) -> None:
    assert trained(Block(), **{option: option == "debug"}) == [2] * 5


def test_another_scalar_is_another_op() -> None:
    def before_step(block: Block, number: int) -> None:
        block.scale = 0.5 if number < 3 else 0.25

    assert trained(Block(), before_step=before_step, num_steps=6) == [2, 2, 1, 2, 2, 1]


def test_other_shapes_are_other_ops() -> None:
    assert trained(Block(), batch=lambda number: torch.randn(4 if number < 3 else 6, WIDTH)) == [2, 2, 1, 2, 2]


def test_a_branch_that_depends_on_data_is_the_forward_s() -> None:
    def branch(h: torch.Tensor) -> torch.Tensor:
        return h.exp() if h.sum() > 0 else h.cos()

    trained(Block(branch), num_steps=8)


def test_in_place_ops_on_the_region_s_own_memory_run_as_well() -> None:
    assert trained(Block(lambda h: h.clone().mul_(2).add_(1))) == [2, 2, 1, 1, 1]


def test_several_results_and_lists_of_arguments() -> None:
    def several(h: torch.Tensor) -> torch.Tensor:
        values, _ = h.sort(dim=-1)
        first, second = values.chunk(2, dim=-1)
        return torch.cat([second, first], dim=-1)

    assert trained(Block(several)) == [2, 2, 1, 1, 1]


def test_what_a_parameter_was_changed_to_is_not_used() -> None:
    block = Block()
    managed = checkpoint_wrapper(block)
    for number in range(4):
        loss = managed(torch.randn(4, WIDTH)).sum()
        if number < 3:
            loss.backward()
    assert block.num_calls == 2 + 2 + 1 + 1
    with torch.no_grad():
        block.up.weight.mul_(2)
    with pytest.raises((StateError, RuntimeError), match="changed in place|modified by an inplace"):
        loss.backward()


def test_parameters_that_were_exchanged_are_those_of_the_call() -> None:
    block = Block()
    managed, plain = checkpoint_wrapper(block), copy.deepcopy(block)
    x = torch.randn(4, WIDTH)
    for number in range(5):
        others = {name: torch.randn_like(each).requires_grad_() for name, each in plain.named_parameters()}
        grads = []
        for model in (plain, managed):
            loss = torch.func.functional_call(model, others, (x,)).square().sum()
            grads.append(torch.autograd.grad(loss, list(others.values())))
        assert all(map(torch.equal, *grads)), number


class Counting(TorchDispatchMode):
    """Counts ops, and fails at one."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.ops: list[str] = []
        self._fails_at = fails_at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        if len(self.ops) - 1 == self._fails_at:
            raise RuntimeError("injected")
        return func(*args, **(kwargs or {}))


def test_only_what_backward_needs_is_run() -> None:
    block = Block()
    managed = checkpoint_wrapper(block, policy_fn=p.save(p.matmuls))
    for number in range(4):
        loss = managed(torch.randn(4, WIDTH)).sum()
        with Counting() as mode:
            loss.backward()
        ran = [op for op in mode.ops if op in ("aten.addmm.default", "aten.tanh.default", "aten.sin.default")]
        assert ran == ["aten.tanh.default", "aten.sin.default"], (number, mode.ops)


def test_an_op_that_fails_in_backward_leaves_the_next_step_right() -> None:
    block = Block(dropout=0.5)
    managed, plain = checkpoint_wrapper(block), copy.deepcopy(block)
    x = torch.randn(4, WIDTH)
    for number in range(20):
        loss = managed(x).sum()
        if number >= 3:
            with pytest.raises(RuntimeError, match="injected"), Counting(fails_at=number - 3):
                loss.backward()
        else:
            loss.backward()
        grads = []
        for model, inner in ((plain, plain), (managed, block)):
            model.zero_grad()
            torch.manual_seed(number)
            model(x).square().sum().backward()
            grads.append([each.grad for each in inner.parameters()])
        assert all(map(torch.equal, *grads)), number


def test_two_calls_that_wait_for_their_backward_do_not_mix() -> None:
    block = Block(dropout=0.5)
    managed, plain = checkpoint_wrapper(block), copy.deepcopy(block)
    batches = [torch.randn(4, WIDTH) for _ in range(3)]
    for number in range(4):
        grads = []
        for model, inner in ((plain, plain), (managed, block)):
            model.zero_grad()
            torch.manual_seed(number)
            losses = [model(x).square().sum() for x in batches]
            for loss in (losses[1], losses[2], losses[0]):
                loss.backward()
            grads.append([each.grad for each in inner.parameters()])
        assert all(map(torch.equal, *grads)), number


def test_the_framework_s_profiler_shows_what_is_recomputed() -> None:
    managed = checkpoint_wrapper(Block())
    for _ in range(3):  # by the function, and by its ops
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            managed(torch.randn(4, WIDTH)).sum().backward()
        assert "hyper_parallel: recompute Block" in {event.key for event in profile.key_averages()}
