"""Gradients of many parameters at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import StateError
from hyper_parallel.platform.arguments import check_flag, check_norm_arguments, check_parameters
from hyper_parallel.platform.mindspore.devices import Devices
from hyper_parallel.platform.mindspore.tensors import is_whole


class Gradients:
    @staticmethod
    def clip_grad_norm_(
        parameters: nn.Cell | Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients so that their total norm is at most `max_norm`; return the norm before.

        The gradients are those of the tape (`_grad`), which `run_backward` leaves on the parameters. `foreach` is
        accepted for compatibility and has no effect.
        """
        norm_type = check_norm_arguments(max_norm, norm_type)
        check_flag(error_if_nonfinite, "error_if_nonfinite")
        given = _as_parameters(parameters)
        with_grad = [p for p in given if p._grad is not None]
        total = total_gradient_norm(given, norm_type)
        if error_if_nonfinite and not np.isfinite(total.asnumpy()):
            raise StateError(
                "The total norm of the gradients is not finite.",
                expected="a number",
                got=str(total.asnumpy().item()),
                where=f"{len(with_grad)} gradients",
                do="Look for the first loss that is not finite, or pass error_if_nonfinite=False.",
            )
        if with_grad:
            with _no_grad():
                scale = _number(float(max_norm), total) / (total + _number(1e-6, total))
                scale = ops.where(scale > 1.0, _number(1.0, total), scale)  # `clamp` turns NaN into 1 on the CPU
            scale_gradients(with_grad, scale)
        return total


def total_gradient_norm(parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """Compute the p-norm of all gradients of parameters, equal on all ranks. One that is not there counts as zeros."""
    with _no_grad():
        if any(hasattr(parameter, "_local_tensor") for parameter in parameters):
            trained = [p for p in parameters if p.requires_grad or p._grad is not None]
            return _total_norm_over_ranks(trained, norm_type)
        return _total_norm([p._grad for p in parameters if p._grad is not None], norm_type)


def scale_gradients(parameters: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all gradients that are there by a tensor of one number."""
    with _no_grad():
        for parameter in parameters:
            if parameter._grad is not None:
                _scale_grad(parameter, factor)


def _total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    # float16 and bfloat16 are added up in float32: their own sums overflow, or have no kernel on the CPU.
    wide = mindspore.float64 if any(grad.dtype == mindspore.float64 for grad in grads) else mindspore.float32
    norms = [_norm(grad.to(wide), norm_type) for grad in grads if grad.numel()]
    if not norms:
        return Tensor(0.0, wide)
    return norms[0] if len(norms) == 1 else _norm(ops.stack(norms), norm_type)


def _total_norm_over_ranks(parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """Compute the norm where some gradients are distributed.

    The powers of the norms are added up, over the ranks that have different parts. Ranks communicate by the parameters,
    so that none waits for another that has no gradient for one of them.
    """
    from hyper_parallel.platform.mindspore.dtensor.norms import powers_over_ranks

    # Of the parameters, which all ranks have, and not of the gradients, which may be missing on some.
    dtypes = {parameter.dtype for parameter in parameters} | {p._grad.dtype for p in parameters if p._grad is not None}
    wide = mindspore.float64 if mindspore.float64 in dtypes else mindspore.float32
    is_max = math.isinf(norm_type)

    def power(grad: Tensor | None) -> Tensor:
        if grad is None or not grad.numel():
            return Tensor(0.0, wide)
        norm = _norm(grad.to(wide), norm_type)
        return norm if is_max else norm ** _number(norm_type, norm)

    def combined(powers: list[Tensor]) -> Tensor:
        if is_max:
            return _norm(ops.stack(powers), norm_type)
        return functools.reduce(lambda left, right: left + right, powers)

    total = powers_over_ranks(parameters, power, combined, "max" if is_max else "sum")
    return total if is_max else total ** _number(1.0 / norm_type, total)


def _norm(tensor: Tensor, norm_type: float) -> Tensor:
    if math.isinf(norm_type):
        largest = tensor.abs().max()
        # The CPU's maximum passes over NaN, depending on where it stands.
        return ops.where(ops.isnan(tensor).any(), _number(math.nan, tensor), largest)
    if norm_type == 1.0:
        return tensor.abs().sum()
    if norm_type == 2.0:
        return (tensor * tensor).sum().sqrt()
    return (tensor.abs() ** _number(norm_type, tensor)).sum() ** _number(1.0 / norm_type, tensor)


def _number(value: float, like: Tensor) -> Tensor:
    # As a tensor: MindSpore rounds a Python number to float32 before it meets a float64 tensor.
    return Tensor(value, like.dtype)


def _scale_grad(parameter: Tensor, scale: Tensor) -> None:
    grad = parameter._grad
    if not grad.numel():
        return
    scaled = grad * scale.to(grad.dtype)
    if Devices.device_type() != "cpu":
        grad.copy_(scaled)
    elif is_whole(grad):
        grad.copy_(scaled)  # `mul_` leaves its tensor unchanged on the CPU, and says nothing
    else:
        parameter._grad = scaled  # the CPU cannot write through a view


def _as_parameters(parameters: object) -> list[Tensor]:
    if isinstance(parameters, nn.Cell):
        return list(parameters.get_parameters())
    if isinstance(parameters, Tensor):
        return [parameters]
    return check_parameters(parameters, Tensor, "clip_grad_norm_")
