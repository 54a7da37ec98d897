"""Modules that make their parameters in the first call, transforms and nested tensors inside a block: right, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import checkpoint_wrapper
from hyper_parallel.platform.torch.wrappers.swap_wrapper import offload_wrapper, swap_wrapper
from support.swapping import Swapping


def swap_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP


WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "swap_wrapper": swap_wrapper,
    "offload_wrapper": offload_wrapper,
    "all swapped": lambda module: checkpoint_wrapper(module, policy_fn=swap_all),
    "recomputed": checkpoint_wrapper,
}
LAZY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.LazyLinear(4), (4, 8)),
    "inside": (lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh()), (4, 8)),
    "batch norm": (nn.LazyBatchNorm1d, (4, 8)),
    "convolution": (lambda: nn.LazyConv1d(3, 2), (2, 3, 8)),
}


def gradients(module: nn.Module, *size: int, num_calls: int = 3) -> list[Any]:
    torch.manual_seed(0)
    found: list[Any] = []
    for _ in range(num_calls):
        x = torch.randn(*size, requires_grad=True)
        module(x * 1).sin().sum().backward()
        found.append(x.grad)
    return found + [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAZY)
def test_a_lazy_module_is_the_plain_one_from_its_first_call_on(on_disk: Swapping, kind: str, way: str) -> None:
    make, size = LAZY[kind]
    expected, found = gradients(make(), *size), gradients(WAYS[way](make()), *size)
    assert len(expected) == len(found) > 3
    assert all(map(torch.equal, expected, found))
    assert on_disk.offloaded_bytes > 0 or "wrapper" not in way


def test_what_a_lazy_module_makes_is_not_swapped(on_disk: Swapping) -> None:
    gradients(swap_wrapper(nn.LazyLinear(64, bias=False)), 4, 32, num_calls=1)
    assert on_disk.offloaded_bytes == 4 * 32 * 4, "the input alone"


class Transform(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: (y.sin() ** 2).sum())(x) * x


class Nested(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 2)
        self.layout = layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=self.layout)
        return torch.cat(list((torch.sin(functional.linear(nested, self.weight)) * 2).unbind())) * x


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_transform_inside_a_block_is_refused_with_the_block_and_the_way_out(
    on_disk: Swapping, way: str
) -> None:
    with pytest.raises(StateError, match=r"(?s)gradient transform.*; 1\..*Leave this block out"):
        nn.Sequential(nn.Tanh(), WAYS[way](Transform()))(torch.randn(3, 4, requires_grad=True))
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("way", WAYS)
def test_nested_tensors_are_right_or_refused_with_the_block_and_the_way_out(on_disk: Swapping, way: str) -> None:
    for layout, refusing in ((torch.strided, ("all swapped", "recomputed")), (torch.jagged, ("recomputed",))):
        expected = gradients(nn.Sequential(Nested(layout)), 3, 4)
        model = nn.Sequential(WAYS[way](Nested(layout)))
        if way in refusing:
            with pytest.raises(StateError, match=r"(?s)nested tensors.*; 0\."):
                gradients(model, 3, 4)
        else:
            assert all(map(torch.equal, expected, gradients(model, 3, 4)))
