"""A second run that reads something else than the forward did: it is found, or nothing comes of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel._base.errors import StateError
from hyper_parallel.platform.torch.activation_checkpoint.checkpoint_wrapper import checkpoint_wrapper


class Reading(nn.Module):
    """Uses what `read` gives in the middle of two ops."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x.tanh() * self.read())


def sample() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(4, requires_grad=True)


@pytest.mark.parametrize("early_stop", [True, False])
def test_another_tensor_from_outside_of_the_same_look_is_another_one(early_stop: bool) -> None:
    tensors = itertools.cycle([torch.full((4,), 1.0), torch.full((4,), 3.0)])
    region = checkpoint_wrapper(Reading(lambda: next(tensors)), early_stop=early_stop)
    with pytest.raises(StateError, match=r"aten\.mul\.Tensor with another tensor"):
        region(sample()).sum().backward()


def test_another_parameter_is_another_one_though_its_contents_are_the_same() -> None:
    parameters = itertools.cycle([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
    with pytest.raises(StateError, match="with another tensor"):
        checkpoint_wrapper(Reading(lambda: next(parameters)))(sample()).sum().backward()


def test_a_tensor_that_is_made_anew_in_each_run_is_compared_by_what_is_in_it() -> None:
    x = sample()
    checkpoint_wrapper(Reading(lambda: torch.tensor([0.5, 1.0, 2.0, 4.0])))(x).sum().backward()
    expected = torch.autograd.grad(torch.sin(x.tanh() * torch.tensor([0.5, 1.0, 2.0, 4.0])).sum(), x)
    assert torch.equal(x.grad, expected[0])
    numbers = itertools.count(1.0)
    with pytest.raises(StateError, match="with another tensor"):
        checkpoint_wrapper(Reading(lambda: torch.tensor(next(numbers))))(x).sum().backward()


def test_an_error_about_another_number_says_which() -> None:
    numbers = itertools.count(1.0)
    with pytest.raises(StateError, match=r"aten\.mul\.Tensor with 2\.0 for 1\.0"):
        checkpoint_wrapper(Reading(lambda: next(numbers)))(sample()).sum().backward()
