"""What a plan says about itself: in a table, in one line, in a notebook; and what it says that a reader would not expect."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="the solver is in SciPy")

import hyper_parallel as hp
from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.planner.model.problem import Peak
from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.plan.budget import budget_note, check_budget
from hyper_parallel.core.planner.plan.largest import Largest
from hyper_parallel.core.planner.plan.plan import Measured, MemoryPlan
from hyper_parallel.core.planner.planning import Explanation
from hyper_parallel.core.planner.solve.refusal import advice, blocks_words, made_of
from support.made_plans import plan_of, profile_of
from support.planner_cases import measured_of

# -- times --------------------------------------------------------------------------------------------------------------------------


def test_the_measured_row_compares_with_the_plain_steps_that_took_turns() -> None:
    plan = plan_of(to_plain=1.0)
    plan.measured = dataclasses.replace(plan.measured, step_ms=284.0)  # type: ignore[type-var]
    row = next(line for line in str(plan).splitlines() if line.startswith("measured"))
    assert row.split()[-2:] == ["284.0", "1.420"]
    assert "Measured steps took turns with plain ones, of 200.0 ms." in str(plan)
    assert plan.as_dict()["measured"]["plain_step_ms"] == 200.0


def test_a_line_says_when_predicted_and_measured_times_differ_by_more_than_a_tenth() -> None:
    plan = plan_of()
    predicted = plan.predicted_to_plain

    def said(factor: float, **identity: Any) -> str:
        measured = Measured(plan.predicted.peak_bytes, factor * predicted * 200.0, 200.0)
        plan.measured = measured
        plan.profile = measured_of(plan.profile, **identity)
        return str(plan)

    assert "than predicted" not in said(1.09)
    assert "than predicted" not in said(0.91)
    assert f"Slower than predicted: {1.3 * predicted:.2f} of plain, not {predicted:.2f}. On a CPU copies" in said(1.3)
    assert "Faster than predicted: " in said(0.8)
    assert "On a CPU" not in said(1.3, device="cuda: H200")


def test_a_plan_without_measured_times_says_so_on_a_cpu() -> None:
    assert "The step time is predicted only" in str(plan_of())
    assert "The step time is predicted only" not in str(plan_of(device="cuda: H200"))


# -- notes --------------------------------------------------------------------------------------------------------------------------


def test_a_plan_that_could_not_swap_says_why_and_what_switches_it_on() -> None:
    said = "Nothing is swapped: no directory is set for it, by `hp.configure_swap(disk_dir=...)` or `--swap-dir`."
    assert said in str(plan_of(swaps=False, link=None))
    assert "Nothing is swapped" not in str(plan_of())
    assert "no directory" not in str(plan_of(swaps=False, link=None, device="cuda: H200"))


def test_a_gap_that_the_table_would_not_show_is_not_spoken_of() -> None:
    plan = plan_of()
    plan.gap = 4e-4
    assert "Not proved" not in str(plan)
    plan.gap = 0.012
    assert "another choice for these windows could be predicted faster, by at most 1.2%." in str(plan)


def test_a_plan_made_in_eval_mode_says_so() -> None:
    plan = plan_of(is_empty=True)
    assert "eval mode" not in str(plan)
    plan.profile = measured_of(plan.profile, is_training=False)
    assert "Planned in eval mode" in str(plan)
    plan.profile = measured_of(plan.profile, framework="mindspore")
    assert "where training calls `model.set_train()`, call it first" in str(plan)
    assert "model.train()" not in str(plan)


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("500%", "A budget of 500% is more than the plain step needs"),
        ("100.1%", "A budget of 100.1% is more"),
        ("24GB", "24GB are 22.35 GiB: GB counts in thousands, GiB in 1024s."),
        ("24 gb", "24 gb are 22.35 GiB"),
        ("1.5MB", "1.5MB are 1.43 MiB"),
    ],
)
def test_a_budget_that_is_likely_not_what_was_meant_is_explained(budget: str, said: str) -> None:
    assert str(budget_note(budget)).startswith(said)


@pytest.mark.parametrize("budget", ["100%", "24GiB", "auto", 24 * 10**9])
def test_a_budget_as_usual_needs_no_words(budget: Any) -> None:
    assert budget_note(budget) is None


@pytest.mark.parametrize("budget", [60, "60", 1023, "40 B"])
def test_a_budget_of_a_few_bytes_is_refused_before_any_work(budget: Any) -> None:
    with pytest.raises(ArgumentError, match=r'Did you mean "\d+%", or "\d+GiB"\?'):
        check_budget(budget)


# -- how it is shown ----------------------------------------------------------------------------------------------------------------


def test_plans_explanations_and_largest_sizes_are_one_line_and_in_a_notebook_a_table() -> None:
    plan = plan_of(to_plain=1.42)
    empty = plan_of(is_empty=True)
    shown = [plan, empty, plan_of(), Explanation(plan.profile), Largest(3, plan, None, ())]
    for each in shown:
        assert "\n" not in repr(each)
        assert "object at" not in repr(each)
        html = each._repr_html_()
        assert html.count("<table>") == html.count("</table>")
        assert "<table>" in html or each is empty
        assert "<Llama>" not in html
        assert "&lt;Llama&gt;" in html or isinstance(each, Explanation)
    assert "1.42 of the plain step's time measured" in repr(plan)
    assert "nothing is changed" in repr(empty)
    assert all(cell in plan._repr_html_() for cell in ("<th>measured</th>", "<td>1.420</td>"))


def test_what_is_asked_for_most_comes_first_in_the_json_of_a_plan(tmp_path: Path) -> None:
    plan = plan_of(to_plain=1.42)
    assert list(plan.as_dict())[:4] == ["budget_bytes", "plain", "predicted", "measured"]
    plan.save(tmp_path / "plan.json")
    assert list(json.loads((tmp_path / "plan.json").read_text()))[2:6] == list(plan.as_dict())[:4]
    assert MemoryPlan.load(tmp_path / "plan.json").as_dict() == plan.as_dict()


def test_dir_of_the_package_has_public_names_only() -> None:
    names = [name for name in dir(hp) if not name.startswith("__")]
    assert sorted(names) == sorted(name for name in hp.__all__ if not name.startswith("__"))


# -- refusals -----------------------------------------------------------------------------------------------------------------------


def peak_of(profile: StepProfile, region: int | None = 0, **parts: int) -> Peak:
    zeros = dict.fromkeys(
        ("outside_bytes", "kept_bytes", "own_bytes", "extra_bytes", "in_flight_bytes", "margin_bytes"), 0
    )
    return Peak("backward" if region is not None else "turn", region, **{"base_bytes": 100, **zeros, **parts})  # type: ignore[arg-type]


def no_others(inside: str | None = None) -> list[str]:
    return []


def others(inside: str | None = None) -> list[str]:
    return ["free.*"] if inside is None else [f"{inside}.*"]


@pytest.mark.parametrize(
    ("region", "parts", "suggest", "said"),
    [
        (0, {"base_bytes": 10**9}, others, "which no plan makes smaller"),
        (0, {"own_bytes": 2**40}, others, 'Smaller blocks may need less: regions=["blocks.0.*"]'),
        (0, {"own_bytes": 2**40}, no_others, "Raise the budget, or make the batch"),
        (
            0,
            {"outside_bytes": 2**40},
            others,
            'Most is kept outside of the blocks. Name what holds it: regions=["free.*"]',
        ),
        (None, {"own_bytes": 2**40}, no_others, "Most is taken between forward and backward (the loss)"),
        (0, {"kept_bytes": 2**40}, others, "1 TiB are what blocks keep of their inputs, which can be swapped"),
        (0, {"own_bytes": 9 * 10**5, "kept_bytes": 5 * 10**5}, no_others, "`hp.configure_swap(disk_dir=...)`"),
        (0, {"own_bytes": 2 * 10**6, "kept_bytes": 10**5}, no_others, "Raise the budget, or make the batch"),
        (0, {"in_flight_bytes": 2**40}, others, "Raise the budget, or make the batch"),
    ],
)
def test_the_advice_of_a_refusal_is_about_what_takes_most(
    region: int | None, parts: dict[str, int], suggest: Callable[..., list[str]], said: str
) -> None:
    profile = profile_of(link=None)
    found = advice(profile, 10**6, peak_of(profile, region, **parts), suggest)
    assert said.replace("blocks.0", profile.regions[0].path) in found
    assert "budget" in found


def test_a_refusal_names_the_blocks_and_the_moment_in_words_of_a_reader() -> None:
    profile = profile_of()
    first, last = profile.regions[0].path, profile.regions[-1].path
    assert blocks_words(profile) == f"4 blocks are planned: {first} to {last}"
    said = made_of(profile, peak_of(profile, None, own_bytes=2**20))
    assert said == "between forward and backward (the loss): 1 MiB by itself, 100 B alive when forward begins"
