"""A slot: the record of one storage while it is managed. A group: the slots of one call, in the order of saving.

Ownership: handles hold slots, slots hold their group, a group holds its slots weakly. Nothing else keeps a slot alive, so a dropped
graph gives everything back by reference counting alone.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

from hyper_parallel.core.swap.device import Block, Buffer, Event, Stream, Tier
from hyper_parallel.core.swap.states import Change, SlotState, after


class Slot:
    """One storage.

    Invariants (outside the engine's lock they may be seen half changed):
        state in (HOST, DISK)  ->  source is None and buffer is None and block is not None
        state is D2H           ->  source is not None and block is not None and offloaded is not None
        state is H2D           ->  buffer is not None and block is not None and loaded is not None
        state is DEVICE        ->  source is not None or buffer is not None
    """

    __slots__ = (
        "__weakref__", "block", "buffer", "changed", "group", "index", "label", "loaded", "num_bytes", "offloaded",
        "read_version", "saved_version", "source", "state", "stream", "tier", "waiting",
    )  # fmt: skip

    def __init__(
        self, source: Buffer, num_bytes: int, stream: Stream, group: Group, label: str, read_version: Callable[[], int]
    ) -> None:
        self.num_bytes = num_bytes
        self.label = label
        self.state = SlotState.DEVICE
        self.stream = stream  # that of the forward; autograd runs the backward of an op on the same one
        self.source: Buffer | None = source
        self.buffer: Buffer | None = None
        self.block: Block | None = None
        self.tier: Tier | None = None
        self.offloaded: Event | None = None
        self.loaded: Event | None = None
        self.read_version: Callable[[], int] | None = read_version
        self.saved_version = read_version()
        self.changed: int | None = None  # the version that was found instead of the saved one
        self.waiting: dict[int, None] = {}  # handles that have not asked since the last load
        self.group = group
        self.index = group.add(self)

    def move(self, change: Change) -> None:
        self.state = after(
            self.state, change, label=self.label, on_disk=self.tier is not None and self.tier.name == "disk"
        )

    def look_for_change(self) -> None:
        """Compare the version while the source is still held; what is found is kept until a handle asks."""
        if self.changed is None and self.read_version is not None:
            version = self.read_version()
            if version != self.saved_version:
                self.changed = version

    def drop_source(self) -> None:
        self.look_for_change()
        self.source = None
        self.read_version = None  # it holds an alias of the source

    def __del__(self) -> None:
        # Any thread, any moment: only calls that never block. The block knows its last copies (O3, O9).
        block, tier = getattr(self, "block", None), getattr(self, "tier", None)
        if block is not None and tier is not None:
            tier.give(block)


class Handle:
    """What autograd keeps in place of a saved tensor."""

    __slots__ = ("__weakref__", "number", "slot")
    _numbers = itertools.count()

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.number = next(Handle._numbers)
        slot.waiting[self.number] = None

    def __del__(self) -> None:
        slot = getattr(self, "slot", None)
        if slot is not None:
            slot.waiting.pop(self.number, None)  # atomic: no lock in a finaliser


class Group:
    """The slots of one call of one module (or one `with` block), in the order of saving."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.slots: list[weakref.ref[Slot]] = []
        self.cursor = -1  # slots after this one were prefetched or asked for in the current pass
        self.has_ended = False  # backward has reached it

    def add(self, slot: Slot) -> int:
        self.slots.append(weakref.ref(slot))
        self.cursor = len(self.slots) - 1
        return len(self.slots) - 1

    def key(self, slot: Slot) -> tuple[str, int, int]:
        """What names this slot in the next step, too."""
        return self.label, slot.index, slot.num_bytes
