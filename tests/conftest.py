"""What every test runs under: backends to choose from, a search for leaks, and the table of platform outcomes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import backends, processes

os.environ.setdefault("GLOG_v", "3")  # MindSpore prints a page of warnings otherwise

pytest_plugins = ["support.outcomes"]


_MANY_MODULES = 50
_num_modules_then = 0


def pytest_collection_finish() -> None:
    _leave_out_what_stays()


def _leave_out_what_stays() -> None:
    """What was imported is not garbage: left out, a collection takes a hundredth of its time, and tests ask for thousands."""
    global _num_modules_then
    _num_modules_then = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.fixture(params=backends.ALL, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Iterator[backends.Backend]:
    """Each framework and device in turn; one that is not here is skipped with the reason."""
    chosen: backends.Backend = request.param
    reason = chosen.missing()
    if reason:
        pytest.skip(reason)
    with chosen.active():
        yield chosen


@pytest.fixture
def platform(backend: backends.Backend):
    """The platform object under test."""
    return backend.platform


@pytest.fixture(params=["cpu", "cuda"])
def swapping(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """PyTorch tensors that are swapped: from the CPU to files, from CUDA to pinned memory."""
    torch = pytest.importorskip("torch")
    from support.swapping import Swapping

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here; last results are in benchmarks/results")
    chosen = Swapping(request.param, tmp_path)
    with chosen.configured():
        yield chosen
        gc.collect()  # an exception that a test looked at holds its frames in a cycle, and they what was swapped


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Threads, processes, hooks and pending handles that a test leaves behind fail it."""
    threads = set(threading.enumerate())
    files = _open_files()
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    assert not left, f"threads left running: {left}"
    assert not multiprocessing.active_children(), "processes left running"
    assert not _children_of_this_process(), "child processes left running or unreaped"
    backends.check_nothing_left()
    if "hyper_parallel.core.swap.engines" in sys.modules:
        from support.swapping_state import check_nothing_left

        check_nothing_left()
    more_files = _open_files() - files
    if more_files:
        gc.collect()  # an object in a cycle is not a leak
        more_files &= _open_files()
    assert not more_files, f"files left open: {sorted(more_files)}"
    if len(sys.modules) > _num_modules_then + _MANY_MODULES:
        _leave_out_what_stays()


def _open_files() -> set[str]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        # what frameworks load lazily (libraries, devices) stays open by design; files of a test do not
        if (
            target.startswith("/")
            and not target.startswith(("/dev/", "/proc/", "/sys/"))
            and "site-packages" not in target
        ):
            found.add(target)
    return found


def _children_of_this_process() -> list[int]:
    children = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as listing:
                children += [int(pid) for pid in listing.read().split()]
        except OSError:
            continue
    return [pid for pid in children if pid not in processes.KEPT]
