"""Plans on real models on the CPU: the budget is kept, the gradients are those of the plain run, and nothing else is changed."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel._base.errors import DamagedFileError, StateError  # noqa: E402
from hyper_parallel.core.planner.model.abilities import HostCost  # noqa: E402
from hyper_parallel.core.planner.model.choices import recompute_all  # noqa: E402
from hyper_parallel.core.planner.model.profile import Link, ProfiledOp, Region, StepProfile  # noqa: E402
from hyper_parallel.core.planner.plan.proof import planned  # noqa: E402
from hyper_parallel.core.planner.solve.solver import BudgetError  # noqa: E402
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel  # noqa: E402
from support import planned_models as models  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk")
BUDGETS = 20  # for each of the five models
MORE_BUDGETS = {"convolution": 100, "mlp": 40}  # so small that there is little to mix; and fast


def choices_of(plan: hp.MemoryPlan) -> set[str]:
    return {choice for each in plan.decision for choice in (*each.ops, *each.inputs) if choice is not None}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def with_even_times(profile: StepProfile) -> StepProfile:
    """The profile of a machine that takes a millisecond for each megabyte: in measured times one stall would change all that is chosen."""

    def op_ms(region: Region, op: ProfiledOp) -> float:
        if op.part is not None:  # its time is that of the op it is a part of
            return 0.0
        read = [region.ops[index].num_bytes for index in op.reads]
        read += [region.inputs[index].value.num_bytes for index in op.reads_inputs]
        return (op.num_bytes + sum(read)) / 1e6

    def even(region: Region) -> Region:
        ops = tuple(dataclasses.replace(op, forward_ms=op_ms(region, op)) for op in region.ops)
        ms = sum(op.forward_ms for op in ops)
        return dataclasses.replace(region, ops=ops, forward_ms=ms, backward_ms=2 * ms, before_ms=0.0, after_ms=0.0)

    regions = tuple(map(even, profile.regions))
    step_ms = sum(region.forward_ms + region.backward_ms for region in regions)
    return dataclasses.replace(
        profile, regions=regions, step_ms=step_ms, turn=dataclasses.replace(profile.turn, ms=0.0)
    )


class Planned:
    """One model with its profile, so that many budgets cost one profile. Memory is measured, time is not."""

    def __init__(self, name: str) -> None:
        self.model, self.inputs = models.make(name), models.batch(name)
        self.plain = models.gradients(self.model, self.inputs)
        self.profiled = ProfiledModel(self.model, self.inputs)
        profile = with_even_times(self.profiled.profile())
        # Files of a few kilobytes come and go for nothing here. A link that carries a third of what is kept in the time of a forward makes
        # it worth to choose.
        residual_bytes = sum(region.residual_bytes for region in profile.regions)
        rate = residual_bytes / 3 / sum(region.forward_ms for region in profile.regions)
        self.profile = dataclasses.replace(profile, link=Link(rate, rate))

    def plan(self, budget_bytes: int) -> hp.MemoryPlan:
        return planned(self.profile, budget_bytes, self.profiled)

    def smallest(self) -> int:
        with pytest.raises(BudgetError) as caught:
            self.plan(self.profile.base_bytes + 1)
        return caught.value.smallest_bytes


@pytest.mark.parametrize("name", models.NAMES)
def test_random_budgets_are_kept_and_gradients_are_those_of_the_plain_run(name: str, record_property: Any) -> None:
    case = Planned(name)
    smallest, plain_peak = case.smallest(), case.profile.peak_bytes
    assert case.profile.base_bytes < smallest < plain_peak
    chooser = random.Random(name)
    num_mixed = 0
    num_budgets = MORE_BUDGETS.get(name, BUDGETS)
    for budget in [smallest, *(chooser.randint(smallest, plain_peak) for _ in range(num_budgets - 1))]:
        plan = case.plan(budget)
        plan.apply(case.model)
        try:
            peak = case.profile.base_bytes + case.profiled.peak_bytes()
            assert peak <= budget, (name, budget, peak, str(plan))
            assert same(models.gradients(case.model, case.inputs), case.plain), (name, budget)
            assert not plan.stats(case.model)
        finally:
            plan.remove(case.model)
        num_mixed += choices_of(plan) >= {"save", "swap", "recompute"}
    record_property("plans with all three choices", num_mixed)
    assert num_mixed >= 6, "of the five models together at least 30 plans have all three choices"


def test_a_budget_that_cannot_be_met_names_the_smallest_that_can_and_what_it_is_made_of() -> None:
    model, inputs = models.make("mlp"), models.batch("mlp")
    with pytest.raises(BudgetError, match="at least") as caught:
        hp.plan_memory(model, inputs, budget="1%", progress=False)
    assert "backward" in str(caught.value)
    plan = hp.plan_memory(model, inputs, budget=caught.value.smallest_bytes, progress=False)
    assert plan.measured is not None
    assert plan.measured.peak_bytes <= plan.budget_bytes


def test_a_budget_above_the_plain_peak_gives_the_empty_plan_and_says_so() -> None:
    model, inputs = models.make("mlp"), models.batch("mlp")
    plan = hp.plan_memory(model, inputs, budget="1TiB", progress=False)
    assert plan.is_empty
    assert "Nothing is changed" in str(plan)
    before = list(model.named_modules())
    plan.apply(model)
    assert list(model.named_modules()) == before
    assert not hp.wrappers(model)
    plan.remove(model)


def test_a_percentage_is_of_the_activations_and_bytes_are_of_everything() -> None:
    model, inputs = models.make("llama"), models.batch("llama")
    plan = hp.plan_memory(model, inputs, budget="60%", progress=False)
    profile = plan.profile
    assert plan.budget_bytes == profile.base_bytes + int(0.6 * profile.activation_peak_bytes)
    assert hp.plan_memory(model, inputs, budget=plan.budget_bytes, progress=False).budget_bytes == plan.budget_bytes


@pytest.mark.parametrize("budget", ["many", "0%", "-1", 0, -5, "12 apples", "nan%"])
def test_a_budget_that_is_none_is_refused_with_what_is_accepted(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget"):
        hp.plan_memory(models.make("mlp"), models.batch("mlp"), budget=budget, progress=False)


@pytest.mark.parametrize("wrong", [{"regions": [3]}, {"optimizer": "adam"}, {"budget": 1.5}])
def test_an_argument_of_another_kind_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(wrong))):
        hp.plan_memory(models.make("mlp"), models.batch("mlp"), progress=False, **wrong)


# -- the model is left alone --------------------------------------------------------------------------------------------------------


def state_of(model: Any) -> dict[str, Any]:
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "modes": [module.training for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(vars(m))) for m in model.modules()],
        "random": torch.get_rng_state(),
        "python": random.getstate(),
    }


def check_unchanged(model: Any, before: dict[str, Any]) -> None:
    after = state_of(model)
    assert same(before["tensors"], after["tensors"])
    for name, gradient in before["gradients"].items():
        other = after["gradients"][name]
        assert gradient is None if other is None else torch.equal(gradient, other)
    for name in ("modes", "hooks", "python"):
        assert before[name] == after[name], name
    assert torch.equal(before["random"], after["random"])


@pytest.mark.parametrize("has_gradients", [False, True])
def test_planning_leaves_model_gradients_buffers_and_random_numbers_as_they_were(has_gradients: bool) -> None:
    model, inputs = models.make("convolution"), models.batch("convolution")
    if has_gradients:
        models.loss_of(model, inputs).backward()
    before = state_of(model)
    hp.plan_memory(model, inputs, budget="90%", progress=False)
    check_unchanged(model, before)


@pytest.mark.parametrize("moment", range(6))
def test_an_interrupted_profile_leaves_no_trace(moment: int) -> None:
    model, inputs = models.make("convolution"), models.batch("convolution")
    models.loss_of(model, inputs).backward()
    before = state_of(model)
    said: list[str] = []

    def interrupt(what: str) -> None:
        said.append(what)
        if len(said) == moment + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hp.plan_memory(model, inputs, budget="90%", progress=interrupt)
    check_unchanged(model, before)


@pytest.mark.parametrize("num_calls", [1, 5, 9, 14, 22])
def test_an_interrupt_inside_a_forward_of_the_profile_leaves_no_trace(num_calls: int) -> None:
    model, inputs = models.make("convolution"), models.batch("convolution")
    calls = 0
    original = type(model.stages[1][2]).forward

    def forward(module: Any, x: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == num_calls:
            raise KeyboardInterrupt
        return original(module, x)

    before = state_of(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.stages[1][2]), "forward", forward)
        with pytest.raises(KeyboardInterrupt):
            hp.plan_memory(model, inputs, budget="90%", progress=False)
    check_unchanged(model, before)


def test_planning_does_not_end_the_profiler_of_a_user() -> None:
    model, inputs = models.make("convolution"), models.batch("convolution")
    before = state_of(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        with pytest.raises(RuntimeError, match="while a profiler runs(.|\n)*Plan before"):
            hp.plan_memory(model, inputs, budget="90%", progress=False)
        check_unchanged(model, before)
        models.loss_of(model, inputs)
    assert any(each.key == "aten::convolution" for each in profile.key_averages())


@pytest.mark.parametrize(
    ("runs", "where"), [("whole", "forward"), ("block", "forward"), ("in backward", "backward"), ("left", "forward")]
)
def test_a_profiler_that_the_model_runs_in_its_step_is_told_and_nothing_is_changed(runs: str, where: str) -> None:
    class Measuring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if runs == "left" and torch.autograd._profiler_enabled():  # only where memory is measured
                torch.profiler.profile().start()
            if runs == "in backward":
                x = x.clone().requires_grad_()
                x.register_hook(measured)
            with profiler() if runs == "whole" else contextlib.nullcontext():
                for number, block in enumerate(self.blocks):
                    with profiler() if (runs, number) == ("block", 1) else contextlib.nullcontext():
                        x = block(x)
            return x

    def profiler() -> Any:
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)

    def measured(gradient: torch.Tensor) -> None:
        with profiler():
            gradient.sum()

    model = Measuring()
    before = state_of(model)
    with pytest.raises(RuntimeError, match=rf"The model's step begins a profiler(.|\n)*; {where}\.\n.*off while"):
        hp.plan_memory(model, torch.ones(4, 8), loss_fn=lambda y: y.sum(), budget="90%", progress=False)
    check_unchanged(model, before)
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("part", ["70%", "40%"])
def test_a_plan_that_is_made_under_autocast_is_for_steps_under_autocast(part: str) -> None:
    model, inputs = models.make("gpt2"), models.batch("gpt2")

    def step() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = models.loss_of(model, inputs)
        loss.backward()
        return [loss.detach(), *(each.grad for each in model.parameters())]

    plain = step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = hp.plan_memory(model, inputs, budget=part, progress=False)
        assert plan.profile.identity.autocast == "bfloat16"
        assert plan.measured.peak_bytes <= plan.budget_bytes < plan.profile.peak_bytes
        plan.apply(model)
    for _ in range(2):
        assert all(torch.equal(*each) for each in zip(step(), plain, strict=True))


# -- applying -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan")
    with hp.configure_swap(disk_dir=directory, min_bytes=4096):
        plan = hp.plan_memory(models.make("llama"), models.batch("llama"), budget="40%", progress=False)
    plan.save(directory / "plan.json")
    return directory / "plan.json"


def test_a_saved_plan_is_the_plan(saved_plan: Path, tmp_path: Path) -> None:
    plan = hp.MemoryPlan.load(saved_plan)
    plan.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == saved_plan.read_text()
    model, inputs = models.make("llama"), models.batch("llama")
    plain = models.gradients(model, inputs)
    plan.apply(model)
    assert same(models.gradients(model, inputs), plain)
    plan.remove(model)


def test_a_plan_for_another_model_names_the_first_difference(saved_plan: Path) -> None:
    with pytest.raises(ValueError, match="another model") as caught:
        hp.MemoryPlan.load(saved_plan).apply(models.make("gpt2"))
    assert "LlamaForCausalLM" in str(caught.value)
    assert "GPT2LMHeadModel" in str(caught.value)


def test_a_plan_for_other_dtypes_names_the_first_parameter(saved_plan: Path) -> None:
    model = models.make("llama").to(torch.float64)
    with pytest.raises(ValueError, match="embed_tokens") as caught:
        hp.MemoryPlan.load(saved_plan).apply(model)
    assert "float32" in str(caught.value)
    assert "float64" in str(caught.value)


def test_a_plan_for_another_device_names_both(saved_plan: Path) -> None:
    text = saved_plan.read_text().replace('"device": "cpu"', '"device": "cuda: NVIDIA H200"')
    other = saved_plan.with_name("other.json")
    other.write_text(text)
    with pytest.raises(ValueError, match="H200"):
        hp.MemoryPlan.load(other).apply(models.make("llama"))


def test_a_plan_for_another_batch_is_told_by_check_and_in_the_first_step(saved_plan: Path) -> None:
    model, plan = models.make("llama"), hp.MemoryPlan.load(saved_plan)
    longer = models.batch("llama", size=3)
    with pytest.raises(ValueError, match="batch") as caught:
        plan.check(model, longer)
    assert "[2, 64]" in str(caught.value)
    assert "[3, 64]" in str(caught.value)
    plan.apply(model)
    with pytest.raises(StateError, match=r"at most int64\[2, 64\], got int64\[3, 64\]"):
        models.loss_of(model, longer)
    plan.remove(model)
    plan.apply(model, on_mismatch="recompute")
    got = models.gradients(model, longer)
    assert plan.stats(model) == {"batches larger than planned": 1}
    plan.remove(model)
    assert same(got, models.gradients(model, longer))


def test_applying_twice_and_removing_twice_are_errors(saved_plan: Path) -> None:
    model, plan = models.make("llama"), hp.MemoryPlan.load(saved_plan)
    plan.apply(model)
    with pytest.raises(StateError, match="applied to this model already"):
        plan.apply(model)
    plan.remove(model)
    with pytest.raises(StateError, match="not applied"):
        plan.remove(model)
    assert not hp.wrappers(model)


def test_names_and_state_dict_of_a_planned_model_are_as_before(saved_plan: Path) -> None:
    model, plan = models.make("llama"), hp.MemoryPlan.load(saved_plan)
    before = [name for name, _ in model.named_modules()], list(model.state_dict())
    plan.apply(model)
    assert ([name for name, _ in model.named_modules()], list(model.state_dict())) == before
    plan.remove(model)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "other"}', '{"format": "hyper_parallel memory plan", "version": 1}']
)
def test_a_file_that_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(DamagedFileError):
        hp.MemoryPlan.load(tmp_path / "plan.json")


# -- training -------------------------------------------------------------------------------------------------------------------------


class Loop:
    """A real training loop: AdamW, two batches for each step, evaluation every third step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = models.make(name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)
            self.optimizer.zero_grad()
            for part in range(2):
                loss = models.loss_of(self.model, models.batch(self.name, 2 * step + part))
                loss.backward()
                self.losses.append(float(loss.detach()))
            self.optimizer.step()
            if step % 3 == 2:
                self.model.eval()
                with torch.no_grad():
                    self.losses.append(float(models.loss_of(self.model, models.batch(self.name, 1000))))
                self.model.train()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_a_training_loop_with_a_plan_has_the_losses_of_the_plain_one(name: str, tmp_path: Path) -> None:
    plain = Loop(name)
    plain.run(0, 8)
    planned = Loop(name)
    budget = "45%"
    plan = hp.plan_memory(planned.model, models.batch(name), budget=budget, optimizer=planned.optimizer, progress=False)
    plan.apply(planned.model)
    planned.run(0, 4)
    torch.save(planned.state(), tmp_path / "checkpoint.pt")
    plan.save(tmp_path / "plan.json")
    plan.remove(planned.model)

    resumed = Loop(name)
    again = hp.MemoryPlan.load(tmp_path / "plan.json").apply(resumed.model)
    resumed.load(torch.load(tmp_path / "checkpoint.pt"))
    resumed.run(4, 8)
    assert planned.losses + resumed.losses == plain.losses
    again.remove(resumed.model)


