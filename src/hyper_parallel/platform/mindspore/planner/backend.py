"""The memory planner's MindSpore part, as the core asks for it.

What comes later is refused in `check_alone`, before anything is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn, TypeVar, cast

from mindspore import nn

from hyper_parallel._base.errors import ComesLaterError
from hyper_parallel.core.planner.model.choices import Decision
from hyper_parallel.core.planner.model.identity import Identity
from hyper_parallel.core.planner.model.profile import Region
from hyper_parallel.core.planner.plan import backend
from hyper_parallel.core.planner.plan.backend import Batch, LossFn, PlannerBackend
from hyper_parallel.core.planner.plan.batch_fit import PlannedBatch
from hyper_parallel.platform.mindspore.planner import memory, signature, steps
from hyper_parallel.platform.mindspore.planner.applying import Applied
from hyper_parallel.platform.mindspore.planner.profiling import ProfiledModel
from hyper_parallel.platform.opaque import Device

R = TypeVar("R")


class MindSporePlanner:
    """See `PlannerBackend`."""

    folder: ClassVar[str] = PlannerBackend.folder

    def check_model(self, model: nn.Cell, call: str) -> None:
        signature.check_model(model, call)

    def check_alone(self, what: str) -> None:
        steps.check_alone(what)

    def profiled(
        self,
        model: nn.Cell,
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
        model: nn.Cell,
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
        # The last three are of profiles of PyTorch: MindSpore's say nothing of them.
        return Applied(model, regions, decision, on_mismatch, was_training=was_training, batch=batch)

    def identity(self, model: nn.Cell, batch: Batch = None) -> Identity:
        return signature.identity(model, batch)

    def meta_of(self, batch: Batch) -> Any:
        return signature.meta_of(batch)

    def device_of(self, model: nn.Cell) -> Device:
        return steps.device_of(model)

    def free_bytes(self, device: Device) -> int:
        return memory.free_bytes(cast(str, device))

    def forward_of(self, model: nn.Cell) -> Callable[..., Any]:
        return signature.forward_of(model)

    def is_training(self, model: nn.Cell) -> bool:
        return bool(model.training)

    def attempt(self, function: Callable[[], R], device: Device) -> tuple[R | None, str | None]:
        return steps.attempt(function, cast(str, device))

    # -- what planning anew takes, which `check_alone` refuses ---------------------------------------------------------

    def patch_forward(self, model: nn.Cell, handler: Callable[..., Any]) -> backend.Removable:
        _later()

    def is_first_forward(self) -> bool:
        _later()

    def batch_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        _later()

    def autocast_of(self, device: Device) -> Callable[[], AbstractContextManager[Any]]:
        _later()

    def step_state(self, model: nn.Cell, *, with_gradients: bool, written: Iterable[str]) -> backend.StepState:
        _later()

    def out_of_memory(self, words: str) -> Exception:
        _later()

    def said_in_backward(self, words: str) -> AbstractContextManager[None]:
        _later()

    def some_loss(self, output: object) -> object:
        _later()


def _later() -> NoReturn:
    raise ComesLaterError("Planning anew where memory runs out comes later on MindSpore.")


BACKEND: PlannerBackend = MindSporePlanner()
