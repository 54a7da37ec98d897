"""What parallel training asks of a framework. Each has one object that does it: `BACKEND` in its folder `parallel`.

Example: `parallel_of(module, "PipelineStage").stage(module).weights()` are the weights of a module by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Device, Module, Tensor
from hyper_parallel.platform.selection import backend

__all__ = ["Blocks", "ParallelBackend", "StageBackend", "TensorMeta", "parallel_of"]


class TensorMeta(NamedTuple):
    """What another rank has to know of a tensor to receive it."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool


class StageBackend(Protocol):
    """One stage of a model, as a framework runs it. Lives as long as the stage, keeps nothing from call to call."""

    # Names of weights whose gradients came with those of the inputs, though they were to come later.
    undeferred: set[str]

    @property
    def device(self) -> Device:
        """Where its weights are now."""

    def weights(self) -> list[tuple[str, Tensor]]:
        """The weights by name, those that are not trained as well."""

    def gradient(self, name: str) -> Tensor | None:
        """What backwards have added to a weight's gradient, None if nothing."""

    def set_gradient(self, name: str, gradient: Tensor | None) -> None: ...

    def forward(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function with recording for gradients switched on."""

    def backward(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Run a whole backward: the weights' gradients are added to theirs, those of `inputs` are given."""

    def backward_of_inputs(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], Callable[[], object]]:
        """Run the half of a backward that others wait for.

        Returns: the gradients of `inputs`, and the call that runs the other half.
        """

    def train_with(self, loss_fn: object) -> None:
        """Let backwards add to the gradients of a loss function's weights, too, where it is a module."""

    def as_taken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """What a step was given, as this stage takes it: arguments that only the first stage needs, and keywords."""

    def weight_of(self, kwargs: Mapping[str, Any]) -> float | None:
        """What the stage's own loss of a microbatch counts; None where it does not say."""


class Blocks(Protocol):
    """The blocks that a model's stages are made of, in the order in which they are called."""

    names: list[str]

    def stage(self, begin: int, end: int) -> Module:
        """A module of the blocks from `begin` to before `end`. Parameters keep their names."""

    def num_weights(self) -> list[int]:
        """How many weights of each block are multiplied with: all but those of embeddings."""


class ParallelBackend(Protocol):
    """A framework's part of parallel training."""

    folder: ClassVar[str] = "parallel.backend"

    def stage(self, module: Module) -> StageBackend: ...

    def blocks(self, model: Module, by: object, batch: object) -> Blocks:
        """Find the blocks of a model.

        Args:
            by: what the user said of where stages begin: names of blocks say which blocks are meant.
            batch: an example of what the model takes, None where it has to say so itself.
        """

    def join(self, device: Device) -> None:
        """Wait until a device has done all that it was given."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Around a trial: random numbers go on afterwards as if it had not been."""

    def is_tensor(self, value: object) -> bool: ...

    def is_differentiable(self, meta: TensorMeta) -> bool:
        """Tell whether a tensor of this dtype can have a gradient."""

    def meta(self, tensor: Tensor) -> TensorMeta: ...

    def version(self, tensor: Tensor) -> int:
        """How often a tensor was written to, as far as the framework counts."""

    def empty(self, meta: TensorMeta, device: Device) -> Tensor:
        """A tensor to receive into."""

    def as_input(self, tensor: Tensor, *, requires_grad: bool) -> Tensor:
        """The tensor as a leaf of a graph that begins here. It has the same memory."""

    def as_sent(self, tensor: Tensor) -> Tensor:
        """The tensor without its graph."""

    def scaled(self, loss: Tensor, factor: float) -> Tensor: ...

    def add(self, total: Tensor | None, part: Tensor) -> Tensor:
        """Add to a sum, without a graph. The result is no tensor that was given."""

    def zeros(self, meta: TensorMeta, device: Device) -> Tensor: ...

    def nothing_of(self, tensors: Sequence[Tensor], like: Tensor) -> Tensor:
        """A loss of zero that these tensors have a part in, of the dtype of `like`."""


def parallel_of(thing: object, call: str) -> ParallelBackend:
    """The part of the framework that a module, a cell or a tensor is of."""
    return backend(platform_of(thing), ParallelBackend, call)
