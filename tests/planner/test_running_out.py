"""Running out of memory while training: planned anew and repeated, and nobody can tell from the numbers.

A CPU with less memory stands for the device; the last test runs on a part of a GPU.
"""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hyper_parallel as hp  # noqa: E402
from hyper_parallel._base.errors import StateError  # noqa: E402
from hyper_parallel.core.planner.solve.solver import BudgetError  # noqa: E402
from hyper_parallel.platform.torch.planner import link  # noqa: E402
from support import planned_models as models  # noqa: E402
from support.limited_memory import LimitedMemory  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk", "small_link")


@pytest.fixture
def small_link(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The link is measured with less than the models have room for."""
    monkeypatch.setattr(link, "_CPU_BYTES", 64 * 1024)
    before = torch.autograd.backward
    yield
    assert torch.autograd.backward is before


class Normed(torch.nn.Module):
    """Everything that a repeated step must put back: dropout, running statistics, parameters with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 48)
        self.blocks = torch.nn.ModuleList(models.Residual(48) for _ in range(6))
        self.norm = torch.nn.BatchNorm1d(48)
        self.last = torch.nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


SHORT, LONG = 64, 160
LENGTHS = [SHORT, SHORT, LONG, SHORT, LONG, SHORT]


def batch_of(step: int, length: int) -> torch.Tensor:
    return torch.randn(length, 16, generator=torch.Generator().manual_seed(step))


class Training:
    """A few steps with AdamW; `run` is given what runs forward and backward of a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Normed()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[float] = []
        self.num_forwards = 0

    def step(self, number: int, length: int, run: Callable[[Callable[[], Any]], Any]) -> None:
        self.optimizer.zero_grad()
        inputs = batch_of(number, length)

        def forward_and_backward() -> torch.Tensor:
            self.num_forwards += 1
            loss = self.model(inputs)
            loss.backward()
            return loss.detach()

        self.losses.append(float(run(forward_and_backward)))
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        return {**self.model.state_dict(), "random": torch.get_rng_state()}


def plainly(function: Callable[[], Any]) -> Any:
    return function()


def trained_with_enough_memory() -> Training:
    training = Training()
    torch.manual_seed(1)
    for number, length in enumerate(LENGTHS):
        training.step(number, length, plainly)
    return training


def same(left: Training, right: Training) -> None:
    assert left.losses == right.losses
    mine, theirs = left.state(), right.state()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


def planned(training: Training) -> tuple[hp.MemoryPlan, int]:
    """A plan for the short batch, and the room there is: enough for the long one only if it is planned, too."""
    with_room = hp.plan_memory(training.model, batch_of(0, LONG), budget="1TiB", progress=False).profile
    limit = with_room.base_bytes + int(0.6 * with_room.activation_peak_bytes)
    plan = hp.plan_memory(training.model, batch_of(0, SHORT), budget=limit, optimizer=None, progress=False)
    return plan, limit


def optimizer_room(training: Training) -> int:
    """What AdamW holds is not part of the plan here, and neither is the copy of the batch norm's buffers."""
    return 2 * sum(p.numel() * 4 for p in training.model.parameters()) + 64 * 1024


def test_a_forward_that_runs_out_is_planned_anew_and_the_losses_are_those_of_a_larger_machine() -> None:
    expected = trained_with_enough_memory()
    training = Training()
    plan, limit = planned(training)
    plan.apply(training.model, on_oom="replan")
    torch.manual_seed(1)
    with LimitedMemory(training.model, limit) as room:
        for number, length in enumerate(LENGTHS):
            room.limit_bytes = limit + (optimizer_room(training) if number else 0)
            training.step(number, length, plainly)
    assert room.num_failures >= 1
    assert len(plan.replans(training.model)) == 1
    assert training.num_forwards == len(LENGTHS), "the user's own code ran once for each step"
    same(training, expected)
    plan.remove(training.model)
    assert "forward" not in vars(training.model)
    assert not hp.wrappers(training.model)


