"""A plan file that somebody changed loads and works, or is refused in words; nothing of it fails in the depth."""

from __future__ import annotations

import copy
import json
import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="the solver is in SciPy")
pytest.importorskip("torch")

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel._base.errors import DamagedFileError, HyperParallelError
from hyper_parallel.platform import selection
from hyper_parallel.report.page import write_report
from support.campaign import share

BATCH = torch.linspace(-1, 1, 256 * 16).reshape(256, 16)
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**62, 10**30, -(10**30), 0.5, -0.5, 1e300, "", "save", "swap", "recompute", "12 KiB",
    "float32[2, 8]", "float32[,]", "float32[99999999999999999999]", [], [0], [-1], [99], ["a"], [None], [[]], {}, {"a": 1}, {"plain": True},
]  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(2)))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.square().sum()


@pytest.fixture(autouse=True)
def forgets_the_platform() -> Iterator[None]:
    yield
    selection._forget()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A plan with a bit of everything in its file."""
    folder = tmp_path_factory.mktemp("plan")
    with hp.configure_swap(disk_dir=folder, min_bytes=1024):
        plan = hp.plan_memory(make(), BATCH, loss_fn=loss_of, budget="90%", progress=False)
    plan.save(folder / "plan.json")
    data: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    for region, decision in zip(data["profile"]["regions"], data["decision"], strict=True):
        for number, op in enumerate(region["ops"]):
            if not decision["plain"] and decision["ops"][number] and "swap" in op["choices"]:
                decision["ops"][number] = "swap"
    data["budget_bytes"] *= 2  # swapping may need more
    data["setting"]["ahead_bytes"] = [2**17 for _ in data["decision"]]
    (folder / "plan.json").write_text(json.dumps(data))
    assert hp.MemoryPlan.load(folder / "plan.json").has_swaps
    return data


def changed(saved: dict[str, Any], seed: int) -> Any:
    """The data with one to three places that are otherwise."""
    rng = random.Random(seed)
    data = copy.deepcopy(saved)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at: Any = data
        while True:
            if not at:
                break
            key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if isinstance(at[key], (dict, list)) and at[key] and rng.random() < 0.93:
                at = at[key]
                continue
            _change(rng, at, key)
            break
    return data


def _change(rng: random.Random, at: Any, key: Any) -> None:
    kind = rng.choice(("value", "value", "value", "value", "missing", "extra", "twice", "number", "deep"))
    if kind == "value":
        at[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind == "missing":
        del at[key]
    elif kind == "extra" and isinstance(at, dict):
        at[rng.choice(("more", "", "self", "args", "0"))] = copy.deepcopy(rng.choice(VALUES))
    elif kind == "number" and isinstance(at[key], (int, float)):
        at[key] = at[key] * rng.choice((-1, 0, 2, 10**6, 10**12, 10**25, 1.0))
    elif kind == "deep":
        for _ in range(rng.choice((3, 300))):
            at[key] = [at[key]] if rng.random() < 0.5 else {"a": at[key]}
    elif isinstance(at, list):
        at.insert(rng.randrange(len(at)), copy.deepcopy(at[key]))
    else:
        at[key] = str(at[key])


def use(path: Path, folder: Path, *, verifies: bool) -> str:
    """Everything that can be done with a loaded plan. "": it worked; else the clear words in which it was refused."""
    said = ""
    model = make()

    def attempt(call: Callable[[], Any]) -> Any:
        nonlocal said
        try:
            return call()
        except HyperParallelError as error:
            said = said or str(error)
            return None

    def train() -> None:
        plan.apply(model)
        try:
            loss_of(model(BATCH)).backward()
            plan.stats(model)
        finally:
            plan.remove(model)

    plan = attempt(lambda: hp.MemoryPlan.load(path))
    if plan is None:
        return said
    attempt(lambda: (str(plan), repr(plan), plan._repr_html_(), plan.has_swaps))
    attempt(lambda: plan.save(folder / "again.json"))
    attempt(lambda: write_report(plan, folder / "page.html", curve_seconds=0.0))
    attempt(lambda: plan.check(model, BATCH))
    attempt(train)
    if verifies:
        attempt(lambda: plan.verify(model, BATCH, loss_fn=loss_of))
    return said


def test_a_changed_plan_file_works_or_is_refused_in_words(saved: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    raw: list[str] = []
    refused = 0
    with hp.configure_swap(disk_dir=tmp_path, min_bytes=1024):
        path.write_text(json.dumps(saved))
        assert use(path, tmp_path, verifies=True) == ""
        for seed in share(600, 40):
            path.write_text(json.dumps(changed(saved, seed)))
            try:
                refused += use(path, tmp_path, verifies=seed % 8 == 0) != ""
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                raw.append(f"{seed}: {type(error).__name__}: {error} at {where.filename}:{where.lineno}")
    assert raw == []
    assert refused > 10


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "deep lists": lambda text: b"[" * 100_000 + b"]" * 100_000,
    "deep tables": lambda text: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "many digits": lambda text: text.replace(b'"version": 1', b'"version": ' + b"9" * 10_000),
    "no number": lambda text: text.replace(b'"gap": 0.0', b'"gap": NaN'),
    "infinite": lambda text: text.replace(b'"gap": 0.0', b'"gap": 1e999'),
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: b"",
    "no text": lambda text: b"\xff\xfe" + text,
    "a list": lambda text: b"[" + text + b"]",
    "a number": lambda text: b"7",
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_no_plan_are_refused_in_words(name: str, saved: dict[str, Any], tmp_path: Path) -> None:
    text = json.dumps({**saved, "gap": 0.0}).encode()
    (tmp_path / "plan.json").write_bytes(BYTES[name](text))
    assert BYTES[name](text) != text
    with pytest.raises(DamagedFileError, match=r"plan\.json"):
        hp.MemoryPlan.load(tmp_path / "plan.json")
