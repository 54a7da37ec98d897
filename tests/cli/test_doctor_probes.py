"""Probes of the frameworks: the real ones, and ones that crash, hang or print nonsense."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel.cli.doctor import frameworks
from hyper_parallel.cli.doctor.facts import Bfloat16, Framework
from hyper_parallel.cli.doctor.frameworks import framework_of, is_installed, judge_bfloat16
from hyper_parallel.cli.doctor.processes import Answer, Run, module_command, run_all
from hyper_parallel.platform import PlatformType
from hyper_parallel.platform.probe_report import run_stages

SOURCE = str(Path(hyper_parallel.__file__).parents[1])
PROLOGUE = "import os, signal, sys, time; "
SOME = '{"stage": "first operator", "version": "2.13.0", "error": null}'


def ask(code: str, deadline_s: float = 60.0, **variables: str | None) -> Answer:
    run = Run("probe", [sys.executable, "-c", PROLOGUE + code], variables)
    return run_all([run], deadline_s)["probe"]


def ask_shell(code: str, deadline_s: float) -> Answer:
    """For a short deadline: a shell has started long before Python has."""
    return run_all([Run("probe", ["sh", "-c", code], {})], deadline_s)["probe"]


def framework_after(code: str) -> Framework:
    return framework_of(PlatformType.PYTORCH, True, ask(code))


def real(platform: PlatformType, *arguments: str) -> Answer:
    if not is_installed(platform.value):
        pytest.skip(f"{platform.display_name} is not installed")
    command = module_command(f"hyper_parallel.platform.{platform.value}.probe", *arguments)
    return run_all([Run("probe", command, {})])["probe"]


def test_the_probe_of_pytorch_tells_what_is_there():
    framework = framework_of(PlatformType.PYTORCH, True, real(PlatformType.PYTORCH))
    assert framework.error is None
    assert framework.is_usable
    assert framework.version[0].isdigit()
    assert framework.backends["gloo"] is True
    assert set(framework.backends) == {"gloo", "nccl", "mpi", "ucc", "xccl"}
    assert len(framework.links) == len(framework.accelerators)


def test_the_probe_of_mindspore_tells_what_is_there():
    framework = framework_of(PlatformType.MINDSPORE, True, real(PlatformType.MINDSPORE))
    assert framework.error is None
    assert framework.is_usable
    assert framework.device_target in ("CPU", "GPU", "Ascend")
    assert framework.backends["mccl"] is True


def test_the_bfloat16_probe_gives_a_right_product_or_dies():
    answer = real(PlatformType.PYTORCH, "--bfloat16")
    assert answer.died or answer.last_object["is_right"] is True


def test_a_probe_that_dies_is_reported_with_its_signal_and_stage():
    framework = framework_after(f"print('{SOME}', flush=True); os.kill(os.getpid(), signal.SIGILL)")
    assert framework.stopped_at == "first operator"
    assert framework.error == "the process was killed by SIGILL"
    assert framework.version == "2.13.0", "what was found before it died is kept"
    assert framework.is_importable
    assert not framework.is_usable


def test_a_probe_that_hangs_is_reported_and_ended():
    answer = ask_shell(f"echo '{SOME}'; sleep 600", deadline_s=3)
    framework = framework_of(PlatformType.PYTORCH, True, answer)
    assert framework.error == "no answer within 3 s"
    assert framework.stopped_at == "first operator"


def test_processes_that_a_probe_started_end_with_it(tmp_path):
    note = tmp_path / "pid"
    ask_shell(f"sleep 600 & echo $! > '{note}'; wait", deadline_s=3)
    # The signal has been sent; the system may take a moment to act on it.
    end = time.monotonic() + 30
    while _is_running(int(note.read_text())):
        assert time.monotonic() < end, "the child of the probe still runs"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_probe_that_raises_is_reported_with_its_last_line():
    framework = framework_after("raise ImportError('libfoo.so: cannot open shared object file')")
    assert framework.error == "ImportError: libfoo.so: cannot open shared object file"
    assert framework.stopped_at == "import"
    assert not framework.is_importable


@pytest.mark.parametrize(
    "code", ["print('garbage')", "pass", "print('{broken')", "print('[1]')", "print('{\"a\": 1}')"]
)
def test_a_probe_that_prints_no_report_is_reported(code):
    framework = framework_after(code)
    assert framework.error == "the probe printed no report"
    assert not framework.is_usable


def test_a_probe_that_fails_silently_is_reported():
    assert framework_after("sys.exit(3)").error == "exit code 3 and no message"


def test_lines_of_the_framework_around_the_report_do_not_matter():
    code = f"print('[WARNING] x'); print('{SOME.replace('first operator', 'done')}'); print('[INFO] bye')"
    framework = framework_after(code)
    assert framework.error is None
    assert framework.version == "2.13.0"


def test_output_that_is_no_text_does_not_matter():
    assert ask("sys.stdout.buffer.write(bytes(range(256)) * 5000)").reason() == "the probe printed no report"


def test_probes_run_at_the_same_time():
    # Each waits for the other's file, which only works side by side.
    code = "open('{0}', 'w').close()\nimport os, time\nwhile not os.path.exists('{1}'): time.sleep(0.01)\nprint('{2}')"
    runs = [
        Run(name, [sys.executable, "-c", code.format(name, other, SOME)], {})
        for name, other in (("a", "b"), ("b", "a"))
    ]
    assert all(answer.is_good for answer in run_all(runs, 60).values())


def test_probes_do_not_run_in_the_users_folder(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    answer = ask("import json; print('{\"stage\": \"' + os.getcwd() + '\"}')")
    assert answer.is_good
    assert answer.last_object["stage"] != str(tmp_path)


def test_relative_entries_of_the_python_path_still_hold(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "only_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["lib", os.environ.get("PYTHONPATH", "")]))
    assert ask(f"import only_here; print('{SOME}')").is_good


def test_variables_are_set_and_removed_for_one_process(monkeypatch):
    monkeypatch.setenv("MINE", "outer")
    code = "print('{\"stage\": \"' + os.environ.get('MINE', 'none') + '\"}')"
    assert ask(code).last_object["stage"] == "outer"
    assert ask(code, MINE="inner").last_object["stage"] == "inner"
    assert ask(code, MINE=None).last_object["stage"] == "none"


def answer(return_code: int, **found: object) -> Answer:
    return Answer(return_code, {"stage": "done", **found}, None, 60.0)


RIGHT, WRONG, DIED, FAILED = answer(0, is_right=True), answer(0, is_right=False), answer(-signal.SIGILL), answer(1)


@pytest.mark.parametrize(
    ("is_set", "as_is", "otherwise", "expected"),
    [
        (False, RIGHT, None, Bfloat16.WORKS),
        (False, DIED, RIGHT, Bfloat16.NEEDS_CURE),
        (False, DIED, DIED, Bfloat16.INCURABLE),
        (False, DIED, WRONG, Bfloat16.INCURABLE),
        (False, FAILED, None, Bfloat16.UNKNOWN),
        (False, None, None, Bfloat16.UNKNOWN),
        (True, RIGHT, DIED, Bfloat16.CURED),
        (True, RIGHT, RIGHT, Bfloat16.WORKS),
        (True, DIED, DIED, Bfloat16.INCURABLE),
        (True, DIED, RIGHT, Bfloat16.INCURABLE),
    ],
)
def test_two_bfloat16_probes_tell_whether_the_variable_is_needed(is_set, as_is, otherwise, expected):
    assert judge_bfloat16(is_set, as_is, otherwise) is expected


TORCH_THAT_DIES = """
import os, signal
from types import SimpleNamespace

