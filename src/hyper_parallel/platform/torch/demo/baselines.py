"""What `hyper-parallel bench` compares: PyTorch's own ways to save memory beside ours, on the demo's transformer.

Each gets a model of its own, the same to begin with, whose blocks are wrapped in another way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as torch_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hyper_parallel.platform.torch.demo.transformer import Trainer
from hyper_parallel.platform.torch.planner.meters import memory_meter
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import checkpoint_wrapper
from hyper_parallel.platform.torch.wrappers.swap_wrapper import swap_wrapper

_MATMULS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]


def is_cpu() -> bool:
    return not torch.accelerator.is_available()


class HowBlocksRun:
    """A model of its own, whose blocks `prepare` has wrapped; what `prepare` returns undoes it at the end."""

    def __init__(self, prepare: Callable[[nn.Module], Callable[[], None] | None]) -> None:
        self._trainer = Trainer()
        self._end = prepare(self._trainer.model)

    def measured(self) -> tuple[int, list[torch.Tensor]]:
        """Run one step; return its highest point above its beginning, and its gradients."""
        self._step()  # what is made once is made here
        meter = memory_meter(self._trainer.device)
        self._trainer.begin()
        with meter.running():
            meter.mark("step")
            self._step()
        peak = max(span.peak_bytes for span in meter.spans())
        gradients = [p.grad.clone() for p in self._trainer.model.parameters() if p.grad is not None]
        return peak, gradients

    def step_ms(self) -> float:
        self._wait()
        begin = time.perf_counter()
        self._step()
        self._wait()
        return (time.perf_counter() - begin) * 1e3

    def end(self) -> None:
        if self._end is not None:
            self._end()

    def _step(self) -> None:
        self._trainer.optimizer.zero_grad(set_to_none=False)
        self._trainer.model(self._trainer.batch()).backward()

    def _wait(self) -> None:
        if not is_cpu():
            torch.accelerator.synchronize()


def baselines(plan: Any) -> dict[str, HowBlocksRun]:
    """Make what is compared, by the name that the table shows; the plain model comes first."""

    def planned(model: nn.Module) -> Callable[[], None]:
        plan.apply(model)
        return lambda: plan.remove(model)

    return {
        "plain": HowBlocksRun(lambda model: None),
        "PyTorch: full checkpoint": HowBlocksRun(_on_every_block(torch_wrapper)),
        "PyTorch: selective, matmuls saved": HowBlocksRun(_on_every_block(_selective)),
        "ours: recompute every block": HowBlocksRun(_on_every_block(checkpoint_wrapper)),
        "ours: swap every block": HowBlocksRun(_on_every_block(swap_wrapper)),
        "ours: planned": HowBlocksRun(planned),
    }


def _selective(block: nn.Module) -> nn.Module:
    def policy(_: object, op: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _MATMULS else CheckpointPolicy.PREFER_RECOMPUTE

    return torch_wrapper(block, context_fn=lambda: create_selective_checkpoint_contexts(policy))


def _on_every_block(wrap: Callable[..., nn.Module]) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap(block)

    return prepare


class TorchBaselines:
    """The comparison as `hyper-parallel bench` asks for it."""

    folder: ClassVar[str] = "demo.baselines"

    def is_cpu(self) -> bool:
        return is_cpu()

    def trainer(self) -> Trainer:
        return Trainer()

    def baselines(self, plan: object) -> dict[str, HowBlocksRun]:
        return baselines(plan)

    def are_equal(self, left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


BACKEND = TorchBaselines()
