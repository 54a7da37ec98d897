"""A batch that a model cannot be called with is told in words: what it is, and what to give instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the solver is in SciPy")
pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hyper_parallel as hp
from hyper_parallel._base.errors import HyperParallelError
from hyper_parallel.core.planner.plan.batch_words import telling_of_the_batch
from hyper_parallel.platform import selection

X = torch.ones(4, 8)
ARRAY = np.ones((4, 8), np.float32)


class OfOneDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.layer(batch["x"])


@pytest.fixture(autouse=True)
def forgets_the_platform() -> Iterator[None]:
    yield
    selection._forget()


def total(y: torch.Tensor) -> torch.Tensor:
    return y.sum()


WRONG: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "a loader": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        DataLoader(TensorDataset(X)),
        total,
        r"next\(iter\(loader\)\)",
    ),
    "a data set": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        TensorDataset(X),
        total,
        r"next\(iter\(loader\)\)",
    ),
    "nothing": (lambda: nn.Sequential(nn.Linear(8, 8)), None, total, "got None"),
    "a text": (lambda: nn.Sequential(nn.Linear(8, 8)), {"input": "words"}, total, "with tensors in it"),
    "an array": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), ARRAY, total, r"torch\.as_tensor"),
    "an array inside": (OfOneDict, ({"x": ARRAY},), total, r"torch\.as_tensor"),
    "a dict for one argument": (OfOneDict, {"x": X}, total, r"give `\(batch,\)`"),
    "the target, too": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (X, X), total, "Give the inputs only"),
    "a loss of two arguments": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        (X, X),
        nn.MSELoss(),
        r"criterion\(output, target\)",
    ),
    "a function of two arguments": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        X,
        nn.functional.mse_loss,
        r"criterion\(output, target\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_of_another_form_is_told_what_to_give_instead(name: str) -> None:
    make, batch, loss_fn, expected = WRONG[name]
    with pytest.raises(HyperParallelError, match=expected):
        hp.explain(make(), batch, loss_fn=loss_fn, progress=False)
    with pytest.raises(HyperParallelError, match=expected):
        hp.plan_memory(make(), batch, loss_fn=loss_fn, budget="100%", progress=False)


def test_a_dict_in_a_tuple_is_one_argument() -> None:
    assert hp.explain(OfOneDict(), ({"x": X},), loss_fn=total, progress=False).profile.regions


def test_what_a_model_says_itself_stays_as_it_is_where_the_batch_is_not_to_blame() -> None:
    with pytest.raises(TypeError, match="^mine$"), telling_of_the_batch((X,), OfOneDict.forward, ""):
        raise TypeError("mine")
    with pytest.raises(RuntimeError, match="^no memory$"), telling_of_the_batch(ARRAY, OfOneDict.forward, ""):
        raise RuntimeError("no memory")
