"""What a pipeline's runtime costs beside PyTorch's, and whether ranks are as idle as the simulation says.

    python benchmarks/pipelines.py [--widths 64 512] [--rounds 15] [--out x.json]

*Steps*: two ranks on gloo, one thread each, 8 microbatches, the same stages and schedule for both runtimes, which take turns; `plain` is one
process that does the same work in a loop, halved: no pipeline of two ranks can be faster. *Idle*: four ranks whose stages sleep in place of
computing, so that cores are no limit; idle time over work, seen and simulated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch")

import on_ranks
import torch
import torch.distributed as dist
import torch.distributed.pipelining as native
from torch import nn

import hyper_parallel as hp

WATCHED = ("src/hyper_parallel/core/parallel", "src/hyper_parallel/platform/torch/parallel")
NUM_RANKS, NUM_MICROBATCHES = 2, 8
SCHEDULES: dict[str, tuple[Callable[[int, int], hp.Schedule], Any]] = {
    "1F1B": (hp.schedules.one_f_one_b, native.Schedule1F1B),
    "interleaved": (lambda p, m: hp.schedules.interleaved(p, m, 2), native.ScheduleInterleaved1F1B),
    "ZBV": (hp.schedules.zbv, native.ScheduleZBVZeroBubble),
    "DualPipe-V": (hp.schedules.dualpipe_v, native.ScheduleDualPipeV),
}
SLEEP_S, IDLE_RANKS = 0.03, 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def stages_of(num: int, width: int) -> list[nn.Module]:
    """Of a model of eight blocks."""
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(8)]
    return [nn.Sequential(*blocks[8 * i // num : 8 * (i + 1) // num]) for i in range(num)]


def loss_fn(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


# -- steps ---------------------------------------------------------------------------------------------------------------


def rows_of_steps(width: int, rounds: int) -> list[dict[str, Any]]:
    """Medians of both runtimes by turns, and that both give the same gradients."""
    rank = dist.get_rank()
    x, y = torch.randn(2, NUM_MICROBATCHES * 4, 16, width, generator=torch.Generator().manual_seed(1))
    rows = []
    for name, (generator, native_class) in SCHEDULES.items():
        schedule = generator(NUM_RANKS, NUM_MICROBATCHES)
        numbers = schedule.placement.stages_on(rank)
        modules, others = stages_of(schedule.num_stages, width), stages_of(schedule.num_stages, width)
        ours = hp.Pipeline(
            [hp.PipelineStage(modules[i], i, schedule.num_stages) for i in numbers], schedule, loss_fn=loss_fn
        )
        stages = [native.PipelineStage(others[i], i, schedule.num_stages, torch.device("cpu")) for i in numbers]
        theirs = native_class(stages if len(stages) > 1 else stages[0], NUM_MICROBATCHES, loss_fn=loss_fn)
        first, last = 0 in numbers, schedule.num_stages - 1 in numbers

        def run_ours(pipeline: hp.Pipeline = ours) -> None:
            pipeline.step(x, target=y)

        def run_theirs(run: Any = theirs, first: bool = first, last: bool = last) -> None:
            run.step(*([x] if first else []), **({"target": y} if last else {}))

        run_ours(), run_theirs()
        equal = all(
            torch.equal(a.grad, b.grad)
            for i in numbers
            for a, b in zip(modules[i].parameters(), others[i].parameters(), strict=True)
        )
        times: dict[str, list[float]] = {"ours": [], "PyTorch's": []}
        for number in range(rounds):
            ways = [("ours", run_ours), ("PyTorch's", run_theirs)]
            for way, run in ways if number % 2 else reversed(ways):
                dist.barrier()
                start = time.perf_counter()
                run()
                dist.barrier()
                times[way].append((time.perf_counter() - start) * 1e3)
        ours_ms, theirs_ms = statistics.median(times["ours"]), statistics.median(times["PyTorch's"])
        rows.append(
            {
                "width": width, "schedule": name, "ours_ms": ours_ms, "pytorch_ms": theirs_ms,
                "ratio": ours_ms / theirs_ms, "gradients_equal": equal, "half_of_plain_ms": plain_ms(width, rounds) / 2,
            }
        )  # fmt: skip
    return rows


def plain_ms(width: int, rounds: int) -> float:
    """One process, the other one idle."""
    times = []
    dist.barrier()
    if dist.get_rank() == 0:
        module = nn.Sequential(*stages_of(1, width))
        x, y = torch.randn(2, NUM_MICROBATCHES * 4, 16, width)
        for _ in range(rounds):
            start = time.perf_counter()
            for a, b in zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True):
                (loss_fn(module(a), b) / NUM_MICROBATCHES).backward()
            times.append((time.perf_counter() - start) * 1e3)
    dist.barrier()
    return statistics.median(times or [0.0])


# -- idle time -----------------------------------------------------------------------------------------------------------


slept_s = 0.0  # a sleep takes longer than was asked for, by how much is the machine's


def nap(*_: object) -> None:
    global slept_s
    start = time.perf_counter()
    time.sleep(SLEEP_S)
    slept_s += time.perf_counter() - start


class Sleeper(nn.Module):
    """A layer that takes its time: forward, the gradient of its input and that of its weight, each as long."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.linear.weight.register_post_accumulate_grad_hook(nap)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nap()
        x = x if x.requires_grad else x.detach().requires_grad_()  # the first stage works as long as the others
        x.register_hook(nap)
        return self.linear(x)


