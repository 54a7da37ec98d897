"""The benchmarks run where there is no GPU, too: their tables are right, whatever the times are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"

if not FOLDER.exists():
    pytest.skip("no benchmarks here: not a checkout", allow_module_level=True)
pytest.importorskip("torch")


def digest() -> str:
    code = "import results_state; print(results_state.digest())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments], env=environment, capture_output=True, text=True, timeout=600
    )


def test_activation_py_measures_every_mode_of_ours_with_equal_gradients(tmp_path: Path) -> None:
    done = run(
        "activation.py", "--device=cpu", "--blocks=3", "--length=64", "--batch=1", "--steps=1", "--warm=1", f"--out={tmp_path / 'a.json'}"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "a.json").read_text())
    rows = {row["mode"]: row for row in result["rows"]}
    ours = [row for row in result["rows"] if row["kind"] == "ours"]
    assert len(ours) >= 7
    assert all(row["gradients"] == "equal" for row in ours), done.stdout
    assert all(row["peak_gib"] > 0 and row["step_ms"] > 0 for row in rows.values() if "skipped" not in row)
    assert rows["recompute"]["peak_gib"] < rows["plain"]["peak_gib"]
    assert rows["recompute, inputs swapped"]["peak_gib"] <= rows["recompute"]["peak_gib"]
    assert rows["everything swapped"]["out_gb"] > rows["mix for 16 %"]["out_gb"] > 0
    assert {"commit", "watched", "torch", "device", "setting", "date"} <= result.keys()
    assert result["digest"] == digest(), "what was measured is named"
    table = (tmp_path / "a.md").read_text()
    assert all(name in table for name in rows)


def test_planner_py_compares_what_was_predicted_with_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    done = run(
        "planner.py", "--device=cpu", "--blocks=3", "--length=64", "--batch=1", "--steps=1", "--warm=1", "--budgets=60",
        f"--out={tmp_path / 'p.json'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "p.json").read_text())["rows"]
    assert row["peak_gib"] <= 0.6 * row["plain_peak_gib"]


def test_communication_py_measures_both_ways_of_every_call(tmp_path: Path) -> None:
    done = run(
        "communication.py", "--framework", "torch", "--ranks", "2", "--rounds=2", "--commit=0123abc", f"--out={tmp_path / 'c.json'}"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "c.json").read_text())
    assert result["commit"] == "0123abc"
    assert {row["call"] for row in result["rows"]} >= {"all_reduce", "reduce_scatter_tensor", "all_to_all_single"}
    assert all(row["own_ms"] > 0 and row["ours_ms"] > 0 for row in result["rows"])
