"""Ours beside every peer: activation peak and step time of one model, in one run.

    python benchmarks/activation.py                      on a GPU: 16 Llama-3-8B blocks, sequence 8192, batch 2, bfloat16
    python benchmarks/activation.py --device cpu         a small model, swapped to files
    python benchmarks/activation.py --only plain,swap    some of the modes
    python benchmarks/activation.py --only mix --add x.json    the others as they are in an earlier file, if the sources are the same
    python benchmarks/activation.py --check              only compare gradients of our modes with plain ones, bit for bit

Steps of a mode and plain ones take turns, and the medians of the two are compared: clocks of a GPU drift with its temperature, and follow what it draws. Peak: allocated bytes above what is there when a step begins, with
gradients allocated. "To bound": against max(forward compute, bytes out / link) + max(backward compute, bytes in / link), what a perfect
overlap would take. "Pinned later": pinned host memory that was allocated after the second step of the mode. "Gradients": compared in a process of its own, with deterministic algorithms. `--out` writes JSON, and a Markdown table
beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from activation_modes import COMPILE_BUDGETS, OURS, OURS_LONG, PEERS, Mode, each
from llama_blocks import H200, SMALL, Llama, make
from results_state import ROOT, WATCHED, digest, earlier_results

import hyper_parallel as hp
from hyper_parallel.platform.torch.planner.meters import CpuMemory

GIB = 2**30
FULL = "PyTorch full checkpoint"
LONG = 16384  # from this length on, modes for long sequences are measured, too


@contextlib.contextmanager
def applied(model: Llama, mode: Mode | None) -> Iterator[None]:
    """The model with its blocks wrapped, until the end of the `with` block."""
    plain = list(model.blocks)
    window = getattr(mode, "window", None) if torch.cuda.is_available() else None  # it is of the size that a GPU runs
    setting = contextlib.nullcontext() if window is None else hp.configure_swap(window_bytes=window)
    if mode is not None:
        put(model, mode(plain))
    try:
        with setting:
            yield
    finally:
        put(model, plain)


def put(model: Llama, blocks: Sequence[torch.nn.Module]) -> None:
    """Other blocks in place of the model's."""
    for index, block in enumerate(blocks):
        model.blocks[index] = block


@contextlib.contextmanager
def under(plan: hp.MemoryPlan, model: torch.nn.Module) -> Iterator[None]:
    plan.apply(model)
    try:
        yield
    finally:
        plan.remove(model)


@contextlib.contextmanager
def compiled(model: Llama, budget: float) -> Iterator[None]:
    import torch._functorch.config

    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget), applied(model, each(torch.compile)):
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
        memory = CpuMemory()
        with memory.running():
            memory.mark("step")
            model(x).backward()
        return memory.spans()[0].peak_bytes


