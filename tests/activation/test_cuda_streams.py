"""Real streams: random delays on every one of them, and the same bytes for hundreds of steps."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hyper_parallel import SwapManager
from hyper_parallel.platform.torch.activation_checkpoint import swap_wrapper
from hyper_parallel.platform.torch.swap.device import AcceleratorDevice
from support.swapping import Swapping

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here; last results are in benchmarks/results"
)
pytestmark = needs_cuda


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Delays:
    """Lets streams sleep for a random time before a copy, and compute before a block."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, stream: Any = None) -> None:
        if self.random.random() < 0.5:
            with torch.cuda.stream(stream or torch.cuda.current_stream()):
                torch.cuda._sleep(self.random.choice((1_000, 20_000, 200_000)))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def cuda(tmp_path: Any) -> Iterator[Swapping]:
    chosen = Swapping("cuda", tmp_path)
    with chosen.configured(min_bytes="64KiB", window_bytes="2MiB", prefetch_bytes="4MiB"):
        yield chosen


def make(width: int = 256, num_blocks: int = 6) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block(width) for _ in range(num_blocks))).cuda()
    return plain, nn.Sequential(*(swap_wrapper(block) for block in plain))


def train(model: nn.Module, x: torch.Tensor, delay: Any = None) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    h = x
    for block in model:
        if delay is not None:
            delay()
        h = block(h)
    h.square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_five_hundred_steps_with_random_delays_on_every_stream_are_bitwise_equal(
    cuda: Swapping, deterministic: None
) -> None:
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1", "with one connection the streams do not race"
    plain, managed = make()
    delay = Delays(seed=2026)
    offload, load = AcceleratorDevice.launch_offload, AcceleratorDevice.launch_load

    def late_offload(self: Any, block: Any, source: Any, stream: Any) -> None:
        delay(stream.raw)
        offload(self, block, source, stream)

    def late_load(self: Any, buffer: Any, block: Any, stream: Any) -> None:
        delay(stream.raw)
        load(self, buffer, block, stream)

    wrong = 0
    with (
        mock.patch.object(AcceleratorDevice, "launch_offload", late_offload),
        mock.patch.object(AcceleratorDevice, "launch_load", late_load),
    ):
        for step in range(500):
            x = torch.randn(256, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            expected = [grad.clone() for grad in train(plain, x)]
            got = train(managed, x, delay)
            wrong += not all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert wrong == 0
    assert cuda.loaded_bytes > 500 * 256 * 256 * 4


def test_late_loads_and_a_full_window_are_measured_and_the_host_waits_for_nothing(cuda: Swapping) -> None:
    _, managed = make()
    x = torch.randn(256, 256, device="cuda")
    offload, load = AcceleratorDevice.launch_offload, AcceleratorDevice.launch_load

    def slow_offload(self: Any, block: Any, source: Any, stream: Any) -> None:
        with torch.cuda.stream(stream.raw):
            torch.cuda._sleep(2_000_000)
        offload(self, block, source, stream)

    def slow_load(self: Any, buffer: Any, block: Any, stream: Any) -> None:
        with torch.cuda.stream(stream.raw):
            torch.cuda._sleep(2_000_000)
        load(self, buffer, block, stream)

    train(managed, x)  # allocations, and what a first call waits for
    torch.cuda.synchronize()
    before = SwapManager().stats()
    with (
        mock.patch.object(AcceleratorDevice, "launch_offload", slow_offload),
        mock.patch.object(AcceleratorDevice, "launch_load", slow_load),
        mock.patch.object(torch.cuda.Event, "synchronize", side_effect=AssertionError("the host waits")),
    ):
        train(managed, x)
    torch.cuda.synchronize()
    after = SwapManager().stats()
    assert after["num_late_loads"] > before["num_late_loads"]
    assert after["num_window_waits"] > before["num_window_waits"]
    assert after["load_stall_ms"] > before["load_stall_ms"]
    assert after["offload_stall_ms"] > before["offload_stall_ms"]


def test_bytes_at_step_two_hundred_are_those_of_step_three(cuda: Swapping, deterministic: None) -> None:
    _, managed = make()
    x = torch.randn(256, 256, device="cuda")
    peaks, allocated = [], []
    for _ in range(200):
        torch.cuda.reset_peak_memory_stats()
        train(managed, x)
        torch.cuda.synchronize()
        from hyper_parallel.core.swap import engines

        for entry in engines.all_engines().values():
            entry.engine.poll()
        peaks.append(torch.cuda.max_memory_allocated())
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[2] == allocated[-1]
    assert cuda.loaded_bytes > 0


def test_the_peak_falls_as_the_window_and_the_prefetch_allow(cuda: Swapping) -> None:
    plain, managed = make(width=512, num_blocks=12)
    x = torch.randn(1024, 512, device="cuda")

    def peak(model: nn.Module) -> int:
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()  # blocks of the cache that are a little too large would be counted as they are
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            train(model, x)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    without, with_swapping, one_block = peak(plain), peak(managed), peak(plain[:1])
    gradients = sum(each.numel() * each.element_size() for each in plain.parameters())
    # At the end of backward all gradients are there, what the first block needs, and what the engine may have in flight.
    allowed = gradients + one_block + 6 * 2**20
    assert with_swapping <= allowed
    assert allowed < 0.7 * without, "the bound says something"