class FailingBackward(LimitedMemory):
    """There is room in forward; in a backward of a long batch, at some op, there is none until blocks are managed."""

    def __init__(self, model: Any, num_ops: int) -> None:
        super().__init__(model, 1 << 60)
        self.countdown: int | None = None
        self._num_ops = num_ops

    def arm(self) -> None:
        gc.collect()  # else the op that fails may be one of a finaliser of earlier tests, where nobody hears of it
        self.countdown = self._num_ops

    def is_counted(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        takes_memory = func is not torch.ops.aten.detach.default
        if self.countdown is not None and takes_memory and self.is_counted():
            self.countdown -= 1
            if self.countdown == 0:
                self.countdown = None
                self.num_failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory (simulated) in backward.")
        return super().__torch_dispatch__(func, types, args, kwargs)


class FailingAnywhere(FailingBackward):
    """As above, in forward or backward."""

    def is_counted(self) -> bool:
        return True


def test_wherever_a_step_fails_the_repeated_one_is_that_of_a_larger_machine() -> None:
    """Loss, gradients on top of earlier ones, running statistics and random numbers, for failures all over the step."""

    def outcome(training: Training, run: Callable[[Callable[[], Any]], Any], arm: Any = lambda: None) -> list[Any]:
        first, inputs = [arm], batch_of(1, SHORT)

        def step() -> Any:
            while first:
                first.pop()()
            loss = training.model(inputs)
            loss.backward()
            return loss.detach()

        torch.manual_seed(3)
        loss = run(step)
        gradients = [parameter.grad for parameter in training.model.parameters()]
        return [loss, *gradients, *training.model.buffers(), torch.get_rng_state()]

    def started() -> Training:
        training = Training()
        torch.manual_seed(2)
        training.model(batch_of(0, SHORT)).backward()
        return training

    expected = outcome(started(), plainly)
    plan, _ = planned(started())
    seed = random.randrange(2**32)
    print("seed", seed)
    chooser = random.Random(seed)
    training = started()
    plan.apply(training.model)
    with FailingAnywhere(training.model, 1 << 30) as room:
        outcome(training, plan.run, room.arm)
    plan.remove(training.model)
    assert room.countdown is not None
    num_all = (1 << 30) - room.countdown
    for _ in range(10):
        num_ops = chooser.randint(1, int(0.9 * num_all))
        training = started()
        plan.apply(training.model)
        with FailingAnywhere(training.model, num_ops) as room:
            got = outcome(training, plan.run, room.arm)
            room.countdown = None
        plan.remove(training.model)
        assert room.num_failures == 1
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True)), (seed, num_ops)


@pytest.mark.parametrize("num_ops", [1, 7, 40])
@pytest.mark.parametrize("on_oom", ["error", "replan"])
def test_a_step_that_runs_out_in_backward_is_repeated_by_run(num_ops: int, on_oom: str) -> None:
    expected = trained_with_enough_memory()
    training = Training()
    plan, _ = planned(training)
    plan.apply(training.model, on_oom=on_oom, on_mismatch="recompute")
    torch.manual_seed(1)
    with FailingBackward(training.model, num_ops) as room:
        for number, length in enumerate(LENGTHS):
            if number == 4:  # the first that is as long was planned before it ran
                room.arm()
            training.step(number, length, plan.run)
    assert room.num_failures == 1
    assert training.num_forwards == len(LENGTHS) + 1
    assert len(plan.replans(training.model)) == 1
    same(training, expected)
    plan.remove(training.model)


@pytest.mark.parametrize("has_gradient", [False, True])
def test_the_gradient_of_a_batch_is_that_of_a_larger_machine(has_gradient: bool) -> None:
    def gradient(run: Callable[[Callable[[], Any]], Any], training: Training, arm: Callable[[], None]) -> torch.Tensor:
        inputs = batch_of(1, LONG).requires_grad_()
        inputs.grad = torch.ones_like(inputs) if has_gradient else None
        to_do = [arm]

        def step() -> None:
            training.model(inputs).backward()
            while to_do:
                to_do.pop()()
            training.model(inputs).backward()

        torch.manual_seed(3)
        run(step)
        return inputs.grad

    expected = gradient(plainly, Training(), lambda: None)
    training = Training()
    plan, _ = planned(training)
    plan.apply(training.model, on_mismatch="recompute")
    with FailingBackward(training.model, 20) as room:
        assert torch.equal(gradient(plan.run, training, room.arm), expected)
    assert room.num_failures == 1
    plan.remove(training.model)


def test_run_covers_a_forward_that_runs_out_as_well() -> None:
    expected = trained_with_enough_memory()
    training = Training()
    plan, limit = planned(training)
    plan.apply(training.model)
    torch.manual_seed(1)
    with LimitedMemory(training.model, limit) as room:
        for number, length in enumerate(LENGTHS):
            room.limit_bytes = limit + (optimizer_room(training) if number else 0)
            training.step(number, length, plan.run)
    assert room.num_failures >= 1
    same(training, expected)
    plan.remove(training.model)


