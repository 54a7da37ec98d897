"""A schedule played with sends that block until they are received, and receives that block until they are sent.

    rank 0: 0F0 0SEND_F0 ...      plays 0F0, comes to its send, waits
    rank 1: 1RECV_F0 1F0 ...      comes to the receive: both go on

Where no rank can go on and lists are not at their ends, every one that stands is reported with what it waits for.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from hyper_parallel.core.parallel.pipeline.actions import COMPUTE, SENDS, TRANSFERS, Action, Kind, partner
from hyper_parallel.core.parallel.pipeline.keeping import Keeping
from hyper_parallel.core.parallel.pipeline.placement import Placement
from hyper_parallel.core.parallel.pipeline.verdict import Problem

if TYPE_CHECKING:
    from hyper_parallel.core.parallel.pipeline.schedule import Schedule

__all__ = ["Done", "Play", "inputs_of", "send_after"]

# (stage, kind, microbatch) of something that was done. A whole backward is noted as an input gradient: whoever waits,
# waits for that.
Done = tuple[int, Kind, int | None]


def inputs_of(action: Action, placement: Placement, has_transfers: bool) -> list[tuple[Done, int]]:
    """List what must have been done before a compute action or a send begins, and at which rank.

    With transfers that is always the own rank: what another rank makes, a receive brings.
    """
    found: list[tuple[Done, int]] = []
    for stage, kind, microbatch, _ in action.parts or (action,):
        if microbatch is None:
            continue
        route = placement.routes[placement.route_of[microbatch]]
        rank = route[stage]
        if kind is Kind.FORWARD:
            if stage > 0:
                if has_transfers and route[stage - 1] != rank:
                    found.append(((stage, Kind.RECV_F, microbatch), rank))
                else:
                    found.append(((stage - 1, Kind.FORWARD, microbatch), route[stage - 1]))
        elif kind is Kind.BACKWARD or kind is Kind.INPUT_GRAD:
            found.append(((stage, Kind.FORWARD, microbatch), rank))
            if stage < len(route) - 1:
                if has_transfers and route[stage + 1] != rank:
                    found.append(((stage, Kind.RECV_B, microbatch), rank))
                else:
                    found.append(((stage + 1, Kind.INPUT_GRAD, microbatch), route[stage + 1]))
        elif kind is Kind.WEIGHT_GRAD or kind is Kind.SEND_B:
            found.append(((stage, Kind.INPUT_GRAD, microbatch), rank))
        elif kind is Kind.SEND_F:
            found.append(((stage, Kind.FORWARD, microbatch), rank))
    return found


def send_after(action: Action, placement: Placement) -> Action | None:
    """Make the send of what a compute action (no pair) makes, if another rank needs it."""
    stage, kind, microbatch, _ = action
    if microbatch is None:
        return None
    route = placement.routes[placement.route_of[microbatch]]
    if kind is Kind.FORWARD and stage + 1 < len(route) and route[stage + 1] != route[stage]:
        return Action(stage, Kind.SEND_F, microbatch)
    if kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and stage > 0 and route[stage - 1] != route[stage]:
        return Action(stage, Kind.SEND_B, microbatch)
    return None


class Play:
    """One play of a schedule in which nothing is misplaced or missing. `problems` is empty if it comes to its end."""

    def __init__(self, schedule: Schedule, keeping: Keeping) -> None:
        kinds = {action.kind for actions in schedule.ranks for action in actions}
        self._schedule = schedule
        self._keeping = keeping
        self._has_transfers = not kinds.isdisjoint(TRANSFERS)
        self._has_leases = not kinds.isdisjoint((Kind.UNSHARD, Kind.RESHARD))
        self._has_reductions = Kind.REDUCE in kinds
        self._positions = [0] * schedule.num_ranks
        self._done: set[Done] = set()
        self._waiting: dict[Done, list[int]] = defaultdict(list)  # what ranks wait for
        self._standing: dict[Action, int] = {}  # transfers, named by their receives, to which one of two ranks has come
        self._unsharded: list[dict[int, None]] = [{} for _ in schedule.ranks]
        self._unreduced: list[dict[int, None]] = [{} for _ in schedule.ranks]
        self._kept = [0.0] * schedule.num_ranks
        self._peaks = [0.0] * schedule.num_ranks
        self._stopped: set[int] = set()  # ranks with a problem of their own
        self.problems: list[Problem] = []
        self.num_transfers = 0
        self.most_unsharded = [0] * schedule.num_ranks

    @property
    def peaks(self) -> list[float]:
        return [peak / self._keeping.unit for peak in self._peaks]

    def run(self) -> None:
        ready = list(range(self._schedule.num_ranks))
        while ready:
            ready += self._go_on(ready.pop())
        self._look_at_ends()

    def _go_on(self, rank: int) -> list[int]:
        """Play a rank until it waits or its list ends. Returns the ranks that can go on because of it."""
        actions = self._schedule.ranks[rank]
        woken: list[int] = []
        while self._positions[rank] < len(actions):
            action = actions[self._positions[rank]]
            reason = self._lease_problem(rank, action) if self._has_leases or self._has_reductions else None
            for need, source in inputs_of(action, self._schedule.placement, self._has_transfers):
                if need not in self._done:
                    if source != rank:
                        self._waiting[need].append(rank)
                        return woken
                    reason = reason or f"it needs the {Action(*need).words} before it"
            if reason is not None:
                self.problems.append(Problem(rank, self._positions[rank], action, reason))
                self._stopped.add(rank)
                return woken
            if action.kind in COMPUTE:
                woken += self._compute(rank, action)
            elif action.kind in TRANSFERS:
                receive = partner(action) if action.kind in SENDS else action
                other = self._standing.pop(receive, None)
                if other is None:
                    self._standing[receive] = rank
                    return woken
                self.num_transfers += 1
                self._done.add(receive[:3])
                self._positions[other] += 1
                woken.append(other)
            else:
                self._lease(rank, action)
            self._positions[rank] += 1
        return woken

    def _compute(self, rank: int, action: Action) -> list[int]:
        self._kept[rank] += self._keeping.added(action)
        self._peaks[rank] = max(self._peaks[rank], self._kept[rank])
        self._kept[rank] -= self._keeping.freed(action)
        woken: list[int] = []
        for part in action.parts or (action,):
            kind = Kind.INPUT_GRAD if part.kind is Kind.BACKWARD else part.kind
            self._done.add((part.stage, kind, part.microbatch))
            woken += self._waiting.pop((part.stage, kind, part.microbatch), ())
            if part.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                self._unreduced[rank][part.stage] = None
        return woken

    def _lease_problem(self, rank: int, action: Action) -> str | None:
        stages = [part.stage for part in action.parts] or [action.stage]
        if action.kind in COMPUTE and self._has_leases:
            for stage in stages:
                if stage not in self._unsharded[rank]:
                    return f"the parameters of stage {stage} are not unsharded here"
        elif action.kind is Kind.UNSHARD and action.stage in self._unsharded[rank]:
            return f"stage {action.stage} is unsharded already"
        elif action.kind is Kind.RESHARD and action.stage not in self._unsharded[rank]:
            return f"stage {action.stage} is not unsharded"
        elif action.kind is Kind.REDUCE and action.stage not in self._unreduced[rank]:
            return f"stage {action.stage} has no gradient that was not reduced"
        return None

    def _lease(self, rank: int, action: Action) -> None:
        if action.kind is Kind.UNSHARD:
            self._unsharded[rank][action.stage] = None
            self.most_unsharded[rank] = max(self.most_unsharded[rank], len(self._unsharded[rank]))
        elif action.kind is Kind.RESHARD:
            del self._unsharded[rank][action.stage]
        else:
            del self._unreduced[rank][action.stage]

    def _look_at_ends(self) -> None:
        """Report what stands, and what is left open at the end of a list."""
        for rank, actions in enumerate(self._schedule.ranks):
            position = self._positions[rank]
            if rank in self._stopped:
                continue
            if position < len(actions):
                self.problems.append(
                    Problem(rank, position, actions[position], self._why_it_stands(rank, actions[position]))
                )
                continue
            if self._has_leases:
                for stage in self._unsharded[rank]:
                    self.problems.append(Problem(rank, position, None, f"stage {stage} is still unsharded at the end"))
            if self._has_reductions:
                for stage in self._unreduced[rank]:
                    self.problems.append(
                        Problem(rank, position, None, f"the gradients of stage {stage} are not reduced at the end")
                    )

    def _why_it_stands(self, rank: int, action: Action) -> str:
        if action.kind in TRANSFERS:
            other = partner(action)
            source = self._schedule.placement.rank_of(other.stage, other.microbatch or 0)
        else:
            needs = inputs_of(action, self._schedule.placement, self._has_transfers)
            need, source = next(found for found in needs if found[0] not in self._done)
            other = Action(*need)
        position, theirs = self._positions[source], self._schedule.ranks[source]
        standing = f"stands at position {position}, {theirs[position]}" if position < len(theirs) else "is at its end"
        return f"it waits forever for {other.words}: rank {source} {standing}"
