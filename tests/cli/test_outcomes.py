"""The table of the platform operations."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from hyper_parallel._base.errors import DamagedFileError
from hyper_parallel.cli.doctor.outcomes import CellState, read_outcomes
from hyper_parallel.cli.doctor.show_outcomes import show_outcomes
from hyper_parallel.platform.contract import OPERATIONS, Section

SAMPLE = {
    "columns": {
        "torch-cpu": {
            "title": "PyTorch CPU",
            "date": "2026-11-15",
            "framework": "2.13.0",
            "python": "3.11.7",
            "device": "cpu",
            "cells": {
                "cat": {"state": "tested", "tests": 3},
                "all_reduce": {"state": "comes with", "text": "the communication part"},
                "broadcast": {"state": "comes with", "text": "the communication part"},
                "get_symmetric_memory_handler": {"state": "error", "text": "There is no symmetric memory on the CPU."},
            },
        },
        "mindspore-cpu": {
            "title": "MindSpore CPU",
            "date": "2026-11-14",
            "framework": "2.10.0",
            "python": "3.11.7",
            "device": "cpu",
            "cells": {
                "cat": {"state": "tested", "tests": 2},
                "no_longer_in_the_contract": {"state": "tested", "tests": 1},
            },
        },
    }
}


@pytest.fixture
def sample(tmp_path) -> Path:
    path = tmp_path / "outcomes.json"
    path.write_text(json.dumps(SAMPLE))
    return path


def page_of(path: Path, width: int = 80) -> str:
    output = io.StringIO()
    show_outcomes(Console(file=output, width=width, highlight=False), read_outcomes(path))
    return output.getvalue()


def row(page: str, operation: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"  {operation} "))
    return re.findall(r"not tested|\w+ \(\d+\)|\w+", line)


def test_every_operation_has_a_row_under_its_section(sample):
    page = page_of(sample)
    lines = [line.strip() for line in page.splitlines()]
    for section in Section:
        assert section.value in lines
    for operation in OPERATIONS:
        assert f"  {operation.name} " in page


def test_cells_say_tested_later_error_or_not_tested(sample):
    page = page_of(sample)
    assert row(page, "cat") == ["cat", "tested (3)", "tested (2)"]
    assert row(page, "all_reduce") == ["all_reduce", "later (1)", "not tested"]
    assert row(page, "broadcast") == ["broadcast", "later (1)", "not tested"]
    assert row(page, "get_symmetric_memory_handler")[1:] == ["error (2)", "not tested"]


def test_long_texts_stand_once_below_the_table(sample):
    page = page_of(sample)
    assert page.count("(1) comes with the communication part") == 1
    assert "(2) There is no symmetric memory on the CPU." in page


def test_each_column_is_summed_up_with_its_run(sample):
    page = page_of(sample)
    rest = len(OPERATIONS) - 4
    assert f"PyTorch CPU: 1 tested, 2 come later, 1 error, {rest} not tested." in page
    assert "Run on 2026-11-15 with 2.13.0 on Python 3.11.7, device cpu." in page
    assert f"MindSpore CPU: 1 tested, 0 come later, 0 errors, {len(OPERATIONS) - 1} not tested." in page


def test_three_columns_fit_into_80_characters(tmp_path):
    columns = dict(SAMPLE["columns"])
    columns["torch-cuda"] = {**columns["torch-cpu"], "title": "PyTorch CUDA"}
    path = tmp_path / "outcomes.json"
    path.write_text(json.dumps({"columns": columns}))
    page = page_of(path)
    assert max(map(len, page.splitlines())) <= 80
    assert row(page, "cat") == ["cat", "tested (3)", "tested (2)", "tested (3)"]
    assert "  differentiable_all_to_all_single_async " in page


def test_a_missing_file_gives_the_operations_alone_and_says_so(tmp_path):
    outcomes = read_outcomes(tmp_path / "none.json")
    assert outcomes.document == {"columns": {}}
    page = page_of(tmp_path / "none.json")
    assert "No test run left its outcomes" in page
    assert "  cat" in page


def test_the_document_is_the_file_as_it_is(sample):
    assert read_outcomes(sample).document == SAMPLE


def test_an_operation_without_a_cell_was_not_tested(sample):
    column = read_outcomes(sample).columns[0]
    assert column.cell("chunk").state is CellState.NOT_TESTED


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"columns": {"a": {}}}', '{"columns": {"a": {"cells": {"cat": {"state": "fine"}}}}}']
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, text):
    path = tmp_path / "outcomes.json"
    path.write_text(text)
    with pytest.raises(DamagedFileError, match=re.escape(str(path))):
        read_outcomes(path)
