"""Norms over ranks and stages, seeds of ranks, and values with gradients."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel.core.parallel.norms import combined_norm
from hyper_parallel.core.parallel.seeds import derived_seed
from support.backends import Backend
from support.numbers_on_ranks import chosen, layers, run  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("chosen")

ORDERS = [1.0, 2.0, 3.0, math.inf]


# -- norms --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["layouts", "fsdp2", "2d"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_of_parts_is_that_of_one_process(way: str, order: float) -> None:
    for case in ("all", "missing"):
        answers = run(4, "clipped", way, order, case)
        assert len({found for found, _, _ in answers}) == 1
        for found, right, difference in answers:
            assert found == pytest.approx(right, rel=1e-12)
            assert difference <= 1e-12
    assert all(math.isnan(found) for found, _, _ in run(4, "clipped", way, order, "nan"))


def test_a_gradient_that_one_rank_lacks_counts_as_zeros_there_and_nobody_waits() -> None:
    assert run(2, "missing_on_one_rank") == [(3.0, pytest.approx(18**0.5))] * 2


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zbv", "dualpipe"])
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_the_norm_of_stages_counts_a_tied_weight_once(schedule: str, order: float) -> None:
    for as_list in (True, False):
        answers = run(2, "clipped_pipeline", schedule, order, as_list)
        assert len({found for found, _, _ in answers}) == 1
        for found, right, difference in answers:
            assert found == pytest.approx(right, rel=1e-12)
            assert difference <= 1e-12


def test_norms_of_parts_with_gaps_are_right_on_mindspore() -> None:
    for one, largest, *no_numbers in run(2, "norms_with_gaps", framework="mindspore"):
        assert (one, largest) == (6.0, 3.0)
        assert all(math.isnan(number) for number in no_numbers)


@pytest.mark.parametrize("order", ORDERS)
def test_norms_of_parts_combine_to_that_of_the_whole(order: float) -> None:
    numbers = np.random.RandomState(0).standard_normal(60)
    norms = [float(np.linalg.norm(part, order)) for part in np.split(numbers, [7, 8, 30])]
    assert combined_norm(norms, order) == pytest.approx(np.linalg.norm(numbers, order), rel=1e-14)
    assert combined_norm([], order) == combined_norm([0.0, 0.0], order) == 0.0
    assert math.isnan(combined_norm([math.inf, math.nan, 1.0], order))
    assert combined_norm([math.inf, 1.0], order) == math.inf
    assert combined_norm([1e300, 1e300], order) < math.inf


def test_modules_parameters_and_lists_are_taken(backend: Backend, platform: Any) -> None:
    model = layers(backend)
    parameters = list(platform.parameters_dict(model).values())
    for parameter in parameters:
        backend.set_grad(parameter, np.ones(parameter.shape, np.float32))
    for given in (model, [model], parameters, iter(parameters), [model, *parameters]):
        assert float(hp.clip_grad_norm_(given, 1e9)) == pytest.approx(40**0.5)
    stage = hp.PipelineStage(model, 0, 1)
    assert float(hp.clip_grad_norm_(stage, 1.0)) == pytest.approx(40**0.5)
    assert float(hp.clip_grad_norm_(stage, 1.0)) == pytest.approx(1.0, rel=1e-5)
    assert float(hp.clip_grad_norm_([], 1.0)) == 0.0
    with pytest.raises(TypeError, match="takes a model or parameters"):
        hp.clip_grad_norm_([3], 1.0)


def test_a_norm_that_is_no_number_is_an_error_if_wanted(backend: Backend, platform: Any) -> None:
    model = layers(backend)
    for parameter in platform.parameters_dict(model).values():
        backend.set_grad(parameter, np.full(parameter.shape, np.nan, np.float32))
    stage = hp.PipelineStage(model, 0, 1)
    with pytest.raises(RuntimeError, match="not finite"):
        hp.clip_grad_norm_(stage, 1.0, error_if_nonfinite=True)
    assert math.isnan(float(hp.clip_grad_norm_(stage, 1.0)))


# -- seeds --------------------------------------------------------------------------------------------------------------


def test_ranks_draw_alike_unless_they_differ_on_a_named_axis() -> None:
    a, b, c, d = run(4, "draws", None, True)
    assert a == b != c == d
    a, b, c, d = run(4, "draws", "tp", True)
    assert a == c != b == d
    assert len(set(run(4, "draws", ("dp", "tp"), True))) == 4
    assert len(set(run(4, "draws", ("pp",), True))) == 1
    assert len(set(run(4, "draws", None, False))) == 4


def test_ranks_draw_so_on_mindspore() -> None:
    first, second = run(2, "draws", framework="mindspore")
    assert first[2:] == second[2:]
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_one_process_draws_what_the_framework_gives_for_the_seed(backend: Backend, platform: Any) -> None:
    platform.manual_seed(7)
    expected = backend.numbers(platform.full((1,), 0.0)), platform.get_rng_state()
    assert hp.manual_seed(7) == 7
    assert _is_same(platform.get_rng_state(), expected[1])
    first = random.random(), np.random.random()
    hp.manual_seed(7)
    assert (random.random(), np.random.random()) == first


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_is_same(first[key], second[key]) for key in first)
    if isinstance(first, tuple):
        return all(map(_is_same, first, second))
    return bool(np.array_equal(np.asarray(first), np.asarray(second)))


def test_seeds_of_names_are_fixed_for_all_time() -> None:
    """Values of models hang on these numbers: a change here is a change of every model that is filled."""
    assert derived_seed(0, "0") == 4233388562581826358
    assert derived_seed(5, "model.layers.0.mlp.up_proj") == 5418398353158755670
    assert len({derived_seed(seed, name) for seed in range(-3, 50) for name in ("", "a", "a.b", "b")}) == 53 * 4


@pytest.mark.parametrize("wrong", [0.5, True, "0", 2**63, None])
def test_a_seed_that_is_none_is_refused(backend: Backend, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="A seed"):
        hp.manual_seed(wrong)


def test_axes_that_are_no_names_are_refused(backend: Backend) -> None:
    with pytest.raises(TypeError, match="differ on axes"):
        hp.manual_seed(0, differ_on=3)


# -- values with gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain", "fsdp2", "ddp"])
def test_gradients_are_those_of_a_backward_and_what_was_there_stays(way: str) -> None:
    assert run(2, "values_and_gradients", way) == [[], []]


def test_gradients_of_distributed_parameters_are_distributed() -> None:
    assert run(2, "gradients_of_parts") == [[], []]


def test_every_trained_parameter_has_a_gradient_in_order(backend: Backend, platform: Any) -> None:
    model = layers(backend)
    first, second = (list(platform.parameters_dict(layer).values()) for layer in (model[0], model[1]))
    first[1].requires_grad = False
    x = backend.tensor(np.ones((2, 4)))
    value, grads = hp.value_and_grad(lambda x: model[0](x).sum(), model)(x)
    assert [tuple(grad.shape) for grad in grads] == [(4, 4), (4, 4), (4,)]
    assert np.array_equal(backend.numbers(grads[0]), np.full((4, 4), 2.0))
    assert not backend.numbers(grads[1]).any()
    assert not backend.numbers(grads[2]).any()
    assert float(backend.numbers(value)) == pytest.approx(float(backend.numbers(model[0](x).sum())))
    grad_of = "grad" if backend.name.startswith("torch") else "_grad"
    assert all(getattr(parameter, grad_of) is None for parameter in (*first, *second))


def test_an_error_in_the_function_leaves_gradients_as_they_were(backend: Backend, platform: Any) -> None:
    model = layers(backend)
    parameter = next(iter(platform.parameters_dict(model).values()))
    backend.set_grad(parameter, np.ones((4, 4), np.float32))

    def fails(x: Any) -> Any:
        model(x)
        raise KeyError

    with pytest.raises(KeyError):
        hp.value_and_grad(fails, model)(backend.tensor(np.ones((2, 4))))
    assert np.array_equal(backend.get_grad(parameter), np.ones((4, 4)))


def test_a_function_that_gives_no_loss_is_refused(backend: Backend) -> None:
    model = layers(backend)
    x = backend.tensor(np.ones((2, 4)))
    for wrong in (lambda x: model(x), lambda x: 3.0):
        with pytest.raises(TypeError, match="gives a loss"):
            hp.value_and_grad(wrong, model)(x)
    with pytest.raises(TypeError, match="those of a function"):
        hp.value_and_grad(3, model)
