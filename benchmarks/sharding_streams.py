"""How much of the collectives of sharded data parallel a GPU has to wait for, beside PyTorch's FSDP2.

    python benchmarks/sharding_streams.py [--width 2048] [--gbs 25 50 100] [--out x.json]

One process and one GPU. Its group claims 2 ranks (PyTorch's `fake` backend); each collective is a stand-in on a side stream that takes as long
as its bytes would at a given bandwidth, and then copies what is there already. FSDP2 is given the same by `set_custom_all_gather` and
`set_custom_reduce_scatter`. Both, and the plain model, take turns. *Exposed*: a step's time above the plain model's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import on_ranks
import torch
import torch.distributed as dist
from sharding import model_of, ours, theirs
from torch.testing._internal.distributed.fake_pg import FakeStore

import hyper_parallel as hp
from hyper_parallel.platform.torch.communication import Communication

WATCHED = ("src/hyper_parallel/core/parallel/sharding", "src/hyper_parallel/platform/torch/parallel/sharding")
NUM_RANKS, NUM_BLOCKS, NUM_TURNS = 2, 12, 9


class StandIn:
    """Collectives of two ranks that hold the same, on one device. `bytes_per_s` 0: they take no time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_per_s = 0.0
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._cycles_per_s = self._measured_cycles() if device.type == "cuda" else 0.0

    def _measured_cycles(self) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(10_000_000)
        begin.record()
        torch.cuda._sleep(100_000_000)
        end.record()
        torch.cuda.synchronize()
        return 100_000_000 / (begin.elapsed_time(end) / 1e3)

    def take_time(self, num_bytes: int) -> None:
        """On the current stream, as long as a ring of two ranks would take to move its half of the bytes."""
        if self.bytes_per_s and self.stream is not None:
            torch.cuda._sleep(int(num_bytes / NUM_RANKS / self.bytes_per_s * self._cycles_per_s))

    # -- for hyper_parallel's transport --------------------------------------------------------------------------------

    def install(self) -> None:
        transport: Any = Communication.transport
        transport.launch_all_gather = self.launch_all_gather
        transport.launch_reduce_scatter = self.launch_reduce_scatter

    def launch_all_gather(self, tensor: torch.Tensor, group: object, output: torch.Tensor | None = None) -> Any:
        made = tensor.new_empty((tensor.shape[0] * NUM_RANKS, *tensor.shape[1:])) if output is None else output
        return made, self._beside(lambda: self.all_gather(made, tensor)), None

    def launch_reduce_scatter(self, tensor: torch.Tensor, op: object, group: object) -> Any:
        made = tensor.new_empty((tensor.shape[0] // NUM_RANKS, *tensor.shape[1:]))
        return made, self._beside(lambda: self.reduce_scatter(made, tensor)), None

    def _beside(self, work: Any) -> _Work | None:
        if self.stream is None:
            work()
            return None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
            return _Work(self.stream.record_event())

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self.take_time(output.nbytes)
        for part in output.view(-1).chunk(NUM_RANKS):
            part.copy_(tensor.view(-1))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, is_mean: bool = False) -> None:
        self.take_time(tensor.nbytes)
        torch.mul(tensor.view(-1)[: output.numel()], 1 if is_mean else NUM_RANKS, out=output.view(-1))


class _Work:
    """What a transport waits for: the current stream waits for the side stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())


class NativeGather:
    """The stand-in, as FSDP2 calls it: on its own stream."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        self._stand_in.all_gather(output_tensor, input_tensor)


class NativeReduce(NativeGather):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, *_: Any) -> None:
        self._stand_in.reduce_scatter(output_tensor, input_tensor, is_mean=op == dist.ReduceOp.AVG)


def step_ms(model: torch.nn.Module, x: torch.Tensor) -> float:
    model.zero_grad()
    if x.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    model(x).float().square().mean().backward()
    if x.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def rows(width: int, tokens: int, bandwidths: list[float], device: torch.device) -> list[dict[str, Any]]:
    stand_in = StandIn(device)
    stand_in.install()
    mesh = hp.init_device_mesh(device.type, (NUM_RANKS,), mesh_dim_names=("dp",))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    models: dict[str, Any] = {
        way: model_of(width, NUM_BLOCKS).to(device, dtype) for way in ("plain", "FSDP2", "hyper_parallel")
    }
    theirs(models["FSDP2"], mesh)
    ours(models["hyper_parallel"], mesh)
    for module in [models["FSDP2"], *models["FSDP2"]]:
        module.set_custom_all_gather(NativeGather(stand_in))
        module.set_custom_reduce_scatter(NativeReduce(stand_in))
    x = torch.randn(4, tokens, width, device=device, dtype=dtype)
    found = []
    for bandwidth in bandwidths:
        stand_in.bytes_per_s = bandwidth * 1e9
        times: dict[str, list[float]] = {way: [] for way in models}
        for turn in range(NUM_TURNS + 2):
            for way, model in sorted(models.items(), reverse=bool(turn % 2)):
                taken = step_ms(model, x)
                if turn >= 2:
                    times[way].append(taken)
        medians = {way: statistics.median(taken) for way, taken in times.items()}
        exposed = {way: medians[way] - medians["plain"] for way in ("FSDP2", "hyper_parallel")}
        pairs = zip(models["FSDP2"].parameters(), models["hyper_parallel"].parameters(), strict=True)
        equal = all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)
        found.append({"gb_per_s": bandwidth, "ms": medians, "exposed_ms": exposed, "gradients_equal": equal})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--gbs", type=float, nargs="+", default=[12.5, 25, 50, 100, 1e6])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    device = torch.device(options.device)
    found = rows(options.width, options.tokens, options.gbs, device)
    for row in found:
        exposed = row["exposed_ms"]
        print(
            f"{row['gb_per_s']:>9g} GB/s: plain {row['ms']['plain']:.1f} ms, exposed {exposed['hyper_parallel']:.2f} ms, "
            f"of FSDP2 {exposed['FSDP2']:.2f} ms; gradients {'equal' if row['gradients_equal'] else 'differ'}"
        )
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    setting = {"width": options.width, "tokens": options.tokens, "blocks": NUM_BLOCKS, "turns": NUM_TURNS}
    on_ranks.write(options.out, WATCHED, setting, device=name, rows=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
