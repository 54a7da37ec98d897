"""What only a real GPU can show about regions and swapping: allocators, CUDA graphs, races, leaks. One table, each line PASS or FAIL.

    CUDA_DEVICE_MAX_CONNECTIONS=32 CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONPATH=src python benchmarks/cuda_stress.py [--out results.json]

Every check runs in a process of its own: some need variables that are read once, and a capture that fails leaves nothing to go on with. It takes
less than seven minutes on one H200. `--device cpu` runs what does not need CUDA, to try the script itself; `--only NAME` runs one check.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import glob
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from results_state import WATCHED, digest
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hyper_parallel as hp
from activation import commit
from hyper_parallel._base.errors import HyperParallelError
from hyper_parallel.core.swap import engines
from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper, swap_wrapper

PASS, FAIL, SKIP = "PASS", "FAIL", "not here"
MEMCHECK_S = 240
MEMCHECK_FOUND = 99  # how compute-sanitizer ends when it has found something
ANSWERS = (hp.CheckpointPolicy.MUST_SWAP, hp.CheckpointPolicy.MUST_SAVE, hp.CheckpointPolicy.MUST_RECOMPUTE)


class NotHereError(Exception):
    """This machine lacks what a check needs."""


class WrongError(Exception):
    """A check has found something."""


# -- the model ------------------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    width: int
    length: int
    batch: int


SIZES = {"cuda": Size(512, 256, 8), "cpu": Size(32, 16, 2)}


class Block(nn.Module):
    """Attention and feed-forward of a transformer, with kernels that give the same bits each time."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(h.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


def mix(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> hp.CheckpointPolicy:
    """Every answer, by op and occurrence."""
    return ANSWERS[zlib.crc32(f"{op} {ctx.occurrence}".encode()) % len(ANSWERS)]


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "region, a mix": lambda block: checkpoint_wrapper(block, policy_fn=mix),
    "swap_wrapper": swap_wrapper,
    "region, swap_inputs": lambda block: checkpoint_wrapper(block, swap_inputs=True),
    "region, recompute": checkpoint_wrapper,
}


def make(device: str, num_blocks: int = 6, dropout: float = 0.1) -> tuple[nn.Sequential, nn.Sequential]:
    """A model, and a copy of it whose blocks are wrapped, each in another way."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block(SIZES[device].width, dropout) for _ in range(num_blocks))).to(device)
    ways = list(WAYS.values())
    managed = nn.Sequential(*(ways[i % 3](block) for i, block in enumerate(copy.deepcopy(plain))))
    return plain, managed


def batch_of(device: str, number: int) -> torch.Tensor:
    size = SIZES[device]
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size.batch, size.length, size.width, generator=generator).to(device)


def step(model: nn.Module, x: torch.Tensor, seed: int, between: Callable[[], None] | None = None) -> list[torch.Tensor]:
    """The gradients of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    h = x
    for block in model:
        if between is not None:
            between()
        h = block(h)
    h.square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def check_same(found: list[torch.Tensor], expected: list[torch.Tensor], when: str) -> None:
    synchronize(found[0].device.type)
    num = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if num:
        raise WrongError(f"{num} of {len(expected)} gradients differ from the plain ones, {when}")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def small_limits(device: str) -> Iterator[None]:
    """So small that storages really leave, and wait for each other."""
    if device == "cuda":
        with hp.configure_swap(min_bytes="64KiB", window_bytes="16MiB", prefetch_bytes="32MiB"):
            yield
        return
    with (
        tempfile.TemporaryDirectory() as directory,
        hp.configure_swap(disk_dir=directory, min_bytes=1, window_bytes="64KiB", prefetch_bytes="256KiB"),
    ):
        yield
        for managed in engines.all_engines().values():
            managed.engine.join()


def moved() -> str:
    stats = engines.total_stats()
    if not stats.offloaded_bytes or not stats.loaded_bytes:
        raise WrongError("nothing was swapped")
    return f"{stats.offloaded_bytes / 1e6:.1f} MB out, {stats.loaded_bytes / 1e6:.1f} MB in"


