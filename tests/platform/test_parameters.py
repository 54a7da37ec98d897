"""Parameters: local part, data, and where they are created. One text, every framework."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hyper_parallel.platform import selection
from support.backends import Backend

covers = pytest.mark.covers


@covers("get_param_local_shape", "get_param_local_data", "get_param_type_size")
def test_a_plain_parameter_is_its_own_local_part(backend: Backend, platform: Any) -> None:
    parameter = platform.new_zero_parameter((2, 3), "float16", True, None)
    assert tuple(platform.get_param_local_shape(parameter)) == (2, 3)
    assert platform.get_param_local_data(parameter) is parameter
    assert platform.get_param_type_size(parameter) == 2


@covers("get_param_local_shape", "get_param_local_data", "get_param_type_size", "update_param_data", "load_into_param")
def test_something_else_than_a_parameter_is_a_type_error(backend: Backend, platform: Any) -> None:
    parameter = platform.new_zero_parameter((2,), "float32", True, None)
    for call in (platform.get_param_local_shape, platform.get_param_local_data, platform.get_param_type_size,
                 lambda p: platform.update_param_data(p, parameter), lambda p: platform.update_param_data(parameter, p),
                 lambda p: platform.load_into_param(p, parameter), lambda p: platform.load_into_param(parameter, p)):  # fmt: skip
        with pytest.raises(TypeError, match="(?s)xpected.*got"):
            call([1.0, 2.0])


@covers("update_param_data")
def test_updating_data_binds_the_same_parameter_to_other_values_and_shape(backend: Backend, platform: Any) -> None:
    model = backend.model()
    parameter = model.first.bias
    platform.update_param_data(parameter, backend.tensor(np.arange(4)))
    assert model.first.bias is parameter
    assert backend.numbers(parameter).tolist() == [0, 1, 2, 3]
    platform.update_param_data(parameter, backend.tensor([1.0, 2.0]))
    assert tuple(parameter.shape) == (2,)
    assert parameter.requires_grad


@covers("load_into_param")
def test_loading_copies_the_values_and_casts_them(backend: Backend, platform: Any) -> None:
    model = backend.model()
    source = backend.tensor(np.arange(4), "float16")
    platform.load_into_param(model.first.bias, source)
    assert backend.numbers(model.first.bias).tolist() == [0, 1, 2, 3]
    assert model.first.bias.dtype == platform.str_to_dtype("float32")
    assert model.first.bias.requires_grad
    x = backend.tensor(np.ones((1, 3)))
    before = backend.numbers(model(x))
    platform.load_into_param(model.second.inner.bias, backend.tensor([10.0, 20.0]))
    assert not np.array_equal(backend.numbers(model(x)), before)
    backend.train_step(model, x)  # still trains


@covers("load_into_param")
def test_loaded_values_are_a_copy(backend: Backend, platform: Any) -> None:
    parameter = platform.new_zero_parameter((2,), "float32", True, None)
    source = platform.new_zero_parameter((2,), "float32", True, None)
    platform.load_into_param(parameter, source)
    platform.load_into_param(source, backend.tensor([5.0, 5.0]))
    assert backend.numbers(parameter).tolist() == [0, 0]


@covers("load_into_param")
def test_loading_another_shape_is_an_error_with_both_shapes(backend: Backend, platform: Any) -> None:
    parameter = platform.new_zero_parameter((2, 3), "float32", True, None)
    with pytest.raises(ValueError, match=r"(?s)\[2, 3\].*\[3, 2\]"):
        platform.load_into_param(parameter, backend.tensor(np.ones((3, 2))))


@covers("meta_device", "init_on_device")
def test_parameters_created_on_the_meta_device_have_no_data(backend: Backend, platform: Any) -> None:
    with platform.init_on_device(platform.meta_device):
        model = backend.model()
    assert all("meta" in str(p.device) for p in platform.parameters_dict(model).values())
    assert "meta" not in str(model.scale.device), "buffers stay where they are unless asked for"
    after = backend.model()
    assert not any("meta" in str(p.device) for p in platform.parameters_dict(after).values())


@covers("init_on_device")
def test_buffers_follow_when_asked(backend: Backend, platform: Any) -> None:
    with platform.init_on_device("meta", include_buffers=True):
        model = backend.model()
    assert "meta" in str(model.scale.device)


@covers("init_on_device")
def test_the_innermost_block_counts_and_an_exception_leaves_nothing_behind(backend: Backend, platform: Any) -> None:
    with platform.init_on_device("meta"):
        with platform.init_on_device("cpu"):
            inner = backend.linear(2, 2)
        outer = backend.linear(2, 2)
    assert "meta" not in str(inner.weight.device)
    assert "meta" in str(outer.weight.device)
    with pytest.raises(KeyError), platform.init_on_device("meta"):
        raise KeyError
    assert "meta" not in str(backend.linear(2, 2).weight.device)


@covers("init_on_device")
def test_another_thread_builds_its_modules_as_ever(backend: Backend, platform: Any) -> None:
    devices: list[str] = []
    inside, built = threading.Event(), threading.Event()

    def elsewhere() -> None:
        assert inside.wait(20)
        devices.append(str(backend.linear(2, 2).weight.device))
        built.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    with platform.init_on_device("meta"):
        inside.set()
        assert built.wait(20)
        devices.append(str(backend.linear(2, 2).weight.device))
    thread.join(20)
    assert "meta" not in devices[0]
    assert "meta" in devices[1]


@covers("init_on_device")
def test_a_tied_parameter_stays_tied_on_the_other_device(backend: Backend, platform: Any) -> None:
    with platform.init_on_device("meta"):
        model = backend.tied_model()
    assert model.a.weight is model.b.weight


@covers("init_on_device")
@pytest.mark.parametrize("wrong", ["nowhere", "", 3.5, None])
def test_an_unknown_device_is_refused_before_anything_is_built(platform: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match="(?s)xpected.*got"), platform.init_on_device(wrong):
        pass


@covers("load_into_param", "update_param_data")
def test_a_placeholder_receives_data_and_then_computes(backend: Backend, platform: Any) -> None:
    with platform.init_on_device("meta"):
        layer = backend.linear(3, 2)
    platform.load_into_param(layer.weight, backend.tensor(np.ones((2, 3))))
    platform.update_param_data(layer.bias, backend.tensor([1.0, 2.0]))
    assert layer.weight.requires_grad
    assert isinstance(layer.weight, platform.Parameter)
    assert backend.numbers(layer(backend.tensor(np.ones((1, 3))))).tolist() == [[4.0, 5.0]]


@covers("init_parameters")
def test_parameters_without_data_are_given_it(backend: Backend, platform: Any) -> None:
    with platform.init_on_device("meta"):
        model = backend.model()
    platform.init_parameters(model, 0)
    out = backend.numbers(model(backend.tensor(np.ones((2, 3)))))
    assert out.shape == (2, 2)
    assert np.isfinite(out).all()
    assert all(np.abs(backend.numbers(p)).max() < 10 for p in platform.parameters_dict(model).values())
    assert np.abs(backend.numbers(model.first.weight)).max() > 0, "weights are initialised, not just zeroed"
    assert backend.train_step(model, backend.tensor(np.ones((2, 3))))


@covers("init_parameters")
def test_parameters_that_have_data_keep_it(backend: Backend, platform: Any) -> None:
    model = backend.model()
    before = {name: backend.numbers(p).copy() for name, p in platform.parameters_dict(model).items()}
    platform.init_parameters(model, stage_index=1)
    assert all(np.array_equal(before[n], backend.numbers(p)) for n, p in platform.parameters_dict(model).items())


@covers("init_parameters")
def test_a_negative_stage_is_an_error_with_the_number(backend: Backend, platform: Any) -> None:
    for wrong in (-1, None, 1.5):
        with pytest.raises(ValueError, match="(?s)at least 0.*got"):
            platform.init_parameters(backend.model(), wrong)


@covers("set_layout_into_parameter")
def test_a_layout_makes_a_parameter_of_this_ranks_part_and_keeps_whether_it_learns(
    backend: Backend, platform: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    from hyper_parallel import init_device_mesh

    # A mesh asks the platform of the process for the rank.
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", platform.platform_type.value)
    request.addfinalizer(selection._forget)

    layout = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)).layout("tp", None)
    for learns in (True, False):
        whole = platform.new_zero_parameter((4, 2), "float32", learns, None)
        made = platform.set_layout_into_parameter(whole, layout)
        assert isinstance(made, platform.Parameter)
        assert made.layout is layout
        assert made.requires_grad == learns
        assert tuple(made.shape) == tuple(platform.get_param_local_shape(made)) == (4, 2)
        with pytest.raises(ValueError, match="layout already"):
            platform.set_layout_into_parameter(made, layout)
