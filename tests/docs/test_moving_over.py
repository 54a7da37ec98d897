"""Who comes from PyTorch's own ways gets the same gradients, bit for bit, by the one change that the page names."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel.platform import selection
from support.swapping import Swapping

torch = pytest.importorskip("torch")

import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as torch_wrappers  # noqa: E402
import torch.utils.checkpoint as torch_checkpoint  # noqa: E402
from torch.autograd.graph import save_on_cpu  # noqa: E402

from hyper_parallel.platform.torch import activation_checkpoint as ours  # noqa: E402

Model = torch.nn.Module


@pytest.fixture(autouse=True)
def platform_is_chosen_by_the_model() -> Iterator[None]:
    yield
    selection._forget()


OPS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]


class Block(Model):
    """Dropout, a keyword, a buffer that forward writes, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(32)
        self.up = torch.nn.Linear(32, 64)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, x: Any, *, scale: float = 1.0) -> Any:
        x = x + self.attention(x, x, x, need_weights=False)[0] * scale
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        hidden = self.dropout(torch.nn.functional.gelu(self.up(x)))
        return x + hidden @ self.up.weight


class Stack(Model):
    """Blocks that are called as someone says."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(num_blocks))
        self.call: Callable[[Any, Any], Any] = lambda block, x: block(x, scale=0.5)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def calling(call: Callable[[Any, Any], Any]) -> Callable[[Stack], None]:
    def change(model: Stack) -> None:
        model.call = call

    return change


def is_block(module: Any) -> bool:
    return isinstance(module, Block)


def saved_on_cpu(block: Any, x: Any) -> Any:
    with save_on_cpu():
        return block(x, scale=0.5)


def policy_of_pytorch(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    answers = torch_checkpoint.CheckpointPolicy
    return answers.MUST_SAVE if op in OPS else answers.PREFER_RECOMPUTE


def selective(policy: Any) -> Callable[[Stack], None]:
    context_fn = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
    return calling(
        lambda block, x: torch_checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=context_fn, scale=0.5)
    )


def in_place(function: Callable[..., None], wrapper: Any) -> Callable[[Stack], None]:
    return lambda model: function(model, checkpoint_wrapper_fn=wrapper, check_fn=is_block)


# what the page shows: before, after, and whether the second swaps
CHANGES: dict[str, tuple[Callable[[Stack], None], Callable[[Stack], None], bool]] = {
    "torch.utils.checkpoint": (
        calling(lambda block, x: torch_checkpoint.checkpoint(block, x, use_reentrant=False, scale=0.5)),
        calling(lambda block, x: hp.checkpoint(block, x, scale=0.5)),
        False,
    ),
    "a list of ops": (selective(OPS), calling(lambda block, x: hp.checkpoint(block, x, policy_fn=OPS, scale=0.5)), False),
    "a policy with PyTorch's enum": (
        selective(policy_of_pytorch),
        calling(lambda block, x: hp.checkpoint(block, x, policy_fn=policy_of_pytorch, scale=0.5)),
        False,
    ),
    "checkpoint_wrapper": (
        in_place(torch_wrappers.apply_activation_checkpointing, torch_wrappers.checkpoint_wrapper),
        in_place(hp.apply_activation_checkpointing, hp.checkpoint_wrapper),
        False,
    ),
    "reentrant": (
        in_place(
            torch_wrappers.apply_activation_checkpointing,
            functools.partial(
                torch_wrappers.checkpoint_wrapper, checkpoint_impl=torch_wrappers.CheckpointImpl.REENTRANT
            ),
        ),
        in_place(
            hp.apply_activation_checkpointing,
            functools.partial(hp.checkpoint_wrapper, checkpoint_impl=ours.CheckpointImpl.REENTRANT),
        ),
        False,
    ),
    "offload_wrapper": (
        in_place(torch_wrappers.apply_activation_checkpointing, torch_wrappers.offload_wrapper),
        in_place(hp.apply_activation_checkpointing, hp.offload_wrapper),
        True,
    ),
    "save_on_cpu": (calling(saved_on_cpu), in_place(hp.apply_activation_checkpointing, hp.swap_wrapper), True),
    "torchtune's offload over checkpoint": (
        calling(lambda block, x: block(x, scale=0.5)),
        in_place(hp.apply_activation_checkpointing, functools.partial(hp.checkpoint_wrapper, swap_inputs=True)),
        True,
    ),
}  # fmt: skip


def trained(model: Stack, x: Any) -> tuple[list[Any], list[Any]]:
    """Gradients of two steps, and the buffers after them."""
    gradients = []
    torch.manual_seed(1)
    for _ in range(2):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        model(leaf).square().mean().backward()
        gradients += [leaf.grad, *(each.grad.clone() for each in model.parameters())]
    return gradients, [each.clone() for each in model.buffers()]


def are_equal(first: list[Any], second: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("swapping", ["cpu"], indirect=True)
@pytest.mark.parametrize("name", CHANGES)
def test_the_change_keeps_every_bit(name: str, swapping: Swapping) -> None:
    before, after, swaps = CHANGES[name]
    torch.manual_seed(0)
    plain = Stack()
    one, other = copy.deepcopy(plain), copy.deepcopy(plain)
    x = torch.randn(4, 16, 32)
    before(one)
    after(other)
    expected, _ = trained(one, x)
    assert swapping.offloaded_bytes == 0
    found, buffers = trained(other, x)
    # PyTorch's offload_wrapper copies what is not contiguous into memory that is: its last bits are not those of a plain run.
    if name == "offload_wrapper":
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, found, strict=True))
    else:
        assert are_equal(expected, found)
    assert (swapping.offloaded_bytes > 0) is swaps
    assert list(one.state_dict()) == list(other.state_dict())
    gradients_of_plain, buffers_of_plain = trained(plain, x)
    assert are_equal(gradients_of_plain, found)
    # PyTorch's own checkpoint shows a batch norm every batch twice.
    assert are_equal(buffers_of_plain, buffers) is (name != "reentrant")


def test_other_random_numbers_would_be_seen() -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(4, 16, 32)
    (first, _), again = trained(copy.deepcopy(model), x), copy.deepcopy(model)
    torch.rand(1)
    again.call = lambda block, x: block(x + 0 * torch.rand(1), scale=0.5)  # one draw more
    assert not are_equal(first, trained(again, x)[0])
