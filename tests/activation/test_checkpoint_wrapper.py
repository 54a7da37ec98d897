"""A wrapper whose forward is a region: the same numbers, recomputed; options that arrive where they belong.

That it changes no name and no state is shown in test_wrapper_names.py, on random modules.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as pytorch
from torch.utils.checkpoint import checkpoint as pytorch_checkpoint

import hyper_parallel
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.platform import selection
from hyper_parallel.platform.torch import activation_checkpoint
from hyper_parallel.platform.torch.activation_checkpoint import (
    ActivationWrapper,
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
    list_wrappers,
    offload_wrapper,
    swap_wrapper,
)
from hyper_parallel.platform.trees import leaves
from support.interpreter import run_fresh
from support.swapping import Swapping
from support.tally import TalliesCalls

BOTH = pytest.mark.parametrize("impl", list(CheckpointImpl), ids=lambda impl: impl.name)


@pytest.fixture
def may_choose() -> Iterator[None]:
    """For a test of neutral calls in this process: it may leave a platform chosen."""
    yield
    selection._forget()


@pytest.fixture
def region_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The calls of the region, which run the function and nothing else."""
    from hyper_parallel.platform.torch.regions import checkpoint as region

    calls = []

    def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls.append((function, args, options))
        own = inspect.signature(real).parameters
        return function(*args, **{name: value for name, value in options.items() if name not in own})

    real = region.checkpoint
    monkeypatch.setattr("hyper_parallel.platform.torch.wrappers.checkpoint_wrapper.checkpoint", run)
    return calls


# Modules with every kind of argument and result


@dataclass
class Extras:
    scale: torch.Tensor
    label: str = "x"


class Mixer(TalliesCalls, nn.Module):
    """Tensors as positional arguments, as keywords and deep inside of keywords; a nested result; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, *, gain: torch.Tensor, extras: dict[str, Any], parts: list[Any], power: int = 1
    ) -> dict[str, Any]:
        self.num_calls += 1
        y = nn.functional.dropout(self.first(x), 0.25) * gain
        for part in parts:
            y = y + torch.tanh(part)
        y = self.second(y.pow(power)) * extras["inner"].scale * extras["list"][0][1]
        return {"y": y, "more": [y.exp().sum(), (x * gain, None)], "power": power}


def arguments() -> tuple[torch.Tensor, dict[str, Any], list[torch.Tensor]]:
    torch.manual_seed(1)
    made = [torch.randn(3, 4, requires_grad=True) for _ in range(6)]
    x, gain, scale, listed, *parts = made
    keywords = {
        "gain": gain,
        "extras": {"inner": Extras(scale), "list": [(1, listed)]},
        "parts": [*parts, torch.ones(4)],
        "power": 2,
    }
    return x, keywords, made


def trained(module: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients of one step of a mixer, wrapped or not."""
    x, keywords, inputs = arguments()
    torch.manual_seed(2)
    # Arguments and results that have a history: gradients must arrive there, too.
    result = module(x.exp(), **{**keywords, "gain": keywords["gain"].sin()})
    assert (result["power"], result["more"][1][1]) == (2, None)
    tensors = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
    sum((tensor.cos() * (i + 1)).sum() for i, tensor in enumerate(tensors)).backward()
    return tensors, [tensor.grad for tensor in (*inputs, *module.parameters())]


def mixer() -> Mixer:
    torch.manual_seed(0)
    return Mixer()


def all_equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ones) == len(others) > 0 and all(map(torch.equal, ones, others))


