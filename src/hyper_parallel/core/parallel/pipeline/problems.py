"""What can be wrong with a schedule, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, HyperParallelError
from hyper_parallel.core.parallel.pipeline.actions import Action

__all__ = ["Problem", "ScheduleError", "counted"]


class Problem(NamedTuple):
    """One thing that is wrong. `rank` is -1 where it is with the schedule as a whole, `action` None where an action is missing."""

    rank: int
    position: int
    action: Action | None
    reason: str

    def __str__(self) -> str:
        if self.rank < 0:
            return self.reason
        if self.action is None:
            return f"rank {self.rank}: {self.reason}"
        return f"rank {self.rank}, position {self.position}, {self.action}: {self.reason}"


class ScheduleError(ArgumentError):
    """A schedule that cannot run; `problems` has all that was found, by rank, position and action."""

    def __init__(self, what: str, problems: Sequence[Problem] = (), **parts: str | None) -> None:
        super().__init__(what, **parts)
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.what, self.problems, {"where": self.where})


def _rebuild(what: str, problems: Sequence[Problem], parts: dict[str, str | None]) -> HyperParallelError:
    return ScheduleError(what, problems, **parts)


def counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 'es' if word.endswith('ch') else 's'}"
