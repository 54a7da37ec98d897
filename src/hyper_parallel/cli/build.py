"""What a user's own function builds: a model, a batch, and how they are planned."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, HyperParallelError, describe
from hyper_parallel.core.planner.plan.budget import check_budget, is_percentage
from hyper_parallel.core.swap.config import configure_swap


class BuildError(HyperParallelError, RuntimeError):
    """The user's function raised. The cause is the error itself."""


class UsageError(ArgumentError):
    """What was typed cannot be carried out, whatever the model is. The command ends with 2."""


class Built(NamedTuple):
    model: Any
    batch: Any
    arguments: dict[str, Any]  # more of `plan_memory`'s

    def of(self, *names: str) -> dict[str, Any]:
        """Return those of the arguments that another function takes, too."""
        return {name: value for name, value in self.arguments.items() if name in names}


def built(build: str, second: str = "batch") -> Built:
    """Call `package.module:function` and look at what it returns: the model, and what `second` names.

    Raises:
        ValueError, TypeError: there is no such function, or it returns something else than a model and a batch.
        BuildError: it raised.
    """
    with users_stdout():
        function = _function(build)
    try:
        with users_stdout():
            made = function()
    except Exception as error:
        raise BuildError(
            "The function that builds the model raised an error.",
            got=f"{type(error).__name__}: {error}",
            where=build,
            do="Run it alone first; --debug shows where it happened.",
        ) from error
    if isinstance(made, dict):
        arguments = dict(made)
        missing = [name for name in ("model", second) if name not in arguments]
        if missing:
            raise ArgumentError(
                "The function's dict lacks something.", expected=f"model and {second}", got=", ".join(made), where=build
            )
        return Built(arguments.pop("model"), arguments.pop(second), arguments)
    if isinstance(made, tuple) and len(made) in (2, 3):
        return Built(made[0], made[1], {"loss_fn": made[2]} if len(made) == 3 else {})
    raise ArgumentTypeError(
        "The function that builds the model returned something else.",
        expected=f"(model, {second}), (model, {second}, loss_fn), or a dict of the arguments",
        got=describe(made),
        where=build,
    )


def _function(build: str) -> Any:
    module_name, colon, name = build.partition(":")
    if not colon or not module_name or not name:
        raise UsageError(
            "What builds the model was not understood.",
            expected="package.module:function",
            got=repr(build),
            do="For a file train.py with a function build: train:build",
        )
    if module_name.endswith(".py"):
        raise UsageError(
            "What builds the model is named by its module, not by its file.",
            expected="package.module:function",
            got=repr(build),
            do=f"In the folder of that file: {Path(module_name).stem}:{name}",
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a script beside the user, as `python -m` would find it
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        is_the_module = (error.name or "") == module_name.partition(".")[0] or error.name == module_name
        raise (UsageError if is_the_module else ArgumentError)(
            "The module that builds the model cannot be imported.",
            got=str(error),
            where=module_name,
            do=_instead_of(module_name, name) if is_the_module else "Install what it imports.",
        ) from error
    except Exception as error:
        raise BuildError(
            "The module that builds the model raised an error when it was imported.",
            got=f"{type(error).__name__}: {error}",
            where=module_name,
            do="Import it alone first; --debug shows where it happened.",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [found for found in vars(module) if callable(getattr(module, found)) and not found.startswith("_")]
        close = difflib.get_close_matches(name, there, 1)
        raise UsageError(
            "The function that builds the model is not there.",
            expected=f"a function {name!r}",
            got=f"one of {', '.join(there[:8])}" if there else "no function at all",
            where=module_name,
            do=f"Did you mean {module_name}:{close[0]}?" if close else None,
        )
    return function


def _instead_of(module_name: str, name: str) -> str:
    """Say what to do about a module that is not found: a file here with nearly that name, or the folder."""
    here = [path.stem for path in Path.cwd().glob("*.py")]
    close = difflib.get_close_matches(module_name, here, 1)
    if close:
        return f"Did you mean {close[0]}:{name}?"
    return "Run the command in the folder that has it, or put that folder on PYTHONPATH."


def check_budget_option(budget: str, *, may_be_part: bool = True) -> None:
    """Check a budget before a model is built, which may take minutes. `may_be_part=False` refuses a part of the
    activations.
    """
    try:
        check_budget(budget)
    except ArgumentError as error:
        raise UsageError(error.what, expected=error.expected, got=error.got, where="--budget", do=error.do) from None
    if not may_be_part and is_percentage(budget):
        raise UsageError(
            "A part of the activations is no budget here: they grow with n.",
            expected='bytes, a size such as "24GiB", or "auto"',
            got=budget,
            where="--budget",
            do="Name a size.",
        )


def check_target(path: Path | None) -> None:
    """Check, before the work is done, that what comes out of it has a place to go to."""
    if path is None:
        return
    try:
        if path.is_dir():
            what, expected, do = "A file is to be written here, and this is a folder.", None, "Name a file in it."
        elif not path.absolute().parent.is_dir():
            what, expected = "There is no folder for this file.", "a folder that exists"
            do = "Make the folder first."
        elif path.exists() and not path.is_file():
            what, expected = "This is a device or a pipe, which is never replaced.", "a plain file, or a new one"
            do = "Write a file, and read that; --json prints the document instead."
        else:
            return
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        what, expected, do = f"No file can be written here: {error.strerror}.", None, "Name another file."
    raise UsageError(what, expected=expected, got=str(path), do=do)


def check_swap_dir(path: Path | None) -> None:
    """Raise where the path is no folder."""
    if path is not None and not path.is_dir():
        raise UsageError(
            "There is no folder to swap to.",
            expected="a folder that exists",
            got=str(path),
            where="--swap-dir",
            do="Make it first, on a fast disk.",
        )


def check_file(path: Path) -> None:
    """Raise where there is no such file."""
    if not path.is_file():
        raise UsageError(
            "There is no such plan.",
            expected="a file that `plan --out` or `plan.save` wrote",
            got=str(path),
            do="Make one: hyper-parallel plan MODULE:FUNCTION --out plan.json",
        )


def check_other_file(target: Path, source: Path) -> None:
    """Raise where the page would take the plan's place."""
    if target.exists() and target.samefile(source):
        raise UsageError(
            "The page would replace the plan.",
            got=str(target),
            where="--out",
            do="Name another file.",
        )


@contextlib.contextmanager
def swap_directory(path: Path | None) -> Iterator[None]:
    """Let activations go to files in this folder while the block runs, where the device has no slower memory of its own
    (a CPU).
    """
    if path is None:
        yield
        return
    with configure_swap(disk_dir=path):
        yield


@contextlib.contextmanager
def users_stdout() -> Iterator[None]:
    """Send what the user's own code prints to standard error while the block runs.

    Standard output is for our document.
    """
    _flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _flush()  # what is still in a buffer belongs there
        os.dup2(saved, 1)
        os.close(saved)


def _flush() -> None:
    sys.stdout.flush()
    with contextlib.suppress(OSError, TypeError, AttributeError):  # where C's library is not found under no name
        ctypes.CDLL(None).fflush(None)