def test_explain_lists_what_is_kept_and_what_it_would_cost() -> None:
    explanation = hp.explain(models.make("gpt2"), models.batch("gpt2"), progress=False)
    text = str(explanation)
    assert "transformer.h.*.mlp.c_fc" in text
    assert "aten.addmm.default" in text
    total = sum(region.residual_bytes for region in explanation.profile.regions)
    assert 0 < total < explanation.profile.peak_bytes


# -- verify, and what the plan needs elsewhere ------------------------------------------------------------------------------------------


def test_a_plan_that_misses_its_budget_is_solved_again_by_verify() -> None:
    case = Planned("llama")
    budget = case.profile.base_bytes + int(0.6 * case.profile.activation_peak_bytes)
    # A profile that knows of less than half of what backward takes: what is planned by it is too large.
    wrong = dataclasses.replace(
        case.profile,
        regions=tuple(
            dataclasses.replace(region, backward_peak_bytes=region.residual_bytes, forward_peak_bytes=0)
            for region in case.profile.regions
        ),
        turn=dataclasses.replace(case.profile.turn, peak_bytes=0),
    )
    plan = planned(wrong, budget, None)
    plan.apply(case.model)
    missed = case.profile.base_bytes + case.profiled.peak_bytes()
    plan.remove(case.model)
    assert missed > budget, "the test has nothing to show"
    verified = plan.verify(case.model, case.inputs)
    assert verified is not plan
    assert verified.decision != plan.decision
    assert verified.measured is not None
    assert verified.measured.peak_bytes <= budget
    assert verified.measured.step_ms is not None
    assert "measured" in str(verified)
    assert not hp.wrappers(case.model)
    verified.apply(case.model)
    assert case.profile.base_bytes + case.profiled.peak_bytes() <= budget
    assert same(models.gradients(case.model, case.inputs), case.plain)
    verified.remove(case.model)


