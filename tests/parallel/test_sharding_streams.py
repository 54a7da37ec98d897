"""Collectives that come late, on a stream of their own, change no gradient of a sharded model."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("torch")

import torch

from support import processes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_with_random_delays_of_collectives_are_bitwise_equal(device: str) -> None:
    """On a CPU nothing is late: there this shows that the program trains."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here; last results are in benchmarks/results")
    steps = "200" if device == "cuda" else "2"
    output = processes.run_program(
        [sys.executable, "-m", "support.sharding_streams", device, steps],
        deadline_s=300,
        CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0") if device == "cuda" else "",
    )
    assert output.count(": equal") == 5
    assert "differ" not in output
