"""FSDP2 and swapping together: a small Llama, its parameters sharded over ranks, its activations swapped or recomputed.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_swap.py
    torchrun --standalone --nproc-per-node 2 examples/fsdp2_swap.py --manage none

On GPUs activations go to pinned host memory, on the CPU to files. Both runs print the same losses.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hyper_parallel as hp
from hyper_parallel import policies

# What becomes of each block, by the name on the command line.
MANAGE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "swap": hp.swap_wrapper,
    "mix": lambda block: hp.checkpoint_wrapper(
        block, policy_fn=policies.swap(policies.attention | policies.in_module("**.gate")), swap_inputs=True
    ),
    "recompute": hp.checkpoint_wrapper,
    "none": lambda block: block,
}


class Shape(NamedTuple):
    """Sizes of the model and of a rank's batch."""

    blocks: int = 4
    dim: int = 128
    ffn: int = 352
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 256
    length: int = 128
    batch: int = 4


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.dim // shape.heads
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.kv_heads * self.head, bias=False)
        self.v = nn.Linear(shape.dim, shape.kv_heads * self.head, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, rotation), rotate(k, rotation)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.blocks)])
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        half = shape.dim // shape.heads // 2
        angles = torch.outer(torch.arange(shape.length), 10000 ** (-torch.arange(half) / half))
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation)
        return self.head(self.norm(x))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    cos, sin = rotation.to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


def build(manage: str, device: torch.device, shape: Shape) -> Llama:
    """Wrap each block, then shard it: parameters are gathered around a region, and not inside it."""
    torch.manual_seed(0)
    model = Llama(shape).to(device)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = MANAGE[manage](block)
    options = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    if device.type == "cuda":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(manage: str, device: torch.device, num_steps: int, shape: Shape) -> list[float]:
    """The losses of a few steps; every rank learns to continue its own arithmetic sequences."""
    model = build(manage, device, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(num_steps):
        start, stride = torch.randint(1, shape.vocabulary, (2, shape.batch, 1), generator=generator)
        tokens = ((start + stride * torch.arange(shape.length + 1)) % shape.vocabulary).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--manage", choices=MANAGE, default="swap", help="what becomes of activations (default: swap)")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, see the first lines of this file")

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # On the CPU a swap goes to files; on a GPU they are what is used when the pinned host memory is full.
    with tempfile.TemporaryDirectory() as directory, hp.configure_swap(disk_dir=directory):
        for step, loss in enumerate(train(options.manage, device, options.steps, Shape())):
            say(f"step {step}: loss {loss:.6f}")
        stats = hp.SwapManager().stats()
    out, back = (stats[name] / 2**20 for name in ("offloaded_bytes", "loaded_bytes"))
    say(f"swapped by rank 0: {out:.1f} MiB out, {back:.1f} MiB in")
    if device.type == "cuda":
        say(f"peak device memory of rank 0: {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
