"""What the planner asks of a framework. Each framework has one object that does it: `BACKEND` in its folder `planner`.

Example: `planner_of(model, "plan_memory").profiled(model, batch, loss_fn)` is a `ProfiledModel`, whose `profile()` runs
a few real steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from hyper_parallel._base.errors import ArgumentTypeError
from hyper_parallel.core.planner.model.choices import Decision
from hyper_parallel.core.planner.model.identity import Identity
from hyper_parallel.core.planner.model.mismatches import Mismatches
from hyper_parallel.core.planner.model.profile import Region, StepProfile
from hyper_parallel.core.planner.plan.batch_fit import BatchCheck, PlannedBatch
from hyper_parallel.core.planner.plan.progress import Progress
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Device, Module
from hyper_parallel.platform.selection import backend

__all__ = ["Applied", "Batch", "LossFn", "PlannerBackend", "ProfiledModel", "Removable", "StepState", "planner_of"]

R = TypeVar("R")
Batch: TypeAlias = object  # what a model is called with: a tensor, a tuple of arguments, a dict of keywords
LossFn: TypeAlias = Callable[[Any], Any]
Forward: TypeAlias = Callable[..., Any]


class ProfiledModel(Protocol):
    """A model and a batch, with which real steps are run.

    It lives for one call of the planner, and holds both as long.
    """

    model: Module
    batch: Batch

    def profile(self, progress: Progress | None = None) -> StepProfile: ...

    def preserved(self) -> AbstractContextManager[AbstractContextManager[Any]]:
        """Open a context whose result is another one.

        When that one ends, the model, its gradients and the generators are as they were.
        """

    def agreed(self, profile: StepProfile) -> StepProfile:
        """Give the profile that all ranks plan with, where several train together."""

    def free_bytes(self) -> int: ...

    def suggested_blocks(self, inside: str | None = None) -> list[str]: ...

    def kept_by_op(self) -> list[tuple[str, str, str, int]]:
        """List the ops that keep something for backward: the path of the block, the module in it, the op, and the
        bytes.
        """

    def look_for_writes(self) -> None:
        """Find the tensors that a step writes into, before steps are run that must leave them as they are."""

    def peak_bytes(self) -> int:
        """Measure the peak of a step as the model is now, above what is alive when forward begins."""

    def peaks_within(self, num_steps: int, *, num_before: int) -> int | None:
        """Measure the highest peak of some steps, after some that do not count. None: memory ran out."""

    def step_ms(self, num_steps: int = ...) -> float: ...

    def step_ms_within(self) -> float | None:
        """Measure the time of a step. None: memory ran out."""

    @property
    def tells_time(self) -> bool:
        """Say whether a few steps tell how fast a plan is: not on a CPU, nor with several ranks."""

    @property
    def is_alone(self) -> bool:
        """Say whether no other ranks plan with this one."""


class Removable(Protocol):
    """Something that was put on a model and can be taken off."""

    def remove(self) -> None: ...


class Applied(Removable, Protocol):
    """A plan that is on a model. `remove` leaves the model as it was."""

    mismatches: Mismatches
    check: BatchCheck

    def begins(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a step begins which no hook has seen, since the plan was put on in the middle of it."""


class StepState(Protocol):
    """What a step may change, as it was before the step."""

    def note_given(self, arguments: Batch) -> None: ...

    def restore(self) -> None: ...

    def close(self) -> None: ...


class PlannerBackend(Protocol):
    """One framework's part of the planner. What a framework does not have raises `ComesLaterError`."""

    folder: ClassVar[str] = "planner.backend"

    def check_model(self, model: Module, call: str) -> None:
        """Raise TypeError where it is no module of this framework."""

    def check_alone(self, what: str) -> None:
        """Raise where several ranks train together, or where this framework does not have it."""

    def profiled(
        self,
        model: Module,
        batch: Batch,
        loss_fn: LossFn | None,
        *,
        regions: Sequence[Any] | None = None,
        optimizer: object = None,
        reserve_bytes: int = 0,
        keeps_output: bool = False,
    ) -> ProfiledModel: ...

    def apply(
        self,
        model: Module,
        regions: Sequence[Region],
        decision: Decision,
        on_mismatch: str,
        *,
        was_training: bool,
        batch: PlannedBatch,
        ahead_bytes: Sequence[int] = (),
        by_framework: bool | None = None,
        autocast: str | None = None,
    ) -> Applied: ...

    def identity(self, model: Module, batch: Batch = None) -> Identity:
        """Say what the model is, for a comparison before a plan goes on it. Without a batch nothing is said of one."""

    def meta_of(self, batch: Batch) -> Any:
        """Put a tensor's dtype and shape in place of each tensor of a batch: "float32[4, 8]".

        Plan files have it, and batches are compared by it.
        """

    def device_of(self, model: Module) -> Device: ...

    def free_bytes(self, device: Device) -> int: ...

    def forward_of(self, model: Module) -> Forward: ...

    def is_training(self, model: Module) -> bool: ...

    def patch_forward(self, model: Module, handler: Forward) -> Removable:
        """Call `handler(original, args, kwargs)` in place of the model's forward."""

    def is_first_forward(self) -> bool:
        """Say whether a forward that runs now is one of a training step, and not a part of backward."""

    def batch_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch: ...

    def autocast_of(self, device: Device) -> Callable[[], AbstractContextManager[Any]]:
        """Note the autocast that is on now, and give what opens the same one later."""

    def step_state(self, model: Module, *, with_gradients: bool, written: Iterable[str]) -> StepState: ...

    def attempt(self, function: Callable[[], R], device: Device) -> tuple[R | None, str | None]:
        """Call the function and give what it gives, and None; or None, and what was said when memory ran out."""

    def out_of_memory(self, words: str) -> Exception:
        """Make the framework's own error for memory that ran out."""

    def said_in_backward(self, words: str) -> AbstractContextManager[None]:
        """Let a backward that runs out of memory while this is open say these words, too."""

    def some_loss(self, output: object) -> object:
        """Make a loss of what a model gives, where nobody has said which."""


def planner_of(model: Module, call: str) -> PlannerBackend:
    """Find the planner's part of the model's framework. `call` is what the user called."""
    if model is None:
        raise ArgumentTypeError(f"`{call}` needs a model.", expected="a module", got="None")
    found = backend(platform_of(model, call=call), PlannerBackend, call)
    found.check_model(model, call)
    return found
