"""A wrapper changes how a module is called and nothing else: names, order, objects, state, attributes, copies."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.utils import parameters_to_vector, parametrize

from hyper_parallel._base.errors import HyperParallelError
from hyper_parallel.platform.torch import activation_checkpoint
from hyper_parallel.platform.torch.activation_checkpoint import (
    _CHECKPOINT_PREFIX,
    _CHECKPOINT_WRAPPED_MODULE,
    ActivationWrapper,
    CheckpointWrapper,
    OffloadWrapper,
    SwapWrapper,
    checkpoint_wrapper,
    list_wrappers,
    offload_wrapper,
    swap_wrapper,
)
from hyper_parallel.platform.torch.wrappers import activation_wrapper
from hyper_parallel.platform.torch.wrappers import swap_wrapper as activation_swap
from support.interpreter import run_fresh


class Passing(ActivationWrapper):
    """The smallest wrapper: it calls the inner module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._checkpoint_wrapped_module(*args, **kwargs)


Wrap = Callable[[nn.Module], ActivationWrapper]


@pytest.fixture(params=[Passing, checkpoint_wrapper], ids=["passing", "checkpoint"])
def wrap(request: pytest.FixtureRequest) -> Wrap:
    """The base alone, and the wrapper with the most state of its own."""
    return request.param


# Random modules


class Part(nn.Module):
    """A module with one of everything that has a name."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((3,), scale))
        self.register_parameter("absent", None)
        self.register_buffer("steps", torch.tensor([scale]))
        self.register_buffer("scratch", torch.tensor([-scale]), persistent=False)
        self.register_buffer("no_buffer", None)
        self.add_module("no_child", None)


class NotedPart(Part):
    """The same with a state of its own beside the tensors."""

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self.note = scale

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def random_module(rng: random.Random, depth: int, made: list[nn.Module], picklable: bool) -> nn.Module:
    if made and rng.random() < 0.15:
        return rng.choice(made)  # complete before its new parent: shared, never a cycle
    kind = rng.choice(["leaf", "sequential", "list", "dict", "part", "part"]) if depth else "leaf"
    children = [random_module(rng, depth - 1, made, picklable) for _ in range(rng.randint(1, 3))] if depth else []
    if kind == "sequential":
        module: nn.Module = nn.Sequential(*children)
    elif kind == "list":
        module = nn.ModuleList(children)
    elif kind == "dict":
        module = nn.ModuleDict({rng.choice("abc") + str(i): child for i, child in enumerate(children)})
    elif kind == "part":
        module = rng.choice([Part, NotedPart])(rng.random())
        for position, child in enumerate(children):
            setattr(module, f"child_{position}", child)
    else:
        module = random_leaf(rng, picklable)
    for other in made:  # tied weights
        if rng.random() < 0.1 and "alpha" in other._parameters and "alpha" in module._parameters:
            module.alpha = other.alpha
    made.append(module)
    return module


def random_leaf(rng: random.Random, picklable: bool) -> nn.Module:
    kind = rng.randrange(6 if picklable else 7)
    if kind == 0:
        return nn.BatchNorm1d(3)  # has a version of its own in the state dict
    if kind == 1:
        return nn.ParameterList([nn.Parameter(torch.rand(2)) for _ in range(2)])
    if kind == 2:
        return nn.Dropout()
    if kind <= 4:
        return rng.choice([Part, NotedPart])(rng.random())
    linear = nn.Linear(3, 2, bias=rng.random() < 0.5)
    if kind == 6:
        parametrize.register_parametrization(linear, "weight", Doubled())
    return linear


def random_model(seed: int, *, picklable: bool = False) -> nn.Module:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    made: list[nn.Module] = []
    model = Part(rng.random())
    for position in range(rng.randint(2, 4)):
        setattr(model, f"block_{position}", random_module(rng, rng.randint(0, 3), made, picklable))
    return model


Wrapping = tuple[int, tuple[int, ...], int]  # which module (in order of `modules()`), at which of its places, how often


def random_wrappings(model: nn.Module, seed: int, *, everywhere: bool) -> list[Wrapping]:
    """What to wrap; `everywhere` puts a shared module's wrapper in all its places, else it may stay bare in some."""
    rng = random.Random(seed + 10_000)
    found = []
    for number, module in enumerate(model.modules()):
        places = range(len(places_of(model, module)))
        if rng.random() < 0.5:
            chosen = tuple(places) if everywhere else tuple(sorted(rng.sample(places, rng.randint(1, len(places)))))
            found.append((number, chosen, rng.choice([1, 1, 2])))
    return found


