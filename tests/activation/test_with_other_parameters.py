"""Parameters that are given, replaced or computed, and layers that share memory in their own way: as with plain blocks, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper
from support.swapping import Swapping
from support.training import Block, same
from support.wrapped import Wrap, blocks, gradients_of, loss_of, numbers_of, steps

pytestmark = pytest.mark.usefixtures("one_thread")


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
