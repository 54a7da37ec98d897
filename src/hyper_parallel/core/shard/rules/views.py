"""Rules of operators that rearrange: reshape, permute, expand, squeeze, slices, joining and splitting."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.boxes import chunk_range
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.dims import dim_in, dims_in
from hyper_parallel.core.shard.rule_answer import RuleAnswer, answered
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.strategies import P, Place, R, S, Strategy

__all__ = [
    "answered_where_filled",
    "expand",
    "join",
    "permute",
    "remap",
    "repeat",
    "reshape",
    "squeeze",
    "stack",
    "unsqueeze",
]

_PARTIAL: tuple[Place, ...] = (
    P("sum"),
    P("avg"),
    P("max"),
    P("min"),
    P("prod"),
)  # whatever moves values about goes through all of these


def remap(x: Spec, places: dict[int, int], shape: Sequence[int], *, how: str | None = None, **facts: Any) -> RuleAnswer:
    """Make an output whose dims `places[dim]` are the input's, whole or split; the input's other dims must be whole."""
    strategies = [Strategy((R,), (R,))]
    strategies += [Strategy((S(source),), (S(target),)) for source, target in places.items()]
    strategies += [Strategy((place,), (place,)) for place in _PARTIAL]
    return answered([x], strategies, shape, how=how, **facts)._replace(is_view=True)


def permute(x: Spec, dims: Sequence[int]) -> RuleAnswer:
    order = [dim_in(dim, x.ndim) for dim in dims]
    if sorted(order) != list(range(x.ndim)):
        raise ArgumentError("These are not all dims, each once.", expected=f"{x.ndim} dims", got=str(tuple(dims)))
    return remap(x, {source: target for target, source in enumerate(order)}, [x.shape[source] for source in order])


def unsqueeze(x: Spec, dim: int) -> RuleAnswer:
    at = dim_in(dim, x.ndim + 1)
    return remap(x, {source: source + (source >= at) for source in range(x.ndim)}, [*x.shape[:at], 1, *x.shape[at:]])


def squeeze(x: Spec, dim: object = None) -> RuleAnswer:
    """Drop dims of length 1.

    A dim that is split over several ranks is gathered first: elsewhere its local length is 0.
    """
    named = dims_in(dim, x.ndim) if x.ndim and dim != () else ()
    dropped = {own for own in named if x.shape[own] == 1}
    kept = [own for own in range(x.ndim) if own not in dropped]
    # The local call is told the dims: one whose length is 1 on this rank only must stay.
    return remap(
        x, {source: target for target, source in enumerate(kept)}, [x.shape[own] for own in kept],
        how="squeeze", dims=tuple(sorted(dropped)),
    )  # fmt: skip


def expand(x: Spec, shape: Sequence[int]) -> RuleAnswer:
    """Stretch dims, which must be whole; the local call gets local lengths."""
    wanted = list(shape)
    new = len(wanted) - x.ndim
    if new < 0:
        raise ArgumentError(
            "A tensor cannot be expanded to fewer dims.", expected=f"{x.ndim} or more", got=str(tuple(shape))
        )
    places = {}
    for dim, length in enumerate(x.shape):
        asked_length = wanted[new + dim]
        if asked_length not in (-1, length) and length != 1:
            raise ArgumentError(
                "The tensor cannot be expanded to this shape.",
                expected=f"{length} or -1 in dim {new + dim}",
                got=str(asked_length),
            )
        if asked_length in (-1, length):
            wanted[new + dim] = length
            places[dim] = new + dim
    return remap(x, places, wanted, how="to_local_shape")


def repeat(x: Spec, sizes: Sequence[int]) -> RuleAnswer:
    new = len(sizes) - x.ndim
    if new < 0:
        raise ArgumentError("Too few repetitions.", expected=f"{x.ndim} or more", got=str(tuple(sizes)))
    lengths = (*(1,) * new, *x.shape)
    places = {dim: new + dim for dim in range(x.ndim) if sizes[new + dim] == 1}
    shape = [length * count for length, count in zip(lengths, sizes, strict=True)]
    return remap(x, places, shape)._replace(is_view=False)


def reshape(x: Spec, shape: Sequence[int]) -> RuleAnswer:
    """Reshape, keeping a split where the local reshape gives the same parts; elsewhere the dim is gathered first.

    Lengths are cut into the smallest groups of equal product: [2, 6, 4] to [12, 2, 2] is [2, 6] to [12] and [4] to [2,
    2]. Within a group only the first dim of both sides may be split, and only where the parts begin and end at the same
    elements.
    """
    target = _without_minus_one(x, shape)
    pairs = []  # (source dim, elements of one of its rows, target dim, elements of one of its rows)
    for sources, targets in _groups(x.shape, target):
        if sources and targets:
            source, result = _head(sources, x.shape), _head(targets, target)
            inner = math.prod(x.shape[dim] for dim in sources if dim > source)
            rest = math.prod(target[dim] for dim in targets if dim > result)
            pairs.append((source, inner, result, rest))
    while True:
        strategies = [Strategy((R,), (R,)), *(Strategy((S(pair[0]),), (S(pair[2]),)) for pair in pairs)]
        strategies += [Strategy((place,), (place,)) for place in _PARTIAL]
        answer = answered([x], strategies, target, how="to_local_shape")
        # Which axes split a dim is known only now, and with them where its parts begin and end.
        right = [pair for pair in pairs if _same_parts(x, answer.inputs[0].axes_of(pair[0]), pair, target)]
        if right == pairs:
            return answer._replace(is_view=True)
        pairs = right


def _head(dims: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the outermost dim that has more than one element."""
    return next((dim for dim in dims if lengths[dim] != 1), dims[0])


