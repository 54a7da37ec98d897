"""One stage of a model: which module it is, and what is alive of each microbatch in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, StateError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.parallel.backend import parallel_of
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Module, Tensor

__all__ = ["PipelineStage", "StageRun", "StageWeight"]


class PipelineStage:
    """A part of a model, and its place among the parts.

    Args:
        module: takes what the stage before gives, and keywords of the batch; the first one takes the batch.
        index: its place, from 0.
        num_stages: how many stages the model has.
        tied: names of weights that are one weight with those of other stages, with what they are called in common.

    Example:
        `PipelineStage(nn.Sequential(block3, block4), 1, 4)` is the second of four.
    """

    def __init__(self, module: Module, index: int, num_stages: int, *, tied: Mapping[str, str] | None = None) -> None:
        at, num = as_int(index), as_int(num_stages)
        if num is None or num < 1 or at is None or not 0 <= at < num:
            raise ArgumentError(
                "A stage has a place among the stages of its model.",
                expected="index from 0 to num_stages - 1",
                got=f"index {describe(index)}, num_stages {describe(num_stages)}",
            )
        self.module: Any = module
        self.index = at
        self.num_stages = num
        self.backend = parallel_of(module, "PipelineStage")
        self._runs = self.backend.stage(module)
        self.tied = dict(tied or {})
        unknown = sorted(self.tied.keys() - {weight.name for weight in self.weights()})
        if unknown:
            raise ArgumentError(
                "A tied weight is a weight of its stage.",
                expected="one of " + ", ".join(weight.name for weight in self.weights()),
                got=", ".join(unknown),
                where=f"stage {at}",
            )

    def __repr__(self) -> str:
        return f"PipelineStage({type(self.module).__name__}, {self.index} of {self.num_stages})"

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def device(self) -> Any:
        return self._runs.device

    def init_parameters(self) -> None:
        """Give data to parameters that were made without, as their modules' own initialisers do."""
        platform_of(self.module).init_parameters(self.module, self.index)

    def trained(self) -> list[tuple[str, Tensor]]:
        """The weights that are trained, by name."""
        named: list[tuple[str, Any]] = self._runs.weights()
        return [(name, weight) for name, weight in named if weight.requires_grad]

    def weights(self) -> list[StageWeight]:
        """All weights, as other ranks have to know them: one that is not trained now may be later."""
        return [
            StageWeight(name, id(weight), self.backend.meta(weight).shape, self.tied.get(name))
            for name, weight in self._runs.weights()
        ]

    def as_taken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """What a step was given, as this stage takes it: arguments that only the first stage needs, and keywords."""
        return self._runs.as_taken(args, kwargs)

    def weight_of(self, kwargs: Mapping[str, Any]) -> float | None:
        """What the stage's own loss of a microbatch counts; None where it does not say."""
        return self._runs.weight_of(kwargs)

    def train_with(self, loss_fn: object) -> None:
        """Let the weights of a loss function have gradients, if it is a module."""
        self._runs.train_with(loss_fn)

    def weight(self, name: str) -> Tensor:
        return dict(self._runs.weights())[name]

    def set_weight(self, name: str, value: Tensor) -> None:
        """Write numbers into a weight."""
        platform_of(self.module).load_into_param(self.weight(name), value)

    def gradient(self, name: str) -> Tensor | None:
        return self._runs.gradient(name)

    def set_gradient(self, name: str, gradient: Tensor | None) -> None:
        self._runs.set_gradient(name, gradient)

    def undeferred(self) -> tuple[str, ...]:
        """Name the weights whose gradients a schedule wanted later, and that came with those of the inputs.

        Empty before a step has run.
        """
        return tuple(sorted(self._runs.undeferred))


class StageWeight(NamedTuple):
    """A weight. Two of one rank with the same `identity` are one tensor."""

    name: str
    identity: int
    shape: tuple[int, ...]
    tied_as: str | None


@dataclass
class InFlight:
    """One microbatch in one stage, from its forward to the end of its backward."""

    inputs: list[Tensor]  # leaves that the gradients for the stage before come from
    outputs: list[Tensor]  # what backward begins at
    weights_left: Callable[[], object] | None = None


class StageRun:
    """A stage during one step. Lives as long as the step, so that nothing of a microbatch outlives it."""

    def __init__(self, stage: PipelineStage) -> None:
        self._stage = stage
        self._runs = stage._runs
        self._in_flight: dict[int, InFlight] = {}

    def forward(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: list[Tensor],
        then: Callable[[Any], tuple[Any, list[Tensor]]],
    ) -> Any:
        """Run the forward. `then` makes of the output what is handed on and the tensors that backward begins at."""
        output = self._runs.forward(self._stage.module, args, kwargs)
        handed_on, outputs = self._runs.forward(then, (output,), {})
        self._in_flight[microbatch] = InFlight(inputs, outputs)
        return handed_on

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Run the whole backward; the gradients of the inputs."""
        alive = self._in_flight.pop(microbatch)
        return self._runs.backward(*_pairs(alive, gradients), alive.inputs)

    def backward_of_inputs(self, microbatch: int, gradients: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Run the half of the backward that the stage before waits for."""
        alive = self._in_flight[microbatch]
        found, alive.weights_left = self._runs.backward_of_inputs(*_pairs(alive, gradients), alive.inputs)
        alive.inputs, alive.outputs = [], []
        return found

    def backward_of_weights(self, microbatch: int) -> None:
        """Run the other half."""
        left = self._in_flight.pop(microbatch).weights_left
        if left is None:
            raise StateError(
                "The gradients of a stage's inputs come before those of its weights.", where=repr(self._stage)
            )
        left()


def _pairs(alive: InFlight, gradients: Sequence[Tensor | None] | None) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs that have a gradient, and the gradients. None: the output is a loss, whose gradient is 1."""
    if gradients is None:
        return alive.outputs, [None] * len(alive.outputs)
    there = [
        (output, gradient) for output, gradient in zip(alive.outputs, gradients, strict=True) if gradient is not None
    ]
    return [output for output, _ in there], [gradient for _, gradient in there]
