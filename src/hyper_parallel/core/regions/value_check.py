"""Whether a call of a region compares recomputed values with those of the forward."""

from __future__ import annotations

from collections import Counter

from hyper_parallel.core.swap.config import current_config

_calls: Counter[str] = Counter()


def is_due(region: str) -> bool:
    """Count a call of a region; True if `configure_swap(check=…)` says that this one is checked."""
    check = current_config().check
    if check is None:
        return False
    every = int(check.partition(":")[2] or 1)
    _calls[region] += 1
    return (_calls[region] - 1) % every == 0
