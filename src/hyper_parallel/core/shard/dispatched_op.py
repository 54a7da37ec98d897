"""`DispatchedOp`: what the dispatcher does for one operator on distributed tensors.

Made once, carried out again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.rule_answer import LocalCall, RuleAnswer
from hyper_parallel.core.shard.spec import Spec


class DispatchedOp(NamedTuple):
    """One call made ready to be carried out. The dispatcher keeps it until a rule changes.

    Example: for `x + y` of layouts (dp, -) and (-, -) it moves `y` to (dp, -), and calls `+` on the two local tensors.
    """

    moves: tuple[
        tuple[Layout | None, tuple[str, ...]], ...
    ]  # per DTensor: where to, if it must be moved; axes to be tied on
    positions: tuple[int, ...] | None  # of the DTensors among the arguments; None: some are nested or named
    outputs: tuple[Spec | None, ...]
    is_sequence: bool  # the outputs come in a list or tuple
    local: LocalCall | None
    returns_argument: int | None
    wrap_output: Callable[[Any], Any] | None  # None: by `outputs`
    has_empty_parts: bool  # on some rank
    name: str
    is_kept: bool = True  # for the next call
    simple: Spec | None = None  # of the one output, where arguments only have to be replaced by their local tensors
    is_view: bool = False  # of the one DTensor among its arguments: see `View`


def has_empty_parts(tensors: Sequence[Any], answer: RuleAnswer | None) -> bool:
    """Say whether a rank computes with nothing. All ranks answer alike."""
    specs = [tensor._spec for tensor in tensors]
    if answer is not None:
        specs += answer.outputs
        specs += [
            Spec(layout, spec.shape)
            for layout, spec in zip(answer.inputs, specs, strict=False)
            if layout.ndim == spec.ndim
        ]
    return any(spec.has_empty_parts for spec in specs)
