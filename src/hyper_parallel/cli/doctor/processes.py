"""Processes that may crash, hang or print nonsense, and what they said.

Guarantees: `run_all` returns after the deadline at the latest, leaves no process behind (those started by a probe
included), and never raises for what a process does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import hyper_parallel

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Run:
    """One process to start: a name for the answer, the command, and variables on top of ours (None removes one)."""

    name: str
    command: list[str]
    variables: Mapping[str, str | None]


@dataclass(frozen=True)
class Answer:
    """What a process left. `return_code` is None if it was still running at the deadline."""

    return_code: int | None
    last_object: dict[str, Any] | None
    last_error_line: str | None
    deadline_s: float

    @property
    def is_good(self) -> bool:
        return self.return_code == 0 and self.last_object is not None

    @property
    def died(self) -> bool:
        """Whether a signal ended it, as an illegal instruction does."""
        return self.return_code is not None and self.return_code < 0

    def reason(self) -> str | None:
        """Say in a few words why the answer is not good; None where it is."""
        if self.is_good:
            return None
        if self.return_code is None:
            return f"no answer within {self.deadline_s:.0f} s"
        if self.died:
            return f"the process was killed by {_signal_name(-self.return_code)}"
        said = self.last_object.get("error") if self.last_object else None
        if said or self.last_error_line:
            return str(said or self.last_error_line)
        if self.return_code == 0:
            return "the probe printed no report"
        return f"exit code {self.return_code} and no message"


def run_all(runs: list[Run], deadline_s: float = DEADLINE_S) -> dict[str, Answer]:
    """Run the processes at the same time, and return their answers by name."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hyper-parallel-doctor-"))
        started = [_Started(run, folder, stack) for run in runs]
        end = time.monotonic() + deadline_s
        return {one.run.name: one.answer(end, deadline_s) for one in started}


class _Started:
    """A process with its output in files: pipes could fill up while another process is being waited for."""

    def __init__(self, run: Run, folder: str, stack: contextlib.ExitStack) -> None:
        self.run = run
        self.output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        self.errors = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        # In a folder of its own, because frameworks leave files where they run and import what lies there.
        self.process = subprocess.Popen(
            run.command,
            cwd=folder,
            env=_environment(run.variables),
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.errors,
            start_new_session=True,
        )
        stack.callback(self._end)

    def answer(self, end: float, deadline_s: float) -> Answer:
        return_code: int | None
        try:
            return_code = self.process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return_code = None
        errors = [line.strip() for line in _lines(self.errors) if line.strip()]
        return Answer(return_code, _last_object(_lines(self.output)), errors[-1] if errors else None, deadline_s)

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _environment(variables: Mapping[str, str | None]) -> dict[str, str]:
    environment = dict(os.environ)
    # The processes run elsewhere: relative entries, and the current folder if that is where we were found, must hold.
    paths = [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = Path(hyper_parallel.__file__).resolve().parents[1]
    if root == Path.cwd().resolve():
        paths.insert(0, str(root))
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment.setdefault("GLOG_v", "3")  # MindSpore: errors only
    for name, value in variables.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def module_command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").splitlines()


def _last_object(lines: list[str]) -> dict[str, Any] | None:
    for line in reversed(lines):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict) and "stage" in found:
                    return found
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
