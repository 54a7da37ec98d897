"""The memory of one step as two stacks over the same moments: by what it is for, and by whose it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel.core.planner.timeline import Timeline
from hyper_parallel.core.planner.virtual_device import NO_REGION, Use

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
    (Use.WORKING, "block at work (what it recomputes included)", "working"),
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
    rows = _rows(timeline, groups, len(names))
    stride = -(-len(rows) // MAX_MOMENTS)
    # Of each few moments the highest: the peak is never left out.
    chosen = [max(rows[at : at + stride], key=lambda row: sum(row.uses)) for at in range(0, len(rows), stride)]
    by_choice = [Layer(name, css, [row.uses[use] for row in chosen]) for use, name, css in USES]
    by_block = [
        Layer("alive before forward", "base", [row.uses[Use.BASE] for row in chosen]),
        Layer("outside of blocks", "outside", [row.others for row in chosen]),
        *(
            Layer(name, f"group-{index}", [row.groups[index] for row in chosen])
            for index, name in enumerate(names)
        ),
    ]  # fmt: skip
    return Stacks([row.ms for row in chosen], by_choice, by_block)


class _Row(NamedTuple):
    ms: float
    uses: tuple[int, ...]
    groups: tuple[int, ...]
    others: int  # of no block, and not alive before forward


def _rows(timeline: Timeline, groups: Sequence[int], num_groups: int) -> list[_Row]:
    """Of changes at one time the highest sum and the last are there."""
    uses, blocks, others = [0] * len(Use), [0] * num_groups, 0

    def add(use: Use, region: int, num_bytes: int) -> None:
        nonlocal others
        uses[use] += num_bytes
        if region != NO_REGION:
            blocks[groups[region]] += num_bytes
        elif use is not Use.BASE:
            others += num_bytes

    for (use, region), level in timeline._levels.items():
        add(use, region, level)
    rows = [_Row(0.0, tuple(uses), tuple(blocks), others)]
    highest = 0  # where the highest row of this time is: last, or last but one
    for ms, use, region, num_bytes in timeline._changes:
        add(use, region, num_bytes)
        row = _Row(ms, tuple(uses), tuple(blocks), others)
        if ms != rows[-1].ms:
            highest = len(rows)
        elif sum(uses) >= sum(rows[highest].uses):
            del rows[highest:]
        else:
            del rows[highest + 1 :]
        rows.append(row)
    return rows


def _groups(paths: Sequence[str]) -> tuple[list[int], list[str]]:
    """For each region the number of its group, and the names: neighbours share one where there are more than colours."""
    per_group = -(-len(paths) // MAX_GROUPS) or 1
    groups = [index // per_group for index in range(len(paths))]
    names = []
    for first in range(0, len(paths), per_group):
        last = min(first + per_group, len(paths)) - 1
        names.append(paths[first] if paths[first] == paths[last] else f"{paths[first]} to {paths[last]}")
    # A block that runs in several groups has one name for each: names are keys.
    return groups, [f"{name} ({at + 1})" if names.count(name) > 1 else name for at, name in enumerate(names)]
