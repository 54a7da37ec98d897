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

    # For each DTensor of the call: the layout that it is moved to, or None; and the axes that it is tied on.
    moves: tuple[tuple[Layout | None, tuple[str, ...]], ...]
    positions: tuple[int, ...] | None  # where the DTensors are among the arguments; None: some are nested or named
    outputs: tuple[Spec | None, ...]  # None: what comes out stays as it is
    is_sequence: bool  # the outputs come in a list or tuple
    local: LocalCall | None  # None: the operator itself, on local tensors
    returns_argument: int | None  # an operator in place answers the DTensor at this position of the call's DTensors
    wrap_output: Callable[[Any], Any] | None  # None: results are wrapped by `outputs`
    has_empty_parts: bool  # some rank computes with nothing: the result is anchored (rule T3)
    name: str
    is_kept: bool = True  # False: decided anew each time
    simple: Spec | None = None  # the spec of the one output, where local tensors only have to be put in
    is_view: bool = False  # the output shares the memory of the one DTensor of the call: see `View`


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
