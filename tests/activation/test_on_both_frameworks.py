"""Regions and wrappers: one text for PyTorch and MindSpore, where the behaviour is the same.

What is different on MindSpore is in `test_on_mindspore.py`; what cannot be there is listed in the README of its activation folder.
"""

from __future__ import annotations

import array
import collections
import copy
import functools
import gc
import importlib
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.swap.config import configure_swap
from support.backends import Backend
from support.swapping_state import check_nothing_left, offloaded_bytes

SAVE, SWAP, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE


def part(backend: Backend) -> Any:
    return importlib.import_module(
        f"hyper_parallel.platform.{backend.platform.platform_type.value}.activation_checkpoint"
    )


def answering(answer: Any) -> Callable[..., Any]:
    return lambda ctx, op, *args, **kwargs: answer


def every_third(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (SAVE, SWAP, RECOMPUTE)[len(str(op)) % 3]


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "recompute": lambda p, m: p.checkpoint_wrapper(m),
    "to the end": lambda p, m: p.checkpoint_wrapper(m, early_stop=False),
    "save": lambda p, m: p.checkpoint_wrapper(m, policy_fn=answering(SAVE)),
    "swap by policy": lambda p, m: p.checkpoint_wrapper(m, policy_fn=answering(SWAP)),
    "mix": lambda p, m: p.checkpoint_wrapper(m, policy_fn=every_third, swap_inputs=True),
    "swap": lambda p, m: p.swap_wrapper(m),
    "offload": lambda p, m: p.offload_wrapper(m),
    "recompute what is swapped": lambda p, m: p.checkpoint_wrapper(p.swap_wrapper(m)),
    "swap what is recomputed": lambda p, m: p.swap_wrapper(p.checkpoint_wrapper(m)),
    "recompute twice": lambda p, m: p.checkpoint_wrapper(p.checkpoint_wrapper(m, policy_fn=every_third)),
}


@pytest.fixture(autouse=True)
def on_disk(backend: Backend, tmp_path: Path) -> Iterator[None]:
    if backend.name.endswith("cuda"):
        pytest.skip("this text is about the CPU; test_region_hostile.py and others run on CUDA")
    with configure_swap(disk_dir=tmp_path, min_bytes=1, window_bytes="64KiB", prefetch_bytes="256KiB"):
        yield
        gc.collect()
        check_nothing_left()


@pytest.fixture
def x(backend: Backend) -> Any:
    return backend.tensor(np.arange(6).reshape(2, 3) / 7)


