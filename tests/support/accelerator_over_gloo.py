"""Every call between two ranks with tensors of a device over gloo, against the same call with tensors of the CPU: equal bits.

`found_on` runs on both ranks at once; `main` starts them on one accelerator, in processes of their own.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch


class Pair:
    """This rank of two. `make(shape, dtype)` is a tensor of small whole numbers, others on each rank; `device` is where."""

    def __init__(self, platform: Any, device: str) -> None:
        self.platform = platform
        self.device = torch.device(device)
        self.rank = platform.get_rank()
        self.peer = 1 - self.rank

    def make(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = torch.arange(1, 1 + torch.Size(shape).numel()) % 7 + 1 + self.rank
        return made.reshape(shape).to(dtype).to(self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, device=self.device).to(dtype)


def _around(here: Pair, sent: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    handles = [here.platform.isend(sent, here.peer), here.platform.irecv(into, here.peer)]
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
        assert handle.is_completed()
    return into


def send_all_dtypes(here: Pair) -> list[torch.Tensor]:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.int16, torch.float8_e4m3fn)
    return [_around(here, here.make(5, 3, dtype=dtype), here.zeros(5, 3, dtype=dtype)) for dtype in dtypes]


def send_all_shapes(here: Pair) -> list[torch.Tensor]:
    found = [_around(here, here.make(*shape), here.zeros(*shape)) for shape in ((), (1,), (0, 3), (1 << 20,))]
    strided = _around(here, here.make(4, 6).T[::2], here.zeros(4, 6).T[::2])
    part = here.zeros(8)
    _around(here, here.make(3), part[2:5])
    return [*found, strided, part]


def communicate_conjugates_and_negatives(here: Pair) -> list[torch.Tensor]:
    """PyTorch notes in a bit that a tensor is one, and leaves its memory as it was."""
    platform, found = here.platform, []
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda x: _around(here, x, torch.zeros_like(x)),
        lambda x: platform.all_reduce(x, None),
        lambda x: platform.all_gather_into_tensor(x, None),
        lambda x: platform.reduce_scatter_tensor(x, None),
        lambda x: platform.all_to_all_single(x, (4,))[0],
        lambda x: platform.broadcast(x, 1),
        lambda x: platform.differentiable_all_gather_concat(x, None, 2, 0),
    ]
    for view, real in ((torch.Tensor.conj, False), (torch._neg_view, True)):
        x = here.make(4) if real else torch.complex(here.make(4), here.make(4) + 1)
        for call in calls:
            got, wanted = call(view(x.clone())), call(_plain(view(x)))
            assert torch.equal(got, wanted), (view, call, got, wanted)
            found.append(got)
        into = _around(here, x, view(torch.zeros_like(x)))
        assert torch.equal(into, _around(here, x, torch.zeros_like(x)))
        found.append(into)
    return [_plain(each) for each in found]


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().resolve_neg()


def send_many_at_once(here: Pair) -> list[torch.Tensor]:
    """None is waited for before all are launched; the senders' tensors are dropped and their memory is used again."""
    targets = [here.zeros(1000) for _ in range(8)]
    handles = [here.platform.irecv(target, here.peer, tag=tag) for tag, target in enumerate(targets)]
    handles += [here.platform.isend(here.make(1000) * (tag + 1), here.peer, tag=tag) for tag in range(8)]
    torch.full((8, 1000), -1.0, device=here.device)
    for handle in handles:
        handle.wait()
    return targets


def receive_over_other_streams(here: Pair) -> list[torch.Tensor]:
    """The old values of the target are still being written by the stream of the launch when another one waits for the new ones."""
    if here.device.type == "cpu":
        return [_around(here, here.make(1 << 16), here.zeros(1 << 16)) * 2]
    module = torch.get_device_module(here.device)
    first, second = module.Stream(), module.Stream()
    weight = torch.ones(2048, 2048, device=here.device)
    sent, target = here.make(1 << 16), here.zeros(1 << 16)
    module.synchronize()
    with module.stream(first):
        for _ in range(50):
            weight = weight @ weight / 2048
        target.copy_(weight.flatten()[: 1 << 16])
        receiving = here.platform.irecv(target, here.peer)
        sending = here.platform.isend(sent, here.peer)
    with module.stream(second):
        receiving.wait()
        result = target * 2
    sending.wait()
    module.synchronize()
    return [result]


