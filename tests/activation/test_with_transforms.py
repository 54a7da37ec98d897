"""Other ways to run or differentiate a program, with regions and swapping inside: the plain result, or an error that says what to do."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from hyper_parallel._base.errors import StateError
from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper, swap_wrapper
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
from support.region_programs import check_no_mode_left, flush_aborted_backward
from support.swapping import Swapping, check_nothing_left
from support.training import Block, same, train
from support.wrapped import swap_everything

Function = Callable[[torch.Tensor], torch.Tensor]

# TorchScript is; and parts of torch.func are made of it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.usefixtures("one_thread"),
]


# Those that run the function again in backward, and those that bring everything back.
RECOMPUTE: dict[str, Callable[..., Any]] = {
    "recompute": checkpoint,
    "swap_inputs": functools.partial(checkpoint, swap_inputs=True),
}
KEEP: dict[str, Callable[..., Any]] = {
    "swap": functools.partial(checkpoint, policy_fn=swap_everything),
    "swap wrapper": lambda function, *args: swap_wrapper(function)(*args),
}
WAYS = RECOMPUTE | KEEP
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "recompute": checkpoint_wrapper,
    "swap": functools.partial(checkpoint_wrapper, policy_fn=swap_everything),
    "swap wrapper": swap_wrapper,
}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    flush_aborted_backward()
    check_no_mode_left()
    gc.collect()
    check_nothing_left()


def energy(x: torch.Tensor) -> torch.Tensor:
    return ((x.sin() * x).exp().tanh() @ x.t()).sum()


def inside(way: str) -> Function:
    return lambda x: WAYS[way](energy, x)


def check_like_plain(program: Callable[[Function], Any], way: str) -> None:
    expected, found = program(energy), program(inside(way))
    assert same(*([each] if isinstance(each, torch.Tensor) else list(each) for each in (found, expected)))


# -- gradients and their kin ----------------------------------------------------------------------------------------------------


def batched(function: Function, x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    out = torch.stack([function(leaf), function(2 * leaf)])
    return torch.autograd.grad(out, leaf, torch.eye(2, device=x.device), is_grads_batched=True)[0]


def with_anomaly_detection(function: Function, x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        function(leaf).backward()
    return leaf.grad


def with_saving_on_cpu(function: Function, x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        function(leaf).backward()
    return leaf.grad


def dual(function: Function, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


AUTOGRAD: dict[str, Callable[[Function, torch.Tensor], Any]] = {
    "jacobian": torch.autograd.functional.jacobian,
    "jacobian, vectorized": functools.partial(torch.autograd.functional.jacobian, vectorize=True),
    "Hessian times vector": lambda f, x: torch.autograd.functional.hvp(f, x, torch.ones_like(x))[1],
    "many gradients at once": batched,
    "forward mode": dual,
    "torch.func.jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "torch.func.jacfwd": lambda f, x: torch.func.jacfwd(f)(x[:3, :3]),
    "torch.func.vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    "anomaly detection": with_anomaly_detection,
    "save_on_cpu around": with_saving_on_cpu,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", AUTOGRAD)
@pytest.mark.parametrize("way", WAYS)
def test_this_gives_the_plain_result(swapping: Swapping, way: str, name: str) -> None:
    check_like_plain(lambda f: AUTOGRAD[name](f, swapping.randn(8, 8)), way)


TRANSFORMS: dict[str, Callable[[Function, torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda y: torch.func.vmap(f)(y).sum())(torch.stack([x, x])),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(torch.stack([x, x])),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_gradient_transforms_of_torch_func_are_refused_with_what_to_use_instead(
    swapping: Swapping, way: str, name: str
) -> None:
    with pytest.raises(StateError, match=r"(?s)gradient transform.*torch\.autograd\.grad"):
        TRANSFORMS[name](inside(way), swapping.randn(8, 8))


def vmapped_then_backward(function: Function, x: torch.Tensor) -> torch.Tensor:
    leaf = torch.stack([x, 2 * x]).requires_grad_()
    torch.func.vmap(function)(leaf).sum().backward()
    return leaf.grad


def backward_under_forward_mode(function: Function, x: torch.Tensor) -> list[torch.Tensor]:
    with forward_ad.dual_level():
        leaf = x.clone().requires_grad_()
        out = function(forward_ad.make_dual(leaf, torch.ones_like(x)))
        out.backward()
        return [forward_ad.unpack_dual(out).tangent.detach(), leaf.grad]


@pytest.mark.parametrize("program", [vmapped_then_backward, backward_under_forward_mode])
def test_what_ran_inside_a_transform_comes_back_if_it_is_swapped_and_is_refused_if_it_is_recomputed(
    swapping: Swapping, program: Callable[[Function, torch.Tensor], Any]
) -> None:
    x = swapping.randn(8, 8)
    for way in KEEP:
        check_like_plain(lambda f: program(f, x), way)
    for way in RECOMPUTE:
        with pytest.raises(StateError, match="(?s)cannot be recomputed outside.*policy save or swap all"):
            program(inside(way), x)
        flush_aborted_backward()


# -- graphs made of a program ------------------------------------------------------------------------------------------------------


def gradient_of(function: Function, x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    function(leaf).backward()
    return leaf.grad


class AsModule(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


GRAPHS: dict[str, Callable[[Function, torch.Tensor], torch.Tensor]] = {
    "torch.jit.trace": lambda f, x: gradient_of(torch.jit.trace(f, (x.clone().requires_grad_(),)), 2 * x),
    "torch.export": lambda f, x: gradient_of(
        torch.export.export(AsModule(f), (x.clone().requires_grad_(),)).module(), 2 * x
    ),
    "make_fx": lambda f, x: gradient_of(make_fx(f)(x.clone().requires_grad_()), 2 * x),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python")
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_is_traced_is_the_plain_one_and_right(swapping: Swapping, way: str, name: str) -> None:
    """Regions and swapping are not in it: who runs the graph has none."""
    check_like_plain(lambda f: GRAPHS[name](f, swapping.randn(8, 8)), way)


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_that_is_traced_is_refused(swapping: Swapping, way: str) -> None:
    """What is brought back would be a constant of the graph: right for this input, and silently wrong for the next."""

    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(inside(way)(leaf), leaf)[0]

    with pytest.raises(StateError, match="(?s)cannot be traced.*Trace the forward alone"):
        make_fx(gradient)(swapping.randn(8, 8))


@pytest.mark.parametrize("way", WRAPS)
def test_torch_fx_traces_a_model_before_it_is_wrapped_not_after(swapping: Swapping, way: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(dropout=0.0), Block(dropout=0.0)).to(swapping.kind), swapping.randn(2, 8, 32)
    expected = train(model, x)
    wrapped = nn.Sequential(*(WRAPS[way](torch.fx.symbolic_trace(block)) for block in model))
    assert same(train(wrapped, x), expected)
    with pytest.raises(NameError, match="not installed as a submodule"):  # PyTorch's: a wrapper has no name
        torch.fx.symbolic_trace(nn.Sequential(*(WRAPS[way](block) for block in model)))


@pytest.mark.parametrize("way", WRAPS)
def test_torch_script_of_a_wrapper_is_refused_by_pytorch(swapping: Swapping, way: str) -> None:
    with pytest.raises(torch.jit.frontend.NotSupportedError, match="variable number of arguments"):
        torch.jit.script(WRAPS[way](nn.Linear(4, 4)))


def test_torch_script_inside_comes_back_if_it_is_swapped_and_is_refused_if_it_is_recomputed(on_disk: Swapping) -> None:
    layers, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), torch.ones(2, 8)
    traced, expected = torch.jit.trace(layers, (x,)), train(layers, x)
    for way in ("swap", "swap wrapper"):
        assert same(train(WRAPS[way](traced), x), expected)
    for inner in (traced, torch.jit.script(layers)):
        with pytest.raises(StateError, match="TorchScript code in a region cannot be recomputed"):
            train(checkpoint_wrapper(inner), x)


@pytest.mark.parametrize("device", ["meta", "fake"])
@pytest.mark.parametrize("way", WAYS)
def test_shapes_can_be_found_without_memory(way: str, device: str) -> None:
    mode = torch._subclasses.FakeTensorMode()
    leaf = torch.empty(8, 8, device="meta") if device == "meta" else mode.from_tensor(torch.empty(8, 8))
    leaf.requires_grad_()
    with mode if device == "fake" else torch.device("meta"):
        inside(way)(leaf).backward()
    assert leaf.grad.shape == (8, 8)


# -- CUDA graphs ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_capture_into_a_cuda_graph_is_refused_with_what_to_capture_instead(way: str) -> None:
    with (
        mock.patch("torch.cuda.is_initialized", return_value=True),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=True),
        pytest.raises(StateError, match="(?s)captured in a CUDA graph.*make_graphed_callables"),
    ):
        inside(way)(torch.ones(4, 4, requires_grad=True))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; see benchmarks/cuda_stress.py")
@pytest.mark.parametrize("way", WAYS)
def test_a_real_capture_is_refused_and_the_next_step_is_right(way: str) -> None:
    x = torch.ones(4, 4, device="cuda", requires_grad=True)
    with pytest.raises(StateError, match="captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        inside(way)(x)
    check_like_plain(lambda f: gradient_of(f, x.detach()), way)
