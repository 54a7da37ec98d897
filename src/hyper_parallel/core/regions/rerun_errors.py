"""What is said where recomputation does not give what forward gave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hyper_parallel._base.errors import StateError


def other_ops(replay: Any, first: Any, ops: Iterable[Any], where: str, *, lists_ops: bool) -> StateError:
    """`first`: the first op of the forward that is missing."""
    listing = " `debug=True` lists the ops."
    if lists_ops:
        lines = [f"  {'found  ' if replay.has_met(op) else 'missing'} {op}" for op in ops]
        listing = "\n".join(["", "Ops of the forward, and whether recomputation ran them:", *lines])
    got = "the end of the function" if replay.first_unknown is None else f"{replay.first_unknown} instead"
    if replay.first_unknown is not None and replay.first_unknown in str(first):
        got = "it with another number, or with another tensor from outside of the region"
    return StateError(
        "Recomputation did not do what forward did.",
        expected=str(first),
        got=got,
        where=where,
        do="Let the function take the same way each time, or let the policy save what decides about it." + listing,
    )


def other_values(where: str) -> StateError:
    return StateError(
        "Recomputation gave other values than forward.",
        expected="the same bits",
        got="others",
        where=where,
        do="Let the policy save this op, or the op before it that does not give the same result twice.",
    )
