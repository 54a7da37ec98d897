"""What tests of plans on real models run under."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[None]:
    """Activations of the CPU can be swapped to files; one thread for each op, as the tensors are small."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("scipy", reason="the solver is in SciPy")
    pytest.importorskip("transformers", reason="some of the models are in the package `transformers`")
    import transformers

    from hyper_parallel.core.swap.config import configure_swap
    from hyper_parallel.platform import selection

    verbosity, num_threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        with configure_swap(disk_dir=tmp_path, min_bytes=4096):
            yield
            gc.collect()
    finally:
        torch.set_num_threads(num_threads)
        transformers.logging.set_verbosity(verbosity)
        selection._forget()
