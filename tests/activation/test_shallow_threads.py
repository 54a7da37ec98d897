"""Regions in threads that have little of Python around them: autograd's own, and a user's in which no code was compiled."""

from __future__ import annotations

import importlib
import sys
import threading
import types
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper, swap_wrapper
from support.swapping import Swapping, check_nothing_left
from support.training import same
from support.wrapped import WAYS

_DEPTH = 62  # so deep autograd goes on in another thread, also on the CPU


_threads: set[int] = set()


class _Deep(torch.autograd.Function):
    """A backward in the backward of a function, again and again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.depth = depth
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        _threads.add(threading.get_ident())
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            z = _Deep.apply(y * y, ctx.depth - 1) if ctx.depth else y.sin()
            return grad * torch.autograd.grad(z.sum(), y)[0], None


class _BackwardInside(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.depth = depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(_Deep.apply(y, self.depth).sum(), y)
            z = x if x.requires_grad else y
            (outer,) = torch.autograd.grad((z * z).sin().sum(), z, create_graph=True)
        return x * inner + outer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [0, _DEPTH])
def test_a_backward_inside_a_regions_function_runs_in_a_thread_of_autograds_own(
    swapping: Swapping, way: str, depth: int
) -> None:
    def gradients(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        block = _BackwardInside(depth)
        model = wrap(block).to(swapping.kind)
        found = []
        for _ in range(2):
            x = swapping.randn(1, 4, requires_grad=True)
            model(x * 1).sin().sum().backward()
            found += [x.grad, block.linear.weight.grad.clone()]
        return found

    _threads.clear()
    assert same(gradients(WAYS[way]), gradients(lambda block: block))
    assert depth == 0 or len(_threads) > 1
    check_nothing_left()


def _graph_trees() -> types.ModuleType:
    """What code that was compiled with CUDA graphs leaves in the process: only the thread that imported it, and no other, has a manager."""
    trees = types.ModuleType("torch._inductor.cudagraph_trees")

    def get_manager(device: int, create_if_none_exists: bool = True) -> Any:
        raise AssertionError("a thread that has no such state was asked")

    trees.local = threading.local()  # type: ignore[attr-defined]
    trees.get_manager = get_manager  # type: ignore[attr-defined]
    return trees


@pytest.mark.parametrize("wrap", [swap_wrapper, checkpoint_wrapper], ids=["swap_wrapper", "swapping region"])
def test_a_swapped_block_in_a_users_thread_does_not_mind_cuda_graphs_of_other_threads(
    swapping: Swapping, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {} if wrap is swap_wrapper else {"policy_fn": lambda *args, **kwargs: CheckpointPolicy.MUST_SWAP}
    if swapping.kind == "cpu":
        monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", _graph_trees())
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    else:
        importlib.import_module("torch._inductor.cudagraph_trees")  # as any mode="reduce-overhead" does
    found: list[torch.Tensor | BaseException] = []

    def train() -> None:
        try:
            model = wrap(nn.Linear(4, 4).to(swapping.kind), **options)
            model(swapping.randn(2, 4).sin() * 1).square().sum().backward()
            found.append(model.weight.grad)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert isinstance(found[0], torch.Tensor), found
