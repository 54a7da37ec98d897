"""What distributed tensors cost the host: one op, and a Llama block, beside plain tensors and PyTorch's own DTensor. One process, one thread.

    python benchmarks/distributed.py [--rounds 7] [--out x.json]

All three take turns in every round, and the best round of each counts: the machine is noisy, the differences are microseconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform as python_platform
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch")

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from results_state import digest
from torch import nn
from torch.distributed import tensor as native
from torch.distributed.device_mesh import init_device_mesh as native_mesh

import hyper_parallel as hp
from activation import commit

WATCHED = (
    "src/hyper_parallel/core/dtensor",
    "src/hyper_parallel/core/shard",
    "src/hyper_parallel/platform/torch/dtensor",
)
KINDS = ("plain", "ours", "PyTorch's")

OPS: dict[str, Callable[[Any, Any], Any]] = {
    "x + y": lambda x, y: x + y,
    "x * 2.0": lambda x, y: x * 2.0,
    "relu": lambda x, y: torch.relu(x),
    "x @ w": lambda x, y: torch.matmul(x, y),
    "sum of a dim": lambda x, y: x.sum(1),
    "view": lambda x, y: x.view(4, 2, 2),
    "transpose": lambda x, y: x.transpose(0, 1),
    "softmax": lambda x, y: torch.softmax(x, -1),
    "linear": lambda x, y: F.linear(x, y),
    "cat": lambda x, y: torch.cat([x, y], 1),
}


class Block(nn.Module):
    """A Llama block: RMS norm, attention with rotary positions, SwiGLU. Attention is written out: PyTorch's DTensor has no fused one on a CPU."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
        batch, length, width = x.shape
        y = F.rms_norm(x, (width,), self.attention_norm)
        q = rotated(self.wq(y).view(batch, length, self.heads, self.size), cosine, sine).transpose(1, 2)
        k = rotated(self.wk(y).view(batch, length, self.heads, self.size), cosine, sine).transpose(1, 2)
        v = self.wv(y).view(batch, length, self.heads, self.size).transpose(1, 2)
        attended = torch.softmax(q @ k.transpose(-2, -1) * self.size**-0.5, -1) @ v
        x = x + self.wo(attended.transpose(1, 2).reshape(batch, length, width))
        y = F.rms_norm(x, (width,), self.mlp_norm)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Any, cosine: Any, sine: Any) -> Any:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1)


def best(rounds: int, runs: dict[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    """Microseconds per call, of the best round."""
    found = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        for _ in range(calls // 4 + 3):
            run()
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            found[name] = min(found[name], (time.perf_counter() - start) / calls * 1e6)
    return found


def op_rows(rounds: int, mesh: Any, torch_mesh: Any) -> list[dict[str, Any]]:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    rows = []
    for name, op in OPS.items():
        places = ["S", "R"] if name in ("x @ w", "linear") else ["S", "S"]
        ours = [
            hp.DTensor.from_local(t, mesh, [hp.Shard(0) if p == "S" else hp.Replicate()])
            for t, p in zip((x, y), places, strict=True)
        ]
        theirs = [
            native.DTensor.from_local(t, torch_mesh, [native.Shard(0) if p == "S" else native.Replicate()])
            for t, p in zip((x, y), places, strict=True)
        ]
        with torch.no_grad():
            times = best(rounds, {
                "plain": lambda op=op: op(x, y), "ours": lambda op=op, a=ours: op(*a), "PyTorch's": lambda op=op, a=theirs: op(*a),
            }, 2000)  # fmt: skip
        rows.append({"op": name, **{kind: round(value, 2) for kind, value in times.items()}})
    return rows


def block_row(rounds: int, mesh: Any, torch_mesh: Any, width: int, length: int) -> dict[str, Any]:
    """Forward and backward, one block, batch 1."""
    sizes = (width, width * 7 // 2, 8)
    x = torch.randn(1, length, width)
    angle = torch.randn(1, length, 1, width // 8 // 2)
    runs: dict[str, Callable[[], Any]] = {}
    for kind in KINDS:
        torch.manual_seed(0)
        block = Block(*sizes)
        inputs: list[Any] = [x, angle.cos(), angle.sin()]
        if kind == "ours":
            hp.shard_module(block, mesh, hp.ShardPlan())
            inputs = [hp.distribute_tensor(t, mesh) for t in inputs]
        elif kind == "PyTorch's":
            block = native.distribute_module(block, torch_mesh)
            inputs = [native.distribute_tensor(t, torch_mesh, [native.Replicate()]) for t in inputs]

        def step(block: Block = block, inputs: list[Any] = inputs) -> None:
            block.zero_grad()
            block(*inputs).square().mean().backward()

        runs[kind] = step
    times = best(rounds, runs, 20)
    ratios = {f"{kind} over plain": round(times[kind] / times["plain"], 2) for kind in KINDS[1:]}
    return {"width": width, "length": length, **{kind: round(value) for kind, value in times.items()}, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", help="what is measured, where there is no git")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    mesh, torch_mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), native_mesh("cpu", (1,))
    ops = op_rows(options.rounds, mesh, torch_mesh)
    print(f"{'op, forward':16}{'plain':>10}{'ours adds':>12}{'PyTorch adds':>14}   (microseconds)")
    for row in ops:
        print(
            f"{row['op']:16}{row['plain']:10.2f}{row['ours'] - row['plain']:12.2f}{row[KINDS[2]] - row['plain']:14.2f}"
        )
    blocks = [block_row(options.rounds, mesh, torch_mesh, width, length) for width, length in ((64, 16), (256, 128))]
    print(f"\n{'block, forward and backward':28}{'plain':>10}{'ours':>8}{'PyTorch':>9}   (times plain)")
    for row in blocks:
        name = f"width {row['width']}, length {row['length']}"
        print(f"{name:28}{row['plain']:8} us{row['ours over plain']:8.2f}{row[f'{KINDS[2]} over plain']:9.2f}")
    dist.destroy_process_group()
    if options.out:
        about = {
            "date": datetime.date.today().isoformat(), "commit": options.commit or commit(), "digest": digest(watched=WATCHED), "watched": list(WATCHED),
            "device": "CPU, one thread", "torch": torch.__version__, "python": python_platform.python_version(), "unit": "microseconds, best of rounds",
        }  # fmt: skip
        options.out.write_text(json.dumps({**about, "ops": ops, "blocks": blocks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
