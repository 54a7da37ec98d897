"""The demo: a small transformer is planned under a budget and trained with and without the plan."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hyper_parallel.cli.build import quiet_stdout
from hyper_parallel.core.planner.budget import check_budget
from hyper_parallel.core.planner.plan import MemoryPlan
from hyper_parallel.core.planner.planning import plan_memory
from hyper_parallel.core.swap.config import configure_swap
from hyper_parallel.core.swap.sizes import format_size
from hyper_parallel.platform import get_torch_platform
from hyper_parallel.platform.selection import part_of
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
        """What the table shows, for tools."""
        measured = self.plan.measured
        return {
            "budget_bytes": self.plan.budget_bytes,
            "plain": {"peak_bytes": self.plan.profile.peak_bytes, **self.plain._asdict()},
            "planned": {"peak_bytes": None if measured is None else measured.peak_bytes, **self.planned._asdict()},
            "losses_are_equal": self.is_equal,
            "report": str(self.report),
        }


def run_demo(console: Console, budget: str, num_steps: int, report: Path) -> Outcome:
    """Plan, train twice, show."""
    check_budget(budget)
    part = part_of(get_torch_platform(), "planner.demo", "hyper-parallel demo")
    trainer = part.Trainer()
    console.print(f"[bold]{trainer.describe()}[/]")
    with _swap_directory(trainer.device.type):
        with quiet_stdout():
            plan = plan_memory(trainer.model, trainer.batch(), budget=budget, optimizer=trainer.optimizer)
        console.print(f"\n{plan}\n", markup=False)
        plain = _trained(part.Trainer(), None, num_steps, "training as it is", console)
        planned = _trained(part.Trainer(), plan, num_steps, "training with the plan", console)
        if plan.measured is not None:
            plan.measured = type(plan.measured)(plan.measured.peak_bytes, planned.step_ms)
    outcome = Outcome(plan, plain, planned, report)
    same = "equal, bit for bit" if outcome.is_equal else "DIFFERENT"
    with quiet_stdout():
        write_report(plan, report, notes=[("losses of both runs", same)])
    _show(console, outcome)
    return outcome


@contextlib.contextmanager
def _swap_directory(device_type: str) -> Iterator[None]:
    """On a CPU activations are swapped to files, so that swapping is real there, too."""
    if device_type != "cpu":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-demo-") as directory, configure_swap(disk_dir=directory):
        yield


def _trained(trainer: Any, plan: MemoryPlan | None, num_steps: int, what: str, console: Console) -> Trained:
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