def rows_of_idle_time() -> list[dict[str, Any]]:
    rows, rank = [], dist.get_rank()
    for name, (generator, _) in SCHEDULES.items():
        schedule = generator(IDLE_RANKS, 16)
        stages = [
            hp.PipelineStage(Sleeper(), index, schedule.num_stages) for index in schedule.placement.stages_on(rank)
        ]
        pipeline = hp.Pipeline(stages, schedule, loss_fn=lambda out, _: out.mean())
        x, seen = torch.ones(16, 4), []
        for _ in range(4):
            dist.barrier()
            start, before_s = time.perf_counter(), slept_s
            pipeline.step(x)
            seen.append((time.perf_counter() - start) / (slept_s - before_s) - 1)
        simulated = schedule.simulate({"F": 1.0, "I": 1.0, "W": 1.0}).bubble
        rows.append({"schedule": name, "seen": statistics.median(seen[1:]), "simulated": simulated})
    return rows


def worker(kind: str, widths: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    hp.get_platform().init_process_group()
    rows = rows_of_idle_time() if kind == "idle" else [row for width in widths for row in rows_of_steps(width, rounds)]
    if dist.get_rank() == 0:
        on_ranks.say(rows)
    hp.get_platform().destroy_process_group()


def run(kind: str, num_ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    arguments = ["--worker", kind, "--rounds", options.rounds, "--widths", *options.widths]
    found: list[dict[str, Any]] = on_ranks.run(__file__, num_ranks, arguments)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=["steps", "idle"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.widths, options.rounds)
        return 0
    steps, idle = run("steps", NUM_RANKS, options), run("idle", IDLE_RANKS, options)
    print(
        f"{'width':>5}  {'schedule':<12} {'half of plain':>13} {'PyTorch ms':>11} {'ours ms':>8} {'ratio':>6}  gradients"
    )
    for row in steps:
        half, words = row["half_of_plain_ms"], "equal" if row["gradients_equal"] else "differ"
        print(
            f"{row['width']:>5}  {row['schedule']:<12} {half:>13.1f} {row['pytorch_ms']:>11.1f} {row['ours_ms']:>8.1f} {row['ratio']:>6.2f}  {words}"
        )
    for row in idle:
        print(
            f"idle on {IDLE_RANKS} ranks, {row['schedule']:<12} seen {row['seen']:.3f}, simulated {row['simulated']:.3f}"
        )
    setting = {"rounds": options.rounds, "cores": os.cpu_count(), "sleep_s": SLEEP_S}
    on_ranks.write(options.out, WATCHED, setting, steps=steps, idle=idle)
    return 0


if __name__ == "__main__":
    sys.exit(main())
