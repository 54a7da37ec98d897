"""The disk as the tier below pinned memory: device to staging to file and back (rule 8).

On a machine without an accelerator the device is one made of threads: the same engine, tiers and staging, with copies of real bytes.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hyper_parallel.core.swap.arena import PinnedArena
from hyper_parallel.core.swap.disk import DiskTier
from hyper_parallel.core.swap.disk_stream import DiskStream, HostComputeStream
from hyper_parallel.core.swap.engine import Limits, SwapEngine
from hyper_parallel.core.swap.staged import StagedDevice, StagedDisk
from hyper_parallel.platform.torch.activation_checkpoint import AsyncSaveOnCpu
from hyper_parallel.platform.torch.swap.device import memory_of
from support.random_tensors import TensorProgram
from support.swapping import Swapping, gradients

MIB = 1024**2


class Slab:
    def __init__(self, num_bytes: int) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8)


class ThreadedDevice:
    """An accelerator made of threads: copies run later, in order, and take their time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._compute, self._offload, self._load = (
            HostComputeStream(),
            DiskStream("fake offload"),
            DiskStream("fake load"),
        )

    def current_stream(self) -> Any:
        return self._compute

    def offload_stream(self) -> Any:
        return self._offload

    def load_stream(self) -> Any:
        return self._load

    def bytes_in_use(self) -> None:
        """Nobody counts."""

    def allocate(self, num_bytes: int, stream: Any) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def launch_offload(self, block: Any, source: torch.Tensor, stream: Any) -> None:
        stream.launch_call("offload", lambda: self._copy(block, source, to_block=True))

    def launch_load(self, buffer: torch.Tensor, block: Any, stream: Any) -> None:
        stream.launch_call("load", lambda: self._copy(block, buffer, to_block=False))

    def _copy(self, block: Any, memory: torch.Tensor, to_block: bool) -> None:
        time.sleep(self._random.choice((0, 0, 0.0005)))
        begin = 0
        for slab, offset, num_bytes in block.parts:
            host, part = slab.tensor[offset : offset + num_bytes], memory[begin : begin + num_bytes]
            host.copy_(part) if to_block else part.copy_(host)
            begin += num_bytes


