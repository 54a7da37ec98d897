"""What a rank holds of a checkpoint, in a form that other ranks can be told: plain data, without a tensor.

Ranks that hold the same in the same way describe it by the same text. So of all descriptions that are equal only one
has to travel: ranks compare a digest first.

Example: two ranks of a mesh that share a weight in halves both say
`{"tensors": [["model/w", "F32", [4, 2], 0, -1]], "spreads": [[[[0], [0, 0], [2, 2]], [[1], [2, 0], [2, 2]]]], ...}`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.boxes import Box

__all__ = ["Described", "Description", "Spread", "merged_spread"]

# Each box of a tensor with the ranks that hold it.
Spread = tuple[tuple[Box, tuple[int, ...]], ...]


class Described(NamedTuple):
    """A tensor. Without a `spread` it is whole, here and on every other rank that describes it so."""

    dtype: str
    shape: tuple[int, ...]
    spread: Spread | None
    stage: int | None  # of a pipeline; two stages may not call two weights by one name


class Description(NamedTuple):
    """All tensors by key; `aliases` are further names of a key, `ties` what a key is called in common with others'."""

    tensors: Mapping[str, Described]
    aliases: Mapping[str, str]
    ties: Mapping[str, str]

    def to_text(self) -> str:
        numbers: dict[int, int] = {}
        spreads: list[Any] = []
        rows: list[Any] = []
        for key, (dtype, shape, spread, stage) in self.tensors.items():
            number = -1
            if spread is not None:
                # By identity: equal layouts give the same object, and comparing them would take long.
                if id(spread) not in numbers:
                    numbers[id(spread)] = len(spreads)
                    spreads.append([[ranks, box.starts, box.sizes] for box, ranks in spread])
                number = numbers[id(spread)]
            rows.append([key, dtype, shape, number, -1 if stage is None else stage])
        return json.dumps(
            {"tensors": rows, "spreads": spreads, "aliases": dict(self.aliases), "ties": dict(self.ties)},
            separators=(",", ":"),
        )

    @classmethod
    def from_text(cls, text: str) -> Description:
        fields = json.loads(text)
        spreads = [
            tuple((Box(tuple(starts), tuple(sizes)), tuple(ranks)) for ranks, starts, sizes in rows)
            for rows in fields["spreads"]
        ]
        tensors = {
            key: Described(dtype, tuple(shape), None if at < 0 else spreads[at], None if stage < 0 else stage)
            for key, dtype, shape, at, stage in fields["tensors"]
        }
        return cls(tensors, fields["aliases"], fields["ties"])


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def merged_spread(boxes: Mapping[int, Box]) -> Spread:
    """Make a spread of the box of each rank. Ranks with an empty box hold nothing."""
    ranks: dict[Box, list[int]] = {}
    for rank, box in boxes.items():
        if not box.is_empty:
            ranks.setdefault(box, []).append(rank)
    return tuple((box, tuple(holders)) for box, holders in ranks.items())
