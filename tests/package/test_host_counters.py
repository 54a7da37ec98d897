"""What a step costs the host, in calls and objects, is not more than it was. Times tell that on a quiet machine only."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "host_time.py"

if not SCRIPT.exists():
    pytest.skip("no benchmarks here: not a checkout", allow_module_level=True)
torch = pytest.importorskip("torch")
pytest.importorskip("scipy", reason="the planner needs it")

STORED = json.loads((ROOT / "benchmarks" / "results" / "host_counters.json").read_text())
OURS = [name for name in STORED["rows"] if not name.startswith("PyTorch")]
MOST = 1.01  # of what is stored


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Counted now, in a process in which nothing else has run."""
    for name, now in (("python", platform.python_version()), ("torch", torch.__version__)):
        if minor(STORED[name]) != minor(now):
            pytest.skip(f"counters are stored for {name} {STORED[name]}, and this is {now}")
    file = tmp_path_factory.mktemp("counters") / "now.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--rounds=0", f"--store={file}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found["rows"]


def higher(now: dict[str, int], then: dict[str, int]) -> list[str]:
    return [f"{what}: {now[what]:,}, stored {then[what]:,}" for what in then if now[what] > MOST * then[what]]


@pytest.mark.parametrize("name", OURS)
def test_a_step_calls_and_creates_no_more_than_what_is_stored(name: str, rows: dict[str, dict[str, int]]) -> None:
    assert higher(rows[name], STORED["rows"][name]) == [], (
        "If it must be so: python benchmarks/host_time.py --store, and the reason goes into the commit."
    )


def test_every_way_is_stored_and_the_plan_that_swaps_does(rows: dict[str, dict[str, int]]) -> None:
    assert list(rows) == list(STORED["rows"])
    assert len(OURS) == 4
    assert rows["plan, swap matmuls"]["objects"] > 1.2 * rows["plan, recompute"]["objects"]


def test_a_part_of_a_hundred_more_is_found() -> None:
    then = {"forward": 1000, "backward": 1000, "objects": 1000}
    assert higher({**then, "forward": 1010}, then) == []
    assert higher({**then, "objects": 1011}, then) == ["objects: 1,011, stored 1,000"]
