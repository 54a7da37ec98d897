"""A plan that nothing was solved or measured for: for tests of what is shown and saved of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from hyper_parallel.core.planner.model.choices import SWAP, plain, recompute_all
from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.plan.plan import Measured, MemoryPlan, Predicted
from hyper_parallel.core.planner.search.settings import Setting
from support import planner_cases as cases


def profile_of(device: str = "cpu", **others: Any) -> StepProfile:
    profile = cases.as_measured(cases.transformer(4, differ=False))
    return dataclasses.replace(cases.measured_of(profile, model="<Llama>", device=device, is_training=True), **others)


def plan_of(
    *, swaps: bool = True, to_plain: float | None = None, device: str = "cpu", is_empty: bool = False, **others: Any
) -> MemoryPlan:
    """Blocks that are run again, their inputs swapped; nothing is solved for it."""
    profile = profile_of(device, **others)
    decision = tuple(plain(region) if is_empty else recompute_all(region) for region in profile.regions)
    if swaps and not is_empty:
        decision = (dataclasses.replace(decision[0], inputs=(SWAP,) * len(decision[0].inputs)), *decision[1:])
    predicted = Predicted(profile.base_bytes + 2**30, 1.1 * profile.step_ms)
    plan = MemoryPlan(profile, decision, Setting(2**28, 2**28), profile.base_bytes + 2**31, predicted)
    if not is_empty:
        plan.measured = Measured(
            predicted.peak_bytes, *((None, None) if to_plain is None else (to_plain * 200.0, 200.0))
        )
    return plan
