"""Ours beside every peer: activation peak and step time of one model, in one run.

    python benchmarks/activation.py                      on a GPU: 16 Llama-3-8B blocks, sequence 8192, batch 2, bfloat16
    python benchmarks/activation.py --device cpu         a small model, swapped to files
    python benchmarks/activation.py --only plain,swap    some of the modes
    python benchmarks/activation.py --check              gradients of every mode against plain ones, bit for bit

Each mode is measured beside a plain run of its own (before and after); the median of the steps counts. Peak: allocated bytes
above what is there when a step begins, with gradients allocated. `--out` writes JSON, and a Markdown table beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from llama_blocks import H200, SMALL, Llama, make
from results_state import ROOT, WATCHED, digest
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hyper_parallel as hp
from hyper_parallel import policies as p

GIB = 2**30
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
# The block's tensors, by the ops that make them; by hand, until a plan does it.
GATE, UP, V = (p.matmuls & p.in_module(f"**.{name}") for name in ("gate", "up", "v"))
ROTATED = p.ops("aten.cat")


def _is_after_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return bool(ctx.occurrence == 2)  # the rotations add twice, then attention is added to its input


AFTER_ATTENTION = p.ops("aten.add") & _is_after_attention

# -- modes: each wraps the blocks of a model ------------------------------------------------------------------------------


class Called(nn.Module):
    """A block that is called through a function."""

    def __init__(self, block: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.call = block, call

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.call(self.block, *args)


def every_other_matmul() -> Callable[..., Any]:
    """What torchtitan saves: attention, and every other matmul. Forward and recomputation count apart."""
    counts: dict[bool, int] = {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in MATMULS:
            counts[ctx.is_recompute] += 1
        save = op in ATTENTION or (op in MATMULS and counts[ctx.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def torch_checkpoint(block: nn.Module, **options: Any) -> nn.Module:
    return Called(block, functools.partial(checkpoint, use_reentrant=False, **options))


def titan_contexts() -> Any:
    return create_selective_checkpoint_contexts(every_other_matmul())


def save_on_cpu(block: nn.Module) -> nn.Module:
    def call(block: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return block(*args)

    return Called(block, call)


def torchtune_offload(block: nn.Module) -> nn.Module:
    from torchtune.training import OffloadActivations  # type: ignore[import-not-found]

    def call(block: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        with OffloadActivations():
            return block(*args)

    return Called(block, call)


PEERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "PyTorch full checkpoint": torch_checkpoint,
    "PyTorch selective, all matmuls": functools.partial(
        torch_checkpoint, context_fn=functools.partial(create_selective_checkpoint_contexts, MATMULS)
    ),
    "PyTorch selective, as torchtitan": functools.partial(torch_checkpoint, context_fn=titan_contexts),
    "PyTorch save_on_cpu, pinned": save_on_cpu,
    "torchtune offload": torchtune_offload,
    "torchtune offload over checkpoint": lambda block: torchtune_offload(torch_checkpoint(block)),
}
OURS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "recompute": hp.checkpoint_wrapper,
    "recompute, inputs swapped": functools.partial(hp.checkpoint_wrapper, swap_inputs=True),
    "save matmuls": functools.partial(hp.checkpoint_wrapper, policy_fn=p.save(p.matmuls)),
    "mix: swap gate and attention, save matmuls": functools.partial(
        hp.checkpoint_wrapper, policy_fn=p.choose(p.swap(GATE | p.attention), p.save(p.matmuls))
    ),
    "mix for 42 %": functools.partial(
        hp.checkpoint_wrapper,
        policy_fn=p.choose(p.swap(GATE | p.attention), p.save(UP | V | ROTATED | AFTER_ATTENTION)),
    ),
    "mix for 16 %": functools.partial(hp.checkpoint_wrapper, policy_fn=p.swap(GATE | p.attention | V | ROTATED)),
    "mix for 11 %": functools.partial(
        hp.checkpoint_wrapper, policy_fn=p.swap(p.attention | V | ROTATED), swap_inputs=True
    ),
    "everything swapped": hp.swap_wrapper,
}
COMPILE_BUDGETS = (0.7, 0.5, 0.3, 0.1, 0.0)


@contextlib.contextmanager
def applied(model: Llama, wrap: Callable[[nn.Module], nn.Module] | None) -> Iterator[None]:
    """The model with its blocks wrapped, until the end of the block."""
    plain = list(model.blocks)
    if wrap is not None:
        for index, block in enumerate(plain):
            model.blocks[index] = wrap(block)
    try:
        yield
    finally:
        for index, block in enumerate(plain):
            model.blocks[index] = block


@contextlib.contextmanager
def compiled(model: Llama, budget: float) -> Iterator[None]:
    import torch._functorch.config

    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget), applied(model, torch.compile):
        yield
    torch._dynamo.reset()


# -- measuring -------------------------------------------------------------------------------------------------------------


class Meter:
    """Times and peaks of one device."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"

    def step(self, model: Llama, x: torch.Tensor) -> dict[str, float]:
        if not self.is_cuda:
            begin = time.perf_counter()
            loss = model(x)
            middle = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            return {"step_ms": (end - begin) * 1e3, "forward_ms": (middle - begin) * 1e3, "peak_bytes": 0}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begin.record()
        loss = model(x)
        middle.record()
        loss.backward()
        end.record()
        del loss
        torch.cuda.synchronize()
        return {
            "step_ms": begin.elapsed_time(end),
            "forward_ms": begin.elapsed_time(middle),
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
        }

    def peak_on_cpu(self, model: Llama, x: torch.Tensor) -> int:
        """From the profiler's allocator events, which are exact."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
            model(x).backward()
        total = peak = 0
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            total += event.nbytes()
            peak = max(peak, total)
        return peak


def measure(meter: Meter, model: Llama, x: torch.Tensor, steps: int, warm: int) -> dict[str, Any]:
    for _ in range(warm):
        meter.step(model, x)
    if meter.is_cuda:
        torch.cuda.empty_cache()
        meter.step(model, x)
    before = hp.SwapManager().stats()
    rows = [meter.step(model, x) for _ in range(steps)]
    after = hp.SwapManager().stats()
    each = {name: (after[name] - before[name]) / steps for name in after if isinstance(after[name], (int, float))}
    peak = max(row["peak_bytes"] for row in rows) if meter.is_cuda else meter.peak_on_cpu(model, x)
    return {
        "step_ms": statistics.median(row["step_ms"] for row in rows),
        "forward_ms": statistics.median(row["forward_ms"] for row in rows),
        "peak_gib": peak / GIB,
        "reserved_gib": torch.cuda.memory_reserved() / GIB if meter.is_cuda else 0.0,
        "out_gb": each["offloaded_bytes"] / 1e9,
        "in_gb": each["loaded_bytes"] / 1e9,
        "late_loads": each["num_late_loads"],
        "load_stall_ms": each["load_stall_ms"],
        "offload_stall_ms": each["offload_stall_ms"],
        "pinned_gib": after["pool_reserved_bytes"]["host"] / GIB,
    }


def link_gb_per_s() -> tuple[float, float]:
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    rates = []
    for target, source in ((host, device), (device, host)):
        times = []
        for _ in range(8):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        rates.append(2**28 / statistics.median(times) / 1e6)
    return rates[0], rates[1]


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    model, x = make(options.shape, options.device, options.dtype)
    meter = Meter(options.device)
    rows: list[dict[str, Any]] = []

    def add(mode: str, kind: str, context: Any) -> None:
        if options.only and not any(text in mode for text in options.only):
            return
        if options.deadline and time.monotonic() > options.deadline:
            rows.append({"mode": mode, "kind": kind, "skipped": "no time left"})
            return
        try:
            with context():
                row = measure(meter, model, x, options.steps, options.warm)
        except ImportError as error:
            row = {"skipped": f"{error.name} is not installed"}
        except torch.OutOfMemoryError:
            row = {"skipped": "out of memory"}
        gc.collect()
        rows.append({"mode": mode, "kind": kind, **row})
        print(line(rows[-1], rows), flush=True)

    print("\n".join(header()), flush=True)
    add("plain", "plain", contextlib.nullcontext)
    for mode, wrap in OURS.items():
        add(mode, "ours", functools.partial(applied, model, wrap))
    for mode, wrap in PEERS.items():
        add(mode, "peer", functools.partial(applied, model, wrap))
    add("plain again", "plain", contextlib.nullcontext)
    if options.compile:
        add("torch.compile, no budget", "peer", functools.partial(compiled, model, 1.0))
        for budget in COMPILE_BUDGETS:
            add(f"torch.compile, budget {budget}", "peer", functools.partial(compiled, model, budget))
    return rows


def check_gradients(options: argparse.Namespace) -> list[tuple[str, bool]]:
    """Whether each mode gives the gradients of the plain run, with deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    shape = options.shape._replace(blocks=min(options.shape.blocks, 4))
    model, x = make(shape, options.device, options.dtype)

    def gradients() -> list[torch.Tensor]:
        for parameter in model.parameters():
            parameter.grad.zero_()
        model(x).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    results = []
    for mode, wrap in OURS.items():
        with applied(model, wrap):
            same = all(torch.equal(a, b) for _ in range(3) for a, b in zip(plain, gradients(), strict=True))
        results.append((mode, same))
        print(f"{'equal    ' if same else 'DIFFERENT'} {mode}", flush=True)
    return results


