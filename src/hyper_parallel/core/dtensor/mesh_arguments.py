"""Checks of what a mesh is made from: shapes, ranks and names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.whole_numbers import as_int

__all__ = ["axis_names_of", "ranks_of", "shape_of"]


def ranks_of(mesh: Any, rank_list: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and ranks of a mesh: `mesh` has the ranks, or is the shape if there is a `rank_list`."""
    if rank_list is None:
        shape, ranks = _unnested(mesh)
    else:
        shape, ranks = shape_of(mesh), tuple(_int(rank, "rank") for rank in _listed(rank_list))
        if math.prod(shape) != len(ranks):
            raise ArgumentError(
                "The ranks do not fill the mesh.",
                expected=f"{math.prod(shape)} ranks for the shape {shape}",
                got=f"{len(ranks)}",
                do="Give as many ranks as the mesh has places.",
            )
    negative = [rank for rank in ranks if rank < 0]
    if negative:
        raise ArgumentError("A mesh has no negative ranks.", expected="0 or more", got=str(negative[0]))
    if len(set(ranks)) != len(ranks):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        raise ArgumentError(
            "A rank is in the mesh twice.",
            expected="each rank once",
            got=f"{twice[:8]} repeated",
            do="Remove the repeats.",
        )
    return shape, ranks


def shape_of(shape: object) -> tuple[int, ...]:
    sizes = tuple(_int(size, "size of an axis") for size in _listed(shape))
    if not sizes or min(sizes) < 1:
        raise ArgumentError(
            "A mesh has at least one axis, and each a size of at least 1.",
            expected="a shape such as (2, 4)",
            got=str(sizes),
        )
    return sizes


def axis_names_of(names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...]:
    if names is None:
        return tuple(f"axis{index}" for index in range(len(shape)))
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, Sequence):
        raise ArgumentTypeError("Mesh axes have names.", expected="a list of texts, one per axis", got=describe(names))
    for name in names:
        if not isinstance(name, str) or not name or name != name.strip():
            raise ArgumentTypeError(
                "A mesh axis has a name.", expected="a string without spaces around it", got=describe(name)
            )
    if len(names) != len(shape):
        raise ArgumentError(
            "The names do not match the axes of the mesh.",
            expected=f"{len(shape)} names for the shape {shape}",
            got=f"{len(names)}: {', '.join(map(repr, names))}",
            do="Give one name per axis in `mesh_dim_names`.",
        )
    if len(set(names)) != len(names):
        raise ArgumentError("Two axes of a mesh have the same name.", expected="each name once", got=str(tuple(names)))
    return tuple(names)


def _unnested(mesh: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and items of nested sequences."""
    items: list[Any] = [_listed(mesh)]
    shape = []
    while True:
        lengths = {len(item) for item in items}
        if len(lengths) != 1 or lengths == {0}:
            raise ArgumentError(
                "The ranks of a mesh form no full array.",
                expected="rows of one length, with at least one rank",
                got=describe(mesh),
            )
        shape.append(lengths.pop())
        items = [inner for item in items for inner in item]
        nested = [isinstance(item, (list, tuple)) for item in items]
        if not any(nested):
            return tuple(shape), tuple(_int(item, "rank") for item in items)
        if not all(nested):
            raise ArgumentError(
                "The ranks of a mesh form no full array.", expected="rows of one length", got=describe(mesh)
            )


def _listed(value: object) -> list[Any] | tuple[Any, ...]:
    """Return sequences, NumPy arrays and tensors as lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, range):
        value = tuple(value)
    if not isinstance(value, (list, tuple)):
        raise ArgumentTypeError(
            "A mesh is made from a sequence of ranks or sizes.", expected="a list, tuple or array", got=describe(value)
        )
    return value


def _int(value: object, what: str) -> int:
    number = as_int(value)
    if number is None:
        raise ArgumentTypeError(f"A {what} in a mesh is an int.", expected="an int", got=describe(value))
    return number
