"""Bugs planted in the regions: each is found by the random programs that run in every test run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.planted_bugs import REGIONS, RegionBug
from support.planting import SOURCE

pytest.importorskip("torch")

CAMPAIGN = """
import sys, tempfile
from pathlib import Path
import torch
torch.set_num_threads(1)
from support.region_programs import ModuleRunner, Runner, UnwatchedRunner, differences, draw
from support.swapping import Swapping
from hyper_parallel.platform.torch.activation_checkpoint import checkpoint
num_runs = int(sys.argv[3])
with Swapping("cpu", Path(sys.argv[1])).configured():
    for seed in range(int(sys.argv[2]), int(sys.argv[2]) + 150):
        program = draw(seed)
        runner = Runner(checkpoint) if num_runs == 1 else ModuleRunner(checkpoint)
        if num_runs == 4:
            runner = UnwatchedRunner(checkpoint, is_dynamic=seed % 3 == 0)
        plain = runner.run(program, managed=False)
        try:
            wrong = [each for _ in range(num_runs) for each in differences(plain, runner.run(program, managed=True))]
        except Exception as error:
            wrong = repr(error)
        if wrong:
            print("found", seed, wrong)
            break
    else:
        print("nothing found")
"""


def campaign(source: Path, directory: Path, first_seed: int = 0, num_runs: int = 1) -> str:
    directory.mkdir()
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CAMPAIGN, str(directory), str(first_seed), str(num_runs)],
        env={"PYTHONPATH": f"{source}:{tests}", "PATH": "/usr/bin:/bin", "HYPER_PARALLEL_PLATFORM": "torch"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = done.stdout.splitlines()
    return lines[-1] if lines else f"died: {done.returncode} {done.stderr[-500:]}"


@pytest.mark.parametrize("bug", REGIONS, ids=lambda bug: bug.name)
def test_the_random_programs_find(bug: RegionBug, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src" / bug.file).write_text(bug.source())
    found = campaign(tmp_path / "src", tmp_path / "files", bug.first_seed, bug.num_runs)
    assert found.startswith("found"), found


@pytest.mark.parametrize("num_runs", [1, 3, 4])
def test_they_find_nothing_where_nothing_was_planted(tmp_path: Path, num_runs: int) -> None:
    assert campaign(SOURCE, tmp_path / "files", num_runs=num_runs) == "nothing found"
