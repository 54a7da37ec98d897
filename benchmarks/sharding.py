"""What sharded data parallel costs beside PyTorch's FSDP2: time, host time, collectives, memory.

    python benchmarks/sharding.py [--widths 32 256] [--rounds 31] [--out x.json]

*Steps*: forward and backward of 8 blocks with 14 parameters each, on 1 and 2 ranks with gloo, one thread each; both implementations and the plain
model take turns. *Host*: the same on one process whose group claims 2 ranks and answers at once (PyTorch's `fake` backend); time of this
thread above the plain model's, a block. *Collectives*: of 4 microbatches of 3 units. *Memory*: the highest of one step of such a process, by the
allocator's events, beside the formula of core/parallel/sharding/README.md. (gloo's own threads hold copies that no profiler sees go.)
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch")

import on_ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as native

import hyper_parallel as hp
from hyper_parallel._base import trace
from hyper_parallel.platform.torch.planner.meters import CpuMemory

WATCHED = (
    "src/hyper_parallel/core/parallel/sharding",
    "src/hyper_parallel/platform/torch/parallel/sharding",
    "src/hyper_parallel/platform/communication",
)
NUM_BLOCKS = 8


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Block(nn.Module):
    """Fourteen parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.attention, self.between = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def model_of(width: int, num: int = NUM_BLOCKS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(num)))


def ours(model: nn.Sequential, mesh: hp.DeviceMesh, **ways: Any) -> nn.Sequential:
    for block in model:
        hp.fully_shard(block, mesh=mesh, **ways)
    hp.fully_shard(model, mesh=mesh, **ways)
    return model


def theirs(model: nn.Sequential, mesh: hp.DeviceMesh, **ways: Any) -> nn.Sequential:
    for block in model:
        native(block, mesh=mesh.to_torch(), **ways)
    native(model, mesh=mesh.to_torch(), **ways)
    return model


def mesh_here() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


# -- time ----------------------------------------------------------------------------------------------------------------


