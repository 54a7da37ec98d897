"""Accelerate: plan the model that `prepare` has given."""

from __future__ import annotations

from typing import Any

from accelerate.utils import send_to_device

from hyper_parallel.core.planner.plan import MemoryPlan, check_choices
from hyper_parallel.core.planner.planning import plan_memory

__all__ = ["fit_in_memory"]


def fit_in_memory(
    accelerator: Any, model: Any, batch: Any, budget: int | str = "auto", *, on_oom: str = "error", **options: Any
) -> MemoryPlan:
    """Plan a model that `accelerator.prepare` has given, and apply the plan; `plan.remove(accelerator.unwrap_model(model))` undoes it.

    Args:
        accelerator: the `Accelerator`.
        model: what `prepare` returned for the model.
        batch: one batch, on any device.
        budget: as of `hp.plan_memory`; so are the other options.
        on_oom: as of `plan.apply`.
    """
    check_choices(on_oom=on_oom)
    inner = accelerator.unwrap_model(model)
    plan = plan_memory(
        inner, send_to_device(batch, accelerator.device), budget=budget,
        **{"progress": accelerator.is_main_process, **options},
    )  # fmt: skip
    return plan.apply(inner, on_oom=on_oom)
