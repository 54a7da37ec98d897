"""Plans beside what really happens: predicted and measured peak and step time at several budgets.

    python benchmarks/planner.py                                     on a GPU: 16 Llama-3-8B blocks, sequence 8192, batch 2
    python benchmarks/planner.py --device cpu                        a small model, swapped to files
    python benchmarks/planner.py --budgets 42,30,16,10 --out x.json  percent of the plain activation peak

Every time is measured beside a plain one of its own, before and after; the median of the steps counts.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from llama_blocks import H200, SMALL, make
from results_state import ROOT, WATCHED, digest

import hyper_parallel as hp
from activation import Meter, commit, measure

GIB = 2**30
COLUMNS = [
    "budget", "predicted peak", "real peak", "of plain", "predicted time", "real time", "to plain", "solve and prove s", "swapped GB",
    "recompute ms", "window / prefetch MiB",
]  # fmt: skip


class Said:
    """Prints what planning does, and when."""

    def __init__(self, is_verbose: bool) -> None:
        self._is_verbose = is_verbose
        self._begin = time.perf_counter()

    def __call__(self, what: str) -> None:
        if self._is_verbose:
            print(f"{time.perf_counter() - self._begin:6.1f} s  {what}", flush=True)


def run(options: argparse.Namespace) -> None:
    model, x = make(options.shape, options.device, options.dtype)
    meter = Meter(options.device)
    plain = measure(meter, model, x, options.steps, options.warm)
    print(f"plain: {plain['step_ms']:.1f} ms, {plain['peak_gib']:.3f} GiB", flush=True)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    rows = []
    for budget in options.budgets:
        begin = time.perf_counter()
        try:
            plan = hp.plan_memory(model, x, budget=f"{budget}%", progress=Said(options.verbose))
        except hp.BudgetError as error:
            rows.append({"budget": budget, "error": str(error)})
            write(options, plain, rows)
            print(f"| {budget}% | {str(error).splitlines()} |", flush=True)
            continue
        seconds = time.perf_counter() - begin
        if options.plans:
            plan.save(options.plans / f"plan_{budget:g}.json")
        before = measure(meter, model, x, 3, 1)
        plan.apply(model)
        real = measure(meter, model, x, options.steps, options.warm)
        plan.remove(model)
        again = measure(meter, model, x, 3, 1)
        beside = (before["step_ms"] + again["step_ms"]) / 2
        base = plan.base_bytes
        row = {
            "budget": budget, "predicted_peak_gib": (plan.predicted.peak_bytes - base) / GIB, "peak_gib": real["peak_gib"],
            "predicted_ratio": plan.predicted.step_ms / plan.profile.step_ms, "ratio": real["step_ms"] / beside, "seconds": seconds,
            "step_ms": real["step_ms"], "plain_step_ms": beside, "plain_peak_gib": plain["peak_gib"], "out_gb": real["out_gb"],
            "load_stall_ms": real["load_stall_ms"], "offload_stall_ms": real["offload_stall_ms"],
            "setting": plan.setting._asdict(), "plan": str(plan),
        }  # fmt: skip
        rows.append(row)
        write(options, plain, rows)
        recompute = sum(
            op.forward_ms
            for region, decision in zip(plan.profile.regions, plan.decision, strict=True)
            for op, choice in zip(region.ops, decision.ops, strict=True)
            if choice == "recompute"
        )
        cells = [
            f"{budget}%", f"{row['predicted_peak_gib']:.3f}", f"{row['peak_gib']:.3f}", f"{row['peak_gib'] / plain['peak_gib']:.1%}",
            f"{row['predicted_ratio']:.3f}", f"{real['step_ms']:.1f}", f"{row['ratio']:.3f}", f"{seconds:.1f}", f"{real['out_gb']:.2f}",
            f"{recompute:.1f}", f"{plan.setting.window_bytes >> 20} / {plan.setting.prefetch_bytes >> 20}",
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |", flush=True)
        if options.verbose:
            print(plan, f"stalls {real['load_stall_ms']:.1f} in, {real['offload_stall_ms']:.1f} out", flush=True)


def write(options: argparse.Namespace, plain: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """After each row: what was measured stays, whatever happens to the rest."""
    if not options.out:
        return
    result = {
        "plain": plain, "rows": rows, "date": datetime.date.today().isoformat(), "commit": options.commit or commit(),
        "digest": digest() if Path(hp.__file__).resolve().is_relative_to(ROOT) else None, "watched": list(WATCHED),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "torch": torch.__version__, "setting": options.shape._asdict(),
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--budgets", type=lambda text: [float(each) for each in text.split(",")], default=[42, 30, 16, 10]
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plans", type=Path, help="a folder for the plans themselves")
    for name in ("blocks", "length", "batch"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    base = H200 if options.device == "cuda" else SMALL
    changed = {name: getattr(options, name) for name in ("blocks", "length", "batch") if getattr(options, name)}
    options.shape = base._replace(**changed)
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with contextlib.ExitStack() as stack:
        if options.device == "cpu":
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(hp.configure_swap(disk_dir=directory))
        run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
