"""Rules of reductions over dims, and of operators that need some dims whole."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.shard.dims import dims_in
from hyper_parallel.core.shard.rule_answer import RuleAnswer, answered
from hyper_parallel.core.shard.rules.views import answered_where_filled
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.strategies import P, Place, R, S, Strategy

__all__ = ["reduction", "whole_dims"]


def reduction(
    x: Spec, dim: object = None, keepdim: bool = False, op: str | None = None, how: str | None = None
) -> RuleAnswer:
    """Reduce over `dim` (None: all). `op` combines the parts of a split dim; without one that dim must be whole.

    `mean` divides a local sum by the global count, so that uneven parts weigh what they should: the parts are summed.
    `nansum` sums parts, too, but not partial values: one summand that is no number makes the whole no number.
    """
    dims = dims_in(dim, x.ndim) if x.ndim else ()  # a number has no dims, and may be asked for its first
    kept = [own for own in range(x.ndim) if own not in dims]
    if keepdim:
        shape = [1 if own in dims else length for own, length in enumerate(x.shape)]
        position = {own: own for own in kept}
    else:
        shape = [x.shape[own] for own in kept]
        position = {own: index for index, own in enumerate(kept)}
    strategies = [Strategy((R,), (R,))]
    strategies += [Strategy((S(own),), (S(position[own]),)) for own in kept]
    combined = "sum" if op in ("mean", "nansum") else op
    if combined is not None:
        strategies += [Strategy((S(own),), (P(combined),)) for own in dims]
    if op in ("sum", "mean"):
        strategies += [Strategy((P(partial_op),), (P(partial_op),)) for partial_op in ("sum", "avg")]
    elif op in ("max", "min"):
        strategies.append(Strategy((P(op),), (P(op),)))
    count = 1
    for own in dims:
        count *= x.shape[own]
    if op in ("max", "min"):
        # The framework refuses the maximum of nothing: a dim of which a rank holds nothing is gathered.
        return answered_where_filled(x, strategies, shape, dims=dims)
    return answered([x], strategies, shape, how="mean" if op == "mean" else how, count=count)


def whole_dims(
    x: Spec, dims: object, *shapes: Sequence[int], is_linear: bool = False, how: str | None = None
) -> RuleAnswer:
    """Work on each line along `dims` by itself: softmax, sort, cumsum.

    Outputs have the dims of the input, in its order.

    Without `shapes` there is one output of the shape of `x`; with `how="random"` ranks with the same part draw the same
    numbers.
    """
    needed = dims_in(dims, x.ndim) if dims != () and x.ndim else ()
    results = shapes or (x.shape,)
    strategies = [Strategy((R,), (R,) * len(results))]
    strategies += [Strategy((S(own),), (S(own),) * len(results)) for own in range(x.ndim) if own not in needed]
    if is_linear:
        partial: list[Place] = [P("sum"), P("avg")]
        strategies += [Strategy((place,), (place,) * len(results)) for place in partial]
    return answered([x], strategies, *results, how=how)
