"""What to load next, and what not to offload at all: decisions as pure functions of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def loads_to_launch(candidates: Iterable[tuple[T, int]], unclaimed_bytes: int, limit_bytes: int) -> list[T]:
    """Choose the first candidates, in order, that fit beside what is loaded and not asked for yet.

    It stops at the first that does not fit: loading a later, smaller one would take the room of what is needed before
    it. One larger than the limit itself is launched when nothing else is unclaimed, else it would come on demand only.
    """
    chosen: list[T] = []
    for candidate, num_bytes in candidates:
        if unclaimed_bytes > 0 and unclaimed_bytes + num_bytes > limit_bytes:
            break
        chosen.append(candidate)
        unclaimed_bytes += num_bytes
    return chosen


def loads_that_fit(candidates: Iterable[tuple[T, int, int]], used_bytes: int) -> list[T]:
    """Choose the first candidates, in order, that fit below the level that comes with each of them.

    Counted are what is in use, and the candidates before. It stops at the first that does not fit.
    """
    chosen: list[T] = []
    for candidate, num_bytes, level_bytes in candidates:
        used_bytes += num_bytes
        if used_bytes > level_bytes:
            break
        chosen.append(candidate)
    return chosen


def rises(levels: Sequence[int]) -> list[int]:
    """Return, for each of some levels, how much higher the highest of those that follow is."""
    highest = itertools.accumulate(reversed(levels), max)
    return [high - level for high, level in zip(reversed(list(highest)), levels, strict=True)]


def deepened(depth_bytes: int, limit_bytes: int) -> int:
    """Return the prefetch depth after a load came late: half as much again, up to the limit."""
    return min(depth_bytes + max(depth_bytes // 2, 1), max(limit_bytes, depth_bytes))


def is_window_too_small(stalled_ms: float, paused_ms: float) -> bool:
    """Tell whether compute waited for offloads in a forward in which the link had pauses.

    Then what came in a burst could have waited in a larger window instead.
    """
    return min(stalled_ms, paused_ms) > 0.5


def tail(groups: Iterable[Iterable[tuple[Key, int]]], room_bytes: int, enough_bytes: int) -> set[Key]:
    """Choose of what one forward saved, newest group first, in the order of asking, what fits into `room_bytes`.

    Backward needs it at once, so its way out and back could hide behind nothing; and the window would still hold it
    when forward ends, so keeping it costs no memory that was not promised anyway. The group before the newest is needed
    a group's backward later, which is time to bring it back: it belongs to the tail only while the newer ones are less
    than `enough_bytes`.
    """
    kept: set[Key] = set()
    kept_bytes = 0
    for saved in groups:
        if kept_bytes >= enough_bytes:
            break
        for key, num_bytes in saved:
            if kept_bytes + num_bytes > room_bytes:
                return kept
            kept.add(key)
            kept_bytes += num_bytes
    return kept
