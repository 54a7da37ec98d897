"""A model too small to profit: what regions and wrappers cost the host. GPT-2 small, batch 1, where only Python and launches count.

    python benchmarks/small_model.py [--length 128] [--out x.json]

Modes take turns, so that all see the same machine; the best half of the rounds counts. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from activation_modes import MATMULS, SELECTIVE, Mode, each, torch_checkpoint
from results_state import WATCHED, digest
from transformers import GPT2Config, GPT2LMHeadModel

import hyper_parallel as hp
from activation import commit
from hyper_parallel import policies as p

MODES: dict[str, Mode | None] = {
    "plain": None,
    "swap_wrapper, nothing to swap": each(hp.swap_wrapper),
    "PyTorch selective, all matmuls": each(SELECTIVE),
    "region, the same list of ops": each(lambda block: hp.checkpoint_wrapper(block, policy_fn=MATMULS)),
    "region, save(matmuls)": each(lambda block: hp.checkpoint_wrapper(block, policy_fn=p.save(p.matmuls))),
    "PyTorch full checkpoint": each(torch_checkpoint),
    "region, recompute": each(hp.checkpoint_wrapper),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).to(options.device, dtype).train()
    ids = torch.randint(0, 50257, (1, options.length), device=options.device)
    models = {name: copy.deepcopy(model) for name in MODES}
    for name, mode in MODES.items():
        if mode is not None:
            for index, block in enumerate(mode(list(models[name].transformer.h))):
                models[name].transformer.h[index] = block
    times: dict[str, list[float]] = {name: [] for name in MODES}
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
