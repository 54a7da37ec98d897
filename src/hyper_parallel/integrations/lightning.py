"""Lightning: a callback that plans with the first batch when training starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.log import get_logger
from hyper_parallel.core.planner.plan.plan import MemoryPlan, check_choices
from hyper_parallel.core.planner.plan.progress import Progress
from hyper_parallel.core.planner.planning import check_options, plan_memory
from hyper_parallel.integrations.announcement import announce, announce_replans
from hyper_parallel.integrations.first_batch import first_batch, generators_kept
from hyper_parallel.platform import platform_of

__all__ = ["MemoryPlanCallback"]

_logger = get_logger("integrations")


class MemoryPlanCallback(Callback):  # type: ignore[misc]  # lightning is not typed for mypy here
    """Plans `training_step` when training starts, and takes the plan off when it ends, also by an exception.

    Steps are planned as the trainer runs them: with its precision, its transfer of batches, and its optimizer's state
    counted. A later batch that is larger than the planned one is an error before it trains.

    Args:
        budget: as of `hp.plan_memory`.
        on_oom: as of `plan.apply`: with "replan" a larger batch is planned before it trains, and one whose forward runs
            out of memory is planned anew.
        batch: the largest that training has, as the loader would give it; without it the loader's first.
        loss_fn: the loss in what `training_step` gives; without it that itself, or its "loss".
        regions: as of `hp.plan_memory`, with paths that begin with "module."; so are `reserve`, `keeps_output`,
            `verify` and `progress`.
        optimizer: the one whose state counts; without it the trainer's.

    Raises:
        ValueError, TypeError: something in the arguments cannot be used.

    Attributes:
        plan: the plan, once training has started.
        stats: `plan.stats` of the last training that is over.

    Example:
        lightning.Trainer(callbacks=[MemoryPlanCallback("60%")]).fit(model, loader)
    """

    def __init__(
        self,
        budget: int | str = "auto",
        *,
        on_oom: str = "error",
        batch: object = None,
        loss_fn: Callable[[Any], Any] | None = None,
        regions: Sequence[Any] | None = None,
        optimizer: object = None,
        reserve: int | str = 0,
        keeps_output: bool = True,
        verify: bool = True,
        progress: bool | Progress = False,
    ) -> None:
        check_choices(on_oom=on_oom)
        check_options(
            budget=budget, loss_fn=loss_fn, reserve=reserve, keeps_output=keeps_output, verify=verify, progress=progress
        )
        self.budget = budget
        self.on_oom = on_oom
        self.batch = batch
        self.optimizer = optimizer
        self.options: dict[str, Any] = {
            "loss_fn": _loss if loss_fn is None else loss_fn, "regions": regions, "reserve": reserve,
            "keeps_output": keeps_output, "verify": verify, "progress": progress,
        }  # fmt: skip
        self.plan: MemoryPlan | None = None
        self.stats: dict[str, int] = {}
        self._step: Any = None
        self._planned: _PlannedTrainingStep | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _check_automatic(pl_module)
        batch = _batch(trainer, pl_module, self.batch)
        step = _as_module(pl_module, trainer.precision_plugin)
        optimizer = _optimizer(trainer) if self.optimizer is None else self.optimizer
        with _nothing_is_logged(pl_module):
            self.plan = plan_memory(step, (batch,), budget=self.budget, optimizer=optimizer, **self.options)
        self.plan.apply(step, on_oom=self.on_oom)
        self._step = step
        self._planned = _PlannedTrainingStep(pl_module, step)
        if trainer.is_global_zero:
            announce(self.plan)
            _logger.info("%s", self.plan)

    def on_train_end(self, trainer: Any, pl_module: object) -> None:
        self._remove()

    def on_exception(self, trainer: Any, pl_module: object, exception: BaseException) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._planned is not None:
            self._planned.remove()
            self._planned = None
        if self.plan is not None and self._step is not None:
            self.plan.remove(self._step)
            self.stats = self.plan.stats(self._step)
            announce_replans(self.stats)
            self._step = None


def _check_automatic(pl_module: Any) -> None:
    """Refuse a `training_step` that steps the optimizer itself.

    A plan is made with steps that leave no trace, and such a step leaves one.
    """
    if not pl_module.automatic_optimization:
        raise ArgumentError(
            "`training_step` runs the backward and the optimizer itself, so that it cannot be planned.",
            expected="automatic optimization",
            got="automatic_optimization=False",
            where=type(pl_module).__name__,
            do="Plan the network in it: plan = hp.plan_memory(self.net, batch, loss_fn=...), "
            "then plan.apply(self.net).",
        )


def _batch(trainer: Any, pl_module: Any, given: Any) -> Any:
    """Return the given batch, or the loader's first, as the trainer's loop would give it to `training_step`."""
    batch = first_batch(trainer.train_dataloader, pl_module, "lightning.Trainer") if given is None else given
    with generators_kept(pl_module):
        batch = trainer.precision_plugin.convert_input(batch)
        batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _optimizer(trainer: Any) -> Any:
    """Return the one optimizer of automatic optimization; None if the module configures none."""
    found = [optimizer for optimizer in trainer.optimizers if type(optimizer).__name__ != "_MockOptimizer"]
    return found[0] if found else None


def _as_module(pl_module: Any, precision: Any) -> Any:
    """Make `training_step` a module's forward: that is what a step is, whatever the module's own forward does."""
    module_type = platform_of(pl_module).Module
    training_step = pl_module.training_step  # not the one that takes its place while the plan is on
    # Its name can be anything, and it may be left out.
    numbers = (0,) if is_param_in_hook_signature(training_step, "batch_idx", min_args=2) else ()

    class TrainingStep(module_type):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.module = pl_module
            self.numbers: tuple[Any, ...] = numbers  # no part of the batch: batches that look alike have one plan
            self.is_running = False

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if self.is_running:  # a step of planning anew, inside of the step that needs it
                with _nothing_is_logged(pl_module):
                    return super().__call__(*args, **kwargs)
            self.is_running = True
            try:
                return super().__call__(*args, **kwargs)
            finally:
                self.is_running = False

        def forward(self, batch: object, **named: Any) -> Any:
            with precision.train_step_context():
                return training_step(batch, *self.numbers, **named)

    TrainingStep.__qualname__ = f"training_step of {type(pl_module).__name__}"  # what the plan's table says
    return TrainingStep()


class _PlannedTrainingStep:
    """Stands in the place of `training_step` while the plan is on; `remove` undoes it.

    It calls the module that was planned, which looks at the batch of each step.

    Not a closure, so that a copy of the LightningModule has its own `training_step`.
    """

    def __init__(self, pl_module: Any, step: Any) -> None:
        self._module, self._step = pl_module, step
        self._before = vars(pl_module).get("training_step")
        training_step = pl_module.training_step
        self.__wrapped__ = getattr(training_step, "__wrapped__", training_step)  # whose arguments Lightning looks at
        pl_module.training_step = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._step.numbers = args[1:]
        return self._step(*args[:1], **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "training_step")

    def remove(self) -> None:
        if vars(self._module).get("training_step") is self:
            del self._module.training_step
            if self._before is not None:
                self._module.training_step = self._before


@contextlib.contextmanager
def _nothing_is_logged(pl_module: object) -> Iterator[None]:
    """Let `log` do nothing while the block runs.

    Steps that only measure are nobody's metrics, and Lightning refuses `log` outside of its loops.
    """
    for name in ("log", "log_dict"):
        setattr(pl_module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            delattr(pl_module, name)


def _loss(out: object) -> Any:
    found = out.get("loss") if isinstance(out, dict) else out
    if found is None or not hasattr(found, "backward"):
        raise ArgumentTypeError(
            "`training_step` gives no loss.", expected="a tensor, or a dict with 'loss'", got=describe(out)
        )
    return found
