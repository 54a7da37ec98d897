"""Who writes what: each box of each tensor by one of the ranks that hold it, so that all write about as much.

Every rank computes the same answer from the same descriptions, so nothing more is said between ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.boxes import Box
from hyper_parallel.core.parallel.saving.description import Described, Description, Spread
from hyper_parallel.core.parallel.saving.tiling import fault_of_tiling
from hyper_parallel.platform.tensor_file import TensorSpec

__all__ = ["Item", "WritePlan", "plan_writing"]

# What several ranks hold is cut into pieces of at most this share of what a rank writes: so much they may differ.
_PIECE_SHARE = 1 / 8
_LEAST_PIECE_BYTES = 1 << 20


class Item(NamedTuple):
    """A box of a tensor that one rank writes."""

    key: str
    box: Box


class WritePlan(NamedTuple):
    """The items of each rank, all tensors, and further names of their keys."""

    items: list[list[Item]]
    tensors: dict[str, Described]
    aliases: dict[str, str]
    names: list[dict[str, str]]  # of each description: what its keys are called here, where that is another name


class _Shared(NamedTuple):
    size_bytes: int
    item: Item
    ranks: Sequence[int]


def plan_writing(descriptions: Sequence[Description], description_of: Sequence[int]) -> WritePlan:
    """Decide who writes what. `description_of` has, for each rank, which of the descriptions is its own.

    Raises:
        ValueError: ranks describe one tensor in two ways, two stages call two weights by one name, or the boxes of a
            tensor do not tile it.
    """
    tensors, holders, aliases, names = _merged(descriptions, description_of)
    items: list[list[Item]] = [[] for _ in description_of]
    loads = [0] * len(description_of)
    total_bytes = sum(size_bytes(tensor.dtype, tensor.shape) for tensor in tensors.values())
    most_bytes = max(int(total_bytes / len(description_of) * _PIECE_SHARE), _LEAST_PIECE_BYTES)
    shared: list[_Shared] = []
    proved: set[tuple[int, tuple[int, ...]]] = set()
    for key, tensor in tensors.items():
        if 0 in tensor.shape:
            continue
        spread = tensor.spread
        if spread is None:
            spread = ((Box((0,) * len(tensor.shape), tuple(tensor.shape)), holders[key]),)
        elif (id(spread), tensor.shape) not in proved:
            _check_tiling(key, tensor, spread)
            proved.add((id(spread), tensor.shape))
        element_bytes = size_bytes(tensor.dtype, ())
        for box, owners in spread:
            num_bytes = box.num_elements * element_bytes
            if len(owners) == 1:
                items[owners[0]].append(Item(key, box))
                loads[owners[0]] += num_bytes
            else:
                for piece in _cut(box, -(-num_bytes // most_bytes)):
                    part = num_bytes * piece.num_elements // box.num_elements
                    shared.append(_Shared(part, Item(key, piece), owners))
    # The largest first, each to whom has least: the well known rule for even loads. The sort is stable.
    for size, item, ranks in sorted(shared, key=lambda entry: -entry.size_bytes):
        rank = min(ranks, key=loads.__getitem__)
        items[rank].append(item)
        loads[rank] += size
    return WritePlan(items, tensors, aliases, names)


def size_bytes(dtype: str, sizes: Sequence[int]) -> int:
    return TensorSpec("", dtype, tuple(sizes)).size_bytes


def _cut(box: Box, num: int) -> list[Box]:
    """Cut a box along its first dim that has a length, so that each piece is contiguous in it."""
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if num < 2 or dim is None:
        return [box]
    length = box.sizes[dim]
    num = min(num, length)
    begins = [length * index // num for index in range(num + 1)]
    return [
        Box(
            (*box.starts[:dim], box.starts[dim] + begin, *box.starts[dim + 1 :]),
            (*box.sizes[:dim], end - begin, *box.sizes[dim + 1 :]),
        )
        for begin, end in itertools.pairwise(begins)
    ]


def _merged(
    descriptions: Sequence[Description], description_of: Sequence[int]
) -> tuple[dict[str, Described], dict[str, tuple[int, ...]], dict[str, str], list[dict[str, str]]]:
    ranks_of: list[list[int]] = [[] for _ in descriptions]
    for rank, index in enumerate(description_of):
        ranks_of[index].append(rank)
    first_of_tie: dict[str, str] = {}
    tensors: dict[str, Described] = {}
    holders: dict[str, list[int]] = {}
    aliases: dict[str, str] = {}
    names: list[dict[str, str]] = []
    merged: dict[tuple[Spread, Spread], Spread] = {}
    for description, ranks in zip(descriptions, ranks_of, strict=True):
        renamed = {
            key: first_of_tie[tie] for key, tie in description.ties.items() if first_of_tie.setdefault(tie, key) != key
        }
        names.append(renamed)
        aliases |= renamed
        aliases |= {alias: renamed.get(key, key) for alias, key in description.aliases.items()}
        for own_key, tensor in description.tensors.items():
            key = renamed.get(own_key, own_key)
            known = tensors.get(key)
            if known is None:
                tensors[key] = tensor
                holders[key] = list(ranks)
                continue
            _check_same(key, known, tensor, is_tied=own_key in description.ties)
            if tensor.spread is not None and known.spread is not None and tensor.spread != known.spread:
                pair = known.spread, tensor.spread
                if pair not in merged:
                    merged[pair] = _both(*pair)
                tensors[key] = known._replace(spread=merged[pair])
            holders[key] += ranks
    return tensors, {key: tuple(sorted(set(ranks))) for key, ranks in holders.items()}, aliases, names


def _both(first: Spread, second: Spread) -> Spread:
    """Put two spreads of one tensor together: copies of a stage have a mesh each, and hold the same boxes."""
    ranks: dict[Box, list[int]] = {box: list(holders) for box, holders in first}
    for box, holders in second:
        ranks.setdefault(box, []).extend(holders)
    return tuple((box, tuple(sorted(set(holders)))) for box, holders in ranks.items())


def _check_same(key: str, known: Described, tensor: Described, *, is_tied: bool) -> None:
    if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
        raise ArgumentError(
            "Two ranks have different tensors of one name.",
            expected=f"{known.dtype}{list(known.shape)} on all ranks that have it",
            got=f"{tensor.dtype}{list(tensor.shape)}",
            where=key,
            do="Save models of one kind; stages of a pipeline keep the names of the whole model by `hp.split_stages`.",
        )
    if known.stage != tensor.stage and not is_tied:
        raise ArgumentError(
            "Two stages of a pipeline call two weights by one name.",
            expected="each weight in one stage, or `tied` in the stages that share it",
            got=f"it in stages {known.stage} and {tensor.stage}",
            where=key,
            do="Make stages by `hp.split_stages`, or of modules whose children keep their names of the whole model.",
        )
    if (known.spread is None) != (tensor.spread is None):
        raise ArgumentError(
            "A tensor is distributed on one rank and plain on another.",
            expected="the same on all ranks that have it",
            where=key,
        )


def _check_tiling(key: str, tensor: Described, spread: Spread) -> None:
    fault = fault_of_tiling([box for box, _ in spread], tensor.shape)
    if fault is not None:
        raise ArgumentError(
            "The parts of a tensor on the ranks do not make up the whole.",
            expected=f"parts that tile {list(tensor.shape)}",
            got=fault,
            where=key,
            do="Call `hp.save` on all ranks that have a part of the model.",
        )


def share_of_most(plan: WritePlan) -> float:
    """What the rank that writes most writes, over the mean of all ranks."""
    loads = [sum(size_bytes(plan.tensors[item.key].dtype, item.box.sizes) for item in items) for items in plan.items]
    return max(loads) * len(loads) / max(math.fsum(loads), 1)