def test_a_plan_that_keeps_its_budget_is_verified_as_it_is_and_stays_applied() -> None:
    case = Planned("mlp")
    plan = case.plan(case.profile.base_bytes + int(0.7 * case.profile.activation_peak_bytes))
    plan.apply(case.model)
    assert plan.verify(case.model, case.inputs) is plan
    assert plan.measured is not None
    assert plan.measured.step_ms is not None
    assert hp.wrappers(case.model)
    plan.remove(case.model)


@pytest.mark.parametrize("name", models.NAMES)
def test_a_plan_names_exactly_the_bytes_it_will_need_elsewhere(name: str, tmp_path_factory: Any) -> None:
    from hyper_parallel.core.swap import engines

    case = Planned(name)
    fast = dataclasses.replace(case.profile, link=Link(1e12, 1e12))  # nothing else is worth its time
    plan = planned(fast, fast.base_bytes + int(0.8 * fast.activation_peak_bytes), None)
    assert plan.has_swaps
    directory = tmp_path_factory.mktemp("other")
    with hp.configure_swap(disk_dir=directory, min_bytes=4096):
        plan.apply(case.model)
        for _ in range(3):
            models.gradients(case.model, case.inputs)
        (stats,) = (managed.tier.stats() for key, managed in engines.all_engines().items() if str(directory) in key)
        plan.remove(case.model)
    assert plan.host.tier == "disk"
    assert plan.host.used_bytes == stats.peak_used_bytes
    assert plan.as_dict()["host"] == plan.host._asdict()
    assert "Swapped at once" in str(plan)


