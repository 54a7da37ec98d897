"""Planning a model that a user's own function builds."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.core.planner.plan import MemoryPlan
from hyper_parallel.core.planner.planning import plan_memory


def plan_build(build: str, budget: str) -> MemoryPlan:
    """Call `package.module:function` and plan what it returns.

    Raises:
        ValueError, TypeError: there is no such function, or it returns something else than a model and a batch.
    """
    made = _function(build)()
    with quiet_stdout():
        return _planned(made, build, budget)


def check_folder(path: Path | None) -> None:
    """Before the work is done: what comes out of it must have a place to go to."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ArgumentError(
            "There is no folder for this file.",
            expected="a folder that exists",
            got=str(path),
            do="Make the folder first.",
        )


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """What libraries print themselves goes nowhere: HiGHS sometimes leaves a line of its own on standard output, in the middle of a document."""
    sys.stdout.flush()
    saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)


def _planned(made: Any, build: str, budget: str) -> MemoryPlan:
    if isinstance(made, dict):
        arguments = {"budget": budget, **made}
        missing = [name for name in ("model", "batch") if name not in arguments]
        if missing:
            raise ArgumentError(
                "The function's dict lacks something.", expected="model and batch", got=", ".join(made), where=build
            )
        return plan_memory(arguments.pop("model"), arguments.pop("batch"), **arguments)
    if isinstance(made, tuple) and len(made) in (2, 3):
        return plan_memory(made[0], made[1], loss_fn=made[2] if len(made) == 3 else None, budget=budget)
    raise ArgumentTypeError(
        "The function that builds the model returned something else.",
        expected="(model, batch), (model, batch, loss_fn), or a dict of plan_memory's arguments",
        got=describe(made),
        where=build,
    )


def _function(build: str) -> Any:
    module_name, colon, name = build.partition(":")
    if not colon or not module_name or not name:
        raise ArgumentError(
            "What builds the model was not understood.", expected="package.module:function", got=repr(build)
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a script beside the user, as `python -m` would find it
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "The module that builds the model cannot be imported.",
            got=str(error),
            where=module_name,
            do="Run the command in the folder that has it, or put that folder on PYTHONPATH.",
        ) from error
    if not callable(function):
        raise ArgumentError(
            "The function that builds the model is not there.", expected=f"a function {name!r}", where=module_name
        )
    return function
