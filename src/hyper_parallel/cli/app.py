"""The commands and their options; what they do lives in one package each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hyper_parallel._base.errors import HyperParallelError
from hyper_parallel._version import __version__
from hyper_parallel.cli.doctor import outcomes
from hyper_parallel.cli.doctor.checks import State, choose, examine, worst
from hyper_parallel.cli.doctor.collect import collect
from hyper_parallel.cli.doctor.document import document_of
from hyper_parallel.cli.doctor.facts import Facts
from hyper_parallel.cli.doctor.show import show_doctor
from hyper_parallel.cli.doctor.show_outcomes import show_outcomes

PROGRAM = "hyper-parallel"

app = typer.Typer(
    name=PROGRAM,
    help="Training that fits in memory and scales out, on PyTorch and on MindSpore.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def run() -> None:
    """Run the command; an error of this package is shown as its text, without a traceback."""
    try:
        app(prog_name=PROGRAM)
    except HyperParallelError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # A callback makes Typer keep `doctor` as a word of its own although it is the only command.
    del version


@app.command()
def doctor(
    platform: Annotated[
        bool, typer.Option("--platform", help="Show which platform operations were tested where, instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Show what this machine offers and which known traps it has.

    Exit code 0: fine, or points that deserve attention only. 1: a problem, such as no usable framework.
    """
    console = Console(highlight=False)
    if platform:
        data = outcomes.read_outcomes()
        if as_json:
            _print_json(data.document)
        else:
            show_outcomes(console, data)
        return
    facts = _collect_behind_a_spinner(is_quiet=as_json)
    choice, findings = choose(facts), examine(facts)
    if as_json:
        _print_json(document_of(facts, choice, findings))
    else:
        show_doctor(console, facts, choice, findings)
    if worst(findings) is State.PROBLEM:
        raise typer.Exit(1)


@app.command()
def demo(
    budget: Annotated[str, typer.Option(help='Memory that may be used: "40%" of the activations, or a size.')] = "40%",
    steps: Annotated[int, typer.Option(min=1, help="Training steps with and without the plan.")] = 10,
    report: Annotated[Path, typer.Option(help="Where the page with the picture goes.")] = Path("report.html"),
) -> None:
    """Plan a small transformer under a memory budget and train it with and without the plan, on whatever device is there.

    Exit code 0: the losses of both runs are equal, bit for bit. 1: they are not.
    """
    from hyper_parallel.cli.demo import run_demo
    from hyper_parallel.cli.plan import check_folder

    check_folder(report)
    if not run_demo(Console(highlight=False), budget, steps, report).is_equal:
        raise typer.Exit(1)


@app.command()
def plan(
    build: Annotated[str, typer.Argument(help="package.module:function that returns model and batch.")],
    budget: Annotated[str, typer.Option(help='"24GiB", "40%" of the activations, or "auto".')] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with a picture here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")] = False,
) -> None:
    """Plan a model of your own: what is saved, recomputed and swapped so that it fits and loses the least speed.

    The function returns (model, batch), (model, batch, loss_fn) or a dict of `plan_memory`'s arguments.
    """
    from hyper_parallel.cli.plan import check_folder, plan_build

    check_folder(out)
    check_folder(report)
    made = plan_build(build, budget)
    if out is not None:
        made.save(out)
    if report is not None:
        made.report(report)
    if as_json:
        _print_json(made.as_dict())
    else:
        typer.echo(str(made))


def _collect_behind_a_spinner(is_quiet: bool) -> Facts:
    """The spinner goes to standard error and only to a terminal, so that a pipe gets the page alone."""
    errors = Console(stderr=True)
    if is_quiet or not errors.is_terminal:
        return collect()
    with errors.status("Asking PyTorch and MindSpore …"):
        return collect()


def _print_json(document: object) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
