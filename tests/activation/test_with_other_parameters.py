"""Parameters that are given, replaced or computed, and layers that share memory in their own way: as with plain blocks, bit for bit."""

from __future__ import annotations

import copy
import functools
import gc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper, swap_wrapper
from support.swapping import Swapping, check_nothing_left
from support.training import Block, same

Wrap = Callable[[nn.Module], nn.Module]
ANSWERS = (CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)


def mix(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Every answer, by op and occurrence."""
    return ANSWERS[zlib.crc32(f"{op} {ctx.occurrence}".encode()) % len(ANSWERS)]


def swap_everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP


WAYS: dict[str, Wrap] = {
    "recompute": checkpoint_wrapper,
    "mix": functools.partial(checkpoint_wrapper, policy_fn=mix),
    "swap": functools.partial(checkpoint_wrapper, policy_fn=swap_everything),
    "swap_inputs": functools.partial(checkpoint_wrapper, swap_inputs=True),
    "swap wrapper": swap_wrapper,
    "mix in a swap wrapper": lambda block: swap_wrapper(checkpoint_wrapper(block, policy_fn=mix)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """What was there before this file need not be searched for garbage after each of its tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def check(swapping: Swapping) -> Iterator[Callable[..., None]]:
    """Runs a program plainly and with its blocks wrapped, in each way; what it gives must be the same bits."""

    def run_all(program: Callable[[Wrap, Swapping], list[torch.Tensor]]) -> None:
        expected = program(lambda block: block, swapping)
        for name, wrap in WAYS.items():
            assert same(program(wrap, swapping), expected), name
            check_nothing_left()
        assert swapping.offloaded_bytes > 0

    yield run_all
    check_nothing_left()


def blocks(wrap: Wrap, swapping: Swapping, make: Callable[[], nn.Module] = Block, num: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(wrap(make()) for _ in range(num))).to(swapping.kind)


def loss_of(model: nn.Module, swapping: Swapping, number: int = 0) -> torch.Tensor:
    torch.manual_seed(number)
    return model(swapping.randn(2, 8, 32, seed=number)).square().mean()


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def numbers_of(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def steps(model: nn.Module, swapping: Swapping, num: int = 3) -> list[torch.Tensor]:
    """Gradients of each step, and the parameters and buffers at the end."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found = []
    for number in range(num):
        optimizer.zero_grad()
        loss_of(model, swapping, number).backward()
        found += gradients_of(model)
        optimizer.step()
    return found + numbers_of(model)


# -- given and replaced ----------------------------------------------------------------------------------------------------------


def test_functional_call_with_other_parameters(check: Any) -> None:
    """As in meta learning: the gradient goes to what was given, and the model keeps its own."""

    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        model, x = blocks(wrap, swapping), swapping.randn(2, 8, 32)
        before = numbers_of(model)
        given = {name: (p.detach() * 0.9).requires_grad_() for name, p in model.named_parameters()}
        for _ in range(2):
            torch.manual_seed(1)
            loss = torch.func.functional_call(model, given, (x,)).square().mean()
            grads = torch.autograd.grad(loss, list(given.values()))
            given = {
                name: (p - 0.1 * g).detach().requires_grad_() for (name, p), g in zip(given.items(), grads, strict=True)
            }
        assert same(numbers_of(model), before)
        assert not gradients_of(model)
        return [*grads, *(tensor.detach() for tensor in given.values())]

    check(program)


def test_functional_call_inside_a_step_of_which_the_gradient_is_taken(check: Any) -> None:
    """The parameters that are given are results themselves; a second gradient goes through the first."""

    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        model, x = blocks(wrap, swapping, lambda: Block(dropout=0.0), 2), swapping.randn(2, 8, 32)
        own = dict(model.named_parameters())
        inner = torch.func.functional_call(model, own, (x,)).square().mean()
        grads = torch.autograd.grad(inner, list(own.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(own.items(), grads, strict=True)}
        torch.func.functional_call(model, fast, (x,)).square().mean().backward()
        return gradients_of(model)

    check(program)


@pytest.mark.parametrize("assign", [False, True])
def test_parameters_replaced_by_load_state_dict_between_steps(check: Any, assign: bool) -> None:
    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        model, found = blocks(wrap, swapping), []
        first = copy.deepcopy(model.state_dict())
        for number in range(3):
            loss_of(model, swapping, number).backward()
            found += gradients_of(model)
            model.zero_grad(set_to_none=True)
            other = {name: tensor * (1 + 0.1 * number) for name, tensor in first.items()}
            model.load_state_dict(other, assign=assign)
        return found + numbers_of(model)

    check(program)


def test_parameters_replaced_between_forward_and_backward_stay_those_of_the_forward(check: Any) -> None:
    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        model = blocks(wrap, swapping)
        old = list(model.parameters())
        loss = loss_of(model, swapping)
        model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()}, assign=True)
        loss.backward()
        return [parameter.grad for parameter in old]

    check(program)


def test_weights_that_are_computed_from_others_and_change_a_buffer(check: Any) -> None:
    def normalised() -> nn.Module:
        block = Block()
        parametrizations.spectral_norm(block.qkv)  # its forward changes a buffer: once for each forward
        parametrizations.weight_norm(block.out)
        return block

    check(lambda wrap, swapping: steps(blocks(wrap, swapping, normalised), swapping, 2))


# -- parts of one storage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers(check: Any, kind: type[nn.RNNBase]) -> None:
    """On the CPU a GRU changes its gates in place; they are parts of one storage, and share no version counter (`unsafe_chunk`)."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # cuDNN keeps a random state of its own for dropout, which no seed sets back: not even two plain runs would be equal.
            dropout = 0.0 if torch.cuda.is_available() else 0.1
            self.layers = kind(32, 32, num_layers=2, dropout=dropout, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)[0]

    check(lambda wrap, swapping: steps(blocks(wrap, swapping, Recurrent, 2), swapping, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN's layers are on CUDA")
def test_a_layer_of_cudnn_that_drops_out_is_never_run_again() -> None:
    """Its random state cannot be set back: run again it would drop other values."""

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counted.calls += func is torch.ops.aten._cudnn_rnn.default
            return func(*args, **(kwargs or {}))

    layer = nn.LSTM(16, 16, num_layers=2, dropout=0.5, device="cuda")
    x = torch.randn(5, 3, 16, device="cuda", requires_grad=True)
    with Counted():
        checkpoint_wrapper(layer)(x.sin())[0].sum().backward()
    assert Counted.calls == 1


def test_parts_of_one_storage_that_are_changed_in_place_each_for_itself(check: Any) -> None:
    def gated(x: torch.Tensor) -> torch.Tensor:
        a, b, c = torch.cat((x, x.sin(), x.cos()), -1).unsafe_chunk(3, -1)
        reset, update = a.add_(1).sigmoid_(), b.add_(2).sigmoid_()
        new = (c.mul_(reset) + 1).tanh_()
        return (new - update).mul_(update) + new

    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        leaf = swapping.randn(8, 32, requires_grad=True)
        for _ in range(4):  # a part that is changed while it is copied is another one each time
            wrap(gated)(wrap(gated)(leaf)).sum().backward()
        return [leaf.grad]

    check(program)
