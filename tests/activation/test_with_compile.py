"""`torch.compile` inside, around and beside wrapped blocks: what is compiled stays compiled, and is not compiled again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper, swap_wrapper
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
from support import wrapped
from support.region_programs import check_no_mode_left
from support.swapping import Swapping, check_nothing_left, gradients
from support.training import Block, same, train
from support.wrapped import mix

NUM_BLOCKS = 3

# PyTorch looks at tensors it has made itself, and warns about that.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.usefixtures("one_thread"),
]


WAYS = {name: wrapped.WAYS[name] for name in ("recompute", "mix", "swap_inputs", "swap wrapper")}


class Compiler:
    """A backend that counts: the graphs it was given, and how often what it made of them ran. The ops are those of eager mode."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.num_runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1
        run = lookup_backend("aot_eager")(graph, inputs)

        def counted(*args: Any) -> Any:
            self.num_runs += 1
            return run(*args)

        return counted


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    torch._dynamo.reset()
    yield Compiler()
    torch._dynamo.reset()


@contextlib.contextmanager
def nothing_is_compiled_again() -> Iterator[None]:
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def blocks(wrap: Callable[[nn.Module, int], nn.Module], swapping: Swapping) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(wrap(Block(), number) for number in range(NUM_BLOCKS))).to(swapping.kind)


def whole(way: str, swapping: Swapping, compiler: Compiler) -> nn.Module:
    return torch.compile(blocks(lambda block, i: WAYS[way](block), swapping), backend=compiler)


def inner(way: str, swapping: Swapping, compiler: Compiler) -> nn.Module:
    return blocks(lambda block, i: WAYS[way](torch.compile(block, backend=compiler)), swapping)


def each_wrapper(way: str, swapping: Swapping, compiler: Compiler) -> nn.Module:
    return blocks(lambda block, i: torch.compile(WAYS[way](block), backend=compiler), swapping)


def in_place(way: str, swapping: Swapping, compiler: Compiler) -> nn.Module:
    model = blocks(lambda block, i: WAYS[way](block), swapping)
    for wrapper in model:
        wrapper.compile(backend=compiler)
    return model


def every_other(way: str, swapping: Swapping, compiler: Compiler) -> nn.Module:
    """As people do who recompute only some: blocks with and without a wrapper share the code that is compiled."""
    return blocks(lambda block, i: torch.compile(WAYS[way](block) if i % 2 else block, backend=compiler), swapping)


FORMS = [inner, whole, each_wrapper, in_place, every_other]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_compiled_and_wrapped_gives_the_plain_gradients_and_stays_compiled(
    swapping: Swapping, compiler: Compiler, way: str, form: Callable[..., nn.Module]
) -> None:
    x = swapping.randn(2, 16, 32)
    expected = train(blocks(lambda block, i: block, swapping), x)
    model = form(way, swapping, compiler)
    assert same(train(model, x), expected)
    num_graphs, num_runs = compiler.num_graphs, compiler.num_runs
    assert num_graphs == 1, "three blocks of one kind"
    assert num_runs >= NUM_BLOCKS
    with nothing_is_compiled_again():
        for _ in range(3):
            assert same(train(model, x), expected)
    assert compiler.num_graphs == num_graphs
    assert compiler.num_runs == 4 * num_runs, "each step runs what was compiled, as often as the first"
    check_nothing_left()
    check_no_mode_left()


def test_a_compiled_block_is_recomputed_by_running_what_was_compiled(swapping: Swapping, compiler: Compiler) -> None:
    train(inner("recompute", swapping, compiler), swapping.randn(2, 16, 32))
    assert compiler.num_runs == 2 * NUM_BLOCKS


@pytest.mark.parametrize("way", WAYS)
def test_a_block_whose_graph_is_broken(swapping: Swapping, compiler: Compiler, way: str) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            torch._dynamo.graph_break()
            return self.second(h)

    torch.manual_seed(0)
    model, x = Broken().to(swapping.kind), swapping.randn(2, 16, 32)
    expected = train(model, x)
    compiled = WAYS[way](torch.compile(model, backend=compiler))
    for _ in range(2):
        assert same(train(compiled, x), expected)
    assert compiler.num_graphs == 2


@pytest.mark.parametrize("way", WAYS)
def test_batches_of_other_sizes_are_compiled_for_once_more_and_then_never(
    swapping: Swapping, compiler: Compiler, way: str
) -> None:
    plain, model = blocks(lambda block, i: block, swapping), inner(way, swapping, compiler)
    for size in (2, 3):
        x = swapping.randn(size, 16, 32)
        assert same(train(model, x), train(plain, x))
    num_graphs = compiler.num_graphs
    with nothing_is_compiled_again():
        for size in (4, 2, 5):
            x = swapping.randn(size, 16, 32)
            assert same(train(model, x), train(plain, x))
    assert compiler.num_graphs == num_graphs == 2


def test_a_compiled_function_that_calls_a_region_itself(swapping: Swapping, compiler: Compiler) -> None:
    class Model(nn.Module):
        def __init__(self, uses_region: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = Block(), Block()
            self.uses_region = uses_region

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = checkpoint(self.first, x * 1.5, policy_fn=mix) if self.uses_region else self.first(x * 1.5)
            h = checkpoint(self.second, h * 1.5, swap_inputs=True) if self.uses_region else self.second(h * 1.5)
            return h.tanh()

    x = swapping.randn(2, 16, 32)
    expected = train(Model(False).to(swapping.kind), x)
    model = torch.compile(Model(True).to(swapping.kind), backend=compiler)
    for _ in range(3):
        assert same(train(model, x), expected)
    assert compiler.num_graphs >= 3, "the block, and what is before, between and after the regions"


def test_a_policy_is_not_compiled(swapping: Swapping, compiler: Compiler) -> None:
    seen = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(torch.compiler.is_compiling())
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.MUST_RECOMPUTE

    model = torch.compile(
        blocks(lambda block, i: checkpoint_wrapper(block, policy_fn=policy), swapping), backend=compiler
    )
    train(model, swapping.randn(2, 16, 32))
    frames = torch._dynamo.utils.counters["frames"]["total"]
    train(model, swapping.randn(2, 16, 32))
    assert seen
    assert not any(seen)
    assert torch._dynamo.utils.counters["frames"]["total"] == frames, "nothing was looked at again"


def test_backward_that_is_compiled_by_compiled_autograd(swapping: Swapping, compiler: Compiler) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return ((x.sin() * x).exp().tanh() @ x.t()).sum()

    for region in (checkpoint, functools.partial(checkpoint, policy_fn=mix), lambda f, x: swap_wrapper(f)(x)):
        leaf = swapping.randn(8, 8, requires_grad=True)
        loss = region(function, leaf)
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(lambda loss: loss.backward(), backend="eager")(loss)
        assert same([leaf.grad], gradients(function, leaf))


@pytest.mark.parametrize("way", WAYS)
def test_one_graph_of_all_is_refused_and_the_error_says_what_to_do(
    swapping: Swapping, compiler: Compiler, way: str
) -> None:
    model = torch.compile(blocks(lambda block, i: WAYS[way](block), swapping), backend=compiler, fullgraph=True)
    with pytest.raises(RuntimeError, match="compile without fullgraph=True, or compile the module inside the wrapper"):
        model(swapping.randn(2, 16, 32))
    inside = blocks(lambda block, i: WAYS[way](torch.compile(block, backend=compiler, fullgraph=True)), swapping)
    x = swapping.randn(2, 16, 32)
    assert same(train(inside, x), train(blocks(lambda block, i: block, swapping), x))