def times_by_turns(width: int, rounds: int, clock: Callable[[], float], *, meets: bool) -> dict[str, float]:
    """Medians in ms of forward and backward."""
    mesh = mesh_here()
    models = {"plain": model_of(width), "FSDP2": theirs(model_of(width), mesh), "ours": ours(model_of(width), mesh)}
    x = torch.randn(2, 16, width, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    times: dict[str, list[float]] = {way: [] for way in models}
    for number in range(rounds + 4):
        for way, model in sorted(models.items(), reverse=bool(number % 2)):
            model.zero_grad()
            if meets:
                dist.barrier()
            start = clock()
            model(x).square().mean().backward()
            if number >= 4:
                times[way].append((clock() - start) * 1e3)
    if meets:
        pairs = zip(models["FSDP2"].parameters(), models["ours"].parameters(), strict=True)
        assert all(torch.equal(a.grad.full_tensor(), b.grad.full_tensor()) for a, b in pairs)  # type: ignore[union-attr]
    return {way: statistics.median(taken) for way, taken in times.items()}


def rows_of_steps(widths: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for width in widths:
        times = times_by_turns(width, rounds, time.perf_counter, meets=True)
        rows.append(
            {"ranks": dist.get_world_size(), "width": width, "ms": times, "ratio": times["ours"] / times["FSDP2"]}
        )
    return rows


def rows_of_host_time(width: int, rounds: int) -> list[dict[str, Any]]:
    times = times_by_turns(width, 3 * rounds, time.thread_time, meets=False)
    above = {way: (times[way] - times["plain"]) / NUM_BLOCKS for way in ("ours", "FSDP2")}
    return [{"ms_a_block": above, "ratio": above["ours"] / above["FSDP2"]}]


# -- collectives ---------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "zero=3": {"zero": 3},
    "zero=3, sent once": {"zero": 3, "reduce": "last"},
    "zero=2": {"zero": 2},
    "zero=1": {"zero": 1},
}


def rows_of_collectives() -> list[dict[str, Any]]:
    """Gathers and reductions of 4 microbatches of 3 units."""
    rows, mesh, x = [], mesh_here(), torch.randn(2, 16, 32)
    for name, ways in WAYS.items():
        reduce = ways.get("reduce")
        model = model_of(32, 3)
        for block in model:
            hp.fully_shard(block, mesh=mesh, zero=ways["zero"])
        with trace.recording() as record:
            for number in range(4):
                with hp.accumulate(model, last=number == 3, reduce=reduce):
                    model(x).square().mean().backward()
        counts = Counter(event.kind for event in record.events("sharding."))
        rows.append({"way": name, "gathers": counts["sharding.gather"], "reductions": counts["sharding.reduce"]})
    return rows


# -- memory --------------------------------------------------------------------------------------------------------------


def rows_of_memory(width: int) -> list[dict[str, Any]]:
    """The highest of a step above what lies there before it, without activations to speak of."""
    mesh, rows = mesh_here(), []
    for way, make in (("ours", ours), ("FSDP2", theirs)):
        model = make(model_of(width), mesh)
        x = torch.randn(1, 1, width)
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()
        model.zero_grad()
        meter = CpuMemory()
        with meter.running():
            meter.mark("step")
            model(x).sum().backward()
            meter.mark("end")
        (span, *_) = meter.spans()
        unit = sum(parameter.numel() for parameter in model_of(width)[0].parameters()) * 4
        gradients = NUM_BLOCKS * unit // dist.get_world_size()
        rows.append(
            {
                "way": way,
                "peak_bytes": span.peak_bytes,
                "unit_bytes": unit,
                "sharded_gradient_bytes": gradients,
                "formula_bytes": gradients + 5 * unit,
            }
        )
    return rows


# -- run -----------------------------------------------------------------------------------------------------------------


def worker(kind: str, widths: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    if kind in ("host", "memory"):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        rows = rows_of_host_time(min(widths), rounds) if kind == "host" else rows_of_memory(max(widths))
    else:
        hp.get_platform().init_process_group()
        rows = rows_of_steps(widths, rounds) if kind == "steps" else rows_of_collectives()
    if dist.get_rank() == 0:
        on_ranks.say(rows)
    os._exit(0)  # a fake group does not like to be destroyed


def run(kind: str, num_ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    arguments = ["--worker", kind, "--rounds", options.rounds, "--widths", *options.widths]
    found: list[dict[str, Any]] = on_ranks.run(__file__, num_ranks, arguments)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=[32, 256])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=["steps", "host", "collectives", "memory"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.widths, options.rounds)
        return 0
    steps = [row for num in (1, 2) for row in run("steps", num, options)]
    host, collectives, memory = run("host", 1, options), run("collectives", 2, options), run("memory", 1, options)
    print(f"{'ranks':>5} {'width':>5} {'plain ms':>9} {'FSDP2 ms':>9} {'ours ms':>8} {'ratio':>6}")
    for row in steps:
        times = row["ms"]
        print(
            f"{row['ranks']:>5} {row['width']:>5} {times['plain']:>9.1f} {times['FSDP2']:>9.1f} {times['ours']:>8.1f} {row['ratio']:>6.2f}"
        )
    for row in host:
        above = row["ms_a_block"]
        print(f"host: {above['ours']:.2f} ms a block and step, FSDP2 {above['FSDP2']:.2f}")
    for row in collectives:
        print(f"{row['way']}: {row['gathers']} gathers, {row['reductions']} reductions")
    for row in memory:
        print(f"memory of {row['way']}: {row['peak_bytes']} bytes, formula {row['formula_bytes']}")
    setting = {"rounds": options.rounds, "cores": os.cpu_count()}
    on_ranks.write(options.out, WATCHED, setting, steps=steps, host=host, collectives=collectives, memory=memory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
