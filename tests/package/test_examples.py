"""The examples run as their first lines say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support import processes

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses_and_bytes(manage: str, directory: str) -> tuple[list[float], int]:
    import torch

    import hyper_parallel as hp

    example = load("fsdp2_swap")
    shape = example.Shape(blocks=2, length=64)
    with hp.configure_swap(disk_dir=directory, min_bytes=1):
        before = hp.SwapManager().stats()["offloaded_bytes"]
        losses = example.train(manage, torch.device("cpu"), 2, shape)
        return losses, hp.SwapManager().stats()["offloaded_bytes"] - before


def load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def test_the_fsdp2_example_runs_under_torchrun_and_swaps() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = processes.run_program([*launcher, str(EXAMPLES / "fsdp2_swap.py"), "--steps", "2"], deadline_s=120)
    assert len(re.findall(r"^step \d: loss \d\.\d+$", output, re.MULTILINE)) == 2
    out, back = re.findall(r"([\d.]+) MiB", output)
    # What is not written yet when backward asks for it is handed out from its source, and not loaded.
    assert 0 < float(back) <= float(out)


def test_the_fsdp2_example_has_the_same_losses_whatever_becomes_of_activations(tmp_path: Path) -> None:
    pool = processes.pool("torch", 2)
    found = {
        manage: pool.run(losses_and_bytes, manage, str(tmp_path)) for manage in ("none", "swap", "mix", "recompute")
    }
    for manage, ranks in found.items():
        assert [losses for losses, _ in ranks] == [losses for losses, _ in found["none"]], manage
        assert all((moved > 0) == (manage in ("swap", "mix")) for _, moved in ranks), manage


@pytest.mark.parametrize(
    ("name", "package"),
    [("hugging_face_trainer", "accelerate"), ("accelerate_loop", "accelerate"), ("lightning_callback", "lightning")],
)
def test_an_integration_trains_inside_its_budget_with_equal_losses(name: str, package: str) -> None:
    pytest.importorskip(package)
    pytest.importorskip("scipy")
    said = processes.run_program(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", "3", "--budget", "60%"],
        deadline_s=300,
        OMP_NUM_THREADS="1",
    )
    assert "\nequal" in said, said
    shares = {row[0]: float(row[1]) for row in re.findall(r"^(plain|measured).*?([\d.]+)%", said, re.MULTILINE)}
    assert shares["plain"] == 100.0
    assert 0 < shares["measured"] <= 60.0
