"""The `hyper-parallel` command."""

from __future__ import annotations

import importlib.util
import os
import sys

from hyper_parallel._base.extras import install_words

_NEEDED = ("rich", "typer")


def main() -> None:
    """Run the command with the arguments of this process, and exit."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"The hyper-parallel command needs {' and '.join(_NEEDED)}, and {missing[0]} is not installed.\n"
            f"{install_words('cli')}\n"
        )
        sys.exit(2)
    _open_what_is_closed()
    try:
        from hyper_parallel.cli import app

        app.run()
    except KeyboardInterrupt:  # before the command itself could hear of it
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)


def _open_what_is_closed() -> None:
    """Let what is printed after `>&-` go nowhere.

    Otherwise the next file that is opened would take the descriptor, and with it what C prints.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))
