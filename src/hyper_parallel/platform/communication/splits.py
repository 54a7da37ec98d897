"""Sizes: what is divided among ranks, and what is exchanged with each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.platform.arguments import check_size


def check_dim(dim: object, num_dims: int, name: str, call: str) -> int:
    """Return a dim counted from the front."""
    found = as_int(dim)
    if found is None:
        raise ArgumentTypeError(f"`{name}` of `{call}` is a dim.", expected="a whole number", got=describe(dim))
    if not -num_dims <= found < num_dims:
        raise ArgumentError(
            f"`{name}` of `{call}` is not a dim of the tensor.",
            expected=f"from {-num_dims} to {num_dims - 1}" if num_dims else "a tensor with at least one dim",
            got=describe(dim),
        )
    return found % num_dims


def check_divisible(shape: Sequence[int], dim: int, num_parts: int, call: str) -> int:
    """Return the length of one of `num_parts` equal parts of a dim."""
    if not shape:
        raise ArgumentError(f"`{call}` divides dim {dim}.", expected="a tensor with at least one dim", got="none")
    if shape[dim] % num_parts:
        raise ArgumentError(
            f"`{call}` divides dim {dim} equally among {num_parts} ranks.",
            expected=f"a length that is a multiple of {num_parts}",
            got=f"{shape[dim]} in shape {list(shape)}",
        )
    return shape[dim] // num_parts


def check_num_ranks(given: object, num_ranks: int, name: str, call: str) -> None:
    if as_int(given) != num_ranks:
        raise ArgumentError(
            f"`{name}` of `{call}` is the number of ranks in the group.", expected=str(num_ranks), got=describe(given)
        )


def check_output_shape(shape: Sequence[int], output_shape: object, num_ranks: int, call: str) -> tuple[int, ...]:
    """Return the shape of what an exchange of equal splits gives: as many elements as go in."""
    wanted = check_size(output_shape, "output_shape")
    check_divisible(shape, 0, num_ranks, call)
    if math.prod(wanted) != math.prod(shape):
        raise ArgumentError(
            f"`{call}` gives back as many elements as it is given.",
            expected=f"an output_shape of {math.prod(shape)} elements, as in {list(shape)}",
            got=f"{list(wanted)}, which has {math.prod(wanted)}",
        )
    return wanted


def check_splits(
    shape: Sequence[int], input_splits: object, output_splits: object, num_ranks: int, call: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rows sent to and received from each rank; both None: equal parts."""
    if (input_splits is None) != (output_splits is None):
        raise ArgumentError(
            f"`{call}` takes the splits of both sides.", expected="both input_splits and output_splits, or neither",
            got="only one",
        )  # fmt: skip
    if input_splits is None:
        part = check_divisible(shape, 0, num_ranks, call)
        return (part,) * num_ranks, (part,) * num_ranks
    if not shape:
        raise ArgumentError(f"`{call}` exchanges rows.", expected="a tensor with at least one dim", got="none")
    sent = _check_rows(input_splits, "input_splits", num_ranks, call)
    received = _check_rows(output_splits, "output_splits", num_ranks, call)
    if sum(sent) != shape[0]:
        raise ArgumentError(
            f"`{call}` sends every row to one rank.",
            expected=f"input_splits that add up to {shape[0]} rows",
            got=f"{list(sent)}, which adds up to {sum(sent)}",
        )
    return sent, received


def _check_rows(splits: object, name: str, num_ranks: int, call: str) -> tuple[int, ...]:
    if hasattr(splits, "tolist"):  # a tensor or array of counts
        splits = splits.tolist()
    rows = check_size(splits, name)
    if len(rows) != num_ranks:
        raise ArgumentError(
            f"`{name}` of `{call}` has one entry per rank.", expected=f"{num_ranks} entries", got=str(len(rows))
        )
    return rows