def places_of(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module | None, str]]:
    if module is model:
        return [(None, "")]
    return [(parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is module]


def wrapped(model: nn.Module, wrappings: list[Wrapping], wrap: Wrap) -> nn.Module:
    """`model` with these wrapped in place; the new root."""
    everything = [(module, places_of(model, module)) for module in model.modules()]
    for number, chosen, times in wrappings:
        module, places = everything[number]
        wrapper = module
        for _ in range(times):
            wrapper = wrap(wrapper)
        for place in chosen:
            parent, name = places[place]
            if parent is None:
                model = wrapper
            elif name != "parametrizations":  # PyTorch asks for its type
                setattr(parent, name, wrapper)
    return model


def on_random_models(seed: int, check: Callable[[list[Wrapping]], None], *, everywhere: bool, **options: bool) -> None:
    """Run `check` on what the seed gives; if it fails, again with fewer wrappings, and show the fewest that fail."""
    print(f"seed {seed}")
    wrappings = random_wrappings(random_model(seed, **options), seed, everywhere=everywhere)
    try:
        check(wrappings)
    except Exception:
        position = 0
        while position < len(wrappings):
            fewer = wrappings[:position] + wrappings[position + 1 :]
            try:
                check(fewer)
                position += 1
            except Exception:
                wrappings = fewer
        print(f"fails with {wrappings} on {random_model(seed, **options)}")
        raise


def fill(model: nn.Module, seed: int) -> nn.Module:
    """Other numbers in every tensor and note."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.rand(tensor.shape).to(tensor.dtype))
    for module in model.modules():
        if isinstance(module, NotedPart):
            module.note = random.Random(seed).random()
    return model


def names_and_objects(model: nn.Module) -> dict[str, list[tuple[str, int]]]:
    """Everything that has a name, in order, with the identity of the object."""
    listings = {
        "parameters": model.named_parameters(),
        "parameters, all": model.named_parameters(remove_duplicate=False),
        "parameters, own": model.named_parameters("p", recurse=False),
        "buffers": model.named_buffers(),
        "buffers, all": model.named_buffers(prefix="p", remove_duplicate=False),
        "modules": model.named_modules(),
        "modules, all": model.named_modules(prefix="p", remove_duplicate=False),
        "parameters without names": (("", parameter) for parameter in model.parameters()),
        "buffers without names": (("", buffer) for buffer in model.buffers()),
        "modules without names": (("", module) for module in model.modules()),
    }
    return {what: [(name, id(thing)) for name, thing in listing] for what, listing in listings.items()}


def same_state(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return list(one) == list(two) and all(
        torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
        for name, value in one.items()
    )


def bare(module: nn.Module) -> nn.Module:
    while isinstance(module, ActivationWrapper):
        module = module._checkpoint_wrapped_module
    return module


@pytest.mark.parametrize("everywhere", [True, False], ids=["shared wrapper", "bare and wrapped"])
@pytest.mark.parametrize("seed", range(100))
def test_names_order_and_objects_are_those_of_the_unwrapped_model(seed: int, everywhere: bool, wrap: Wrap) -> None:
    def check(wrappings: list[Wrapping]) -> None:
        model = random_model(seed)
        before = names_and_objects(model)
        state = model.state_dict(keep_vars=True)
        model = wrapped(model, wrappings, wrap)
        assert names_and_objects(model) == before
        after = model.state_dict(keep_vars=True)
        assert list(after) == list(state)
        assert all(after[name] is state[name] for name in state if not name.endswith("_extra_state"))
        assert after._metadata == state._metadata

    on_random_models(seed, check, everywhere=everywhere)


@pytest.mark.parametrize("seed", range(100))
def test_children_keep_names_and_order_and_unwrap_to_the_same_objects(seed: int, wrap: Wrap) -> None:
    def check(wrappings: list[Wrapping]) -> None:
        model = random_model(seed)
        before = [(module, list(module.named_children())) for module in model.modules()]
        model = wrapped(model, wrappings, wrap)
        for module, children in before:
            assert [(name, bare(child)) for name, child in module.named_children()] == children
            assert [bare(child) for child in module.children()] == [child for _, child in children]
        assert [(name, bare(child)) for name, child in model.named_children()] == before[0][1]

    on_random_models(seed, check, everywhere=True)


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("seed", range(100))
def test_states_go_both_ways_between_wrapped_and_unwrapped_with_no_key_different(
    seed: int, assign: bool, wrap: Wrap
) -> None:
    def check(wrappings: list[Wrapping]) -> None:
        others = random_wrappings(random_model(seed), seed + 1, everywhere=False)
        for source_wraps, target_wraps in [(wrappings, []), ([], wrappings), (wrappings, others)]:
            source = wrapped(fill(random_model(seed), 1), source_wraps, wrap)
            target = wrapped(fill(random_model(seed), 2), target_wraps, wrap)
            state = source.state_dict()
            report = target.load_state_dict(state, strict=True, assign=assign)
            assert (report.missing_keys, report.unexpected_keys) == ([], [])
            assert same_state(target.state_dict(), fill(random_model(seed), 1).state_dict())
            for name, value in target.state_dict().items():
                if isinstance(value, torch.Tensor) and assign:
                    assert value.data_ptr() == state[name].data_ptr()

    on_random_models(seed, check, everywhere=False)


@pytest.mark.parametrize("seed", range(100))
def test_missing_and_unexpected_keys_are_reported_as_without_wrappers(seed: int, wrap: Wrap) -> None:
    def report(model: nn.Module, state: dict[str, Any], misshapen: dict[str, Any]) -> list[Any]:
        result = model.load_state_dict(state, strict=False)
        texts = []
        for strict in (True, False):
            with pytest.raises(RuntimeError) as caught:
                model.load_state_dict({**state, **misshapen}, strict=strict)
            texts.append(str(caught.value))
        return [result.missing_keys, result.unexpected_keys, *texts]

    def check(wrappings: list[Wrapping]) -> None:
        state = random_model(seed).state_dict()
        rng = random.Random(seed)
        for name in rng.sample(list(state), min(2, len(state))):
            del state[name]
        tensors = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
        misshapen = {name: torch.zeros(7, 7) for name in rng.sample(tensors, min(2, len(tensors)))}
        paths = [name for name, _ in random_model(seed).named_modules()]
        for path in rng.sample(paths, 2):
            state[f"{path}.unknown" if path else "unknown"] = torch.zeros(1)
            state[f"{path}.no.such" if path else "no.such"] = torch.zeros(1)
            state[f"{path}._extra_state" if path else "_extra_state"] = {"note": 0.5}
        plain = report(random_model(seed), state, misshapen)
        assert report(wrapped(random_model(seed), wrappings, wrap), state, misshapen) == plain

    on_random_models(seed, check, everywhere=False)


@pytest.mark.parametrize("seed", range(100))
def test_copies_and_pickles_are_wrapped_alike_and_share_nothing_with_the_original(seed: int, wrap: Wrap) -> None:
    def check(wrappings: list[Wrapping]) -> None:
        model = wrapped(fill(random_model(seed, picklable=True), 1), wrappings, wrap)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),  # noqa: S301
            torch.load(saved, weights_only=False),
        ]
        for one in copies:
            assert [name for name, _ in list_wrappers(one)] == [name for name, _ in list_wrappers(model)]
            for listing in ("parameters", "parameters, all", "modules", "modules, all", "buffers, all"):
                there, here = names_and_objects(one)[listing], names_and_objects(model)[listing]
                assert [name for name, _ in there] == [name for name, _ in here]
                # what was one object (shared modules, tied parameters) is one object
                assert len({number for _, number in there}) == len({number for _, number in here})
            assert same_state(one.state_dict(), model.state_dict())
            assert not set(map(id, one.parameters())) & set(map(id, model.parameters()))

    on_random_models(seed, check, everywhere=False, picklable=True)


@pytest.mark.parametrize("seed", range(100))
def test_functions_applied_to_all_modules_meet_the_same_modules_as_often(seed: int, wrap: Wrap) -> None:
    def check(wrappings: list[Wrapping]) -> None:
        model = random_model(seed)
        met: list[nn.Module] = []
        model.apply(met.append)
        before = Counter(met)
        model = wrapped(model, wrappings, wrap)
        met.clear()
        assert model.apply(met.append) is model
        assert Counter(met) == before

    on_random_models(seed, check, everywhere=True)


@pytest.mark.parametrize("seed", range(100))
def test_the_distributed_state_dict_of_pytorch_gives_and_takes_the_unwrapped_names(seed: int, wrap: Wrap) -> None:
    def check(wrappings: list[Wrapping]) -> None:
        source = wrapped(fill(random_model(seed), 1), wrappings, wrap)
        plain = fill(random_model(seed), 1)
        state = get_model_state_dict(source)
        assert same_state(dict(state), dict(get_model_state_dict(plain)))
        target = wrapped(fill(random_model(seed), 2), wrappings, wrap)
        report = set_model_state_dict(target, dict(state))
        assert (list(report.missing_keys), list(report.unexpected_keys)) == ([], [])
        assert same_state(target.state_dict(), plain.state_dict())

    on_random_models(seed, check, everywhere=True)


# A small model with known names


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.flag = 1

    @property
    def twice_the_flag(self) -> int:
        return 2 * self.flag

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.inner(self.norm(x)) * scale


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Block(), Block())


def wrapped_model() -> nn.Sequential:
    """A wrapper around `1`, one inside it around `1.inner`, and two around `2.inner.0`."""
    model = plain_model()
    model[1].inner = Passing(model[1].inner)
    model[1] = Passing(model[1])
    model[2].inner[0] = Passing(Passing(model[2].inner[0]))
    return model


def test_every_part_of_a_pytorch_module_is_either_the_inner_modules_or_the_wrappers() -> None:
    own_methods = {
        "forward", "__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward",
        "register_forward_hook", "register_forward_pre_hook", "register_backward_hook", "register_full_backward_hook",
        "register_full_backward_pre_hook", "_get_backward_hooks", "_get_backward_pre_hooks",
        "_maybe_warn_non_full_backward_hook",
        "_get_name", "extra_repr", "__repr__", "__dir__", "__init__",
        "__getstate__", "__setstate__", "__getattr__", "__setattr__", "__delattr__",
        "named_modules", "modules", "get_extra_state", "set_extra_state",  # written out in the class
        "_replicate_for_data_parallel",  # nn.DataParallel does not get as far with a wrapper
    }  # fmt: skip
    of_the_class = {
        "__module__", "__annotations__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__",
        "T_destination", "dump_patches", "call_super_init", "_compiled_call_impl",
    }  # fmt: skip
    from_inner = {*activation_wrapper._FROM_INNER, "_load_state_dict_post_hooks"}
    added = {"smart_apply", "___needs_generation_tag_patch"}  # by transformers and by the compiler, to every module
    methods = set(vars(nn.Module)) - own_methods - of_the_class - from_inner - added
    assert methods == set(activation_wrapper._STATE_METHODS) & set(dir(nn.Module))
    assert set(nn.Module().__dict__) == (from_inner - {"_version"}) | (
        ActivationWrapper.OWN - {_CHECKPOINT_WRAPPED_MODULE, "forward"}
    )


def test_a_wrapper_keeps_nothing_of_the_inner_modules_state() -> None:
    assert set(Passing(Block()).__dict__) == (ActivationWrapper.OWN - {"forward"}) | {"_class_when_made"}


def test_the_inner_module_is_under_the_name_that_pytorch_strips() -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as pytorch

    inner = Block()
    assert Passing(inner)._checkpoint_wrapped_module is inner
    assert pytorch._CHECKPOINT_WRAPPED_MODULE == _CHECKPOINT_WRAPPED_MODULE
    assert pytorch._CHECKPOINT_PREFIX == _CHECKPOINT_PREFIX


def test_paths_lead_through_wrappers() -> None:
    model = wrapped_model()
    inner = bare(model[2].inner[0])
    assert model.get_parameter("2.inner.0.weight") is inner.weight
    assert model.get_buffer("1.norm.running_mean") is model[1].norm.running_mean
    assert bare(model.get_submodule("2.inner.0")) is inner
    assert model[1].get_submodule("norm") is bare(model[1]).norm
    assert model[1].get_submodule("") is model[1]
    model.set_submodule("1.inner.1", nn.Tanh())
    assert isinstance(bare(model[1]).inner[1], nn.Tanh)


def test_a_module_that_is_shared_bare_and_wrapped_is_listed_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": Passing(shared), "c": Passing(Passing(shared))})
    assert [name for name, _ in model.named_modules()] == ["", "a"]
    assert [name for name, _ in model.named_modules(remove_duplicate=False)] == ["", "a", "b", "c"]
    assert len(list(model.parameters())) == 2
    assert len(model.state_dict()) == 6


# Attributes


def test_an_attribute_is_read_from_written_to_and_deleted_from_the_inner_module() -> None:
    inner = Block()
    wrapper = Passing(Passing(inner))
    assert wrapper.flag == 1
    wrapper.flag = 3
    assert inner.flag == 3
    assert wrapper.twice_the_flag == 6
    wrapper.new = "x"
    assert inner.new == "x"
    assert hasattr(wrapper, "new")
    del wrapper.new
    assert not hasattr(inner, "new")
    assert not hasattr(wrapper, "new")
    with pytest.raises(AttributeError, match="'Block' object has no attribute 'new'"):
        _ = wrapper.new
    with pytest.raises(AttributeError):
        del wrapper.new


def test_parameters_buffers_and_modules_assigned_to_a_wrapper_are_registered_in_the_inner_module() -> None:
    inner = Block()
    wrapper = Passing(inner)
    wrapper.gain = nn.Parameter(torch.ones(1))
    wrapper.register_buffer("count", torch.zeros(1), persistent=False)
    wrapper.tail = nn.Linear(4, 1)
    wrapper.add_module("more", nn.ReLU())
    assert inner._parameters["gain"] is wrapper.gain
    assert inner._non_persistent_buffers_set == {"count"}
    assert list(inner._modules) == ["norm", "inner", "tail", "more"]
    with pytest.raises(TypeError, match="cannot assign"):
        wrapper.gain = 3
    del wrapper.gain, wrapper.count, wrapper.tail
    assert "gain" not in inner._parameters
    assert not inner._buffers
    assert list(inner._modules) == ["norm", "inner", "more"]


def test_a_child_that_is_replaced_through_the_wrapper_is_the_one_that_runs() -> None:
    wrapper = Passing(nn.Sequential(nn.Linear(4, 4)))
    wrapper[0] = nn.Flatten()
    x = torch.rand(2, 4)
    assert wrapper(x).equal(x)


def test_dir_lists_the_wrapper_and_the_inner_module() -> None:
    listed = dir(swap_wrapper(Block()))
    assert {"flag", "norm", "twice_the_flag", "policy_fn", _CHECKPOINT_WRAPPED_MODULE} <= set(listed)
    assert listed == sorted(set(listed))


def test_a_subclass_keeps_the_attributes_it_names_and_gives_all_others_to_the_inner_module() -> None:
    class Counted(Passing):
        OWN = Passing.OWN | {"num_calls"}

    inner = Block()
    inner.num_calls = 7
    wrapper = Counted(inner)
    wrapper.num_calls = 0
    wrapper.num_calls += 1
    wrapper.other = 0
    assert (wrapper.num_calls, inner.num_calls, inner.other) == (1, 7, 0)
    del wrapper.num_calls
    assert wrapper.num_calls == 7, "what the wrapper does not have is asked of the inner module"


def test_a_subclass_may_call_the_hooks_that_pytorchs_wrapper_has() -> None:
    wrapper = Passing(nn.Linear(2, 2))
    state = {f"at.{_CHECKPOINT_WRAPPED_MODULE}.weight": 1, "at.bias": 2, "other": 3}
    assert wrapper._post_state_dict_hook(wrapper, state, "at.") == {"at.weight": 1, "at.bias": 2, "other": 3}
    state = {f"{_CHECKPOINT_WRAPPED_MODULE}.weight": 1, "bias": 2}
    wrapper._pre_load_state_dict_hook(wrapper, state, "", {}, True, [], [], [])
    assert state == {"weight": 1, "bias": 2}, "as the wrapper's own names are"


def test_a_replaced_forward_of_the_wrapper_may_call_the_one_before() -> None:
    wrapper = Passing(nn.Linear(4, 4))
    before = wrapper.forward
    wrapper.forward = lambda x: before(x) + 1
    x = torch.rand(2, 4)
    assert wrapper(x).equal(bare(wrapper)(x) + 1)
    del wrapper.forward
    assert wrapper(x).equal(bare(wrapper)(x))


def test_methods_of_the_inner_module_can_be_called() -> None:
    class Counting(nn.Linear):
        def count(self, factor: int = 1) -> int:
            return factor * self.weight.numel()

    assert Passing(Counting(2, 3)).count(factor=2) == 12


def test_a_method_of_pytorch_that_the_inner_class_overrides_is_the_one_called() -> None:
    class Own(nn.Linear):
        def to(self, *args: Any, **kwargs: Any) -> Own:
            self.moved_to = args
            return super().to(*args, **kwargs)

    wrapper = Passing(Own(2, 2))
    assert wrapper.to(torch.float64) is wrapper
    assert wrapper.moved_to == (torch.float64,)


def test_extra_state_is_reached_on_the_wrapper_and_not_claimed_by_its_class() -> None:
    wrapper = Passing(NotedPart(0.5))
    assert wrapper.get_extra_state() == {"note": 0.5}
    wrapper.set_extra_state({"note": 1.0})
    assert bare(wrapper).note == 1.0
    assert Passing.get_extra_state is nn.Module.get_extra_state
    assert Passing.set_extra_state is nn.Module.set_extra_state


# Containers


def test_a_wrapped_sequence_is_indexed_iterated_and_changed_as_before() -> None:
    layers = [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)]
    for container in (nn.Sequential(*layers), nn.ModuleList(layers)):
        wrapper = Passing(container)
        assert (len(wrapper), wrapper[0], wrapper[-1]) == (3, layers[0], layers[2])
        assert list(wrapper) == layers
        assert list(reversed(wrapper)) == layers[::-1]
        assert list(wrapper[1:]) == layers[1:]
        assert layers[1] in wrapper
        assert nn.ReLU() not in wrapper
        del wrapper[0]  # gives the container a new `_modules`
        assert [name for name, _ in wrapper.named_children()] == ["0", "1"]
        assert [name for name, _ in nn.Sequential(wrapper).named_parameters()] == ["0.1.weight", "0.1.bias"]
        wrapper.append(layers[0])
        wrapper[0] = nn.Tanh()
        assert (len(container), container[2]) == (3, layers[0])
        assert isinstance(container[0], nn.Tanh)


def test_a_wrapped_module_dict_is_indexed_by_its_keys() -> None:
    relu = nn.ReLU()
    wrapper = Passing(nn.ModuleDict({"a": relu}))
    assert "a" in wrapper
    assert "b" not in wrapper
    assert wrapper["a"] is relu
    assert (list(wrapper), list(wrapper.items())) == (["a"], [("a", relu)])


def test_a_wrapped_module_without_a_length_is_true_and_says_that_it_has_none() -> None:
    assert Passing(nn.ReLU())
    assert not Passing(nn.Sequential())
    for call in (len, iter, lambda module: module[0]):
        with pytest.raises(TypeError, match="ReLU"):
            call(Passing(nn.ReLU()))


# In place, on the whole tree


@pytest.mark.parametrize("of", ["the root", "the wrapper"])
def test_training_mode_reaches_the_inner_modules(of: str) -> None:
    model = wrapped_model()
    called = model if of == "the root" else model[1]
    assert called.eval() is called
    assert not model[1].training
    assert not any(module.training for module in called.modules())
    assert model[1].train().training
    model[1].training = False
    assert not bare(model[1]).training


@pytest.mark.parametrize(
    "convert",
    [
        nn.Module.double,
        nn.Module.half,
        nn.Module.bfloat16,
        lambda m: m.to(torch.float64),
        lambda m: m.type(torch.float64),
    ],
    ids=["double", "half", "bfloat16", "to", "type"],
)
def test_conversions_reach_every_tensor_and_keep_the_parameters_objects(convert: Callable[..., Any]) -> None:
    expected = {name: tensor.dtype for name, tensor in convert(plain_model()).state_dict().items()}
    for model in (wrapped_model(), Passing(plain_model())):
        before = [id(parameter) for parameter in model.parameters()]
        assert convert(model) is model
        assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == expected
        assert [id(parameter) for parameter in model.parameters()] == before


@pytest.mark.parametrize("of", ["the root", "the wrapper"])
def test_a_function_on_tensors_is_called_once_for_each(of: str) -> None:
    seen: list[int] = []
    model = wrapped_model()
    called = model if of == "the root" else model[1]

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(id(tensor))
        return tensor

    called._apply(note)
    assert Counter(seen) == Counter(id(tensor) for tensor in (*called.parameters(), *called.buffers()))


def test_gradients_memory_and_devices_are_reached() -> None:
    model = wrapped_model()
    model(torch.rand(3, 4)).sum().backward()
    model[1].zero_grad()
    assert all(parameter.grad is None for parameter in bare(model[1]).parameters())
    assert all(parameter.grad is not None for parameter in bare(model[2]).parameters())
    model[1].requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in bare(model[1]).parameters())
    assert model[1].to_empty(device="meta") is model[1]
    assert all(parameter.is_meta for parameter in bare(model[1]).parameters())
    assert model[2].share_memory() is model[2]
    assert all(parameter.is_shared() for parameter in bare(model[2]).parameters())


def test_meta_parameters_are_filled_by_assigning_a_state() -> None:
    state = plain_model().state_dict()
    with torch.device("meta"):
        model = wrapped_model()
    model.load_state_dict(state, assign=True)
    assert same_state(model.state_dict(), state)


# State-dict hooks


@pytest.mark.parametrize("registered", ["before wrapping", "on the wrapper"])
@pytest.mark.parametrize("called_on", ["an ancestor", "the wrapper"])
def test_state_dict_hooks_run_once_and_get_the_inner_module(registered: str, called_on: str) -> None:
    calls: list[tuple[str, nn.Module, str]] = []
    inner = nn.Linear(2, 2)

    def register(module: nn.Module) -> None:
        module.register_state_dict_pre_hook(lambda m, prefix, keep: calls.append(("save", m, prefix)))
        module.register_state_dict_post_hook(lambda m, state, prefix, meta: calls.append(("saved", m, prefix)))
        module.register_load_state_dict_pre_hook(lambda m, state, prefix, *rest: calls.append(("load", m, prefix)))
        module.register_load_state_dict_post_hook(lambda m, keys: calls.append(("loaded", m, "")))

    if registered == "before wrapping":
        register(inner)
    wrapper = Passing(Passing(inner))
    if registered == "on the wrapper":
        register(wrapper)
    model = nn.Sequential(wrapper) if called_on == "an ancestor" else wrapper
    prefix = "0." if called_on == "an ancestor" else ""
    model.load_state_dict(model.state_dict())
    assert calls == [
        ("save", inner, prefix),
        ("saved", inner, prefix),
        ("load", inner, prefix),
        ("loaded", inner, ""),
    ]


def test_a_state_dict_hook_of_the_wrapper_can_be_removed() -> None:
    calls: list[int] = []
    wrapper = Passing(nn.Linear(2, 2))
    handle = wrapper.register_load_state_dict_post_hook(lambda module, keys: calls.append(1))
    handle.remove()
    nn.Sequential(wrapper).load_state_dict(nn.Sequential(nn.Linear(2, 2)).state_dict())
    assert calls == []


def test_a_load_hook_of_the_inner_module_may_forgive_missing_keys() -> None:
    inner = nn.Linear(2, 2)
    inner.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())
    model = nn.Sequential(Passing(inner))
    assert model.load_state_dict({}).missing_keys == []


def test_an_override_of_loading_in_the_inner_class_is_the_one_that_runs() -> None:
    class Renamed(nn.Linear):
        def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")
            super()._load_from_state_dict(state_dict, prefix, *rest)

    model = nn.Sequential(Passing(Renamed(2, 2, bias=False)))
    model.load_state_dict({"0.kernel": torch.ones(2, 2)})
    assert model[0].weight.equal(torch.ones(2, 2))


# Calls


def test_forward_hooks_of_the_wrapper_run_around_those_of_the_inner_module_and_each_once() -> None:
    order: list[str] = []
    inner = nn.Linear(2, 2)
    wrapper = Passing(inner)
    for name, module in (("wrapper", wrapper), ("inner", inner)):
        module.register_forward_pre_hook(lambda m, args, name=name: order.append(f"{name} before"))
        module.register_forward_hook(lambda m, args, result, name=name: order.append(f"{name} after"))
        module.register_full_backward_hook(lambda m, grads, more, name=name: order.append(f"{name} backward"))
    wrapper(torch.rand(1, 2, requires_grad=True)).sum().backward()
    assert order[:4] == ["wrapper before", "inner before", "inner after", "wrapper after"]
    assert sorted(order[4:]) == ["inner backward", "wrapper backward"]
    assert len(inner._forward_hooks) == len(wrapper._forward_hooks) == 1


def test_a_hook_put_on_every_module_of_a_wrapped_model_runs_once_per_module() -> None:
    counts: dict[str, Counter[str]] = {}
    for kind, model in (("plain", plain_model()), ("wrapped", wrapped_model())):
        counts[kind] = Counter()
        for name, module in model.named_modules():
            module.register_forward_hook(lambda m, args, result, name=name, kind=kind: counts[kind].update([name]))
        model(torch.rand(3, 4))
    assert counts["wrapped"] == counts["plain"]
    assert set(counts["plain"].values()) == {1}


def test_a_wrapped_model_computes_and_trains_as_before() -> None:
    x = torch.rand(5, 4)
    results = []
    for model in (plain_model(), wrapped_model(), Passing(wrapped_model())):
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            optimizer.step()
        results.append((parameters_to_vector(model.parameters()), model.state_dict(), model(x)))
    for vector, state, output in results[1:]:
        assert vector.equal(results[0][0])
        assert same_state(state, results[0][1])
        assert output.equal(results[0][2])


def test_keyword_arguments_reach_the_inner_module() -> None:
    wrapper = Passing(Block()).eval()
    x = torch.rand(2, 4)
    assert wrapper(x, scale=2.0).equal(bare(wrapper)(x) * 2)


def test_functional_call_takes_the_unwrapped_names() -> None:
    model = wrapped_model().eval()
    x = torch.rand(3, 4)
    values = {name: torch.zeros_like(parameter) for name, parameter in plain_model().named_parameters()}
    before = model(x)
    assert torch.func.functional_call(model, values, (x,)).equal(torch.zeros(3, 4))
    assert torch.func.functional_call(model[1], {"inner.0.weight": values["1.inner.0.weight"]}, (x,)).shape == (3, 4)
    assert model(x).equal(before)


def test_parametrised_inner_modules_keep_their_names() -> None:
    model = nn.Sequential(Passing(nn.Linear(2, 2)))
    weight = model[0].weight.detach().clone()
    parametrize.register_parametrization(bare(model[0]), "weight", Doubled())
    assert list(model.state_dict()) == ["0.bias", "0.parametrizations.weight.original"]
    assert model[0].weight.equal(weight)
    assert model(torch.rand(1, 2)).shape == (1, 2)


def test_parametrising_a_wrapper_is_refused_and_says_what_to_do() -> None:
    with pytest.raises(HyperParallelError, match="_checkpoint_wrapped_module"):
        parametrize.register_parametrization(Passing(nn.Linear(2, 2)), "weight", Doubled())


def test_a_compiled_model_goes_through_its_wrappers_in_one_graph() -> None:
    program = """
import torch
from torch import nn
from hyper_parallel.platform.torch.activation_checkpoint import ActivationWrapper
class Passing(ActivationWrapper):
    def forward(self, *args):
        return self._checkpoint_wrapped_module(*args)
model = nn.Sequential(nn.Linear(4, 4), Passing(nn.Sequential(nn.ReLU(), Passing(Passing(nn.Linear(4, 4))))))
graphs = []
def count(graph, inputs):
    graphs.append(graph)
    return graph.forward
compiled = torch.compile(model, backend=count, fullgraph=True)
x = torch.rand(3, 4)
result = [torch.equal(compiled(x), model(x)), len(graphs)]
"""
    assert run_fresh(program) == [True, 1]


def test_compile_in_place_compiles_the_inner_module() -> None:
    wrapper = Passing(nn.Linear(2, 2))
    wrapper.compile(backend="eager")
    assert bare(wrapper)._compiled_call_impl is not None
    assert wrapper.__dict__.get("_compiled_call_impl") is None


# Other libraries that change the class of a module


def test_a_wrapper_that_got_another_class_stands_in_the_inner_modules_place() -> None:
    model = wrapped_model()
    before = names_and_objects(model)
    wrapper, inner = model[1], bare(model[1])
    made_as = type(wrapper)
    wrapper.__class__ = type("Sharded", (type("Mixin", (), {}), made_as), {})
    assert dict(model.named_modules())["1"] is wrapper
    assert dict(model.named_modules(remove_duplicate=False))["1"] is wrapper
    assert wrapper in list(model.modules())
    assert inner not in list(model.modules())
    after = names_and_objects(model)
    for listing in ("parameters", "parameters, all", "buffers, all"):
        assert after[listing] == before[listing]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain_model().named_modules()]
    wrapper.__class__ = made_as
    assert names_and_objects(model) == before


def test_fully_shard_finds_the_wrappers_it_was_applied_to() -> None:
    program = """
import copy, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from hyper_parallel.platform.torch.activation_checkpoint import ActivationWrapper
class Passing(ActivationWrapper):
    def forward(self, *args):
        return self._checkpoint_wrapped_module(*args)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)], nn.Linear(4, 4))
