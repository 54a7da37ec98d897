"""Which platform operations were tested where: the file that a test run leaves, and what may be read from it.

    {"columns": {"torch-cpu": {"title": "PyTorch CPU", "date": "2026-11-15", "framework": "2.13.0", "python": "3.11.7",
                               "device": "cpu", "cells": {"cat": {"state": "tested", "tests": 3}}}}}

A cell's state is one of `CellState`, with `tests` (how many) or `text` (what it comes with; the error's first line).
An operation without a cell was not tested.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import hyper_parallel.platform
from hyper_parallel._base.errors import DamagedFileError
from hyper_parallel.platform.contract import OPERATIONS

PATH = Path(hyper_parallel.platform.__file__).with_name("outcomes.json")


class CellState(Enum):
    TESTED = "tested"
    COMES_WITH = "comes with"
    ERROR = "error"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Cell:
    state: CellState
    num_tests: int = 0
    text: str = ""


NOT_TESTED = Cell(CellState.NOT_TESTED)


@dataclass(frozen=True)
class Column:
    """One framework on one device, as one test run saw it."""

    title: str
    date: str
    framework: str
    python: str
    device: str
    cells: Mapping[str, Cell]

    def cell(self, operation: str) -> Cell:
        return self.cells.get(operation, NOT_TESTED)

    def num(self, state: CellState) -> int:
        """Count the contract's operations that are in a state; what the contract does not name does not count."""
        return sum(self.cell(operation.name).state is state for operation in OPERATIONS)


@dataclass(frozen=True)
class Outcomes:
    """All columns of one file; `document` is its content as it is."""

    columns: tuple[Column, ...]
    document: Mapping[str, Any]


def read_outcomes(path: Path = PATH) -> Outcomes:
    """Read the outcomes of a file; none if there is no such file.

    Raises:
        ValueError: the file is not of the form described above.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Outcomes((), {"columns": {}})
    try:
        document = json.loads(text)
        columns = tuple(_column(column) for column in document["columns"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(
            "The outcomes of the platform tests cannot be read.",
            got=f"{type(error).__name__}: {error}",
            where=str(path),
            do="Reinstall hyper-parallel, or run the platform tests again to write the file anew.",
        ) from error
    return Outcomes(columns, document)


def _column(column: Mapping[str, Any]) -> Column:
    cells = {
        name: Cell(CellState(cell["state"]), int(cell.get("tests", 0)), str(cell.get("text", "")))
        for name, cell in column["cells"].items()
    }
    texts = {name: str(column[name]) for name in ("title", "date", "framework", "python", "device")}
    return Column(cells=cells, **texts)
