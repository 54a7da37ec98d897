"""A second run that reads something else than the forward did: it is found, or nothing comes of it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel._base.errors import StateError
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import checkpoint_wrapper
from support.campaign import share
from support.drifting import Case, all_cases, outcome
from support.region_programs import flush_aborted_backward


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


# -- in every kind of region -------------------------------------------------------------------------------------------------


def drawn_cases() -> list[Case]:
    """All of them, in an order in which the first few have something of everything."""
    cases = list(all_cases())
    random.Random(1).shuffle(cases)
    return cases


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_another_one_in_the_second_run_is_found_and_what_is_not_is_right(device: str) -> None:
    """A number or a tensor from a closure, an iterator, a global, an object: as a factor, a slice, a dim, a branch, an expert.

    It changes between calls, or between a forward and its backward, from the first call on or from the fourth. A region
    that is steady within each call gives what the plain module gives; in all others the difference is found, or does
    not matter.
    """
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    cases = drawn_cases()
    met, wrong = Counter[str](), []
    for index in share(len(cases), 56):
        found = outcome(cases[index], device)
        met[found] += 1
        if found not in ("right", "found"):
            wrong.append(f"{cases[index]}: {found}")
        flush_aborted_backward()
    assert wrong == [], f"{len(wrong)} of {sum(met.values())}; the first:\n" + "\n".join(wrong[:5])
    assert min(met["right"], met["found"]) > sum(met.values()) // 4
