"""An error about a residual says where it was saved: by the module's path in the model that was running, or by its class."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel._base.errors import StateError
from hyper_parallel.platform.torch.activation_checkpoint import (
    AsyncSaveOnCpu,
    checkpoint_wrapper,
    offload_wrapper,
    swap_wrapper,
)
from support.swapping import Swapping


class Changing(nn.Module):
    """Changes what autograd keeps of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y.mul_(2)
        return y


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x).sin()


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def kept(module: nn.Module) -> nn.Module:
    return swap_wrapper(module, policy_fn=lambda tensor: True)


def twice(module: nn.Module) -> nn.Module:
    return swap_wrapper(offload_wrapper(module))


WRAPPERS = pytest.mark.parametrize("wrap", [swap_wrapper, offload_wrapper, kept, twice])


def error_of(call: Callable[[torch.Tensor], torch.Tensor], swapping: Swapping) -> StateError:
    with swapping.configured(window_bytes="1MiB"):
        out = call(swapping.randn(16, 16, requires_grad=True))
        with pytest.raises(StateError, match="changed in place") as raised:
            out.sum().backward()
    return raised.value


def place_of(call: Callable[[torch.Tensor], torch.Tensor], swapping: Swapping) -> str:
    """The first words of where an error says it happened."""
    where = error_of(call, swapping).where
    assert where is not None
    return where.split(",")[0]


@WRAPPERS
def test_a_block_inside_its_model_is_named_by_its_path(swapping: Swapping, wrap: Callable[[nn.Module], Any]) -> None:
    assert place_of(Model(wrap(nn.Tanh()), wrap(Changing())), swapping) == "layers.1"
    assert place_of(Model(nn.Tanh(), Layer(wrap(Changing()))), swapping) == "layers.1.mlp"
    assert place_of(Model(nn.Tanh(), wrap(Layer(Changing()))), swapping) == "layers.1"


@WRAPPERS
def test_a_block_called_alone_is_named_by_its_class(swapping: Swapping, wrap: Callable[[nn.Module], Any]) -> None:
    block = wrap(Changing())
    model = Model(nn.Tanh(), block)
    assert place_of(block, swapping) == "Changing"
    assert place_of(model, swapping) == "layers.1"
    assert place_of(block, swapping) == "Changing", "the model is not running any more"


def test_a_block_that_a_module_calls_and_does_not_have_is_named_by_its_class(swapping: Swapping) -> None:
    class Caller(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return block(x)

    block = swap_wrapper(Changing())
    assert place_of(Caller(), swapping) == "Changing"


def test_a_wrapped_model_whose_layers_are_wrapped_names_the_layer(swapping: Swapping) -> None:
    assert place_of(swap_wrapper(Model(swap_wrapper(nn.Tanh()), swap_wrapper(Changing()))), swapping) == "layers.1"


@pytest.mark.parametrize(("name", "expected"), [("my block", "my block"), (None, "layers.1.inner")])
def test_a_name_that_was_given_stays(swapping: Swapping, name: str | None, expected: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Changing()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with AsyncSaveOnCpu(module=self.inner, name=name):
                return self.inner(x)

    assert place_of(Model(nn.Tanh(), Named()), swapping) == expected


def test_a_swapped_block_inside_a_region_is_named_by_its_path(swapping: Swapping) -> None:
    assert place_of(Model(nn.Tanh(), checkpoint_wrapper(Layer(swap_wrapper(Changing())))), swapping) == "layers.1.mlp"


def test_looking_up_the_path_keeps_neither_model_nor_input(swapping: Swapping) -> None:
    model = Model(nn.Linear(16, 16).to(swapping.kind), swap_wrapper(nn.Tanh()))
    x = swapping.randn(16, 16, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        loss = model(x * 2).sum()
        loss.backward()
        refs = weakref.ref(model), weakref.ref(x)
        del model, x, loss
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
