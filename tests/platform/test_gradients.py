"""Clipping by the total norm: one text, every framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.backends import Backend

pytestmark = pytest.mark.covers("clip_grad_norm_")

GRADS = [np.array([[3.0, -4.0]], np.float32), np.array([12.0, 0.5, -1.0], np.float32)]


def with_grads(backend: Backend, platform: Any, grads: list[np.ndarray | None]) -> list[Any]:
    parameters = []
    for grad in grads:
        shape = (2,) if grad is None else grad.shape
        parameter = platform.new_zero_parameter(shape, "float32", True, None)
        backend.set_grad(parameter, grad)
        parameters.append(parameter)
    return parameters


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf"), "inf"])
def test_gradients_are_scaled_to_the_norm_and_the_norm_before_is_returned(
    backend: Backend, platform: Any, norm_type: Any
) -> None:
    parameters = with_grads(backend, platform, list(GRADS))
    flat = np.concatenate([grad.ravel() for grad in GRADS])
    expected = np.linalg.norm(flat, float(norm_type))
    total = platform.clip_grad_norm_(parameters, 2.0, norm_type)
    assert float(total) == pytest.approx(expected, rel=1e-6)
    clipped = np.concatenate([backend.get_grad(parameter).ravel() for parameter in parameters])
    # 1e-5: the divisor carries the framework's own 1e-6 against a division by zero
    assert np.linalg.norm(clipped, float(norm_type)) == pytest.approx(2.0, rel=1e-5)
    assert np.allclose(clipped, flat * 2.0 / expected, rtol=1e-5)


def test_small_gradients_stay_as_they_are(backend: Backend, platform: Any) -> None:
    parameters = with_grads(backend, platform, list(GRADS))
    platform.clip_grad_norm_(parameters, max_norm=1000.0)
    assert all(np.array_equal(backend.get_grad(p), g) for p, g in zip(parameters, GRADS, strict=True))


def test_a_module_one_tensor_and_an_iterator_are_accepted(backend: Backend, platform: Any) -> None:
    model = backend.model()
    grads = backend.train_step(model, backend.tensor(np.ones((2, 3))))
    expected = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
    assert float(platform.clip_grad_norm_(model, 1e9)) == pytest.approx(expected, rel=1e-5)
    assert float(platform.clip_grad_norm_(iter(platform.parameters_dict(model).values()), 1e9)) == pytest.approx(
        expected, rel=1e-5
    )
    (one,) = with_grads(backend, platform, [GRADS[0]])
    assert float(platform.clip_grad_norm_(one, 1.0, foreach=True)) == pytest.approx(5.0)


def test_parameters_without_gradients_count_nothing(backend: Backend, platform: Any) -> None:
    parameters = with_grads(backend, platform, [None, GRADS[0]])
    assert float(platform.clip_grad_norm_(parameters, 1.0)) == pytest.approx(5.0)
    assert float(platform.clip_grad_norm_([], 1.0)) == 0.0
    assert float(platform.clip_grad_norm_(with_grads(backend, platform, [None]), 1.0)) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_norm_that_is_not_finite_raises_only_when_asked_and_changes_nothing_then(
    backend: Backend, platform: Any, bad: float
) -> None:
    parameters = with_grads(backend, platform, [GRADS[0], np.array([bad, 1.0], np.float32)])
    with pytest.raises(RuntimeError, match="not finite"):
        platform.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert np.array_equal(backend.get_grad(parameters[0]), GRADS[0])
    assert not np.isfinite(float(platform.clip_grad_norm_(parameters, 1.0)))


def test_wrong_norms_say_what_was_expected(backend: Backend, platform: Any) -> None:
    parameters = with_grads(backend, platform, [GRADS[0]])
    for wrong in ("much", None, [1]):
        with pytest.raises(TypeError, match="(?s)max_norm.*got"):
            platform.clip_grad_norm_(parameters, wrong)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="(?s)max_norm.*got"):
            platform.clip_grad_norm_(parameters, wrong)
    with pytest.raises(ValueError, match="norm_type"):
        platform.clip_grad_norm_(parameters, 1.0, norm_type=0)