plain = copy.deepcopy(model)
for name in ("0", "1"):
    setattr(model, name, Passing(getattr(model, name)))
for layer in model[:2]:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
x = torch.rand(3, 4)
for one in (model, plain):
    one(x).sum().backward()
roots = [fully_shard.state(module)._is_root for module in (model, model[0], model[1])]
same = all(
    name == other and torch.equal(value.grad.full_tensor(), expected.grad)
    for (name, value), (other, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True)
)
result = [roots, same, list(model.state_dict()) == list(plain.state_dict())]
dist.destroy_process_group()
"""
    assert run_fresh(program) == [[True, False, False], True, True]


# Making wrappers


def test_the_base_wrapper_is_abstract_in_its_call_only() -> None:
    wrapper = ActivationWrapper(nn.Linear(2, 2))
    assert list(wrapper.state_dict()) == ["weight", "bias"]
    with pytest.raises(ValueError, match="forward"):
        wrapper(torch.rand(1, 2))


@pytest.mark.parametrize(
    "wrap",
    [Passing, SwapWrapper, swap_wrapper, OffloadWrapper, offload_wrapper, CheckpointWrapper, checkpoint_wrapper],
)
def test_what_is_no_module_and_no_function_is_refused(wrap: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="None"):
        wrap(None)
    with pytest.raises(TypeError, match="3"):
        wrap(3)
    with pytest.raises(TypeError, match="Linear"):
        wrap(nn.Linear)


@pytest.mark.parametrize("policy_fn", [3, "all", [torch.ops.aten.mm]])
def test_a_policy_that_cannot_be_called_is_refused(policy_fn: Any) -> None:
    with pytest.raises(TypeError, match="policy_fn"):
        swap_wrapper(nn.Linear(2, 2), policy_fn)
    wrapper = swap_wrapper(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="policy_fn"):
        wrapper.policy_fn = policy_fn
    assert wrapper.policy_fn is None


def test_a_plain_function_is_wrapped_and_has_no_parameters() -> None:
    def double(x: torch.Tensor, plus: int = 0) -> torch.Tensor:
        return 2 * x + plus

    wrapper = Passing(double)
    assert wrapper(torch.ones(2), plus=1).equal(torch.full((2,), 3.0))
    assert list(wrapper.parameters()) == []
    assert list(nn.Sequential(wrapper).state_dict()) == []
    assert "double" in repr(wrapper)


def test_the_policy_belongs_to_the_wrapper() -> None:
    inner = Block()
    inner.policy_fn = "the model's own"
    wrapper = SwapWrapper(inner, policy_fn=len)
    wrapper.policy_fn = repr
    assert wrapper.policy_fn is repr
    assert inner.policy_fn == "the model's own"
    assert copy.deepcopy(wrapper).policy_fn is repr


def test_a_policy_that_is_a_module_does_not_become_part_of_the_model() -> None:
    wrapper = SwapWrapper(nn.Linear(2, 2), policy_fn=nn.Linear(3, 3))
    assert list(wrapper.state_dict()) == ["weight", "bias"]
    assert len(list(wrapper.modules())) == 1


def test_swapping_wrappers_call_the_inner_module_under_their_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[tuple[Any, Any, str]] = []

    class Recorded:
        count_idx = 1  # it swapped something

        def __init__(self, policy_fn: Any = None, *, module: Any = None) -> None:
            self.what = (policy_fn, module)

        def __enter__(self) -> None:
            blocks.append((*self.what, "in"))

        def __exit__(self, *error: object) -> None:
            blocks.append((*self.what, "out"))

    monkeypatch.setattr("hyper_parallel.platform.torch.wrappers.swap_wrapper.AsyncSaveOnCpu", Recorded)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.rand(1, 2)
    model = nn.Sequential(swap_wrapper(first, policy_fn=len), offload_wrapper(second))
    assert model(x).equal(second(first(x)))
    assert blocks == [(len, first, "in"), (len, first, "out"), (None, second, "in"), (None, second, "out")]


def test_the_text_of_a_model_shows_wrapper_policy_and_inner_module() -> None:
    assert repr(nn.Sequential(SwapWrapper(OffloadWrapper(nn.Linear(2, 2)), policy_fn=len))) == (
        "Sequential(\n"
        "  (0): SwapWrapper(\n"
        "    policy_fn=len\n"
        "    (_checkpoint_wrapped_module): OffloadWrapper(\n"
        "      (_checkpoint_wrapped_module): Linear(in_features=2, out_features=2, bias=True)\n"
        "    )\n"
        "  )\n"
        ")"
    )


# Copies


def test_a_copy_of_a_wrapper_is_a_wrapper_also_where_the_inner_class_copies_itself() -> None:
    class Own(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Own:
            made = Own(self.in_features, self.out_features)
            made.copied = True
            return made

    one = copy.deepcopy(Passing(Own(2, 2)))
    assert isinstance(one, Passing)
    assert one.copied


def test_a_shallow_copy_shares_the_inner_module() -> None:
    wrapper = Passing(nn.Linear(2, 2))
    one = copy.copy(wrapper)
    assert one is not wrapper
    assert bare(one) is bare(wrapper)


def test_the_hooks_of_the_inner_module_survive_a_copy() -> None:
    wrapper = Passing(NotedPart(0.5))
    wrapper.register_state_dict_pre_hook(print)
    one = copy.deepcopy(wrapper)
    assert len(bare(one)._state_dict_pre_hooks) == 1
    assert bare(one)._non_persistent_buffers_set == {"scratch"}


def test_a_wrapper_that_is_not_finished_has_no_attributes_rather_than_endless_ones() -> None:
    empty = Passing.__new__(Passing)
    assert not hasattr(empty, "weight")
    assert not hasattr(empty, _CHECKPOINT_WRAPPED_MODULE)
    assert not hasattr(empty, "training")


# Listing the wrappers


def test_wrappers_are_listed_from_the_outside_in_under_the_unwrapped_names() -> None:
    model = wrapped_model()
    found = list_wrappers(model)
    assert [name for name, _ in found] == ["1", "1.inner", "2.inner.0", "2.inner.0"]
    assert [wrapper for _, wrapper in found] == [
        model[1], model[1].inner, model[2].inner[0], model[2].inner[0]._checkpoint_wrapped_module,
    ]  # fmt: skip
    root = Passing(model)
    assert list_wrappers(root) == [("", root), *found]
    assert list_wrappers(plain_model()) == []


def test_a_shared_wrapper_is_listed_once_and_each_wrapper_of_a_shared_module() -> None:
    inner = nn.Linear(2, 2)
    first, second = Passing(inner), Passing(inner)
    assert list_wrappers(nn.Sequential(first, inner, first, second)) == [("0", first), ("3", second)]


def test_the_neutral_listing_asks_the_framework_of_the_model_and_refuses_what_is_none() -> None:
    program = """
from torch import nn
import torch
from hyper_parallel.core.activation_checkpoint.wrappers import wrappers
from hyper_parallel.platform.torch.activation_checkpoint import swap_wrapper
model = nn.Sequential(nn.Linear(2, 2), swap_wrapper(nn.Linear(2, 2)))
result = [[name, type(wrapper).__name__] for name, wrapper in wrappers(model)]
for wrong in (3, torch.ones(1)):
    try:
        wrappers(wrong)
    except TypeError as error:
        result.append(str(error).splitlines()[0])
"""
    listed, *errors = run_fresh(program, absent=("mindspore",))
    assert listed == ["1", "SwapWrapper"]
    assert len(errors) == 2
    assert all("wrappers" in error for error in errors)


def test_public_names_are_where_other_code_looks_for_them() -> None:
    for module in (activation_checkpoint, activation_swap):
        for name in ("ActivationWrapper", "SwapWrapper", "swap_wrapper", "OffloadWrapper", "offload_wrapper"):
            assert getattr(module, name) is getattr(activation_checkpoint, name)
        assert module._CHECKPOINT_PREFIX == "_checkpoint_wrapped_module."
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = module.no_such_name
