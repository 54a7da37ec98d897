"""The benchmarks run where there is no GPU, too: their tables are right, whatever the times are."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"

if not FOLDER.exists():
    pytest.skip("no benchmarks here: not a checkout", allow_module_level=True)
pytest.importorskip("torch")


def digest() -> str:
    code = "import results_state; print(results_state.digest())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments], env=environment, capture_output=True, text=True, timeout=600
    )


def test_activation_py_measures_every_mode_of_ours_with_equal_gradients(tmp_path: Path) -> None:
    done = run(
        "activation.py", "--device=cpu", "--blocks=3", "--length=64", "--batch=1", "--steps=1", "--warm=1", f"--out={tmp_path / 'a.json'}"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "a.json").read_text())
    rows = {row["mode"]: row for row in result["rows"]}
    ours = [row for row in result["rows"] if row["kind"] == "ours"]
    assert len(ours) >= 7
    assert all(row["gradients"] == "equal" for row in ours), done.stdout
    assert all(row["peak_gib"] > 0 and row["step_ms"] > 0 for row in rows.values() if "skipped" not in row)
    assert rows["recompute"]["peak_gib"] < rows["plain"]["peak_gib"]
    assert rows["recompute, inputs swapped"]["peak_gib"] <= rows["recompute"]["peak_gib"]
    assert rows["everything swapped"]["out_gb"] > rows["mix for 16 %"]["out_gb"] > 0
    assert {"commit", "watched", "torch", "device", "setting", "date"} <= result.keys()
    assert result["digest"] == digest(), "what was measured is named"
    table = (tmp_path / "a.md").read_text()
    assert all(name in table for name in rows)


FULL = "PyTorch full checkpoint"


@pytest.fixture(scope="module")
def frontier(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """What is in the file, on the terminal, and in the picture."""
    for needed in ("scipy", "transformers"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("frontier")
    done = run(
        "frontier.py", "--device=cpu", "--models=gpt2,moe", "--budgets=60,min", "--budgets=moe:70,min", "--sizes=gpt2:blocks=3,length=64",
        "--sizes=moe:blocks=2", "--steps=1", "--warm=1", "--beside=1",
        "--commit=0123abc", f"--out={folder / 'f.json'}", f"--picture={folder / 'f.svg'}", f"--profiles={folder / 'profiles'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "f.json").read_text())
    result["profiles"] = folder / "profiles"
    return result, done.stdout, (folder / "f.svg").read_text()


def test_frontier_py_has_a_row_for_every_way_and_every_budget(frontier: tuple[dict[str, Any], str, str]) -> None:
    result, shown, picture = frontier
    for model, budget in (("gpt2", "60"), ("moe", "70")):
        rows = {row["way"]: row for row in result["rows"] if row["model"] == model}
        assert {row["budget"] for row in rows.values() if row["kind"] == "plan"} == {budget, "min"}
        assert [row["kind"] for row in rows.values()] == ["plain", "peer", "peer", "peer", "plan", "plan"]
        assert all(f"| {model} | {way} |" in shown for way in rows)
        assert all("peak_gib" in row or "smallest_gib" in row for row in rows.values()), "measured, or refused"
        assert rows[FULL]["peak_gib"] < rows["PyTorch selective, all matmuls"]["peak_gib"] < rows["plain"]["peak_gib"]
        assert result["setting"][model]["blocks"] > 1
    assert picture.startswith("<svg")
    assert "GPT-2" in picture
    assert "Mixture of experts" in picture


def test_frontier_py_keeps_the_profiles_from_which_its_plans_can_be_made_again(
    frontier: tuple[dict[str, Any], str, str],
) -> None:
    from hyper_parallel.core.planner.plan.plan_file import profile_from_dict
    from hyper_parallel.core.planner.plan.proof import first_margin, solved

    result, _, _ = frontier
    assert sorted(path.name for path in result["profiles"].iterdir()) == ["gpt2.json.gz", "moe.json.gz"]
    for row in result["rows"]:
        if row["kind"] == "plan" and "predicted_peak_gib" in row:
            data = json.loads(gzip.decompress((result["profiles"] / f"{row['model']}.json.gz").read_bytes()))
            profile = profile_from_dict(data)
            assert len(profile.regions) == result["setting"][row["model"]]["blocks"]
            budget = profile.base_bytes + round(row["budget_gib"] * 2**30)
            plan = solved(profile, budget, margin_bytes=first_margin(profile))
            assert plan.predicted.peak_bytes <= budget


def test_frontier_py_tells_the_truth_about_budgets(frontier: tuple[dict[str, Any], str, str]) -> None:
    result, shown, _ = frontier
    for model, checks in result["checks"].items():
        rows = [row for row in result["rows"] if row["model"] == model]
        plain, full = rows[0], rows[1]
        plans = [row for row in rows if row["kind"] == "plan"]
        measured = [row for row in plans if "peak_gib" in row]
        assert measured
        assert all(row["peak_gib"] <= row["budget_gib"] for row in measured)
        assert checks["every plan keeps its budget"] is True
        assert f"{model}: every plan keeps its budget: yes" in shown
        percent, least = plans
        # The plan's own measurement of the plain step, from another step than the row's.
        assert percent["budget_gib"] == pytest.approx(float(percent["budget"]) / 100 * plain["peak_gib"], rel=0.01)
        assert least["budget_gib"] == pytest.approx(full["peak_gib"], rel=1e-6)
        assert checks["a plan for the memory of full checkpoint is not larger"] is ("peak_gib" in least)
        for row in measured:
            assert row["peak_deviation_gib"] == pytest.approx(row["peak_gib"] - row["predicted_peak_gib"])
            assert row["ratio"] == pytest.approx(row["step_ms"] / row["plain_step_ms"])


def test_frontier_py_names_what_was_measured_and_the_page_shows_it(
    frontier: tuple[dict[str, Any], str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _, _ = frontier
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "hooks"))
    assert result["commit"] == "0123abc"
    assert {"date", "torch", "device", "setting"} <= result.keys()
    import frontiers  # type: ignore[import-not-found]
    import results_state  # type: ignore[import-not-found]

    assert result["digest"] == results_state.digest(watched=result["watched"])
    assert "src/hyper_parallel/core/planner" in result["watched"]
    text = frontiers.section(result, lambda head, lines: "\n".join(map(" | ".join, [head, *lines])))
    assert text.count("<svg") == 2
    assert all(row["way"] in text for row in result["rows"])


def test_frontier_py_says_no_where_a_plan_is_slower_or_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from frontier_results import checks  # type: ignore[import-not-found]

    def plan(budget: str, peak_gib: float, ratio: float, **rest: Any) -> dict[str, Any]:
        about = {
            "kind": "plan",
            "way": budget,
            "budget": budget,
            "budget_gib": 2.0,
            "peak_gib": peak_gib,
            "ratio": ratio,
        }
        return {**about, "peak_deviation_gib": 0.0, "time_deviation": 0.0, **rest}

    full = {"kind": "peer", "way": FULL, "peak_gib": 2.0, "ratio": 1.2}
    compiled = {"kind": "compiled", "way": "compiled", "peak_gib": 2.0, "ratio": 1.1}

    def failed(*plans: dict[str, Any]) -> list[str]:
        return [name for name, found in checks([full, compiled, *plans]).items() if found is False]

    assert failed() == []
    assert failed(plan("min", 2.0, 1.21), plan("50", 1.9, 1.1, against="compiled")) == []
    assert failed(plan("50", 2.01, 1.1)) == ["every plan keeps its budget"]
    assert failed(plan("50", 2.0, 1.22)) == ["no plan is slower than full checkpoint"]
    assert failed(plan("15", 1.0, 1.5, budget_gib=1.0)) == [], "with less memory it may be slower"
    assert failed(plan("min", 2.0, 1.22, to_full=1.0)) == [], (
        "by turns tells more than rows that were measured minutes apart"
    )
    assert failed(plan("min", 2.0, 1.1, to_full=1.02)) == ["no plan is slower than full checkpoint"]
    refused = {
        "kind": "plan",
        "way": "plan",
        "budget": "min",
        "budget_gib": 2.0,
        "error": "does not fit",
        "smallest_gib": 2.1,
    }
    assert failed(refused) == ["a plan for the memory of full checkpoint is not larger"]
    assert failed(plan("50", 2.0, 1.15, against="compiled")) == [
        "no plan is slower than torch.compile with as much memory",
        "the fastest plan in the memory of each budget of torch.compile is not slower",
    ]
    far = plan("50", 2.0, 1.0, peak_deviation_gib=0.2, time_deviation=-0.06)
    assert failed(far) == ["predicted peaks are within 2 % or 128 MiB", "predicted times are within 5 %"]
    assert failed({"kind": "plan", "way": "plan", "budget": "50", "error": "TypeError", "traceback": "..."}) == [
        "nothing failed"
    ]


def test_frontier_py_keeps_rows_of_other_models_with_their_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from frontier_results import Results

    def row(model: str) -> dict[str, Any]:
        return {"model": model, "way": "plain", "kind": "plain", "skipped": "in this test"}

    old = Results("cpu", commit="0123abc", out=tmp_path / "old.json", measured_now=["llama", "moe"])
    old.add(row("llama"))
    old.add(row("moe"))
    new = Results("cpu", commit="4567def", out=tmp_path / "new.json", measured_now=["moe"])
    new.keep(tmp_path / "old.json")
    new.add(row("moe"))
    last = Results("cpu", commit="89abcde", out=tmp_path / "last.json", measured_now=["gpt2"])
    last.keep(tmp_path / "new.json")
    last.add(row("gpt2"))
    result = json.loads((tmp_path / "last.json").read_text())
    assert [each["model"] for each in result["rows"]] == ["llama", "moe", "gpt2"]
    commits = {model: each["commit"] for model, each in result["measured"].items()}
    assert commits == {"llama": "0123abc", "moe": "4567def", "gpt2": "89abcde"}


def test_communication_py_measures_both_ways_of_every_call(tmp_path: Path) -> None:
    done = run(
        "communication.py", "--framework", "torch", "--ranks", "2", "--rounds=2", "--commit=0123abc", f"--out={tmp_path / 'c.json'}"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "c.json").read_text())
    assert result["commit"] == "0123abc"
    assert {row["call"] for row in result["rows"]} >= {"all_reduce", "reduce_scatter_tensor", "all_to_all_single"}
    assert all(row["own_ms"] > 0 and row["ours_ms"] > 0 for row in result["rows"])
