"""What ranks keep for backward, in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hyper_parallel._base.errors import ArgumentError, describe
from hyper_parallel.core.parallel.pipeline.actions import Action, Kind

__all__ = ["Keeping"]


class Keeping:
    """How much a rank keeps for backward: what an action adds when it begins, and takes away when it ends."""

    def __init__(
        self, num_ranks: int, num_stages: int, activations: Sequence[float] | None = None, after_input_grad: float = 1.0
    ) -> None:
        self.is_default = activations is None and after_input_grad == 1.0
        # Whole numbers of the smallest part, divided in the end: sums of thirds would end beside 4.0.
        self.unit = float(num_stages) if activations is None else 1.0
        self._sizes = (float(num_ranks),) * num_stages if activations is None else _sizes(activations, num_stages)
        if not isinstance(after_input_grad, (int, float)) or not 0 <= after_input_grad <= 1:
            raise ArgumentError(
                "This is no part of a whole.", expected="0 to 1 for `after_input_grad`", got=describe(after_input_grad)
            )
        self._part = after_input_grad

    def added(self, action: Action) -> float:
        return sum(self._sizes[part.stage] for part in action.parts or (action,) if part.kind is Kind.FORWARD)

    def freed(self, action: Action) -> float:
        """How much less is kept once the action has ended."""
        total = 0.0
        for part in action.parts or (action,):
            if part.kind is Kind.BACKWARD:
                total += self._sizes[part.stage]
            elif part.kind is Kind.INPUT_GRAD:
                total += self._sizes[part.stage] * (1 - self._part)
            elif part.kind is Kind.WEIGHT_GRAD:
                total += self._sizes[part.stage] * self._part
        return total


def _sizes(activations: Sequence[float], num_stages: int) -> tuple[float, ...]:
    try:
        sizes = tuple(map(float, activations))
    except (TypeError, ValueError):
        sizes = ()
    if len(sizes) != num_stages or not all(0 <= size < math.inf for size in sizes):
        raise ArgumentError(
            "There is not one number for each stage.",
            expected=f"{num_stages} sizes of 0 or more for `activations`",
            got=describe(activations),
        )
    return sizes