def measure(
    meter: Meter, model: Llama, x: torch.Tensor, steps: int, warm: int, plain_step: Callable[[], float] | None = None
) -> dict[str, Any]:
    """The model as it is now; with `plain_step`, which takes turns with it, also `plain_ms`."""
    pinned_bytes = 0
    for number in range(warm):
        meter.step(model, x)
        if number < 2:
            pinned_bytes = hp.SwapManager().stats()["pool_reserved_bytes"]["host"]
    if meter.is_cuda:
        torch.cuda.empty_cache()
        meter.step(model, x)
    reserved_bytes = torch.cuda.memory_reserved() if meter.is_cuda else 0
    before = hp.SwapManager().stats()
    rows, plain_ms = [], []
    for _ in range(steps):
        if plain_step is not None:
            plain_ms.append(plain_step())
        rows.append(meter.step(model, x))
    after = hp.SwapManager().stats()
    each = {name: (after[name] - before[name]) / steps for name in after if isinstance(after[name], (int, float))}
    peak = max(row["peak_bytes"] for row in rows) if meter.is_cuda else meter.peak_on_cpu(model, x)
    return {
        "step_ms": statistics.median(row["step_ms"] for row in rows),
        "forward_ms": statistics.median(row["forward_ms"] for row in rows),
        "peak_gib": peak / GIB,
        "reserved_gib": reserved_bytes / GIB,
        "out_gb": each["offloaded_bytes"] / 1e9,
        "in_gb": each["loaded_bytes"] / 1e9,
        "late_loads": each["num_late_loads"],
        "load_stall_ms": each["load_stall_ms"],
        "offload_stall_ms": each["offload_stall_ms"],
        "pinned_gib": after["pool_reserved_bytes"]["host"] / GIB,
        "pinned_later_gib": (after["pool_reserved_bytes"]["host"] - pinned_bytes) / GIB,
        **({"plain_ms": statistics.median(plain_ms)} if plain_ms else {}),
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


def ours(options: argparse.Namespace) -> dict[str, Mode]:
    return {**OURS, **(OURS_LONG if options.shape.length >= LONG else {})}


def run_all(options: argparse.Namespace, rows: list[dict[str, Any]]) -> Iterator[None]:
    """Fills `rows`, and gives way after each."""
    model, x = make(options.shape, options.device, options.dtype)
    meter = Meter(options.device)
    originals = list(model.blocks)

    def plain_step() -> float:
        wrapped = list(model.blocks)
        put(model, originals)
        try:
            return meter.step(model, x)["step_ms"]
        finally:
            put(model, wrapped)

    def add(name: str, kind: str, context: Any) -> None:
        if options.only and not any(text in name for text in options.only):
            return
        if options.deadline and time.monotonic() > options.deadline:
            rows.append({"mode": name, "kind": kind, "skipped": "no time left"})
            return
        try:
            with context():
                fits = any(each["mode"] == "plain" and "step_ms" in each for each in rows)
                beside = plain_step if fits and kind != "plain" else None
                row = measure(meter, model, x, options.steps, options.warm, beside)
        except ImportError as error:
            row = {"skipped": f"{error.name} is not installed"}
        except torch.OutOfMemoryError:
            row = {"skipped": "out of memory"}
        gc.collect()
        rows.append({"mode": name, "kind": kind, **row})
        print(line(rows[-1], rows), flush=True)

    print("\n".join(header()), flush=True)
    for name, kind, context in ways(options, model):
        add(name, kind, context)
        yield


def ways(options: argparse.Namespace, model: Llama) -> Iterator[tuple[str, str, Any]]:
    """Name, kind and context of what is measured, in order."""
    yield "plain", "plain", contextlib.nullcontext
    for name, mode in ours(options).items():
        yield name, "ours", functools.partial(applied, model, mode)
        if name == "recompute, inputs swapped":  # which is compared with it, so right beside it
            yield FULL, "peer", functools.partial(applied, model, PEERS[FULL])
    for name, mode in PEERS.items():
        if name != FULL:
            yield name, "peer", functools.partial(applied, model, mode)
    yield "plain again", "plain", contextlib.nullcontext
    if options.compile:
        yield "torch.compile, no budget", "peer", functools.partial(compiled, model, 1.0)
        for budget in COMPILE_BUDGETS:
            yield f"torch.compile, budget {budget}", "peer", functools.partial(compiled, model, budget)


def add_bounds(rows: list[dict[str, Any]], link: tuple[float, float] | None) -> None:
    """How near each mode that swaps is to a perfect overlap of compute and copies."""
    plain = next((row for row in rows if row["mode"] == "plain"), None)
    if link is None or plain is None:
        return
    for row in rows:
        if row.get("out_gb", 0) > 0:
            drift = row.get("plain_ms", plain["step_ms"]) / plain["step_ms"]
            forward_ms, backward_ms = plain["forward_ms"] * drift, (plain["step_ms"] - plain["forward_ms"]) * drift
            out_ms, in_ms = row["out_gb"] / link[0] * 1e3, row["in_gb"] / link[1] * 1e3
            row["to_bound"] = row["step_ms"] / (max(forward_ms, out_ms) + max(backward_ms, in_ms))


def add_gradients(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Compare gradients in a second process: deterministic algorithms would change what is measured here."""
    shape = [f"--{name}={getattr(options.shape, name)}" for name in ("blocks", "length", "batch")]
    command = [sys.executable, __file__, "--check", f"--device={options.device}", *shape]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    found = dict(
        line.split(" ", 1)[::-1] for line in done.stdout.splitlines() if line.startswith(("equal ", "DIFFERENT "))
    )
    for row in rows:
        if row["mode"] in found:
            row["gradients"] = found[row["mode"]]


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
    for name, mode in ours(options).items():
        with applied(model, mode):
            same = all(torch.equal(a, b) for _ in range(3) for a, b in zip(plain, gradients(), strict=True))
        results.append((name, same))
        print(f"{'equal' if same else 'DIFFERENT'} {name}", flush=True)
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
        "pinned later",
        "out / in GB",
        "stall in / out ms",
        "to bound",
        "gradients",
    ]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]


def line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    if "skipped" in row:
        return f"| {row['mode']} | {row['skipped']} |" + " |" * 10
    plain = next((each for each in rows if each["mode"] == "plain"), row)
    name = f"{row['mode']} ({row['commit']})" if "commit" in row else row["mode"]
    return (
        f"| {name} | {row['step_ms']:.0f} | {row['step_ms'] / row.get('plain_ms', plain['step_ms']):.3f} | {row['peak_gib']:.2f} "
        f"| {row['peak_gib'] / plain['peak_gib']:.1%} | {row['reserved_gib']:.1f} | {row['pinned_gib']:.1f} | {row.get('pinned_later_gib', 0):.1f} "
        f"| {row['out_gb']:.2f} / {row['in_gb']:.2f} | {row['load_stall_ms']:.1f} / {row['offload_stall_ms']:.1f} "
        f"| {'' if row.get('to_bound') is None else format(row['to_bound'], '.3f')} | {row.get('gradients', '')} |"
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
    parser.add_argument("--no-check", action="store_true", help="leave the comparison of gradients out")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9, help="modes that would begin later are left out")
    parser.add_argument("--commit", help="what is measured, where there is no git")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", type=Path, help="a file with rows of other modes to keep")
    parser.add_argument("--window", help="window_bytes of configure_swap")
    parser.add_argument("--prefetch", help="prefetch_bytes of configure_swap")
    for name in ("blocks", "length", "batch"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args(arguments)
    base = H200 if options.device == "cuda" else SMALL
    changed = {name: getattr(options, name) for name in ("blocks", "length", "batch") if getattr(options, name)}
    options.shape = base._replace(**changed)
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    options.deadline = time.monotonic() + options.minutes * 60
    return options


def with_earlier(rows: list[dict[str, Any]], earlier: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, and those of an earlier file for modes that have none; in the order of that file.

    Gradients that were equal there are so here: the sources are the same.
    """
    now = {row["mode"]: row for row in rows}
    kept = []
    for row in earlier["rows"]:
        mine = now.pop(row["mode"], None)
        about = {name: row[name] for name in ("gradients",) if name in row}
        kept.append({"commit": earlier["commit"], **row} if mine is None else {**about, **mine})
    return [*kept, *now.values()]


def head(options: argparse.Namespace) -> dict[str, Any]:
    """What is measured, and with what."""
    return {
        "date": datetime.date.today().isoformat(), "commit": options.commit or commit(),
        "digest": digest() if Path(hp.__file__).resolve().is_relative_to(ROOT) else None, "watched": list(WATCHED),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "torch": torch.__version__, "python": platform.python_version(), "hyper_parallel": hp.__version__,
        "setting": options.shape._asdict(),
    }  # fmt: skip


def write(
    options: argparse.Namespace, rows: list[dict[str, Any]], link: tuple[float, float] | None, earlier: Any
) -> None:
    if not options.out:
        return
    result = {
        **head(options),
        "rows": rows if earlier is None else with_earlier(rows, earlier),
        "link_gb_s": link,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(markdown(result))


def main() -> int:
    options = parse()
    with contextlib.ExitStack() as stack:
        if options.device == "cpu":
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            # Small, as the model is: a window of the default size would hold all of it.
            stack.enter_context(hp.configure_swap(disk_dir=directory, window_bytes="4MiB", prefetch_bytes="4MiB"))
        else:
            stack.enter_context(hp.configure_swap(window_bytes=options.window, prefetch_bytes=options.prefetch))
        if options.check:
            return 0 if all(same for _, same in check_gradients(options)) else 1
        names = ("digest", "device", "torch", "setting")
        earlier = earlier_results(options.add, head(options), names) if options.add else None
        rows: list[dict[str, Any]] = []
        link = link_gb_per_s() if options.device == "cuda" else None
        for _ in run_all(options, rows):  # what is cut short leaves what it has
            add_bounds(rows, link)
            write(options, rows, link, earlier)
        if not options.no_check:
            add_gradients(rows, options)
            print("\n".join([*header(), *(line(row, rows) for row in rows)]), flush=True)
        write(options, rows, link, earlier)
    return 0


if __name__ == "__main__":
    sys.exit(main())
