"""Hugging Face's `Trainer`: plan with the first batch, train inside the budget, leave the model as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel._base.log import get_logger
from hyper_parallel.core.planner.plan.plan import MemoryPlan, check_choices
from hyper_parallel.core.planner.plan.progress import Progress
from hyper_parallel.core.planner.planning import check_options, plan_memory
from hyper_parallel.integrations.announcement import announce, announce_replans
from hyper_parallel.integrations.first_batch import first_batch
from hyper_parallel.platform.opaque import Device

__all__ = ["MemoryPlanCallback", "fit_in_memory"]

_logger = get_logger("integrations")


class MemoryPlanCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for mypy here
    """Plans when training begins, and takes the plan off when it ends.

    Where training raises, `remove` takes it off, which `fit_in_memory` sees to.

    Args:
        budget: as of `hp.plan_memory`; so are `regions`, `reserve`, `verify` and `progress`.
        on_oom: as of `plan.apply`: with "replan" a larger batch is planned before it trains, and one whose forward runs
            out of memory is planned anew.
        batch: the largest that training has, as the data collator would give it; without it the loader's first.
        loss_fn: the loss in what the model gives; without it the model's own.
        optimizer: the one whose state counts; without it the trainer's.
        keeps_output: whether the trainer keeps what the model gave; it does not, unless a `compute_loss` of your own
            does.

    Raises:
        ValueError, TypeError: something in the arguments cannot be used.

    Attributes:
        plan: the plan, once training has begun.
        stats: `plan.stats` of the last training that is over.

    Example:
        trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryPlanCallback("60%")])
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
        keeps_output: bool = False,  # `compute_loss` gives the loss alone
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
        self._model: Any = None

    def on_train_begin(self, args: Any, state: Any, control: object, **given: Any) -> None:
        self.remove()  # what a training that raised has left
        _check_not_compiled(args)
        model = _inner(given["model"])
        batch = first_batch(given.get("train_dataloader"), model, "Trainer") if self.batch is None else self.batch
        batch = _on_device(batch, args.device)
        optimizer = given.get("optimizer") if self.optimizer is None else self.optimizer
        self.plan = plan_memory(model, batch, budget=self.budget, optimizer=optimizer, **self.options)
        self.plan.apply(model, on_oom=self.on_oom)
        self._model = model
        if state.is_world_process_zero:
            announce(self.plan)
            _logger.info("%s", self.plan)

    def on_train_end(self, args: object, state: object, control: object, **given: Any) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the plan off, if it is on."""
        if self.plan is not None and self._model is not None:
            self.plan.remove(self._model)
            self.stats = self.plan.stats(self._model)
            announce_replans(self.stats)
            self._model = None


def fit_in_memory(
    trainer: Any,
    budget: int | str = "auto",
    *,
    on_oom: str = "error",
    batch: Any = None,
    loss_fn: Callable[[Any], Any] | None = None,
    regions: Sequence[Any] | None = None,
    optimizer: Any = None,
    reserve: int | str = 0,
    keeps_output: bool = False,
    verify: bool = True,
    progress: bool | Progress = False,
) -> MemoryPlanCallback:
    """Let a `Trainer` train inside a budget: `fit_in_memory(trainer)`, then `trainer.train()` as ever.

    The plan is off when that is over, also by an exception.

    The callback is returned; it has the plan once training has begun. Called again, the new budget is in the place of
    the old one.

    Args:
        trainer: the `Trainer`.
        budget, on_oom, batch, loss_fn, regions, optimizer, reserve, keeps_output, verify, progress:
            as of `MemoryPlanCallback`.
    """
    callback = MemoryPlanCallback(
        budget, on_oom=on_oom, batch=batch, loss_fn=loss_fn, regions=regions, optimizer=optimizer, reserve=reserve,
        keeps_output=keeps_output, verify=verify, progress=progress,
    )  # fmt: skip
    train = trainer.train
    if isinstance(train, functools.partial) and train.func is _train:  # called before
        train, earlier = train.args
        earlier.remove()
        trainer.remove_callback(earlier)
    trainer.add_callback(callback)
    trainer.train = functools.partial(_train, train, callback)  # no callback is told of an exception
    return callback


def _train(train: Callable[..., Any], callback: MemoryPlanCallback, *args: Any, **kwargs: Any) -> Any:
    try:
        return train(*args, **kwargs)
    finally:
        callback.remove()


def _check_not_compiled(args: object) -> None:
    if getattr(args, "torch_compile", False):
        raise ArgumentError(
            "The trainer compiles the model as a whole, and a plan is carried out in Python, around each block.",
            expected="torch_compile=False",
            got="torch_compile=True",
            where="TrainingArguments",
            do="Compile the blocks before training: `for layer in model.model.layers: layer.compile()`.",
        )


def _inner(model: Any) -> Any:
    """Return the model itself, inside of what data parallel training wraps around it."""
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
        model = model.module
    return model


def _on_device(batch: object, device: Device) -> Any:
    if hasattr(batch, "items"):
        return {name: _on_device(value, device) for name, value in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch


def _loss(out: Any) -> Any:
    return out["loss"] if isinstance(out, dict) else out[0]
