"""A few threads for work that lets go of Python's lock: copies, checksums, reads and writes.

Threads of their own, and no pool of `concurrent.futures`: that takes no work once the interpreter has begun to end, and
a save in the background goes on until it is done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

__all__ = ["for_each", "num_threads", "running"]

T = TypeVar("T")


def num_threads() -> int:
    """How many threads work at once: as many as this process has processors, and four at most."""
    affinity = getattr(os, "sched_getaffinity", None)
    return max(1, min(4, len(affinity(0)) if affinity is not None else os.cpu_count() or 1))


class running:  # noqa: N801 - it is called as a function
    """Run functions in threads of their own while the block runs; wait for all, and raise what one of them raised."""

    def __init__(self, functions: Sequence[Callable[[], object]]) -> None:
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(function,), name="hyper_parallel saving") for function in functions
        ]

    def _run(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            self._errors.append(error)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, kind: object, error: BaseException | None, *_traceback: object) -> None:
        for thread in self._threads:
            thread.join()
        if error is None and self._errors:
            raise self._errors[0]


def for_each(items: Iterable[T], function: Callable[[T], object], num: int, after: Callable[[], object]) -> None:
    """Call a function with each item, by several threads. `after` is called between items, by one thread at a time."""
    left = iter(items)
    lock = threading.Lock()
    failed = threading.Event()

    def work() -> None:
        while not failed.is_set():
            with lock:
                after()
                item = next(left, left)
            if item is left:
                return
            try:
                function(item)  # type: ignore[arg-type]
            except BaseException:
                failed.set()
                raise

    if num < 2:
        work()
        return
    with running([work] * num):
        pass
