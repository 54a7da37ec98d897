"""How a framework's probe reports: JSON objects on standard output, one per stage, each with all that is known so far.

Guarantees: the last object holds everything found, and `stage` names what was being tried, so that a framework that
kills the process (an illegal instruction, a broken library) still leaves what came before and where it ended.
Assumes: the framework may write lines of its own between ours; readers take the last line that is such an object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Facts: TypeAlias = dict[str, Any]
Stage: TypeAlias = tuple[str, Callable[[Facts], None]]

DONE = "done"


def run_stages(framework: str, stages: Sequence[Stage]) -> int:
    """Run the stages in order, printing before each and at the end. Returns 1 if one raised, which ends the probe."""
    facts: Facts = {"framework": framework, "error": None}
    for name, stage in stages:
        facts["stage"] = name
        _print(facts)
        try:
            stage(facts)
        except Exception as error:  # whatever a framework raises is what we are here to report
            facts["error"] = first_line(error)
            _print(facts)
            return 1
    facts["stage"] = DONE
    _print(facts)
    return 0


def first_line(error: BaseException) -> str:
    """Write an error as `Type: first line of the message`, which is what fits into a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _print(facts: Facts) -> None:
    # Flushed at once: nothing that is still in a buffer survives an illegal instruction.
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