def _same_parts(x: Spec, axes: Sequence[str], pair: tuple[int, int, int, int], target: Sequence[int]) -> bool:
    """Say whether the parts of the source dim, split by these axes, are parts of the target dim."""
    source, inner, result, rest = pair
    before = [(begin * inner, end * inner) for begin, end in _parts(x.layout, axes, x.shape[source])]
    after = [(begin * rest, end * rest) for begin, end in _parts(x.layout, axes, target[result])]
    return before == after


def _parts(layout: Layout, axes: Sequence[str], length: int) -> list[tuple[int, int]]:
    parts = [(0, length)]
    for axis in axes:
        count = layout.mesh.size(axis)
        parts = [
            (begin + start, begin + start + size)
            for begin, end in parts
            for start, size in (chunk_range(end - begin, count, index) for index in range(count))
        ]
    return parts


def answered_where_filled(
    x: Spec, strategies: Sequence[Strategy], shape: Sequence[int], dims: Sequence[int] | None = None
) -> RuleAnswer:
    """Answer for an operator that refuses an empty part.

    `dims` (None: all) are split only where every rank gets some.
    """
    watched = range(x.ndim) if dims is None else dims
    left = list(strategies)
    while True:
        answer = answered([x], left, shape)
        layout = answer.inputs[0]
        # Which axes split a dim is known only now.
        empty = {S(dim) for dim in watched if _has_empty_part(layout, dim, x.shape[dim])}
        if not empty:
            return answer
        left = [strategy for strategy in left if strategy.inputs[0] not in empty]


def _has_empty_part(layout: Layout, dim: int, length: int) -> bool:
    axes = layout.axes_of(dim)
    return bool(axes) and any(begin == end for begin, end in _parts(layout, axes, length))


def _without_minus_one(x: Spec, shape: Sequence[int]) -> list[int]:
    target = list(shape)
    if target.count(-1) == 1:
        rest = -math.prod(target)
        target[target.index(-1)] = x.num_elements // rest if rest else 0
    if math.prod(target) != x.num_elements or min(target, default=0) < 0:
        raise ArgumentError(
            "The tensor cannot have this shape.",
            expected=f"{x.num_elements} elements, of {x.shape}",
            got=str(tuple(shape)),
        )
    return target