def copied(gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """They share the memory of what later steps write."""
    return {name: each.copy() for name, each in gradients.items()}


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return list(left) == list(right) and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_gives_the_gradients_of_the_plain_model(backend: Backend, x: Any, way: str) -> None:
    model = backend.model()
    expected = copied(backend.train_step(model, x))
    before = offloaded_bytes()
    wrapped = WAYS[way](part(backend), model)
    for _ in range(3):
        assert same(backend.train_step(wrapped, x), expected)
    if way in ("recompute", "to the end", "save"):
        assert offloaded_bytes() == before
    elif way in ("swap by policy", "swap", "offload", "mix"):
        assert offloaded_bytes() > before


@pytest.mark.parametrize("way", WAYS)
def test_keyword_arguments_reach_the_module(backend: Backend, x: Any, way: str) -> None:
    model = backend.model()
    wrapped = WAYS[way](part(backend), model)
    (expected,) = backend.grad_of(lambda y: model(y, factor=3.0), x)
    (found,) = backend.grad_of(lambda y: wrapped(y, factor=3.0), x)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_no_name_changes(backend: Backend, way: str) -> None:
    platform = backend.platform
    model = backend.model()
    parameters, cells = platform.parameters_dict(model), platform.get_cells_and_names(model)
    state = list(platform.get_model_state_dict(model))
    wrapped = WAYS[way](part(backend), model)
    assert list(platform.parameters_dict(wrapped)) == list(parameters)
    assert all(platform.parameters_dict(wrapped)[name] is each for name, each in parameters.items())
    assert [(name, id(each)) for name, each in platform.get_cells_and_names(wrapped)] == [
        (name, id(each)) for name, each in cells
    ]
    assert list(platform.get_model_state_dict(wrapped)) == state


def test_wrappers_inside_a_model_have_no_names_and_are_listed(backend: Backend, x: Any) -> None:
    platform, wrappers = backend.platform, part(backend)
    model = backend.model()
    names = list(platform.parameters_dict(model)), [name for name, _ in platform.get_cells_and_names(model)]
    expected = copied(backend.train_step(model, x))
    wrappers.apply_activation_checkpointing(model, check_fn=lambda each: backend.platform.is_linear_module(each))
    assert names == (list(platform.parameters_dict(model)), [name for name, _ in platform.get_cells_and_names(model)])
    assert [name for name, _ in wrappers.list_wrappers(model)] == ["first", "second.inner"]
    assert same(backend.train_step(model, x), expected)


def test_a_policy_of_sizes_chooses_what_is_wrapped(backend: Backend) -> None:
    wrappers = part(backend)
    model = backend.model()
    seen = []

    def policy(module: Any, recurse: bool, nonwrapped_numel: int) -> bool:
        seen.append((type(module).__name__, recurse, nonwrapped_numel))
        return recurse or nonwrapped_numel == 16

    wrappers.apply_activation_checkpointing(model, auto_wrap_policy=policy)
    assert [name for name, _ in wrappers.list_wrappers(model)] == ["first"]
    assert ("Model", True, 26) in seen
    with pytest.raises(ValueError, match="auto_wrap_policy"):
        wrappers.apply_activation_checkpointing(model, auto_wrap_policy=3)


def test_code_in_the_frameworks_words_gets_the_region_that_it_asks_for(backend: Backend, x: Any) -> None:
    """`use_reentrant=False`, and contexts that the platform has made, ask for nothing that a region is not."""
    platform = backend.platform
    calls: list[int] = []

    def function(y: Any) -> Any:
        calls.append(1)
        return (y * y).exp() * y

    (expected,) = backend.grad_of(function, x)
    selective = functools.partial(platform.create_selective_checkpoint_contexts, answering(SAVE))
    by_keyword = functools.partial(
        type(platform).create_selective_checkpoint_contexts,
        policy_fn_or_list=answering(RECOMPUTE),
        allow_cache_entry_mutation=False,
    )
    for options, num_calls in (
        ({"use_reentrant": False}, 2),
        ({"context_fn": platform.noop_context_fn, "use_reentrant": False}, 2),
        ({"context_fn": selective, "use_reentrant": False}, 1),
        ({"context_fn": by_keyword}, 2),
    ):
        for run in (
            functools.partial(platform.checkpoint, function, **options),
            part(backend).CheckpointWrapper(function, **options),
            part(backend).checkpoint_wrapper(function, **options),
        ):
            calls.clear()
            (found,) = backend.grad_of(lambda y, run=run: run(y), x)
            assert np.array_equal(found, expected)
            assert len(calls) == num_calls, options
    for options in (
        {"use_reentrant": True},
        {"use_reentrant": None},
        {"context_fn": None},
        {"context_fn": lambda: platform.noop_context_fn()},
        {"context_fn": functools.partial(platform.create_selective_checkpoint_contexts, [], True)},
        {"context_fn": selective, "policy_fn": answering(RECOMPUTE)},
    ):
        for call in (platform.checkpoint, part(backend).checkpoint_wrapper):
            with pytest.raises(ValueError, match="no such option.*(use_reentrant|context_fn)(?s:.*)Leave it out"):
                call(function, **options)


def test_how_a_wrapper_recomputes_can_be_assigned(backend: Backend, x: Any) -> None:
    impls = part(backend).CheckpointImpl
    wrapper = part(backend).checkpoint_wrapper(backend.model(), early_stop=False)
    wrapper.checkpoint_impl = impls.NO_REENTRANT
    (expected,) = backend.grad_of(wrapper, x)
    if backend.name.startswith("torch"):
        wrapper.checkpoint_impl = impls.REENTRANT
        assert wrapper.checkpoint_impl is impls.REENTRANT
        assert np.array_equal(backend.grad_of(wrapper, x)[0], expected)
    else:
        with pytest.raises(ValueError, match="NO_REENTRANT"):
            wrapper.checkpoint_impl = impls.REENTRANT
    with pytest.raises(TypeError, match="checkpoint_impl"):
        wrapper.checkpoint_impl = "REENTRANT"
    with pytest.raises(ValueError, match="policy_fn"):
        part(backend).checkpoint_wrapper(backend.model(), policy_fn=answering(SAVE)).checkpoint_impl = impls.REENTRANT


def test_each_wrapper_of_a_users_class_has_what_the_class_defines_for_itself(backend: Backend, x: Any) -> None:
    base = part(backend).ActivationWrapper
    call = "construct" if hasattr(base, "construct") else "forward"

    class Counted(base):  # type: ignore[misc, valid-type]
        num_calls = 0

        def __init__(self, module: Any, factor: float) -> None:
            super().__init__(mod=module)
            self.factor = factor
            self.extra = backend.linear(2, 2)
            self.again = lambda: self.factor

    def run(self: Any, y: Any) -> Any:
        self.num_calls += 1
        return getattr(self, base.INNER)(y) * self.factor

    setattr(Counted, call, run)
    model = backend.model()
    wrapper = Counted(Counted(model, 2.0), 5.0)
    (found,) = backend.grad_of(wrapper, x)
    assert np.array_equal(found, backend.grad_of(lambda y: model(y) * 2.0 * 5.0, x)[0])
    assert (wrapper.factor, getattr(wrapper, base.INNER).factor, wrapper.num_calls) == (5.0, 2.0, 1)
    assert not {"factor", "again", "num_calls"} & {*vars(model)}
    assert wrapper.extra is model.extra, "what is trained belongs to the inner module"
    assert any("extra" in name for name in backend.platform.parameters_dict(wrapper))
    wrapper.title = "new"
    assert model.title == "new", "any other name is the inner module's"
    del wrapper.factor
    assert copy.deepcopy(wrapper).factor == 2.0
    with pytest.raises(TypeError, match="both"):
        base.__init__(wrapper, model, mod=model)
    with pytest.raises(ValueError, match="does not say how"):
        getattr(base, call)(wrapper, x)


@pytest.mark.parametrize("wrap", ["checkpoint_wrapper", "swap_wrapper", "offload_wrapper"])
def test_a_plain_function_can_be_wrapped(backend: Backend, x: Any, wrap: str) -> None:
    wrapped = getattr(part(backend), wrap)(lambda y: (y * y).exp())
    (found,) = backend.grad_of(wrapped, x)
    assert np.array_equal(found, backend.grad_of(lambda y: (y * y).exp(), x)[0])
    assert list(backend.platform.parameters_dict(wrapped)) == []


@pytest.mark.parametrize("way", WAYS)
def test_attributes_are_those_of_the_inner_module(backend: Backend, way: str) -> None:
    model = backend.model()
    wrapped = WAYS[way](part(backend), model)
    wrapped.note = "kept inside"
    assert model.note == "kept inside"
    assert wrapped.first is model.first
    del wrapped.note
    assert not hasattr(model, "note")
    assert not hasattr(wrapped, "no_such_thing")


@pytest.mark.parametrize("way", ["recompute", "mix", "swap", "recompute twice"])
def test_a_copy_is_a_wrapper_of_its_own(backend: Backend, x: Any, way: str) -> None:
    wrapped = WAYS[way](part(backend), backend.model())
    expected = copied(backend.train_step(wrapped, x))
    for parameter in backend.platform.parameters_dict(wrapped).values():
        backend.set_grad(parameter, None)
    other = copy.deepcopy(wrapped)
    assert type(other) is type(wrapped)
    assert same(backend.train_step(other, x), expected)
    first, second = backend.platform.parameters_dict(wrapped), backend.platform.parameters_dict(other)
    assert list(first) == list(second)
    assert not any(first[name] is second[name] for name in first)


def test_a_wrapped_sequence_is_indexed_as_before(backend: Backend) -> None:
    class Two:
        def __call__(self, y: Any) -> Any:
            return y

    layers = backend.sequence(backend.linear(3, 3), backend.linear(3, 3))
    wrapped = part(backend).checkpoint_wrapper(layers)
    assert wrapped[1] is layers[1]
    assert len(wrapped) == 2
    assert [id(each) for each in wrapped] == [id(each) for each in layers]
    assert bool(part(backend).checkpoint_wrapper(Two()))


def test_the_policy_is_told_where_an_op_ran(backend: Backend, x: Any) -> None:
    asked: list[tuple[bool, str, int]] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append((ctx.is_recompute, ctx.module, ctx.occurrence))
        return RECOMPUTE

    backend.train_step(part(backend).checkpoint_wrapper(backend.model(), policy_fn=policy), x)
    modules = {module for _, module, _ in asked}
    assert {"first", "second.inner"} <= modules
    assert {again for again, _, _ in asked} == {False, True}
    assert (False, "first", 0) in asked


@pytest.mark.parametrize("answer", [None, 7, "save"])
def test_an_answer_that_means_nothing_is_an_error_that_shows_it(backend: Backend, x: Any, answer: Any) -> None:
    wrapped = part(backend).checkpoint_wrapper(backend.model(), policy_fn=answering(answer))
    with pytest.raises(ValueError, match="means nothing"):
        backend.train_step(wrapped, x)


def test_true_saves_and_false_recomputes(backend: Backend, x: Any) -> None:
    for answer, num_calls in ((True, 1), (False, 2)):
        calls: list[int] = []

        def function(y: Any, calls: list[int] = calls) -> Any:
            calls.append(1)
            return (y * y).exp() * y

        backend.grad_of(functools.partial(backend.platform.checkpoint, function, policy_fn=answering(answer)), x)
        assert len(calls) == num_calls


def test_a_policy_that_changes_its_mind_is_an_error(backend: Backend, x: Any) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return SAVE if ctx.is_recompute else RECOMPUTE

    with pytest.raises(RuntimeError, match="changed its mind"):
        backend.train_step(part(backend).checkpoint_wrapper(backend.model(), policy_fn=policy), x)


def test_a_function_that_does_something_else_the_second_time_is_an_error(backend: Backend, x: Any) -> None:
    calls: list[int] = []

    def function(y: Any) -> Any:
        calls.append(1)
        return ((y * y).exp() * y) if len(calls) == 1 else y + 1

    with pytest.raises(RuntimeError, match="did not do what forward did"):
        backend.grad_of(lambda y: backend.platform.checkpoint(function, y), x)


def test_other_values_are_found_by_the_check(backend: Backend, x: Any) -> None:
    calls: list[int] = []

    def function(y: Any) -> Any:
        calls.append(1)
        return (y * backend.tensor(np.full((2, 3), len(calls)))).exp().sin()

    # What comes from outside is compared in any case.
    message = "other values than forward|another tensor"
    with configure_swap(check="values"), pytest.raises(RuntimeError, match=message):
        backend.grad_of(lambda y: backend.platform.checkpoint(function, y), x)
    with configure_swap(check="values"):
        (found,) = backend.grad_of(lambda y: backend.platform.checkpoint(lambda z: (z * z).exp().sin(), y), x)
    assert np.array_equal(found, backend.grad_of(lambda z: (z * z).exp().sin(), x)[0])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"use_reentrant": True}, ValueError),
        ({"context_fn": None}, ValueError),
        ({"no_such_option": 1}, TypeError),
        ({"early_stop": 1}, ValueError),
        ({"determinism_check": "sometimes"}, ValueError),
        ({"policy_fn": 3}, TypeError),
        ({"swap_inputs": "yes"}, TypeError),
        ({"checkpoint_impl": "REENTRANT"}, TypeError),
        ({"checkpoint_fn": 3}, TypeError),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_where_it_is_given(backend: Backend, options: Any, error: Any) -> None:
    with pytest.raises(error):
        part(backend).checkpoint_wrapper(backend.model(), **options)