class Tiers:
    def __init__(self, directory: Path, host_budget: int, staging_budget: int = 8 * MIB, seed: int = 0) -> None:
        self.arena = PinnedArena(Slab, lambda slab: None, host_budget, max_parts=16)
        self.disk = StagedDisk(
            DiskTier(directory, 64 * MIB), PinnedArena(Slab, lambda slab: None, staging_budget, max_parts=1)
        )
        self.load_staging = PinnedArena(Slab, lambda slab: None, 1 << 40, max_parts=1)
        device = StagedDevice(ThreadedDevice(seed), self.load_staging, memory_of)
        self.engine = SwapEngine(device, [self.arena, self.disk], Limits(64 * 1024, 256 * 1024))

    def loss(self, program: TensorProgram, name: str) -> Any:
        def managed(x: torch.Tensor) -> torch.Tensor:
            target = "hyper_parallel.platform.torch.swap.engines.engine_of"
            with mock.patch(target, return_value=(self.engine, 1)), AsyncSaveOnCpu(name=name):
                return program.loss(x)

        return managed

    def check_empty(self) -> None:
        torch.ones((), requires_grad=True).mul(2).backward()  # lets go of a backward that raised
        self.engine.join()
        self.engine.device._disk.launch_call("end", lambda: None).join()
        assert self.engine.in_flight_bytes == 0
        for tier in (self.arena, self.disk.disk, self.disk.staging, self.load_staging):
            assert tier.used_bytes == 0


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Any]:
    made: list[Tiers] = []

    def make(**options: Any) -> Tiers:
        made.append(Tiers(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.check_empty()
        each.disk.disk.close()


def test_rule_8_what_does_not_fit_into_pinned_memory_goes_to_disk_and_comes_back_right(tiers: Any) -> None:
    used_disk = used_host = 0
    for seed in range(60):
        system = tiers(host_budget=random.Random(seed).choice((600, 5_000, 20_000)), seed=seed)
        program = TensorProgram(seed)
        x = program.input("cpu")
        plain = gradients(program.loss, x)
        leaf = x.clone().requires_grad_()
        loss = system.loss(program, f"program {seed}")(leaf)
        used_disk += system.disk.used_bytes
        used_host += system.arena.used_bytes
        loss.backward()
        assert torch.equal(leaf.grad, plain[0]), f"seed {seed}"
        program.kept.clear()
        del loss, leaf
        system.check_empty()
    assert used_disk > 0
    assert used_host > 0


def test_several_steps_two_forwards_alive_and_a_second_backward(tiers: Any) -> None:
    system = tiers(host_budget=600)
    programs = [TensorProgram(seed) for seed in range(4)]
    for _ in range(3):
        leaves = [program.input("cpu").requires_grad_() for program in programs]
        losses = [
            system.loss(program, f"step {number}")(leaf)
            for number, (program, leaf) in enumerate(zip(programs, leaves, strict=True))
        ]
        for loss in losses:
            loss.backward(retain_graph=True)
        for loss in reversed(losses):
            loss.backward()
        for program, leaf in zip(programs, leaves, strict=True):
            (once,) = gradients(program.loss, leaf)
            assert torch.equal(leaf.grad, once + once)
            program.kept.clear()
        del loss
        losses.clear()


def test_with_no_staging_left_the_storage_stays_on_the_device(tiers: Any) -> None:
    system = tiers(host_budget=600, staging_budget=600)
    program = TensorProgram(3)
    x = program.input("cpu")
    assert torch.equal(gradients(system.loss(program, "x"), x)[0], gradients(program.loss, x)[0])
    assert system.engine.stats.kept["no room in host or disk"] > 0
    program.kept.clear()


def test_a_full_disk_keeps_the_storage_and_a_broken_read_is_a_clear_error(tiers: Any) -> None:
    system = tiers(host_budget=600)
    program = TensorProgram(3)
    x = program.input("cpu")
    plain = gradients(program.loss, x)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def joined(y: torch.Tensor) -> torch.Tensor:
        loss = system.loss(program, "full")(y)
        system.engine.join()  # a copy that is under way when backward has what it needs is nobody's failure
        return loss

    with mock.patch("os.pwritev", full):
        assert torch.equal(gradients(joined, x)[0], plain[0])
    assert system.engine.stats.kept["the copy failed"] > 0
    leaf = x.clone().requires_grad_()
    loss = system.loss(program, "broken")(leaf)
    system.engine.join()
    with mock.patch("os.preadv", broken), pytest.raises(RuntimeError, match="could not be brought back"):
        loss.backward()
    del loss
    assert torch.equal(gradients(system.loss(program, "right again"), x)[0], plain[0])
    program.kept.clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; last results are in benchmarks/results")
def test_on_cuda_a_small_host_budget_sends_the_rest_to_disk(tmp_path: Path) -> None:
    from hyper_parallel.core.swap import engines

    swapping = Swapping("cuda", tmp_path)
    used_disk = 0
    with swapping.configured(host_budget=2_000, disk_dir=tmp_path):
        for seed in range(40):
            program = TensorProgram(seed)
            x = program.input("cuda")
            plain = gradients(program.loss, x)
            leaf = x.clone().requires_grad_()
            with AsyncSaveOnCpu(name=f"program {seed}"):
                loss = program.loss(leaf)
            engine = engines.all_engines()["cuda:0"].engine
            used_disk += sum(tier.used_bytes for tier in engine.tiers if tier.name == "disk")
            loss.backward()
            assert torch.equal(leaf.grad, plain[0]), f"seed {seed}"
            program.kept.clear()
            del loss, leaf
    assert used_disk > 0
