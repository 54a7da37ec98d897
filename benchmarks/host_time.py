"""What a step costs the host, counted: calls of Python functions, and objects that a forward leaves for backward.

    python benchmarks/host_time.py                  the table: counters, and times by turns, which are for looking only
    python benchmarks/host_time.py --rounds 0       counters only
    python benchmarks/host_time.py --store          keep the counters in `results/host_counters.json`, with which
                                                    `tests/package/test_host_counters.py` compares the code of today

The model is twelve small transformer blocks on a CPU. Its tensors are so small that a step is nearly all Python.
Counters are the same on every machine that has the same Python and the same PyTorch. So a change that should cost
nothing can be held to 1 %, where times of the host differ by 10 % from minute to minute. What is counted of one step,
after some steps to warm up:

    forward, backward   calls of functions, written in Python ("call") or in C ("c_call"), as `sys.setprofile` reports
                        them, in the main thread; a backward on a CPU runs there, too
    objects             what the garbage collector tracks at the end of forward and did not at its start: what
                        collections go through

Files that tensors are swapped to are written and read by threads, and who is first differs from run to run. So while
steps are counted, the main thread waits for every job of such a thread as soon as it is launched, and neither the job
nor its launch counts.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import functools
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from activation_modes import SELECTIVE, Mode, each
from results_state import ROOT, WATCHED, digest
from small_model import is_matmul, plan_by_hand
from torch import nn

import hyper_parallel as hp
from activation import commit
from hyper_parallel import policies as p
from hyper_parallel.core.planner.model.choices import RECOMPUTE, SWAP
from hyper_parallel.core.planner.model.profile import ProfiledOp
from hyper_parallel.core.swap.disk_stream import DiskStream
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel

STORED = ROOT / "benchmarks" / "results" / "host_counters.json"
NUM_BLOCKS, DIM, NUM_HEADS, BATCH, LENGTH = 12, 64, 4, 2, 16
NUM_WARM = 3  # steps: the first look at everything, and what they learned is used from the third on
NUM_COUNTED = 3

MODES: dict[str, Mode] = {
    "PyTorch selective, all matmuls": each(SELECTIVE),
    "region, recompute": each(hp.checkpoint_wrapper),
    "region, save(matmuls)": each(functools.partial(hp.checkpoint_wrapper, policy_fn=p.save(p.matmuls))),
}
PLANS: dict[str, Callable[[ProfiledOp], str]] = {
    "plan, recompute": lambda op: RECOMPUTE,
    "plan, swap matmuls": lambda op: SWAP if is_matmul(op) else RECOMPUTE,
}


class Block(nn.Module):
    """As GPT-2's: attention and two linear layers, each behind a norm and before a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.view(*x.shape[:2], NUM_HEADS, -1).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(DIM, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.o(attended.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.down(F.gelu(self.up(self.ln_2(x)))))


class Model(nn.Module):
    """A stack of blocks; `forward` gives a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Counters(NamedTuple):
    """Of one step."""

    forward: int
    backward: int
    objects: int


class _Calls:
    """Counts calls of the main thread between `__enter__` and `__exit__`; those two are not among them."""

    def __init__(self) -> None:
        self.num = 0

    def __enter__(self) -> _Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.num -= 2  # `__exit__`, and `sys.setprofile` in it

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self.num += 1


def models() -> dict[str, Model]:
    """The same model under each way, ready for its first step."""
    torch.manual_seed(0)
    model = Model().train()
    profile = ProfiledModel(model, batch()).profile()
    found = {name: copy.deepcopy(model) for name in (*MODES, *PLANS)}
    for name, mode in MODES.items():
        for index, block in enumerate(mode(list(found[name].blocks))):
            found[name].blocks[index] = block
    for name, choice in PLANS.items():
        plan_by_hand(profile, choice).apply(found[name])
    return found


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, BATCH * LENGTH * DIM).reshape(BATCH, LENGTH, DIM)


@contextlib.contextmanager
def disk_jobs_done_at_once() -> Iterator[None]:
    """Whoever launches a job of the swap engine's disk streams waits for its end; neither is counted."""
    launch = DiskStream._launch

    def launch_and_join(stream: DiskStream, *arguments: Any) -> Any:
        counting = sys.getprofile()
        sys.setprofile(None)
        try:
            event = launch(stream, *arguments)
            event.join_end()
            return event
        finally:
            sys.setprofile(counting)

    with mock.patch.object(DiskStream, "_launch", launch_and_join):
        yield


def counted(model: Model) -> Counters:
    """Of a step after those that warm up. Steps cost the same but for a few objects; the middle one counts."""
    x = batch()
    for _ in range(NUM_WARM):
        model(x).backward()
    gc.collect()
    gc.disable()  # a collection calls what weak references ask for, at a moment of its own
    try:
        steps = [_counted_step(model, x) for _ in range(NUM_COUNTED)]
    finally:
        gc.enable()
    return Counters(*(statistics.median_low(values) for values in zip(*steps, strict=True)))


def _counted_step(model: Model, x: torch.Tensor) -> Counters:
    forward, backward = _Calls(), _Calls()
    num_before = len(gc.get_objects())
    with forward:
        loss = model(x)
    num_objects = len(gc.get_objects()) - num_before
    with backward:
        loss.backward()
    return Counters(forward.num, backward.num, num_objects)


def timed(models: dict[str, Model], rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of forward and of backward: medians of the better half of the rounds, in which all take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    x = batch()
    for _ in range(rounds):
        for name, model in models.items():
            begin = time.perf_counter()
            loss = model(x)
            middle = time.perf_counter()
            loss.backward()
            times[name].append(((middle - begin) * 1e3, (time.perf_counter() - middle) * 1e3))
    return {name: (_of_better_half(own, 0), _of_better_half(own, 1)) for name, own in times.items()}


def _of_better_half(times: list[tuple[float, float]], which: int) -> float:
    return statistics.median(sorted(own[which] for own in times)[: (len(times) + 1) // 2])


def store(path: Path, rows: dict[str, Counters]) -> None:
    watched = [*WATCHED, *(f"src/hyper_parallel/platform/{folder}" for folder in ("regions", "torch/planner"))]
    result = {
        "date": datetime.date.today().isoformat(), "commit": commit(), "digest": digest(watched=watched), "watched": watched,
        "device": "cpu", "python": platform.python_version(), "torch": torch.__version__,
        "rows": {name: counters._asdict() for name, counters in rows.items()},
    }  # fmt: skip
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="steps of each way that are timed; 0: none")
    parser.add_argument("--store", type=Path, nargs="?", const=STORED, help="a file for the counters")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, hp.configure_swap(disk_dir=directory, min_bytes=1024):
        found = models()
        with disk_jobs_done_at_once():
            rows = {name: counted(model) for name, model in found.items()}
        times = timed(found, options.rounds) if options.rounds else {}
    print("| way | calls in forward | in backward | objects | forward ms | backward ms |\n|---|---|---|---|---|---|")
    for name, counters in rows.items():
        ms = "{:.2f} | {:.2f}".format(*times[name]) if times else "- | -"
        print(f"| {name} | {counters.forward:,} | {counters.backward:,} | {counters.objects:,} | {ms} |")
    if options.store:
        store(options.store, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
