"""The demo: a small transformer is planned under a budget and trained with and without the plan."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hyper_parallel.cli.build import check_budget_option, check_swap_dir, check_target, swap_directory, users_stdout
from hyper_parallel.core.planner.plan.plan import MemoryPlan
from hyper_parallel.core.planner.planning import plan_memory
from hyper_parallel.core.swap.sizes import format_size
from hyper_parallel.platform import get_torch_platform
from hyper_parallel.platform.opaque import Module
from hyper_parallel.platform.selection import backend
from hyper_parallel.report.page import write_report


class Trained(NamedTuple):
    losses: list[float]
    step_ms: float


class Outcome(NamedTuple):
    plan: MemoryPlan
    plain: Trained
    planned: Trained
    report: Path

    @property
    def is_equal(self) -> bool:
        return self.plain.losses == self.planned.losses

    def as_dict(self) -> dict[str, Any]:
        """Return what the table shows, for tools."""
        measured = self.plan.measured
        return {
            "budget_bytes": self.plan.budget_bytes,
            "plain": {"peak_bytes": self.plan.profile.peak_bytes, **self.plain._asdict()},
            "planned": {"peak_bytes": None if measured is None else measured.peak_bytes, **self.planned._asdict()},
            "losses_are_equal": self.is_equal,
            "report": str(self.report),
        }


class DemoTrainer(Protocol):
    """A small transformer with its optimizer, always the same."""

    model: Module
    optimizer: Any

    def batch(self) -> Any: ...

    def describe(self) -> str: ...

    def begin(self) -> None: ...

    def step(self) -> float:
        """Take one training step, and return its loss."""


class DemoBackend(Protocol):
    """What the demo asks of a framework."""

    folder: ClassVar[str] = "demo.transformer"

    def trainer(self) -> DemoTrainer: ...


def run_demo(console: Console, budget: str, num_steps: int, report: Path, swap_dir: Path | None = None) -> Outcome:
    """Plan the demo's model, train it without and with the plan, and show both."""
    check_target(report)
    check_swap_dir(swap_dir)
    check_budget_option(budget)
    demo = backend(get_torch_platform(), DemoBackend, "hyper-parallel demo")
    trainer = demo.trainer()
    console.print(f"[bold]{trainer.describe()}[/]")
    with swap_directory(swap_dir):
        with users_stdout():
            plan = plan_memory(trainer.model, trainer.batch(), budget=budget, optimizer=trainer.optimizer)
        console.print(f"\n{plan}\n", markup=False)
        plain = _trained(demo.trainer(), None, num_steps, "training as it is", console)
        planned = _trained(demo.trainer(), plan, num_steps, "training with the plan", console)
    outcome = Outcome(plan, plain, planned, report)
    same = "equal, bit for bit" if outcome.is_equal else "DIFFERENT"
    write_report(plan, report, notes=[("losses of both runs", same)])
    _show(console, outcome)
    return outcome


def _trained(trainer: DemoTrainer, plan: MemoryPlan | None, num_steps: int, what: str, console: Console) -> Trained:
    if plan is not None:
        plan.apply(trainer.model)
    try:
        trainer.begin()
        losses, times = [], []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            for _ in bar.track(range(num_steps), description=what):
                begin = time.perf_counter()
                losses.append(trainer.step())
                times.append((time.perf_counter() - begin) * 1e3)
        return Trained(losses, sorted(times)[len(times) // 2])
    finally:
        if plan is not None:
            plan.remove(trainer.model)


def _show(console: Console, outcome: Outcome) -> None:
    plan, plain, planned = outcome.plan, outcome.plain, outcome.planned
    table = Table(title=f"{len(plain.losses)} training steps", title_justify="left")
    for name in ("", "peak memory", "activations", "step", "first loss", "last loss"):  # 80 columns are enough
        table.add_column(name, justify="left" if not name else "right")
    base, activations = plan.base_bytes, max(plan.profile.activation_peak_bytes, 1)
    peaks = (plan.profile.peak_bytes, plan.profile.peak_bytes if plan.measured is None else plan.measured.peak_bytes)
    for name, trained, peak in (("as it is", plain, peaks[0]), ("with the plan", planned, peaks[1])):
        table.add_row(
            name,
            format_size(peak),
            f"{(peak - base) / activations:.0%}",
            f"{trained.step_ms:.0f} ms",
            f"{trained.losses[0]:.4f}",
            f"{trained.losses[-1]:.4f}",
        )
    console.print(table)
    if outcome.is_equal:
        console.print(
            "All losses are equal, bit for bit: the plan changes where activations are, not what is computed."
        )
    else:
        console.print("[bold red]The losses differ. Please report this with the output of `hyper-parallel doctor`.[/]")
    console.print(f"The picture: {outcome.report}")
