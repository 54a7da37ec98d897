"""The commands and their options; what they do lives in one package each, imported when it is asked for.

So `--help` and completion answer at once: nothing here may import more than Typer and our errors at module level.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel._base.errors import HyperParallelError
from hyper_parallel._version import __version__

PROGRAM = "hyper-parallel"

_INTERRUPTED = 130
_CODES = {"UsageError": 2, "BudgetError": 3}
EXAMPLES = """Examples:

`hyper-parallel demo`: what it does, on a small transformer, with a picture.

`hyper-parallel doctor`: what this machine has for training, and its known traps.

`hyper-parallel plan train:build --budget 24GiB --report plan.html`: the same for your own model; \
`build()` in `train.py` returns it and a batch.

`hyper-parallel --install-completion`: completion of commands and options in your shell.
"""
EXIT_CODES = """Exit codes: 0 done; 1 something failed; 2 wrong usage; 3 the budget cannot be met; 130 interrupted."""

app = typer.Typer(
    name=PROGRAM,
    help="Training that fits in memory and scales out, on PyTorch and on MindSpore.",
    epilog=f"{EXAMPLES}\n\n{EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def run() -> None:
    """Run the command. An error is shown as its text, without a traceback unless `--debug` asks for one."""
    is_debug = "--debug" in sys.argv[1:]
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        app(args=arguments, prog_name=PROGRAM)
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:  # Typer has turned the interrupt into it, and says nothing
            sys.stderr.write("Interrupted.\n")
        raise
    except HyperParallelError as error:
        if is_debug:
            raise
        sys.stderr.write(f"{error}\n")
        # By name: the solver is not imported for it.
        sys.exit(_CODES.get(type(error).__name__, 1))
    except Exception as error:  # of the model, or of a library: one line says what, and how to see where
        if is_debug:
            raise
        sys.stderr.write(f"{type(error).__name__}: {error}\nRun it again with --debug to see where.\n")
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
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error happened. May stand anywhere.")] = False,
) -> None:
    # `run` takes --debug out wherever it stands; it is here to be found in the help.
    del version, debug


@app.command(epilog="Example: `hyper-parallel doctor --json`")
def doctor(
    platform: Annotated[
        bool, typer.Option("--platform", help="Show which platform operations were tested where, instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Show what this machine offers and which known traps it has.

    Exit code 0: fine, or points that deserve attention only. 1: a problem, such as no usable framework.
    """
    from hyper_parallel.cli.doctor import command

    if platform:
        if as_json:
            _print_json(command.platform_document())
        else:
            command.show_platform()
        return
    diagnosis = command.diagnose(is_quiet=as_json)
    if as_json:
        _print_json(diagnosis.document())
    else:
        diagnosis.show()
    if diagnosis.is_problem:
        raise typer.Exit(1)