class Counted(TalliesCalls, nn.Module):
    """A small block that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.inner(x).exp() * self.factor


def gradients_of(model: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    model(x).square().sum().backward()
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    found = [tensor.grad.clone() for tensor in (x, *parameters)]
    for parameter in parameters:
        parameter.grad = None
    return found


# The numbers


@BOTH
def test_results_and_gradients_are_those_of_the_bare_module_with_tensors_anywhere_in_the_keywords(
    impl: CheckpointImpl,
) -> None:
    expected = trained(mixer())
    results, gradients = trained(checkpoint_wrapper(mixer(), checkpoint_impl=impl))
    assert all_equal(results, expected[0])
    assert all_equal(gradients, expected[1])


@BOTH
def test_the_module_runs_once_in_forward_and_once_in_backward(impl: CheckpointImpl) -> None:
    wrapper = checkpoint_wrapper(Counted(), checkpoint_impl=impl)
    x = torch.randn(2, 4, requires_grad=True)
    loss = wrapper(x).square().sum()
    assert wrapper.num_calls == 1
    loss.backward()
    assert wrapper.num_calls == 2


@BOTH
def test_autograd_keeps_the_input_and_nothing_of_the_inside(impl: CheckpointImpl) -> None:
    def kept(model: nn.Module) -> list[int]:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            model(torch.ones(8, 4, requires_grad=True) * 2)
        return sizes

    block = Counted()
    assert len(kept(block)) > 3
    assert kept(checkpoint_wrapper(block, checkpoint_impl=impl)) == [32]


@BOTH
def test_a_second_run_draws_the_same_random_numbers(impl: CheckpointImpl) -> None:
    x = torch.randn(16, 16)
    expected = None
    for wrap in (lambda module: module, functools.partial(checkpoint_wrapper, checkpoint_impl=impl)):
        torch.manual_seed(0)
        found = gradients_of(wrap(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())), x)
        expected = expected or found
        assert all_equal(found, expected)


@BOTH
def test_without_gradients_the_module_just_runs(impl: CheckpointImpl) -> None:
    block = Counted()
    wrapper = checkpoint_wrapper(block, checkpoint_impl=impl)
    x = torch.randn(2, 4)
    expected = block(x)
    for mode in (torch.no_grad, torch.inference_mode):
        block.num_calls = 0
        with mode():
            result = wrapper(x)
        assert torch.equal(result, expected)
        assert not result.requires_grad
        assert block.num_calls == 1


@BOTH
def test_evaluation_mode_has_the_gradients_of_the_bare_module(impl: CheckpointImpl) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    x = torch.randn(3, 4)
    block(x)
    block.eval()
    wrapper = checkpoint_wrapper(block, checkpoint_impl=impl)
    assert not wrapper.training
    assert all_equal(gradients_of(wrapper, x), gradients_of(block, x))


@BOTH
def test_wrappers_inside_wrappers_give_the_same_gradients(impl: CheckpointImpl) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Counted() for _ in range(3)))
    x = torch.randn(2, 4)
    expected = gradients_of(blocks, x)
    wrapped = copy.deepcopy(blocks)
    for i, block in enumerate(wrapped):
        block.inner = checkpoint_wrapper(block.inner, checkpoint_impl=impl)
        wrapped[i] = checkpoint_wrapper(checkpoint_wrapper(block), checkpoint_impl=impl)
    assert all_equal(gradients_of(checkpoint_wrapper(wrapped, checkpoint_impl=impl), x), expected)


@BOTH
@pytest.mark.parametrize("order", ["swap outside", "swap inside"])
def test_swapping_wrappers_around_and_inside_give_the_same_gradients(
    swapping: Swapping, impl: CheckpointImpl, order: str
) -> None:
    torch.manual_seed(0)
    block = Counted().to(swapping.kind)
    x = swapping.randn(64, 4)
    expected = gradients_of(block, x)
    checkpointed = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)
    for swapped in (swap_wrapper, offload_wrapper):
        model = swapped(checkpointed(block)) if order == "swap outside" else checkpointed(swapped(block))
        assert all_equal(gradients_of(model, x), expected)


@BOTH
def test_a_plain_function_is_recomputed(impl: CheckpointImpl) -> None:
    calls = []

    def function(x: torch.Tensor, *, plus: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (x.exp() + plus).sin()

    x, plus = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    wrapper = checkpoint_wrapper(function, checkpoint_impl=impl)
    assert list(wrapper.parameters()) == []
    wrapper(x.cos(), plus=plus).sum().backward()
    found = [x.grad, plus.grad]
    x.grad = plus.grad = None
    assert len(calls) == 2
    function(x.cos(), plus=plus).sum().backward()
    assert all_equal(found, [x.grad, plus.grad])


@BOTH
def test_a_module_whose_arguments_need_no_gradient_trains_its_parameters(impl: CheckpointImpl) -> None:
    block = Counted()
    wrapper = checkpoint_wrapper(block, checkpoint_impl=impl)
    x = torch.randn(2, 4)
    found = []
    for model in (block, wrapper):
        block.zero_grad()
        model(x).sum().backward()
        found.append([parameter.grad for parameter in block.parameters()])
    assert all_equal(found[1], found[0])


@BOTH
def test_attributes_written_through_the_wrapper_are_used_in_both_runs(impl: CheckpointImpl) -> None:
    wrapper = checkpoint_wrapper(Counted(), checkpoint_impl=impl)
    x = torch.randn(2, 4)
    before = gradients_of(wrapper, x)
    wrapper.factor = 2.0
    after = gradients_of(wrapper, x)
    assert wrapper._checkpoint_wrapped_module.factor == 2.0
    assert all_equal(after, [4 * gradient for gradient in before])


def test_a_wrapped_container_is_indexed_and_changed_as_before() -> None:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    wrapper = checkpoint_wrapper(nn.Sequential(*layers))
    assert (len(wrapper), list(wrapper), wrapper[-1]) == (3, layers, layers[2])
    wrapper[1] = nn.Sigmoid()
    x = torch.randn(2, 4)
    expected = gradients_of(nn.Sequential(layers[0], nn.Sigmoid(), layers[2]), x)
    assert all_equal(gradients_of(wrapper, x), expected)


# Reentrant: what PyTorch's own form loses


class Listing(list):
    """A list that can be referred to weakly."""


class Appending(nn.Module):
    """Uses the last state in a list, and appends one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, states: list[torch.Tensor]) -> torch.Tensor:
        result = self.linear(x) * states[-1].exp()
        states.append(result)
        return result


