"""The solver prints nothing, and what others print while it runs is not lost."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="the solver is in SciPy")

import scipy.optimize

from hyper_parallel.core.planner.solve.linear_model import Clock, Model
from hyper_parallel.core.planner.solve.quiet import quiet_solver

_NOISE = b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();"
_libc = ctypes.CDLL(None)


def out_of(capfd: pytest.CaptureFixture[str]) -> str:
    _libc.fflush(None)
    return capfd.readouterr().out


def solve(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    """Each of HiGHS's two functions, with something that happens while it runs."""
    for name in ("milp", "linprog"):
        real = getattr(scipy.optimize, name)

        def noisy(*args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            meanwhile()
            return real(*args, **kwargs)

        monkeypatch.setattr(scipy.optimize, name, noisy)
    model = Model()
    model.row([(model.variable(cost=1.0, is_integer=True), 1.0)], low=0.5)
    assert model.solve(Clock(5.0), gap=0.0, node_limit=10).value == 1.0
    assert model.solve_relaxed(Clock(5.0)).value == 0.5


def test_what_the_solver_prints_by_itself_goes_nowhere(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    solve(monkeypatch, lambda: _libc.puts(_NOISE))
    assert out_of(capfd) == ""
    _libc.puts(b"after")
    assert out_of(capfd) == "after\n"


def test_what_other_threads_print_while_the_solver_runs_comes_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def print_in_a_thread() -> None:
        _libc.puts(_NOISE)
        other = threading.Thread(target=lambda: (print("by print", flush=True), os.write(1, b"by descriptor\n")))
        other.start()
        other.join()

    solve(monkeypatch, print_in_a_thread)
    assert out_of(capfd) == "by print\nby descriptor\n" * 2


# Standard output is closed, and so the first file that is opened has its descriptor: a swap file could.
CLOSED = """
import ctypes, sys, threading
import scipy.optimize
from hyper_parallel.core.planner.solve.linear_model import Clock, Model

libc, real, both = ctypes.CDLL(None), scipy.optimize.milp, threading.Barrier(2, timeout=30)
taken = open(sys.argv[1], "wb")

def noisy(*args, **kwargs):
    both.wait()
    libc.puts(b"noise")
    both.wait()
    return real(*args, **kwargs)

def solve():
    model = Model()
    model.row([(model.variable(cost=1.0, is_integer=True), 1.0)], low=0.5)
    answers.append(model.solve(Clock(5.0), gap=0.0, node_limit=10).value)

scipy.optimize.milp, answers = noisy, []
threads = [threading.Thread(target=solve) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fflush(None)
print(sys.stdout, taken.fileno(), answers, file=sys.stderr)
"""


def test_two_threads_that_solve_at_a_time_print_nothing_into_a_file_that_has_taken_standard_output(
    tmp_path: Path,
) -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", CLOSED, str(tmp_path / "file")]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ended.stderr == "None 1 [1.0, 1.0]\n"
    assert (tmp_path / "file").read_bytes() == b""


def test_what_was_printed_before_the_solver_ran_comes_out(capfd: pytest.CaptureFixture[str]) -> None:
    _libc.printf(b"still in C's buffer\n")
    with quiet_solver():
        _libc.puts(_NOISE)
    assert out_of(capfd) == "still in C's buffer\n"


def test_the_last_of_several_threads_that_solve_puts_the_stream_back(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = quiet_solver(), quiet_solver()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    _libc.puts(_NOISE)
    second.__exit__(None, None, None)
    _libc.puts(b"after")
    assert out_of(capfd) == "after\n"
