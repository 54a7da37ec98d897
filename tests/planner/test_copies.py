"""A plan is on one model: copies and files of it are without, and there is no second one on top."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel._base.errors import StateError  # noqa: E402
from hyper_parallel.core.planner.model.choices import recompute_all, save_all  # noqa: E402
from hyper_parallel.core.planner.plan.plan import Predicted  # noqa: E402
from hyper_parallel.core.planner.search.settings import candidates  # noqa: E402
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel  # noqa: E402
from support import planned_models as models  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk")


def plan_of(model: nn.Module, choice: Callable[[Any], Any] = save_all, regions: Any = None) -> hp.MemoryPlan:
    profile = ProfiledModel(model, models.batch("mlp"), regions=regions).profile()
    decision = tuple(map(choice, profile.regions))
    predicted = Predicted(profile.peak_bytes, profile.step_ms)
    return hp.MemoryPlan(profile, decision, candidates(profile)[0], profile.peak_bytes, predicted)


def through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def same_gradients(left: nn.Module, right: nn.Module) -> bool:
    found = [models.gradients(each, models.batch("mlp")) for each in (left, right)]
    return found[0].keys() == found[1].keys() and all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_a_copy_of_a_planned_model_is_a_plain_model(copied: Callable[[nn.Module], Any], num_steps: int) -> None:
    model = models.make("mlp")
    plan = plan_of(model).apply(model)
    for _ in range(num_steps):
        models.gradients(model, models.batch("mlp"))
    other = copied(model)
    assert hp.wrappers(other) == []
    assert len(hp.wrappers(model)) == 5
    assert same_gradients(model, other)
    with pytest.raises(StateError, match="not applied to this model"):
        plan.remove(other)
    plan.apply(other)
    assert same_gradients(model, other)
    plan.remove(other)
    plan.remove(model)
    assert hp.wrappers(other) == hp.wrappers(model) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_a_copy_of_a_model_that_runs_a_block_twice_does_not_know_of_the_plan(
    copied: Callable[[nn.Module], Any],
) -> None:
    model = models.make("mlp")
    model.blocks.append(model.blocks[0])
    plan = plan_of(model).apply(model)
    other = copied(model)
    assert b"hyper_parallel" not in pickle.dumps(other._forward_pre_hooks)
    assert same_gradients(model, other)
    plan.remove(model)
    assert not model._forward_pre_hooks


def test_a_shallow_copy_of_a_planned_block_is_a_block_of_its_own() -> None:
    model = models.make("mlp")
    block = model.blocks[0]
    plan = plan_of(model).apply(model)
    copied = copy.copy(model.blocks[0])
    assert type(copied) is models.Residual
    assert copied is not block
    plan.remove(model)


def test_a_second_plan_on_top_of_the_first_is_refused_and_changes_nothing() -> None:
    model = models.make("mlp")
    first, second = plan_of(model), plan_of(model, recompute_all)
    first.apply(model)
    before = hp.wrappers(model)
    with pytest.raises(StateError, match=r"applied to this model already[\s\S]*blocks\.0"):
        second.apply(model)
    assert hp.wrappers(model) == before
    first.remove(model)
    second.apply(model)
    second.remove(model)
    assert hp.wrappers(model) == []


def test_plans_of_different_blocks_can_be_on_one_model() -> None:
    model = models.make("mlp")
    first, second = plan_of(model, regions=["blocks.0"]), plan_of(model, regions=["blocks.1"])
    first.apply(model)
    second.apply(model)
    assert [name for name, _ in hp.wrappers(model)] == ["blocks.0", "blocks.1"]
    assert same_gradients(model, models.make("mlp"))
    second.remove(model)
    first.remove(model)
    assert hp.wrappers(model) == []
