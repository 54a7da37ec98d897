"""What the command asks of the doctor: look at this machine once, then show it as a page or as data."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.console import Console

from hyper_parallel.cli.doctor import outcomes
from hyper_parallel.cli.doctor.checks import Choice, Finding, State, choose, examine, worst
from hyper_parallel.cli.doctor.collect import collect
from hyper_parallel.cli.doctor.document import document_of
from hyper_parallel.cli.doctor.facts import Facts
from hyper_parallel.cli.doctor.show import show_doctor
from hyper_parallel.cli.doctor.show_outcomes import show_outcomes


class Diagnosis(NamedTuple):
    facts: Facts
    choice: Choice
    findings: list[Finding]

    @property
    def is_problem(self) -> bool:
        return worst(self.findings) is State.PROBLEM

    def document(self) -> dict[str, Any]:
        return document_of(self.facts, self.choice, self.findings)

    def show(self) -> None:
        show_doctor(Console(highlight=False), self.facts, self.choice, self.findings)


def diagnose(*, is_quiet: bool) -> Diagnosis:
    """Look at this machine and judge it.

    The spinner goes to standard error and only to a terminal, so that a pipe gets the page alone.
    """
    errors = Console(stderr=True)
    if is_quiet or not errors.is_terminal:
        facts = collect()
    else:
        with errors.status("Asking PyTorch and MindSpore …"):
            facts = collect()
    return Diagnosis(facts, choose(facts), examine(facts))


def platform_document() -> Any:
    """Return, as data, which platform operations were tested where."""
    return outcomes.read_outcomes().document


def show_platform() -> None:
    """Print, as a page, which platform operations were tested where."""
    show_outcomes(Console(highlight=False), outcomes.read_outcomes())
