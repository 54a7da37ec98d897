"""What a policy is told about an op: which call of which module it belongs to, and how often it ran there."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy  # noqa: E402
from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper  # noqa: E402
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint  # noqa: E402


class Asked:
    """A policy that recomputes everything and notes what it was told about one op."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.forward: list[tuple[Any, ...]] = []
        self.recompute: list[tuple[Any, ...]] = []

    def __call__(self, ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if str(op).split(".")[1] in self.names:
            told = (ctx.module, ctx.call, ctx.occurrence_in_call, ctx.occurrence)
            (self.recompute if ctx.is_recompute else self.forward).append(told)
        return CheckpointPolicy.PREFER_RECOMPUTE


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().sin()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Twice()
        self.b = Twice()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).sin()
        return self.a(self.b(x)).sin()


def run(function: Any, policy: Any) -> None:
    x = torch.randn(3, requires_grad=True)
    checkpoint(function, x, policy_fn=policy).sum().backward()


def test_calls_of_a_module_are_counted_in_the_region() -> None:
    policy = Asked("sin")
    run(Model(), policy)
    assert policy.forward == [
        ("a", 0, 0, 0),
        ("a", 0, 1, 1),
        ("", 0, 0, 0),
        ("b", 0, 0, 0),
        ("b", 0, 1, 1),
        ("a", 1, 0, 2),
        ("a", 1, 1, 3),
        ("", 0, 1, 1),
    ]


def test_a_recomputation_tells_the_same() -> None:
    policy = Asked("sin")
    run(Model(), policy)
    assert policy.recompute == policy.forward[: len(policy.recompute)]
    assert len(policy.recompute) >= len(policy.forward) - 1  # the last need not be made again


def test_each_call_of_a_region_counts_from_zero() -> None:
    policy = Asked("sin")
    model = Model()
    run(model, policy)
    first = policy.forward[:]
    policy.forward.clear()
    run(model, policy)
    assert policy.forward == first


def test_calls_right_after_each_other_are_told_apart() -> None:
    """Their frames may lie at the same address."""
    policy = Asked("sin")
    inner = Twice()

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                x = self.inner(x)
            return x

    run(Loop(), policy)
    assert policy.forward == [("inner", n // 2, n % 2, n) for n in range(40)]


def test_a_module_that_calls_itself_has_a_call_for_each() -> None:
    policy = Asked("sin", "cos")

    class Nested(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            x = x.sin()
            if depth:
                x = self(x, depth - 1)
            return x.cos()

    run(Nested(), policy)
    assert [told[1:] for told in policy.forward] == [
        (0, 0, 0), (1, 0, 1), (2, 0, 2), (2, 0, 0), (1, 0, 1), (0, 0, 2),
    ]  # fmt: skip


def test_a_wrapper_is_no_call_of_its_own() -> None:
    policy = Asked("sin")
    model = nn.Sequential(checkpoint_wrapper(Twice(), policy_fn=policy))
    model(torch.randn(3, requires_grad=True)).sum().backward()
    assert policy.forward == [("0", 0, 0, 0), ("0", 0, 1, 1)]


def test_views_are_counted_by_call_too() -> None:
    policy = Asked("view")

    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.view(3, 1).exp().view(3) * 2).view(3)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.views = Views()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.views(self.views(x))

    run(Two(), policy)
    assert policy.forward == [("views", n // 3, n % 3, n) for n in range(6)]


def test_a_function_outside_of_modules_is_one_call() -> None:
    policy = Asked("sin")
    run(lambda x: x.sin().sin(), policy)
    assert policy.forward == [("", 0, 0, 0), ("", 0, 1, 1)]


def test_regions_in_regions_count_for_themselves() -> None:
    outer, inner = Asked("sin"), Asked("sin")
    block = Twice()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.block(x)
            return checkpoint(self.block, x, policy_fn=inner)

    run(Outer(), outer)
    assert outer.forward == [("block", 0, 0, 0), ("block", 0, 1, 1), ("block", 1, 0, 2), ("block", 1, 1, 3)]
    assert inner.forward == [("block", 0, 0, 0), ("block", 0, 1, 1)]


def test_nothing_lives_longer_because_calls_are_told_apart() -> None:
    """What a module was called with is gone when the function lets go of it, not when the region ends."""
    alive: list[bool] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Twice()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            argument = x.detach() * 2
            ref = weakref.ref(argument)
            x = x + self.block(argument)
            del argument
            alive.append(ref() is not None)
            return x.sin()

    run(Model(), Asked("sin"))
    assert alive[0] is False
