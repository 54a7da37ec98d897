"""How many random cases a test runs: a fixed share in every run, all of them by `HYPER_PARALLEL_CAMPAIGN=full`."""

from __future__ import annotations

import os


def share(all_cases: int, in_every_run: int) -> range:
    """Seeds of the cases to run."""
    return range(all_cases if os.environ.get("HYPER_PARALLEL_CAMPAIGN") == "full" else in_every_run)