SwapOption = Annotated[
    Path | None,
    typer.Option(
        help="A folder to swap to, for a device without slower memory of its own, such as a CPU. "
        "Without it nothing is swapped there."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
BuildArgument = Annotated[
    str, typer.Argument(metavar="MODULE:FUNCTION", help="Your function that returns the model and a batch.")
]


@app.command(epilog="Example: `hyper-parallel demo --budget 25% --report page.html`")
def demo(
    budget: Annotated[str, typer.Option(help='Memory that may be used: "40%" of the activations, or a size.')] = "40%",
    steps: Annotated[int, typer.Option(min=1, help="Training steps with and without the plan.")] = 10,
    report: Annotated[Path, typer.Option(help="Where the page with the picture goes.")] = Path("report.html"),
    swap_dir: SwapOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan a small transformer under a memory budget and train it with and without the plan, on whatever device is
    there.

    Exit code 0: the losses of both runs are equal, bit for bit. 1: they are not.
    """
    from rich.console import Console

    from hyper_parallel.cli.demo import run_demo

    outcome = run_demo(Console(highlight=False, quiet=as_json), budget, steps, report, swap_dir)
    if as_json:
        _print_json(outcome.as_dict())
    if not outcome.is_equal:
        raise typer.Exit(1)


@app.command(
    epilog="Example: `hyper-parallel plan mypackage.train:build --budget 24GiB --report plan.html --out plan.json`"
)
def plan(
    build: BuildArgument,
    budget: Annotated[str, typer.Option(help='"24GiB", "40%" of the activations, or "auto".')] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with a picture here.")] = None,
    swap_dir: SwapOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan a model of your own: what is saved, recomputed and swapped so that it fits and stays as fast as it can.

    The function returns (model, batch), (model, batch, loss_fn) or a dict of `plan_memory`'s arguments.
    """
    from hyper_parallel.cli.plan import plan_build

    made = plan_build(build, budget, out, report, swap_dir)
    if as_json:
        _print_json(made.as_dict())
    else:
        typer.echo(str(made))


@app.command(epilog="Example: `hyper-parallel largest mypackage.train:build --budget 24GiB --out plan.json`")
def largest(
    build: BuildArgument,
    budget: Annotated[str, typer.Option(help='"24GiB", or "auto".')] = "auto",
    at_most: Annotated[int | None, typer.Option(min=1, help="Where sizes end.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan for the largest size here, as JSON.")] = None,
    swap_dir: SwapOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the largest batch, or the longest sequence, that fits, and the plan for it.

    The function returns (model, make_batch), (model, make_batch, loss_fn) or a dict of `largest`'s arguments;
    make_batch(n) gives a batch of size n.
    """
    from hyper_parallel.cli.plan import largest_build

    found = largest_build(build, budget, at_most, out, swap_dir)
    if as_json:
        _print_json(found.as_dict())
    else:
        typer.echo(str(found))


@app.command(epilog="Example: `hyper-parallel explain mypackage.train:build`")
def explain(build: BuildArgument, as_json: JsonOption = False) -> None:
    """Show what a model of your own keeps for backward: per module and op, with bytes, and which choice suits each.

    Nothing is planned or changed.
    """
    from hyper_parallel.cli.plan import explain_build

    found = explain_build(build)
    if as_json:
        _print_json(found.as_dict())
    else:
        typer.echo(str(found))


@app.command(epilog="Example: `hyper-parallel report plan.json --out plan.html`")
def report(
    file: Annotated[Path, typer.Argument(help="A plan that was saved.")],
    out: Annotated[Path | None, typer.Option(help="Where the page goes; beside the plan if not said.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a saved plan: its table, and a page with the memory of one step before and after."""
    from hyper_parallel.cli.plan import report_of

    saved, target = report_of(file, out)
    if as_json:
        _print_json({**saved.as_dict(), "report": str(target)})
    else:
        typer.echo(f"{saved}\n\nThe picture: {target}")


@app.command(epilog="Example: `hyper-parallel bench --rounds 5 --json`")
def bench(
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each way; they take turns.")] = 5,
    budget: Annotated[str, typer.Option(help="Of the planned way.")] = "40%",
    as_json: JsonOption = False,
) -> None:
    """Measure ours beside PyTorch's own ways to save memory, on this machine, with the demo's transformer."""
    from rich.console import Console

    from hyper_parallel.cli.bench import run_bench, show_bench

    rows = run_bench(Console(stderr=True, quiet=as_json), rounds, budget)
    if as_json:
        _print_json([row.as_dict() for row in rows])
    else:
        show_bench(Console(highlight=False), rows)


@app.command(epilog="Example: `hyper-parallel schedule zbv -p 4 -m 16 --draw page.html`")
def schedule(
    name: Annotated[
        str,
        typer.Argument(
            help="gpipe, one_f_one_b, interleaved, zb_h1, zbv, dualpipe, dualpipe_v; or a CSV file of a schedule."
        ),
    ],
    ranks: Annotated[int | None, typer.Option("-p", "--ranks", help="Ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option("-m", "--microbatches", help="Microbatches.")] = None,
    chunks: Annotated[
        int | None, typer.Option("-v", "--chunks", help="Chunks of the model per rank, for interleaved; 2 if not said.")
    ] = None,
    zero: Annotated[
        int | None,
        typer.Option(
            help="Add sends, receives and, for parameters sharded by ZeRO 1, 2 or 3, gathers; 0: none sharded."
        ),
    ] = None,
    cost: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=TIME", help="What actions cost, such as F=1 or SEND_F=0.2. May be given several times."
        ),
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="Write a page with the picture here.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the schedule here, as PyTorch's CSV.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove a pipeline's schedule and show its idle time and what each rank keeps.

    Exit code 0: it runs, free of deadlock. 1: it does not, or is not defined for these numbers; what works is named.
    """
    from hyper_parallel.cli.schedule import scheduled

    found = scheduled(name, ranks, microbatches, chunks, zero, cost or [], draw, csv)
    if as_json:
        _print_json(found.as_dict())
    else:
        typer.echo(str(found))


checkpoint = typer.Typer(
    help="Check, show and convert checkpoints that `hp.save` has written.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(checkpoint, name="checkpoint")
CheckpointArgument = Annotated[Path, typer.Argument(help="The folder of a checkpoint.")]


@checkpoint.command(epilog="Example: `hyper-parallel checkpoint verify ckpt/step-100`")
def verify(path: CheckpointArgument, as_json: JsonOption = False) -> None:
    """Read all of a checkpoint and compare every byte with its checksums. Exit code 1: something is not as written."""
    from hyper_parallel.cli.checkpoint import checked

    found = checked(path)
    if as_json:
        _print_json(vars(found))
    else:
        typer.echo(str(found))


@checkpoint.command(epilog="Example: `hyper-parallel checkpoint show ckpt/step-100 --json`")
def show(path: CheckpointArgument, as_json: JsonOption = False) -> None:
    """Show what a checkpoint has: tensors, files, options of the optimizer, `extra`."""
    from hyper_parallel.cli.checkpoint import shown

    found = shown(path)
    if as_json:
        _print_json(found.as_dict())
    else:
        typer.echo(str(found))


@checkpoint.command(epilog="Example: `hyper-parallel checkpoint convert ckpt/step-100 exported --hugging-face`")
def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of PyTorch's DCP.")],
    target: Annotated[Path, typer.Argument(help="A new folder.")],
    hugging_face: Annotated[
        bool, typer.Option("--hugging-face", help="Write the model of a checkpoint for Hugging Face's libraries.")
    ] = False,
) -> None:
    """Make of a checkpoint a folder of PyTorch's DCP, or of such a folder a checkpoint; the source tells which."""
    from hyper_parallel.cli.checkpoint import converted

    typer.echo(converted(source, target, to_hugging_face=hugging_face))


def _print_json(document: object) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
