"""The ways to use less memory that are compared: what peers offer, and mixes of ours written by hand.

A mode gives, for a list of blocks, the blocks to put in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hyper_parallel as hp
from hyper_parallel import policies as p

Wrap: TypeAlias = Callable[[nn.Module], nn.Module]
Mode: TypeAlias = Callable[[Sequence[nn.Module]], list[nn.Module]]

MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def each(wrap: Wrap) -> Mode:
    """The same for every block."""
    return lambda blocks: [wrap(block) for block in blocks]


# -- peers -----------------------------------------------------------------------------------------------------------------


class Called(nn.Module):
    """A block that is called through a function."""

    def __init__(self, block: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.call = block, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.block, *args, **kwargs)


def every_other_matmul() -> Callable[..., Any]:
    """What torchtitan saves: attention, and every other matmul. Forward and recomputation count apart."""
    counts: dict[bool, int] = {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in MATMULS:
            counts[ctx.is_recompute] += 1
        save = op in ATTENTION or (op in MATMULS and counts[ctx.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def torch_checkpoint(block: nn.Module, **options: Any) -> nn.Module:
    return Called(block, functools.partial(checkpoint, use_reentrant=False, **options))


def titan_contexts() -> Any:
    return create_selective_checkpoint_contexts(every_other_matmul())


def save_on_cpu(block: nn.Module) -> nn.Module:
    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return block(*args, **kwargs)

    return Called(block, call)


def torchtune_offload(block: nn.Module) -> nn.Module:
    from torchtune.training import OffloadActivations  # type: ignore[import-not-found]

    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with OffloadActivations():
            return block(*args, **kwargs)

    return Called(block, call)


SELECTIVE = functools.partial(
    torch_checkpoint, context_fn=functools.partial(create_selective_checkpoint_contexts, MATMULS)
)
PEERS: dict[str, Mode] = {
    "PyTorch full checkpoint": each(torch_checkpoint),
    "PyTorch selective, all matmuls": each(SELECTIVE),
    "PyTorch selective, as torchtitan": each(functools.partial(torch_checkpoint, context_fn=titan_contexts)),
    "PyTorch save_on_cpu, pinned": each(save_on_cpu),
    "torchtune offload": each(torchtune_offload),
    "torchtune offload over checkpoint": each(lambda block: torchtune_offload(torch_checkpoint(block))),
}

# -- ours ------------------------------------------------------------------------------------------------------------------

# The tensors of a Llama block, by the ops that make them; by hand, until a plan does it.
GATE, UP, V = (p.matmuls & p.in_module(f"**.{name}") for name in ("gate", "up", "v"))
ROTATED = p.ops("aten.cat")


def occurrence(number: int) -> Any:
    return lambda ctx, op, *args, **kwargs: bool(ctx.occurrence == number)


# The rotations add twice; then attention is added to its input. They multiply eight times; then the gate does.
AFTER_ATTENTION = p.ops("aten.add") & occurrence(2)
GATED = p.ops("aten.mul") & occurrence(8)
Q, K = (ROTATED & occurrence(number) for number in (0, 1))


def save_everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return True


class Mix(NamedTuple):
    """Blocks under a policy. The last block keeps everything: its residuals are there at the highest point in any case.

    `every`: how many of `of` consecutive blocks have `policy`, spread evenly; the others have `other`.
    """

    policy: Any
    swap_inputs: bool = False
    other: Any = None
    every: int = 1
    of: int = 1
    window: str | None = None  # of `configure_swap`

    def __call__(self, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        wrapped = []
        for index, block in enumerate(blocks):
            if index == len(blocks) - 1:
                wrapped.append(hp.checkpoint_wrapper(block, policy_fn=save_everything))
                continue
            is_first = (index + 1) * self.every // self.of > index * self.every // self.of
            policy = self.policy if is_first else self.other
            wrapped.append(hp.checkpoint_wrapper(block, policy_fn=policy, swap_inputs=self.swap_inputs))
        return wrapped


OURS: dict[str, Mode] = {
    "recompute": each(hp.checkpoint_wrapper),
    "recompute, inputs swapped": each(functools.partial(hp.checkpoint_wrapper, swap_inputs=True)),
    "save matmuls": each(functools.partial(hp.checkpoint_wrapper, policy_fn=p.save(p.matmuls))),
    "mix for 42 %": Mix(
        p.choose(p.swap(GATE | Q | AFTER_ATTENTION), p.save(UP | V | K | p.attention)),
        other=p.choose(p.swap(GATE | Q | AFTER_ATTENTION), p.save(UP | V | K | p.attention | GATED)),
        every=3,
        of=5,
        window="1GiB",  # what a block swaps comes in bursts; when the highest point comes, all of it has left
    ),
    "mix for 16 %": Mix(p.choose(p.swap(GATE | p.attention | ROTATED), p.save(V)), window="1GiB"),
    "mix for 11 %": Mix(
        p.swap(p.attention | V | ROTATED | AFTER_ATTENTION),
        swap_inputs=True,
        other=p.swap(p.attention | V | ROTATED | GATE),
        every=2,
        of=3,
        window="896MiB",
    ),
    "everything swapped": each(hp.swap_wrapper),
}
# Longer sequences: the link hides more of a block.
OURS_LONG: dict[str, Mode] = {
    "mix for 30 %": Mix(
        p.choose(p.swap(p.attention | V | ROTATED | AFTER_ATTENTION | GATE), p.save(UP)),
        other=p.swap(p.attention | V | ROTATED | AFTER_ATTENTION | GATE),
        every=4,
        of=7,
        window="1536MiB",  # one storage has 0.9 GiB: a window of less lets it pass alone, and all else waits
    ),
}
COMPILE_BUDGETS = (0.7, 0.5, 0.3, 0.1, 0.0)
