"""Telling a person how far long work has got.

On a terminal that is a bar; elsewhere a line when half a minute has passed since the last.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from hyper_parallel._base.errors import ArgumentTypeError, describe

Progress = Callable[[str], None]
_SILENCE_S = 30.0


def _write(text: str) -> None:
    sys.stderr.write(text)


class _Lines:
    """Writes what happens, but not often."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._next_s = time.monotonic() + _SILENCE_S

    def __call__(self, what: str) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _SILENCE_S
            _write(f"{self._title}: {what}\n")


def check_progress(wanted: bool | Progress) -> None:
    if wanted is not None and type(wanted) is not bool and not callable(wanted):
        raise ArgumentTypeError(
            "`progress` says whether a bar is shown, or is told what happens.",
            expected="True, False or a function",
            got=describe(wanted),
        )


@contextlib.contextmanager
def progress_of(wanted: bool | Progress, title: str, num_steps: int) -> Iterator[Progress]:
    """Give a function to call with what happens next.

    It is a bar if one is wanted, rich is installed and this is a terminal.
    """
    check_progress(wanted)
    if callable(wanted):
        yield wanted
        return
    if not wanted:
        yield lambda what: None
        return
    if not sys.stderr.isatty():  # a notebook, a log: short work says nothing there
        yield _Lines(title)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda what: _write(f"{title}: {what}\n")
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=num_steps)

        def report_progress(what: str) -> None:
            bar.update(task, description=f"{title}: {what}", advance=1)

        yield report_progress