def test_reentrant_recomputation_takes_no_policy(backend: Backend) -> None:
    wrappers = part(backend)
    for options in ({"policy_fn": every_third}, {"swap_inputs": True}):
        with pytest.raises(ValueError, match="Reentrant"):
            wrappers.checkpoint_wrapper(backend.model(), wrappers.CheckpointImpl.REENTRANT, **options)


@pytest.mark.parametrize("wrap", ["checkpoint_wrapper", "swap_wrapper", "offload_wrapper"])
@pytest.mark.parametrize("value", [None, 3, int])
def test_what_is_no_module_is_refused(backend: Backend, wrap: str, value: Any) -> None:
    if value is int:
        value = type(backend.model())
    with pytest.raises((TypeError, ValueError), match=wrap.split("_")[0].capitalize()):
        getattr(part(backend), wrap)(value)


def test_random_numbers_are_the_same_the_second_time(backend: Backend) -> None:
    x = backend.tensor(np.ones((16, 16)))
    made: list[Any] = []

    def function(y: Any) -> Any:
        made.append(backend.dropout(y * 1.0, 0.5))
        return made[-1] * made[-1]

    (found,) = backend.grad_of(lambda y: backend.platform.checkpoint(function, y), x)
    first = backend.numbers(made[0])
    assert 0 < np.count_nonzero(first) < first.size
    assert np.array_equal(found != 0, first != 0)


