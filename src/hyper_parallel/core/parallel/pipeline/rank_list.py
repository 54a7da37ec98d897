"""The list of one rank while a generator writes it."""

from __future__ import annotations

from collections import Counter, deque

from hyper_parallel.core.parallel.pipeline.actions import Action, Kind

__all__ = ["RankList"]


class RankList:
    """What one rank does, as far as it is written. Stages take microbatches in order, so no call names one."""

    def __init__(self, first: dict[int, int] | None = None) -> None:
        self.actions: list[Action] = []
        self._first = first or {}  # microbatch that a stage begins with, if not 0
        self._num_done: Counter[tuple[int, str]] = Counter()
        self._weights_left: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        self.actions.append(self._next(stage, Kind.FORWARD))

    def backward(self, stage: int) -> None:
        self.actions.append(self._next(stage, Kind.BACKWARD))

    def input_grad(self, stage: int) -> None:
        """Run the first half of a backward; `weight_grad` runs the second halves, oldest first."""
        action = self._next(stage, Kind.INPUT_GRAD)
        self.actions.append(action)
        self._weights_left.append(action._replace(kind=Kind.WEIGHT_GRAD))

    def weight_grad(self) -> None:
        if self._weights_left:
            self.actions.append(self._weights_left.popleft())

    def weight_grad_of(self, stage: int) -> None:
        """Run the oldest second half of this stage."""
        action = next(action for action in self._weights_left if action.stage == stage)
        self._weights_left.remove(action)
        self.actions.append(action)

    def pair(self, forward_stage: int, backward_stage: int) -> None:
        self.actions.append(
            Action.pair(self._next(forward_stage, Kind.FORWARD), self._next(backward_stage, Kind.BACKWARD))
        )

    def num_left(self, stage: int | None = None) -> int:
        """Count the second halves that are still to be run, of one stage or of all."""
        return sum(stage in (None, action.stage) for action in self._weights_left)

    def _next(self, stage: int, kind: Kind) -> Action:
        counter = (stage, "F" if kind is Kind.FORWARD else "B")
        self._num_done[counter] += 1
        return Action(stage, kind, self._first.get(stage, 0) + self._num_done[counter] - 1)
