"""What actions cost, in time: a table that a user may leave gaps in.

{"F": 1.0, "B": 2.0}               I = W = 1, half of a backward each; a pair takes F + B, transfers nothing
{"F": [1, 1, 2], "SEND_F": 0.1}    stage 2 is twice as slow forward
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.core.parallel.pipeline.actions import Action, Kind

__all__ = ["Cost", "cost_function"]

Cost = float | Sequence[float]  # the same for all stages, or one for each

_KINDS = ("F", "I", "W", "B", "OVERLAP_F_B", "SEND_F", "SEND_B", "UNSHARD", "REDUCE_GRAD")


def cost_function(num_stages: int, costs: Mapping[str, Cost]) -> Callable[[Action], float]:
    """Make the function that says what an action costs; `costs` may leave out what follows from the rest."""
    if not isinstance(costs, Mapping):
        raise ArgumentTypeError("Costs are a table.", expected='such as {"F": 1, "B": 2}', got=describe(costs))
    table = {Kind(kind): _per_stage(kind, value, num_stages) for kind, value in costs.items() if _is_kind(kind)}
    ones, zeros = (1.0,) * num_stages, (0.0,) * num_stages
    forward = table.setdefault(Kind.FORWARD, ones)
    whole = table.get(Kind.BACKWARD)
    halves = ones if whole is None else tuple(value / 2 for value in whole)
    first, second = table.setdefault(Kind.INPUT_GRAD, halves), table.setdefault(Kind.WEIGHT_GRAD, halves)
    backward = table.setdefault(Kind.BACKWARD, tuple(one + other for one, other in zip(first, second, strict=True)))
    for kind in (Kind.SEND_F, Kind.SEND_B, Kind.UNSHARD, Kind.REDUCE):
        table.setdefault(kind, zeros)
    pair = table.get(Kind.OVERLAP)

    def cost(action: Action) -> float:
        if not action.parts:
            return table[action.kind][action.stage]
        ahead, back = action.parts
        return forward[ahead.stage] + backward[back.stage] if pair is None else pair[ahead.stage]

    return cost


def _is_kind(kind: str) -> bool:
    if kind in _KINDS:
        return True
    raise ArgumentError(
        "There is nothing of this kind to cost anything.", expected=", ".join(_KINDS), got=describe(kind)
    )


def _per_stage(kind: str, value: Cost, num_stages: int) -> tuple[float, ...]:
    try:
        found = tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),) * num_stages
    except (TypeError, ValueError):
        found = ()
    if len(found) != num_stages or not all(0 <= time < math.inf for time in found):
        raise ArgumentError(
            f"This is no cost of {kind}.",
            expected=f"a time of 0 or more, or one for each of {num_stages} stages",
            got=describe(value),
        )
    return found
