"""What tests of regions on the CPU run under."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[object]:
    """Tensors of the CPU that are swapped to files. One thread for each op: for a few numbers, more would only wait."""
    torch = pytest.importorskip("torch")
    from support.region_programs import flush_aborted_backward
    from support.swapping import Swapping

    chosen = Swapping("cpu", tmp_path)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with chosen.configured():
            yield chosen
            flush_aborted_backward()
            gc.collect()
    finally:
        torch.set_num_threads(num_threads)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For a few numbers, more threads for an op would only wait."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def check(swapping: Any) -> Iterator[Callable[..., None]]:
    """Runs a program plainly and with its blocks wrapped, in each way; what it gives must be the same bits."""
    from support.swapping import check_nothing_left
    from support.training import same
    from support.wrapped import WAYS

    def run_all(program: Callable[..., Any]) -> None:
        expected = program(lambda block: block, swapping)
        for name, wrap in WAYS.items():
            assert same(program(wrap, swapping), expected), name
            check_nothing_left()
        assert swapping.offloaded_bytes > 0

    yield run_all
    check_nothing_left()
