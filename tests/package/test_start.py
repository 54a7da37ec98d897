"""start.py: its decisions, on made-up inputs. What it installs is not tried here."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[2] / "start.py"


@pytest.fixture
def start(tmp_path) -> ModuleType:
    """start.py as a module of a checkout elsewhere."""
    copy = tmp_path / "start.py"
    copy.write_text(PATH.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    spec = importlib.util.spec_from_file_location("start_of_a_test", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_environment(start: ModuleType, version: str = "3.11.7") -> None:
    """What `python -m venv` leaves, as far as start.py looks at it."""
    start.PYTHON.parent.mkdir(parents=True)
    start.PYTHON.write_text("")
    (start.VENV / "pyvenv.cfg").write_text(f"home = /somewhere\nversion = {version}\n")
    start.MARKER.write_text(str(start.ROOT))


def test_older_pythons_can_read_the_file():
    ast.parse(PATH.read_text(encoding="utf-8"), feature_version=(3, 7))


def test_only_the_standard_library_is_imported():
    tree = ast.parse(PATH.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("version", [(3, 10), (3, 11), (3, 12), (3, 13)])
def test_supported_pythons_pass(start, version):
    start.check_python(version)


@pytest.mark.parametrize("version", [(2, 7), (3, 9), (3, 14), (4, 0)])
def test_other_pythons_are_told_what_is_needed(start, version):
    with pytest.raises(SystemExit, match=r"needs Python 3\.10 to 3\.13; this is \d\.\d+"):
        start.check_python(version)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.13.0+cpu", True), ("2.8.0", True), ("3.0", True), ("2.7.1", False), ("1.13.1", False), ("unknown", False)],
)
def test_a_pytorch_of_2_8_or_later_is_used(start, version, expected):
    assert start.is_recent_enough(version) is expected


def test_mindspore_comes_with_the_tests_where_it_has_wheels(start):
    assert start.requirements("main", (3, 11)) == []
    assert start.requirements("test", (3, 12)) == ["mindspore==2.10.0", "numpy==1.26.*"]
    assert start.requirements("test", (3, 13)) == []


def test_the_stamp_changes_with_everything_that_counts_and_with_nothing_else(start):
    first = start.stamp("main", (3, 11), "[project]")
    assert first == start.stamp("main", (3, 11), "[project]")
    others = [
        start.stamp("test", (3, 11), "[project]"),
        start.stamp("main", (3, 12), "[project]"),
        start.stamp("main", (3, 11), "[project]\n"),
    ]
    assert len({first, *others}) == 4


def test_the_extras_exist(start):
    text = PATH.with_name("pyproject.toml").read_text(encoding="utf-8")
    for extras in start.EXTRAS.values():
        assert all(f"\n{extra} = [" in text for extra in extras.split(","))


@pytest.mark.parametrize(
    ("log", "word"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("WARNING: Retrying … NewConnectionError\nERROR: No matching distribution found for torch", "go online"),
        ("ERROR: No matching distribution found for torch==2.13.0", "try another: python3.11"),
        ("ERROR: Package requires a different Python", "try another: python3.11"),
        ("something else", "begin from nothing"),
    ],
)
def test_a_failed_installation_gets_one_thing_to_do(start, log, word):
    assert word in start.diagnose(log)


def test_all_checks_run_without_arguments_and_pytest_alone_with_them(start):
    names = [command[0] for command in start.selected_checks([])]
    assert names == ["ruff", "ruff", "mypy", "mkdocs", "pytest"]
    assert start.selected_checks(["-x"])[-1] == ["pytest", "-x"]
    assert start.selected_checks(["-x"])[:-1] == start.selected_checks([])[:-1]
    assert start.selected_checks(["-q", "tests/cli"]) == [["pytest", "-q", "tests/cli"]]


@pytest.mark.parametrize(
    ("arguments", "expected_runs", "expected"),
    [([], ["ruff", "ruff", "mypy", "mkdocs", "pytest"], 1), (["-x"], ["ruff", "ruff"], 1), (["-q"], ["pytest"], 0)],
)
def test_a_failing_check_fails_the_whole_and_ends_it_only_with_x(
    start, monkeypatch, arguments, expected_runs, expected
):
    runs = []

    def call(command, **_options):
        runs.append(command[2])
        return 1 if command[2:4] == ["ruff", "format"] else 0

    monkeypatch.setattr(start.subprocess, "call", call)
    assert start.run_checks("python", {}, arguments, is_here=False) == expected
    assert runs == expected_runs


def test_checks_that_are_not_installed_here_are_left_out_aloud(start, monkeypatch, capsys):
    monkeypatch.setattr(start.subprocess, "call", lambda command, **_options: int("import ruff" in command))
    assert start.run_checks("python", {}, [], is_here=True) == 0
    assert "ruff is not installed here" in capsys.readouterr().out


def test_an_environment_is_kept_while_it_is_whole(start):
    assert start.why_anew((3, 11), "") == "", "there is none yet"
    make_environment(start)
    assert start.why_anew((3, 11), "") is None


def test_an_environment_is_made_anew_when_it_cannot_serve(start):
    make_environment(start)
    assert "for Python 3.11" in start.why_anew((3, 12), "")
    start.UNFINISHED.touch()
    assert "interrupted" in start.why_anew((3, 11), "")
    start.UNFINISHED.unlink()
    start.MARKER.write_text("/another/checkout")
    assert "another folder" in start.why_anew((3, 11), "")
    start.MARKER.write_text(str(start.ROOT))
    start.PYTHON.unlink()
    assert "lost its Python" in start.why_anew((3, 11), "")


def test_a_pytorch_found_outside_is_kept_until_it_goes_or_another_is_found(start, tmp_path):
    outside = tmp_path / "outside"
    (outside / "torch").mkdir(parents=True)
    make_environment(start)
    start.TORCH_FOLDERS.write_text(f"{outside}\n{outside}")
    assert start.why_anew((3, 11), str(outside)) is None
    assert start.why_anew((3, 11), "") is None, "a Python without PyTorch takes what is there"
    assert "this Python has a PyTorch" in start.why_anew((3, 11), "/another")
    (outside / "torch").rmdir()
    assert start.why_anew((3, 11), "") == "its PyTorch is gone"


def test_a_pytorch_that_was_found_and_could_not_be_imported_is_not_found_again(start):
    make_environment(start)
    (start.VENV / "lib" / "torch").mkdir(parents=True)
    start.TORCH_FOLDERS.write_text(f"/broken\n{start.VENV / 'lib'}")
    assert start.why_anew((3, 11), "/broken") is None


def test_a_foreign_environment_is_left_alone(start):
    (start.VENV / "bin").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"was not made by start\.py"):
        start.prepare("main")
    assert [path.name for path in start.VENV.iterdir()] == ["bin"]


def prepare_with_recorded_installs(start, monkeypatch) -> list[str]:
    """`prepare` with everything decided for real and nothing installed."""
    installs = []

    def make_venv(why):
        if why is not None:
            make_environment(start, "{}.{}.0".format(*sys.version_info[:2]))

    monkeypatch.setattr(start, "make_venv", make_venv)
    monkeypatch.setattr(start, "install", lambda level, python, torch: installs.append(level))
    monkeypatch.setattr(start, "find_torch", str)
    return installs


def test_a_second_start_installs_nothing_and_the_tests_environment_serves_the_main_job(start, monkeypatch):
    installs = prepare_with_recorded_installs(start, monkeypatch)
    for level in ("main", "main", "test", "test", "main"):
        start.prepare(level)
    assert installs == ["main", "test"]


def test_a_changed_project_file_installs_again(start, monkeypatch):
    installs = prepare_with_recorded_installs(start, monkeypatch)
    start.prepare("test")
    (start.ROOT / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    start.prepare("main")
    start.prepare("test")
    assert installs == ["test", "main", "test"]


def test_an_interrupted_installation_is_not_taken_for_a_finished_one(start, monkeypatch):
    prepare_with_recorded_installs(start, monkeypatch)

    def interrupt(level, python, torch):
        raise KeyboardInterrupt

    start.prepare("main")
    monkeypatch.setattr(start, "install", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start.prepare("test")
    assert "interrupted" in start.why_anew(sys.version_info[:2], "")


def test_a_second_start_waits_for_the_first(start, monkeypatch):
    waits, order = threading.Event(), []
    monkeypatch.setattr(start, "print", lambda text, **_options: waits.set(), raising=False)

    def second():
        with start.locked():
            order.append("second")

    with start.locked():
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(timeout=60)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


@pytest.mark.parametrize(("return_code", "expected"), [(0, False), (-4, True), (1, False)])
def test_the_bfloat16_cure_is_taken_where_the_probe_dies_and_remembered(start, monkeypatch, return_code, expected):
    make_environment(start)
    start.CONSTRAINTS.write_text("torch==2.13.0\n")
    calls = []
    monkeypatch.setattr(start.subprocess, "call", lambda command, **_options: calls.append(command) or return_code)
    for _ in range(2):
        assert start.needs_onednn_cure("python", {}, is_cached=True) is expected
    assert len(calls) == (1 if return_code <= 0 else 2), "an ordinary error is tried again"
    start.CONSTRAINTS.write_text("torch==2.14.0\n")
    start.needs_onednn_cure("python", {}, is_cached=True)
    assert len(calls) == (2 if return_code <= 0 else 3), "another PyTorch is another question"


def test_help_needs_no_environment():
    result = subprocess.run([sys.executable, str(PATH), "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert "python3 start.py test" in result.stdout


def test_here_runs_the_command_of_this_checkout_with_this_python(tmp_path):
    environment = {**os.environ, "HYPER_PARALLEL_LOG": ""}
    result = subprocess.run(
        [sys.executable, str(PATH), "--here", "--version"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("hyper-parallel ")
