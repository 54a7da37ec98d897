"""What communication through the platform costs beside the framework's own calls, on the CPU: PyTorch with gloo, MindSpore with mccl.

    python benchmarks/communication.py [--framework torch mindspore] [--ranks 2 4] [--out x.json]

Both ways take turns in one run, call by call, so that both see the same machine; the fastest fifth of the rounds counts, since waiting for
ranks that a busy machine does not run says nothing about either way.
A call that the framework does not have (most of MindSpore's on the CPU) has no time of its own beside it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results_state import digest

WATCHED = [
    "src/hyper_parallel/platform/communication",
    "src/hyper_parallel/platform/torch/communication",
    "src/hyper_parallel/platform/mindspore/communication",
]
SIZES = {"64 B": 16, "1 MB": 1 << 18, "16 MB": 1 << 22}
_ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", nargs="+", default=["torch", "mindspore"], choices=["torch", "mindspore"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        framework, rank, num_ranks, port = options.worker
        run_worker(framework, int(rank), int(num_ranks), int(port), options.rounds)
        return 0
    rows: list[dict[str, Any]] = []
    for framework in options.framework:
        for num_ranks in options.ranks:
            rows += run(framework, num_ranks, options.rounds)
    print(f"{'framework':<10} {'ranks':>5}  {'call':<24} {'size':>6} {'own ms':>9} {'ours ms':>9} {'ratio':>6}")
    for row in rows:
        own = "" if row["own_ms"] is None else f"{row['own_ms']:.3f}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(
            f"{row['framework']:<10} {row['ranks']:>5}  {row['call']:<24} {row['size']:>6} {own:>9} {row['ours_ms']:>9.3f} {ratio:>6}"
        )
    if options.out:
        result = {
            "date": datetime.date.today().isoformat(),
            "commit": options.commit or commit(),
            "digest": digest(watched=WATCHED),
            "watched": WATCHED,
            "device": "CPU",
            "versions": {name: importlib.metadata.version(name) for name in options.framework},
            "setting": {"rounds": options.rounds, "cores": os.cpu_count()},
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()


def run(framework: str, num_ranks: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of one world, measured by its rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "GLOG_v": "4", "HYPER_PARALLEL_PLATFORM": framework,
    }  # fmt: skip
    command = [sys.executable, __file__, f"--rounds={rounds}", "--worker", framework]
    workers = [
        subprocess.Popen([*command, str(rank), str(num_ranks), str(port)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]  # fmt: skip
    try:
        outputs = [worker.communicate(timeout=600)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    lines = [line for line in outputs[0].splitlines() if line.startswith("rows ")]
    if not lines or any(worker.returncode for worker in workers):
        raise SystemExit(f"{framework} with {num_ranks} ranks failed; see above.")
    found: list[dict[str, Any]] = json.loads(lines[-1].removeprefix("rows "))
    return found


def run_worker(framework: str, rank: int, num_ranks: int, port: int, rounds: int) -> None:
    import hyper_parallel as hp

    platform = hp.get_platform()
    platform.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    calls = torch_calls(platform) if framework == "torch" else mindspore_calls(platform)
    rows = []
    for size, numel in SIZES.items():
        for name, (own, ours) in calls.items():
            data = platform.ones((numel,))
            own_ms, ours_ms = measure(platform, own, ours, data, rounds if numel < 1 << 20 else max(5, rounds // 5))
            rows.append(
                {
                    "framework": framework, "ranks": num_ranks, "call": name, "size": size, "own_ms": own_ms, "ours_ms": ours_ms,
                    "ratio": None if own_ms is None else ours_ms / own_ms,
                }
            )  # fmt: skip
    if rank == 0:
        print("rows " + json.dumps(rows), flush=True)
    platform.barrier()
    platform.destroy_process_group()


Call = Callable[[Any], object]


def torch_calls(platform: Any) -> dict[str, tuple[Call | None, Call]]:
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all_reduce": (dist.all_reduce, lambda x: platform.all_reduce(x, None)),
        "all_gather_into_tensor": (
            lambda x: gather(torch.empty(x.numel() * size), x), lambda x: platform.all_gather_into_tensor(x, None),
        ),
        "reduce_scatter_tensor": (
            lambda x: scatter(torch.empty(x.numel() // size), x), lambda x: platform.reduce_scatter_tensor(x, None),
        ),
        "all_to_all_single": (
            lambda x: dist.all_to_all_single(torch.empty_like(x), x), lambda x: platform.all_to_all_single(x, x.shape),
        ),
    }  # fmt: skip


def mindspore_calls(platform: Any) -> dict[str, tuple[Call | None, Call]]:
    import mindspore.mint.distributed as dist
    from mindspore import mint

    world = platform.transport.world()
    size = platform.get_world_size()

    def gather(x: Any) -> object:
        parts = [mint.empty(x.shape) for _ in range(size)]
        dist.all_gather(parts, x, world)
        return mint.cat(parts, 0)

    return {
        "all_reduce": (lambda x: dist.all_reduce(x, group=world), lambda x: platform.all_reduce(x, None)),
        "all_gather_into_tensor": (gather, lambda x: platform.all_gather_into_tensor(x, None)),
        "reduce_scatter_tensor": (None, lambda x: platform.reduce_scatter_tensor(x, None)),
        "all_to_all_single": (None, lambda x: platform.all_to_all_single(x, x.shape)),
    }


def measure(platform: Any, own: Call | None, ours: Call, data: Any, rounds: int) -> tuple[float | None, float]:
    """Milliseconds of a call, (the framework's own, through the platform): the mean of the fastest fifth."""
    times: dict[str, list[float]] = {"own": [], "ours": []}
    for number in range(rounds + 3):
        for name, call in (("own", own), ("ours", ours))[:: 1 if number % 2 else -1]:
            if call is None:
                continue
            platform.barrier()
            begin = time.perf_counter()
            call(data)
            if number >= 3:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return (_typical(times["own"]) if own else None), _typical(times["ours"])


def _typical(times: list[float]) -> float:
    return statistics.mean(sorted(times)[: max(1, len(times) // 5)])


if __name__ == "__main__":
    sys.exit(main())