def test_reentrant_forward_sees_the_callers_containers_and_recomputation_what_was_in_them() -> None:
    torch.manual_seed(0)
    module = Appending()
    found = []
    for model in (module, checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.REENTRANT)):
        module.zero_grad()
        x, state = torch.ones(2, 4, requires_grad=True), torch.full((4,), 0.5, requires_grad=True)
        states = [state * 2]
        result = model(x * 2, states)
        assert len(states) == 2
        result.sum().backward()
        assert len(states) == 2
        found.append([result, x.grad, state.grad, module.linear.weight.grad])
    assert all_equal(found[1], found[0])


def test_reentrant_gives_a_tensor_that_is_passed_twice_both_gradients() -> None:
    wrapper = checkpoint_wrapper(lambda x, other: x.exp() * other.sin(), checkpoint_impl=CheckpointImpl.REENTRANT)
    x = torch.randn(4, requires_grad=True)
    wrapper(x, other=x).sum().backward()
    expected = torch.autograd.grad((x.exp() * x.sin()).sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_reentrant_function_without_tensors_that_need_gradients_trains_what_it_closes_over() -> None:
    weight = torch.randn(4, requires_grad=True)
    wrapper = checkpoint_wrapper(lambda x: x * weight.exp(), checkpoint_impl=CheckpointImpl.REENTRANT)
    wrapper(torch.ones(4)).sum().backward()
    assert torch.equal(weight.grad, weight.detach().exp())


def test_reentrant_result_needs_a_gradient_only_where_the_bare_functions_does() -> None:
    wrapper = checkpoint_wrapper(torch.exp, checkpoint_impl=CheckpointImpl.REENTRANT)
    assert not wrapper(torch.ones(1)).requires_grad
    assert wrapper(torch.ones(1, requires_grad=True)).requires_grad


def test_reentrant_result_keeps_its_type_and_what_is_no_tensor_in_it() -> None:
    results = [None, 3, "text", [], (), {"a": [None, 2]}]
    for result in results:
        wrapper = checkpoint_wrapper(lambda x, result=result: result, checkpoint_impl=CheckpointImpl.REENTRANT)
        assert wrapper(torch.ones(1, requires_grad=True)) == result

    wrapper = checkpoint_wrapper(lambda x: Extras(x * 2, "y"), checkpoint_impl=CheckpointImpl.REENTRANT)
    made = wrapper(torch.ones(1, requires_grad=True))
    assert isinstance(made, Extras)
    assert made.label == "y"
    assert made.scale.requires_grad


def test_reentrant_refuses_a_result_through_which_no_gradient_could_come_back() -> None:
    def function(x: torch.Tensor) -> Any:
        return torch.distributions.Normal(x, x.exp())

    x = torch.ones(1, requires_grad=True)
    wrapper = checkpoint_wrapper(function, checkpoint_impl=CheckpointImpl.REENTRANT)
    with pytest.raises(TypeError, match="(?s)gradients.*Normal.*NO_REENTRANT"):
        wrapper(x)
    with torch.no_grad():
        assert wrapper(x).mean.equal(x)
    assert checkpoint_wrapper(function)(x).mean.requires_grad


def test_reentrant_keeps_nothing_of_the_call_itself_so_that_hooks_outside_may_move_its_tensors() -> None:
    packed = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    torch.manual_seed(0)
    model = Appending()
    x, state = torch.randn(2, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    model(x * 2, Listing([state * 2])).sum().backward()
    expected = [x.grad, state.grad, model.linear.weight.grad]
    x.grad = state.grad = model.linear.weight.grad = None

    made, states = x * 2, Listing([state * 2])
    left = [weakref.ref(made), weakref.ref(states), weakref.ref(states[0])]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index]):
        result = checkpoint_wrapper(model, checkpoint_impl=CheckpointImpl.REENTRANT)(made, states)
    del made, states
    assert [reference() for reference in left] == [None, None, None]
    assert len(packed) == 2
    result.sum().backward()
    assert all_equal([x.grad, state.grad, model.linear.weight.grad], expected)


