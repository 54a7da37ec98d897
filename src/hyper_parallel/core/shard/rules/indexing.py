"""Rules of operators on parts of a tensor: slices, splits, gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.shard.dims import dim_in
from hyper_parallel.core.shard.rule_answer import RuleAnswer, answered
from hyper_parallel.core.shard.rules.elementwise import broadcast_shape
from hyper_parallel.core.shard.rules.views import answered_where_filled, remap
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.strategies import P, Place, R, S, Strategy

__all__ = [
    "getitem",
    "index_by_tensor",
    "index_rows",
    "index_whole",
    "lines_by_index",
    "narrow",
    "pad",
    "scatter_lines",
    "select",
    "split",
    "unbind",
]

_PARTIAL: tuple[Place, ...] = (P("sum"), P("avg"), P("max"), P("min"), P("prod"))


def split(x: Spec, sizes: int | Sequence[int], dim: int = 0) -> RuleAnswer:
    """Cut pieces of given sizes along a dim, which must be whole."""
    at = dim_in(dim, x.ndim)
    length = x.shape[at]
    if isinstance(sizes, int):
        if sizes <= 0:
            raise ArgumentError("A piece has a positive size.", expected="1 or more", got=str(sizes))
        lengths = [min(sizes, length - start) for start in range(0, length, sizes)] or [0]
    else:
        lengths = list(sizes)
    if sum(lengths) != length or min(lengths) < 0:
        raise ArgumentError("The pieces do not add up.", expected=f"{length} in dim {dim}", got=str(lengths))
    return _pieces(x, at, [[*x.shape[:at], piece, *x.shape[at + 1 :]] for piece in lengths], {at})


def chunk(x: Spec, chunks: int, dim: int = 0) -> RuleAnswer:
    length = x.shape[dim_in(dim, x.ndim)]
    return split(x, max(-(-length // chunks), 1), dim)


def unbind(x: Spec, dim: int = 0) -> RuleAnswer:
    at = dim_in(dim, x.ndim)
    return _pieces(x, at, [[*x.shape[:at], *x.shape[at + 1 :]]] * x.shape[at], {at}, is_dropped=True)


def _pieces(x: Spec, at: int, shapes: list[list[int]], whole: set[int], is_dropped: bool = False) -> RuleAnswer:
    strategies = [Strategy((R,), (R,) * len(shapes))]
    strategies += [
        Strategy((S(other),), (S(other - (is_dropped and other > at)),) * len(shapes))
        for other in range(x.ndim)
        if other not in whole
    ]
    strategies += [Strategy((place,), (place,) * len(shapes)) for place in _PARTIAL]
    return answered([x], strategies, *shapes)


def narrow(x: Spec, dim: int, length: int) -> RuleAnswer:
    at = dim_in(dim, x.ndim)
    places = {other: other for other in range(x.ndim) if other != at or length == x.shape[at]}
    return remap(x, places, [*x.shape[:at], length, *x.shape[at + 1 :]])


def select(x: Spec, dim: int) -> RuleAnswer:
    at = dim_in(dim, x.ndim)
    places = {other: other - (other > at) for other in range(x.ndim) if other != at}
    return remap(x, places, [*x.shape[:at], *x.shape[at + 1 :]])


def getitem(x: Spec, index: Any) -> RuleAnswer:
    """Take ints, slices, None and `...`. A dim that is not taken whole must be whole; the rest stays split."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > x.ndim or items.count(Ellipsis) > 1:
        raise ArgumentError(
            "The index does not fit the tensor.", expected=f"at most {x.ndim} dims and one `...`", got=repr(index)
        )
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (x.ndim - used)
    places: dict[int, int] = {}
    shape: list[int] = []
    dim = 0
    for item in items:
        if item is None:
            shape.append(1)
            continue
        if isinstance(item, slice):
            start, stop, step = item.indices(x.shape[dim])
            length = len(range(start, stop, step))
            if (start, length, step) == (0, x.shape[dim], 1):
                places[dim] = len(shape)
            shape.append(length)
        elif not -x.shape[dim] <= item < x.shape[dim]:
            raise ArgumentError(
                f"The index is out of range in dim {dim}.",
                expected=f"{-x.shape[dim]} to {x.shape[dim] - 1}",
                got=str(item),
            )
        dim += 1
    return remap(x, places, shape)


