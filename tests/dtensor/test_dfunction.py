"""Users' own distributed functions: one text on both frameworks, in one process and on four ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hyper_parallel.platform import selection
from support import dfunction_programs as programs
from support import processes


@pytest.fixture(params=["torch", "mindspore"])
def framework(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


@pytest.fixture(params=[1, 4], ids=["one process", "four ranks"])
def run(request: pytest.FixtureRequest, framework: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs a program with the number of ranks first; what every rank answers."""
    ranks = request.param
    if ranks > 1:
        yield lambda program, *args: processes.pool(framework, ranks).run(program, ranks, *args, deadline_s=60)
        return
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", framework)
    yield lambda program, *args: [program(1, *args)]
    selection._forget()


def check(found: list[dict[str, bool]]) -> None:
    for rank, outcomes in enumerate(found):
        assert all(outcomes.values()), f"rank {rank}: {[name for name, is_right in outcomes.items() if not is_right]}"


@pytest.mark.parametrize("rows", [8, 5], ids=["even", "uneven"])
def test_the_program_of_the_specification_runs_as_it_stands(run: Any, rows: int) -> None:
    check(run(programs.scale_add, rows))


def test_every_kind_of_argument_reaches_the_rule_and_the_local_call(run: Any) -> None:
    check(run(programs.arguments))


def test_a_rule_may_answer_keywords_and_the_local_call_goes_through_the_functions_own_apply(run: Any) -> None:
    check(run(programs.local_keywords))


def test_outputs_have_their_own_layouts_and_gradients_of_replicated_inputs_are_summed(run: Any) -> None:
    check(run(programs.several_outputs))


def test_what_is_missing_is_said(run: Any) -> None:
    for said in run(programs.errors):
        assert said["plain without a name"] == "nothing"
        for name in ("no name", "no name, nested"):
            assert "ValueError" in said[name]
            assert "`Nameless`" in said[name]
            assert '_op_name = "ScaleAdd"' in said[name]
        assert "NotImplementedError" in said["no rule"]
        assert "a rule with the name 'Ruleless'" in said["no rule"]
        assert "NotImplementedError" in said["base forward"]
        assert "NotImplementedError" in said["base backward"]
        assert "TypeError" in said["unknown keyword"]
        assert "unexpected keyword argument 'factor'" in said["unknown keyword"]
        assert "keyword-only" in said["keyword only"]
        assert said["local callable"] == "(True, 'Ruleless', 'Ruleless', False)"
