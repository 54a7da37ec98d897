"""What a check says of a schedule: that it cannot run and why, or what it was found to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, HyperParallelError
from hyper_parallel.core.parallel.pipeline.actions import Action

__all__ = ["Problem", "Report", "ScheduleError", "counted"]


class Problem(NamedTuple):
    """One thing that is wrong; `action` is None where one is missing."""

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


@dataclass(frozen=True)
class Report:
    """What was proved of a schedule, in numbers.

    Attributes:
        num_ranks, num_stages, num_microbatches: its size.
        peak: what each rank keeps for backward at most; in the unit of `activations`, by default microbatches at all
            layers of a rank.
        num_transfers: transfers between ranks; 0 where only compute actions were checked.
        most_unsharded: how many stages each rank has unsharded at once; 0 where the schedule has no leases.
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    peak: tuple[float, ...]
    num_transfers: int
    most_unsharded: tuple[int, ...]

    def __str__(self) -> str:
        sizes = [(self.num_ranks, "rank"), (self.num_stages, "stage"), (self.num_microbatches, "microbatch")]
        head = ", ".join(counted(number, word) for number, word in sizes)
        lines = [f"{head}: complete, in order, free of deadlock"]
        lines.append(f"most microbatches kept at rank: {_per_rank(self.peak)}")
        if self.num_transfers:
            lines.append(f"transfers: {self.num_transfers}, also if every send blocks until it is received")
        if any(self.most_unsharded):
            lines.append(f"most stages unsharded at rank: {_per_rank(self.most_unsharded)}")
        return "\n".join(lines)


def _per_rank(values: Sequence[float]) -> str:
    return ", ".join(f"{rank}: {value:g}" for rank, value in enumerate(values))
