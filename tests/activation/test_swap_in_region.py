"""A swap wrapper around a part of a region: what it does to tensors is no op of the region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.platform.torch.activation_checkpoint import checkpoint, offload_wrapper, swap_wrapper
from support.swapping import Swapping, gradients

Function = Callable[[torch.Tensor], torch.Tensor]


def inner(x: torch.Tensor) -> torch.Tensor:
    y = (x @ x.t()).sigmoid()
    return y.tanh() * y.t() + x.sin()


def around(part: Function) -> Function:
    """Something before the part and after it that the region itself keeps, recomputes or swaps."""
    return lambda x: (part(x.exp().cos()).sin() * x).tanh()


def in_region(part: Function, answer: Any, seen: list[str] | None = None) -> Function:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if seen is not None and not ctx.is_recompute:
            seen.append(str(op))
        return answer

    return lambda x: checkpoint(around(part), x, policy_fn=policy).sum()


@pytest.mark.parametrize("answer", list(CheckpointPolicy), ids=lambda answer: answer.name)
@pytest.mark.parametrize("wrap", [swap_wrapper, offload_wrapper])
def test_a_part_of_a_region_that_is_swapped_gives_the_plain_gradients(
    swapping: Swapping, wrap: Any, answer: CheckpointPolicy
) -> None:
    x = swapping.randn(16, 16)
    expected = gradients(lambda y: around(inner)(y).sum(), x)
    for _ in range(2):
        assert torch.equal(gradients(in_region(wrap(inner), answer), x)[0], expected[0])
    assert swapping.offloaded_bytes > 0


def test_a_policy_is_not_asked_about_what_the_swapping_does(swapping: Swapping) -> None:
    x = swapping.randn(16, 16)
    seen: dict[str, list[str]] = {"plain": [], "swapped": []}
    gradients(in_region(inner, False, seen["plain"]), x)
    gradients(in_region(swap_wrapper(inner), False, seen["swapped"]), x)
    assert seen["swapped"] == seen["plain"]
