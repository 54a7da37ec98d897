"""A small transformer trained on several ranks, with and without this package: what the tests with DDP, FSDP2 and tensor parallel share.

Everything here runs in the workers of `support.processes`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

import hyper_parallel as hp
from hyper_parallel import policies
from hyper_parallel.core.swap import engines
from hyper_parallel.core.swap.config import configure_swap
from hyper_parallel.core.swap.engine import SwapEngine
from hyper_parallel.platform.torch.activation_checkpoint import CheckpointImpl

WIDTH = 32
HEADS = 4
VOCABULARY = 16
LENGTH = 8
BATCH = 3
NUM_BLOCKS = 2
NUM_STEPS = 2
UNIT_BYTES = BATCH * LENGTH * WIDTH * 4  # a float32 activation of one block's width; also its attention scores


# What each wrap below moves in a step, where every rank has whole activations. w1 has twice their width.
PER_STEP = {
    "swap": NUM_BLOCKS * 8 * UNIT_BYTES,  # q, k, v, scores, attention, wo, w1 (2); nothing needs w2's result
    "mix": NUM_BLOCKS * 3 * UNIT_BYTES,  # w1 (2) and the input
    "swap inputs": NUM_BLOCKS * UNIT_BYTES,
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # As many heads as there are here: tensor parallel gives each rank some of them.
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.wq, self.wk, self.wv))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.wo((scores @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.feed_forward = FeedForward()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x))) * self.scale
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, num_blocks: int = NUM_BLOCKS, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain(block: nn.Module) -> nn.Module:
    return block


# What a user may do with a block, by name.
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": plain,
    "recompute": hp.checkpoint_wrapper,
    "save": lambda block: hp.checkpoint_wrapper(block, policy_fn=policies.save(policies.matmuls)),
    "swap": lambda block: hp.checkpoint_wrapper(block, policy_fn=policies.swap(policies.matmuls)),
    "swap all": lambda block: hp.checkpoint_wrapper(
        block, policy_fn=policies.choose(otherwise=hp.CheckpointPolicy.MUST_SWAP)
    ),
    "mix": lambda block: hp.checkpoint_wrapper(
        block,
        policy_fn=policies.choose(
            policies.swap(policies.in_module("**.feed_forward") & policies.matmuls), policies.save(policies.matmuls)
        ),
        swap_inputs=True,
    ),
    "swap inputs": lambda block: hp.checkpoint_wrapper(block, swap_inputs=True),
    "swap wrapper": hp.swap_wrapper,
    "offload wrapper": hp.offload_wrapper,
    "reentrant": lambda block: hp.checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.REENTRANT),
}
WRAPPED = tuple(name for name in WRAPS if name != "plain")
SWAPPING = ("swap", "swap all", "mix", "swap inputs", "swap wrapper", "offload wrapper")


def wrap_blocks(model: Transformer, name: str) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = WRAPS[name](block)


def batch(step: int, *, is_same_everywhere: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + (0 if is_same_everywhere else dist.get_rank()))
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int, *, is_same_everywhere: bool = False) -> torch.Tensor:
    tokens, targets = batch(step, is_same_everywhere=is_same_everywhere)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, with everything in it that a collective still has to write."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.trigger_wait() if isinstance(part, AsyncCollectiveTensor) else part


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: local(parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def differences(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """The names under which two runs differ in a bit."""
    if list(left) != list(right):
        return sorted(set(left) ^ set(right)) or ["the order of names"]
    return [name for name in left if not torch.equal(left[name], right[name])]


class Moved(NamedTuple):
    """A storage that was given to the swap engine."""

    label: str
    num_bytes: int
    is_parameter: bool


@contextlib.contextmanager
def watched_engine(model: nn.Module) -> Iterator[list[Moved]]:
    """Everything that is given to the swap engine, and whether a parameter of `model` had this memory at that moment.

    Then, and not before: FSDP2 gives its parameters other memory while a block runs.
    """
    moved: list[Moved] = []
    save = SwapEngine.save

    def watching(self: SwapEngine, source: Any, num_bytes: int, group: Any, label: object, *rest: Any) -> Any:
        of_parameters = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
        moved.append(Moved(str(label), num_bytes, _memory(source) in of_parameters))
        return save(self, source, num_bytes, group, label, *rest)

    SwapEngine.save = watching  # type: ignore[method-assign]
    try:
        yield moved
    finally:
        SwapEngine.save = save  # type: ignore[method-assign]


def saved_bytes(model: nn.Module, blocks: list[nn.Module], step: Callable[[], None]) -> int:
    """What autograd saves inside the blocks, each storage once, without parameters and buffers: what can be swapped at most."""
    saved: list[torch.Tensor] = []  # held, so that no memory is used twice
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        part = local(tensor.detach())
        saved.append(part)
        if _memory(part) not in {_memory(each) for each in (*model.parameters(), *model.buffers())}:
            sizes[_memory(part)] = part.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks
    handles = []
    for block in blocks:
        inside = contextlib.ExitStack()
        enter = functools.partial(_enter, inside, lambda: hooks(pack, lambda tensor: tensor))
        handles.append(block.register_forward_pre_hook(enter, prepend=True))
        handles.append(block.register_forward_hook(functools.partial(_leave, inside)))
    step()
    for handle in handles:
        handle.remove()
    return sum(sizes.values())


def _enter(stack: contextlib.ExitStack, context: Callable[[], Any], *_: Any) -> None:
    stack.enter_context(context())


def _leave(stack: contextlib.ExitStack, *_: Any) -> None:
    stack.close()


def _memory(tensor: torch.Tensor) -> int:
    # Not through `to_local`: this is called where dispatch is switched off.
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


# A run


class Outcome(NamedTuple):
    """What one rank has to say about training with this package.

    Attributes:
        differences: names of gradients and parameters that are not those of the plain run, bit for bit
        moved_bytes: given to the swap engine in all steps
        saved_bytes: what autograd saves in the blocks in one plain step and could be swapped
        moved_parameters: labels of parameters and buffers among what was moved
    """

    differences: list[str]
    moved_bytes: int
    saved_bytes: int
    moved_parameters: list[str]
    labels: list[str]


Build = Callable[[Callable[[Transformer], None], Callable[[Transformer], None]], nn.Module]
Step = Callable[[nn.Module, int], None]


def one_backward(model: nn.Module, step: int) -> None:
    loss_of(model, step).backward()


def train(model: nn.Module, backward: Step, num_steps: int) -> dict[str, torch.Tensor]:
    """Gradients of every step and the parameters after the last."""
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, torch.Tensor] = {}
    for step in range(num_steps):
        optimizer.zero_grad()
        backward(model, step)
        found.update({f"step {step}, gradient of {name}": value for name, value in gradients(model).items()})
        optimizer.step()
    return {**found, **parameters(model)}


def compare(
    build: Build,
    wraps: tuple[str, ...],
    order: str,
    directory: str,
    backward: Step = one_backward,
    num_steps: int = NUM_STEPS,
) -> dict[str, Outcome]:
    """Train plainly, and with blocks wrapped in each of these ways.

    Args:
        build: `build(before, after)` makes the parallel model; it calls `before` with the bare model and `after` when it is
            parallel. The order of wrapping and sharding is which of the two wraps.
    """
    plain_model = build(do_nothing, do_nothing)
    expected = train(plain_model, backward, num_steps)
    inside = inside_of(plain_model)
    most = saved_bytes(plain_model, list(inside.blocks), lambda: backward(plain_model, 0))
    outcomes = {}
    for wrap in wraps:
        wrapping = functools.partial(wrap_blocks, name=wrap)
        model = build(wrapping, do_nothing) if order == "wrap first" else build(do_nothing, wrapping)
        with swapping(directory), watched_engine(model) as moved:
            got = train(model, backward, num_steps)
        outcomes[wrap] = Outcome(
            differences(expected, got),
            sum(each.num_bytes for each in moved),
            most,
            [each.label for each in moved if each.is_parameter],
            [each.label for each in moved],
        )
    return outcomes


def swapping(directory: str) -> Any:
    return configure_swap(disk_dir=directory, min_bytes=1, window_bytes="64KiB", prefetch_bytes="256KiB")


def join_swapping() -> None:
    """Let everything that is on its way arrive."""
    for managed in engines.all_engines().values():
        managed.engine.join()


def do_nothing(model: nn.Module) -> None:
    pass


def inside_of(model: nn.Module) -> Transformer:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def check(outcomes: list[dict[str, Outcome]], per_step: dict[str, int] | None = None) -> None:
    """In the test: what holds on every rank for every way of training in parallel.

    Args:
        per_step: the bytes that each wrap moves in a step; the wrappers that swap everything move what autograd saves.
    """
    for rank, by_wrap in enumerate(outcomes):
        for wrap, outcome in by_wrap.items():
            where = f"{wrap}, rank {rank}"
            assert outcome.differences == [], where
            assert outcome.moved_parameters == [], where
            assert (outcome.moved_bytes > 0) == (wrap in SWAPPING), where
            if wrap in ("swap wrapper", "offload wrapper"):
                assert outcome.moved_bytes == NUM_STEPS * outcome.saved_bytes, f"{where}: {outcome.labels}"
            elif per_step is not None:
                assert outcome.moved_bytes == NUM_STEPS * per_step.get(wrap, 0), f"{where}: {outcome.labels}"