def check_nothing_left() -> None:
    for name, managed in engines.all_engines().items():
        managed.engine.join()
        if managed.engine.in_flight_bytes or managed.tier.used_bytes:
            raise WrongError(f"{name} still holds {managed.engine.in_flight_bytes} and {managed.tier.used_bytes} bytes")


# -- allocators -----------------------------------------------------------------------------------------------------------------


def check_steps(device: str) -> str:
    plain, managed = make(device)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, managed)]
    for number in range(12):
        x = batch_of(device, number)
        expected = [grad.clone() for grad in step(plain, x, number)]
        check_same(step(managed, x, number), expected, f"step {number}")
        for optimizer in optimizers:
            optimizer.step()
    check_nothing_left()
    return f"12 steps, {moved()}{_allocator(device)}"


def _allocator(device: str) -> str:
    if device != "cuda":
        return ""
    backend = torch.cuda.memory.get_allocator_backend()
    wanted = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "cudaMallocAsync" in wanted and backend != "cudaMallocAsync":
        raise WrongError(f"the allocator is {backend}")
    if "expandable" not in wanted:
        return f"; {backend}"
    num = sum(bool(segment.get("is_expandable")) for segment in torch.cuda.memory_snapshot())
    if not num:
        raise WrongError("no segment is expandable")
    return f"; {num} expandable segments"


# -- CUDA graphs ----------------------------------------------------------------------------------------------------------------


def check_capture(device: str) -> str:
    """A captured step gives the right gradients for other inputs, or is refused by this package in words."""
    found = []
    for name, wrap in WAYS.items():
        plain, _ = make(device, num_blocks=2)
        managed = nn.Sequential(*(wrap(block) for block in copy.deepcopy(plain)))
        found.append(f"{name}: {_capture(device, plain, managed)}")
        expected = [grad.clone() for grad in step(plain, batch_of(device, 7), 7)]
        check_same(step(managed, batch_of(device, 7), 7), expected, f"after a capture, {name}")
    check_nothing_left()
    return "; ".join(found)


