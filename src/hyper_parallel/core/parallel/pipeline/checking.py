"""The proof that a schedule runs: two passes, neither of which guesses.

1. *What is there.* Each action stands at the right rank, once; every microbatch has its forward and backward at every
   stage.
2. *A play.* Every rank works off its list as if each send blocked until it is received and each receive until it is
   sent. Nothing in that play can be chosen (a transfer has one sender and one receiver, a rank one next action), so one
   play says what every play does. And a runtime that buffers sends, or posts receives earlier, only lets ranks go on
   sooner than here. So what ends here ends there.

The play follows leases and counts what is kept on the way: both depend on a rank's own order alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hyper_parallel.core.parallel.pipeline.actions import OF_A_STAGE, TRANSFERS, Action, Kind, partner
from hyper_parallel.core.parallel.pipeline.keeping import Keeping
from hyper_parallel.core.parallel.pipeline.play import Play
from hyper_parallel.core.parallel.pipeline.verdict import Problem, Report, ScheduleError

if TYPE_CHECKING:
    from hyper_parallel.core.parallel.pipeline.schedule import Schedule

__all__ = ["check"]

_NUM_SHOWN = 5  # problems in the text of an error


def check(schedule: Schedule, keeping: Keeping) -> Report:
    problems = list(_misplaced(schedule)) or list(_incomplete(schedule))
    if problems:
        raise _error(schedule, problems)
    play = Play(schedule, keeping)
    play.run()
    if play.problems:
        raise _error(schedule, play.problems)
    return Report(
        schedule.num_ranks, schedule.num_stages, schedule.num_microbatches,
        tuple(play.peaks), play.num_transfers, tuple(play.most_unsharded),
    )  # fmt: skip


def _error(schedule: Schedule, problems: Sequence[Problem]) -> ScheduleError:
    lines = ["This schedule cannot run:", *(f"- {problem}" for problem in problems[:_NUM_SHOWN])]
    if len(problems) > _NUM_SHOWN:
        lines.append(f"- and {len(problems) - _NUM_SHOWN} more")
    return ScheduleError("\n".join(lines), problems, where=schedule.name or None)


# -- what is there ----------------------------------------------------------------------------------------------------


def _misplaced(schedule: Schedule) -> Iterator[Problem]:
    """Find actions that no right schedule of this placement has: another rank's, or the same a second time."""
    seen: dict[Action, tuple[int, int]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            for part in action.parts or (action,):
                reason = _why_not_here(part, rank, schedule)
                if (
                    reason is None
                    and part.microbatch is not None
                    and seen.setdefault(part, (rank, position)) != (rank, position)
                ):
                    reason = f"it is there already, at position {seen[part][1]}"
                if reason is not None:
                    yield Problem(rank, position, action, reason)
            if action.kind is Kind.OVERLAP and [part.kind for part in action.parts] != [Kind.FORWARD, Kind.BACKWARD]:
                yield Problem(rank, position, action, "a pair is a forward and a whole backward")


def _why_not_here(action: Action, rank: int, schedule: Schedule) -> str | None:
    stage, kind, microbatch, _ = action
    placement = schedule.placement
    if not 0 <= stage < placement.num_stages:
        return f"there is no stage {stage}"
    if kind in OF_A_STAGE:
        is_here = any(route[stage] == rank for route in placement.routes)
        return None if is_here else f"stage {stage} is not on this rank"
    if microbatch is None or not 0 <= microbatch < placement.num_microbatches:
        return f"there is no microbatch {microbatch}"
    home = placement.rank_of(stage, microbatch)
    if home != rank:
        return f"microbatch {microbatch} has stage {stage} on rank {home}"
    if kind in TRANSFERS:
        other = partner(action).stage
        if not 0 <= other < placement.num_stages:
            return f"there is no stage {other} to exchange with"
        if placement.rank_of(other, microbatch) == rank:
            return f"stage {other} is on the same rank: nothing is sent"
    return None


def _incomplete(schedule: Schedule) -> Iterator[Problem]:
    """Find what is missing for a microbatch at a stage. Called where nothing is misplaced."""
    there = {part for actions in schedule.ranks for action in actions for part in action.parts or (action,)}
    has_transfers = any(action.kind in TRANSFERS for action in there)
    placement, last = schedule.placement, schedule.num_stages - 1
    for microbatch in range(schedule.num_microbatches):
        for stage in range(schedule.num_stages):
            rank = placement.rank_of(stage, microbatch)
            at = f"of microbatch {microbatch} at stage {stage}"
            kinds = {kind for kind in _BACKWARDS if Action(stage, kind, microbatch) in there}
            if Action(stage, Kind.FORWARD, microbatch) not in there:
                yield Problem(rank, -1, None, f"the forward {at} is missing")
            if not kinds:
                yield Problem(rank, -1, None, f"the backward {at} is missing")
            elif Kind.BACKWARD in kinds and len(kinds) > 1:
                yield Problem(rank, -1, None, f"the backward {at} is there whole and in parts")
            elif Kind.BACKWARD not in kinds and len(kinds) == 1:
                missing = "weight" if Kind.INPUT_GRAD in kinds else "input"
                yield Problem(rank, -1, None, f"the {missing} gradient {at} is missing")
            if has_transfers and stage < last and placement.rank_of(stage + 1, microbatch) != rank:
                for end in (Action(stage, Kind.SEND_F, microbatch), Action(stage + 1, Kind.SEND_B, microbatch)):
                    for action in (end, partner(end)):
                        if action not in there:
                            where = placement.rank_of(action.stage, microbatch)
                            yield Problem(where, -1, None, f"{action.words} is missing")


_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
