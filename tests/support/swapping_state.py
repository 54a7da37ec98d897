"""What the swap engines hold and have moved; no framework is needed to ask."""

from __future__ import annotations

import gc

from hyper_parallel.core.swap import engines


def offloaded_bytes() -> int:
    return engines.total_stats().offloaded_bytes


def check_nothing_left() -> None:
    """No slot, block or byte of the engines is in use."""
    left = {}
    for _ in range(2):
        for name, managed in engines.all_engines().items():
            managed.engine.join()
            used = {"in flight": managed.engine.in_flight_bytes, "in the tier": managed.tier.used_bytes}
            left[name] = {where: number for where, number in used.items() if number}
        if not any(left.values()):
            return
        gc.collect()  # an exception that pytest keeps holds the frames of a failed test
    assert not any(left.values()), f"the swap engine still holds bytes: {left}"
