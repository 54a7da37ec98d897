"""What a save and a load take beside PyTorch's DCP, and what planning takes for a model that exists on paper alone.

    python benchmarks/checkpoints.py [--gib 0.25] [--rounds 7] [--folder .] [--paper] [--out x.json]

*Rates*: one process, and two on gloo that share a model by FSDP2. Ours and DCP take turns in the same folder; both sync what they write,
ours with all checksums, DCP has none; `raw` is one file of as many bytes, written from memory and synced, in the same round. Before each
round of loads the files are in the page cache. `blocks` is the share of a save in the background that the caller waits for, from the second
save on: the first one makes the memory. *Paper*: who writes what for a Llama of 410 B parameters with Adam, on 4,096 ranks, on one core.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch")

import numpy as np
import on_ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import hyper_parallel as hp

WATCHED = ("src/hyper_parallel/core/parallel/saving",)
WIDTH = 2048
PAPER = {"layers": 126, "width": 16384, "pp": 16, "dp": 32, "tp": 8}


def model_of(gib: float) -> nn.Module:
    torch.manual_seed(0)
    num = max(1, round(gib * 2**30 / (4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num)))
    if dist.is_initialized() and dist.get_world_size() > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def timed(call: Callable[[], object]) -> float:
    together()
    start = time.perf_counter()
    call()
    together()
    return time.perf_counter() - start


times: dict[str, list[float]] = {}


def note(name: str, call: Callable[[], object]) -> None:
    times.setdefault(name, []).append(timed(call))


def in_background(name: str, begin: Callable[[], Any], end: Callable[[Any], object]) -> None:
    together()
    start = time.perf_counter()
    going = begin()
    blocked = time.perf_counter() - start
    end(going)
    together()
    times.setdefault(f"{name} blocks", []).append(blocked / (time.perf_counter() - start))


def one_round(model: nn.Module, base: Path, number: int, num_bytes: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = {"model": model.state_dict()}
    ours, theirs = base / "ours", base / "dcp"

    def save_ours() -> None:
        note("ours save", lambda: hp.save(ours, model=model))

    def save_theirs() -> None:
        note("DCP save", lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(theirs, sync_files=True)))

    def load_ours() -> None:
        note("ours load", lambda: hp.load(ours, model=model))

    def load_theirs() -> None:
        note("DCP load", lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(theirs)))

    def back_ours() -> None:
        in_background("ours", lambda: hp.save(ours, model=model, background=True), lambda saving: saving.wait())

    def back_theirs() -> None:
        writer = dcp.FileSystemWriter(theirs, sync_files=True)
        in_background("DCP", lambda: dcp.async_save(state, storage_writer=writer), lambda future: future.result())

    def clear() -> None:
        together()
        if rank == 0:
            shutil.rmtree(base, ignore_errors=True)
            base.mkdir(parents=True)
        together()

    for first, second in ((save_ours, save_theirs), (load_ours, load_theirs), (back_ours, back_theirs)):
        if first is not load_ours:
            clear()
        for call in (first, second) if number % 2 else (second, first):
            call()
    clear()
    if rank == 0:
        raw_write(base / "raw", num_bytes)
    together()


def raw_write(path: Path, num_bytes: int) -> None:
    data = memoryview(np.ones(num_bytes, np.uint8))
    start = time.perf_counter()
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    for at in range(0, num_bytes, 1 << 22):
        os.write(descriptor, data[at : at + (1 << 22)])
    os.fsync(descriptor)
    os.close(descriptor)
    times.setdefault("raw write", []).append(time.perf_counter() - start)


def worker(folder: str, gib: float, rounds: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo")
    model = model_of(gib)
    num_bytes = sum(value.numel() * 4 for value in model.parameters())
    for number in range(rounds + 1):
        one_round(model, Path(folder), number, num_bytes)
    if not dist.is_initialized() or dist.get_rank() == 0:
        kept = {name: values[1:] for name, values in times.items()}  # the first round makes memory
        medians = {name: statistics.median(values) for name, values in kept.items()}
        row = {"ranks": dist.get_world_size() if dist.is_initialized() else 1, "gib": num_bytes / 2**30}
        for name, value in medians.items():
            key = name.replace(" ", "_")
            if name.endswith("blocks"):
                row[key] = value
            else:
                row[f"{key}_gib_s"] = row["gib"] / value
        # Ratios round by round, since the disk changes its mind from minute to minute.
        for what in ("save", "load"):
            pairs = zip(kept[f"DCP {what}"], kept[f"ours {what}"], strict=True)
            row[f"{what}_ratio"] = statistics.median(theirs / ours for theirs, ours in pairs)
        on_ranks.say(row)
    if dist.is_initialized():
        dist.destroy_process_group()


def run(num_ranks: int, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    arguments = ["--worker", folder, "--rounds", options.rounds, "--gib", options.gib]
    found: dict[str, Any] = on_ranks.run(__file__, num_ranks, arguments, has_launcher=num_ranks > 1)
    return found


def on_paper() -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from hyper_parallel.core.parallel.saving.writers import plan_writing, size_bytes
    from support.paper_models import described_model, plans_of_reading

    descriptions, description_of, shares = described_model(**PAPER)
    texts = [description.to_text() for description in descriptions]
    start = time.perf_counter()
    told = [type(descriptions[0]).from_text(text) for text in texts]
    plan = plan_writing(told, description_of)
    seconds = time.perf_counter() - start
    loads = [sum(size_bytes(plan.tensors[item.key].dtype, item.box.sizes) for item in items) for items in plan.items]
    return {
        **PAPER,
        "ranks": len(description_of),
        "parameters": sum(
            size_bytes(tensor.dtype, tensor.shape) // 2
            for key, tensor in plan.tensors.items()
            if key.startswith("model/")
        ),
        "items": sum(map(len, plan.items)),
        "planning_s": seconds,
        "most_written_of_share": max(load / share for load, share in zip(loads, shares, strict=True)),
        "most_read_of_share": max(plans_of_reading(plan, descriptions, description_of, every=97)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--folder", type=Path, default=Path(), help="Where to write: the disk that is measured.")
    parser.add_argument("--paper", action="store_true", help="Plan the large model as well.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.gib, options.rounds)
        return 0
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for num_ranks in options.ranks:
            row = run(num_ranks, options, str(Path(folder, "ckpt").resolve()))
            rows.append(row)
            print(f"{row['ranks']} ranks, {row['gib']:.2f} GiB; the disk writes {row['raw_write_gib_s']:.2f} GiB/s")
            for what in ("save", "load"):
                print(
                    f"  {what}: ours {row[f'ours_{what}_gib_s']:.2f}, DCP {row[f'DCP_{what}_gib_s']:.2f} GiB/s; {row[f'{what}_ratio']:.2f} times"
                )
            print(f"  a save in the background blocks {row['ours_blocks']:.1%}, DCP's {row['DCP_blocks']:.1%}")
    paper = on_paper() if options.paper else None
    if paper is not None:
        print(
            f"{paper['parameters'] / 1e9:.0f} B parameters on {paper['ranks']} ranks, {paper['items']} items: planned in {paper['planning_s']:.1f} s, "
            f"at most {paper['most_written_of_share']:.3f} of a share written, {paper['most_read_of_share']:.3f} read"
        )
    setting = {"rounds": options.rounds, "cores": os.cpu_count(), "gib": options.gib}
    on_ranks.write(options.out, WATCHED, setting, rows=rows, paper=paper)
    return 0


if __name__ == "__main__":
    sys.exit(main())
