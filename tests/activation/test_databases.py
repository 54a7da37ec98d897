"""PyTorch's own operators and modules, each in a region and swapped: the bits of the plain run, forward and gradients.

The whole of it, here or on a machine with a GPU (about 16,000 samples of operators and 2,500 of modules, five ways each):

    HYPER_PARALLEL_CAMPAIGN=full python3 -m pytest -n 12 tests/activation/test_databases.py -k cpu
    HYPER_PARALLEL_CAMPAIGN=full python3 -m pytest -n 12 tests/activation/test_databases.py -k cuda
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from support.campaign import share
from support.databases import (
    OTHER_WAY,
    WAYS,
    Case,
    NoOp,
    compare,
    differs,
    module_cases,
    operator_cases,
    other_under_a_mode,
    run,
)
from support.swapping import Swapping, check_nothing_left

_IS_FULL = len(share(2, 1)) == 2
_PARTS = 24 if _IS_FULL else 1
# A run takes one of so many operators or modules, and so many samples of each; all of them when it is full.
_EVERY = 1 if _IS_FULL else 160
_MOST = None if _IS_FULL else 2


@pytest.fixture(autouse=True)
def same_bits_each_time(swapping: Swapping, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(swapping.kind == "cuda", warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # costs an op for each of these
    yield
    torch.use_deterministic_algorithms(False)


def check(cases: Iterator[Case]) -> None:
    counts, wrong = compare(cases)
    print(dict(counts))
    assert not wrong, f"{len(wrong)} of {counts.total()} runs:\n" + "\n".join(wrong[:20])
    assert counts["right"] > counts.total() / 2 > 0
    check_nothing_left()


@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("has_gradients", [True, False], ids=["with gradients", "constants"])
def test_every_operator_gives_the_bits_of_the_plain_run(swapping: Swapping, part: int, has_gradients: bool) -> None:
    check(operator_cases(swapping.kind, part, _PARTS * _EVERY, _MOST, has_gradients=has_gradients))


@pytest.mark.parametrize("part", range(_PARTS))
def test_every_module_gives_the_bits_of_the_plain_run(swapping: Swapping, part: int) -> None:
    check(module_cases(swapping.kind, part, _PARTS * _EVERY, _MOST))


# -- what PyTorch computes in another way under a dispatch mode --------------------------------------------------------------


@functools.cache
def _constant(device: str, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(1)).to(device)


def _smoothed_loss(x: torch.Tensor) -> torch.Tensor:
    weight, target = torch.tensor([0.1, 0.5, 0.7, 0.9], device=x.device), torch.arange(24, device=x.device) % 4
    logits = x.sin().transpose(1, 2).reshape(24, 4)
    return nn.functional.cross_entropy(logits, target, weight=weight, label_smoothing=0.1, ignore_index=1)


# Of those in OTHER_WAY that the documentation names: what a user writes.
NAMED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross_entropy with weights, smoothing and an ignored class": _smoothed_loss,
    "a constant batch of one times a batch": lambda x: _constant(x.device.type, 1, 5, 4) @ x,
    "singular values of a constant": lambda x: x * torch.linalg.svdvals(_constant(x.device.type, 20, 20)).sum(),
    "eigenvalues of a constant": lambda x: x * torch.linalg.eigvalsh(_constant(x.device.type, 20, 20)).sum(),
    "the condition of a constant": lambda x: x * torch.linalg.cond(_constant(x.device.type, 20, 20)),
}  # fmt: skip


class Called(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", NAMED)
def test_what_takes_another_way_under_a_mode_is_as_pytorch_gives_it_there(swapping: Swapping, name: str) -> None:
    case = Case(name, 0, lambda: Called(NAMED[name]), [torch.randn(8, 4, 3, device=swapping.kind, requires_grad=True)])
    plain, under_a_mode = run(case), run(case, mode=NoOp())
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(plain, under_a_mode, strict=True))
    for way in ("recompute", "save", "swap", "mix"):
        assert not differs(run(case, WAYS[way]), under_a_mode), way
    assert not differs(run(case, WAYS["swap wrapper"]), plain)  # no mode is on
    check_nothing_left()


@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("has_gradients", [True, False], ids=["with gradients", "constants"])
def test_no_other_operator_takes_another_way_under_a_mode(swapping: Swapping, part: int, has_gradients: bool) -> None:
    cases: Any = operator_cases(swapping.kind, part, _PARTS * _EVERY, _MOST, has_gradients=has_gradients)
    assert other_under_a_mode(cases) <= set(OTHER_WAY.split())
