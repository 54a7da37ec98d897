"""Which elements of a dim a chunk or a strided slice holds. Pure numbers, shared by both backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.whole_numbers import as_int


class SliceRange(NamedTuple):
    """What a slice takes of one dim: `[start:stop:step]` with a positive step, read backwards if `is_reversed`."""

    start: int
    stop: int
    step: int
    is_reversed: bool


def check_dim(dim: int, num_dims: int) -> int:
    """Return `dim` as a number from 0; negative ones count from the end."""
    found = as_int(dim)
    if found is None or not -num_dims <= found < num_dims:
        raise ArgumentError(
            "There is no such dim.", expected=f"{-num_dims} to {num_dims - 1} ({num_dims} dims)", got=describe(dim)
        )
    return found % num_dims


def chunk_bounds(length: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Return the first and last-plus-one element of a chunk; all but the last are ceil(length / num_chunks) long."""
    parts, place = as_int(num_chunks), as_int(index)
    if parts is None or parts < 1:
        raise ArgumentError(
            "`split_size` is the number of chunks.", expected="a whole number of at least 1", got=describe(num_chunks)
        )
    if place is None or place < 0:
        raise ArgumentError("Chunks are counted from 0.", expected="an index of at least 0", got=describe(index))
    size = -(-length // parts)
    return min(place * size, length), min((place + 1) * size, length)


def slice_ranges(
    shape: Sequence[int], begin: Sequence[int | None], end: Sequence[int | None], stride: Sequence[int | None]
) -> list[SliceRange]:
    """Work out the range of each leading dim, with Python's meaning of negative and absent numbers."""
    listed = [_whole_or_none(name, numbers) for name, numbers in (("begin", begin), ("end", end), ("stride", stride))]
    begins, ends, strides = listed
    if not len(begins) == len(ends) == len(strides):
        raise ArgumentError(
            "A strided slice needs one begin, end and stride per dim.",
            expected="three lists of the same length",
            got=f"{len(begins)} begins, {len(ends)} ends, {len(strides)} strides",
        )
    if len(begins) > len(shape):
        raise ArgumentError(
            "The slice has more dims than the tensor.", expected=f"at most {len(shape)}", got=str(len(begins))
        )
    if 0 in strides:
        raise ArgumentError("A stride of zero goes nowhere.", expected="a number other than 0", got=describe(strides))
    return [_range_of(slice(b, e, s).indices(n)) for n, b, e, s in zip(shape, begins, ends, strides, strict=False)]


def _whole_or_none(name: str, numbers: object) -> list[int | None]:
    if isinstance(numbers, (str, bytes, dict)) or not hasattr(numbers, "__iter__") or not hasattr(numbers, "__len__"):
        raise ArgumentTypeError(
            f"`{name}` of a strided slice has one entry per dim.", expected="a list or tuple", got=describe(numbers)
        )
    found = [None if number is None else as_int(number) for number in numbers]
    if any(found_one is None and number is not None for found_one, number in zip(found, numbers, strict=True)):
        raise ArgumentError(
            f"`{name}` of a strided slice has one entry per dim.",
            expected="whole numbers, or None",
            got=describe(numbers),
        )
    return found


def _range_of(indices: tuple[int, int, int]) -> SliceRange:
    start, stop, step = indices
    picked = range(start, stop, step)
    if len(picked) == 0:
        return SliceRange(0, 0, 1, is_reversed=False)
    if step > 0:
        return SliceRange(start, picked[-1] + 1, step, is_reversed=False)
    return SliceRange(picked[-1], start + 1, -step, is_reversed=True)
