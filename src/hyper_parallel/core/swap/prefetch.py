"""What is loaded before anybody asks for it: in which order, and how much.

The order comes from the groups: the rest of the one that backward is in, then those before it. How much is decided by
`schedule`, as pure functions; see the README, "Prefetch". Whoever calls holds the engine's lock.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from hyper_parallel.core.swap import schedule
from hyper_parallel.core.swap.slot import Group, Slot
from hyper_parallel.core.swap.states import SlotState


class Wish(NamedTuple):
    """A slot that a group will ask for, and its place in that group's stack. It may be the slot of another group."""

    slot: Slot
    group: Group
    position: int


class Prefetch:
    """Launches loads ahead of backward.

    Fields:
        _unclaimed: slots that were loaded ahead and not asked for yet, weakly
        _peak_bytes: most memory of the device in use when somebody asked, since the last backward began
        _levels: by a group's label, the memory in use at each question of its last backward, less what was loaded for
            others
    """

    def __init__(self) -> None:
        self._unclaimed: list[weakref.ref[Slot]] = []
        self._peak_bytes = 0
        self._levels: dict[str, list[int]] = {}

    def begin_backward(self) -> None:
        self._peak_bytes = 0

    def unclaimed(self) -> list[Slot]:
        """Return the slots that are loaded, or being loaded, and that nobody has asked for."""
        return [slot for ref in self._unclaimed if (slot := ref()) is not None and slot.state is SlotState.H2D]

    def add(self, slot: Slot) -> None:
        """Note that somebody else has launched the load of a slot ahead of time."""
        while self._unclaimed and self._unclaimed[0]() is None:
            self._unclaimed.pop(0)  # or a program that never waits for what it loads would pile them up
        self._unclaimed.append(weakref.ref(slot))

    def forget(self) -> None:
        self._unclaimed = []

    def launch(
        self, group: Group, depth_bytes: int, launch: Callable[[Slot], None], bytes_in_use: Callable[[], int | None]
    ) -> None:
        """Launch loads of what backward will ask for next, now that it has got to a group, as long as they fit.

        `launch` launches one; `bytes_in_use`: of the device's memory, None if nobody counts.
        """
        unclaimed = self.unclaimed()
        launched: list[Slot] = []
        counted, limit_bytes = unclaimed, depth_bytes
        if group.ahead_bytes is not None:
            own = itertools.takewhile(lambda wish: wish[0].group is group, _wishes(group))
            launched = _launch_all([wish for wish, _ in own], launch)
            counted, limit_bytes = [slot for slot in unclaimed if slot.group is not group], group.ahead_bytes
        counted_bytes = sum(slot.num_bytes for slot in counted)
        launched += _launch_all(schedule.loads_to_launch(_wishes(group), counted_bytes, limit_bytes), launch)
        launched += _launch_all(self._fit_below_the_peak(group, [*unclaimed, *launched], bytes_in_use), launch)
        self._unclaimed = [weakref.ref(slot) for slot in (*unclaimed, *launched)]

    def _fit_below_the_peak(
        self, group: Group, ahead: Iterable[Slot], bytes_in_use: Callable[[], int | None]
    ) -> list[Wish]:
        """Choose what the next group needs and what fits below a point that is passed, whose memory was needed anyway.

        What it asks for one by one never is there all at once: it may come when the group that backward is in has
        passed a highest point of its own, and fill that up. What the next group begins its backward with (a region runs
        again) is there at its own highest point in any case: it may come where it fits below the highest point of this
        whole backward, less what the group that backward is in will still need itself, going by its last backward. What
        lies further ahead may not come.

        `ahead`: what is loaded already and not asked for.
        """
        near = group.with_next()
        wishes = list(itertools.takewhile(lambda wish: wish[0].group in near, _wishes(group)))
        if group.ahead_bytes is not None and not wishes:
            return []  # who knows the group's need does not need its level either: to ask for it costs the host time
        used_bytes = bytes_in_use()
        if used_bytes is None:
            return []
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        group.peak_bytes = max(group.peak_bytes, used_bytes)
        own_bytes = used_bytes - sum(slot.num_bytes for slot in ahead if slot.group is not group)
        rise = self._rise_from_here(group, own_bytes) if group.ahead_bytes is None else None
        low, high = group.peak_bytes, max(group.peak_bytes, 0 if rise is None else self._peak_bytes - rise)
        return schedule.loads_that_fit(
            ((wish, num_bytes, high if wish.slot.is_expected else low) for wish, num_bytes in wishes), used_bytes
        )

    def _rise_from_here(self, group: Group, own_bytes: int) -> int | None:
        """Return how much more memory than now the group's backward used after this question the last time.

        None if nobody knows.
        """
        if group.levels is None:
            group.rises = schedule.rises(self._levels.get(group.label, ()))
            group.levels = self._levels[group.label] = []
        number = len(group.levels)
        group.levels.append(own_bytes)
        return group.rises[number] if number < len(group.rises) else None


def _wishes(group: Group) -> Iterator[tuple[Wish, int]]:
    """Go through what backward will ask for, with its size, in the order in which it is expected to."""
    seen: set[Slot] = set()
    for earlier in group.earlier():
        for position in range(earlier.cursor, -1, -1):
            slot = earlier.stack[position]()
            if slot in seen:
                continue
            # One that nobody waits for was asked for before the order changed: a second load would be held for nobody.
            if slot is not None and slot.waiting and slot.state in (SlotState.HOST, SlotState.DISK):  # plant: waiting
                seen.add(slot)
                yield Wish(slot, earlier, position), slot.num_bytes


def _launch_all(wished: list[Wish], launch: Callable[[Slot], None]) -> list[Slot]:
    launched = []
    for slot, group, position in wished:
        try:
            launch(slot)
        except MemoryError:
            break  # a prefetch is a wish: without memory it comes when it is asked for, and raises there if it must
        group.cursor = position - 1  # plant: cursor
        launched.append(slot)
    return launched