def test_a_step_under_autocast_is_planned_anew_under_autocast() -> None:
    def losses(run: Callable[[Callable[[], Any]], Any], training: Training, arm: Callable[[], None]) -> list[float]:
        found = []
        torch.manual_seed(1)
        for number, length in enumerate((SHORT, LONG)):

            def step(number: int = number, length: int = length) -> Any:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = training.model(batch_of(number, length))
                loss.backward()
                return loss.detach()

            if number == 1:
                arm()
            training.optimizer.zero_grad()
            found.append(float(run(step)))
            training.optimizer.step()
        return found

    expected = losses(plainly, Training(), lambda: None)
    training = Training()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = hp.plan_memory(training.model, batch_of(0, SHORT), budget="4MiB", progress=False)
    plan.apply(training.model)
    with FailingBackward(training.model, 30) as room:
        assert losses(plan.run, training, room.arm) == expected
    (longer,) = plan.replans(training.model)
    assert longer.profile.identity.autocast == "bfloat16"
    assert any("bfloat16" in look for op in longer.profile.regions[0].ops for look in op.result_metas)
    plan.remove(training.model)


def test_where_several_ranks_train_together_planning_anew_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    plan, _ = planned(training)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(StateError, match="other ranks"):
        plan.apply(training.model, on_oom="replan")
    assert not hp.wrappers(training.model)
    plan.apply(training.model)
    with pytest.raises(StateError, match="other ranks"):
        plan.run(lambda: None)
    plan.remove(training.model)
    assert "forward" not in vars(training.model)


