"""Submodules are replaced by wrappers in place: which ones, in which order, in every place or not at all."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as pytorch
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

import hyper_parallel
from hyper_parallel.platform import selection
from hyper_parallel.platform.torch.activation_checkpoint import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    SwapWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    list_wrappers,
    offload_wrapper,
    swap_wrapper,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Block(), Block())


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def wrapped_names(model: nn.Module) -> list[str]:
    return [name for name, _ in list_wrappers(model)]


def places(model: nn.Module) -> list[tuple[int, str, int]]:
    """Which object stands where."""
    return [(id(parent), name, id(child)) for parent in model.modules() for name, child in parent._modules.items()]


# What is wrapped


def test_matching_submodules_are_replaced_in_place_and_nothing_is_returned() -> None:
    model = blocks()
    inner = list(model)
    state = list(model.state_dict())
    assert apply_activation_checkpointing(model, check_fn=is_block) is None
    assert [type(child) for child in model] == [nn.Linear, CheckpointWrapper, CheckpointWrapper]
    assert [model[1]._checkpoint_wrapped_module, model[2]._checkpoint_wrapped_module] == inner[1:]
    assert list(model.state_dict()) == state


def test_by_default_every_submodule_is_wrapped_once_and_never_the_root() -> None:
    model = blocks()
    names = [name for name, _ in model.named_modules()]
    apply_activation_checkpointing(model)
    assert isinstance(model, nn.Sequential)
    assert wrapped_names(model) == names[1:]


def test_a_root_that_matches_stays_bare() -> None:
    model = Block()
    apply_activation_checkpointing(model, check_fn=is_block)
    assert list_wrappers(model) == []


def test_a_module_and_one_inside_it_are_both_wrapped_the_inner_first() -> None:
    order: list[nn.Module] = []

    def wrap(module: nn.Module) -> CheckpointWrapper:
        order.append(module)
        return checkpoint_wrapper(module)

    model = blocks()
    expected = [model[0], model[1].up, model[1].down, model[1], model[2].up, model[2].down, model[2]]
    apply_activation_checkpointing(model, wrap, lambda module: True)
    assert order == expected
    assert isinstance(model[1].up, CheckpointWrapper)
    assert isinstance(model[1], CheckpointWrapper)


def test_a_wrapped_model_computes_the_same_gradients() -> None:
    x = torch.randn(3, 4)
    found = []
    for check_fn in (None, is_block, is_linear, lambda module: True):
        model = blocks()
        if check_fn is not None:
            apply_activation_checkpointing(model, check_fn=check_fn)
        model(x).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for gradients in found[1:]:
        assert len(gradients) == 10
        assert all(map(torch.equal, gradients, found[0]))


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (swap_wrapper, SwapWrapper),
        (offload_wrapper, OffloadWrapper),
        (functools.partial(swap_wrapper, policy_fn=len), SwapWrapper),
        (CheckpointWrapper, CheckpointWrapper),
        (pytorch.checkpoint_wrapper, pytorch.CheckpointWrapper),
    ],
    ids=["swap_wrapper", "offload_wrapper", "partial", "class", "PyTorch's"],
)
def test_any_wrapper_can_be_applied(wrap: Callable[..., Any], kind: type) -> None:
    model = blocks()
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=is_block)
    assert [type(child) for child in model] == [nn.Linear, kind, kind]


def test_options_bound_to_the_wrapper_function_are_used() -> None:
    model = blocks()
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    apply_activation_checkpointing(model, wrap, is_block)
    assert {wrapper.checkpoint_impl for _, wrapper in list_wrappers(model)} == {CheckpointImpl.REENTRANT}


# Shared submodules


def test_a_shared_submodule_is_wrapped_once_and_stands_in_all_its_places() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({
        "a": nn.Sequential(shared, nn.ReLU(), shared),
        "b": nn.ModuleDict({"c": nn.Sequential(shared)}),
        "d": shared,
    })  # fmt: skip
    asked: list[nn.Module] = []

    def check(module: nn.Module) -> bool:
        asked.append(module)
        return is_linear(module)

    apply_activation_checkpointing(model, check_fn=check)
    wrapper = model["d"]
    assert isinstance(wrapper, CheckpointWrapper)
    assert wrapper._checkpoint_wrapped_module is shared
    assert [model["a"][0], model["a"][2], model["b"]["c"][0]] == [wrapper] * 3
    assert asked.count(shared) == 1


def test_a_shared_submodule_is_wrapped_once_by_every_kind_of_policy() -> None:
    asked: list[nn.Module] = []

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        asked.append(module)
        return recurse or is_linear(module)

    for chosen in (policy, ModuleWrapPolicy({nn.Linear}), CustomPolicy(is_linear)):
        shared = nn.Linear(4, 4)
        model = nn.Sequential(nn.Sequential(shared), shared, nn.Sequential(shared))
        apply_activation_checkpointing(model, auto_wrap_policy=chosen)
        assert isinstance(model[1], CheckpointWrapper)
        assert model[0][0] is model[1] is model[2][0]
        assert len(list_wrappers(model)) == 1
        if chosen is policy:
            assert asked.count(shared) == 2, "on the way down and on the way up"


def test_a_shared_submodule_inside_a_shared_one_is_wrapped_once() -> None:
    inner = nn.Linear(4, 4)
    outer = nn.Sequential(inner)
    model = nn.ModuleList([outer, outer, nn.Sequential(inner)])
    apply_activation_checkpointing(model)
    assert model[0] is model[1]
    assert model[0][0] is model[2][0]
    assert wrapped_names(model) == ["0", "0.0", "2"]


# Policies


def test_the_policy_wins_over_the_check_which_is_not_asked() -> None:
    def check(module: nn.Module) -> bool:
        raise AssertionError("asked")

    for check_fn in (check, None):
        model = blocks()
        apply_activation_checkpointing(model, check_fn=check_fn, auto_wrap_policy=ModuleWrapPolicy({Block}))
        assert wrapped_names(model) == ["1", "2"]


def test_a_policy_function_may_stop_the_descent_and_sees_what_is_left_unwrapped() -> None:
    asked: list[tuple[str, bool, int]] = []
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    names = {module: name for name, module in model.named_modules()}

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        asked.append((names[module], recurse, nonwrapped_numel))
        return names[module] in ("", "0", "0.up") if recurse else names[module] in ("0.up", "0")

    apply_activation_checkpointing(model, auto_wrap_policy=policy)
    assert asked == [
        ("", True, 96), ("0", True, 76), ("0.up", True, 40), ("0.up", False, 40), ("0.down", True, 36), ("0", False, 36),
        ("1", True, 20),
    ]  # fmt: skip
    assert wrapped_names(model) == ["0", "0.up"]


def test_a_policy_function_may_name_its_arguments_as_it_likes() -> None:
    def keywords_only(*, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or is_block(module)

    for policy in (lambda m, r, n: r or is_block(m), keywords_only, lambda *a, **k: keywords_only(**k)):
        model = blocks()
        apply_activation_checkpointing(model, auto_wrap_policy=policy)
        assert wrapped_names(model) == ["1", "2"]


def test_an_error_inside_a_policy_reaches_the_caller() -> None:
    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        raise TypeError("of the policy itself")

    with pytest.raises(TypeError, match="of the policy itself"):
        apply_activation_checkpointing(blocks(), auto_wrap_policy=policy)


def test_fsdps_policies_choose() -> None:
    transformer = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    large = functools.partial(size_based_auto_wrap_policy, min_num_params=76)
    for policy, names in [
        (ModuleWrapPolicy({Block}), ["1", "2"]),
        (transformer, ["1", "2"]),
        (large, ["1", "2"]),
        (always_wrap_policy, ["0", "1", "1.up", "1.down", "2", "2.up", "2.down"]),
    ]:
        model = blocks()
        apply_activation_checkpointing(model, auto_wrap_policy=policy)
        assert wrapped_names(model) == names


def test_the_keywords_of_a_custom_policy_reach_the_wrapper_of_each_module() -> None:
    model = blocks()
    first = model[1]

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return {"early_stop": False, "policy_fn": []} if module is first else is_block(module)

    apply_activation_checkpointing(model, auto_wrap_policy=CustomPolicy(choose))
    assert model[1].checkpoint_fn.keywords == {"early_stop": False, "policy_fn": []}
    assert model[2].checkpoint_fn.keywords == {}
    assert wrapped_names(model) == ["1", "2"]


def test_the_root_is_not_even_offered_to_the_wrapper_function_when_a_custom_policy_chooses_it() -> None:
    model, wrapped = blocks(), []

    def wrap(module: nn.Module) -> nn.Module:
        wrapped.append(module)
        return checkpoint_wrapper(module)

    apply_activation_checkpointing(model, wrap, auto_wrap_policy=CustomPolicy(lambda m: m in (model, model[0])))
    assert wrapped == [model[0]._checkpoint_wrapped_module]
    assert wrapped_names(model) == ["0"]


# As PyTorch's own function


def random_tree(rng: random.Random, depth: int) -> nn.Module:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(
            [nn.Linear(rng.randint(1, 5), rng.randint(1, 5)), nn.ReLU(), nn.BatchNorm1d(rng.randint(1, 3))]
        )
    children = [random_tree(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return nn.ModuleList(children) if rng.random() < 0.3 else nn.Sequential(*children)


@pytest.mark.parametrize("kind", ["size", "check", "module", "custom", "stops"])
@pytest.mark.parametrize("seed", range(20))
def test_the_choice_and_the_questions_are_those_of_pytorchs_own_function(seed: int, kind: str) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    plain = nn.Sequential(*(random_tree(rng, 3) for _ in range(3)))
    for number, module in enumerate(plain.modules()):
        module.number = number
    limit = rng.randint(5, 60)
    stops = {rng.randrange(1, 12) for _ in range(3)}

    def applied(apply: Callable[..., None], wrap: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
        model, asked = copy.deepcopy(plain), []

        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            asked.append((module.number, recurse, nonwrapped_numel))
            if kind == "stops" and recurse:
                return module.number not in stops
            return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=limit)

        def check(module: nn.Module) -> bool:
            asked.append(module.number)
            return module.number % 3 == 1

        options: dict[str, Any] = {
            "size": {"auto_wrap_policy": policy},
            "stops": {"auto_wrap_policy": policy},
            "check": {"check_fn": check},
            "module": {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear, nn.Sequential})},
            "custom": {"auto_wrap_policy": CustomPolicy(lambda module: module.number % 3 == 1)},
        }[kind]
        made: list[int] = []

        def noted(module: nn.Module, **options: Any) -> Any:
            made.append(module.number)
            return wrap(module, **options)

        apply(model, noted, **options)
        return asked, made

    ours = applied(apply_activation_checkpointing, checkpoint_wrapper)
    theirs = applied(pytorch.apply_activation_checkpointing, pytorch.checkpoint_wrapper)
    assert ours == theirs


# Models that have wrappers already


def test_what_is_inside_a_wrapper_is_wrapped_there() -> None:
    model = blocks()
    apply_activation_checkpointing(model, offload_wrapper, is_block)
    inner = model[1]._checkpoint_wrapped_module
    apply_activation_checkpointing(model, checkpoint_wrapper, is_block)
    assert [type(wrapper) for _, wrapper in list_wrappers(model)] == [OffloadWrapper, CheckpointWrapper] * 2
    assert model[1]._checkpoint_wrapped_module._checkpoint_wrapped_module is inner
    assert wrapped_names(model) == ["1", "1", "2", "2"]


def test_a_wrapper_can_be_chosen_itself() -> None:
    model = blocks()
    apply_activation_checkpointing(model, check_fn=is_block)
    apply_activation_checkpointing(model, swap_wrapper, lambda module: isinstance(module, CheckpointWrapper))
    assert [type(wrapper) for _, wrapper in list_wrappers(model)] == [SwapWrapper, CheckpointWrapper] * 2


@pytest.mark.parametrize("policy", ["check", "function", "custom"])
def test_wrapping_twice_does_to_wrapped_modules_what_pytorchs_own_function_does(policy: str) -> None:
    def nested(model: nn.Module) -> list[int]:
        depths = []
        for child in model:
            depths.append(0)
            while type(child).__name__ == "CheckpointWrapper":
                child, depths[-1] = child._checkpoint_wrapped_module, depths[-1] + 1
        return depths

    found = []
    for apply in (apply_activation_checkpointing, pytorch.apply_activation_checkpointing):
        wrap = checkpoint_wrapper if apply is apply_activation_checkpointing else pytorch.checkpoint_wrapper
        chosen: dict[str, Any] = {
            "check": {"check_fn": is_block},
            "function": {"auto_wrap_policy": ModuleWrapPolicy({Block})},
            "custom": {"auto_wrap_policy": CustomPolicy(is_block)},
        }[policy]
        model = blocks()
        for _ in range(3):
            apply(model, wrap, **chosen)
        found.append(nested(model))
    assert found[0] == found[1] == [0, 3, 3]


def test_a_class_that_is_in_the_model_already_is_refused() -> None:
    model = blocks()
    apply_activation_checkpointing(model, check_fn=is_block)
    before = places(model)
    with pytest.raises(ValueError, match="(?s)CheckpointWrapper already.*Block"):
        apply_activation_checkpointing(model, CheckpointWrapper, is_linear)
    assert places(model) == before
    with pytest.raises(ValueError, match="(?s)CheckpointWrapper already"):
        apply_activation_checkpointing(checkpoint_wrapper(blocks()), CheckpointWrapper, is_linear)
    theirs = blocks()
    theirs[1] = pytorch.CheckpointWrapper(theirs[1])
    for model in (theirs, pytorch.CheckpointWrapper(blocks())):
        with pytest.raises(AssertionError, match="already wrapped"):  # as here
            pytorch.apply_activation_checkpointing(model, pytorch.CheckpointWrapper, is_linear)


def test_what_is_inside_a_wrapped_root_is_a_submodule() -> None:
    model = checkpoint_wrapper(Block())
    for policy in ({"check_fn": is_block}, {"auto_wrap_policy": CustomPolicy(is_block)}):
        wrapper = copy.deepcopy(model)
        apply_activation_checkpointing(wrapper, swap_wrapper, **policy)
        assert [type(each) for _, each in list_wrappers(wrapper)] == [CheckpointWrapper, SwapWrapper]


# Whole or not at all


def raising(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.ReLU):
        raise OSError("no")
    return checkpoint_wrapper(module)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"auto_wrap_policy": {nn.Linear}}, ValueError, "(?s)auto_wrap_policy.*ModuleWrapPolicy"),
        ({"auto_wrap_policy": 3}, ValueError, "(?s)auto_wrap_policy.*3"),
        ({"auto_wrap_policy": nn.Linear}, ValueError, "(?s)auto_wrap_policy.*Linear"),
        ({"auto_wrap_policy": CustomPolicy(lambda module: 3)}, ValueError, "CustomPolicy"),
        ({"check_fn": 3}, TypeError, "(?s)check_fn.*3"),
        ({"check_fn": None}, TypeError, "check_fn"),
        ({"checkpoint_wrapper_fn": 3}, TypeError, "(?s)checkpoint_wrapper_fn.*3"),
        ({"checkpoint_wrapper_fn": None}, TypeError, "checkpoint_wrapper_fn"),
        ({"checkpoint_wrapper_fn": lambda module: None}, TypeError, "(?s)checkpoint_wrapper_fn.*None; Linear"),
        ({"checkpoint_wrapper_fn": lambda module: module.forward}, TypeError, "(?s)checkpoint_wrapper_fn.*forward"),
        ({"checkpoint_wrapper_fn": raising}, OSError, "no"),
        ({"auto_wrap_policy": CustomPolicy(lambda module: {"no_such_option": 1})}, TypeError, "no_such_option"),
    ],
)
def test_a_mistake_is_said_clearly_and_leaves_the_model_as_it_was(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    before = places(model)
    with pytest.raises(error, match=text):
        apply_activation_checkpointing(model, **options)
    assert places(model) == before


def test_a_check_that_raises_late_leaves_the_model_as_it_was() -> None:
    def check(module: nn.Module) -> bool:
        if isinstance(module, Block):
            raise OSError("no")
        return True

    model = blocks()
    before = places(model)
    with pytest.raises(OSError, match="no"):
        apply_activation_checkpointing(model, check_fn=check)
    assert places(model) == before


def test_a_module_that_takes_no_wrapper_leaves_the_model_as_it_was() -> None:
    class Strict(nn.Sequential):
        is_sealed = False

        def __setattr__(self, name: str, value: Any) -> None:
            if self.is_sealed and name == "1" and isinstance(value, CheckpointWrapper):
                raise OSError("sealed")
            super().__setattr__(name, value)

    strict = Strict(nn.Linear(2, 2), nn.Linear(2, 2))
    strict.is_sealed = True
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), strict)
    before = places(model)
    with pytest.raises(OSError, match="sealed"):
        apply_activation_checkpointing(model)
    assert places(model) == before


def test_a_wrapper_function_may_leave_a_module_as_it_is() -> None:
    model = blocks()
    seen: list[nn.Module] = []

    def every_second(module: nn.Module) -> nn.Module:
        seen.append(module)
        return checkpoint_wrapper(module) if len(seen) % 2 == 0 else module

    apply_activation_checkpointing(model, every_second, is_block)
    assert wrapped_names(model) == ["2"]


@pytest.mark.parametrize(
    ("model", "error"), [(None, ValueError), (3, TypeError), (print, TypeError), (nn.ReLU, TypeError)]
)
def test_what_is_no_module_is_refused(model: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="apply_activation_checkpointing"):
        apply_activation_checkpointing(model)


# The neutral name


@pytest.fixture
def may_choose() -> Iterator[None]:
    yield
    selection._forget()


@pytest.mark.usefixtures("may_choose")
def test_the_neutral_name_wraps_a_model_of_its_framework() -> None:
    model = blocks()
    assert hyper_parallel.apply_activation_checkpointing(model, check_fn=is_block) is None
    assert [type(child) for child in model] == [nn.Linear, CheckpointWrapper, CheckpointWrapper]
    other = blocks()
    hyper_parallel.apply_activation_checkpointing(
        other, hyper_parallel.swap_wrapper, auto_wrap_policy=CustomPolicy(is_linear)
    )
    assert [type(wrapper) for _, wrapper in hyper_parallel.wrappers(other)] == [SwapWrapper] * 5
    for wrong, error in ((None, ValueError), (3, TypeError), (print, TypeError)):
        with pytest.raises(error, match="apply_activation_checkpointing"):
            hyper_parallel.apply_activation_checkpointing(wrong)
