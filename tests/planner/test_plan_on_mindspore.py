"""Plans on a four-block transformer of MindSpore on the CPU: the budget is kept, the gradients are those of the plain run."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore")
pytest.importorskip("scipy", reason="the solver is in SciPy")

from mindspore import Parameter, Tensor, nn, ops  # noqa: E402
from mindspore.graph.api import _pynative_executor  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel._base.errors import ComesLaterError, StateError  # noqa: E402
from hyper_parallel.core.planner.model.choices import plain, recompute_all  # noqa: E402
from hyper_parallel.core.planner.model.profile import Link  # noqa: E402
from hyper_parallel.core.planner.plan.proof import planned  # noqa: E402
from hyper_parallel.core.planner.solve.solver import BudgetError  # noqa: E402
from hyper_parallel.core.swap.config import configure_swap  # noqa: E402
from hyper_parallel.platform import selection  # noqa: E402
from hyper_parallel.platform.mindspore.activation_checkpoint import checkpoint_wrapper, list_wrappers  # noqa: E402
from hyper_parallel.platform.mindspore.planner.applying import Applied  # noqa: E402
from hyper_parallel.platform.mindspore.planner.meters import CpuMemory  # noqa: E402
from hyper_parallel.platform.mindspore.planner.profiling import ProfiledModel  # noqa: E402
from hyper_parallel.platform.mindspore.planner.steps import run_step  # noqa: E402
from support.backends import MindSporeBackend  # noqa: E402
from support.mindspore_training import (  # noqa: E402
    DRIVERS,
    NUM_WORDS,
    batch,
    differentiate,
    new_transformer,
    num_live_tensors,
    seed,
)
from support.swapping_state import check_nothing_left, offloaded_bytes  # noqa: E402

LENGTH, NUM_ROWS = 32, 2


@pytest.fixture(autouse=True)
def on_mindspore() -> Iterator[None]:
    with MindSporeBackend().active():
        yield
        gc.collect()
        check_nothing_left()
    selection._forget()


class Case:
    """The transformer, a batch, its loss, and the gradients of the plain run."""

    def __init__(self, number: int = 0, **sizes: int) -> None:
        self.model = new_transformer(width=32)
        self.words, self.targets = batch(number, **{"length": LENGTH, "num_rows": NUM_ROWS, **sizes})
        self.plain = {driver: self.gradients(driver) for driver in DRIVERS}

    def loss(self, output: Any) -> Any:
        return ops.cross_entropy(output.reshape(-1, NUM_WORDS), self.targets)

    def gradients(self, driver: str) -> list[np.ndarray]:
        seed(7)
        weights = self.model.trainable_params()
        value, found = differentiate(lambda words: self.loss(self.model(words)), (self.words,), weights, driver)
        return [each.asnumpy().copy() for each in (value, *found)]

    def profiled(self) -> ProfiledModel:
        return ProfiledModel(self.model, self.words, self.loss)

    def plan(self, budget: int | str, **options: Any) -> hp.MemoryPlan:
        return hp.plan_memory(self.model, self.words, loss_fn=self.loss, budget=budget, progress=False, **options)

    def check_gradients(self) -> None:
        for driver in DRIVERS:
            found = self.gradients(driver)
            assert all(np.array_equal(a, b) for a, b in zip(found, self.plain[driver], strict=True)), driver


def choices_of(plan: hp.MemoryPlan) -> set[str]:
    return {choice for each in plan.decision for choice in (*each.ops, *each.inputs) if choice is not None}


def test_random_budgets_are_kept_and_gradients_are_those_of_the_plain_run(record_property: Any) -> None:
    case = Case()
    profiled = case.profiled()
    profile = profiled.profile()
    assert [region.path for region in profile.regions] == [f"blocks.{number}" for number in range(4)]
    with pytest.raises(BudgetError) as caught:
        planned(profile, profile.base_bytes + 1, profiled)
    smallest = caught.value.smallest_bytes
    assert profile.base_bytes < smallest < profile.peak_bytes
    chooser = random.Random(1)
    numbers = set()
    for budget in [smallest, *(chooser.randint(smallest, profile.peak_bytes - 1) for _ in range(11))]:
        plan = planned(profile, budget, profiled)
        plan.apply(case.model)
        try:
            assert profile.base_bytes + profiled.peak_bytes() <= budget, str(plan)
            case.check_gradients()
            assert not plan.stats(case.model)
        finally:
            plan.remove(case.model)
        assert not plan.is_empty
        numbers.add(sum(not each.is_plain for each in plan.decision))
    record_property("blocks that plans recompute", sorted(numbers))
    assert len(numbers) >= 3, "a tighter budget recomputes more blocks"
    case.check_gradients()
    assert not list_wrappers(case.model)


def test_a_predicted_peak_is_the_real_one_to_the_byte_or_slightly_above() -> None:
    case = Case()
    for budget in ("50%", "70%", "90%"):
        plan = case.plan(budget)
        assert plan.measured is not None
        assert plan.measured.peak_bytes <= plan.predicted.peak_bytes <= plan.measured.peak_bytes * 1.05


def test_swapped_blocks_keep_the_budget_and_the_gradients(tmp_path: Path) -> None:
    case = Case()
    with configure_swap(disk_dir=tmp_path, min_bytes=1024):
        profiled = case.profiled()
        profile = profiled.profile()
        assert profile.link is not None
        # Small files are slow; a link that is not makes it worth to swap.
        profile = dataclasses.replace(profile, link=Link(1e9, 1e9))
        before = offloaded_bytes()
        used = set()
        for part in (0.45, 0.6, 0.8):
            plan = planned(profile, profile.base_bytes + int(part * profile.activation_peak_bytes), profiled)
            used |= choices_of(plan)
            plan.apply(case.model)
            try:
                assert profile.base_bytes + profiled.peak_bytes() <= plan.budget_bytes, str(plan)
                case.check_gradients()
            finally:
                plan.remove(case.model)
        assert "swap" in used
        assert offloaded_bytes() > before
        gc.collect()
        check_nothing_left()


def test_planning_changes_nothing() -> None:
    case = Case()
    weights = [parameter.asnumpy().copy() for parameter in case.model.get_parameters()]
    names = [name for name, _ in case.model.parameters_and_names()]
    seed(3)
    expected = ops.rand(3).asnumpy()
    seed(3)
    python, numpy = random.getstate(), np.random.get_state()
    case.plan("60%")
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numpy[1])
    assert np.array_equal(ops.rand(3).asnumpy(), expected)
    assert names == [name for name, _ in case.model.parameters_and_names()]
    assert all(np.array_equal(a, b.asnumpy()) for a, b in zip(weights, case.model.get_parameters(), strict=True))
    assert not list_wrappers(case.model)
    assert not _pynative_executor.grad_flag()
    case.check_gradients()


def test_running_statistics_are_as_before_after_planning() -> None:
    def block() -> nn.Cell:
        return nn.SequentialCell(nn.Dense(64, 64), nn.BatchNorm1d(64), nn.ReLU())

    model = nn.SequentialCell(nn.SequentialCell(block(), block(), block()), nn.Dense(64, 1))
    model.set_train()
    x = Tensor(np.random.RandomState(0).randn(512, 64).astype(np.float32))
    statistics = [p for p in model.get_parameters() if not p.requires_grad]
    assert statistics
    before = [each.asnumpy().copy() for each in statistics]
    run_step(model, x, lambda y: y.mean())
    assert not all(np.array_equal(a, b.asnumpy()) for a, b in zip(before, statistics, strict=True))
    before = [each.asnumpy().copy() for each in statistics]
    hp.explain(
        model, x, loss_fn=lambda y: y.mean(), progress=False
    )  # measures as planning does, with blocks run again, too
    assert all(np.array_equal(a, b.asnumpy()) for a, b in zip(before, statistics, strict=True))


def test_a_plan_is_saved_loaded_applied_and_shown(tmp_path: Path) -> None:
    case = Case()
    plan = case.plan("60%")
    plan.save(tmp_path / "plan.json")
    loaded = hp.MemoryPlan.load(tmp_path / "plan.json")
    assert loaded.as_dict() == plan.as_dict()
    assert loaded.profile.identity.framework == "mindspore"
    loaded.apply(case.model)
    case.check_gradients()
    loaded.remove(case.model)
    loaded.check(case.model, case.words)
    plan.report(tmp_path / "plan.html")
    assert "blocks.0" in (tmp_path / "plan.html").read_text()
    assert "blocks." in str(plan)
    with pytest.raises(ValueError, match="another model"):
        loaded.apply(new_transformer(width=16))


def test_a_plan_is_verified() -> None:
    case = Case()
    plan = case.plan("60%", verify=False)
    assert plan.measured is None
    plan.apply(case.model)
    verified = plan.verify(case.model, case.words, loss_fn=case.loss)
    assert verified.measured is not None
    assert verified.measured.peak_bytes <= verified.budget_bytes
    assert list_wrappers(case.model)
    verified.remove(case.model)


def test_a_budget_above_the_plain_peak_needs_no_plan_and_one_that_cannot_be_met_is_an_error() -> None:
    case = Case()
    assert case.plan("100%").is_empty
    with pytest.raises(BudgetError, match="at least") as caught:
        case.plan("5%")
    assert case.plan(caught.value.smallest_bytes).measured.peak_bytes <= caught.value.smallest_bytes


def test_another_shape_is_an_error_or_is_recomputed_and_counted() -> None:
    case = Case()
    plan = case.plan("60%")
    other, targets = batch(1, length=LENGTH * 2, num_rows=NUM_ROWS)

    def loss(output: Any) -> Any:
        return ops.cross_entropy(output.reshape(-1, NUM_WORDS), targets)

    plan.apply(case.model)
    with pytest.raises(StateError, match="larger than the one that the plan was made for"):
        run_step(case.model, other, loss)
    plan.remove(case.model)
    plan.apply(case.model, on_mismatch="recompute")
    run_step(case.model, other, loss)
    assert plan.stats(case.model) == {"batches larger than planned": 1}
    plan.remove(case.model)


def test_an_optimizers_state_counts() -> None:
    case = Case()
    plain = ProfiledModel(case.model, case.words, case.loss).base_bytes()
    optimizer = nn.AdamWeightDecay(case.model.trainable_params(), learning_rate=1e-3)
    with_state = ProfiledModel(case.model, case.words, case.loss, optimizer=optimizer).base_bytes()
    two = 2 * sum(int(parameter.nbytes) for parameter in case.model.trainable_params())
    assert two <= with_state - plain <= two + 64
    with pytest.raises(TypeError, match="optimizer"):
        ProfiledModel(case.model, case.words, case.loss, optimizer=object())


def test_planned_steps_hold_no_tensor() -> None:
    case = Case()
    plan = case.plan("60%")
    plan.apply(case.model)
    for _ in range(3):
        run_step(case.model, case.words, case.loss)
    live = num_live_tensors()
    for _ in range(20):
        run_step(case.model, case.words, case.loss)
    assert num_live_tensors() <= live
    plan.remove(case.model)


class _Notes:
    """What a second run does not put back: it has slots and no attributes of its own."""

    __slots__ = ("sums",)

    def __init__(self) -> None:
        self.sums: list[float] = []


class Noting(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(4, 4)
        self.notes = _Notes()

    def construct(self, x: Tensor) -> Tensor:
        self.notes.sums.append(float(x.asnumpy().sum()))
        return ops.sin(self.dense(x))


class Rounds(nn.Cell):
    """Runs its blocks twice in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.CellList([Noting(), Noting()])

    def construct(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


@pytest.mark.parametrize("driver", DRIVERS)
def test_blocks_that_run_more_than_once_begin_with_their_first_call_in_every_forward(driver: str) -> None:
    model, x = Rounds(), Tensor(np.random.RandomState(0).rand(2, 4).astype(np.float32))
    first = model.blocks[0]
    profile = ProfiledModel(model, x, lambda y: y.sum()).profile()
    assert [region.path for region in profile.regions] == ["blocks.0", "blocks.1"] * 2
    applied = Applied(model, profile.regions, [plain(each) if number < 2 else recompute_all(each) for number, each in enumerate(profile.regions)], "error")  # fmt: skip

    def step(called: Any) -> None:
        differentiate(lambda given: called(given).sum(), (x,), called.trainable_params(), driver)

    # Not a forward that raises: after one MindSpore itself is not sure to differentiate the next.
    for disturb in (lambda: None, lambda: step(model.blocks[0]), lambda: None):
        disturb()
        first.notes.sums.clear()
        step(model)
        once, twice, again = first.notes.sums
        assert once != twice == again, "the second call is the one that is recomputed"
    applied.remove()


def test_explain_tells_what_each_block_keeps() -> None:
    case = Case()
    explanation = hp.explain(case.model, case.words, loss_fn=case.loss, progress=False)
    assert len(explanation.profile.regions) == 4
    rows = [line.split("  ") for line in str(explanation).splitlines()]
    assert any(row[0] == "blocks.*" and row[1].startswith("block") for row in rows)
    assert explanation._repr_html_().count("MatMul") > 1
    kept = sum(num_bytes for _, _, _, num_bytes in explanation._kept)
    measured = sum(op.residual_bytes for region in explanation.profile.regions for op in region.ops)
    assert abs(kept - measured) <= measured // 10


def test_mistakes_are_told() -> None:
    case = Case()
    with pytest.raises(ValueError, match="one number"):
        hp.plan_memory(case.model, case.words, progress=False)
    with pytest.raises(TypeError, match="No loss"):
        hp.plan_memory(case.model, case.words, loss_fn=lambda out: 3.0, progress=False)
    with pytest.raises(ValueError, match="matches no module"):
        case.plan("60%", regions=["layers.*"])


# -- what is counted -----------------------------------------------------------------------------------------------------

KIB4 = 32 * 32 * 4


def held_after(function: Any, *outside: Tensor) -> tuple[int, int]:
    """Bytes held when a forward is over, and the highest point of it."""
    meter = CpuMemory(outside)
    _pynative_executor.set_grad_flag(True)
    try:
        with meter.running():
            meter.mark("forward")
            result = function()
            meter.mark("end")
        del result
    finally:
        _pynative_executor.set_grad_flag(False)
    forward, end = meter.spans()
    return end.level_bytes, forward.peak_bytes


def test_the_meter_counts_what_is_held_for_backward_and_what_an_op_has_at_hand() -> None:
    weight = Parameter(Tensor(np.ones((32, 32), np.float32)), name="weight")

    # `exp` saves its result; the product by a number saves nothing, and reads and makes one.
    assert held_after(lambda: ops.exp(weight * 2.0) * 3.0, weight) == (KIB4, 2 * KIB4)
    # One storage that is saved three times counts once.
    assert held_after(lambda: _squared(ops.exp(weight)), weight) == (KIB4, 2 * KIB4)
    # What was there before does not count.
    assert held_after(lambda: weight * weight, weight) == (0, KIB4)


def _squared(y: Tensor) -> Tensor:
    return y * y


def test_the_meter_forgets_what_is_let_go() -> None:
    weight = Parameter(Tensor(np.ones((32, 32), np.float32)), name="weight")
    meter = CpuMemory([weight])
    _pynative_executor.set_grad_flag(True)
    try:
        with meter.running():
            meter.mark("begin")
            y = ops.exp(ops.exp(weight))
            meter.mark("held")
            del y
            gc.collect()
            meter.mark("gone")
    finally:
        _pynative_executor.set_grad_flag(False)
    assert [span.level_bytes for span in meter.spans()] == [0, 2 * KIB4, 0]


def test_a_recomputed_block_lets_go_of_its_memory_when_its_backward_is_over() -> None:
    model = nn.SequentialCell(*(checkpoint_wrapper(nn.SequentialCell(nn.Tanh(), nn.Sigmoid())) for _ in range(3)))
    first = nn.Dense(32, 32)
    x = Tensor(np.ones((64, 32), np.float32))
    meter = CpuMemory([x, *first.get_parameters()])

    def loss() -> Tensor:
        y = first(x)
        for block in model:
            y = block(y)
            y.register_hook(lambda gradient: meter.mark("backward"))
        return y.sum()

    gc.collect()
    gc.disable()  # nothing may wait for the collector
    try:
        with meter.running():
            meter.mark("forward")
            mindspore.value_and_grad(loss, None, mindspore.ParameterTuple(first.trainable_params()))()
            meter.mark("end")
    finally:
        gc.enable()
    one = 64 * 32 * 4  # a block keeps its input, and nothing once its backward is over
    assert [span.level_bytes for span in meter.spans()] == [0, 3 * one, 2 * one, one, 0]


PROGRAM = """
import numpy as np
import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
import hyper_parallel as hp

ms.runtime.launch_blocking()
ms.set_seed(1)

class Waves(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner = nn.CellList([nn.Dense(1, 1)])
        self.scale = Parameter(Tensor(np.float32(0.9)), name="scale")

    def construct(self, x):
        for _ in range(6):
            x = ops.tanh(x * self.scale)
        return x

class Model(nn.Cell):
    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([Waves() for _ in range(6)])

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return x.mean()

model = Model()
x = Tensor(np.random.RandomState(0).randn(1024, 1024).astype(np.float32))
scales = [p for p in model.trainable_params() if "scale" in p.name]
{plan}
gradients = ms.value_and_grad(model, None, ms.ParameterTuple(scales))
gradients(Tensor(np.ones((1, 1024), np.float32)))
before = int(open("/proc/self/statm").read().split()[1]) * 4096
value, found = gradients(x)
highest = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) * 1024
result = [highest - before, [float(each.asnumpy()) for each in found], measured]
"""


def test_resident_memory_falls_by_about_what_a_plan_says(tmp_path: Path) -> None:
    from support.interpreter import run_fresh

    make = """
plan = hp.plan_memory(model, x, budget="45%", progress=False)
plan.save({path!r})
measured = [plan.profile.activation_peak_bytes, plan.measured.peak_bytes - plan.profile.base_bytes]
"""
    load = "measured = None\nhp.MemoryPlan.load({path!r}).apply(model, on_mismatch='recompute')"
    path = str(tmp_path / "plan.json")
    _, expected, (plain_bytes, planned_bytes) = run_fresh(PROGRAM.replace("{plan}", make.format(path=path)))
    plain, gradients, _ = run_fresh(PROGRAM.replace("{plan}", "measured = None"))
    planned, same, _ = run_fresh(PROGRAM.replace("{plan}", load.format(path=path)))
    assert gradients == same == expected
    # Resident memory also has what kernels use and what the allocator holds back; the two runs differ by what the plan does not keep.
    saved = plain_bytes - planned_bytes
    assert saved > 64 * 2**20
    assert 0.9 * saved < plain - planned < 1.1 * saved, (plain, planned, saved)


def test_what_is_not_planned_here_says_so() -> None:
    case = Case()
    plan = case.plan("60%", verify=False)
    with pytest.raises(ComesLaterError, match="MindSpore"):
        plan.apply(case.model, on_oom="replan")
    assert not list_wrappers(case.model)


def test_the_largest_batch_is_found_and_proved() -> None:
    model = new_transformer(width=16, num_blocks=2)
    found = hp.largest(
        model,
        lambda n: Tensor(np.ones((n, 16), np.int32)),
        "256KiB",
        loss_fn=lambda output: (output**2).mean(),
        progress=False,
    )
    assert found.n >= 1
    assert found.plan.measured.peak_bytes <= 256 * 1024