@BOTH
def test_an_error_of_the_module_reaches_the_caller_and_the_next_call_is_right(impl: CheckpointImpl) -> None:
    class Failing(nn.Linear):
        fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise OSError("no")
            return super().forward(x)

    module = Failing(4, 4)
    wrapper = checkpoint_wrapper(module, checkpoint_impl=impl)
    x = torch.randn(2, 4)
    with pytest.raises(OSError, match="no"):
        gradients_of(wrapper, x)
    module.fails = False
    assert all_equal(gradients_of(wrapper, x), gradients_of(module, x))


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"policy_fn": lambda *_: True},
        {"policy_fn": []},
        {"policy_fn": [torch.ops.aten.mm.default]},
        {"swap_inputs": True},
    ],
    ids=["function", "empty list", "list", "swap_inputs"],
)
@pytest.mark.parametrize("checkpoint_fn", [None, pytorch_checkpoint], ids=["", "own function"])
def test_reentrant_takes_neither_a_policy_nor_swapped_inputs(options: dict[str, Any], checkpoint_fn: Any) -> None:
    for make in (checkpoint_wrapper, CheckpointWrapper, hyper_parallel.checkpoint_wrapper):
        module = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=f"(?s){next(iter(options))}.*NO_REENTRANT"):
            make(module, checkpoint_impl=CheckpointImpl.REENTRANT, checkpoint_fn=checkpoint_fn, **options)
    selection._forget()


def test_reentrant_takes_the_values_that_mean_nothing_to_it() -> None:
    wrapper = CheckpointWrapper(
        nn.Linear(2, 2), CheckpointImpl.REENTRANT, policy_fn=None, swap_inputs=False, early_stop=False, debug=False
    )
    assert wrapper.checkpoint_fn.keywords == {"use_reentrant": True, "preserve_rng_state": True}
    with pytest.raises(ValueError, match="debug"):
        checkpoint_wrapper(nn.Linear(2, 2), checkpoint_impl=CheckpointImpl.REENTRANT, debug=True)


def test_reentrant_does_not_restore_random_numbers_when_told_so() -> None:
    torch.manual_seed(0)
    drawn = []

    def function(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(4))
        return x * drawn[-1]

    x = torch.ones(4, requires_grad=True)
    for preserve in (True, False):
        wrapper = checkpoint_wrapper(function, checkpoint_impl=CheckpointImpl.REENTRANT, preserve_rng_state=preserve)
        wrapper(x).sum().backward()
        assert torch.equal(*drawn) is preserve
        drawn.clear()


@BOTH
@pytest.mark.parametrize(
    ("name", "error", "instead"),
    [
        ("no_such_option", TypeError, "checkpoint_fn"),
        ("use_reentrant", ValueError, "checkpoint_impl"),
        ("context_fn", ValueError, "policy_fn"),
    ],
)
def test_an_unknown_option_is_refused_when_wrapping_with_those_that_exist(
    impl: CheckpointImpl, name: str, error: type[Exception], instead: str
) -> None:
    accepted = "policy_fn, swap_inputs, preserve_rng_state, determinism_check, debug, early_stop"
    with pytest.raises(error, match=f"(?s){name}.*{accepted}.*{name}.*{instead}"):
        checkpoint_wrapper(nn.Linear(2, 2), checkpoint_impl=impl, **{name: True})


