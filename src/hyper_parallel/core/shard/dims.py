"""Dims as users write them: negative, one or several, or all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hyper_parallel._base.errors import ArgumentError

__all__ = ["dim_in", "dims_in"]


def dim_in(dim: int, ndim: int) -> int:
    """Return a dim counted from the beginning: `dim_in(-1, 3)` is 2.

    Raises:
        IndexError's kin: there is no such dim.
    """
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise ArgumentError("The tensor has no such dim.", expected=f"{-ndim} to {ndim - 1}", got=str(dim))
    return dim % ndim if ndim else 0


def dims_in(dims: Any, ndim: int) -> tuple[int, ...]:
    """Return several dims counted from the beginning, in ascending order; None and an empty list mean all."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return tuple(range(ndim))
    listed: Iterable[int] = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted({dim_in(int(dim), ndim) for dim in listed}))
