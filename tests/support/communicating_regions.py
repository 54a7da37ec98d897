"""Regions and swapping around code that communicates by `torch.distributed` itself, or through distributed tensors. Runs in worker processes."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
from hyper_parallel import policies as p
from support.dtensor_programs import SEQUENCE_PARALLEL, TENSOR_PARALLEL, LlamaBlock
from support.process_worker import keep_platform_groups


class _Summed(torch.autograd.Function):
    """What a hand-written tensor-parallel layer does: the sum over ranks, in place on a tensor of its own; backward passes on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _gathered(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.detach().contiguous())
    return x * out.sum()


def _gathered_later(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
    work = dist.all_gather_into_tensor(out, x.detach().contiguous(), async_op=True)
    y = x.sin()
    work.wait()
    return y * out.mean()


def _gathered_into_a_list(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return x * torch.stack(parts).sum()


def _scattered(x: torch.Tensor) -> torch.Tensor:
    whole = x.detach().repeat(dist.get_world_size(), 1)
    out = torch.empty_like(x)
    dist.reduce_scatter_tensor(out, whole)
    return x * out


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.detach().contiguous())
    return x * out


def _sent(x: torch.Tensor) -> torch.Tensor:
    other = (dist.get_rank() + 1) % dist.get_world_size()
    before = (dist.get_rank() - 1) % dist.get_world_size()
    out = torch.empty_like(x)
    sending = dist.isend(x.detach().contiguous(), other)
    dist.recv(out, before)
    sending.wait()
    return x * out


def _broadcast(x: torch.Tensor) -> torch.Tensor:
    out = x.detach().clone()
    dist.broadcast(out, 0)
    return x * out


COMMUNICATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": _Summed.apply,
    "all_gather": _gathered,
    "all_gather, waited for later": _gathered_later,
    "all_gather of a list": _gathered_into_a_list,
    "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
    "send and receive": _sent,
    "broadcast": _broadcast,
}  # fmt: skip
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "recompute": hp.checkpoint_wrapper,
    "save matmuls": lambda m: hp.checkpoint_wrapper(m, policy_fn=p.save(p.matmuls)),
    "swap matmuls": lambda m: hp.checkpoint_wrapper(m, policy_fn=p.swap(p.matmuls)),
    "swap everything": lambda m: hp.checkpoint_wrapper(m, policy_fn=lambda *_, **__: hp.CheckpointPolicy.MUST_SWAP),
    "inputs": lambda m: hp.checkpoint_wrapper(m, swap_inputs=True),
    "swap_wrapper": hp.swap_wrapper,
}


class _Layer(nn.Module):
    def __init__(self, communicate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.communicate = communicate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.communicate(self.up(x).tanh()).sigmoid())


def communicating_layers() -> dict[str, bool]:
    """Gradients bit by bit those of the plain layers, for every communication under every policy."""
    found = {}
    torch.manual_seed(dist.get_rank())
    for name, communicate in COMMUNICATIONS.items():
        layers = nn.ModuleList(_Layer(communicate) for _ in range(2))
        x = torch.randn(4, 6)

        def gradients(
            wrap: Callable[[nn.Module], nn.Module], layers: nn.ModuleList = layers, x: torch.Tensor = x
        ) -> list[Any]:
            mine = copy.deepcopy(layers)
            leaf = x.clone().requires_grad_()
            y = leaf
            for layer in mine:
                y = wrap(layer)(y)
            y.square().sum().backward()
            return [leaf.grad, *(parameter.grad for parameter in mine.parameters())]

        right = gradients(lambda module: module)
        with tempfile.TemporaryDirectory() as folder, hp.configure_swap(disk_dir=folder, min_bytes=1):
            for way, wrap in WRAPS.items():
                got = gradients(wrap)
                found[f"{name}, {way}"] = all(torch.equal(a, b) for a, b in zip(right, got, strict=True))
    return found


def distributed_blocks(is_sequence_parallel: bool) -> dict[str, Any]:
    """A Llama block of distributed tensors under every policy: gradients bit by bit, bytes moved, and no parameter among them."""
    mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plain = LlamaBlock(groups=4)
    plan = SEQUENCE_PARALLEL if is_sequence_parallel else TENSOR_PARALLEL
    x, angle = torch.randn(2, 8, 16), torch.randn(1, 8, 1, 2)
    split = mesh.layout(None, "tp" if is_sequence_parallel else None, None)
    swapped: list[int] = []
    blocks: list[
        nn.Module
    ] = []  # held: the engine learns by a block's address what it saves last, and leaves that on the device

    def gradients(wrap: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        block = hp.shard_module(copy.deepcopy(plain), mesh, plan)
        blocks.append(block)
        owned = {q.to_local().untyped_storage().data_ptr() for q in block.parameters()}
        leaf = hp.distribute_tensor(x, split).requires_grad_()
        inputs = [hp.distribute_tensor(each, mesh) for each in (angle.cos(), angle.sin())]
        out = wrap(block)(leaf, *inputs)
        assert isinstance(out, hp.DTensor)
        out.square().sum().backward()
        assert not owned & set(swapped), "a parameter was swapped"
        return [each.grad.to_local() for each in (leaf, *block.parameters())]

    def seen(tensor: torch.Tensor) -> bool:
        swapped.append(tensor.untyped_storage().data_ptr())
        return False  # swap it

    right = gradients(lambda module: module)
    found: dict[str, Any] = {}
    ways = {**WRAPS, "swap_wrapper, asked": lambda m: hp.swap_wrapper(m, policy_fn=seen)}
    with tempfile.TemporaryDirectory() as folder, hp.configure_swap(disk_dir=folder, min_bytes=1):
        for way, wrap in ways.items():
            before = hp.SwapManager().stats()["offloaded_bytes"]
            got = gradients(wrap)
            moved = hp.SwapManager().stats()["offloaded_bytes"] - before
            found[way] = all(torch.equal(a, b) for a, b in zip(right, got, strict=True)), moved
    keep_platform_groups()
    return found