def exchange_with_gradients(here: Pair) -> list[torch.Tensor]:
    x = here.make(4, 3).requires_grad_()
    y = here.platform.p2p_exchange(x * x, here.peer)
    (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return [y.detach(), first.detach(), second]


def exchange_in_backward_thread(here: Pair) -> list[torch.Tensor]:
    x = here.make(300, 300).requires_grad_()
    y = x
    for _ in range(4):
        y = here.platform.p2p_exchange(y * 2, here.peer)
    y.sum().backward()
    return [y.detach(), x.grad]


def launch_collectives(here: Pair) -> list[torch.Tensor]:
    platform, found = here.platform, []
    launched = [
        platform.all_reduce(here.make(4, 3), None, async_op=True),
        platform.all_reduce(here.make(6, dtype=torch.bfloat16), None, async_op=True),
        platform.all_gather_into_tensor(here.make(4, 3), None, async_op=True),
        platform.all_gather_into_tensor(here.make(4, 3, dtype=torch.float8_e4m3fn), None, async_op=True),
        platform.reduce_scatter_tensor(here.make(4, 3), None, async_op=True),
        platform.broadcast(here.make(4, 3).T, 1, async_op=True),
        platform.all_to_all_single(here.make(4, 3), (12,), async_op=True),
    ]
    for result, handle in launched:
        handle.wait()
        found.append(result)
    platform.barrier(async_op=True).wait()
    platform.barrier(device_ids=None if here.device.type == "cpu" else [torch.get_device_module().current_device()])
    return found


def differentiate_collectives(here: Pair) -> list[torch.Tensor]:
    platform = here.platform
    sent, received = ([4, 0], [4, 1]) if here.rank == 0 else ([1, 3], [0, 3])
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        *(lambda x, op=op: platform.differentiable_all_reduce(x, op, None) for op in ("sum", "avg", "max", "min", "prod")),
        *(lambda x, op=op: platform.differentiable_reduce_scatter(x, 2, 0, op, None) for op in ("sum", "avg", "max", "min")),
        lambda x: platform.differentiable_all_gather_concat(x, None, 2, 1),
        lambda x: platform.differentiable_all_to_all(x, (6, 2), None),
        lambda x: platform.differentiable_all_to_all_single(x, sent, received, None),
        lambda x: platform.differentiable_all_to_all_single_async(x, sent, received, None) * 2,
        lambda x: _finished(here, x),
    ]  # fmt: skip
    found = []
    for call in calls:
        x = here.make(4, 3).requires_grad_()
        y = call(x)
        weight = torch.arange(1.0, 1 + y.numel(), device=here.device).reshape(y.shape) % 5
        (y * weight).sum().backward()
        found += [y.detach(), x.grad]
    return found


def _finished(here: Pair, x: torch.Tensor) -> torch.Tensor:
    leading = x.detach().reshape(2, 2, 3)
    received, work = here.platform.all_to_all_single(leading, leading.shape, None, async_op=True)
    return here.platform.differentiable_async_a2a_wait(x, work, received, None, 2, 1, 0)


def send_objects(here: Pair) -> list[torch.Tensor]:
    platform = here.platform
    mine = {"values": here.make(3), "rank": here.rank, "long": "x" * 1000}
    gathered: list[Any] = [None, None]
    platform.all_gather_object(gathered, mine)
    received: list[Any] = [None, None]
    if here.rank == 0:
        platform.send_object_list([mine, here.make(2)], 1)
        platform.recv_object_list(received, 1)
    else:
        platform.recv_object_list(received, 0)
        platform.send_object_list([mine, here.make(2)], 0)
    assert [each["rank"] for each in gathered] == [0, 1]
    assert (received[0]["rank"], received[0]["long"]) == (here.peer, "x" * 1000)
    return [gathered[0]["values"], gathered[1]["values"], received[0]["values"], received[1]]


def go_on_after_a_refusal(here: Pair) -> list[torch.Tensor]:
    with pytest.raises(TypeError, match="gloo cannot reduce"):
        here.platform.all_reduce(here.make(4, dtype=torch.float8_e4m3fn), None)
    return [here.platform.all_reduce(here.make(4), None)]


CALLS: list[Callable[[Pair], list[torch.Tensor]]] = [
    send_all_dtypes, send_all_shapes, communicate_conjugates_and_negatives, send_many_at_once,
    receive_over_other_streams, exchange_with_gradients, exchange_in_backward_thread, launch_collectives, differentiate_collectives, send_objects, go_on_after_a_refusal,
]  # fmt: skip


def found_on(platform: Any, device: str) -> dict[str, str]:
    """Per call "equal", or what is not."""
    outcomes = {}
    for call in CALLS:
        wanted, got = call(Pair(platform, "cpu")), call(Pair(platform, device))
        differs = [
            f"{position}: {there} instead of {here}"
            for position, (here, there) in enumerate(zip(wanted, got, strict=True))
            if there.device.type != device or _bits(here) != _bits(there)
        ]
        outcomes[call.__name__] = "; ".join(differs) or "equal"
    return outcomes


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.shape, tensor.dtype, data


def _one_rank(rank: int, port: int, device: str) -> None:
    from hyper_parallel.platform.torch.platform import TorchPlatform

    platform = TorchPlatform()
    try:
        platform.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        for name, outcome in found_on(platform, device).items():
            print(f"rank {rank}, {name}: {outcome}", flush=True)
        platform.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        raise


def main() -> None:
    """`device`, as the one argument: two ranks on one accelerator."""
    from support.processes import free_port

    torch.multiprocessing.spawn(_one_rank, (free_port(), sys.argv[1]), nprocs=2)
