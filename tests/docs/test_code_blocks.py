"""Everything that a reader can copy from the documentation runs as it stands: Python, commands, and what they are said to print or raise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import documents

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if (ROOT / "docs").is_dir() else []

if not PAGES:
    pytest.skip("no documentation here: not a checkout", allow_module_level=True)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


PROCESSES = [
    pytest.param(page, steps, id=f"{name_of(page)}:{steps[0].line}")
    for page in PAGES
    for steps in documents.processes_of(documents.blocks_of(page))
]


@pytest.mark.parametrize(("page", "steps"), PROCESSES)
def test_the_blocks_of_a_page_run_in_order(page: Path, steps: list[documents.Step], tmp_path: Path) -> None:
    text = "\n".join(step.text for step in steps)
    for needed in ("torch", "mindspore"):
        if f"import {needed}" in text or (needed == "torch" and "hyper-parallel " in text):
            pytest.importorskip(needed)
    pytest.importorskip("scipy")
    plan = tmp_path / "steps.json"
    plan.write_text(json.dumps({"page": name_of(page), "steps": steps}))
    work = tmp_path / "work"
    work.mkdir()
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1",
        "GLOG_v": "3", "TMPDIR": str(tmp_path), "COLUMNS": "120",
    }  # fmt: skip
    environment.pop("HYPER_PARALLEL_PLATFORM", None)
    done = subprocess.run(
        [sys.executable, "-m", "support.document_process", str(plan)],
        cwd=work, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    blocks = documents.blocks_of(page)
    assert documents.complaints(blocks) == []
    for block in blocks:
        if block.text.startswith("--8<--"):
            snippet = block.text.split('"')[1]
            assert snippet.startswith("examples/"), "the examples have tests of their own; other files have none"
            assert (ROOT / snippet).is_file(), snippet


def page_of(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```python\nx = 1\n```\n\n```python\nprint(y)\n```\n", "NameError"),
        ("<!-- raises: ValueError -->\n```python\nprint(1)\n```\n", "no ValueError was raised"),
        ("<!-- raises: ValueError -->\n```python\nraise ValueError('this')\n```\n```text\nthat\n```\n", "and the program says"),
        ("```python\nprint('one')\n```\n<!-- prints -->\n```text\ntwo\n```\n", "and the program says"),
        ("```sh\nmake me a sandwich\n```\n", "cannot be run here"),
        ("```sh\nhyper-parallel no-such-command\n```\n", "ended with 2"),
    ],
    ids=["error", "order", "no error", "other error", "other output", "not ours", "wrong command"],
)  # fmt: skip
def test_a_block_that_does_not_do_what_the_page_says_is_found(tmp_path: Path, text: str, words: str) -> None:
    (steps,) = documents.processes_of(documents.blocks_of(page_of(tmp_path, text)))
    plan = tmp_path / "steps.json"
    plan.write_text(json.dumps({"page": "page.md", "steps": steps}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    done = subprocess.run(
        [sys.executable, "-m", "support.document_process", str(plan)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert words in done.stderr


def test_blocks_are_read_with_their_lines_marks_titles_and_processes(tmp_path: Path) -> None:
    text = '# Page\n\n=== "One"\n\n    ```python title="a.py"\n    x = 1\n    ```\n\n<!-- not run: it never ends -->\n```sh\nfind /\n```\n<!-- process: two -->\n```python\ny = 2\n```\n'
    found = documents.blocks_of(page_of(tmp_path, text))
    assert [(block.language, block.text, block.line, block.title) for block in found] == [
        ("python", "x = 1", 6, "a.py"),
        ("sh", "find /", 11, ""),
        ("python", "y = 2", 15, ""),
    ]
    assert found[1].marks == {"not run": "it never ends"}
    groups = documents.processes_of(found)
    assert [[(step.kind, step.about) for step in group] for group in groups] == [[("file", "a.py")], [("python", "")]]


def test_a_block_that_nobody_could_run_is_found(tmp_path: Path) -> None:
    text = "```\nls\n```\n\n<!-- not run: - -->\n```sh\nls\n```\n"
    found = documents.complaints(documents.blocks_of(page_of(tmp_path, text)))
    assert [each.partition(":")[0] for each in found] == ["line 2", "line 7"]
