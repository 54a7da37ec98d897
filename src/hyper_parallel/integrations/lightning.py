"""Lightning: a callback that plans with the first batch when training starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel._base.log import get_logger
from hyper_parallel.core.planner.plan import MemoryPlan
from hyper_parallel.core.planner.planning import plan_memory
from hyper_parallel.integrations.first_batch import first_batch
from hyper_parallel.platform import platform_of

__all__ = ["MemoryPlanCallback"]

_logger = get_logger("integrations")


class MemoryPlanCallback(Callback):  # type: ignore[misc]  # lightning is not typed for mypy here
    """Plans `training_step` when training starts, and takes the plan off when it ends.

    Args:
        budget: as of `hp.plan_memory`.
        options: more of `hp.plan_memory`'s arguments.

    Attributes:
        plan: the plan, once training has started.

    Example:
        lightning.Trainer(callbacks=[MemoryPlanCallback("60%")]).fit(model, loader)
    """

    def __init__(self, budget: int | str = "auto", **options: Any) -> None:
        self.budget = budget
        self.options = options
        self.plan: MemoryPlan | None = None
        self._step: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        batch = trainer.strategy.batch_to_device(first_batch(trainer.train_dataloader, pl_module, "lightning.Trainer"))
        self._step = _as_module(pl_module)
        options = {"loss_fn": _loss, "progress": False, **self.options}
        with _nothing_is_logged(pl_module):
            self.plan = plan_memory(self._step, (batch,), budget=self.budget, **options)
        self.plan.apply(self._step)
        if trainer.is_global_zero:
            _logger.info("%s", self.plan)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.plan is not None and self._step is not None:
            self.plan.remove(self._step)
            self._step = None


def _as_module(pl_module: Any) -> Any:
    """`training_step` as a module's forward: that is what a step is, whatever the module's own forward does."""
    module_type = platform_of(pl_module).Module

    class TrainingStep(module_type):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.module = pl_module

        def forward(self, batch: Any) -> Any:
            return self.module.training_step(batch, 0)

    TrainingStep.__qualname__ = f"training_step of {type(pl_module).__name__}"  # what the plan's table says
    return TrainingStep()


@contextlib.contextmanager
def _nothing_is_logged(pl_module: Any) -> Iterator[None]:
    """Steps that only measure are nobody's metrics, and Lightning refuses `log` outside of its loops."""
    for name in ("log", "log_dict"):
        setattr(pl_module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            delattr(pl_module, name)


def _loss(out: Any) -> Any:
    found = out.get("loss") if isinstance(out, dict) else out
    if found is None or not hasattr(found, "backward"):
        raise ArgumentTypeError(
            "`training_step` gives no loss.", expected="a tensor, or a dict with 'loss'", got=describe(out)
        )
    return found