def test_generators_are_after_the_step_where_the_plain_step_leaves_them(backend: Backend) -> None:
    x = backend.tensor(np.ones((4, 4)))

    def step(run: Callable[..., Any]) -> np.ndarray:
        backend.platform.manual_seed(5)
        np.random.seed(5)
        backend.grad_of(lambda y: run(lambda z: backend.dropout(z * 2, 0.5) * np.random.rand(), y), x)
        return np.concatenate([backend.numbers(backend.rand((4,))), np.random.rand(2)])

    assert np.array_equal(step(lambda function, y: function(y)), step(backend.platform.checkpoint))


@pytest.mark.parametrize("way", ["recompute", "mix", "swap", "recompute twice"])
def test_after_an_exception_in_forward_the_next_step_is_right(backend: Backend, x: Any, way: str) -> None:
    model = backend.model()
    expected = copied(backend.train_step(model, x))
    fails = [True]

    def function(y: Any) -> Any:
        result = model(y)
        if fails[0]:
            raise OSError("in the middle")
        return result

    wrapped = WAYS[way](part(backend), function)
    with pytest.raises(OSError, match="in the middle"):
        backend.grad_of(wrapped, x)
    fails[0] = False
    (found,) = backend.grad_of(wrapped, x)
    assert np.array_equal(found, backend.grad_of(model, x)[0])
    assert same(backend.train_step(WAYS[way](part(backend), model), x), expected)


