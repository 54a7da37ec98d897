"""Gradients of MindSpore's parameters, as the tape has them: norms over ranks, scaling, and values with gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mindspore
from mindspore import Tensor, nn, ops
from mindspore._c_expression import run_backward
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.core.parallel.gradients import GradientsBackend
from hyper_parallel.platform.arguments import check_module
from hyper_parallel.platform.mindspore.gradients import scale_gradients, total_gradient_norm
from hyper_parallel.platform.mindspore.parallel.backend import recording

__all__ = ["BACKEND"]


class MindSporeGradients:
    """See `GradientsBackend`."""

    folder: ClassVar[str] = GradientsBackend.folder

    def parameters(self, module: nn.Cell) -> list[tuple[str, Tensor]]:
        return [(parameter.name, parameter) for parameter in module.get_parameters()]

    def norm(self, parameters: Sequence[Tensor], order: float) -> float:
        return float(total_gradient_norm(parameters, order).asnumpy())

    def scale(self, parameters: Sequence[Tensor], factor: float) -> None:
        scale_gradients(parameters, Tensor(factor, mindspore.float64))

    def number(self, value: float) -> Tensor:
        return Tensor(value, mindspore.float64)

    def value_and_grad(self, function: Callable[..., Any], model: nn.Cell) -> Callable[..., Any]:
        check_module(model, nn.Cell, "value_and_grad")

        @functools.wraps(function)
        def with_gradients(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
            with recording():
                value = function(*args, **kwargs)
            if not isinstance(value, Tensor) or value.size != 1:
                raise ArgumentTypeError(
                    "A function with gradients gives a loss.", expected="a tensor of one number", got=describe(value)
                )
            # What begins and what is done when gradients are there is said here, and nowhere else.
            found = _gradients(value, tuple(model.trainable_params()))
            return value, found

        return with_gradients


def _gradients(loss: Any, parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of a loss by the tape; zeros where it does not depend on a parameter."""
    start = getattr(loss, "_local_tensor", loss)
    found: Sequence[Any] = (None,) * len(parameters)
    if parameters and start._requires_grad:
        with recording():
            found = run_backward(
                (start,), (ops.ones_like(start),), False, False, parameters, True, accumulate_grad=False
            )
    with _no_grad():
        return tuple(
            ops.zeros_like(getattr(parameter, "_local_tensor", parameter)) if gradient is None else gradient
            for parameter, gradient in zip(parameters, found, strict=True)
        )


BACKEND: GradientsBackend = MindSporeGradients()
