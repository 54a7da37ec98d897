"""Telling a person how far long work has got: a bar on a terminal, nothing where nobody looks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[str], None]


def _write(text: str) -> None:
    sys.stderr.write(text)


@contextlib.contextmanager
def progress_of(wanted: bool | Progress, title: str, num_steps: int) -> Iterator[Progress]:
    """A function to call with what happens next. A bar, if one is wanted, rich is there and somebody sees it."""
    if callable(wanted):
        yield wanted
        return
    if not wanted or not sys.stderr.isatty():
        yield lambda what: None
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

        def say(what: str) -> None:
            bar.update(task, description=f"{title}: {what}", advance=1)

        yield say