def test_after_an_exception_in_the_second_run_the_next_step_is_right(backend: Backend, x: Any) -> None:
    calls: list[int] = []

    def function(y: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("the second time")
        return (y * y).exp() * y

    with pytest.raises(OSError, match="the second time"):
        backend.grad_of(lambda y: backend.platform.checkpoint(function, y), x)
    (found,) = backend.grad_of(lambda y: backend.platform.checkpoint(function, y), x)
    assert np.array_equal(found, backend.grad_of(lambda y: (y * y).exp() * y, x)[0])


def test_without_gradients_a_region_is_a_plain_call(backend: Backend, x: Any) -> None:
    calls: list[int] = []

    def policy(*_args: Any, **_kwargs: Any) -> bool:
        calls.append(1)
        return True

    with backend.platform.no_grad():
        result = backend.platform.checkpoint(lambda y: y.exp(), x, policy_fn=policy)
    assert np.array_equal(backend.numbers(result), backend.numbers(x.exp()))
    assert calls == []


def test_what_comes_after_the_last_residual_is_not_run_again(backend: Backend, x: Any) -> None:
    met: list[str] = []

    def function(y: Any) -> Any:
        result = (y * y).exp()
        met.append("needed")
        result = result + 1
        met.append("not needed")
        return result + 2

    for early_stop in (True, False):
        for _ in range(2):  # on PyTorch the first goes to the end, to see whether anything there writes
            met.clear()
            backend.grad_of(functools.partial(backend.platform.checkpoint, function, early_stop=early_stop), x)
        assert ("not needed" in met[2:]) is not early_stop


def test_containers_and_caches_are_what_they_were(backend: Backend, x: Any) -> None:
    class Cache:
        def __init__(self) -> None:
            self.items: list[Any] = []

    def function(pair: Any, cache: Any) -> Any:
        cache.items.append(pair["a"] * 2)
        return (cache.items[0] * pair["b"][0]).exp() * len(cache.items)

    cache = Cache()
    (found,) = backend.grad_of(lambda y: backend.platform.checkpoint(function, {"a": y, "b": [y]}, cache), x)
    (expected,) = backend.grad_of(lambda y: function({"a": y, "b": [y]}, Cache()), x)
    assert np.array_equal(found, expected)
    assert len(cache.items) == 1


def moving(backend: Backend) -> Any:
    """A model that reads and moves an attribute of each kind in every forward."""
    kind = type(backend.model())
    name = "construct" if hasattr(kind, "construct") else "forward"

    class Moving(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.count, self.word, self.history = 0, "", [1.0]
            self.table: dict[str, Any] = {"step": 0, "inner": {"seen": [1.0]}}
            self.met: set[int] = set()
            self.last = collections.deque([1.0], maxlen=3)
            self.schedule = types.SimpleNamespace(factor=1.0)
            self.python, self.numpy = random.Random(1), np.random.default_rng(1)
            self.array, self.tallies = np.zeros(3), array.array("d", [0.0])

        def state(self) -> list[Any]:
            names = ("count", "word", "history", "table", "met", "last", "schedule", "array", "tallies")
            numbers = self.python.getstate(), self.numpy.bit_generator.state
            return [repr([getattr(self, name) for name in names]), self.second.count, *numbers]

    def run(self: Any, x: Any) -> Any:
        self.count += 1
        self.second.count = getattr(self.second, "count", 0) + 1
        self.word += "a"
        self.history.append(self.count * 2.0)
        self.table["step"] += 1
        self.table["inner"]["seen"].append(0.5)
        self.met.add(self.count)
        self.last.append(float(self.count))
        self.schedule.factor *= 1.5
        self.array += 1
        self.tallies[0] += 1
        self.tallies.append(0.5)
        x = (x * self.schedule.factor).tanh() / self.count**0.5 * sum(self.history) * len(self.word) * self.second.count
        x = x * self.table["step"] * sum(self.table["inner"]["seen"]) * len(self.met) * sum(self.last)
        x = x * (float(self.array[1]) * sum(self.tallies) * self.python.random() * float(self.numpy.random()))
        x = x.sin() if self.count % 2 else x.cos()
        return getattr(kind, name)(self, x.tanh())

    setattr(Moving, name, run)
    return Moving()


@pytest.mark.parametrize("way", ["recompute", "to the end", "mix", "recompute what is swapped", "recompute twice"])
def test_what_a_module_counts_collects_and_draws_is_that_of_one_run(backend: Backend, x: Any, way: str) -> None:
    plain = moving(backend)
    model = copy.deepcopy(plain)
    wrapped = WAYS[way](part(backend), model)
    for _ in range(4):
        expected = copied(backend.train_step(plain, x))
        assert same(backend.train_step(wrapped, x), expected)
        assert model.state() == plain.state()
    assert model.count == 4


def test_what_a_module_inside_of_wrappers_counts_is_that_of_one_run(backend: Backend, x: Any) -> None:
    plain = backend.sequence(moving(backend), backend.linear(2, 2))
    model = copy.deepcopy(plain)
    inner = model[0]
    wrappers = part(backend)
    model[0] = wrappers.swap_wrapper(wrappers.checkpoint_wrapper(inner))
    wrapped = wrappers.checkpoint_wrapper(model)
    for _ in range(3):
        expected = copied(backend.train_step(plain, x))
        assert same(backend.train_step(wrapped, x), expected)
    assert inner.state() == plain[0].state()


@pytest.mark.parametrize("way", ["recompute", "to the end"])
def test_what_is_set_between_forward_and_backward_is_for_the_next_forward(backend: Backend, x: Any, way: str) -> None:
    plain = moving(backend)
    model = copy.deepcopy(plain)
    found = []
    for each, call in ((plain, plain), (model, WAYS[way](part(backend), model))):
        for step in range(3):
            each.history[:] = [step + 1.0]
            each.table = {"step": step, "inner": {"seen": [2.0]}}
            with backend.recording():
                y = backend.trainable(x)
                loss = call(y * 1.0).sum()
                each.history[0] = -1.0
                each.history.append(7.0)
                each.table, each.count = {}, 10 * step
                backend.backward(loss)
            found.append(backend.get_grad(y).copy())
            assert (each.history[0], each.history[-1], each.table, each.count) == (-1.0, 7.0, {}, 10 * step)
    assert all(map(np.array_equal, found[:3], found[3:]))
    assert model.state() == plain.state()


def test_names_of_ops_may_be_listed(backend: Backend, x: Any) -> None:
    name = "Exp" if backend.name.startswith("mindspore") else "aten.exp"
    asked = []

    def function(y: Any) -> Any:
        asked.append(1)
        return (y * 2).exp()

    backend.grad_of(lambda y: backend.platform.checkpoint(function, y, policy_fn=[name]), x)
    assert len(asked) == 1, "the result of exp is all that backward needs"
