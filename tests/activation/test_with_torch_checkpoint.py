"""Models that use `torch.utils.checkpoint` themselves: inside our wrappers, around them and beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper, swap_wrapper
from hyper_parallel.platform.torch.compat.selective_contexts import create_selective_checkpoint_contexts
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
from support.region_programs import check_no_mode_left
from support.swapping import Swapping, check_nothing_left
from support.training import Block, same, train
from support.wrapped import Wrap, mix

pytestmark = pytest.mark.usefixtures("one_thread")


OURS: dict[str, Wrap] = {
    "recompute": checkpoint_wrapper,
    "mix": functools.partial(checkpoint_wrapper, policy_fn=mix),
    "swap_inputs": functools.partial(checkpoint_wrapper, swap_inputs=True),
    "swap wrapper": swap_wrapper,
}


class Theirs(nn.Module):
    """A block of somebody who calls PyTorch's checkpoint in the forward."""

    def __init__(self, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner = inner
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, **self.options)


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> torch.utils.checkpoint.CheckpointPolicy:
    policy = torch.utils.checkpoint.CheckpointPolicy
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.mm.default)
    return policy.MUST_SAVE if is_product else policy.PREFER_RECOMPUTE


def contexts_of(create: Callable[..., Any]) -> Callable[[], Any]:
    return functools.partial(create, save_products)


THEIRS: dict[str, Wrap] = {
    "reentrant": functools.partial(Theirs, use_reentrant=True),
    "not reentrant": functools.partial(Theirs, use_reentrant=False),
    "selective": functools.partial(
        Theirs,
        use_reentrant=False,
        context_fn=contexts_of(torch.utils.checkpoint.create_selective_checkpoint_contexts),
    ),
    "selective with our contexts": functools.partial(
        Theirs, use_reentrant=False, context_fn=contexts_of(create_selective_checkpoint_contexts)
    ),
}


def three_blocks(swapping: Swapping, wrap: Callable[[nn.Module, int], nn.Module]) -> nn.Module:
    """The same parameters, however they are wrapped; with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(*(wrap(Block(), i) for i in range(3))).to(swapping.kind)


def check_like_plain(swapping: Swapping, wrap: Callable[[nn.Module, int, Wrap], nn.Module]) -> None:
    """With each of our wrappers; `wrap` is given it."""
    x = swapping.randn(2, 16, 32)
    expected = train(three_blocks(swapping, lambda block, i: block), x)
    for name, ours in OURS.items():
        model = three_blocks(swapping, functools.partial(wrap, ours=ours))
        for _ in range(2):
            assert same(train(model, x), expected), name
        check_nothing_left()
        check_no_mode_left()


@pytest.mark.parametrize("theirs", THEIRS)
def test_their_checkpoint_inside_our_wrapper(swapping: Swapping, theirs: str) -> None:
    check_like_plain(swapping, lambda block, i, ours: ours(THEIRS[theirs](block)))


@pytest.mark.parametrize("theirs", THEIRS)
def test_our_wrapper_inside_their_checkpoint(swapping: Swapping, theirs: str) -> None:
    check_like_plain(swapping, lambda block, i, ours: THEIRS[theirs](ours(block)))


@pytest.mark.parametrize("theirs", THEIRS)
def test_theirs_and_ours_side_by_side(swapping: Swapping, theirs: str) -> None:
    check_like_plain(swapping, lambda block, i, ours: ours(block) if i % 2 else THEIRS[theirs](block))


@pytest.mark.parametrize("theirs", ["reentrant", "not reentrant"])
def test_one_inside_the_other_inside_the_first_kind_again(swapping: Swapping, theirs: str) -> None:
    check_like_plain(swapping, lambda block, i, ours: ours(THEIRS[theirs](ours(block))))
    check_like_plain(swapping, lambda block, i, ours: THEIRS[theirs](ours(THEIRS[theirs](block))))


def test_checkpoint_sequential_over_wrapped_blocks(swapping: Swapping) -> None:
    class Sequential(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint_sequential(list(self), 2, x, use_reentrant=False)

    x = swapping.randn(2, 16, 32)
    expected = train(three_blocks(swapping, lambda block, i: block), x)
    for name, ours in OURS.items():
        wrapped = three_blocks(swapping, lambda block, i, ours=ours: ours(block))
        assert same(train(Sequential(*wrapped), x), expected), name


@pytest.mark.parametrize("theirs", ["not reentrant", "selective with our contexts"])
def test_a_second_backward_gives_the_same_again(swapping: Swapping, theirs: str) -> None:
    x = swapping.randn(2, 16, 32)

    def twice(wrap: Callable[[nn.Module, int], nn.Module]) -> list[torch.Tensor]:
        model = three_blocks(swapping, wrap)
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        loss = model(leaf).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [leaf.grad, *(parameter.grad for parameter in model.parameters())]

    expected = twice(lambda block, i: block)
    for name, ours in OURS.items():
        assert same(twice(lambda block, i, ours=ours: ours(THEIRS[theirs](block))), expected), name
        if theirs == "not reentrant":  # PyTorch's selective form has none around a region either
            assert same(twice(lambda block, i, ours=ours: THEIRS[theirs](ours(block))), expected), name


def test_what_is_swapped_inside_their_checkpoint_is_swapped_in_forward_and_comes_back(swapping: Swapping) -> None:
    model = three_blocks(
        swapping, lambda block, i: Theirs(checkpoint_wrapper(block, swap_inputs=True), use_reentrant=False)
    )
    train(model, swapping.randn(2, 16, 32))
    assert swapping.offloaded_bytes > 0
    check_nothing_left()


def test_their_inputs_are_swapped_by_a_swap_wrapper_around(swapping: Swapping) -> None:
    """PyTorch's checkpoint keeps its inputs, and hooks around it see exactly these."""
    with swapping.configured(window_bytes="4KiB", prefetch_bytes="8KiB"):
        model = three_blocks(swapping, lambda block, i: swap_wrapper(Theirs(block, use_reentrant=False)))
        train(model, swapping.randn(2, 16, 32))
    assert 0 < swapping.offloaded_bytes <= 3 * 2 * 16 * 32 * 4


@pytest.mark.parametrize(
    "option", [{"use_reentrant": True}, {"context_fn": contexts_of(len)}], ids=["use_reentrant", "context_fn"]
)
def test_their_options_are_refused_by_our_call_with_what_to_do(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"(?s){next(iter(option))}.*Leave it out"):
        checkpoint(torch.sin, torch.ones(2, requires_grad=True), **option)
    with pytest.raises(ValueError, match=f"(?s){next(iter(option))}.*Give"):
        checkpoint_wrapper(nn.ReLU(), **option)
