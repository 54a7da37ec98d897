"""The `hyper-parallel` command."""

from __future__ import annotations

import sys

_NEEDED = ("rich", "typer")


def main() -> None:
    """Run the command with the arguments of this process, and exit."""
    try:
        from hyper_parallel.cli import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED:
            raise
        sys.stderr.write(
            f"The hyper-parallel command needs {' and '.join(_NEEDED)}, and {missing} is not installed.\n"
            "Run: pip install 'hyper-parallel[cli]'\n"
        )
        sys.exit(2)
    app.run()
