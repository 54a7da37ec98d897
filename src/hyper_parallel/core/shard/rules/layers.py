"""Rules of what layers of a transformer compute: embeddings, norms, attention, the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.shard.rule_answer import RuleAnswer, answered
from hyper_parallel.core.shard.rules.elementwise import broadcast_shape
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.strategies import P, Place, R, S, Strategy

__all__ = ["attention", "cross_entropy", "embedding", "norm_over_last"]


def embedding(ids: Spec, table: Spec) -> RuleAnswer:
    """Look up rows of a table.

    Where the rows are split, each rank looks up its own and leaves zeros: the parts are summed.
    """
    if table.ndim != 2:
        raise ArgumentError("An embedding table has two dims.", expected="[rows, width]", got=str(table.shape))
    strategies = [Strategy((R, R), (R,)), Strategy((R, S(1)), (S(ids.ndim),))]
    strategies += [Strategy((S(dim), R), (S(dim),)) for dim in range(ids.ndim)]
    strategies.append(Strategy((R, S(0)), (P("sum"),)))
    answer = answered([ids, table], strategies, [*ids.shape, table.shape[1]])
    is_split = any(table.layout.mesh.size(axis) > 1 for axis in answer.inputs[1].axes_of(0))
    return answer._replace(how="rows_of_a_part") if is_split else answer


def norm_over_last(x: Spec, count: int, *weights: Spec) -> RuleAnswer:
    """Normalize (layer norm, RMS norm) over the last `count` dims, which must be whole; so must the weights."""
    tensors = [x, *weights]
    strategies = [Strategy((R,) * len(tensors), (R,))]
    strategies += [Strategy((S(dim), *(R,) * len(weights)), (S(dim),)) for dim in range(x.ndim - count)]
    return answered(tensors, strategies, x.shape)


def attention(
    query: Spec, key: Spec, value: Spec, mask: Spec | None = None, is_causal: bool = False, is_random: bool = False
) -> RuleAnswer:
    """Attend by scaled dot products, [..., heads, positions, width].

    Split by batch and heads; by query position where no mask depends on it. With fewer key heads than query heads,
    heads are split where both divide.
    """
    tensors = [query, key, value] if mask is None else [query, key, value, mask]
    lead = _lead_shape(query, key, value)
    shape = [*lead, query.shape[-2], value.shape[-1]]
    ndim = len(shape)
    strategies = [Strategy((R,) * len(tensors), (R,))]
    if len({spec.ndim for spec in tensors[:3]}) > 1:
        # The framework does not stretch an empty part over new dims, so all tensors are whole.
        return answered(tensors, strategies, shape, how="random" if is_random else None)
    for dim in range(len(lead)):
        owns = [dim - (ndim - spec.ndim) for spec in tensors]
        lengths = {spec.shape[dim] for spec in tensors[:3]}
        parts = max(_num_parts(spec, own) for spec, own in zip(tensors, owns, strict=True) if own >= 0)
        if len(lengths) > 1 and any(length % parts for length in lengths):
            continue  # a rank would have query heads whose key heads are elsewhere
        places: list[Place] = [S(dim)] * 3
        if mask is not None:
            places.append(S(owns[3]) if owns[3] >= 0 and mask.shape[owns[3]] == lead[dim] else R)
        strategies.append(Strategy(tuple(places), (S(dim),)))
    if not is_causal:
        places = [S(query.ndim - 2), R, R]
        if mask is not None:
            own = mask.ndim - 2
            places.append(S(own) if own >= 0 and mask.shape[own] == query.shape[-2] else R)
        strategies.append(Strategy(tuple(places), (S(ndim - 2),)))
    strategies.append(Strategy((R, R, S(value.ndim - 1), *(R,) * (len(tensors) - 3)), (S(ndim - 1),)))
    return answered(tensors, strategies, shape, how="random" if is_random else None)


def _lead_shape(query: Spec, key: Spec, value: Spec) -> tuple[int, ...]:
    """Return batch and heads of the result: those of the query, or what all three are stretched to."""
    leads = [spec.shape[:-2] for spec in (query, key, value)]
    is_stretched = len({len(lead) for lead in leads}) > 1 or any(
        1 in lengths and lengths != {1} for lengths in map(set, zip(*leads, strict=False))
    )
    return broadcast_shape(leads) if is_stretched else leads[0]


def _num_parts(spec: Spec, dim: int) -> int:
    return math.prod(spec.layout.mesh.size(axis) for axis in spec.layout.axes_of(dim))


def cross_entropy(
    logits: Spec, target: Spec, *, reduction: str = "mean", is_by_index: bool = True, can_split_classes: bool = True
) -> RuleAnswer:
    """Split the loss by rows, or by classes where targets are indices: each rank then has its part of the softmax.

    By rows, `mean` divides the local sum by the global number of rows that count, and `sum` leaves the sum: the parts
    are summed.
    """
    dims = logits.ndim
    classes = 0 if dims == 1 else 1
    rows = [dim for dim in range(dims) if dim != classes]
    shape: Sequence[int] = [logits.shape[dim] for dim in rows] if reduction == "none" else []
    strategies = [Strategy((R, R), (R,))]
    for index, dim in enumerate(rows):
        own = index if is_by_index else dim
        out: Place = S(index) if reduction == "none" else P("sum")
        strategies.append(Strategy((S(dim), S(own)), (out,)))
    if is_by_index and can_split_classes:
        strategies.append(Strategy((S(classes), R), (R,)))
    return answered([logits, target], strategies, shape, how="cross_entropy", classes=classes)
