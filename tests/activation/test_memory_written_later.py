"""What an op still writes after autograd saved it is not copied before it is written, and is what was written there in backward."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.platform.torch.regions.saved_tensors import AsyncSaveOnCpu
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import checkpoint_wrapper
from hyper_parallel.platform.torch.wrappers.swap_wrapper import offload_wrapper, swap_wrapper
from support.swapping import Swapping, check_nothing_left

Wrap = Callable[[Any], nn.Module]


def swap_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP


def save_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def save_some(part_of_name: str) -> Callable[..., CheckpointPolicy]:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if part_of_name in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class Saving(nn.Module):
    """`AsyncSaveOnCpu` as a user has it in his own forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        with AsyncSaveOnCpu():
            return self.inner(x)


WAYS: dict[str, Wrap] = {
    "swap_wrapper": swap_wrapper,
    "offload_wrapper": offload_wrapper,
    "AsyncSaveOnCpu": Saving,
    "all swapped": lambda module: checkpoint_wrapper(module, policy_fn=swap_all),
    "all saved": lambda module: checkpoint_wrapper(module, policy_fn=save_all),
    "products saved": lambda module: checkpoint_wrapper(module, policy_fn=save_some("mul")),
    "copies saved": lambda module: checkpoint_wrapper(module, policy_fn=save_some("clone"), early_stop=False),
    "recomputed": checkpoint_wrapper,
    "recomputed to the end": lambda module: checkpoint_wrapper(module, early_stop=False),
    "inputs swapped": lambda module: checkpoint_wrapper(module, swap_inputs=True),
}


class NoiseOfZeros(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._C._nn.rrelu_with_noise(x.sin(), torch.zeros_like(x), 0.1, 0.3, True).sin()


class NoiseIsTheLastNeeded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._C._nn.rrelu_with_noise(x, torch.zeros_like(x), 0.1, 0.3, True)


class WrittenThroughData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        saved = x.sin().exp()
        saved.data.mul_(2)
        return saved * x


class FactorWrittenThroughData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.zeros_like(x)
        y = x.sin() * factor
        factor.data.add_(3.0)
        return y.sin() + x.cos()


class FactorWrittenThroughNumpy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.zeros_like(x)
        y = x.sin() * factor
        factor.numpy()[...] = 3.0
        return y.sin() + x.cos()


class ResultWrittenThroughNumpy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.5
        factor = y.detach().clone()
        np.multiply(factor.numpy(), 2, out=factor.numpy())
        return torch.sin(x) * factor * y


class _WritesNoise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(x)
        ctx.save_for_backward(noise, x)
        noise.numpy()[...] = x.detach().numpy() * 3
        return x * noise

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        noise, x = ctx.saved_tensors
        return gradient * noise * x.cos()


class FunctionOfTheUser(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _WritesNoise.apply(x.sin())


MODULES: dict[str, Callable[[], nn.Module]] = {
    "RReLU": nn.RReLU,
    "noise of zeros": NoiseOfZeros,
    "noise is the last needed": NoiseIsTheLastNeeded,
    "written through .data": WrittenThroughData,
    "factor written through .data": FactorWrittenThroughData,
    "factor written through NumPy": FactorWrittenThroughNumpy,
    "result written through NumPy": ResultWrittenThroughNumpy,
    "a function of the user's": FunctionOfTheUser,
}


def gradients(module: nn.Module, num_calls: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(48, 48, requires_grad=True)
    model, found = nn.Sequential(module, nn.Tanh(), nn.Tanh()), []
    for seed in range(num_calls):
        torch.manual_seed(seed)
        found += torch.autograd.grad(model(x * 1).sum(), x)
    return found


CASES = [(kind, way) for kind in MODULES for way in WAYS]
SWAPPED = ("swap_wrapper", "offload_wrapper", "AsyncSaveOnCpu", "all swapped")


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_what_is_written_after_it_was_saved_is_as_in_the_plain_run(on_disk: Swapping, kind: str, way: str) -> None:
    expected = gradients(MODULES[kind]())
    found = gradients(WAYS[way](MODULES[kind]()))
    assert all(map(torch.equal, expected, found))
    if way in SWAPPED:
        assert on_disk.offloaded_bytes > 0
    check_nothing_left()


@pytest.mark.parametrize("way", SWAPPED)
def test_a_change_in_place_before_the_next_op_saves_anything_is_an_error_still(on_disk: Swapping, way: str) -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            return y.add_(1)  # saves nothing itself

    with pytest.raises(StateError, match="changed in place"):
        gradients(WAYS[way](Block()), num_calls=1)


class WritesItsArgument(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = x.detach().numpy()
        np.multiply(noise, 2, out=noise)
        return x.sin() * x.cos()


@pytest.mark.parametrize("way", ["recomputed", "products saved", "copies saved"])
def test_an_argument_that_no_op_writes_is_not_written_again_and_an_error_says_so(on_disk: Swapping, way: str) -> None:
    x = torch.randn(4, 4, requires_grad=True) * 1
    loss = WAYS[way](WritesItsArgument())(x).sum()
    after_forward = x.detach().clone()
    with pytest.raises(StateError, match="An argument of a region is written by something that PyTorch does not see"):
        loss.backward()
    assert torch.equal(x, after_forward)


def test_who_only_reads_memory_beside_the_ops_has_the_plain_gradients(on_disk: Swapping) -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = torch.from_numpy(np.sin(x.detach().numpy()))
            return torch.sin(x) * factor * x.detach().clone()

    for way in ("products saved", "copies saved", "recomputed", "inputs swapped", "all swapped"):
        assert all(map(torch.equal, gradients(Reads()), gradients(WAYS[way](Reads())))), way
    check_nothing_left()


@pytest.mark.parametrize("compare", [operator.lt, operator.gt, operator.le, operator.ge])
def test_a_comparison_with_what_is_saved_is_the_same_op_again(on_disk: Swapping, compare: Any) -> None:
    class Chooses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sine, other = x.sin(), x.cos()
            return torch.where(compare(other, sine) & compare(sine, 0.5), sine.exp(), other.exp())

    wrapped = checkpoint_wrapper(Chooses(), policy_fn=save_some("aten.sin."))
    assert all(map(torch.equal, gradients(Chooses()), gradients(wrapped)))
