"""Unmodified Hugging Face models train on four ranks as in one process: the losses of thirty steps."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support import processes
from support import sharded_hugging_face as programs


@pytest.mark.parametrize(("dtype", "largest", "zero"), [("float64", 1e-10, 3), ("float32", 1e-4, 2)])
@pytest.mark.parametrize("name", programs.MODELS)
def test_the_loss_curve_is_that_of_one_process(name: str, dtype: str, largest: float, zero: int) -> None:
    results = processes.pool("torch", 4).run(programs.curve, name, dtype, zero, deadline_s=180)
    (_, alone), *_ = results
    assert alone[-1] < alone[0]
    for ours, _ in results:
        assert max(abs(a - b) for a, b in zip(ours, alone, strict=True)) <= largest
