"""Schedules in the file form of `torch.distributed.pipelining`: one line per rank, one action per cell.

A cell is empty where the rank idles:

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

PyTorch reads more than it writes: it takes any text that begins with an action. Here that is refused.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from hyper_parallel._base.errors import ArgumentError, DamagedFileError
from hyper_parallel.core.parallel.pipeline.actions import Action

__all__ = ["read", "write"]


def read(content: bytes, where: str) -> list[list[Action]]:
    """Read the actions of each rank.

    Raises:
        ValueError: a cell is no action: which one is said.
    """
    try:
        rows = list(csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DamagedFileError(
            "This is no CSV of a schedule.", expected="lines of text", got=str(error), where=where
        ) from None
    # A line without a cell is the end of the file, written by a program that ends each line twice; a rank that idles
    # has an empty cell.
    return [
        [_action(cell, where, rank, at) for at, cell in enumerate(row) if cell.strip()]
        for rank, row in enumerate(filter(None, rows))
    ]


def write(ranks: Iterable[Iterable[Action]]) -> str:
    return "".join(",".join(map(str, actions)) + "\n" for actions in ranks)


def _action(cell: str, where: str, rank: int, at: int) -> Action:
    try:
        return Action.parse(cell)
    except ArgumentError as error:
        raise DamagedFileError(
            "A cell is no action of a pipeline.",
            expected=error.expected,
            got=error.got,
            where=f"{where}, line {rank + 1}, cell {at + 1}",
        ) from None