def _capture(device: str, plain: nn.Module, managed: nn.Module) -> str:
    static = batch_of(device, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(3):
            step(managed, static, number)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    managed.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            managed(static).square().mean().backward()
    except HyperParallelError as error:
        return f"refused ({error.what})"
    except Exception as error:
        raise WrongError(f"a capture raises {type(error).__name__}: {_first_line(error)}") from error
    for number in (1, 2, 3):
        static.copy_(batch_of(device, number))
        torch.manual_seed(number)
        graph.replay()
        found = [parameter.grad for parameter in managed.parameters()]
        check_same(found, step(plain, batch_of(device, number), number), f"replay of a captured step, input {number}")
    return "captured, right for other inputs"


class Around(nn.Module):
    """Something before and after a module, so that the region around both has something to do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x * 1.5).tanh() * x).sin()


def check_graphed_inside(device: str) -> str:
    """`make_graphed_callables` of the module inside a wrapper."""
    found = []
    for dropout in (0.0, 0.1):
        for name, wrap in WAYS.items():
            torch.manual_seed(0)
            block = Block(SIZES[device].width, dropout).to(device)
            sample = batch_of(device, 0).requires_grad_()
            graphed = torch.cuda.make_graphed_callables(block, (sample,))
            plain, managed = nn.Sequential(Around(graphed)), nn.Sequential(wrap(Around(graphed)))
            outcome = "right"
            for number in range(3):
                leaf = batch_of(device, number).requires_grad_()
                expected = [grad.clone() for grad in step(plain, leaf, number)] + [leaf.grad.clone()]
                leaf = batch_of(device, number).requires_grad_()
                try:
                    got = [*step(managed, leaf, number), leaf.grad]
                except HyperParallelError as error:
                    outcome = f"refused ({error.what})"
                    break
                check_same(got, expected, f"graphed inside, {name}, dropout {dropout}, step {number}")
            found.append(f"{name}, dropout {dropout}: {outcome}")
    return "; ".join(found)


def check_reduce_overhead(device: str) -> str:
    """`torch.compile(mode="reduce-overhead")` of the module inside: its own graphs, and memory that they share."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(x)))

    found = []
    for name, wrap in WAYS.items():
        torch.manual_seed(0)
        torch._dynamo.reset()
        blocks = [Small().to(device) for _ in range(3)]
        # Wrapped before anything is compiled: then it is compiled so that regions see it.
        managed = nn.Sequential(
            *(wrap(torch.compile(block, mode="reduce-overhead")) for block in copy.deepcopy(blocks))
        )
        plain = nn.Sequential(*(torch.compile(block, mode="reduce-overhead") for block in blocks))
        found.append(f"{name}: {_reduced_overhead(device, plain, managed)}")
    return "; ".join(found)


def _reduced_overhead(device: str, plain: nn.Module, managed: nn.Module) -> str:
    for number in range(6):
        x = torch.randn(512, 256, generator=torch.Generator().manual_seed(number)).to(device)
        torch.compiler.cudagraph_mark_step_begin()
        expected = [grad.clone() for grad in step(plain, x, number)]
        torch.compiler.cudagraph_mark_step_begin()
        try:
            got = [grad.clone() for grad in step(managed, x, number)]
        except HyperParallelError as error:
            return f"refused in step {number} ({error.what})"
        check_same(got, expected, f"reduce-overhead inside, step {number}")
    return "6 steps, right"


# -- memory ---------------------------------------------------------------------------------------------------------------------


def check_tiny(device: str) -> str:
    """What compute-sanitizer watches: slow there, so little of it."""
    plain, managed = make(device, num_blocks=3)
    for number in range(2):
        x = batch_of(device, number)[:2, :32].contiguous()
        expected = [grad.clone() for grad in step(plain, x, number)]
        check_same(step(managed, x, number), expected, f"step {number}")
    return f"2 steps, {moved()}"


def check_memcheck(device: str) -> str:
    found = [shutil.which("compute-sanitizer"), *sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"))]
    found += sorted(glob.glob("/usr/local/cuda*/compute-sanitizer/compute-sanitizer"))
    binary = next((each for each in found if each), None)
    if binary is None:
        raise NotHereError("compute-sanitizer is not there")
    command = [binary, "--tool", "memcheck", "--error-exitcode", str(MEMCHECK_FOUND), sys.executable, __file__]
    # Without the caching allocator each tensor has a block of the driver's own, whose bounds are known.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            [*command, "--run", "tiny", "--device", device],
            env=environment,
            capture_output=True,
            text=True,
            timeout=MEMCHECK_S,
        )
    except subprocess.TimeoutExpired:
        raise NotHereError(f"not done after {MEMCHECK_S} s under compute-sanitizer") from None
    text = done.stdout + done.stderr
    errors = [line.strip() for line in text.splitlines() if "ERROR SUMMARY" in line or "Invalid" in line]
    if done.returncode == MEMCHECK_FOUND:
        raise WrongError(" | ".join(errors[:4]) or "compute-sanitizer has found something")
    outcome = _outcome_in(done.stdout)
    if outcome is None or outcome["outcome"] != PASS:
        raise NotHereError(f"the run itself did not end well under it: {outcome or text[-300:]}")
    return f"{outcome['text']}; {errors[-1].lstrip('= ') if errors else 'no summary'}"


def check_peak(device: str) -> str:
    """The same bytes in step 3 and step 200, after each step and at its peak."""
    if device != "cuda":
        raise NotHereError("peaks are measured on CUDA only")
    _, managed = make(device)
    x = batch_of(device, 0)
    peaks, after = [], []
    for number in range(200):
        torch.cuda.synchronize()
        for each in engines.all_engines().values():
            each.engine.poll()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda._sleep(
            40_000_000
        )  # keeps the device behind the host in every step: when copies end is not a matter of luck
        step(managed, x, number)
        torch.cuda.synchronize()
        for each in engines.all_engines().values():
            each.engine.poll()
        peaks.append(torch.cuda.max_memory_allocated())
        after.append(torch.cuda.memory_allocated())
    text = f"after a step {after[2]} to {after[-1]} bytes, peak {min(peaks[2:])} to {max(peaks[2:])}, {moved()}"
    if after[2] != after[-1] or len(set(after[2:])) > 1:
        raise WrongError(f"bytes after a step change: {text}")
    if len(set(peaks[2:])) > 1:
        first = next(i for i, peak in enumerate(peaks) if i > 2 and peak != peaks[2])
        raise WrongError(f"peaks change, first in step {first + 1}: {text}")
    return text


# -- races ----------------------------------------------------------------------------------------------------------------------


class Delays:
    """Lets a stream sleep for a random time."""

    def __init__(self, seed: int, device: str) -> None:
        self.random = random.Random(seed)
        self._is_cuda = device == "cuda"

    def __call__(self, stream: Any = None) -> None:
        if self._is_cuda and self.random.random() < 0.5:
            with torch.cuda.stream(stream or torch.cuda.current_stream()):
                torch.cuda._sleep(self.random.choice((1_000, 50_000, 1_000_000)))


def check_delays(device: str) -> str:
    """Every stream sleeps at random, and each step runs on a stream that is drawn."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise NotHereError("with CUDA_DEVICE_MAX_CONNECTIONS=1 streams do not race")
    from hyper_parallel.platform.torch.swap.device import AcceleratorDevice

    num_steps = 100 if device == "cuda" else 4
    delay = Delays(2026, device)
    offload, load = AcceleratorDevice.launch_offload, AcceleratorDevice.launch_load

    def late_offload(self: Any, block: Any, source: Any, stream: Any) -> None:
        delay(stream.raw)
        offload(self, block, source, stream)

    def late_load(self: Any, buffer: Any, block: Any, stream: Any) -> None:
        delay(stream.raw)
        load(self, buffer, block, stream)

    plain, managed = make(device)
    streams = [torch.cuda.Stream() for _ in range(3)] if device == "cuda" else []
    with (
        mock.patch.object(AcceleratorDevice, "launch_offload", late_offload),
        mock.patch.object(AcceleratorDevice, "launch_load", late_load),
    ):
        for number in range(num_steps):
            x = batch_of(device, number)
            expected = [grad.clone() for grad in step(plain, x, number)]
            with _on_another(delay.random.choice([None, *streams])):
                found = step(managed, x, number, between=delay)
            check_same(found, expected, f"step {number}, seed 2026")
    check_nothing_left()
    return f"{num_steps} steps, {moved()}"


@contextlib.contextmanager
def _on_another(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        yield
    here.wait_stream(stream)


def check_threads(device: str) -> str:
    """Two threads, two models, two streams; no dropout, since threads share the device's generator."""
    num_steps = 40 if device == "cuda" else 4
    failures: list[str] = []
    ready = threading.Barrier(2)
    models = [make(device, num_blocks=4, dropout=0.0) for _ in range(2)]
    expected = [[grad.clone() for grad in step(plain, batch_of(device, i), 0)] for i, (plain, _) in enumerate(models)]
    synchronize(device)

    def work(index: int) -> None:
        try:
            if device == "cpu":
                torch.set_num_threads(1)  # as in the main thread, or sums are other sums
            delay, stream = Delays(index, device), torch.cuda.Stream() if device == "cuda" else None
            x = batch_of(device, index)
            synchronize(device)
            ready.wait(60)
            for number in range(num_steps):
                with _on_another(stream):
                    found = step(models[index][1], x, 0, between=delay)
                check_same(found, expected[index], f"thread {index}, step {number}")
        except BaseException as error:
            failures.append(f"{type(error).__name__}: {_first_line(error)}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    if failures or any(thread.is_alive() for thread in threads):
        raise WrongError("; ".join(failures) or "a thread does not end")
    check_nothing_left()
    return f"2 threads, {num_steps} steps each, {moved()}"


# -- the table ------------------------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    title: str
    run: Callable[[str], str]
    needs_cuda: bool = True
    variables: dict[str, str] = {}  # noqa: RUF012 - of a NamedTuple; nobody changes it
    is_shown: bool = True
    limit_s: float = 75


ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
CHECKS = {  # the slow ones last: what has no time left is not run
    "default": Check("allocator: default", check_steps, needs_cuda=False),
    "expandable": Check(
        "allocator: expandable segments", check_steps, variables={ALLOCATOR: "expandable_segments:True"}
    ),
    "async": Check("allocator: cudaMallocAsync", check_steps, variables={ALLOCATOR: "backend:cudaMallocAsync"}),
    "capture": Check("CUDA graph of a step", check_capture),
    "graphed": Check("make_graphed_callables inside", check_graphed_inside),
    "peak": Check("bytes of steps 3 to 200", check_peak),
    "delays": Check("random delays on random streams", check_delays, needs_cuda=False),
    "threads": Check("two threads on two streams", check_threads, needs_cuda=False),
    "overhead": Check("compile mode reduce-overhead inside", check_reduce_overhead),
    "memcheck": Check("compute-sanitizer memcheck", check_memcheck, limit_s=MEMCHECK_S + 20),
    "tiny": Check("what memcheck runs", check_tiny, needs_cuda=False, is_shown=False),
}
# Read when a process begins; a stress test of streams proves nothing with one connection.
VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def run_here(name: str, device: str) -> dict[str, Any]:
    """One check in this process."""
    torch.use_deterministic_algorithms(True)
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        with small_limits(device):
            return {"outcome": PASS, "text": CHECKS[name].run(device)}
    except NotHereError as reason:
        return {"outcome": SKIP, "text": str(reason)}
    except WrongError as reason:
        return {"outcome": FAIL, "text": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"outcome": FAIL, "text": f"{type(error).__name__}: {_first_line(error)}"}


def run_in_process(name: str, device: str, limit_s: float) -> dict[str, Any]:
    check = CHECKS[name]
    if check.needs_cuda and device != "cuda":
        return {"outcome": SKIP, "text": "needs CUDA", "seconds": 0.0}
    if limit_s < 10:
        return {"outcome": SKIP, "text": "no time left; --only runs it alone", "seconds": 0.0}
    begin = time.monotonic()
    command = [sys.executable, __file__, "--run", name, "--device", device]
    try:
        environment = {**VARIABLES, **os.environ, **check.variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"outcome": FAIL, "text": f"not done after {limit_s:.0f} s", "seconds": limit_s}
    outcome = _outcome_in(done.stdout)
    if outcome is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        outcome = {"outcome": FAIL, "text": f"the process ended with {done.returncode}: {last}"}
    if outcome["outcome"] == FAIL:
        outcome["errors"] = done.stderr[-4000:]
    return {**outcome, "seconds": round(time.monotonic() - begin, 1)}


def _outcome_in(output: str) -> dict[str, Any] | None:
    for line in reversed(output.splitlines()):
        if line.startswith('{"outcome"'):
            found: dict[str, Any] = json.loads(line)
            return found
    return None


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split("\n")[:2])[:300]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="a file for the results as JSON")
    parser.add_argument("--commit", help="what is measured, where there is no git")
    shown = [name for name, check in CHECKS.items() if check.is_shown]
    parser.add_argument("--only", nargs="+", choices=shown, default=shown)
    parser.add_argument("--seconds", type=float, default=400, help="for all checks together")
    parser.add_argument("--run", choices=list(CHECKS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(run_here(arguments.run, arguments.device)))
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here; --device cpu tries the script itself.")
        return 2
    rows, end = {}, time.monotonic() + arguments.seconds
    print(f"{'check':36} {'':8} {'s':>5}  what was found", flush=True)
    for name in arguments.only:
        row = rows[name] = run_in_process(name, arguments.device, min(end - time.monotonic(), CHECKS[name].limit_s))
        print(f"{CHECKS[name].title:36} {row['outcome']:8} {row['seconds']:5.0f}  {row['text']}", flush=True)
    if arguments.out:
        about = {
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "version": hp.__version__,
            "variables": {name: os.environ.get(name, default) for name, default in VARIABLES.items()},
        }
        source = {"commit": arguments.commit or commit(), "digest": digest(), "watched": list(WATCHED)}
        arguments.out.write_text(json.dumps({**source, "about": about, "checks": rows}, indent=1) + "\n")
    return int(any(row["outcome"] == FAIL for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