def test_swapped_inputs_that_blocks_share_are_on_the_host_once(tmp_path_factory: Any) -> None:
    from hyper_parallel.core.swap import engines

    case = Planned("llama")
    some = planned(case.profile, case.profile.base_bytes + int(0.8 * case.profile.activation_peak_bytes), None)
    decision = tuple(
        dataclasses.replace(recompute_all(region), inputs=("swap" if region.inputs[0].may_swap else "save",))
        for region in case.profile.regions
    )
    assert any("swap" in each.inputs for each in decision)
    plan = hp.MemoryPlan(case.profile, decision, some.setting, some.budget_bytes, some.predicted)
    assert case.profile.shared_input_bytes, "sines and cosines are given to all blocks"
    directory = tmp_path_factory.mktemp("other")
    with hp.configure_swap(disk_dir=directory, min_bytes=4096):
        plan.apply(case.model)
        for _ in range(3):
            models.gradients(case.model, case.inputs)
        (stats,) = (managed.tier.stats() for key, managed in engines.all_engines().items() if str(directory) in key)
        plan.remove(case.model)
    assert plan.host.used_bytes == stats.peak_used_bytes


@pytest.mark.parametrize("name", models.NAMES)
def test_where_the_host_is_the_slower_one_the_frameworks_checkpoint_recomputes_whole_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyper_parallel.platform.torch.planner import applying

    case = Planned(name)
    profile = dataclasses.replace(case.profile, host=HostCost(1e3))
    budget = profile.base_bytes + int(profile.activation_peak_bytes * 0.8)
    plan = planned(profile, budget, case.profiled)
    assert plan.measured is not None
    assert plan.measured.peak_bytes <= budget
    assert choices_of(plan) <= {"recompute", "save"}
    calls = []
    checkpoint = applying.checkpoint_by_framework
    monkeypatch.setattr(
        applying, "checkpoint_by_framework", lambda *args, **kw: calls.append(kw) or checkpoint(*args, **kw)
    )
    plan.apply(case.model)
    assert same(models.gradients(case.model, case.inputs), case.plain)
    plan.remove(case.model)
    assert len(calls) == sum(not each.is_plain for each in plan.decision) > 0
