"""The memory of one step as two stacks over the same moments: by what it is for, and by whose it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel.core.planner.model.timeline import Timeline
from hyper_parallel.core.planner.model.virtual_device import NO_REGION, Use

MAX_MOMENTS = 400  # more would not be seen, and make the page heavy
MAX_GROUPS = 8  # more colours could not be told apart


class Layer(NamedTuple):
    """One colour of a stack: its name, its CSS class, and its bytes at each moment."""

    name: str
    css: str
    num_bytes: list[int]


USES = (
    (Use.BASE, "alive before forward", "base"),
    (Use.OUTSIDE, "kept outside of blocks", "outside"),
    (Use.SAVED, "saved", "saved"),
    (Use.WORKING, "the block at work", "working"),
    (Use.WINDOW, "swapped, on its way out", "window"),
    (Use.PREFETCHED, "swapped, loaded ahead", "prefetched"),
)


@dataclass(frozen=True)
class Stacks:
    """Both stacks have the same sum at every moment; the highest of all moments of the step is among them."""

    ms: list[float]
    by_choice: list[Layer]
    by_block: list[Layer]

    def totals(self) -> list[int]:
        return [sum(column) for column in zip(*(layer.num_bytes for layer in self.by_choice), strict=True)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "ms": [round(ms, 4) for ms in self.ms],
            "by_choice": {layer.name: layer.num_bytes for layer in self.by_choice},
            "by_block": {layer.name: layer.num_bytes for layer in self.by_block},
        }


def stacks_of(timeline: Timeline) -> Stacks:
    groups, names = _groups(timeline.paths)
    num_owners = len(names) + 1  # the groups, and last what belongs to no block

    def column_of(use: Use, region: int) -> int:
        return use * num_owners + (len(names) if region == NO_REGION else groups[region])

    rows = timeline.bytes_by(column_of, len(Use) * num_owners)
    stride = -(-len(rows) // MAX_MOMENTS)
    # Of each few moments the highest: the peak is never left out.
    chosen = [max(rows[at : at + stride], key=lambda row: sum(row[1])) for at in range(0, len(rows), stride)]

    def layer(name: str, css: str, uses: Iterable[Use], owners: Iterable[int]) -> Layer:
        columns = [use * num_owners + owner for use, owner in itertools.product(uses, owners)]
        return Layer(name, css, [sum(row[column] for column in columns) for _, row in chosen])

    by_choice = [layer(name, css, [use], range(num_owners)) for use, name, css in USES]
    by_block = [
        layer("alive before forward", "base", [Use.BASE], range(num_owners)),
        layer("outside of blocks", "outside", [use for use in Use if use is not Use.BASE], [len(names)]),
        *(layer(name, f"group-{index}", Use, [index]) for index, name in enumerate(names)),
    ]
    return Stacks([ms for ms, _ in chosen], by_choice, by_block)


def _groups(paths: Sequence[str]) -> tuple[list[int], list[str]]:
    """Number each region by its group, and name the groups.

    Neighbours share one where there are more regions than colours.
    """
    per_group = -(-len(paths) // MAX_GROUPS) or 1
    groups = [index // per_group for index in range(len(paths))]
    names = []
    for first in range(0, len(paths), per_group):
        last = min(first + per_group, len(paths)) - 1
        names.append(paths[first] if paths[first] == paths[last] else f"{paths[first]} to {paths[last]}")
    # A block that runs in several groups has one name for each: names are keys.
    return groups, [f"{name} ({at + 1})" if names.count(name) > 1 else name for at, name in enumerate(names)]
