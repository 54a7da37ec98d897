"""What an optimizer will hold is known before its first step, whatever its kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hyper_parallel.platform.torch.planner.optimizer_state import optimizer_bytes  # noqa: E402

CPU = torch.device("cpu")


class Own(torch.optim.Optimizer):  # type: ignore[misc]
    """Nobody knows it: rows and columns of matrices, in a list."""

    def __init__(self, parameters: Any, fails: bool = False) -> None:
        super().__init__(parameters, {})
        self.fails = fails

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.fails:
            raise KeyError("no such luck")
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["parts"] = [torch.zeros(size) for size in each.shape]


def parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.ones(shape)) for shape in [(8, 4), (8, 4), (16,), (3, 8, 4)]]


KINDS: dict[str, Callable[[Any], Any]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "own": Own,
    "two groups": lambda trained: torch.optim.ASGD([{"params": trained[:1], "lr": 0.1}, {"params": trained[1:]}]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_counted_as_it_is_after_the_first_step(kind: str) -> None:
    trained = parameters()
    optimizer = KINDS[kind](trained)
    calls: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    told = optimizer_bytes(optimizer, CPU)
    assert not calls
    assert not optimizer.state
    assert all(torch.equal(each, torch.ones_like(each)) for each in trained)
    for each in trained:
        each.grad = torch.ones_like(each)
    optimizer.step()
    assert told == optimizer_bytes(optimizer, CPU) > 0


def test_the_history_of_lbfgs_counts_when_it_is_full() -> None:
    trained = parameters()
    optimizer = torch.optim.LBFGS(trained, lr=0.01, history_size=3, max_iter=2)
    told = optimizer_bytes(copy.copy(optimizer), CPU)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = torch.stack([each.pow(4).sum() for each in trained]).sum()
        loss.backward()
        return loss

    for _ in range(8):
        optimizer.step(closure)
    assert optimizer_bytes(optimizer, CPU) <= told


def test_what_cannot_take_a_step_by_itself_is_refused_unless_bytes_are_reserved() -> None:
    with pytest.raises(ValueError, match=r"Own: KeyError.*\n.*reserve="):
        optimizer_bytes(Own(parameters(), fails=True), CPU)
    assert optimizer_bytes(Own(parameters(), fails=True), CPU, is_reserved=True) == 0
