"""The marks at which bugs are planted: each stands once, each is used, and each bug changes its statement."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hyper_parallel._base.errors import StateError
from support import planting
from support.planted_bugs import ALL
from support.planting import SOURCE, Bug, beside, condition, marks, removed, unchanged, value


def test_every_mark_of_the_source_is_used_by_a_bug_and_every_bug_has_its_mark_once() -> None:
    twice = {mark: places for mark, places in marks().items() if len(places) > 1}
    assert not twice
    assert sorted(marks()) == sorted({bug.mark for bug in ALL})


def test_nothing_in_the_source_is_nearly_a_mark() -> None:
    lines = [line for path in SOURCE.rglob("*.py") for line in path.read_text().splitlines() if "plant:" in line]
    assert len(lines) == len(marks())


def test_every_bug_changes_its_statement() -> None:
    def is_idle(bug: Bug) -> bool:
        return ast.dump(bug.tree()) == ast.dump(Bug(bug.name, bug.mark, unchanged).tree())

    assert not [bug.name for bug in ALL if is_idle(bug)]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own in place of `src`."""
    monkeypatch.setattr(planting, "SOURCE", tmp_path)
    return tmp_path


def test_a_mark_belongs_to_the_innermost_statement_that_has_its_line(source: Path) -> None:
    text = "if True:  # plant: outer\n    a = f(\n        1,  # plant: inner\n    )\nb = 2  # because; plant: last\n"
    (source / "some.py").write_text(text)
    assert Bug("", "outer", condition("x")).source() == "if x:\n    a = f(1)\nb = 2"
    assert Bug("", "inner", value("x")).source() == "if True:\n    a = x\nb = 2"
    assert Bug("", "last", removed).source() == "if True:\n    a = f(1)\npass"


def test_a_mark_that_stands_twice_or_nowhere_is_an_error_that_says_where(source: Path) -> None:
    for name in ("one.py", "other.py"):
        (source / name).write_text("\na = 1  # plant: twice\n")
    with pytest.raises(LookupError, match=r"`plant: twice` stands 2 times(.|\n)*one.py:2\n.*other.py:2$"):
        Bug("", "twice", removed).tree()
    with pytest.raises(LookupError, match="`plant: nowhere` stands 0 times"):
        Bug("", "nowhere", removed).tree()


def test_a_bug_that_imports_do_not_lead_to_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"do not lead to hyper_parallel/"):
        beside(Bug("", "give-block", removed), StateError)
