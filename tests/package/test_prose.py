"""Pages and programs can be read: a page in every large folder, an example before its rules, and lines of a width that
an editor shows.

Example: a folder `core/swap` of 3,900 lines of Python needs a `core/swap/README.md`. It starts with a heading, and has
within its first 40 lines something that one can follow: a block of code, a table, or steps with numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import wide_lines
from support.wide_lines import MOST, ROOT

if not (ROOT / "docs").exists():
    pytest.skip("not all pages are here: not a checkout", allow_module_level=True)

MANY_LINES = 1_500  # of Python, that need a page beside them
SOON = 40  # lines, within which a page has an example
_EXAMPLE = re.compile(r"^(```|\||1\. )", re.MULTILINE)


# -- a page in every large folder --------------------------------------------------------------------------------------


def folders_without_a_page(root: Path) -> Iterator[str]:
    """Each folder that needs a README and has none, with its lines of Python; those of its subfolders do not count."""
    for top in ("src", "tests", "benchmarks"):
        for folder in [root / top, *sorted((root / top).glob("**/"))]:
            num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob("*.py"))
            if num_lines > MANY_LINES and not (folder / "README.md").exists():
                yield f"{folder.relative_to(root).as_posix()}: {num_lines} lines of Python and no README.md"


def test_every_large_folder_has_a_page() -> None:
    assert sorted(set(folders_without_a_page(ROOT))) == []


def test_a_large_folder_without_a_page_is_found(tmp_path: Path) -> None:
    for name, num_lines in (
        ("src/hard", MANY_LINES + 1),
        ("src/easy", MANY_LINES),
        ("tests/described", 2 * MANY_LINES),
    ):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "one.py").write_text("a = 1\n" * (num_lines - 1))
        (folder / "other.py").write_text("a = 1\n")
    (tmp_path / "tests/described/README.md").write_text("# Words\n")
    (tmp_path / "src/easy/README.txt").write_text("# Words\n")
    assert set(folders_without_a_page(tmp_path)) == {f"src/hard: {MANY_LINES + 1} lines of Python and no README.md"}


# -- an example comes soon ---------------------------------------------------------------------------------------------


def wrong_about(page: str) -> list[str]:
    """What a README of `src` lacks at its beginning."""
    lines = page.splitlines()
    wrong = []
    if not page.startswith("# "):
        wrong.append("it does not start with a heading")
    if not _EXAMPLE.search("\n".join(lines[:SOON])):
        wrong.append(f"nothing to follow within {SOON} lines: no block of code, no table, no steps with numbers")
    return wrong


PAGES = sorted((ROOT / "src").rglob("README.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parent.relative_to(ROOT / "src").as_posix())
def test_a_page_of_the_source_starts_with_a_heading_and_soon_has_an_example(path: Path) -> None:
    assert wrong_about(path.read_text(encoding="utf-8")) == []


def test_a_page_that_is_only_rules_is_found() -> None:
    rules = "A region is what it is.\n\n" * 30
    assert len(wrong_about(rules)) == 2
    assert len(wrong_about("# Regions\n\n" + rules)) == 1
    assert len(wrong_about("# Regions\n\n" + rules + "\n```python\nf()\n```\n")) == 1  # too late
    for example in ("```python\nf()\n```", "| op | what |\n|---|---|", "1. `f` is called."):
        assert wrong_about(f"# Regions\n\n{example}\n\n{rules}") == []


# -- lines of a width that an editor shows -----------------------------------------------------------------------------


def test_no_file_has_more_wide_lines_than_listed() -> None:
    wrong = wide_lines.too_many(wide_lines.counted(), wide_lines.listed())
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_list_of_wide_lines_is_as_short_as_it_can_be() -> None:
    wrong = wide_lines.too_few(wide_lines.counted(), wide_lines.listed())
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with two wide lines in one file, one in another, and a third file without any."""
    (tmp_path / "src").mkdir()
    wide, narrow = "é" * (MOST + 1), "é" * MOST  # characters count, not bytes
    (tmp_path / "src" / "two.py").write_text(f"{wide}\n{narrow}\n{wide}\n", encoding="utf-8")
    (tmp_path / "README.md").write_text(f"| {'a' * MOST} |\n", encoding="utf-8")  # tables count as well
    (tmp_path / "CONTRIBUTING.md").write_text(narrow, encoding="utf-8")
    return tmp_path


def test_wide_lines_are_counted_and_found_by_number(tree: Path) -> None:
    assert wide_lines.counted(tree) == {"src/two.py": 2, "README.md": 1}
    assert wide_lines.wide_lines(tree / "src" / "two.py") == [1, 3]


def test_more_wide_lines_than_listed_are_an_error_that_says_where(tree: Path) -> None:
    (wrong,) = wide_lines.too_many(wide_lines.counted(tree), {"src/two.py": 1, "README.md": 1}, tree)
    assert wrong.startswith("src/two.py: 2 lines are wider than 120 characters, 1 are listed")
    assert wrong.endswith("1, 3")
    (wrong,) = wide_lines.too_many(wide_lines.counted(tree), {"src/two.py": 2}, tree)
    assert wrong.startswith("README.md: 1 lines")


def test_a_list_that_is_longer_than_needed_is_an_error_that_says_what_to_run(tree: Path) -> None:
    wrong = wide_lines.too_few(wide_lines.counted(tree), {"src/two.py": 3, "README.md": 1, "gone.py": 4})
    assert [line.partition(":")[0] for line in wrong] == ["src/two.py", "gone.py"]
    assert all(wide_lines.COMMAND in line for line in wrong)


def test_writing_the_list_shortens_it_and_refuses_to_lengthen_it(tree: Path) -> None:
    path = tree / "list.json"
    assert wide_lines.write(wide_lines.counted(tree), path, tree) == []  # the first one
    assert wide_lines.listed(path) == {"src/two.py": 2, "README.md": 1}
    path.write_text('{"src/two.py": 1, "gone.py": 4, "README.md": 3}')
    (refused,) = wide_lines.write(wide_lines.counted(tree), path, tree)
    assert refused.startswith("src/two.py")
    assert wide_lines.listed(path) == {"src/two.py": 1, "README.md": 1}