@BOTH
@pytest.mark.parametrize(
    ("option", "error", "expected"),
    [
        ({"preserve_rng_state": 1}, ValueError, "True or False"),
        ({"determinism_check": "values"}, ValueError, "'default' or 'none'"),
        ({"determinism_check": None}, ValueError, "'default' or 'none'"),
        ({"early_stop": "no"}, ValueError, "True or False"),
        ({"debug": None}, ValueError, "True or False"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_value_that_an_option_does_not_have_is_refused_when_wrapping(
    impl: CheckpointImpl, option: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=f"(?s){next(iter(option))}.*{expected}"):
        checkpoint_wrapper(nn.Linear(2, 2), checkpoint_impl=impl, **option)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"policy_fn": 3}, "(?s)policy.*3"),
        ({"policy_fn": "aten.mm"}, r"(?s)policy.*\['aten.mm'\]"),
        ({"policy_fn": [3]}, "(?s)3"),
        ({"policy_fn": torch.ops.aten.mm.default}, "(?s)policy.*aten.mm"),
        ({"swap_inputs": 1}, "(?s)swap_inputs.*1"),
        ({"swap_inputs": None}, "(?s)swap_inputs.*None"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_policy_or_switch_that_is_none_is_refused_when_wrapping(option: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        checkpoint_wrapper(nn.Linear(2, 2), **option)


def test_every_option_reaches_the_region_with_the_module_and_its_arguments(region_calls: list[Any]) -> None:
    inner = mixer()
    x, keywords, _ = arguments()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    for options in (
        {},
        {"policy_fn": policy},
        {"policy_fn": [torch.ops.aten.mm.default, "aten.addmm"]},
        {"policy_fn": []},
        {
            "swap_inputs": True,
            "preserve_rng_state": False,
            "determinism_check": "none",
            "debug": True,
            "early_stop": False,
        },
    ):
        region_calls.clear()
        checkpoint_wrapper(inner, **options)(x, **keywords)
        ((function, args, given),) = region_calls
        assert function is inner
        assert args == (x,)
        assert {name: given[name] for name in options} == options
        assert all(given[name] is value for name, value in keywords.items())
        assert set(given) == {*options, *keywords}


def test_a_keyword_of_the_module_that_is_called_like_an_option_goes_to_the_module(region_calls: list[Any]) -> None:
    class Debugged(nn.Module):
        def forward(self, x: torch.Tensor, *, debug: bool, policy_fn: str, context_fn: int, function: int) -> Any:
            return (x, debug, policy_fn, context_fn, function)

    x = torch.ones(1)
    wrapper = checkpoint_wrapper(Debugged(), debug=False, policy_fn=[])
    assert wrapper(x, debug=True, policy_fn="mine", context_fn=1, function=2) == (x, True, "mine", 1, 2)
    assert region_calls[0][2] == {"debug": False, "policy_fn": []}


# The policy in the real region


@pytest.mark.parametrize("kind", ["function", "list of overloads", "PyTorch's enum", "True and False"])
def test_what_a_policy_saves_is_not_run_again(kind: str) -> None:
    ran: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    enum = torch.utils.checkpoint.CheckpointPolicy

    def saves(op: Any) -> bool:
        return op is torch.ops.aten.addmm.default

    policies = {
        "function": lambda ctx, op, *a, **k: (
            CheckpointPolicy.MUST_SAVE if saves(op) else CheckpointPolicy.MUST_RECOMPUTE
        ),
        "list of overloads": [torch.ops.aten.addmm.default],
        "PyTorch's enum": lambda ctx, op, *a, **k: enum.MUST_SAVE if saves(op) else enum.PREFER_RECOMPUTE,
        "True and False": lambda ctx, op, *a, **k: saves(op),
    }
    torch.manual_seed(0)
    block = Counted()
    x = torch.randn(2, 4)
    expected = gradients_of(block, x)
    wrapper = checkpoint_wrapper(block, policy_fn=policies[kind])
    y = x.clone().requires_grad_()
    loss = wrapper(y).square().sum()
    with Watch():
        loss.backward()
    assert "addmm" not in ran
    assert "tanh" in ran
    assert all_equal([y.grad, *(parameter.grad for parameter in block.parameters())], expected)


# A function of the user's own


def test_a_function_of_the_users_gets_the_module_the_arguments_and_its_keywords() -> None:
    calls = []

    def run(function: Any, *args: Any, **kwargs: Any) -> str:
        calls.append((function, args, kwargs))
        return "its result"

    inner = nn.Linear(2, 2)
    wrapper = CheckpointWrapper(inner, checkpoint_fn=run, use_reentrant="kept", any_option=3)
    assert wrapper(1, 2, key=4, debug=True) == "its result"
    assert calls == [(inner, (1, 2), {"key": 4, "debug": True, "use_reentrant": "kept", "any_option": 3})]
    assert wrapper.checkpoint_fn.func is run
    assert wrapper.checkpoint_fn.keywords == {"use_reentrant": "kept", "any_option": 3}


def test_a_policy_reaches_a_function_of_the_users_too() -> None:
    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        return kwargs

    assert checkpoint_wrapper(nn.ReLU(), checkpoint_fn=run)(1) == {}
    wrapper = checkpoint_wrapper(nn.ReLU(), checkpoint_fn=run, policy_fn=len, swap_inputs=True)
    assert wrapper(1) == {"policy_fn": len, "swap_inputs": True}


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(pytorch_checkpoint, use_reentrant=False),
        functools.partial(functools.partial(pytorch_checkpoint, use_reentrant=True), use_reentrant=False),
    ],
    ids=["partial", "partial of partial"],
)
def test_pytorchs_checkpoint_may_be_the_function(function: Any) -> None:
    wrapper = checkpoint_wrapper(mixer(), checkpoint_fn=function, early_stop=False)
    assert all_equal(trained(wrapper)[1], trained(mixer())[1])
    assert wrapper.num_calls == 2
    assert wrapper.checkpoint_fn.func is pytorch_checkpoint
    assert wrapper.checkpoint_fn.keywords == {"use_reentrant": False, "early_stop": False}


def test_keywords_are_packed_for_a_reentrant_function_of_the_users() -> None:
    calls = []

    def positional_only(function: Any, *tensors: torch.Tensor) -> Any:
        calls.append(function)
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        return pytorch_checkpoint(function, *tensors, use_reentrant=True)

    wrapper = checkpoint_wrapper(mixer(), CheckpointImpl.REENTRANT, positional_only)
    assert all_equal(trained(wrapper)[1], trained(mixer())[1])
    assert len(calls) == 1
    block = checkpoint_wrapper(Counted(), CheckpointImpl.REENTRANT, positional_only)
    block(torch.ones(2, 4, requires_grad=True))
    assert calls[1] is block._checkpoint_wrapped_module, "nothing to pack: the function gets the module itself"
    scaled = checkpoint_wrapper(lambda x, *, factor: x * factor, CheckpointImpl.REENTRANT, positional_only)
    assert scaled(torch.ones(2, requires_grad=True), factor=3).equal(torch.full((2,), 3.0))


def test_a_reentrant_function_of_the_users_may_run_the_forward_on_other_tensors() -> None:
    def doubled(function: Any, *tensors: torch.Tensor) -> Any:
        return function(*(2 * tensor for tensor in tensors))

    wrapper = checkpoint_wrapper(lambda x, parts: [x + parts[0]], CheckpointImpl.REENTRANT, doubled)
    (made,) = wrapper(torch.ones(1), parts=(torch.ones(1),))
    assert made.equal(torch.full((1,), 4.0))


# The attributes


def test_pytorchs_enum_is_accepted_by_name() -> None:
    for theirs, ours in zip(pytorch.CheckpointImpl, CheckpointImpl, strict=True):
        assert theirs.name == ours.name
        assert checkpoint_wrapper(nn.ReLU(), checkpoint_impl=theirs).checkpoint_impl is ours
    assert checkpoint_wrapper(nn.ReLU()).checkpoint_impl is CheckpointImpl.NO_REENTRANT


@pytest.mark.parametrize("impl", ["REENTRANT", None, True, CheckpointPolicy.MUST_SAVE], ids=str)
def test_anything_else_for_the_way_of_recomputing_is_refused(impl: Any) -> None:
    with pytest.raises(TypeError, match=r"CheckpointImpl.REENTRANT or CheckpointImpl.NO_REENTRANT"):
        checkpoint_wrapper(nn.ReLU(), checkpoint_impl=impl)


def test_the_default_function_is_the_region() -> None:
    wrapper = checkpoint_wrapper(nn.ReLU(), policy_fn=len)
    assert wrapper.checkpoint_fn.func is activation_checkpoint.checkpoint
    assert wrapper.checkpoint_fn.keywords == {"policy_fn": len}


def test_way_and_function_belong_to_the_wrapper() -> None:
    inner = nn.Linear(2, 2)
    inner.checkpoint_fn = inner.checkpoint_impl = "the model's own"
    wrapper = checkpoint_wrapper(inner)
    wrapper.checkpoint_fn = lambda function, *args: "other"
    assert wrapper(torch.ones(2)) == "other"
    assert (inner.checkpoint_fn, inner.checkpoint_impl) == ("the model's own", "the model's own")
    with pytest.raises(TypeError, match="checkpoint_fn"):
        wrapper.checkpoint_fn = 3
    with pytest.raises(TypeError, match="checkpoint_fn"):
        checkpoint_wrapper(inner, checkpoint_fn=3)
    wrapper.checkpoint_impl = CheckpointImpl.REENTRANT
    assert (wrapper.checkpoint_impl, inner.checkpoint_impl) == (CheckpointImpl.REENTRANT, "the model's own")
    assert wrapper(torch.ones(2)) == "other"


def test_a_policy_that_is_a_module_does_not_become_part_of_the_model() -> None:
    wrapper = checkpoint_wrapper(nn.Linear(2, 2), policy_fn=nn.Linear(3, 3))
    assert list(wrapper.state_dict()) == ["weight", "bias"]
    assert len(list(wrapper.modules())) == 1


def save_linear(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize(
    "options",
    [{}, {"policy_fn": save_linear, "preserve_rng_state": False}, {"checkpoint_impl": CheckpointImpl.REENTRANT}],
    ids=["plain", "policy", "reentrant"],
)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_wrapped_alike_recomputes_and_shares_no_parameter(options: dict[str, Any], how: str) -> None:
    def copied(model: nn.Module) -> nn.Module:
        if how == "deepcopy":
            return copy.deepcopy(model)
        if how == "pickle":
            return pickle.loads(pickle.dumps(model))  # noqa: S301
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    model = nn.Sequential(checkpoint_wrapper(Counted(), **options))
    one = copied(model)
    (wrapper,) = [wrapper for _, wrapper in list_wrappers(one)]
    assert type(wrapper) is CheckpointWrapper
    assert wrapper.checkpoint_impl is model[0].checkpoint_impl
    assert wrapper.checkpoint_fn.func is model[0].checkpoint_fn.func
    assert wrapper.checkpoint_fn.keywords == model[0].checkpoint_fn.keywords
    x = torch.randn(2, 4)
    assert all_equal(gradients_of(one, x), gradients_of(model, x))
    assert one[0].num_calls == model[0].num_calls == 2
    assert not set(map(id, one.parameters())) & set(map(id, model.parameters()))


def test_the_text_shows_what_is_not_the_default() -> None:
    def first_line(**options: Any) -> str:
        return repr(checkpoint_wrapper(nn.ReLU(), **options)).splitlines()[1].strip()

    assert first_line() == "(_checkpoint_wrapped_module): ReLU()"
    assert first_line(policy_fn=save_linear, debug=True) == "policy_fn=save_linear, debug=True"
    assert first_line(checkpoint_impl=CheckpointImpl.REENTRANT) == "checkpoint_impl=REENTRANT, preserve_rng_state=True"
    assert first_line(checkpoint_fn=save_linear, any=1) == "checkpoint_fn=save_linear, any=1"


def test_hooks_of_the_wrapper_run_once_and_those_of_the_module_in_both_runs() -> None:
    order: list[str] = []
    block = Counted()
    wrapper = checkpoint_wrapper(block)
    wrapper.register_forward_hook(lambda *_: order.append("wrapper"))
    block.register_forward_pre_hook(lambda *_: order.append("inner"))
    wrapper(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert order == ["inner", "wrapper", "inner"]


# Neutral names


def test_the_names_are_the_same_wherever_they_are_imported_from() -> None:
    from hyper_parallel.core import activation_checkpoint as core
    from hyper_parallel.core.activation_checkpoint import activation_checkpoint as thin
    from hyper_parallel.core.activation_checkpoint import policy, region, wrap

    for home in (hyper_parallel, core, thin):
        assert home.checkpoint is region.checkpoint
        assert home.checkpoint_wrapper is wrap.checkpoint_wrapper
        assert home.CheckpointPolicy is policy.CheckpointPolicy
    assert hyper_parallel.apply_activation_checkpointing is wrap.apply_activation_checkpointing
    assert inspect.isfunction(hyper_parallel.checkpoint_wrapper)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = core.no_such_name


def test_the_names_of_pytorchs_part_are_there_however_often_they_are_asked_for() -> None:
    program = """
from hyper_parallel.platform.torch import activation_checkpoint as part
import importlib
result = []
for _ in range(2):
    result.append([type(getattr(part, name)).__name__ for name in (
        "CheckpointImpl", "CheckpointWrapper", "checkpoint_wrapper", "apply_activation_checkpointing", "checkpoint",
        "create_selective_checkpoint_contexts")])
    for name in ("activation_checkpoint.activation_swap", "wrappers.checkpoint_wrapper", "regions.checkpoint", "compat.selective_contexts"):
        importlib.import_module("hyper_parallel.platform.torch." + name)
"""
    expected = ["EnumType", "type", *["function"] * 4]
    assert [["EnumType" if "Enum" in name else name for name in row] for row in run_fresh(program)] == [expected] * 2


def test_importing_the_neutral_names_loads_and_binds_no_framework() -> None:
    program = """
import hyper_parallel as hp
hp.checkpoint, hp.checkpoint_wrapper, hp.apply_activation_checkpointing, hp.CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.activation_checkpoint import checkpoint
from hyper_parallel.platform import selection
result = [selection._state.chosen is None, sorted({"torch", "mindspore"} & set(sys.modules))]
"""
    assert run_fresh(program) == [True, []]


@pytest.mark.usefixtures("may_choose")
def test_the_neutral_wrapper_is_that_of_the_modules_framework_with_all_options() -> None:
    wrapper = hyper_parallel.checkpoint_wrapper(mixer(), policy_fn=save_linear, early_stop=False)
    assert type(wrapper) is CheckpointWrapper
    assert wrapper.checkpoint_fn.keywords == {"policy_fn": save_linear, "early_stop": False}
    assert all_equal(trained(wrapper)[1], trained(mixer())[1])
    positional = hyper_parallel.checkpoint_wrapper(nn.ReLU(), CheckpointImpl.REENTRANT)
    assert positional.checkpoint_impl is CheckpointImpl.REENTRANT
    function = functools.partial(pytorch_checkpoint, use_reentrant=False)
    assert hyper_parallel.checkpoint_wrapper(nn.ReLU(), checkpoint_fn=function).checkpoint_fn.func is pytorch_checkpoint
    with pytest.raises(ValueError, match="checkpoint_wrapper"):
        hyper_parallel.checkpoint_wrapper(None)
    with pytest.raises(TypeError, match="(?s)checkpoint_wrapper.*7"):
        hyper_parallel.checkpoint_wrapper(7)


@pytest.mark.usefixtures("may_choose")
def test_the_neutral_call_recomputes_and_hands_keywords_on() -> None:
    block = Counted()
    x = torch.randn(2, 4)
    expected = gradients_of(block, x)
    block.num_calls = 0
    found = gradients_of(lambda y: hyper_parallel.checkpoint(block, y), x)
    assert block.num_calls == 2
    assert torch.equal(found[0], expected[0])
    assert hyper_parallel.checkpoint(lambda y, *, plus: y + plus, x, plus=1).equal(x + 1)
    with pytest.raises(TypeError, match="(?s)checkpoint.*3"):
        hyper_parallel.checkpoint(3, x)


WAYS = {
    "a module": "hp.checkpoint(model)",
    "a method of a module": "hp.checkpoint(model.forward)",
    "a partial of a module": "hp.checkpoint(functools.partial(model))",
    "a tensor": "hp.checkpoint(lambda y: y.exp(), x)",
    "a tensor in a partial": "hp.checkpoint(functools.partial(lambda y: y.exp(), y=x))",
    "a tensor deep in an argument": "hp.checkpoint(lambda ys: ys[1]['a'][0].exp(), [None, {'a': (x,)}])",
    "a tensor in a keyword": "hp.checkpoint(lambda n, ys: ys['a'].exp(), 'text', ys={'a': x})",
}


@pytest.mark.parametrize("call", WAYS.values(), ids=WAYS)
def test_the_neutral_call_finds_the_framework_from(call: str) -> None:
    program = f"""
import functools, torch, hyper_parallel as hp
from hyper_parallel.platform import selection
x = torch.nn.Parameter(torch.ones(2))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = x
    def forward(self):
        return self.weight.exp()
model = Model()
{call}.sum().backward()
result = [selection._state.chosen.platform_type.value, "checkpoint(" in selection._state.bound_since, x.grad is not None]
result.append("mindspore" in sys.modules)
"""
    assert run_fresh(program) == ["torch", True, True, False]


def test_a_neutral_call_in_which_nothing_tells_takes_the_chosen_framework() -> None:
    program = """
import hyper_parallel as hp
from hyper_parallel.platform import selection
def nothing():
    return 3
result = [hp.checkpoint(nothing), selection._state.chosen.platform_type.value, selection._state.bound_since]
"""
    assert run_fresh(program, HYPER_PARALLEL_PLATFORM="torch") == [3, "torch", "checkpoint(nothing)"]


def test_a_wrapper_is_a_wrapper() -> None:
    assert issubclass(CheckpointWrapper, ActivationWrapper)
    wrapper = checkpoint_wrapper(nn.ReLU())
    assert list_wrappers(nn.Sequential(wrapper)) == [("0", wrapper)]
