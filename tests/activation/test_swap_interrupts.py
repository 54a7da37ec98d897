"""Ctrl-C at any place of a step that swaps: the next step is right and swaps as before, nothing waits for ever, and no memory is lost."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.swap import engines
from hyper_parallel.core.swap.arena import PinnedArena
from hyper_parallel.core.swap.disk import DiskTier
from hyper_parallel.core.swap.disk_stream import DiskStream, HostComputeStream
from hyper_parallel.core.swap.engine import Limits, SwapEngine
from hyper_parallel.core.swap.staged import StagedDevice, StagedDisk
from hyper_parallel.platform.torch.swap.device import memory_of
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import checkpoint_wrapper
from hyper_parallel.platform.torch.wrappers.swap_wrapper import swap_wrapper
from support.ctrl_c import CtrlC
from support.interrupts import differing, thread_state
from support.region_programs import flush_aborted_backward
from support.swapping import Swapping

NUM_MOMENTS = None if os.environ.get("HYPER_PARALLEL_CAMPAIGN") == "full" else 100
DEADLINE_S = 20
MIB = 1024**2


class Step:
    """Trains a few swapped blocks; a window of two tensors, so that compute waits for room."""

    def __init__(self, device: str, wrap: Callable[[nn.Module], nn.Module] = swap_wrapper) -> None:
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh()) for _ in range(3))
        self.model = nn.Sequential(*map(wrap, blocks)).to(device)
        self.x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)).to(device)

    def __call__(self) -> list[torch.Tensor]:
        self.model.zero_grad()
        loss = self.model(self.x).square().sum()
        loss.backward()
        return [loss.detach(), *(each.grad.clone() for each in self.model.parameters() if each.grad is not None)]


class Slab:
    def __init__(self, num_bytes: int) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8)


class DeviceOfThreads:
    """An accelerator made of threads: copies of real bytes, which run later and in order."""

    def __init__(self) -> None:
        self.compute, self.offload, self.load = (
            HostComputeStream(),
            DiskStream("offload of it"),
            DiskStream("load of it"),
        )

    def current_stream(self) -> Any:
        return self.compute

    def offload_stream(self) -> Any:
        return self.offload

    def load_stream(self) -> Any:
        return self.load

    def bytes_in_use(self) -> None:
        """Nobody counts."""

    def allocate(self, num_bytes: int, stream: Any) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def launch_offload(self, block: Any, source: torch.Tensor, stream: Any) -> None:
        stream.launch_call("offload", lambda: _copy(block, source, to_block=True))

    def launch_load(self, buffer: torch.Tensor, block: Any, stream: Any) -> None:
        stream.launch_call("load", lambda: _copy(block, buffer, to_block=False))


def _copy(block: Any, memory: torch.Tensor, *, to_block: bool) -> None:
    begin = 0
    for slab, offset, num_bytes in block.parts:
        host, part = slab.tensor[offset : offset + num_bytes], memory[begin : begin + num_bytes]
        host.copy_(part) if to_block else part.copy_(host)
        begin += num_bytes


class Place:
    """Where a step swaps to: its engine, and all that holds memory there."""

    def __init__(self, engine: SwapEngine, pools: list[Any], streams: list[DiskStream]) -> None:
        self.engine, self.pools, self.streams = engine, pools, streams

    def settle(self) -> None:
        self.engine.join()
        for stream in self.streams:
            stream.launch_call("the end", lambda: None).join()

    def held(self) -> dict[str, Any]:
        """What must be nothing once no graph is there."""
        used = {f"tier {number}": pool.used_bytes for number, pool in enumerate(self.pools)}
        left = {**used, "in flight": self.engine.in_flight_bytes, "lost": len(self.engine._lost)}
        return {name: number for name, number in left.items() if number}

    def reserved_bytes(self) -> int:
        return sum(pool.reserved_bytes for pool in self.pools)


@contextmanager
def own_tiers(directory: Path) -> Iterator[Place]:
    """Pinned memory, of which there is not enough, and the disk below it."""
    host = PinnedArena(Slab, lambda slab: None, 4_096, max_parts=16)
    load_staging, staging = (PinnedArena(Slab, lambda slab: None, MIB, max_parts=1) for _ in range(2))
    disk = DiskTier(directory, MIB)
    inner = DeviceOfThreads()
    device = StagedDevice(inner, load_staging, memory_of)
    engine = SwapEngine(device, [host, StagedDisk(disk, staging)], Limits(2_048, 4_096))
    target = "hyper_parallel.platform.torch.swap.engines.engine_of"
    streams = [inner.offload, inner.load, device._disk]
    with mock.patch(target, return_value=(engine, 1)):
        yield Place(engine, [host, load_staging, staging, disk], streams)
    for stream in streams:
        stream.close()
    disk.close()


@contextmanager
def of_the_device(swapping: Swapping) -> Iterator[Place]:
    """The tier that the device has: files for the CPU, pinned memory for CUDA."""
    with swapping.configured(window_bytes=2_048, prefetch_bytes=4_096):
        Step(swapping.kind)()
        name = next(name for name in engines.all_engines() if name.startswith(swapping.kind))
        managed = engines.all_engines()[name]
        device = managed.engine.device
        streams = [each for each in (device.offload_stream(), device.load_stream()) if isinstance(each, DiskStream)]
        yield Place(managed.engine, [managed.tier], streams)


@contextmanager
def deadline() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"a step after Ctrl-C took {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def swapped_in_region(block: nn.Module) -> nn.Module:
    """A region whose policy swaps the products, and which swaps its input; the rest runs again."""
    return checkpoint_wrapper(block, policy_fn=_swaps_products, swap_inputs=True)


def _swaps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("wrap", [swap_wrapper, swapped_in_region])
@pytest.mark.parametrize("way", ["the device's own tier", "pinned memory and disk"])
def test_ctrl_c_anywhere_in_a_step_that_swaps_costs_that_step_alone(
    swapping: Swapping,
    one_thread: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    """Reliability: Ctrl-C. At every place of the engine at which Python looks for it; in every run at a random part of them."""
    monkeypatch.setattr(
        "sys.unraisablehook", lambda _: None
    )  # an interrupt in a finaliser is lost, as anywhere in Python
    if way == "pinned memory and disk" and swapping.kind != "cpu":
        pytest.skip("this tier is made of threads, on the CPU")
    expected = Step(swapping.kind, lambda block: block)()
    with of_the_device(swapping) if way == "the device's own tier" else own_tiers(tmp_path) as place:
        step = Step(swapping.kind, wrap)
        for _ in range(4):
            assert all(map(torch.equal, step(), expected))
        with CtrlC() as all_of_it:
            step()
        num_moments = len(all_of_it.places)
        moments: Any = range(1, num_moments + 1)
        if NUM_MOMENTS is not None:
            seed = random.randrange(1 << 30)
            print(f"{num_moments} moments; seed {seed}")
            moments = sorted(random.Random(seed).sample(moments, min(NUM_MOMENTS, num_moments)))
        state, reserved_bytes = thread_state(), place.reserved_bytes()
        files = len(os.listdir("/proc/self/fd"))
        failures = []
        for at in moments:
            interrupt = CtrlC(at)
            try:
                with interrupt:
                    step()
            except KeyboardInterrupt:
                pass
            if not interrupt.is_over:
                continue
            try:
                with deadline():
                    flush_aborted_backward()
                    assert differing(state, thread_state()) == []
                    before = place.engine.stats.num_offloads
                    assert all(map(torch.equal, step(), expected)), "wrong gradients"
                    assert place.engine.stats.num_offloads > before, "nothing is swapped any more"
                    place.settle()
                    if place.held():
                        gc.collect()
                        place.settle()
                    assert place.held() == {}
                    # What the step that was cut off has on its way may lie beside the next step's, where threads of the
                    # disk get no time. What interrupts left there for good would add up to much more.
                    assert place.reserved_bytes() <= 2 * reserved_bytes
                    assert len(os.listdir("/proc/self/fd")) <= files
            except Exception as error:
                failures.append(f"{interrupt.where}: {type(error).__name__} {str(error).splitlines()[:1]}")
                if isinstance(error, TimeoutError) or len(failures) > 40:
                    break
        print(
            f"{wrap.__name__}, {way}, {swapping.kind}: {num_moments} moments, {len(moments)} interrupts, {len(failures)} failures"
        )
        assert failures == []
        del step
