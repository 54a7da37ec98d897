"""`plan_memory` and its kin: profile, solve, prove on the real model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.plan.backend import planner_of
from hyper_parallel.core.planner.plan.batch_words import check_loss_fn
from hyper_parallel.core.planner.plan.budget import budget_bytes as parse_budget
from hyper_parallel.core.planner.plan.budget import budget_note, check_budget, reserve_bytes
from hyper_parallel.core.planner.plan.plan import MadeWith, MemoryPlan
from hyper_parallel.core.planner.plan.plan_file import profile_as_dict
from hyper_parallel.core.planner.plan.progress import Progress, check_progress, progress_of
from hyper_parallel.core.planner.plan.proof import planned, time_by_turns
from hyper_parallel.core.planner.plan.table import html_of, residual_parts, text_of
from hyper_parallel.core.swap.sizes import format_size
from hyper_parallel.platform.arguments import check_flag
from hyper_parallel.platform.opaque import Module


def plan_memory(
    model: Module,
    batch: object,
    *,
    budget: int | str = "auto",
    loss_fn: Callable[[Any], Any] | None = None,
    regions: Sequence[Any] | None = None,
    optimizer: object = None,
    reserve: int | str = 0,
    keeps_output: bool = True,
    verify: bool = True,
    progress: bool | Progress = True,
) -> MemoryPlan:
    """Choose save, recompute or swap for all that backward needs, so that a step fits and is as fast as it can be.

    A few real steps are measured; the model, its gradients, buffers and random generators are as before afterwards.
    Nothing is changed until `plan.apply(model)`.

    Args:
        model: the model, on its device and in the mode it trains in.
        batch: what it takes: a tensor, a tuple of arguments, or a dict of keywords.
        budget: bytes or a size such as "24GiB" for all that is alive at the highest point (parameters, gradients,
            optimizer state, activations); "40%" of the plain step's activations; or "auto", what the device has left.
        loss_fn: the loss in what the model gives; without it `.loss`, or the output itself.
        regions: the blocks that are planned, as paths, patterns ("layers.*") or classes; found by themselves without
            it.
        optimizer: its state counts, also before its first step.
        reserve: bytes to leave free for what nobody has allocated yet; the state of an `optimizer` is among it that is
            not known by its kind.
        keeps_output: whether training still has what the model gave while it runs backward and the next forward, as
            after `out = model(batch)` in a loop. False where a function of its own computes the loss and returns
            nothing else. PyTorch; MindSpore's step keeps none.
        verify: prove the plan with real steps, and solve again if the peak was above the budget.
        progress: show a bar; or a function that is told what happens.

    Raises:
        BudgetError (a ValueError): no choice fits; the smallest peak that can be had is named, and what it is made of.
        ValueError, TypeError: something in the arguments cannot be used.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(
        ...     *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(2))
        ... )
        >>> plan = plan_memory(model, torch.ones(4, 8), loss_fn=lambda y: y.sum(), budget="100%", progress=False)
        >>> plan.is_empty
        True
    """
    planner = planner_of(model, "plan_memory")
    check_options(
        budget=budget, loss_fn=loss_fn, reserve=reserve, keeps_output=keeps_output, verify=verify, progress=progress
    )
    profiled = planner.profiled(
        model,
        batch,
        loss_fn,
        regions=regions,
        optimizer=optimizer,
        reserve_bytes=reserve_bytes(reserve),
        keeps_output=keeps_output,
    )
    with progress_of(progress, "planning", num_steps=9) as say, profiled.preserved() as block, block:
        profile: StepProfile = profiled.agreed(profiled.profile(say))
        allowed = parse_budget(budget, profile, profiled.free_bytes())
        say("solving")
        plan = planned(profile, allowed, profiled if verify else None)
        say("timing steps")
        time_by_turns(plan, profiled)
        plan.origin = MadeWith(loss_fn, optimizer, reserve_bytes(reserve))
        plan.note = budget_note(budget)
        return plan


def explain(
    model: Module,
    batch: object,
    *,
    loss_fn: Callable[[Any], Any] | None = None,
    regions: Sequence[Any] | None = None,
    progress: bool | Progress = True,
) -> Explanation:
    """Show which residuals the model keeps: per module and op, how many bytes, and what recomputing them would cost.

    It plans nothing.

    Example:
        >>> import torch
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> model = torch.nn.Sequential(block, torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
        >>> explanation = explain(model, torch.ones(4, 8), loss_fn=lambda y: y.sum(), progress=False)
        >>> len(explanation.profile.regions)
        2
    """
    planner = planner_of(model, "explain")
    check_loss_fn(loss_fn)
    profiled = planner.profiled(model, batch, loss_fn, regions=regions)
    with progress_of(progress, "profiling", num_steps=6) as say, profiled.preserved() as block, block:
        profile = profiled.profile(say)
        say("looking at each op")
        return Explanation(profile, profiled.kept_by_op())


class Explanation:
    """What `explain` found; printed as a table."""

    def __init__(self, profile: StepProfile, kept: Sequence[tuple[str, str, str, int]] = ()) -> None:
        self.profile = profile
        self._kept = kept  # path of a block, module in it, op, bytes: where the profile has blocks only

    def __repr__(self) -> str:
        regions = self.profile.regions
        total = sum(region.residual_bytes for region in regions)
        model = self.profile.identity.model_words
        kept = f"{format_size(total)} kept for backward by {len(regions)} blocks"
        return f"<Explanation of {model}: {kept}; print it for the table>"

    def _repr_html_(self) -> str:
        return html_of(residual_parts(self.profile, self._kept))

    def __str__(self) -> str:
        return text_of(residual_parts(self.profile, self._kept))

    def as_dict(self) -> dict[str, Any]:
        """Give everything that was measured, for JSON."""
        return profile_as_dict(self.profile)


def check_options(
    *,
    budget: int | str,
    loss_fn: Callable[[Any], Any] | None,
    reserve: int | str,
    keeps_output: bool,
    verify: bool,
    progress: bool | Progress,
) -> None:
    """Check the options of `plan_memory` that can be checked without a model.

    Raises:
        ValueError, TypeError: one cannot be used.
    """
    check_budget(budget)
    check_loss_fn(loss_fn)
    reserve_bytes(reserve)
    check_flag(keeps_output, "keeps_output")
    check_flag(verify, "verify")
    check_progress(progress)
