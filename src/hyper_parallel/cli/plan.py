"""Planning and explaining a model that a user's own function builds."""

from __future__ import annotations

from pathlib import Path

from hyper_parallel.cli.build import (
    built,
    check_budget_option,
    check_file,
    check_other_file,
    check_swap_dir,
    check_target,
    swap_directory,
    users_stdout,
)
from hyper_parallel.core.planner.plan.largest import Largest, largest
from hyper_parallel.core.planner.plan.plan import MemoryPlan
from hyper_parallel.core.planner.planning import Explanation, explain, plan_memory


def plan_build(
    build: str, budget: str, out: Path | None = None, report: Path | None = None, swap_dir: Path | None = None
) -> MemoryPlan:
    """Plan what `package.module:function` builds.

    A budget in its dict counts where the command names none.
    """
    check_target(out)
    check_target(report)
    check_swap_dir(swap_dir)
    check_budget_option(budget)
    made = built(build)
    arguments = {**made.arguments, "budget": made.arguments.get("budget", "auto") if budget == "auto" else budget}
    with swap_directory(swap_dir), users_stdout():
        plan = plan_memory(made.model, made.batch, **arguments)
    if out is not None:
        plan.save(out)
    if report is not None:
        plan.report(report)
    return plan


def largest_build(
    build: str, budget: str, at_most: int | None, out: Path | None = None, swap_dir: Path | None = None
) -> Largest:
    """Find the largest size for what `package.module:function` builds.

    That is a model, and a function that makes a batch of a size.
    """
    check_target(out)
    check_swap_dir(swap_dir)
    check_budget_option(budget, may_be_part=False)
    made = built(build, "make_batch")
    arguments = {**made.arguments, "budget": made.arguments.get("budget", "auto") if budget == "auto" else budget}
    if at_most is not None:
        arguments["at_most"] = at_most
    with swap_directory(swap_dir), users_stdout():
        found = largest(made.model, made.batch, **arguments)
    if out is not None:
        found.plan.save(out)
    return found


def explain_build(build: str) -> Explanation:
    """Show what the model that `package.module:function` builds keeps for backward."""
    made = built(build)
    with users_stdout():
        return explain(made.model, made.batch, **made.of("loss_fn", "regions"))


def report_of(file: Path, out: Path | None = None) -> tuple[MemoryPlan, Path]:
    """Write the page about a saved plan, beside it if `out` does not say where. Returns the plan and the page's
    path.
    """
    check_file(file)
    target = file.with_suffix(".html") if out is None else out
    check_target(target)
    check_other_file(target, file)
    plan = MemoryPlan.load(file)
    plan.report(target)
    return plan, target
