"""Which elements a chunk or a strided slice holds. Pure numbers, shared by both backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hyper_parallel._base.errors import ArgumentError, describe


class Span(NamedTuple):
    """`[start:stop:step]` with a positive step, read backwards if `is_reversed`."""

    start: int
    stop: int
    step: int
    is_reversed: bool


def check_dim(dim: int, num_dims: int) -> int:
    """`dim` as a number from 0; negative ones count from the end."""
    if not isinstance(dim, int) or not -num_dims <= dim < num_dims:
        raise ArgumentError(
            "There is no such dim.", expected=f"{-num_dims} to {num_dims - 1} ({num_dims} dims)", got=describe(dim)
        )
    return dim % num_dims


def chunk_bounds(length: int, num_chunks: int, index: int) -> tuple[int, int]:
    """First and last-plus-one element of a chunk; all but the last are ceil(length / num_chunks) long."""
    if not isinstance(num_chunks, int) or num_chunks < 1:
        raise ArgumentError(
            "`split_size` is the number of chunks.", expected="a whole number of at least 1", got=describe(num_chunks)
        )
    if not isinstance(index, int) or index < 0:
        raise ArgumentError("Chunks are counted from 0.", expected="an index of at least 0", got=describe(index))
    size = -(-length // num_chunks)
    return min(index * size, length), min((index + 1) * size, length)


def slice_spans(
    shape: Sequence[int], begin: Sequence[int | None], end: Sequence[int | None], stride: Sequence[int | None]
) -> list[Span]:
    """The span of each leading dim, with Python's meaning of negative and absent numbers."""
    if not len(begin) == len(end) == len(stride):
        raise ArgumentError(
            "A strided slice needs one begin, end and stride per dim.",
            expected="three lists of the same length",
            got=f"{len(begin)} begins, {len(end)} ends, {len(stride)} strides",
        )
    if len(begin) > len(shape):
        raise ArgumentError(
            "The slice has more dims than the tensor.", expected=f"at most {len(shape)}", got=str(len(begin))
        )
    if 0 in stride:
        raise ArgumentError("A stride of zero goes nowhere.", expected="a number other than 0", got=f"{list(stride)}")
    return [_span(slice(b, e, s).indices(n)) for n, b, e, s in zip(shape, begin, end, stride, strict=False)]


def _span(indices: tuple[int, int, int]) -> Span:
    start, stop, step = indices
    picked = range(start, stop, step)
    if len(picked) == 0:
        return Span(0, 0, 1, is_reversed=False)
    if step > 0:
        return Span(start, picked[-1] + 1, step, is_reversed=False)
    return Span(picked[-1], start + 1, -step, is_reversed=True)
