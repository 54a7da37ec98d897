"""Gradients of PyTorch's parameters: norms over ranks, scaling, and values with gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.core.parallel.gradients import GradientsBackend
from hyper_parallel.platform.arguments import check_module
from hyper_parallel.platform.torch.dtensor.norms import local_part, total_gradient_norm

__all__ = ["BACKEND"]


class TorchGradients:
    """See `GradientsBackend`."""

    folder: ClassVar[str] = GradientsBackend.folder

    def parameters(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        return list(module.named_parameters())

    def norm(self, parameters: Sequence[torch.Tensor], order: float) -> float:
        return float(total_gradient_norm(parameters, order))

    @torch.no_grad()
    def scale(self, parameters: Sequence[torch.Tensor], factor: float) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)

    def number(self, value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64, device="cpu")

    def value_and_grad(self, function: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
        check_module(model, nn.Module, "value_and_grad")

        @functools.wraps(function)
        def with_gradients(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            # By `backward`, not by `autograd.grad`: what reduces gradients over ranks, PyTorch's or ours, hangs on it.
            with _own_gradients(model):
                with torch.enable_grad():
                    value = function(*args, **kwargs)
                _check_loss(value)
                if value.requires_grad:
                    value.backward()
                trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
                found = tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in trained)
                if _has_buckets(model):
                    found = tuple(gradient.clone() for gradient in found)
            return value.detach(), found

        return with_gradients


@contextmanager
def _own_gradients(model: nn.Module) -> Iterator[None]:
    """Set what earlier backwards have added up aside, and put it back."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    if _has_buckets(model):
        # `DistributedDataParallel` writes the next gradients into the same memory.
        before = [(parameter, None if grad is None else grad.clone()) for parameter, grad in before]
    for parameter, grad in before:
        if grad is not None:
            parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in before:
            parameter.grad = grad


def _has_buckets(model: nn.Module) -> bool:
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def _check_loss(value: object) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ArgumentTypeError(
            "A function with gradients gives a loss.", expected="a tensor of one number", got=describe(value)
        )


BACKEND: GradientsBackend = TorchGradients()