def index_by_tensor(x: Spec, index: Spec, dim: int = 0) -> RuleAnswer:
    """Take `x[..., index, ...]`, one tensor of positions for a whole dim.

    The output has the dims of the index in its place.
    """
    at = dim_in(dim, x.ndim)
    if not x.ndim:
        return answered(
            [x, index], [Strategy((place, R), (place,)) for place in (R, *_PARTIAL)], (), how="by_positions"
        )
    shape = [*x.shape[:at], *index.shape, *x.shape[at + 1 :]]
    strategies = [Strategy((R, R), (R,))]
    strategies += [
        Strategy((S(other), R), (S(other + (index.ndim - 1) * (other > at)),)) for other in range(x.ndim) if other != at
    ]
    strategies += [Strategy((R, S(other)), (S(at + other),)) for other in range(index.ndim)]
    strategies += [Strategy((place, R), (place,)) for place in _PARTIAL]
    return answered([x, index], strategies, shape, how="by_positions")


def lines_by_index(x: Spec, dim: int, index: Spec) -> RuleAnswer:
    """Take values at positions along a whole dim (`gather`).

    Other dims are split together where their lengths are equal.
    """
    at = dim_in(dim, x.ndim)
    strategies = [Strategy((R, R), (R,)), Strategy((R, S(at)), (S(at),))]
    strategies += [
        Strategy((S(other), S(other)), (S(other),))
        for other in range(x.ndim)
        if other != at and x.shape[other] == index.shape[other]
    ]
    strategies += [Strategy((place, R), (place,)) for place in _PARTIAL[:2]]
    return answered([x, index], strategies, index.shape)


def scatter_lines(x: Spec, dim: int, index: Spec, source: Spec | None = None, in_place: bool = False) -> RuleAnswer:
    """Put values at positions along a whole dim (`scatter`)."""
    at = dim_in(dim, x.ndim)
    tensors = [x, index] if source is None else [x, index, source]
    strategies = [Strategy((R,) * len(tensors), (R,))]
    strategies += [
        Strategy((S(other),) * len(tensors), (S(other),))
        for other in range(x.ndim)
        if other != at and all(spec.shape[other] == x.shape[other] for spec in tensors)
    ]
    return answered(tensors, strategies, x.shape, pinned=[0] if in_place else [])


def pad(x: Spec, widths: Sequence[int], can_be_empty: bool = True) -> RuleAnswer:
    """Pad by pairs of widths, from the last dim on; padded dims must be whole.

    Some ways to pad refuse a part that is empty: a dim of which a rank holds nothing is gathered then.
    """
    shape = list(x.shape)
    whole = set()
    for pair in range(len(widths) // 2):
        before, after = widths[2 * pair : 2 * pair + 2]
        dim = x.ndim - 1 - pair
        shape[dim] += before + after
        if before or after:
            whole.add(dim)
    strategies = [Strategy((R,), (R,))]
    strategies += [Strategy((S(dim),), (S(dim),)) for dim in range(x.ndim) if dim not in whole]
    return answered([x], strategies, shape) if can_be_empty else answered_where_filled(x, strategies, shape)


def index_rows(x: Spec, indices: Sequence[Spec]) -> RuleAnswer:
    """Take several tensors of positions for the first dims, broadcast together: they and those dims are whole."""
    positions = broadcast_shape([spec.shape for spec in indices])
    shape = [*positions, *x.shape[len(indices) :]]
    count = len(indices)
    strategies = [Strategy((R,) * (count + 1), (R,))]
    strategies += [
        Strategy((S(dim), *(R,) * count), (S(dim - count + len(positions)),)) for dim in range(count, x.ndim)
    ]
    return answered([x, *indices], strategies, shape, how="by_positions")


def index_whole(x: Spec, indices: Sequence[Spec], shape: Sequence[int]) -> RuleAnswer:
    """Take any other mix of numbers, slices and positions: all of it is whole, or the values are partial."""
    strategies = [Strategy((place, *(R,) * len(indices)), (place,)) for place in (R, *_PARTIAL)]
    return answered([x, *indices], strategies, shape, how="by_positions")
