"""Plan files of an earlier version load, say what they said, and train the model that they were made for.

The files in `tests/data/plans` are as commit 021f411 has saved them, and are never made anew: see
`support/kept_plans.py`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="the planner needs it")
pytest.importorskip("torch")

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel._base.errors import DamagedFileError
from hyper_parallel.platform import selection
from support import kept_plans
from support.kept_plans import FOLDER, NAMES
from support.swapping import Swapping

# What is shown of the blocks: saved, swapped, recomputed.
SHOWN = {
    "recompute": ["64 KiB | 0 B | 324 KiB", "128 KiB | 0 B | 324 KiB", "452 KiB | 0 B | 0 B"],
    "swap": ["0 B | 908 KiB | 0 B", "648 KiB | 324 KiB | 0 B", "972 KiB | 0 B | 0 B"],
    "mixed": [
        "264 KiB | 0 B | 644 KiB",
        "196 KiB | 256 KiB | 0 B",
        "972 KiB | 0 B | 0 B",
        "196 KiB | 256 KiB | 0 B",
        "972 KiB | 0 B | 0 B",
    ],
}
BUDGETS = {"recompute": "1.49 MiB", "swap": "2.47 MiB", "mixed": "3.61 MiB"}
SWAPPED_KIB = {"recompute": 0, "swap": 908 + 324, "mixed": 256 + 256}


@pytest.fixture(autouse=True)
def forgets_the_platform() -> Iterator[None]:
    yield
    selection._forget()


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.json"


def content(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path_of(name).read_text())
    return data


def test_the_files_are_those_that_are_named() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(NAMES) == set(SHOWN)
    assert all(path.stat().st_size < 50_000 for path in FOLDER.iterdir())


def lost(then: Any, now: Any, where: str = "") -> Iterator[str]:
    """Places where `now` does not have what `then` has. A later version may say more, and nothing else."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key, value in then.items():
            yield from lost(value, now[key], f"{where}.{key}") if key in now else [f"{where}.{key}"]
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for number, (left, right) in enumerate(zip(then, now, strict=True)):
            yield from lost(left, right, f"{where}[{number}]")
    elif then != now:
        yield f"{where}: {then} became {now}"


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_an_earlier_version_says_the_same_decisions(name: str, tmp_path: Path) -> None:
    then, plan = content(name), hp.MemoryPlan.load(path_of(name))
    assert plan.as_dict()["decision"] == then["decision"]
    plan.save(tmp_path / "again.json")
    assert list(lost(then, json.loads((tmp_path / "again.json").read_text()))) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_an_earlier_version_shows_its_table(name: str) -> None:
    plan = hp.MemoryPlan.load(path_of(name))
    text = str(plan)
    assert f"at most {BUDGETS[name]}" in text
    rows = [line.split("  ") for line in text.splitlines()[text.splitlines().index("") :] if line[:1].isdigit()]
    shown = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [" | ".join(row[1:4]) for row in shown] == SHOWN[name]
    assert plan.has_swaps is (SWAPPED_KIB[name] > 0)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    kept_plans.loss_of(model(x)).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_an_earlier_version_trains_the_model_it_was_made_for(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = kept_plans.make(name), kept_plans.batch(name)
    expected = gradients(model, x)
    plan = hp.MemoryPlan.load(path_of(name))
    plan.check(model, x)
    # Another PyTorch may make the same result with other ops: those that the plan does not know are recomputed then.
    is_same_torch = torch.__version__.split(".")[:2] == plan.profile.identity.version.split(".")[:2]
    swapping = Swapping("cpu", tmp_path)
    with swapping.configured():
        plan.apply(model, on_mismatch="error" if is_same_torch else "recompute")
        for number in range(3):
            before = swapping.offloaded_bytes
            found = gradients(model, x)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), f"step {number}"
            if is_same_torch:
                assert (swapping.offloaded_bytes - before) / 1024 == SWAPPED_KIB[name], f"step {number}"
        if is_same_torch:
            assert sum(plan.stats(model).values()) == 0
        plan.remove(model)


def test_a_plan_of_an_earlier_version_refuses_another_model() -> None:
    plan = hp.MemoryPlan.load(path_of("recompute"))
    with pytest.raises(ValueError, match=r"made for another model[\s\S]*parameters: 0\.up\.weight"):
        plan.apply(kept_plans.make("swap"))


# -- what is not as it should be ------------------------------------------------------------------------------------------


def refused(data: dict[str, Any], folder: Path) -> str:
    path = folder / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(DamagedFileError) as caught:
        hp.MemoryPlan.load(path)
    return str(caught.value)


def at(data: Any, *keys: Any) -> Any:
    for key in keys:
        data = data[key]
    return data


UNKNOWN: dict[str, Callable[[dict[str, Any]], None]] = {
    "of an op": lambda data: at(data, "decision", 0, "ops").__setitem__(0, "compress"),
    "of an input": lambda data: at(data, "decision", 0, "inputs").__setitem__(0, "compress"),
    "that an op could have": lambda data: at(data, "profile", "regions", 0, "ops", 0, "choices").append("compress"),
}


@pytest.mark.parametrize("where", UNKNOWN)
def test_a_choice_that_is_unknown_is_refused_in_words(where: str, tmp_path: Path) -> None:
    data = content("mixed")
    UNKNOWN[where](data)
    text = refused(data, tmp_path)
    assert "compress" in text
    assert "plan.json" in text
    assert "Plan again, and save the new plan." in text


MISSING: list[tuple[Any, ...]] = [
    ("facts",), ("budget_bytes",), ("predicted",), ("predicted", "peak_bytes"), ("measured",), ("gap",), ("setting",),
    ("setting", "window_bytes"), ("decision",), ("decision", 0, "plain"), ("decision", 0, "ops"), ("decision", 0, "inputs"),
    ("profile",), ("profile", "regions"), ("profile", "link"), ("profile", "step_ms"), ("profile", "regions", 0, "path"),
    ("profile", "regions", 0, "ops", 0, "name"), ("profile", "regions", 0, "ops", 0, "makes"),
    ("profile", "regions", 0, "inputs", 0, "value"),
]  # fmt: skip


@pytest.mark.parametrize("keys", MISSING, ids=lambda keys: ".".join(map(str, keys)))
def test_a_key_that_is_missing_is_named(keys: tuple[Any, ...], tmp_path: Path) -> None:
    data = copy.deepcopy(content("mixed"))
    del at(data, *keys[:-1])[keys[-1]]
    text = refused(data, tmp_path)
    assert str(keys[-1]) in text
    assert "plan.json" in text
    assert "Plan again, and save the new plan." in text
