"""Checkpoints on real ranks: what one plan saves, every other plan loads, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hyper_parallel as hp
from support import processes

pytest.importorskip("torch")

from support import saving_programs as programs

DEADLINE_S = 120


def run(number: int, function: Any, *arguments: object, framework: str = "torch") -> list[Any]:
    return processes.pool(framework, number).run(function, *arguments, deadline_s=DEADLINE_S)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each plan on each number of ranks."""
    folder = tmp_path_factory.mktemp("saved")
    for number, plans in programs.ON_RANKS.items():
        run(number, programs.save_all, str(folder), plans)
    return folder


@pytest.mark.parametrize("number", programs.ON_RANKS)
def test_every_plan_loads_what_every_plan_saved(number: int, saved: Path) -> None:
    """16 plans times 16: dp, tp, pp, fsdp2 and their products, on 1 to 4 ranks, uneven."""
    for wrong in run(number, programs.load_all, str(saved), programs.ON_RANKS[number]):
        assert wrong == []


def test_every_checkpoint_is_whole(saved: Path) -> None:
    assert len([hp.verify(path) for path in saved.iterdir()]) == sum(map(len, programs.ON_RANKS.values()))
