"""What tests of regions on the CPU run under."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

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
