"""Loggers: one per layer, the rank in front, silent unless asked."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from hyper_parallel._base.log import get_logger


def test_lines_carry_the_rank_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    get_logger("test_layer")
    with caplog.at_level(logging.INFO, logger="hyper_parallel"):
        get_logger("test_layer").info("loaded %d tensors", 4)
    assert [record.getMessage() for record in caplog.records] == ["[rank 3] loaded 4 tensors"]
    assert caplog.records[0].name == "hyper_parallel.test_layer"


PROGRAM = """
from hyper_parallel._base.log import get_logger
import hyper_parallel
get_logger("swap").warning("slow path")
get_logger("swap").debug("detail")
"""


def run(level: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("HYPER_PARALLEL_LOG", None)
    environment.pop("RANK", None)
    if level is not None:
        environment["HYPER_PARALLEL_LOG"] = level
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60)


def test_nothing_is_shown_unless_the_application_or_the_variable_asks() -> None:
    assert run(None).stderr == ""


def test_the_variable_shows_lines_of_that_level_and_above() -> None:
    shown = run("Debug").stderr
    assert "hyper_parallel.swap [rank 0] slow path" in shown
    assert "detail" in shown
    assert "detail" not in run("warning").stderr


def test_an_unknown_level_is_ignored_with_a_warning_that_names_the_accepted_ones() -> None:
    result = run("loud")
    assert result.returncode == 0
    assert "debug, info, warning, error" in result.stderr
