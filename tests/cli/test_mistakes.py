"""Mistakes on the command line: one clear line, a proper exit code, and a traceback only if it is asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel.cli import app as command

SOURCE = str(Path(hyper_parallel.__file__).parents[1])
MINE = """
import time

class NotTrainable:
    pass

def build():
    import torch
    make = lambda: torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    return torch.nn.Sequential(*(make() for _ in range(4))), torch.randn(64, 16), lambda out: out.square().mean()

def fails():
    raise ValueError("the data is not there")

def seven():
    return 7

def half_a_dict():
    return {"model": 1}

def slow():
    print("building", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine_of_mistakes.py").write_text(MINE)
    (tmp_path / "broken_mistake.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / "wrong_mistake.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and standard error of the command, in this process: nothing here gets as far as a framework."""
    monkeypatch.setattr(sys, "argv", ["hyper-parallel", *words])
    with pytest.raises(SystemExit) as ended:
        command.run()
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "words", "expected"),
    [
        (2, ["plan", "mine_of_mistakes"], "package.module:function"),
        (2, ["plan", "no_such_module:build"], "Run the command in the folder that has it"),
        (2, ["plan", "mine_of_mistaks:build"], "Did you mean mine_of_mistakes:build?"),
        (2, ["plan", "mine_of_mistakes.py:build"], "mine_of_mistakes:build"),
        (2, ["plan", "mine_of_mistakes:biuld"], "Did you mean mine_of_mistakes:build?"),
        (2, ["plan", "mine_of_mistakes:slow", "--budget", "-3GiB"], "was not understood"),
        (2, ["plan", "mine_of_mistakes:slow", "--budget", "0%"], "more than 0%"),
        (2, ["demo", "--budget", "much"], "was not understood"),
        (2, ["bench", "--budget", "much"], "was not understood"),
        (2, ["plan", "mine_of_mistakes:build", "--report", "."], "this is a folder"),
        (2, ["plan", "mine_of_mistakes:slow", "--out", "/dev/null"], "a device or a pipe"),
        (2, ["plan", "mine_of_mistakes:slow", "--out", "n" * 256], "File name too long"),
        (2, ["report", "mine_of_mistakes.py", "--out", "./mine_of_mistakes.py"], "would replace the plan"),
        (2, ["report", ""], "no such plan"),
        (1, ["plan", "broken_mistake:build"], "Install what it imports"),
        (1, ["plan", "wrong_mistake:build"], "ZeroDivisionError"),
        (2, ["plan", "mine_of_mistakes:nope"], "one of NotTrainable, build"),
        (1, ["plan", "mine_of_mistakes:fails"], "ValueError: the data is not there"),
        (1, ["plan", "mine_of_mistakes:seven"], "(model, batch)"),
        (1, ["plan", "mine_of_mistakes:half_a_dict"], "lacks"),
        (2, ["plan", "mine_of_mistakes:build", "--out", "no/such/folder/plan.json"], "no folder"),
        (1, ["explain", "mine_of_mistakes:fails"], "raised an error"),
        (2, ["report", "nothing.json"], "plan --out"),
        (2, ["plan", "mine_of_mistakes:slow", "--budget", "banana"], 'Write it as "24GiB", "40%" or "auto".'),
        (2, ["plan", "mine_of_mistakes:slow", "--budget", "60"], 'Did you mean "60%"'),
        (2, ["largest", "mine_of_mistakes:slow", "--budget", "40%"], "they grow with n"),
        (2, ["plan", "mine_of_mistakes:slow", "--swap-dir", "no/such/folder"], "no folder to swap to"),
        (1, ["report", "mine_of_mistakes.py"], "mine_of_mistakes.py"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value)[:1] if isinstance(value, int) else "",
)  # fmt: skip
def test_a_mistake_is_told_in_words_and_what_was_typed_wrong_with_exit_code_2(
    folder, monkeypatch, capsys, code, words, expected
) -> None:
    ended, said = run_here(monkeypatch, capsys, *words)
    assert ended == code
    assert expected in said
    assert "Traceback" not in said


def test_debug_shows_where_an_error_happened_wherever_it_stands(folder, monkeypatch) -> None:
    for words in (["--debug", "plan", "mine_of_mistakes:fails"], ["plan", "mine_of_mistakes:fails", "--debug"]):
        monkeypatch.setattr(sys, "argv", ["hyper-parallel", *words])
        with pytest.raises(RuntimeError) as raised:
            command.run()
        assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize(
    "words", [["plan"], ["explain"], ["report"], ["demo", "--steps", "0"], ["bench", "--rounds", "x"]]
)
def test_wrong_usage_is_exit_code_2(monkeypatch, capsys, words) -> None:
    assert run_here(monkeypatch, capsys, *words)[0] == 2


@pytest.mark.parametrize("name", ["doctor", "demo", "plan", "largest", "explain", "report", "bench"])
def test_every_command_has_json_and_help(monkeypatch, capsys, name) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["hyper-parallel", name, "--help"])
    with pytest.raises(SystemExit):
        command.run()
    said = capsys.readouterr().out
    assert "--json" in said
    assert name == "doctor" or f"hyper-parallel {name}" in said.replace("\n", " ")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "hyper_parallel", *words],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Tests that run in the background are started with interrupts ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def test_a_budget_that_cannot_be_met_is_exit_code_3_and_says_which_can(folder) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("scipy")
    process = start(folder, "plan", "mine_of_mistakes:build", "--budget", "1KiB")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 3, said
    assert "at least" in said
    assert "Traceback" not in said


def test_an_interrupt_says_so_and_ends_with_130(folder) -> None:
    process = start(folder, "plan", "mine_of_mistakes:slow")
    assert process.stderr is not None
    assert process.stderr.readline() == "building\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert said.startswith("Interrupted")
    assert "Traceback" not in said


def test_explain_and_report_of_a_plan(folder) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("scipy")
    process = start(folder, "explain", "mine_of_mistakes:build")
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "suits" in said
    assert "recompute" in said or "save" in said
    process = start(folder, "plan", "mine_of_mistakes:build", "--budget", "100%", "--out", "plan.json")
    process.communicate(timeout=300)
    assert process.returncode == 0
    process = start(folder, "report", "plan.json", "--json")
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert json.loads(said)["report"] == "plan.html"
    assert "<svg" in (folder / "plan.html").read_text()
