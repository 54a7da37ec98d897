"""A sharded model whose collectives run on a stream of their own and come late: `python -m support.sharding_streams cuda 200`.

The group claims two ranks (PyTorch's `fake` backend). A collective is a copy on a side stream, behind a delay; so is some of the compute. What is
read before it is there, or freed while it is used, makes gradients differ from those of the same steps without delays.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import hyper_parallel as hp
from hyper_parallel.platform.torch.communication import Communication

MOST_CYCLES = 2_000_000  # about a millisecond


class LateCollectives:
    """Two ranks that hold the same, on one device."""

    def __init__(self, device: torch.device) -> None:
        self.is_late = False
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream() if self._on_gpu else None
        self._random = random.Random(0)

    def install(self) -> None:
        transport: Any = Communication.transport
        transport.launch_all_gather = self.launch_all_gather
        transport.launch_reduce_scatter = self.launch_reduce_scatter

    def delay(self) -> None:
        if self.is_late and self._on_gpu and self._random.random() < 0.5:
            torch.cuda._sleep(self._random.randrange(MOST_CYCLES))

    def launch_all_gather(self, tensor: torch.Tensor, group: object, output: torch.Tensor | None = None) -> Any:
        made = tensor.new_empty(2 * tensor.numel()) if output is None else output

        def copy() -> None:
            made[: tensor.numel()].copy_(tensor)
            made[tensor.numel() :].copy_(tensor)

        return made, self._beside(copy), None

    def launch_reduce_scatter(self, tensor: torch.Tensor, op: object, group: object) -> Any:
        made = tensor.new_empty(tensor.shape[0] // 2)
        return made, self._beside(lambda: torch.add(*tensor.chunk(2), out=made)), None

    def _beside(self, work: Callable[[], object]) -> _Work | None:
        if self._stream is None:
            work()
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.delay()
            work()
            return _Work(self._stream.record_event())


class _Work:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())


class Block(nn.Module):
    def __init__(self, late: LateCollectives) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 250), nn.Linear(250, 64)
        self._late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._late.delay()
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def trained(late: LateCollectives, device: torch.device, steps: int, zero: int, prefetch: int) -> list[torch.Tensor]:
    """The shards after some steps."""
    torch.manual_seed(0)
    mesh = hp.init_device_mesh(device.type, (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(*(Block(late) for _ in range(4))).to(device)
    for block in model:
        hp.fully_shard(block, mesh=mesh, zero=zero, prefetch=prefetch)
    hp.fully_shard(model, mesh=mesh, zero=zero, prefetch=prefetch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        torch.manual_seed(step)
        with hp.accumulate(model, last=True):
            model(torch.randn(8, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]


def main(kind: str, steps: int) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    device = torch.device(kind)
    late = LateCollectives(device)
    late.install()
    for zero, prefetch in ((3, 1), (3, 0), (3, 2), (2, 1), (1, 1)):
        late.is_late = False
        in_time = trained(late, device, steps, zero, prefetch)
        late.is_late = True
        delayed = trained(late, device, steps, zero, prefetch)
        same = all(map(torch.equal, in_time, delayed))
        moved = any(not torch.equal(value, torch.zeros_like(value)) for value in delayed)
        print(f"zero={zero} prefetch={prefetch}: {'equal' if same and moved else 'differ'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
