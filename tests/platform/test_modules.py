"""Modules, hooks, state and micro batches: one text, every framework."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.backends import Backend

covers = pytest.mark.covers


@covers("get_cell_construct")
def test_the_construct_of_a_module_computes_what_the_module_does(backend: Backend, platform: Any) -> None:
    model, x = backend.model(), backend.tensor(np.ones((2, 3)))
    construct = platform.get_cell_construct(model)
    assert np.array_equal(backend.numbers(construct(x)), backend.numbers(model(x)))
    assert construct.__name__ in ("forward", "construct")


@covers("get_cells_and_names")
def test_modules_come_by_name_with_the_root_first(backend: Backend, platform: Any) -> None:
    model = backend.model()
    pairs = platform.get_cells_and_names(model)
    assert isinstance(pairs, list)
    assert [name for name, _ in pairs] == ["", "first", "second", "second.inner"]
    assert pairs[0][1] is model
    assert pairs[3][1] is model.second.inner


@covers("parameters_dict")
def test_parameters_come_by_path_in_order(backend: Backend, platform: Any) -> None:
    model = backend.model()
    named = platform.parameters_dict(model)
    assert list(named) == ["first.weight", "first.bias", "second.inner.weight", "second.inner.bias"]
    assert named["second.inner.weight"] is model.second.inner.weight


@covers("parameters_dict")
def test_a_tied_parameter_is_listed_once(backend: Backend, platform: Any) -> None:
    assert list(platform.parameters_dict(backend.tied_model())) == ["a.weight", "a.bias", "b.bias"]


@covers("search_parameter_by_name")
def test_a_parameter_is_found_by_its_exact_path_only(backend: Backend, platform: Any) -> None:
    model = backend.model()
    owner, local_name, parameter = platform.search_parameter_by_name(cell=model, param_name="second.inner.weight")
    assert owner is model.second.inner
    assert local_name == "weight"
    assert parameter is model.second.inner.weight
    for absent in ("inner.weight", "second.inner", "weight", "", "second..weight", "scale", "second.inner.weight.x"):
        assert platform.search_parameter_by_name(model, absent) is None


@covers("search_parameter_by_name")
def test_a_tied_parameter_is_found_under_both_names(backend: Backend, platform: Any) -> None:
    model = backend.tied_model()
    assert (
        platform.search_parameter_by_name(model, "a.weight")[2]
        is platform.search_parameter_by_name(model, "b.weight")[2]
    )
    assert platform.search_parameter_by_name(model, "b.weight")[0] is model.b


@covers("update_parameter_by_name")
@pytest.mark.parametrize("form", ["found", "by name"])
def test_a_replaced_parameter_is_the_new_one_everywhere(backend: Backend, platform: Any, form: str) -> None:
    model = backend.model()
    new = platform.new_zero_parameter((2, 4), "float32", True, None)
    found = platform.search_parameter_by_name(model, "second.inner.weight")
    result = found if form == "found" else ("second.inner.weight", found[2])
    assert platform.update_parameter_by_name(model, result, new) is True
    assert model.second.inner.weight is new
    assert platform.parameters_dict(model)["second.inner.weight"] is new
    assert platform.search_parameter_by_name(model, "second.inner.weight")[2] is new
    assert list(platform.parameters_dict(model)) == [
        "first.weight",
        "first.bias",
        "second.inner.weight",
        "second.inner.bias",
    ]
    out = backend.numbers(model(backend.tensor(np.ones((1, 3)))))
    assert np.allclose(out, backend.numbers(model.second.inner.bias)), "the new zeros are what is computed with"


@covers("update_parameter_by_name")
def test_replacing_a_tied_parameter_keeps_it_tied(backend: Backend, platform: Any) -> None:
    model = backend.tied_model()
    new = platform.new_zero_parameter((3, 3), "float32", True, None)
    assert platform.update_parameter_by_name(model, platform.search_parameter_by_name(model, "b.weight"), new)
    assert model.a.weight is new
    assert model.b.weight is new


@covers("update_parameter_by_name")
def test_a_name_that_is_not_in_the_module_replaces_nothing(backend: Backend, platform: Any) -> None:
    model, other = backend.model(), backend.model()
    new = platform.new_zero_parameter((2, 4), "float32", True, None)
    assert platform.update_parameter_by_name(model, ("second.weight", None), new) is False
    foreign = platform.search_parameter_by_name(other, "second.inner.weight")
    assert platform.update_parameter_by_name(model, foreign, new) is False
    assert other.second.inner.weight is foreign[2]


@covers("update_parameter_by_name")
def test_replacing_with_or_by_the_wrong_thing_is_an_error(backend: Backend, platform: Any) -> None:
    model = backend.model()
    with pytest.raises(TypeError, match="search_parameter_by_name"):
        platform.update_parameter_by_name(model, None, platform.new_zero_parameter((2, 4), "float32", True, None))
    with pytest.raises(TypeError, match="arameter"):
        platform.update_parameter_by_name(model, platform.search_parameter_by_name(model, "first.weight"), 3)


@covers("get_cell_construct", "get_cells_and_names", "parameters_dict", "search_parameter_by_name")
@pytest.mark.parametrize("wrong", [None, "model"])
def test_no_module_is_an_error_that_says_so(platform: Any, wrong: Any) -> None:
    calls = (platform.get_cell_construct, platform.get_cells_and_names, platform.parameters_dict,
             lambda cell: platform.search_parameter_by_name(cell, "x"), platform.get_model_state_dict,
             lambda cell: platform.init_parameters(cell, 0))  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError if wrong is None else TypeError, match="(?s)xpected.*got"):
            call(wrong)


@covers("is_linear_module", "is_embedding_module")
def test_linear_and_embedding_layers_are_told_apart(backend: Backend, platform: Any) -> None:
    linear, embedding, model = backend.linear(2, 2), backend.embedding(4, 2), backend.model()

    class Mine(type(linear)):
        pass

    assert platform.is_linear_module(linear)
    assert platform.is_linear_module(Mine(2, 2))
    assert not platform.is_linear_module(embedding)
    assert platform.is_embedding_module(embedding)
    assert not platform.is_embedding_module(linear)
    for other in (model, None, 3):
        assert not platform.is_linear_module(other)
        assert not platform.is_embedding_module(other)


@covers("register_forward_pre_hook")
def test_a_forward_pre_hook_sees_and_changes_the_arguments_until_removed(backend: Backend, platform: Any) -> None:
    model, x = backend.model(), backend.tensor(np.ones((2, 3)))
    plain = backend.numbers(model(x))
    handle = platform.register_forward_pre_hook(model, lambda module, args: (args[0] * 0,))
    changed = backend.numbers(model(x))
    handle.remove()
    assert not np.array_equal(changed, plain)
    assert np.array_equal(changed, backend.numbers(model(x * 0)))
    assert np.array_equal(backend.numbers(model(x)), plain)


@covers("register_forward_pre_hook")
def test_forward_pre_hooks_run_in_order_and_prepended_ones_first(backend: Backend, platform: Any) -> None:
    model, seen = backend.model(), []
    handles = [
        platform.register_forward_pre_hook(model, lambda *_: seen.append("a")),
        platform.register_forward_pre_hook(model, lambda *_: seen.append("b")),
        platform.register_forward_pre_hook(model, hook=lambda *_: seen.append("first"), prepend=True),
    ]
    model(backend.tensor(np.ones((1, 3))))
    assert seen == ["first", "a", "b"]
    for handle in handles:
        handle.remove()


@covers("register_forward_pre_hook")
def test_a_forward_pre_hook_with_kwargs_sees_and_changes_them(backend: Backend, platform: Any) -> None:
    model, x = backend.model(), backend.tensor(np.ones((1, 3)))
    plain = backend.numbers(model(x))

    def triple(module: Any, args: tuple, kwargs: dict) -> tuple:
        assert kwargs == {"factor": 2.0}
        return args, {"factor": 3.0}

    handle = platform.register_forward_pre_hook(model, triple, with_kwargs=True)
    assert np.allclose(backend.numbers(model(x, factor=2.0)), plain * 3)
    handle.remove()


@covers("register_full_backward_hook")
def test_a_backward_hook_sees_both_gradients_and_may_replace_the_inner_one(backend: Backend, platform: Any) -> None:
    model, x, seen = backend.model(), backend.tensor(np.ones((2, 3))), []

    def halve(module: Any, grad_input: tuple, grad_output: tuple) -> tuple:
        seen.append((module, len(grad_input), tuple(grad_output[0].shape)))
        return tuple(None if grad is None else grad * 0.5 for grad in grad_input)

    plain = backend.train_step(model, x)
    handle = platform.register_full_backward_hook(model.second, halve)
    halved = backend.train_step(model, x)
    handle.remove()
    after = backend.train_step(model, x)
    assert seen == [(model.second, 1, (2, 2))]
    assert np.allclose(halved["first.weight"], plain["first.weight"] * 0.5)
    assert np.array_equal(halved["second.inner.weight"], plain["second.inner.weight"])
    assert np.array_equal(after["first.weight"], plain["first.weight"])


@covers("register_full_backward_pre_hook")
def test_a_backward_pre_hook_sees_and_changes_the_incoming_gradient(backend: Backend, platform: Any) -> None:
    model, x, seen = backend.model(), backend.tensor(np.ones((2, 3))), []

    def double(module: Any, grad_output: tuple) -> tuple:
        seen.append(module)
        return tuple(grad * 2 for grad in grad_output)

    plain = backend.train_step(model, x)
    handle = platform.register_full_backward_pre_hook(model.second, double)
    doubled = backend.train_step(model, x)
    handle.remove()
    assert seen == [model.second]
    assert np.allclose(doubled["first.weight"], plain["first.weight"] * 2)
    assert np.allclose(doubled["second.inner.weight"], plain["second.inner.weight"] * 2)


@covers("register_full_backward_hook", "register_full_backward_pre_hook")
def test_backward_hooks_run_in_order_and_prepended_ones_first(backend: Backend, platform: Any) -> None:
    model, x, seen = backend.model(), backend.tensor(np.ones((1, 3))), []

    def note(word: str) -> Any:
        return lambda *_: seen.append(word) or None

    handles = [
        platform.register_full_backward_hook(model.second, note("a")),
        platform.register_full_backward_hook(model.second, note("b")),
        platform.register_full_backward_hook(model.second, hook=note("first"), prepend=True),
        platform.register_full_backward_pre_hook(model.second, note("pre-a")),
        platform.register_full_backward_pre_hook(model.second, note("pre-first"), prepend=True),
    ]
    backend.train_step(model, x)
    assert seen == ["pre-first", "pre-a", "first", "a", "b"]
    handles[2].remove()
    seen.clear()
    backend.train_step(model, x)
    assert seen == ["pre-first", "pre-a", "a", "b"]
    for handle in (*handles[:2], *handles[3:]):
        handle.remove()
    seen.clear()
    backend.train_step(model, x)
    assert seen == []


@covers("micro_batch")
def test_arguments_are_split_along_dim_zero_by_default(backend: Backend, platform: Any) -> None:
    x, y = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(4, dtype=np.float32)
    args, kwargs = platform.micro_batch(2)((backend.tensor(x), 5), {"y": backend.tensor(y), "flag": True})
    assert [backend.numbers(a[0]).tolist() for a in args] == [x[:2].tolist(), x[2:].tolist()]
    assert [a[1] for a in args] == [5, 5]
    assert [backend.numbers(k["y"]).tolist() for k in kwargs] == [[0, 1], [2, 3]]
    assert [k["flag"] for k in kwargs] == [True, True]


@covers("micro_batch")
def test_dims_are_chosen_per_argument_and_none_or_minus_one_is_not_split(backend: Backend, platform: Any) -> None:
    x = backend.tensor(np.arange(4, dtype=np.float32).reshape(1, 4))
    split = platform.micro_batch(micro_batch_num=2, args_batch_dim=[1, None, -1], kwargs_batch_dim={"z": None})
    args, kwargs = split([x, x, x], {"z": x, "w": backend.tensor([1.0, 2.0])})
    assert [backend.numbers(a[0]).tolist() for a in args] == [[[0, 1]], [[2, 3]]]
    assert all(a[1] is x and a[2] is x for a in args)
    assert all(k["z"] is x for k in kwargs)
    assert [backend.numbers(k["w"]).tolist() for k in kwargs] == [[1.0], [2.0]]


@covers("micro_batch")
def test_a_decorated_function_runs_once_per_micro_batch(backend: Backend, platform: Any) -> None:
    @platform.micro_batch(3)
    def total(batch: dict, factor: float) -> float:
        return float(backend.numbers(batch["x"]).sum() * factor)

    assert total({"x": backend.tensor([1.0, 2.0, 3.0])}, factor=2.0) == [2.0, 4.0, 6.0]
    assert total.__name__ == "total"


@covers("micro_batch")
def test_gradients_flow_into_the_whole_batch(backend: Backend, platform: Any) -> None:
    def loss(x: Any) -> Any:
        args, _ = platform.micro_batch(2)([x], {})
        return args[0][0] * 2 + args[1][0] * 3

    (grad,) = backend.grad_of(loss, backend.tensor(np.ones((4,))))
    assert grad.tolist() == [2, 2, 3, 3]


@covers("micro_batch")
def test_a_batch_that_cannot_be_split_evenly_names_both_numbers(backend: Backend, platform: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)multiple of 4.*got 6"):
        platform.micro_batch(4)([backend.tensor(np.ones((6, 2)))], {})


@covers("micro_batch")
def test_wrong_micro_batch_arguments_say_what_was_expected(backend: Backend, platform: Any) -> None:
    x = backend.tensor(np.ones((4,)))
    for wrong in (0, -1, 1.5, None, True):
        with pytest.raises(ValueError, match="at least 1"):
            platform.micro_batch(wrong)
    with pytest.raises(TypeError, match="list or None"):
        platform.micro_batch(2, args_batch_dim=0)
    with pytest.raises(TypeError, match="dict or None"):
        platform.micro_batch(2, kwargs_batch_dim=[0])
    with pytest.raises(ValueError, match="not split"):
        platform.micro_batch(2, [-2])
    with pytest.raises(ValueError, match="2 arguments"):
        platform.micro_batch(2, [0, 0])([x], {})
    with pytest.raises(ValueError, match="missing"):
        platform.micro_batch(2, None, {"missing": 0})([x], {})
    with pytest.raises(ValueError, match="batch dim"):
        platform.micro_batch(2, [1])([x], {})
    with pytest.raises(TypeError, match="list"):
        platform.micro_batch(2)(x, {})
    with pytest.raises(TypeError, match="dict"):
        platform.micro_batch(2)([x], [x])


@covers("get_model_state_dict")
def test_the_state_has_parameters_and_buffers_by_name(backend: Backend, platform: Any) -> None:
    model = backend.model()
    state = platform.get_model_state_dict(model)
    assert sorted(state) == ["first.bias", "first.weight", "scale", "second.inner.bias", "second.inner.weight"]
    assert np.array_equal(backend.numbers(state["first.weight"]), backend.numbers(model.first.weight))
    options = SimpleNamespace(full_state_dict=True, cpu_offload=True, rank0_only=True)
    offloaded = platform.get_model_state_dict(model, options=options)
    assert sorted(offloaded) == sorted(state)
    assert all(str(value.device).lower().startswith("cpu") for value in offloaded.values())
