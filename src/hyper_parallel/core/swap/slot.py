"""A slot is the record of one storage while it is managed; a group has the slots of one call.

A group knows its slots in two orders: the one in which they were saved, and the one in which backward is expected to
ask for them.

Ownership: handles hold slots, slots hold their group, a group holds its slots weakly. Nothing else keeps a slot alive,
so a dropped graph gives everything back by reference counting alone.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator

from hyper_parallel.core.swap.device import Buffer, Event, HostBlock, Stream, Tier
from hyper_parallel.core.swap.states import Change, SlotState, after
from hyper_parallel.core.swap.stats import Pause


class Slot:
    """The record of one storage, from its saving until autograd drops its last handle.

    Invariants (outside the engine's lock they may be seen half changed):
        state in (HOST, DISK)  ->  source is None and buffer is None and block is not None
        state is D2H           ->  source is not None and block is not None and offloaded is not None
        state is H2D           ->  buffer is not None and block is not None and loaded is not None
        state is DEVICE        ->  source is not None or buffer is not None
    """

    __slots__ = (
        "__weakref__", "block", "buffer", "changed", "group", "handles", "index", "is_expected", "label", "loaded",
        "num_bytes", "offloaded", "pause", "position", "read_version", "saved_version", "source", "state", "stream",
        "tier", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        source: Buffer,
        num_bytes: int,
        stream: Stream,
        group: Group,
        label: object,
        read_version: Callable[[], int],
    ) -> None:
        self.num_bytes = num_bytes
        self.label = label
        self.state = SlotState.DEVICE
        self.stream = stream  # that of the forward; autograd runs the backward of an op on the same one
        self.source: Buffer | None = source
        self.buffer: Buffer | None = None
        self.block: HostBlock | None = None
        self.tier: Tier | None = None
        self.offloaded: Event | None = None
        self.loaded: Event | None = None
        self.pause: Pause | None = None  # of the link, before the load began
        self.read_version: Callable[[], int] | None = read_version
        self.saved_version = read_version()
        self.changed: int | None = None  # the version that was found instead of the saved one
        self.handles: dict[int, None] = {}  # living handles, by number
        self.waiting: dict[int, None] = {}  # those of them that have not asked in this pass of backward
        self.group = group
        self.is_expected = False  # backward of its group begins with it; see `Group.expect`
        self.index = self.position = -1  # among what the group saved; in its stack, which `Group.expect` changes
        group.add(self)

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
        self.look_for_change()  # plant: version-at-drop
        self.source = None
        self.read_version = None  # it holds an alias of the source

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # Any thread, any moment: only calls that never block. The block knows its last copies (O3, O9). When Python
        # ends, the tier's modules may have lost their names, and its memory goes with the process.
        block, tier = getattr(self, "block", None), getattr(self, "tier", None)
        if block is not None and tier is not None and not ends():
            tier.give(block)  # plant: give-block


class Handle:
    """What autograd keeps in place of a saved tensor.

    `group` is that of the call which will ask. It is another one than the slot's where a call saves what an earlier one
    has saved already: when it asks, backward has got to its own group, not to the slot's.
    """

    __slots__ = ("__weakref__", "group", "number", "slot")
    _numbers = itertools.count()

    def __init__(self, slot: Slot, group: Group | None = None) -> None:
        self.group = slot.group if group is None else group
        self.number = next(Handle._numbers)
        self.slot = slot  # last: the finaliser of one that was never finished has nothing to do
        slot.handles[self.number] = slot.waiting[self.number] = None

    def __del__(self) -> None:
        slot = getattr(self, "slot", None)
        if slot is not None:
            slot.waiting.pop(self.number, None)  # atomic, as the next: no lock in a finaliser
            slot.handles.pop(self.number, None)


class Group:
    """The slots of one call of one module (or one `with` block).

    Invariant: stack[slot.position]() is slot, for every living slot of `slots`. The stack may have slots of other
    groups, too.
    """

    def __init__(
        self,
        label: str,
        chain: list[weakref.ref[Group]],
        ahead_bytes: int | None = None,
        *,
        ends_forward: bool = False,
    ) -> None:
        self.label = label
        self.ends_forward = ends_forward  # somebody has said that it is the last of its forward
        self.chain = chain  # the groups of this thread's forward in order, itself among them, weakly
        before: Group | None = next((group for ref in reversed(chain) if (group := ref()) is not None), None)
        self.number: int = 0 if before is None or before.has_ended else before.number + 1  # in its forward
        self.ahead_bytes = ahead_bytes  # what may be loaded for others while backward is here; None: nobody has said
        self.slots: list[weakref.ref[Slot]] = []  # in the order of saving
        self.stack: list[weakref.ref[Slot]] = []  # as backward is expected to ask for them, the first on top
        self.cursor = -1  # prefetch goes on here in the stack: those above were loaded or asked for in this pass
        self.kept_bytes = 0  # what its call holds itself, beside what it swaps
        self.has_ended: bool = False  # backward has reached it, or the forward it belongs to
        self.is_last = False  # of its forward: backward began here
        self.peak_bytes = 0  # most memory of the device in use when backward was here and asked
        self.levels: list[int] | None = None  # memory in use at each question of backward; see `Prefetch._levels`
        self.rises: list[int] = []  # from each question on, as it was in the last backward

    def add(self, slot: Slot) -> None:
        slot.index, slot.position = len(self.slots), len(self.stack)
        self.slots.append(weakref.ref(slot))  # plant: weak-slots
        self.stack.append(self.slots[-1])
        self.cursor = slot.position

    def expect(self, slots: Iterable[Slot]) -> None:
        """Put these slots on top of the stack, the first of them uppermost; the others stay as they were saved."""
        listed = dict.fromkeys(slots)  # of a slot that is listed twice the first time counts
        rest = [slot for ref in self.slots if (slot := ref()) is not None and slot not in listed]
        stack = [*rest, *reversed(listed)]  # plant: expected-order
        for position, slot in enumerate(stack):
            if slot.group is self:
                slot.position = position
                slot.is_expected = slot in listed
        self.stack = [weakref.ref(slot) for slot in stack]
        self.cursor = len(stack) - 1  # what was asked for already waits for nothing, and is passed over

    def in_order(self) -> Iterator[Slot]:
        """Go through the living slots of its own, as backward is expected to ask for them."""
        for ref in reversed(self.stack):
            slot = ref()
            if slot is not None and slot.group is self:
                yield slot

    def earlier(self) -> Iterator[Group]:
        """Go through this group and the living ones before it, newest first."""
        seen = False
        for ref in reversed(self.chain):
            group = ref()
            seen = seen or group is self
            if seen and group is not None:
                yield group

    def with_next(self) -> tuple[Group | None, ...]:
        """Return this group, and the one whose backward comes right after."""
        earlier = self.earlier()
        return next(earlier, None), next((other for other in earlier if other.slots), None)

    def is_newest(self) -> bool:
        """Tell whether nothing that is still alive was saved after this group."""
        for ref in reversed(self.chain):
            group = ref()
            if group is self:
                return True
            if group is not None and any(slot() is not None for slot in group.slots):
                return False
        return True

    def begin_pass(self) -> None:
        """Note that backward starts over (it was run with the graph retained): every handle will ask again."""
        self.cursor = len(self.stack) - 1
        for ref in self.slots:
            slot = ref()
            if slot is not None:
                slot.waiting = dict(slot.handles)

    def key(self, slot: Slot) -> tuple[str, int, int]:
        """Return what names this slot in the next step, too."""
        return self.label, slot.index, slot.num_bytes
