"""A model too small to profit: what regions and wrappers cost the host. GPT-2 small, batch 1, where only Python and launches count.

    python benchmarks/small_model.py [--length 128] [--out x.json]

Modes take turns, so that all see the same machine; the best half of the rounds counts. Plans are made by hand here: every block has the same choices, so that one sees
what these cost the host. `--profile MODE` shows where the host's time goes. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import cProfile
import datetime
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from activation_modes import MATMULS, SELECTIVE, Mode, each, torch_checkpoint
from results_state import WATCHED, digest

import hyper_parallel as hp
from activation import commit
from hyper_parallel import policies as p
from hyper_parallel.core.planner.model.choices import RECOMPUTE, SAVE, SWAP
from hyper_parallel.core.planner.model.profile import ProfiledOp, StepProfile
from hyper_parallel.core.planner.plan.plan import MemoryPlan, Predicted
from hyper_parallel.core.planner.search.settings import Setting
from hyper_parallel.core.planner.solve.block import base_of
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel

MODES: dict[str, Mode | None] = {
    "plain": None,
    "swap_wrapper, nothing to swap": each(hp.swap_wrapper),
    "PyTorch selective, all matmuls": each(SELECTIVE),
    "region, the same list of ops": each(lambda block: hp.checkpoint_wrapper(block, policy_fn=MATMULS)),
    "region, save(matmuls)": each(lambda block: hp.checkpoint_wrapper(block, policy_fn=p.save(p.matmuls))),
    "PyTorch full checkpoint": each(torch_checkpoint),
    "region, recompute": each(hp.checkpoint_wrapper),
}


def is_matmul(op: ProfiledOp) -> bool:
    return any(word in op.name for word in ("mm", "attention"))


# What a plan keeps of an op; all else that can be is recomputed.
PLANS: dict[str, Callable[[ProfiledOp], str]] = {
    "plan, recompute but for one norm": lambda op: (
        SAVE if "layer_norm" in op.name and op.module == "ln_1" else RECOMPUTE
    ),
    "plan, save matmuls": lambda op: SAVE if is_matmul(op) else RECOMPUTE,
    "plan, save everything": lambda op: SAVE,
    "plan, swap matmuls": lambda op: SWAP if is_matmul(op) else RECOMPUTE,
}


def plan_by_hand(profile: StepProfile, choice: Callable[[ProfiledOp], str]) -> MemoryPlan:
    """Of what each op should do, what can be carried out. The last block swaps nothing."""
    decision = []
    for region in profile.regions:
        wanted = {index: choice(op) for index, op in enumerate(region.ops) if op.is_needed}
        base = base_of(region, frozenset(index for index, each in wanted.items() if each != RECOMPUTE), can_swap=True)
        free = {position for position, _ in base.free}
        positions = [index for index, each in wanted.items() if each == SWAP and index in free]
        is_last = region is profile.regions[-1]
        decision.append(base.swapping(positions) if positions and not is_last else base.decision)
    setting = Setting(2**30, 2**30)
    return MemoryPlan(profile, tuple(decision), setting, profile.peak_bytes, Predicted(profile.peak_bytes, 1.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--profile", metavar="MODE", help="show what the host does in this mode, and nothing else")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.profile not in (None, *MODES, *PLANS):
        parser.error(f"no such mode: {options.profile}; there are: {'; '.join([*MODES, *PLANS])}")
    with contextlib.ExitStack() as stack:
        if options.device == "cpu":
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(hp.configure_swap(disk_dir=directory))
        return run(options)


def run(options: argparse.Namespace) -> int:
    from transformers import GPT2Config, GPT2LMHeadModel  # here: others use the plans by hand without it

    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).to(options.device, dtype).train()
    ids = torch.randint(0, 50257, (1, options.length), device=options.device)
    wanted = [name for name in (*MODES, *PLANS) if options.profile in (None, name)]
    models = {name: copy.deepcopy(model) for name in wanted}
    profile = ProfiledModel(model, {"input_ids": ids, "labels": ids}).profile() if set(wanted) & PLANS.keys() else None
    for name in wanted:
        mode = MODES.get(name)
        if profile is not None and name in PLANS:
            plan_by_hand(profile, PLANS[name]).apply(models[name])
        elif mode is not None:
            for index, block in enumerate(mode(list(models[name].transformer.h))):
                models[name].transformer.h[index] = block
    if options.profile:
        show_profile(models[options.profile], ids)
        return 0
    times: dict[str, list[float]] = {name: [] for name in wanted}
    for number in range(options.rounds + 5):
        for name, each_model in models.items():
            ms = step(each_model, ids)
            if number >= 5:
                times[name].append(ms)
    best = {name: statistics.median(sorted(each)[: len(each) // 2]) for name, each in times.items()}
    rows = [{"mode": name, "step_ms": ms, "to_plain": ms / best["plain"]} for name, ms in best.items()]
    for row in rows:
        print(f"| {row['mode']} | {row['step_ms']:.2f} | {row['to_plain']:.3f} |")
    if options.out:
        result: dict[str, Any] = {
            "date": datetime.date.today().isoformat(), "commit": options.commit or commit(), "digest": digest(), "watched": list(WATCHED),
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "torch": torch.__version__,
            "setting": {"model": "GPT-2 small", "batch": 1, "length": options.length}, "rows": rows,
        }  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def show_profile(model: torch.nn.Module, ids: torch.Tensor) -> None:
    for _ in range(5):
        step(model, ids)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(10):
        step(model, ids)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def step(model: torch.nn.Module, ids: torch.Tensor) -> float:
    if ids.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    if ids.is_cuda:
        torch.cuda.synchronize()
    ms = (time.perf_counter() - begin) * 1e3
    model.zero_grad(set_to_none=False)
    return ms


if __name__ == "__main__":
    sys.exit(main())
