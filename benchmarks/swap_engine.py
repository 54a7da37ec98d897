"""Everything swapped, on one GPU, beside the plain run: how near to the bound that the link sets?

    python benchmarks/swap_engine.py [--blocks 16] [--out results.json]

The model: Llama-3-8B blocks (dim 4096, ffn 14336, 32 heads, 8 kv heads), sequence 8192, batch 2, bfloat16, random weights. The bound is
max(forward compute, bytes out / link) + max(backward compute, bytes in / link), with the link measured in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from results_state import ROOT, WATCHED, digest
from torch import nn

import hyper_parallel
from hyper_parallel.core.swap import engines
from hyper_parallel.core.swap.config import configure_swap
from hyper_parallel.platform.torch.activation_checkpoint import swap_wrapper

DIM, FFN, HEADS, KV_HEADS, HEAD = 4096, 14336, 32, 8, 128
GIB = 2**30


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.q, self.k = nn.Linear(DIM, DIM, **linear), nn.Linear(DIM, KV_HEADS * HEAD, **linear)
        self.v, self.o = nn.Linear(DIM, KV_HEADS * HEAD, **linear), nn.Linear(DIM, DIM, **linear)
        self.gate, self.up = nn.Linear(DIM, FFN, **linear), nn.Linear(DIM, FFN, **linear)
        self.down = nn.Linear(FFN, DIM, **linear)
        self.norm1 = nn.RMSNorm(DIM, device="cuda", dtype=torch.bfloat16)
        self.norm2 = nn.RMSNorm(DIM, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q = _rotate(self.q(h).view(batch, length, HEADS, HEAD), cos, sin).transpose(1, 2)
        k = _rotate(self.k(h).view(batch, length, KV_HEADS, HEAD), cos, sin).transpose(1, 2)
        v = self.v(h).view(batch, length, KV_HEADS, HEAD).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, DIM))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def run(blocks: list[nn.Module], inputs: tuple[torch.Tensor, ...], steps: int, warm: int) -> dict[str, float]:
    x, cos, sin = inputs
    times, forwards, peaks = [], [], []
    for step in range(warm + steps):
        torch.cuda.synchronize()
        before = engines.total_stats()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        h = x
        for block in blocks:
            h = block(h, cos, sin)
        loss = h.float().square().mean()
        del h
        middle.record()
        loss.backward()
        end.record()
        del loss
        torch.cuda.synchronize()
        if step >= warm:
            times.append(start.elapsed_time(end))
            forwards.append(start.elapsed_time(middle))
            peaks.append(torch.cuda.max_memory_allocated() - base)
    after = engines.total_stats()
    return {
        "step_ms": statistics.median(times), "forward_ms": statistics.median(forwards), "peak_gib": max(peaks) / GIB,
        "reserved_gib": torch.cuda.memory_reserved() / GIB,
        "out_gb": (after.offloaded_bytes - before.offloaded_bytes) / 1e9,
        "in_gb": (after.loaded_bytes - before.loaded_bytes) / 1e9,
        "late_loads": after.num_late_loads - before.num_late_loads,
        "window_waits": after.num_window_waits - before.num_window_waits,
        "load_stall_ms": after.load_stall_ms - before.load_stall_ms,
        "offload_stall_ms": after.offload_stall_ms - before.offload_stall_ms,
        "pinned_gib": sum(m.tier.reserved_bytes for m in engines.all_engines().values()) / GIB,
        "pinned_peak_used_gib": sum(m.tier.stats().peak_used_bytes for m in engines.all_engines().values()) / GIB,
    }  # fmt: skip


def link_gb_per_s() -> tuple[float, float]:
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    rates = []
    for target, source in ((host, device), (device, host)):
        times = []
        for _ in range(8):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        rates.append(2**28 / statistics.median(times) / 1e6)
    return rates[0], rates[1]


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    return done.stdout.strip() or "unknown"


def sources_digest() -> str | None:
    """Of the sources that were measured; None if they are not those of this checkout."""
    return digest() if Path(hyper_parallel.__file__).resolve().is_relative_to(ROOT) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device: it measures copies that overlap with compute.")
    torch.manual_seed(0)
    blocks = [LlamaBlock() for _ in range(options.blocks)]
    for block in blocks:
        for parameter in block.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            parameter.grad = torch.zeros_like(parameter)
    angle = torch.arange(options.length, device="cuda")[:, None] * 1e4 ** (-torch.arange(64, device="cuda") / 64)
    cos, sin = (f(angle).to(torch.bfloat16)[None, :, None] for f in (torch.cos, torch.sin))
    inputs = (torch.randn(options.batch, options.length, DIM, device="cuda", dtype=torch.bfloat16), cos, sin)
    out_rate, in_rate = link_gb_per_s()
    rows: list[dict[str, Any]] = [{"mode": "plain", **run(blocks, inputs, 5, 2)}]
    plain = rows[0]
    managed = [swap_wrapper(block) for block in blocks]
    for window, prefetch in (("1GiB", "1GiB"), ("512MiB", "1GiB"), ("1GiB", "2GiB")):
        torch.cuda.empty_cache()
        with configure_swap(window_bytes=window, prefetch_bytes=prefetch):
            row = {"mode": f"everything swapped, window {window}, prefetch {prefetch}", **run(managed, inputs, 3, 2)}
        backward_ms = plain["step_ms"] - plain["forward_ms"]
        row["bound_ms"] = max(plain["forward_ms"], row["out_gb"] * 1e3 / out_rate) + max(
            backward_ms, row["in_gb"] * 1e3 / in_rate
        )
        row["to_bound"] = row["step_ms"] / row["bound_ms"]
        rows.append(row)
    rows.append({"mode": "plain again", **run(blocks, inputs, 3, 1)})
    for row in rows:
        row["to_plain"], row["of_plain_peak"] = row["step_ms"] / plain["step_ms"], row["peak_gib"] / plain["peak_gib"]
    result = {
        "date": datetime.date.today().isoformat(), "commit": options.commit or commit(),
        "digest": sources_digest(), "watched": list(WATCHED),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "hyper_parallel": hyper_parallel.__version__, "link_out_gb_s": out_rate, "link_in_gb_s": in_rate,
        "setting": {"blocks": options.blocks, "length": options.length, "batch": options.batch}, "rows": rows,
    }  # fmt: skip
    print(table(result))
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)


def table(result: dict[str, Any]) -> str:
    lines = [f"link {result['link_out_gb_s']:.1f} GB/s out, {result['link_in_gb_s']:.1f} GB/s in"]
    lines += [
        "| mode | step ms | to plain | to bound | peak GiB | of plain | moved GB | late | waits | stall ms in / out | pinned / used GiB |",
        "|" + "---|" * 11,
    ]
    for row in result["rows"]:
        bound = f"{row['to_bound']:.3f}" if "to_bound" in row else ""
        lines.append(
            f"| {row['mode']} | {row['step_ms']:.0f} | {row['to_plain']:.2f} | {bound} | {row['peak_gib']:.1f} "
            f"| {row['of_plain_peak']:.0%} | {row['out_gb']:.1f} / {row['in_gb']:.1f} | {row['late_loads']} | {row['window_waits']} "
            f"| {row['load_stall_ms']:.0f} / {row['offload_stall_ms']:.0f} | {row['pinned_gib']:.1f} / {row['pinned_peak_used_gib']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
