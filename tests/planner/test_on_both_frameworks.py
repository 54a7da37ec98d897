"""Plans: one text for PyTorch and MindSpore, where the behaviour is the same. What is different is in `test_plan.py` and `test_plan_on_mindspore.py`."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel._base.errors import StateError
from hyper_parallel.core.planner.solve.solver import BudgetError
from hyper_parallel.platform import selection
from support.backends import Backend

pytest.importorskip("scipy", reason="the solver is in SciPy")


@pytest.fixture
def model(backend: Backend) -> Iterator[Any]:
    if backend.name.endswith("cuda"):
        pytest.skip("this text is about the CPU; test_running_out.py and others run on CUDA")
    blocks = [backend.sequence(backend.linear(64, 256), backend.linear(256, 64)) for _ in range(6)]
    yield backend.sequence(backend.linear(64, 64), backend.sequence(*blocks), backend.linear(64, 8))
    selection._forget()  # planning has chosen the framework of the model


@pytest.fixture
def batch(backend: Backend) -> Any:
    return backend.tensor(np.random.RandomState(0).randn(256, 64))


def plan_of(model: Any, batch: Any, budget: Any, **options: Any) -> hp.MemoryPlan:
    return hp.plan_memory(model, batch, loss_fn=lambda y: y.sum(), budget=budget, progress=False, **options)


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("budget", ["60%", "75%", "90%"])
def test_a_budget_is_kept_with_the_gradients_of_the_plain_run(
    backend: Backend, model: Any, batch: Any, budget: str
) -> None:
    expected = backend.train_step(model, batch)
    plan = plan_of(model, batch, budget)
    assert [region.path for region in plan.profile.regions] == [f"1.{number}" for number in range(6)]
    assert not plan.is_empty
    assert plan.measured is not None
    assert plan.measured.peak_bytes <= plan.budget_bytes < plan.profile.peak_bytes
    plan.apply(model)
    assert same(backend.train_step(model, batch), expected)
    assert not plan.stats(model)
    plan.remove(model)
    assert same(backend.train_step(model, batch), expected)


def test_a_tighter_budget_keeps_less(model: Any, batch: Any) -> None:
    loose, tight = plan_of(model, batch, "90%", verify=False), plan_of(model, batch, "60%", verify=False)
    assert tight.predicted.peak_bytes < loose.predicted.peak_bytes < loose.profile.peak_bytes
    assert sum(not each.is_plain for each in tight.decision) > sum(not each.is_plain for each in loose.decision)


def test_a_plan_is_a_file_of_one_form(backend: Backend, model: Any, batch: Any, tmp_path: Path) -> None:
    plan = plan_of(model, batch, "75%")
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["format"] == "hyper_parallel memory plan"
    assert {"facts", "budget_bytes", "predicted", "measured", "gap", "setting", "decision", "profile"} <= data.keys()
    assert data["facts"]["framework"] == backend.platform.platform_type.value
    loaded = hp.MemoryPlan.load(tmp_path / "plan.json")
    assert loaded.as_dict() == plan.as_dict()
    expected = backend.train_step(model, batch)
    loaded.apply(model)
    with pytest.raises(StateError, match="applied to this model already"):
        loaded.apply(model)
    assert same(backend.train_step(model, batch), expected)
    loaded.remove(model)
    with pytest.raises(StateError, match="not applied"):
        loaded.remove(model)


def test_what_cannot_be_is_told(backend: Backend, model: Any, batch: Any) -> None:
    with pytest.raises(BudgetError, match="at least") as caught:
        plan_of(model, batch, "1%")
    assert plan_of(model, batch, caught.value.smallest_bytes).measured is not None
    assert plan_of(model, batch, "100%").is_empty
    with pytest.raises(ValueError, match="matches no module"):
        plan_of(model, batch, "60%", regions=["layers.*"])
    with pytest.raises(ValueError, match="another model"):
        plan_of(model, batch, "75%", verify=False).apply(backend.sequence(backend.linear(64, 64)))


def test_a_copy_is_without_the_plan_and_no_second_plan_goes_on_top(backend: Backend, model: Any, batch: Any) -> None:
    plan, second = plan_of(model, batch, "75%", verify=False), plan_of(model, batch, "75%", verify=False)
    plan.apply(model)
    num_wrappers = len(hp.wrappers(model))
    assert num_wrappers > 0
    copied = copy.deepcopy(model)
    assert hp.wrappers(copied) == []
    plan.apply(copied)
    assert same(backend.train_step(copied, batch), backend.train_step(model, batch))
    plan.remove(copied)
    with pytest.raises(StateError, match="A plan is applied to this model already"):
        second.apply(model)
    assert len(hp.wrappers(model)) == num_wrappers
    plan.remove(model)
    assert hp.wrappers(model) == []


def test_an_applied_plan_does_not_keep_its_model_alive(backend: Backend, model: Any, batch: Any) -> None:
    outer = backend.sequence(model)
    plan = plan_of(outer, batch, "75%").apply(outer)
    assert not plan.is_empty
    seen = weakref.ref(outer)
    del outer
    gc.collect()
    assert seen() is None
