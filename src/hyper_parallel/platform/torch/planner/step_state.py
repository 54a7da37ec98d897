"""What a step changes, noted before it and put back: what its model has, and gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyper_parallel._base.errors import StateError
from hyper_parallel.platform.torch.planner.model_state import ModelState
from hyper_parallel.platform.torch.planner.steps import forget_before_step, tensors_of


class StepState:
    """The state of a model between steps; `restore` undoes a forward and backward that did not come to their end.

    Gradients that are there already are copied to the host, since a backward adds to them in place; those that are not
    cost nothing. What an optimizer has changed cannot be undone: then `restore` raises. `written`: names of parameters
    that the forward itself writes.
    """

    def __init__(self, model: nn.Module, *, with_gradients: bool, written: Iterable[str] = ()) -> None:
        self._parameters = list(model.parameters())
        self._gradients = [_copied(parameter.grad) for parameter in self._parameters] if with_gradients else None
        self._state = ModelState(model, written=written)
        self._given: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}
        self._stepped: str | None = None
        if with_gradients:
            register_optimizer_step_pre_hook(self._note_optimizer)

    def note_given(self, arguments: object) -> None:
        """Note what the model is called with.

        It may not be changed; and of a tensor that requires a gradient, the one it has before the step's first backward
        is noted.
        """
        for tensor in tensors_of(arguments):
            self._versions[id(tensor)] = (tensor, _version(tensor))
            if self._gradients is not None and tensor.requires_grad and tensor.is_leaf:
                self._given.setdefault(id(tensor), (tensor, _copied(tensor.grad)))

    def close(self) -> None:
        """Forget the step: it is over, or given up."""
        forget_before_step(self._note_optimizer)

    def _note_optimizer(self, optimizer: Any, args: object, kwargs: object) -> None:
        mine = {id(parameter) for parameter in self._parameters}
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            self._stepped = type(optimizer).__name__

    def restore(self) -> None:
        """Put everything back.

        Raises:
            StateError: parameters, an optimizer's state or the batch were changed meanwhile.
        """
        if self._stepped is not None:
            raise StateError(
                "Memory ran out after parameters were changed, so that the step cannot be repeated.",
                expected="a function that runs forward and backward",
                got=f"one that runs {self._stepped}.step() as well",
                do="Step the optimizer after `plan.run`.",
            )
        self._state.check_unwritten()
        if any(_version(tensor) != before for tensor, before in self._versions.values()):
            raise StateError(
                "Memory ran out after the batch was changed in place, so that the step cannot be repeated.",
                expected="a model that leaves its batch as it is",
                got="one that writes into it",
                do="Let the model write into a copy: `x = x.clone()`.",
            )
        if self._gradients is not None:
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = _put_back(parameter.grad, gradient, parameter)
        for tensor, gradient in self._given.values():
            tensor.grad = _put_back(tensor.grad, gradient, tensor)
        self._state.put_back()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copied(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    detached = gradient.detach()
    return detached.clone() if detached.device.type == "cpu" else detached.to("cpu")


def _put_back(
    current: torch.Tensor | None, before: torch.Tensor | None, parameter: torch.Tensor
) -> torch.Tensor | None:
    if before is None:
        return None
    if current is not None and current.shape == before.shape and current.dtype == before.dtype:
        with torch.no_grad():
            return current.detach().copy_(before) if current.requires_grad else current.copy_(before)
    return before.to(parameter.device)