def _groups(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield dims of both sides with equal products, as few as possible.

    Dims of length 1 join nobody who needs none.
    """
    i = j = 0
    while i < len(source) or j < len(target):
        left, right = [], []
        product_left = product_right = 1
        if i < len(source):
            left.append(i)
            product_left = source[i]
            i += 1
        if j < len(target) and not (product_left == 1 and left and target[j] != 1):
            right.append(j)
            product_right = target[j]
            j += 1
        while product_left != product_right and (i < len(source) or j < len(target)):
            if product_left < product_right and i < len(source):
                left.append(i)
                product_left *= source[i]
                i += 1
            elif j < len(target):
                right.append(j)
                product_right *= target[j]
                j += 1
            else:
                left.append(i)
                product_left *= source[i]
                i += 1
        yield left, right


def join(tensors: Sequence[Spec], dim: int) -> RuleAnswer:
    """Join tensors (`cat`): whole along `dim`, split alike elsewhere."""
    tensors, plain = _with_plain(tensors)
    # Old programs join an empty vector to anything; it has no dims to be split.
    ndim = max(spec.ndim for spec in tensors)
    if ndim == 0:
        raise ArgumentError("Tensors without dims cannot be joined.", do="Use `stack`.")
    at = dim_in(dim, ndim)
    first = next(spec for spec in tensors if spec.ndim == ndim)
    for spec in tensors:
        differs = spec.ndim != ndim or any(
            a != b for other, (a, b) in enumerate(zip(spec.shape, first.shape, strict=False)) if other != at
        )
        if differs:
            raise ArgumentError(
                f"Tensors to be joined along dim {dim} differ elsewhere.",
                expected=f"{first.shape}",
                got=str(spec.shape),
            )
    shape = [*first.shape]
    shape[at] = sum(spec.shape[at] for spec in tensors)
    strategies = [Strategy((R,) * len(tensors), (R,))]
    strategies += [Strategy((S(other),) * len(tensors), (S(other),)) for other in range(ndim) if other != at]
    strategies += [Strategy((place,) * len(tensors), (place,)) for place in _PARTIAL]
    return _without(plain, answered(tensors, strategies, shape, pinned=plain))


def stack(tensors: Sequence[Spec], dim: int) -> RuleAnswer:
    tensors, plain = _with_plain(tensors)
    first = tensors[0]
    if any(spec.shape != first.shape for spec in tensors):
        raise ArgumentError(
            "Tensors to be stacked have different shapes.", got=", ".join(str(spec.shape) for spec in tensors)
        )
    at = dim_in(dim, first.ndim + 1)
    strategies = [Strategy((R,) * len(tensors), (R,))]
    strategies += [
        Strategy((S(source),) * len(tensors), (S(source + (source >= at)),)) for source in range(first.ndim)
    ]  # fmt: skip
    strategies += [Strategy((place,) * len(tensors), (place,)) for place in _PARTIAL]
    shape = [*first.shape[:at], len(tensors), *first.shape[at:]]
    return _without(plain, answered(tensors, strategies, shape, pinned=plain))


def _with_plain(tensors: Sequence[Any]) -> tuple[list[Spec], list[int]]:
    """Put a spec in the place of each plain number among distributed tensors, and say where these stand.

    A plain tensor without dims may stand there: it is the same number on all ranks.
    """
    distributed = next(tensor for tensor in tensors if isinstance(tensor, Spec))
    plain = [index for index, tensor in enumerate(tensors) if not isinstance(tensor, Spec)]
    number = Spec(Layout(distributed.layout.mesh, ()), ())
    return [tensor if isinstance(tensor, Spec) else number for tensor in tensors], plain


def _without(plain: Sequence[int], answer: RuleAnswer) -> RuleAnswer:
    """Leave the plain ones out of the answer."""
    return answer._replace(inputs=tuple(layout for index, layout in enumerate(answer.inputs) if index not in plain))
