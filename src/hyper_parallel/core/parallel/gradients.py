"""Values and gradients of functions of a model, and what norms and clipping ask of a framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Module, Tensor
from hyper_parallel.platform.selection import backend

__all__ = ["GradientsBackend", "gradients_of", "value_and_grad"]


class GradientsBackend(Protocol):
    """A framework's gradients, as they are on its parameters."""

    folder: ClassVar[str] = "parallel.gradients"

    def parameters(self, module: Module) -> list[tuple[str, Tensor]]:
        """All parameters by name, one that stands in two places once."""

    def norm(self, parameters: Sequence[Tensor], order: float) -> float:
        """The norm of their gradients over all ranks that have parts of them."""

    def scale(self, parameters: Sequence[Tensor], factor: float) -> None:
        """Multiply all gradients that are there."""

    def number(self, value: float) -> Tensor:
        """A tensor of one number, without loss."""

    def value_and_grad(self, function: Callable[..., Any], model: Module) -> Callable[..., Any]: ...


def gradients_of(thing: object, call: str) -> GradientsBackend:
    """The part of the framework that a module or cell is of."""
    return backend(platform_of(thing, call=call), GradientsBackend, call)


def value_and_grad(fn: Callable[..., Any], model: Module) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]:
    """Make of a loss function one that also gives the gradients of a model's parameters.

    Gradients are in the order of the parameters that are trained when it is called, each parameter once:
    `[p for p in model.parameters() if p.requires_grad]`, or `model.trainable_params()` on MindSpore. A parameter that
    the loss does not depend on has zeros. Of a parameter that lies in parts it is that of the part that is here: a
    DTensor on PyTorch, a plain tensor on MindSpore.

    What backwards have added up on the parameters before stays there unchanged, and nothing is added to it: `p.grad` on
    PyTorch, what the tape has on MindSpore. On PyTorch it is a `backward`: its hooks run, and leaves that are no
    parameters of the model get their gradients.

    Args:
        fn: gives the loss, a tensor of one number.
        model: the module or cell whose parameters count.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> value, (grad,) = hp.value_and_grad(lambda x: model(x).sum(), model)(torch.ones(3, 2))
        >>> grad, model.weight.grad
        (tensor([[3., 3.]]), None)
    """
    if not callable(fn):
        raise ArgumentTypeError("Gradients are those of a function.", expected="a callable", got=describe(fn))
    return gradients_of(model, "value_and_grad").value_and_grad(fn, model)