def test_gradients_that_were_there_are_put_back_before_a_step_is_repeated() -> None:
    def accumulated(run: Callable[[Callable[[], Any]], Any], training: Training, arm: Callable[[], None]) -> None:
        torch.manual_seed(1)
        for number in range(3):
            if number == 2:
                arm()
            run(lambda number=number: training.model(batch_of(number, SHORT)).backward())

    expected, training = Training(), Training()
    accumulated(plainly, expected, lambda: None)
    plan, _ = planned(training)
    plan.apply(training.model)
    with FailingBackward(training.model, 30) as room:
        accumulated(plan.run, training, room.arm)
    assert room.num_failures == 1
    for mine, theirs in zip(training.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    plan.remove(training.model)


def test_running_out_in_backward_raises_and_says_that_run_would_have_helped() -> None:
    training = Training()
    plan, _ = planned(training)
    plan.apply(training.model, on_oom="replan")
    with FailingBackward(training.model, 7) as room:
        room.arm()
        with pytest.raises(torch.OutOfMemoryError, match="plan.run"):
            training.step(0, SHORT, plainly)
    plan.remove(training.model)
    # Without the plan nothing is said about it.
    with FailingBackward(training.model, 7) as room:
        room.arm()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            training.model(batch_of(0, SHORT)).backward()
    assert "plan.run" not in str(caught.value)


def test_an_optimizer_inside_of_the_step_is_told_to_come_after_it() -> None:
    training = Training()
    plan, _ = planned(training)
    plan.apply(training.model)

    def step() -> None:
        training.model(batch_of(0, SHORT)).backward()
        training.optimizer.step()
        raise torch.OutOfMemoryError("CUDA out of memory (simulated) after the optimizer.")

    with pytest.raises(StateError, match="AdamW.step") as caught:
        plan.run(step)
    assert "after `plan.run`" in str(caught.value)
    plan.remove(training.model)


def test_other_errors_of_a_step_pass_untouched() -> None:
    training = Training()
    plan, _ = planned(training)
    plan.apply(training.model, on_oom="replan")

    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        plan.run(step)
    with pytest.raises(RuntimeError, match="shape"):
        training.model(torch.randn(4, 17))
    assert plan.replans(training.model) == []
    plan.remove(training.model)


def test_a_batch_for_which_no_plan_fits_is_an_error_and_the_old_plan_stays() -> None:
    training = Training()
    plan, limit = planned(training)
    plan.apply(training.model, on_oom="replan")
    with LimitedMemory(training.model, limit), pytest.raises(BudgetError) as caught:
        training.model(batch_of(0, 40 * LONG))
    assert "split" in str(caught.value) or "smaller" in str(caught.value)
    before = [parameter.grad for parameter in training.model.parameters()]
    assert before == [None] * len(before)
    with LimitedMemory(training.model, limit):
        training.model(batch_of(0, SHORT)).backward()
    plan.remove(training.model)


def test_each_batch_runs_under_the_smallest_plan_that_was_made_for_one_as_large() -> None:
    training = Training()
    plan, limit = planned(training)
    plan.apply(training.model, on_oom="replan")
    managed = plan._managed[training.model]
    with LimitedMemory(training.model, limit):
        training.model(batch_of(0, SHORT)).backward()
        assert managed.current is plan
        training.model.zero_grad()
        training.model(batch_of(1, LONG)).backward()
        (longer,) = plan.replans(training.model)
        assert managed.current is longer
        assert longer.profile.identity.batch == f"float32[{LONG}, 16]"
        training.model.zero_grad()
        training.model(batch_of(2, SHORT - 8)).backward()
        assert managed.current is plan
        training.model.zero_grad()
        training.model(batch_of(3, LONG - 8)).backward()
        assert managed.current is longer
        with torch.no_grad():
            training.model(batch_of(3, SHORT))
        assert managed.current is longer, "an evaluation changes nothing"
    assert managed.num_replans == 1
    assert plan.stats(training.model) == {"plans made anew": 1}
    plan.remove(training.model)


def test_a_model_with_a_patched_forward_refuses_to_be_copied() -> None:
    training = Training()
    plan, _ = planned(training)
    plan.apply(training.model, on_oom="replan")
    with pytest.raises(StateError, match="state_dict"):
        copy.deepcopy(training.model)
    plan.remove(training.model)
    copy.deepcopy(training.model)


@pytest.mark.parametrize(("wrong", "error"), [("never", ValueError), (None, ValueError)])
def test_a_choice_that_does_not_exist_is_named(wrong: Any, error: type[Exception]) -> None:
    training = Training()
    plan, _ = planned(training)
    with pytest.raises(error, match="on_oom"):
        plan.apply(training.model, on_oom=wrong)


def test_run_without_a_model_says_what_to_do() -> None:
    training = Training()
    plan, _ = planned(training)
    with pytest.raises(StateError, match="apply"):
        plan.run(lambda: None)


def test_hugging_face_trainer_goes_on_where_a_long_sample_runs_out_of_memory(tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    import transformers as hf

    from hyper_parallel.integrations.hugging_face import fit_in_memory

    samples = [torch.arange(length) % models.VOCABULARY for length in (48, 48, 48, 384, 48, 48)]
    data = [{"input_ids": tokens, "labels": tokens} for tokens in samples]

    class InOrder(hf.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    def trainer() -> Any:
        args = hf.TrainingArguments(
            output_dir=str(tmp_path), max_steps=len(data), per_device_train_batch_size=1, logging_steps=1, report_to=[],
            save_strategy="no", disable_tqdm=True, seed=0, use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        return InOrder(models.make("llama"), args, train_dataset=data)

    def losses(trained: Any) -> list[float]:
        trained.train()
        return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]

    expected = losses(trainer())
    limited = trainer()
    batch = {name: tokens[None] for name, tokens in data[3].items()}
    profile = hp.plan_memory(limited.model, batch, budget="1TiB", progress=False).profile
    states = 2 * sum(4 * p.numel() for p in limited.model.parameters())
    budget = profile.base_bytes + states + int(0.6 * profile.activation_peak_bytes)
    callback = fit_in_memory(limited, budget=budget, on_oom="replan")
    replans: list[hp.MemoryPlan] = []

    class Look(hf.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            replans[:] = callback.plan.replans(limited.model)

    limited.add_callback(Look())
    with LimitedMemory(limited.model, budget + 64 * 1024) as room:
        assert losses(limited) == expected
    assert callback.stats == {"plans made anew": 1}
    assert room.num_failures >= 1
    assert len(replans) == 1
    assert "forward" not in vars(limited.model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("on_oom", ["error", "replan"])
def test_losses_on_a_part_of_a_gpu_are_those_on_all_of_it(on_oom: str) -> None:
    """A sequence of 8 times the rows comes in the middle; a plain step for it does not fit."""
    gib = 1024**3
    lengths = [4096, 4096, 32768, 4096]

    def run(apply: bool) -> tuple[list[float], int]:
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(4096, 1024)) for _ in range(12)]  # fmt: skip
        model = torch.nn.Sequential(torch.nn.Sequential(*blocks)).cuda()
        loss_of = lambda out: out.square().mean()  # noqa: E731
        inputs = [torch.randn(length, 1024, device="cuda") for length in lengths]
        plan = None
        if apply:
            plan = hp.plan_memory(model, inputs[0], loss_fn=loss_of, budget="7GiB", progress=False)
            plan.apply(model, on_oom=on_oom)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        torch.manual_seed(1)
        for each in inputs:
            optimizer.zero_grad()

            def step(each: Any = each) -> Any:
                loss = loss_of(model(each))
                loss.backward()
                return loss.detach()

            losses.append(float(step() if plan is None else plan.run(step)))
            optimizer.step()
        num_replans = 0 if plan is None else len(plan.replans(model))
        if plan is not None:
            plan.remove(model)
        return losses, num_replans

    expected, _ = run(apply=False)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(8 * gib / total)
    try:
        got, num_replans = run(apply=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert num_replans == 1
    assert got == expected