__version__, bfloat16, uint8 = "2.13.0", "bfloat16", "uint8"
version = SimpleNamespace(cuda=None)
cuda = SimpleNamespace(is_available=lambda: False)

class Tensor:
    __eq__ = __matmul__ = lambda self, other: self
    all = sum = lambda self: self
    backward = lambda self: None

def multiply(left, right):
    if os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX512_CORE_FP16":
        os.kill(os.getpid(), signal.SIGILL)
    return left

mm = bmm = multiply
nn = SimpleNamespace(functional=SimpleNamespace(linear=multiply))
ones = lambda *sizes, **options: Tensor()
get_num_threads = lambda: 1
"""


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, Bfloat16.NEEDS_CURE), ("AVX512_CORE_FP16", Bfloat16.CURED), ("ALL", Bfloat16.INCURABLE)],
)
def test_a_pytorch_that_dies_of_bfloat16_is_tried_with_the_cure(tmp_path, monkeypatch, value, expected):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH_THAT_DIES)
    (tmp_path / "torch" / "distributed.py").write_text("is_available = lambda: False")
    monkeypatch.setattr(frameworks, "is_installed", lambda name: name == "torch")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), SOURCE]))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if value is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", value)
    torch, mindspore, bfloat16 = frameworks.ask_frameworks()
    assert torch.error is None
    assert torch.is_usable, "what is not bfloat16 still works"
    assert not mindspore.is_installed
    assert bfloat16 is expected


def test_a_stage_that_raises_ends_the_probe_with_its_error(capsys):
    def fail(facts):
        raise ValueError("first line\nsecond line")

    assert run_stages("torch", [("one", lambda facts: facts.update(version="1")), ("two", fail), ("three", fail)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert '"stage": "two"' in last
    assert '"error": "ValueError: first line"' in last
    assert '"version": "1"' in last


def test_a_folder_of_the_same_name_is_no_installed_framework(tmp_path, monkeypatch):
    (tmp_path / "some_framework").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("some_framework") is not None
    assert not is_installed("some_framework")
    assert not is_installed("another_framework")
    assert is_installed("json")
