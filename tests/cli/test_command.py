"""The command as a person runs it: exit codes, what goes where, what happens when something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hyper_parallel
from hyper_parallel import __version__
from hyper_parallel.cli import app as command
from hyper_parallel.cli.doctor import command as doctor_command
from hyper_parallel.cli.doctor import outcomes
from hyper_parallel.cli.doctor.facts import Facts, Framework
from hyper_parallel.platform import PlatformType

SOURCE = str(Path(hyper_parallel.__file__).parents[1])


def run_command(*arguments: str, prologue: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own, with code that runs before it."""
    start = f"import sys\nsys.argv = ['hyper-parallel', *{arguments!r}]\nimport hyper_parallel.__main__ as m\nm.main()"
    environment = {**os.environ, "PYTHONPATH": SOURCE, **variables}
    return subprocess.run(
        [sys.executable, "-c", f"{prologue}\n{start}"], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def doctor(monkeypatch):
    """`doctor(facts, *options)`: the command on a made-up machine."""

    def run(facts: Facts, *options: str):
        monkeypatch.setattr(doctor_command, "collect", lambda: facts)
        return CliRunner().invoke(command.app, ["doctor", *options])

    return run


def test_nothing_to_complain_about_exits_with_0(doctor, machine):
    result = doctor(machine)
    assert result.exit_code == 0
    assert "checks" in result.stdout


def test_attention_only_exits_with_0(doctor, machine_with_both):
    assert doctor(machine_with_both).exit_code == 0


def test_a_problem_exits_with_1_with_and_without_json(doctor, machine):
    facts = replace(machine, torch=Framework(PlatformType.PYTORCH))
    assert doctor(facts).exit_code == 1
    result = doctor(facts, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["result"] == "problem"


@pytest.mark.parametrize("arguments", [["doctor", "--no-such-option"], ["no-such-command"], ["doctor", "word"]])
def test_wrong_usage_exits_with_2(arguments):
    assert CliRunner().invoke(command.app, arguments).exit_code == 2


def test_the_version_is_printed():
    result = CliRunner().invoke(command.app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"hyper-parallel {__version__}\n"


def test_the_real_doctor_prints_one_json_document_and_nothing_else():
    result = run_command("doctor", "--json")
    document = json.loads(result.stdout)
    assert result.returncode == (1 if document["result"] == "problem" else 0)
    assert result.stderr == ""
    for name, framework in document["frameworks"].items():
        if framework["is_installed"]:
            assert framework["error"] is None, f"{name}: {framework['error']}"


def test_the_real_doctors_choice_is_that_of_get_platform():
    chosen = json.loads(run_command("doctor", "--json").stdout)["platform"]["chosen"]
    if chosen is None:
        pytest.skip("there is no framework to choose")
    code = "from hyper_parallel import get_platform; print('chose', get_platform().platform_type.value)"
    environment = {**os.environ, "PYTHONPATH": SOURCE, "GLOG_v": "4"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert f"chose {chosen}" in result.stdout, result.stderr


def test_the_real_doctors_page_has_no_escape_codes_in_a_pipe():
    result = run_command("doctor")
    assert "\x1b" not in result.stdout
    assert result.stderr == ""
    assert f"hyper-parallel {__version__}" in result.stdout


def test_a_wrong_platform_variable_is_a_problem_of_the_real_doctor():
    result = run_command("doctor", "--json", HYPER_PARALLEL_PLATFORM="jax")
    assert result.returncode == 1
    states = {one["name"]: one["state"] for one in json.loads(result.stdout)["findings"]}
    assert states["platform-variable"] == "problem"


def test_the_platform_table_is_printed_as_page_and_as_data(monkeypatch):
    page = CliRunner().invoke(command.app, ["doctor", "--platform"])
    assert page.exit_code == 0
    assert "get_platform" not in page.stdout
    assert "all_gather_into_tensor" in page.stdout
    data = CliRunner().invoke(command.app, ["doctor", "--platform", "--json"])
    assert data.exit_code == 0
    assert json.loads(data.stdout) == outcomes.read_outcomes().document


def test_a_damaged_outcomes_file_is_an_error_without_a_traceback(tmp_path, monkeypatch, capsys):
    path = tmp_path / "outcomes.json"
    path.write_text("nonsense")
    monkeypatch.setattr(outcomes.read_outcomes, "__defaults__", (path,))
    monkeypatch.setattr(sys, "argv", ["hyper-parallel", "doctor", "--platform"])
    with pytest.raises(SystemExit) as end:
        command.run()
    assert end.value.code == 1
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["rich", "typer"])
def test_without_rich_or_typer_the_command_says_what_to_install(missing):
    result = run_command("doctor", prologue=f"import sys; sys.modules[{missing!r}] = None")
    assert result.returncode == 2
    assert "pip install rich typer" in result.stderr
    assert missing in result.stderr
    assert "Traceback" not in result.stderr


def test_any_other_missing_module_is_not_blamed_on_the_extra():
    result = run_command(
        "doctor", prologue="import sys; sys.modules['resource_of_mine'] = None; sys.modules['json'] = None"
    )
    assert result.returncode == 1
    assert "pip install" not in result.stderr


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["plan", "--help"]], ids=" ".join)
def test_help_is_answered_without_what_takes_long_to_import(words):
    heavy = {"torch", "mindspore", "numpy", "scipy", "hyper_parallel.platform", "hyper_parallel.core"}
    prologue = f"import sys, atexit; atexit.register(lambda: print(sorted({heavy!r} & set(sys.modules))))"
    assert run_command(*words, prologue=prologue).stdout.splitlines()[-1] == "[]"
