"""The batch of every training step is held against the plan's: what is within it runs, what is larger is told before it runs."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.core.planner.plan.batch_fit import Fit, PlannedBatch


class Array:
    """A tensor of no framework."""

    def __init__(self, *shape: int, dtype: str = "float32") -> None:
        self.shape, self.dtype = shape, dtype


def look(value: Any) -> Any:
    if isinstance(value, Array):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, dict):
        return {name: look(each) for name, each in value.items()}
    return [look(each) for each in value] if isinstance(value, (list, tuple)) else value


def forward(self: Any, ids: Any, mask: Any = None, **others: Any) -> None:
    """What a model is called by."""


def judged(planned: Any, *args: Any, **kwargs: Any) -> Fit:
    return PlannedBatch(look(planned), look, forward).judged(args, kwargs).fit


@pytest.mark.parametrize(
    ("shape", "dtype", "fit"),
    [
        ((4, 512), "float32", Fit.SAME),
        ((3, 512), "float32", Fit.SMALLER),
        ((4, 128), "float32", Fit.SMALLER),
        ((4, 512), "bfloat16", Fit.SMALLER),
        ((4, 513), "float32", Fit.LARGER),
        ((8, 64), "float32", Fit.LARGER),  # of fewer elements
        ((2, 1024), "float32", Fit.LARGER),  # of as many
        ((4, 512), "float64", Fit.LARGER),
        ((4, 512, 1), "float32", Fit.LARGER),
        ((2048,), "float32", Fit.LARGER),
    ],
)
def test_a_tensor_is_within_another_if_no_dim_is_longer_and_no_element_larger(shape: Any, dtype: str, fit: Fit) -> None:
    assert judged(Array(4, 512), Array(*shape, dtype=dtype)) is fit


def test_an_argument_is_the_same_by_name_and_by_place() -> None:
    ids, mask, longer = Array(2, 8), Array(2, 8), Array(2, 9)
    for planned in ([ids, mask], {"ids": ids, "mask": mask}, {"args": [ids], "kwargs": {"mask": mask}}):
        assert judged(planned, ids, mask) is Fit.SAME
        assert judged(planned, ids, mask=mask) is Fit.SAME
        assert judged(planned, mask=mask, ids=ids) is Fit.SAME
        assert judged(planned, ids) is Fit.SMALLER
        assert judged(planned, ids, longer) is Fit.LARGER


def test_a_tensor_that_was_not_planned_is_larger_and_a_number_is_not() -> None:
    assert judged({"ids": Array(2, 8)}, ids=Array(2, 8), extra=Array(2)) is Fit.LARGER
    assert judged({"ids": Array(2, 8)}, ids=Array(2, 8), extra=Array()) is Fit.SMALLER
    assert judged([[Array(2, 8)]], [Array(2, 8), Array(2, 8)]) is Fit.LARGER, "one more in a list"
    assert judged({"ids": Array(2, 8), "n": 3}, ids=Array(2, 8), n=4) is Fit.SAME, "numbers are not judged"


# -- on models ----------------------------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")

import hyper_parallel as hp  # noqa: E402
from support import planned_models as models  # noqa: E402

on_disk = pytest.mark.usefixtures("on_disk")


def loss_of(model: Any, inputs: Any) -> Any:
    return model(inputs)


@pytest.fixture(scope="module")
def plans() -> dict[str, hp.MemoryPlan]:
    """For 128 rows: one with room for all, one with less."""
    model, inputs = models.make("mlp"), models.batch("mlp", size=2)
    return {budget: hp.plan_memory(model, inputs, budget=budget, progress=False) for budget in ("100%", "60%")}


@on_disk
@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_a_larger_batch_is_told_before_it_runs_in_any_step(plans: Any, budget: str) -> None:
    """Also where the plan is empty because the planned batch fits as it is."""
    model, plan = models.make("mlp"), plans[budget]
    ran: list[Any] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: ran.append(None))
    plan.apply(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"at most float32\[128, 32\], got float32\[192, 32\]; argument `x`"):
            model(models.batch("mlp", size=3))
        assert not ran
        model(models.batch("mlp", size=2)).backward()
        ran.clear()
    with torch.no_grad():
        model(models.batch("mlp", size=3))
    model.eval()
    model(models.batch("mlp", size=3)).backward()
    plan.remove(model)
    model.train()
    model(models.batch("mlp", size=3)).backward()
    assert "_forward_pre_hooks_with_kwargs" not in vars(model) or not model._forward_pre_hooks_with_kwargs


@on_disk
def test_a_smaller_batch_runs_under_the_plan_from_the_first_step_on(plans: Any) -> None:
    model, plan = models.make("mlp"), plans["60%"]
    expected = [models.gradients(model, models.batch("mlp", size=size)) for size in (1, 2, 1)]
    plan.apply(model)
    for size, gradients in zip((1, 2, 1), expected, strict=True):
        got = models.gradients(model, models.batch("mlp", size=size))
        assert all(torch.equal(got[name], gradients[name]) for name in gradients)
    assert plan.stats(model) == {}
    plan.remove(model)


@on_disk
def test_the_first_batch_like_the_plans_is_still_compared_op_by_op(plans: Any) -> None:
    model, plan = models.make("mlp"), plans["60%"]
    plan.apply(model)
    model(models.batch("mlp", size=1)).backward()
    for block in model.blocks:
        block.dropout = torch.nn.Identity()
    with pytest.raises(RuntimeError, match="does not do what it did"):
        model(models.batch("mlp", size=2)).backward()
    plan.remove(model)


@on_disk
def test_a_larger_batch_is_recomputed_whole_and_counted_where_mismatches_are(plans: Any) -> None:
    model = models.make("mlp")
    inputs = models.batch("mlp", size=4)
    plain = models.gradients(model, inputs)
    for plan in plans.values():
        plan.apply(model, on_mismatch="recompute")
        got = models.gradients(model, inputs)
        assert all(torch.equal(got[name], plain[name]) for name in plain)
        assert plan.stats(model) == {"batches larger than planned": 1}
        plan.remove(model)


@on_disk
def test_with_replan_a_larger_batch_is_planned_before_it_runs(plans: Any) -> None:
    model, plan = models.make("mlp"), plans["60%"]
    inputs = models.batch("mlp", size=3)
    plain = models.gradients(model, inputs)
    plan.apply(model, on_oom="replan")
    got = models.gradients(model, inputs)
    assert all(torch.equal(got[name], plain[name]) for name in plain)
    (longer,) = plan.replans(model)
    assert longer.profile.identity.batch == "float32[192, 32]"
    assert longer.budget_bytes <= plan.budget_bytes
    assert not longer.is_empty
    plan.remove(model)


@on_disk
def test_a_plan_that_is_checked_with_another_batch_speaks_of_the_batch(plans: Any) -> None:
    with pytest.raises(ValueError, match=r"^The plan was made for another batch\."):
        plans["60%"].check(models.make("mlp"), models.batch("mlp", size=3))
