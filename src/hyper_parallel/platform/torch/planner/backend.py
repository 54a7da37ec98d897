"""The memory planner's PyTorch part, as the core asks for it: profiling a real model, and carrying a plan out on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from hyper_parallel.core.planner.model.choices import Decision
from hyper_parallel.core.planner.model.identity import Identity
from hyper_parallel.core.planner.model.profile import Region
from hyper_parallel.core.planner.plan import backend
from hyper_parallel.core.planner.plan.backend import Batch, LossFn, PlannerBackend
from hyper_parallel.core.planner.plan.batch_fit import PlannedBatch
from hyper_parallel.platform.torch.planner import memory, out_of_memory, signature, steps
from hyper_parallel.platform.torch.planner.applying import Applied
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel
from hyper_parallel.platform.torch.planner.step_state import StepState

R = TypeVar("R")


class TorchPlanner:
    """See `PlannerBackend`."""

    folder: ClassVar[str] = PlannerBackend.folder

    def check_model(self, model: nn.Module, call: str) -> None:
        signature.check_model(model, call)

    def check_alone(self, what: str) -> None:
        steps.check_alone(what)

    def profiled(
        self,
        model: nn.Module,
        batch: Batch,
        loss_fn: LossFn | None,
        *,
        regions: Sequence[Any] | None = None,
        optimizer: object = None,
        reserve_bytes: int = 0,
        keeps_output: bool = False,
    ) -> backend.ProfiledModel:
        return ProfiledModel(
            model,
            batch,
            loss_fn,
            regions=regions,
            optimizer=optimizer,
            reserve_bytes=reserve_bytes,
            keeps_output=keeps_output,
        )

    def apply(
        self,
        model: nn.Module,
        regions: Sequence[Region],
        decision: Decision,
        on_mismatch: str,
        *,
        was_training: bool,
        batch: PlannedBatch,
        ahead_bytes: Sequence[int] = (),
        by_framework: bool | None = None,
        autocast: str | None = None,
    ) -> backend.Applied:
        return Applied(
            model,
            regions,
            decision,
            on_mismatch,
            was_training=was_training,
            batch=batch,
            ahead_bytes=ahead_bytes,
            by_framework=by_framework,
            autocast=autocast,
        )

    def identity(self, model: nn.Module, batch: Batch = None) -> Identity:
        return signature.identity(model, batch)

    def meta_of(self, batch: Batch) -> Any:
        return signature.meta_of(batch)

    def device_of(self, model: nn.Module) -> torch.device:
        return steps.device_of(model)

    def free_bytes(self, device: torch.device) -> int:
        return memory.free_bytes(device)

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        return signature.forward_of(model)

    def is_training(self, model: nn.Module) -> bool:
        return model.training

    def patch_forward(self, model: nn.Module, handler: Callable[..., Any]) -> backend.Removable:
        return steps.PatchedForward(model, handler)

    def is_first_forward(self) -> bool:
        return steps.is_first_forward()

    def batch_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        return steps.batch_of(args, kwargs)

    def autocast_of(self, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
        return steps.autocast_of(device)

    def step_state(self, model: nn.Module, *, with_gradients: bool, written: Iterable[str]) -> backend.StepState:
        return StepState(model, with_gradients=with_gradients, written=written)

    def attempt(self, function: Callable[[], R], device: torch.device) -> tuple[R | None, str | None]:
        return out_of_memory.attempt(function, device)

    def out_of_memory(self, words: str) -> Exception:
        return torch.OutOfMemoryError(words)

    def said_in_backward(self, words: str) -> AbstractContextManager[None]:
        return out_of_memory.said_in_backward(words)

    def some_loss(self, output: object) -> object:
        return steps.some_loss(output)


BACKEND: PlannerBackend = TorchPlanner()
