"""What cannot be planned is told in words that help, and before much is done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, DamagedFileError  # noqa: E402
from hyper_parallel.core.planner.solve.solver import BudgetError  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(x)))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(3))))


def loss_of(output: Any) -> Any:
    return output.square().mean()


def plan_for(model: Any, budget: int | str = "80%", rows: int = 64, **others: Any) -> hp.MemoryPlan:
    arguments = {"loss_fn": loss_of, "budget": budget, "progress": False, **others}
    return hp.plan_memory(model, torch.ones(rows, 16), **arguments)


@pytest.mark.parametrize("verify", [True, False])
def test_the_smallest_budget_is_not_above_the_plain_peak(verify: bool) -> None:
    model = make()  # so small that the margin of a plan is more than what it saves
    plain_bytes = plan_for(model, "100%", rows=4).profile.peak_bytes
    assert plan_for(model, plain_bytes, rows=4).is_empty
    with pytest.raises(BudgetError, match=f"at least {plain_bytes} bytes .*the plain step: ") as caught:
        plan_for(model, plain_bytes - 1, rows=4, verify=verify)
    assert caught.value.smallest_bytes == plain_bytes


# -- arguments ----------------------------------------------------------------------------------------------------------------------


CALLS: dict[str, Callable[..., Any]] = {
    "plan_memory": plan_for,
    "explain": lambda model, **others: hp.explain(model, torch.ones(4, 16), progress=False, **others),
    "largest": lambda model, **others: hp.largest(model, lambda n: torch.ones(n, 16), progress=False, **others),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["regions", "loss_fn"])
def test_an_argument_of_another_kind_is_named(call: str, name: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"`{name}`.*\n.*got 5"):
        CALLS[call](make(), **{name: 5})


def test_verify_names_a_loss_that_is_none_and_leaves_the_plan_applied() -> None:
    model = make()
    plan = plan_for(model, rows=512).apply(model)
    with pytest.raises(ArgumentTypeError, match="`loss_fn`"):
        plan.verify(model, torch.ones(512, 16), loss_fn=5)
    plan.remove(model)


@pytest.mark.parametrize("call", ["plan_memory", "largest"])
def test_a_mistyped_budget_is_told_before_a_step_runs(call: str) -> None:
    num_steps = 0

    def counted(output: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return loss_of(output)

    with pytest.raises(ArgumentError, match="3 apples"):
        CALLS[call](make(), budget="3 apples", loss_fn=counted)
    assert num_steps == 0


def test_where_all_is_one_block_a_refusal_says_that_smaller_ones_can_be_named() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = Block(), Block(), Block()

        def forward(self, x: Any) -> Any:
            return self.third(self.second(self.first(x)))

    model = nn.Sequential(Hidden())
    with pytest.raises(BudgetError, match=r"regions=\[.*: 0 is the only one"):
        plan_for(model, "70%", rows=512)
    assert plan_for(model, "70%", rows=512, regions=["0.*"]).measured is not None
    with pytest.raises(BudgetError) as caught:
        plan_for(make(), "1%", rows=512)
    assert "regions=" not in str(caught.value)


# -- files --------------------------------------------------------------------------------------------------------------------------


def _lose_an_op(data: dict[str, Any]) -> None:
    next(each for each in data["decision"] if not each["plain"])["ops"].pop()


def _misspell_a_choice(data: dict[str, Any]) -> None:
    next(each for each in data["decision"] if not each["plain"])["ops"][0] = "delete"


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ops": _lose_an_op,
    "delete": _misspell_a_choice,
    "budget_bytes": lambda data: data.update(budget_bytes=None),
    "facts": lambda data: data.update(facts=None),
    "gap": lambda data: data.pop("gap"),
    "decision": lambda data: data.update(decision={}),
    "peak_bytes": lambda data: data["predicted"].update(peak_bytes="much"),
    "base_bytes": lambda data: data["profile"].update(base_bytes=None),
    "forward_ms": lambda data: data["profile"]["regions"][0]["ops"][0].update(forward_ms=None),
    "num_bytes": lambda data: data["profile"]["regions"][0]["inputs"][0]["value"].update(num_bytes=True),
}


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_plan_file_says_what_is_wrong_with_it(name: str, saved: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    if not saved:
        plan_for(make(), rows=512).save(file)
        saved.update(json.loads(file.read_text()))
    data = json.loads(json.dumps(saved))
    file.write_text(json.dumps(data))
    hp.MemoryPlan.load(file)
    DAMAGES[name](data)
    file.write_text(json.dumps(data))
    with pytest.raises(DamagedFileError, match=name) as caught:
        hp.MemoryPlan.load(file)
    assert str(file) in str(caught.value)
    assert "Plan again" in str(caught.value)


def test_a_version_that_is_a_text_is_told_from_the_number(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": "hyper_parallel memory plan", "version": "1"}')
    with pytest.raises(ArgumentError, match=r"Expected the number 1, got '1' \(str\)"):
        hp.MemoryPlan.load(tmp_path / "plan.json")


# -- running out --------------------------------------------------------------------------------------------------------------------


def test_memory_that_ran_out_before_the_model_ran_is_told_so_whatever_was_planned_anew_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = make(), torch.ones(512, 16)
    plan = plan_for(model, rows=512).apply(model)
    gelu, calls = nn.functional.gelu, []

    def failing(x: Any) -> Any:
        calls.append(x.shape)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no room")
        return gelu(x)

    monkeypatch.setattr(nn.functional, "gelu", failing)
    plan.run(lambda: loss_of(model(inputs)).backward())
    assert plan.replans(model)

    def fails_at_once() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="before the model ran"):
        plan.run(fails_at_once)
    plan.remove(model)
