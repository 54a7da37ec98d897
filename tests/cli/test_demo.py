"""The demo and `hyper-parallel plan`, as a person runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel

pytest.importorskip("torch")
pytest.importorskip("scipy")

SOURCE = str(Path(hyper_parallel.__file__).parents[1])


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # One thread for each op: beside other tests, more of them would only wait for each other.
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "hyper_parallel", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_demo_trains_inside_a_budget_with_equal_losses_and_draws_a_page(tmp_path: Path) -> None:
    done = run_in(tmp_path, "demo", "--steps", "2", "--report", "page.html")
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "nothing but the page and the table"
    assert "All losses are equal, bit for bit" in done.stdout
    page = (tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'id="plan">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    drawn = (
        6 if data["copies"]["out"] else 3
    )  # before, after, and the curve; copies out, back and waits, where something is swapped
    assert page.count('role="img"') == drawn
    assert "http" not in re.sub(r"http://www.w3.org", "", page), "nothing comes from the network"
    assert data["measured"]["plain_step_ms"] > 0
    assert data["measured"]["peak_bytes"] <= data["budget_bytes"] < data["plain"]["peak_bytes"]


def test_a_build_for_cuda_on_a_machine_without_a_driver_runs_the_demo_on_the_cpu(monkeypatch) -> None:
    import torch

    from hyper_parallel.platform.torch.demo.transformer import Trainer

    # As PyTorch 2.15 answers there.
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    assert Trainer().device.type == "cpu"


BUILD = """
import torch

def blocks():
    make = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(make() for _ in range(4))})

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = blocks()["layers"]

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

def build():
    return Model(), torch.randn(256, 64)

def sizes():
    return Model(), lambda n: torch.randn(16 * n, 64)

def nothing():
    return 7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(BUILD)
    return tmp_path


def test_plan_writes_the_plan_and_the_page_of_a_function_of_the_user(folder: Path) -> None:
    swap = ("--swap-dir", str(folder))
    done = run_in(folder, "plan", "mine:build", "--budget", "70%", "--out", "plan.json", "--report", "plan.html", *swap)
    assert done.returncode == 0, done.stderr
    assert "layers." in done.stdout
    plan = hyper_parallel.MemoryPlan.load(folder / "plan.json")
    assert plan.measured is not None
    assert plan.measured.peak_bytes <= plan.budget_bytes
    assert plan.profile.link is not None, "there is a folder to swap to"
    assert "<svg" in (folder / "plan.html").read_text()


def test_largest_finds_the_size_of_a_function_of_the_user(folder: Path) -> None:
    done = run_in(folder, "largest", "mine:sizes", "--budget", "3MiB", "--out", "plan.json", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["peak_bytes"] <= 3 * 1024**2
    assert found["next"]["n"] == found["n"] + 1
    plan = hyper_parallel.MemoryPlan.load(folder / "plan.json")
    assert plan.profile.identity.batch == f"float32[{16 * found['n']}, 64]"
    done = run_in(folder, "largest", "mine:sizes", "--budget", "1KiB")
    assert done.returncode == 3
    assert "make_batch(1)" in done.stderr
    done = run_in(folder, "largest", "mine:nothing")
    assert done.returncode == 1
    assert "make_batch" in done.stderr


@pytest.mark.parametrize(
    ("build", "text", "code"),
    [
        ("mine", "package.module:function", 2),
        ("nowhere:build", "cannot be imported", 2),
        ("mine:gone", "is not there", 2),
        ("mine:nothing", "(model, batch)", 1),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_without_a_traceback(
    folder: Path, build: str, text: str, code: int
) -> None:
    done = run_in(folder, "plan", build)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_budget_that_cannot_be_met_says_what_can(folder: Path) -> None:
    done = run_in(folder, "plan", "mine:build", "--budget", "1KiB")
    assert done.returncode == 3
    assert "budget of at least" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", [("plan", "mine:build", "--out"), ("plan", "mine:build", "--report"), ("demo", "--report")]
)
def test_a_folder_that_is_not_there_is_told_before_the_work_is_done(folder: Path, command: tuple[str, ...]) -> None:
    done = run_in(folder, *command, "gone/file")
    assert done.returncode == 2
    assert "There is no folder for this file." in done.stderr
    assert not done.stdout
