"""What to load next, and what not to offload at all: decisions as pure functions of sizes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def loads_to_launch(candidates: Iterable[tuple[T, int]], unclaimed_bytes: int, limit_bytes: int) -> list[T]:
    """The first candidates, in order, that fit beside what is loaded and not asked for yet.

    It stops at the first that does not fit: loading a later, smaller one would take the room of what is needed before it.
    One larger than the limit itself is launched when nothing else is unclaimed, else it would come on demand only.
    """
    chosen: list[T] = []
    for candidate, num_bytes in candidates:
        if unclaimed_bytes > 0 and unclaimed_bytes + num_bytes > limit_bytes:
            break
        chosen.append(candidate)
        unclaimed_bytes += num_bytes
    return chosen


def deepened(depth_bytes: int, limit_bytes: int) -> int:
    """The prefetch depth after a load came late: half as much again, up to the limit."""
    return min(depth_bytes + max(depth_bytes // 2, 1), max(limit_bytes, depth_bytes))


def tail(saved: Iterable[tuple[Key, int]], room_bytes: int) -> set[Key]:
    """Of what one forward saved, as backward is expected to ask for it, the part that fits into `room_bytes`.

    Backward needs it at once, so its way out and back could hide behind nothing; and the window would still hold it (or, where
    another order than the reverse is expected, as much of what was saved last) when forward ends, so keeping it costs no memory that
    was not promised anyway.
    """
    kept: set[Key] = set()
    for key, num_bytes in saved:
        room_bytes -= num_bytes
        if room_bytes < 0:
            break
        kept.add(key)
    return kept
