"""Plans for a model whose plain step does not fit the device: a CPU with less memory, and a part of a GPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel.core.planner.solve.solver import BudgetError  # noqa: E402
from hyper_parallel.platform.torch.planner import link  # noqa: E402
from hyper_parallel.platform.torch.planner.out_of_memory import attempt  # noqa: E402
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel  # noqa: E402
from support import planned_models as models  # noqa: E402
from support.limited_memory import LimitedMemory  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk", "small_link")


@pytest.fixture
def small_link(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The link is measured with less than the models have room for."""
    monkeypatch.setattr(link, "_CPU_BYTES", 64 * 1024)
    return


class Case:
    """A model, and what its plain step takes where there is room."""

    def __init__(self, name: str) -> None:
        self.model, self.inputs = models.make(name), models.batch(name)
        self.plain = models.gradients(self.model, self.inputs)
        self.profile = ProfiledModel(self.model, self.inputs).profile()

    def room(self, part: float) -> LimitedMemory:
        limit = self.profile.base_bytes + int(part * self.profile.activation_peak_bytes)
        return LimitedMemory(self.model, limit)


@pytest.mark.parametrize("name", models.NAMES)
def test_the_plain_peak_is_computed_where_it_does_not_fit(name: str) -> None:
    case = Case(name)
    with case.room(0.75) as room:
        profile = ProfiledModel(case.model, case.inputs).profile()
    assert room.num_failures == 1, "one plain step was tried"
    assert not profile.is_plain_measured
    assert [region.shape() for region in profile.regions] == [region.shape() for region in case.profile.regions]
    # States of generators that regions note are in one and not in the other.
    assert profile.peak_bytes == pytest.approx(case.profile.peak_bytes, rel=1e-3)


@pytest.mark.parametrize(("name", "part"), [("llama", 0.4), ("gpt2", 0.5), ("mixtral", 0.5), ("mlp", 0.7)])
def test_a_plan_is_made_and_kept_where_the_plain_step_does_not_fit(name: str, part: float) -> None:
    case = Case(name)
    with case.room(part) as room:
        plan = hp.plan_memory(case.model, case.inputs, budget=room.limit_bytes, progress=False)
        num_failures = room.num_failures
        assert num_failures >= 1, (
            "of the plain step; by measured times, the first plan that is tried may not fit either"
        )
        assert not plan.is_empty
        assert plan.measured is not None
        assert plan.measured.peak_bytes <= room.limit_bytes
        plan.apply(case.model)
        got = models.gradients(case.model, case.inputs)
        assert room.num_failures == num_failures
        plan.remove(case.model)
    assert all(torch.equal(got[key], case.plain[key]) for key in case.plain)
    assert "plain (computed)" in str(plan)


class RunsOut(torch.autograd.Function):
    """Nothing in forward; backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory (simulated).")


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_an_attempt_that_runs_out_in_backward_holds_nothing_afterwards(mode: Any) -> None:
    storages: list[StorageWeakRef] = []

    @torch.inference_mode(False)
    @torch.enable_grad()
    def step() -> None:
        x = torch.ones(1000, requires_grad=True) * 2
        kept = x.exp()  # its backward is still to come when that of the other branch fails
        storages.append(StorageWeakRef(kept.untyped_storage()))
        (kept * RunsOut.apply(x.sin())).sum().backward()

    with mode():
        assert attempt(step, torch.device("cpu")) == (None, "CUDA out of memory (simulated).")
    assert [each.expired() for each in storages] == [True]


def test_a_budget_above_what_the_device_has_still_gives_a_plan_that_fits() -> None:
    case = Case("llama")
    with case.room(0.6) as room:
        plan = hp.plan_memory(case.model, case.inputs, budget="1TiB", progress=False)
        assert not plan.is_empty, "the plain step was seen to run out of memory"
        failures = room.num_failures
        plan.apply(case.model)
        models.gradients(case.model, case.inputs)
        assert room.num_failures == failures
        plan.remove(case.model)


def test_a_device_without_room_for_a_single_block_is_an_error_that_says_so() -> None:
    case = Case("mlp")
    with case.room(0.2), pytest.raises(BudgetError, match="even if every block is recomputed") as caught:
        hp.plan_memory(case.model, case.inputs, budget="auto", progress=False)
    assert "smaller" in str(caught.value)
    assert not hp.wrappers(case.model)
    models.gradients(case.model, case.inputs)


def test_explain_says_that_the_plain_step_was_computed() -> None:
    case = Case("mlp")
    with case.room(0.7):
        assert "computed" in str(hp.explain(case.model, case.inputs, progress=False))
    assert "computed" not in str(hp.explain(case.model, case.inputs, progress=False))


def test_a_saved_plan_knows_that_its_plain_step_was_computed(tmp_path: Any) -> None:
    case = Case("mlp")
    with case.room(0.7) as room:
        plan = hp.plan_memory(case.model, case.inputs, budget=room.limit_bytes, progress=False)
    plan.save(tmp_path / "plan.json")
    assert not hp.MemoryPlan.load(tmp_path / "plan.json").profile.is_plain_measured


@pytest.mark.parametrize("has_gradients", [False, True])
def test_gradients_of_the_user_come_back_after_a_profile_without_room(has_gradients: bool) -> None:
    case = Case("llama")
    if has_gradients:
        models.loss_of(case.model, case.inputs).backward()
    before = {name: (p.grad, None if p.grad is None else p.grad.clone()) for name, p in case.model.named_parameters()}
    with case.room(0.75):
        ProfiledModel(case.model, case.inputs).profile()
    for name, parameter in case.model.named_parameters():
        original, copied = before[name]
        assert parameter.grad is original
        assert copied is None or torch.equal(parameter.grad, copied)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_plan_is_made_on_a_part_of_a_gpu_where_the_plain_step_does_not_fit() -> None:
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
        for _ in range(12)
    ]
    model = torch.nn.Sequential(torch.nn.Sequential(*blocks)).cuda()
    inputs = torch.randn(32768, 1024, device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    # A plain step keeps 12 times (4096 + 4096 + 1024) floats for each of 32768 rows: 13.5 GiB.
    torch.cuda.set_per_process_memory_fraction(8 * 1024**3 / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            model(inputs).square().mean().backward()
        model.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        plan = hp.plan_memory(model, inputs, loss_fn=lambda out: out.square().mean(), budget="7GiB", progress=False)
        assert not plan.profile.is_plain_measured
        assert plan.measured is not None
        assert plan.measured.peak_bytes <= 7 * 1024**3
        plan.apply(model)
        model(inputs).square().mean().backward()
        plan.remove(model)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        model.zero_grad()
        torch.cuda.empty_cache()
