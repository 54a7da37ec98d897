"""Accelerate: plan the model that `prepare` has given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from accelerate.utils import send_to_device

from hyper_parallel.core.planner.plan.plan import MemoryPlan, check_choices
from hyper_parallel.core.planner.plan.progress import Progress
from hyper_parallel.core.planner.planning import plan_memory

__all__ = ["fit_in_memory"]


def fit_in_memory(
    accelerator: Any,
    model: Any,
    batch: Any,
    budget: int | str = "auto",
    *,
    on_oom: str = "error",
    loss_fn: Callable[[Any], Any] | None = None,
    regions: Sequence[Any] | None = None,
    optimizer: Any = None,
    reserve: int | str = 0,
    keeps_output: bool = True,
    verify: bool = True,
    progress: bool | Progress | None = None,
) -> MemoryPlan:
    """Plan a model that `accelerator.prepare` has given, and apply the plan.

    `plan.remove(accelerator.unwrap_model(model))` undoes it.

    Args:
        accelerator: the `Accelerator`.
        model: what `prepare` returned for the model.
        batch: one batch, on any device.
        budget: as of `hp.plan_memory`; so are the other options.
        on_oom: as of `plan.apply`.
        progress: a bar on the main process, unless it is said.
    """
    check_choices(on_oom=on_oom)
    inner = accelerator.unwrap_model(model)
    plan = plan_memory(
        inner,
        send_to_device(batch, accelerator.device),
        budget=budget,
        loss_fn=loss_fn,
        regions=regions,
        optimizer=optimizer,
        reserve=reserve,
        keeps_output=keeps_output,
        verify=verify,
        progress=accelerator.is_main_process if progress is None else progress,
    )
    return plan.apply(inner, on_oom=on_oom)
