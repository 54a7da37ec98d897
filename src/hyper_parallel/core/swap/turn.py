"""Where forwards end and backward begins, and what is learned there for the next step.

Whoever calls holds the engine's lock.
"""

from __future__ import annotations

import weakref

from hyper_parallel.core.swap import schedule
from hyper_parallel.core.swap.slot import Group, Slot

_MOST_LAST = 64  # models that train in turns, by far; labels of models that are gone would pile up


class Turn:
    """Remembers how forwards ended so far. One lives in each engine.

    Fields:
        _tail: keys of what forwards of these labels saved at their very end
        _kept_tail: slots that were kept for that reason, weakly
        _last: labels and numbers of the groups in which backward began the last time, and which had swapped nothing;
            the newest few
    """

    def __init__(self) -> None:
        self._tail: set[tuple[str, int, int]] = set()
        self._kept_tail: list[weakref.ref[Slot]] = []
        self._last: dict[tuple[str, int], None] = {}

    def begins_in(self, group: Group, tail_room_bytes: int, enough_bytes: int) -> bool:
        """Note that backward asks a group; return True if a forward is over with that.

        It is with the first question of the newest group. What that forward saved last is its tail.
        """
        if group.has_ended:
            return False
        group.has_ended = True
        if not group.is_newest():
            return False
        group.is_last = True
        forward = [g for g in group.earlier() if g is group or not g.has_ended]
        for earlier in forward:
            earlier.has_ended = True  # when its turn comes it is the newest that is left, but no forward ends there
        saved = ([(g.key(s), s.num_bytes) for s in g.in_order()] for g in forward)
        labels = {g.label for g in forward}
        self._tail = {key for key in self._tail if key[0] not in labels}
        self._last = {key: None for key in self._last if key[0] not in labels}
        if not group.slots:  # its backward asks for nothing, and is time to bring back what comes next
            self._last[group.label, group.number] = None
            if len(self._last) > _MOST_LAST:
                del self._last[next(iter(self._last))]
        else:
            self._tail |= schedule.tail(saved, tail_room_bytes, enough_bytes)
        return True

    def is_last(self, group: Group) -> bool:
        """Tell whether a forward ends with this group, and it has swapped nothing.

        The group says so itself, or it was so in the step before.
        """
        return not group.slots and (group.ends_forward or (group.label, group.number) in self._last)

    def keeps(self, slot: Slot, room_bytes: int) -> bool:
        """Tell whether a slot is needed first in backward, and there is room to keep it on the device."""
        if slot.group.key(slot) not in self._tail:
            return False
        alive = [kept for ref in self._kept_tail if (kept := ref()) is not None]
        if sum(kept.num_bytes for kept in alive) + slot.num_bytes > room_bytes:
            return False
        self._kept_tail = [weakref.ref(kept) for kept in (*alive, slot)]
        return True
