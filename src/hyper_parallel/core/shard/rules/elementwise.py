"""Rules of operators that treat every element alike, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.shard.rule_answer import RuleAnswer, answered
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.strategies import P, Place, R, S, Strategy

__all__ = ["broadcast_shape", "elementwise"]

# How an operator acts on values that are still to be summed.
LINEAR = "linear"  # f(a + b) = f(a) + f(b), in all tensors together: neg, add, a cast, a product with a number
MULTIPLY = "multiply"  # linear in each tensor alone: mul
DIVIDE = "divide"  # linear in the first: div


def elementwise(*tensors: Spec, kind: str = "", in_place: bool = False, how: str | None = None) -> RuleAnswer:
    """Split broadcast dims together; a dim of length 1 that is stretched stays whole."""
    shape = broadcast_shape([spec.shape for spec in tensors])
    if in_place and shape != tensors[0].shape:
        raise ArgumentError(
            "An operator in place cannot enlarge its tensor.", expected=str(tensors[0].shape), got=str(shape)
        )
    strategies = [Strategy((R,) * len(tensors), (R,))]
    for dim, length in enumerate(shape):
        places: list[Place] = []
        for spec in tensors:
            own = dim - (len(shape) - spec.ndim)
            places.append(S(own) if own >= 0 and spec.shape[own] == length else R)
        strategies.append(Strategy(tuple(places), (S(dim),)))
    for op in ("sum", "avg"):
        if kind == LINEAR:
            strategies.append(Strategy((P(op),) * len(tensors), (P(op),)))
        elif kind == MULTIPLY:
            strategies += [Strategy(_only(i, op, len(tensors)), (P(op),)) for i in range(len(tensors))]
        elif kind == DIVIDE:
            strategies.append(Strategy(_only(0, op, len(tensors)), (P(op),)))
    answer = answered(tensors, strategies, shape, pinned=[0] if in_place else [], how=how)
    if in_place and answer.outputs[0].layout is not tensors[0].layout:
        raise ArgumentError(
            "An operator in place cannot change the layout of its tensor.",
            expected=repr(tensors[0].layout),
            got=repr(answer.outputs[0].layout),
            do="Use the form that returns a new tensor.",
        )
    return answer


def _only(index: int, op: str, count: int) -> tuple[Place, ...]:
    return tuple(P(op) if i == index else R for i in range(count))


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape that these are stretched to.

    Raises:
        ValueError: two lengths of one dim differ, and neither is 1.
    """
    ndim = max(len(shape) for shape in shapes)
    result = [1] * ndim
    for shape in shapes:
        for dim, length in enumerate(shape, ndim - len(shape)):
            if length != 1 and result[dim] not in (1, length):
                raise ArgumentError(
                    "The global shapes do not fit together.",
                    expected="equal lengths, or 1, in every dim from the right",
                    got=" and ".join(str(tuple(lengths)) for lengths in shapes),
                )
            result[dim] = length if length != 1 else result[dim]
    return tuple(result)