# -- showing ---------------------------------------------------------------------------------------------------------------


def header() -> list[str]:
    columns = [
        "mode",
        "step ms",
        "to plain",
        "peak GiB",
        "of plain",
        "reserved GiB",
        "pinned GiB",
        "out / in GB",
        "stall in / out ms",
    ]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]


def line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    if "skipped" in row:
        return f"| {row['mode']} | {row['skipped']} |" + " |" * 7
    plain = next((each for each in rows if each["mode"] == "plain"), row)
    return (
        f"| {row['mode']} | {row['step_ms']:.0f} | {row['step_ms'] / plain['step_ms']:.3f} | {row['peak_gib']:.2f} "
        f"| {row['peak_gib'] / plain['peak_gib']:.1%} | {row['reserved_gib']:.1f} | {row['pinned_gib']:.1f} "
        f"| {row['out_gb']:.2f} / {row['in_gb']:.2f} | {row['load_stall_ms']:.1f} / {row['offload_stall_ms']:.1f} |"
    )


def markdown(result: dict[str, Any]) -> str:
    link = result.get("link_gb_s")
    lines = [
        f"# Activation memory, {result['device']}", "",
        f"{result['date']}, commit {result['commit']}, digest {result['digest']}, PyTorch {result['torch']}, Python {result['python']}.",
        f"Setting: {result['setting']}." + (f" Link: {link[0]:.1f} GB/s out, {link[1]:.1f} GB/s in." if link else ""), "",
        *header(), *(line(row, result["rows"]) for row in result["rows"]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    return done.stdout.strip() or "unknown"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--compile", action="store_true", help="measure torch.compile's memory budgets, too")
    parser.add_argument("--check", action="store_true", help="compare gradients instead of measuring")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9, help="modes that would begin later are left out")
    parser.add_argument("--commit", help="what is measured, where there is no git")
    parser.add_argument("--out", type=Path)
    for name in ("blocks", "length", "batch"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args(arguments)
    base = H200 if options.device == "cuda" else SMALL
    changed = {name: getattr(options, name) for name in ("blocks", "length", "batch") if getattr(options, name)}
    options.shape = base._replace(**changed)
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    options.deadline = time.monotonic() + options.minutes * 60
    return options


def main() -> int:
    options = parse()
    with contextlib.ExitStack() as stack:
        if options.device == "cpu":
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            # Small, as the model is: a window of the default size would hold all of it.
            stack.enter_context(hp.configure_swap(disk_dir=directory, window_bytes="4MiB", prefetch_bytes="4MiB"))
        if options.check:
            return 0 if all(same for _, same in check_gradients(options)) else 1
        rows = run_all(options)
        result = {
            "date": datetime.date.today().isoformat(), "commit": options.commit or commit(),
            "digest": digest() if Path(hp.__file__).resolve().is_relative_to(ROOT) else None, "watched": list(WATCHED),
            "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
            "torch": torch.__version__, "python": platform.python_version(), "hyper_parallel": hp.__version__,
            "setting": options.shape._asdict(), "rows": rows,
            "link_gb_s": link_gb_per_s() if options.device == "cuda" else None,
        }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
