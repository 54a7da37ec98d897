"""Benchmarks that run themselves on several ranks, and the file that keeps what they found."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from communication import commit
from results_state import digest

_ROWS = "rows "  # what the line of rank 0 begins with


def say(rows: object) -> None:
    """In a worker: hand the rows to the process that started the ranks."""
    print(_ROWS + json.dumps(rows), flush=True)


def run(script: str, num_ranks: int, arguments: Sequence[object], *, has_launcher: bool = True) -> Any:
    """Start a script on ranks of this machine, one thread each, and give what its rank 0 has said."""
    launcher = [sys.executable]
    if has_launcher:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*launcher, script, *map(str, arguments)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=900, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(_ROWS)]
    if not lines:
        raise SystemExit(done.stderr)
    return json.loads(lines[-1].removeprefix(_ROWS))


def write(
    out: Path | None, watched: Sequence[str], setting: dict[str, Any], *, device: str = "CPU", **found: object
) -> None:
    """Keep what was found, with what it was found with. Without a path, nothing is kept."""
    if out is None:
        return
    result = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "digest": digest(watched=watched),
        "watched": watched,
        "device": device,
        "versions": {"torch": metadata.version("torch")},
        "setting": setting,
        **found,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
