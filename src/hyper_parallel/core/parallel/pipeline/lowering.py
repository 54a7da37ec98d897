"""From compute actions to everything a rank does: transfers, leases of parameters, reductions of gradients.

    rank 0: 0F0 0F1 0B0           rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 ...
    rank 1: 1F0 1B0 1F1      ->   rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 ...

Why no order of sends and receives made here can hang: all ranks' actions are put on one line, and each rank gets its
part of it. The line is that of a simulated step in which every action takes time. A transfer is one point of it, at the
end of the action that makes the tensor, so that its send and its receive stand at the same point. A rank that waits for
another one therefore waits for an earlier point, and in a circle somebody would have to wait for a later one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hyper_parallel._base.errors import ArgumentError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.parallel.pipeline.actions import COMPUTE, TRANSFERS, Action, Kind, partner
from hyper_parallel.core.parallel.pipeline.play import send_after
from hyper_parallel.core.parallel.pipeline.simulation import Bar

if TYPE_CHECKING:
    from hyper_parallel.core.parallel.pipeline.schedule import Schedule

__all__ = ["lowered"]

_Lists = tuple[tuple[Action, ...], ...]


def lowered(schedule: Schedule, bars: Sequence[Sequence[Bar]], zero: int, prefetch: int) -> _Lists:
    if as_int(zero) not in (0, 1, 2, 3):
        raise ArgumentError(
            "There is no such way to shard parameters.", expected="zero=0, 1, 2 or 3", got=describe(zero)
        )
    if (as_int(prefetch) or 0) < 0 or as_int(prefetch) is None:
        raise ArgumentError(
            "Stages cannot be gathered later than they are used.",
            expected="prefetch of 0 or more",
            got=describe(prefetch),
        )
    ranks = _with_transfers(schedule, bars)
    ranks = tuple(tuple(_with_reductions(actions, is_each=zero >= 2)) for actions in ranks)
    if zero == 3:
        return tuple(tuple(_with_short_leases(actions, prefetch)) for actions in ranks)
    if zero:
        return tuple(tuple(_with_long_leases(actions, is_ended_early=zero == 2)) for actions in ranks)
    return ranks


def _with_transfers(schedule: Schedule, bars: Sequence[Sequence[Bar]]) -> _Lists:
    # (moment, 0 for a transfer and 1 for compute, so that a tensor is received before it is used; then anything that is
    # the same at both ends)
    lines: list[list[tuple[tuple[float, int, int, str, int], Action]]] = [[] for _ in schedule.ranks]
    for rank, of_rank in enumerate(bars):
        for bar in of_rank:
            lines[rank].append(((bar.start, 1, 0, "", 0), bar.action))
            for part in bar.action.parts or (bar.action,):
                send = send_after(part, schedule.placement)
                if send is not None:
                    receive, microbatch = partner(send), send.microbatch or 0
                    point = (bar.end, 0, send.stage, send.kind.value, microbatch)
                    lines[rank].append((point, send))
                    lines[schedule.placement.rank_of(receive.stage, microbatch)].append((point, receive))
    return tuple(tuple(action for _, action in sorted(line)) for line in lines)


def _with_reductions(actions: Sequence[Action], *, is_each: bool) -> Iterator[Action]:
    """Reduce a stage's gradients behind its last weight gradient, or behind each; what is to be sent is sent first."""
    left = Counter(stage for action in actions for stage in _weights_of(action))
    due: list[int] = []
    for action in actions:
        if action.kind not in TRANSFERS:
            yield from (Action(stage, Kind.REDUCE) for stage in due)
            due = []
        yield action
        for stage in _weights_of(action):
            left[stage] -= 1
            if is_each or not left[stage]:
                due.append(stage)
    yield from (Action(stage, Kind.REDUCE) for stage in due)


def _with_long_leases(actions: Sequence[Action], *, is_ended_early: bool) -> Iterator[Action]:
    """Unshard every stage once, at the beginning. It stays so until its last use, or until the end of the step."""
    left = Counter(stage for action in actions for stage in _stages_of(action))
    yield from (Action(stage, Kind.UNSHARD) for stage in left)
    for action in actions:
        yield action
        for stage in _stages_of(action):
            left[stage] -= 1
            if is_ended_early and not left[stage]:
                yield Action(stage, Kind.RESHARD)
    if not is_ended_early:
        yield from (Action(stage, Kind.RESHARD) for stage in left)


def _with_short_leases(actions: Sequence[Action], prefetch: int) -> Iterator[Action]:
    """Have unsharded what is in use and the next stages, nothing else. What is let go of is let go of first."""
    unsharded: list[int] = []
    for action, wanted in zip(actions, _wanted(actions, prefetch), strict=True):
        for stage in [stage for stage in unsharded if stage not in wanted]:
            unsharded.remove(stage)
            yield Action(stage, Kind.RESHARD)
        for stage in wanted:
            if stage not in unsharded:
                unsharded.append(stage)
                yield Action(stage, Kind.UNSHARD)
        yield action
    yield from (Action(stage, Kind.RESHARD) for stage in unsharded)


def _wanted(actions: Sequence[Action], prefetch: int) -> list[list[int]]:
    """For each action the stages that are to be unsharded: its own, and as many of the next ones, in order of use."""
    found: list[list[int]] = []
    order: list[int] = []  # of the next uses, seen from behind
    for action in reversed(actions):
        own = _stages_of(action)
        if own:
            order = [*own, *(stage for stage in order if stage not in own)]
        found.append(order[: max(1, len(own)) + prefetch])
    return found[::-1]


def _stages_of(action: Action) -> list[int]:
    """The stages whose parameters an action needs, each once."""
    return list(dict.fromkeys(part.stage for part in action.parts or (action,))) if action.kind in COMPUTE else []


def _weights_of(action: Action) -> list[int]:
    """The stages of which an action makes gradients of weights."""
    return [part.stage for part in action.parts or (action,) if part.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)]
