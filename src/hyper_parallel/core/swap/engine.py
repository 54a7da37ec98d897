"""The engine: launches offloads and loads in an order that is always right, and holds what must be held.

See the README in this folder for the orders O1 to O9 that the comments name. Thread-safe: one lock, held for bookkeeping
and for enqueueing, never while the host waits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from hyper_parallel._base import trace
from hyper_parallel._base.errors import StateError
from hyper_parallel._base.log import get_logger
from hyper_parallel.core.swap import schedule
from hyper_parallel.core.swap.device import Buffer, Event, Stream, SwapDevice, Tier
from hyper_parallel.core.swap.prefetch import Prefetch
from hyper_parallel.core.swap.slot import Group, Handle, Slot
from hyper_parallel.core.swap.slot_errors import changed_in_place, not_loaded
from hyper_parallel.core.swap.states import Change, SlotState
from hyper_parallel.core.swap.stats import LinkUse, StallTimes, SwapStats
from hyper_parallel.core.swap.turn import Turn
from hyper_parallel.core.swap.window import InFlight, Window

_logger = get_logger("swap")


class Limits:
    """How much the engine may hold; changed between steps by configuration."""

    def __init__(
        self, window_bytes: int, prefetch_bytes: int, on_full: str = "wait", *, first_window_bytes: int | None = None
    ) -> None:
        self.window_bytes = window_bytes
        self.first_window_bytes = window_bytes if first_window_bytes is None else first_window_bytes
        self.prefetch_bytes = prefetch_bytes
        self.on_full = on_full


class SwapEngine:
    """Swaps storages of one device.

    Fields, all guarded by `_lock`:
        _window: sources of offloads under way (O2)
        _loading: buffers of loads that nobody has waited for (O7)
        _prefetch: what is loaded ahead
        _turn: how forwards ended so far
        _lost: memory that a copy may still touch and whose end nothing tells; see `_settle`
        _launching: the stream and the memory of a copy from before its launch until all is noted; see `_settle_cut_off`
        _depth_bytes, _room_bytes: how much of the limits of prefetch and of the window turned out to be of use; see
            `_learn`
    """

    def __init__(self, device: SwapDevice, tiers: list[Tier], limits: Limits) -> None:
        self.device = device
        self.tiers = tiers
        self.limits = limits
        self.stats = SwapStats()
        self._stalls = StallTimes(self.stats)
        self._lock = threading.Lock()
        self._window = Window()
        self._loading = Window()
        self._prefetch = Prefetch()
        self._turn = Turn()
        self._lost: list[Any] = []
        self._launching: tuple[Stream, object, Any] | None = None
        self._thread = threading.local()
        self._depth_bytes = 0
        self._room_bytes = 0
        self._offloads, self._loads = LinkUse(), LinkUse()
        self._said: set[str] = set()

    # -- forward ------------------------------------------------------------------------------------------------------

    def new_group(self, label: str, ahead_bytes: int | None = None, *, ends_forward: bool = False) -> Group:
        """Make a group that comes after every group this thread made before.

        `ends_forward`: for who knows that it is the last of its forward; else that is learned from the step before.

        `ahead_bytes`: for who knows how high memory rises in the backward of this group, with all that it swapped
        brought back: so much more may be loaded meanwhile for the groups whose backward comes after, in place of
        `prefetch_bytes`.
        """
        with self._lock:
            chain = self._chain()
            if len(chain) > 64 and sum(ref() is None for ref in chain) > len(chain) // 2:
                chain[:] = [ref for ref in chain if ref() is not None]
            group = Group(label, chain, ahead_bytes, ends_forward=ends_forward)
            chain.append(weakref.ref(group))
        return group

    def has_groups(self) -> bool:
        """Tell whether a group that this thread made is still alive."""
        with self._lock:
            return bool(self._chain())

    def _chain(self) -> list[weakref.ref[Group]]:
        """Return the groups that this thread made; the last of them is alive."""
        chain: list[weakref.ref[Group]] = self._thread.__dict__.setdefault("chain", [])
        while chain and chain[-1]() is None:  # groups of a step that is over
            chain.pop()
        return chain

    def expect(self, group: Group, slots: Iterable[Slot]) -> None:
        """Tell in which order backward will ask for a group's slots; loads are launched in it from now on.

        Those that are not listed come after them, in the reverse of the order of saving; those that are saved later
        come before them. A slot of another group may be listed: a storage may be shared. An order that backward does
        not keep costs time only.
        """
        with self._lock:
            group.expect(slots)

    def keep(self, group: Group, num_bytes: int) -> None:
        """Note that the forward of a group holds so much more itself, for its backward.

        In the last group that takes the place of sources in the window: see `_let_leave`.

        What the last group holds, and what comes after it (a head, a loss), is often the highest point of a step, and
        sources of earlier groups would be there for nothing. They have had time to leave: as a rule nobody waits. Which
        group is the last is known from the step before. Where it swaps itself, nothing is done: its own sources would
        be there anyway.
        """
        group.kept_bytes += num_bytes
        if self._is_last(group):
            self._let_leave(group, max(self.room_bytes - group.kept_bytes, 0))

    def end_forward(self, group: Group) -> None:
        """Note that the forward of a group is over.

        If it is the last one, and has swapped nothing, all sources leave; see `keep`.
        """
        if self._is_last(group):
            self._let_leave(group)

    def _is_last(self, group: Group) -> bool:
        with self._lock:
            return self._turn.is_last(group)

    def save(
        self, source: Buffer, num_bytes: int, group: Group, label: object, read_version: Callable[[], int]
    ) -> Slot:
        """Manage a storage: launch its offload, or keep it on the device and count the reason.

        `source` must not lead to an autograd node. `read_version` tells how often the storage was changed in place.
        """
        stream = self.device.current_stream()
        slot = Slot(source, num_bytes, stream, group, label, read_version)
        with self._lock:
            self._drop_finished()
            reason = self._reason_to_keep(slot)
        if reason is not None:
            self._keep(slot, reason)
            return slot
        self._make_room(slot)
        with self._lock:
            reason = self._launch_offload(slot, stream)
        if reason is not None:
            self._keep(slot, reason)
        return slot

    def _reason_to_keep(self, slot: Slot) -> str | None:
        if self._turn.keeps(slot, self._tail_room_bytes()):
            return "needed first in backward"
        if self.limits.on_full == "keep" and not self._fits(slot):
            return "the link is behind"
        return None

    def _tail_room_bytes(self) -> int:
        return self.limits.window_bytes // 2

    def _fits(self, slot: Slot) -> bool:
        return len(self._window) == 0 or self._window.held_bytes + slot.num_bytes <= self.room_bytes

    @property
    def room_bytes(self) -> int:
        """Return how much of the window is used by now: what was learned, within the limits, which may change."""
        return min(max(self._room_bytes, self.limits.first_window_bytes), self.limits.window_bytes)

    @property
    def depth_bytes(self) -> int:
        """Return how far ahead is loaded by now: what was learned, within the limits, which may change."""
        return min(max(self._depth_bytes, self.limits.prefetch_bytes // 8, 1), max(self.limits.prefetch_bytes, 1))

    def _make_room(self, slot: Slot) -> None:
        """Let compute wait for the oldest offload until the source fits into the window (O2)."""
        while True:
            with self._lock:
                oldest = self._window.oldest()
                if oldest is None or self._fits(slot):  # plant: window-limit
                    return
            self._wait_for_offload(oldest)

    def _let_leave(self, group: Group, at_most_bytes: int = 0) -> None:
        """Let compute wait for what groups before the newest have offloaded, until at most so much is left.

        They have had the forward of a group to leave, so as a rule nobody waits. But the host runs ahead of the device
        and sees their copies still under way; without this the sources would stay through the allocations of the first
        group's backward, the highest point of the step.
        """
        while True:
            with self._lock:
                oldest = self._window.oldest()
                slot = None if oldest is None else oldest.slot
                if oldest is None or self._window.held_bytes <= at_most_bytes:
                    return
                if slot is None or slot.group is group or slot.group.chain is not group.chain:
                    return
            self._wait_for_offload(oldest)

    def _wait_for_offload(self, oldest: InFlight) -> None:
        # The wait comes before the reference is dropped, and on the stream whose pool the memory returns to: what
        # reuses it there is then written after the copy has read. (Another thread may drop the same entry meanwhile: it
        # waited, too.)
        since = self._stalls.begin(oldest.stream, oldest.event)
        _wait(oldest.stream, oldest.event)  # plant: source-after-offload
        self._stalls.end("offload", oldest.stream, since)
        with self._lock:
            self.stats.num_window_waits += 1
            if self._window.oldest() is oldest:
                self._finish_offload(self._window.pop_oldest())

    def _launch_offload(self, slot: Slot, stream: Stream, copy_stream: Stream | None = None) -> str | None:
        """Enqueue the copy to slower memory; return the reason if it cannot be."""
        for tier in self.tiers:
            block = tier.take(slot.num_bytes)
            if block is not None:
                break
        else:
            return "no room in " + (" or ".join(tier.name for tier in self.tiers) or "any tier")
        slot.look_for_change()
        try:
            offload = self.device.offload_stream() if copy_stream is None else copy_stream
            for event in block.last_uses:  # plant: offload-after-block
                offload.wait_event(event)  # O3, O9
            offload.wait_event(stream.record_event())  # O1; plant: offload-after-producer
            if self.limits.first_window_bytes < self.limits.window_bytes:
                self._offloads.begin(offload)
            self._launching = offload, slot.label, (slot.source, block)
            self.device.launch_offload(block, slot.source, offload)
        except Exception:
            self._launching = None
            tier.give(block)  # plant: failed-launch
            raise
        self.stats.offloaded_bytes += slot.num_bytes
        self.stats.num_offloads += 1
        try:
            slot.offloaded = offload.record_event()
        except Exception:
            self._launching = None
            if self._settle(offload, slot.label, (slot.source, block)):  # plant: unfollowed-offload
                tier.give(block)
            raise
        if self.limits.first_window_bytes < self.limits.window_bytes:
            self._offloads.end(offload)
        slot.block, slot.tier = block, tier
        block.last_uses = (slot.offloaded,)  # O9; plant: block-notes-offload
        slot.move(Change.LAUNCH_OFFLOAD)
        self._window.add(InFlight(slot, stream, slot.source, slot.offloaded, slot.num_bytes))
        self._launching = None
        self.stats.peak_in_flight_bytes = max(self.stats.peak_in_flight_bytes, self._window.held_bytes)
        trace.emit("swap.offload", label=slot.label, bytes=slot.num_bytes, tier=tier.name)
        return None

    def _settle(self, stream: Stream, label: object, memory: object) -> bool:
        """Let the host wait for a copy that is under way and whose event could not be recorded.

        False if that fails as well: nothing will ever tell when the memory may be used again, and it stays with us.
        """
        try:
            _join(stream.record_event())
        except Exception as error:
            _logger.warning("a copy of %s cannot be followed (%s); its memory is not used again", label, error)
            self._lost.append(memory)
            return False
        return True

    def _settle_cut_off(self) -> None:
        """Settle a launch that Ctrl-C cut off: its copy may be under way, and nobody has its event."""
        launching = self._launching
        if launching is not None:
            self._settle(*launching)
            self._launching = None

    def _keep(self, slot: Slot, reason: str) -> None:
        with self._lock:
            self.stats.kept[reason] += 1
            self.stats.kept_bytes += slot.num_bytes
            is_new = reason not in self._said
            self._said.add(reason)
        trace.emit("swap.keep", label=slot.label, bytes=slot.num_bytes, reason=reason)
        if is_new:
            _logger.info(
                "kept on the device: %s (%d bytes, %s); said once, counted in stats()",
                reason,
                slot.num_bytes,
                slot.label,
            )

    def _finish_offload(self, entry: InFlight) -> None:
        slot = entry.slot
        if slot is None or slot.state is not SlotState.D2H:
            return
        if entry.event.error is not None:
            self._fail_offload(slot, entry.event.error)
            return
        slot.move(Change.FINISH_OFFLOAD)
        slot.drop_source()

    def _fail_offload(self, slot: Slot, error: BaseException) -> None:
        """Keep the source, which is still here, since the copy did not happen (a full disk)."""
        slot.move(Change.FAIL_OFFLOAD)
        block, tier = slot.block, slot.tier
        slot.block = slot.tier = slot.offloaded = None
        if block is not None and tier is not None:
            block.last_uses = ()
            tier.give(block)
        self.stats.kept["the copy failed"] += 1
        self.stats.kept_bytes += slot.num_bytes
        self.stats.offloaded_bytes -= slot.num_bytes
        if "the copy failed" not in self._said:
            self._said.add("the copy failed")
            _logger.warning("%s stays on the device: %s; said once, counted in stats()", slot.label, error)

    def _drop_finished(self) -> None:
        if self._launching is not None:
            self._settle_cut_off()
        for entry in self._window.pop_finished():
            self._finish_offload(entry)
        for _ in self._loading.pop_finished():
            pass  # the load is done: whoever drops the buffer now cannot hurt it (O7)
        self._learn()

    def _learn(self) -> None:
        """Use more of the limits where compute was seen to wait while the link could have been at work before.

        Where the link had no pause, compute waits for it sooner or later, and more memory in flight buys nothing.
        """
        for _ in range(self._stalls.collect()):
            self._depth_bytes = schedule.deepened(self.depth_bytes, self.limits.prefetch_bytes)

    # -- backward -----------------------------------------------------------------------------------------------------

    def acquire(self, handle: Handle) -> Buffer:
        """Return the storage's contents on the device.

        They are valid for what the caller enqueues on its current stream from now on.

        Raises:
            StateError: the storage was changed in place after it was saved.
            MemoryError: there is no device memory to bring it back to.
        """
        slot = handle.slot
        stream = self.device.current_stream()
        self._arrive(handle.group)
        with self._lock:
            slot.look_for_change()  # plant: version-at-ask
            if slot.changed is not None:  # plant: say-change
                raise changed_in_place(slot)
            if handle.number not in slot.waiting:
                for group in handle.group.earlier():
                    group.begin_pass()
            if slot.source is not None:
                slot.waiting.pop(handle.number, None)
                self._launch_next(slot, handle.group)
                return slot.source
            if slot.buffer is not None and slot.stream != stream:  # plant: buffer-stream
                self._drop_buffer(slot)  # O8; a load under way holds the memory until it is done (O7)
            is_late = slot.buffer is None or (slot.loaded is not None and not slot.loaded.query())
            if slot.buffer is None:
                slot.stream = stream
                self._launch_load(slot)
            buffer, loaded = slot.buffer, slot.loaded
        if loaded is not None:
            since = self._stalls.begin(stream, loaded) if is_late else None
            error = _wait(stream, loaded)  # O6; plant: use-after-load
            # Where backward has just begun nothing could have come earlier: that is no reason to prefetch more.
            self._stalls.end("first load" if handle.group.is_last else "load", stream, since, slot.pause)
            if error is not None:
                with self._lock:
                    if slot.loaded is loaded:
                        self._drop_buffer(slot)  # so that asking again tries again
                raise not_loaded(slot, error) from error
        with self._lock:
            if slot.state is SlotState.H2D and slot.loaded is loaded:
                slot.move(Change.FINISH_LOAD)
                if loaded is not None:
                    self._loading.remove(loaded)  # this stream waited: memory reused on it comes after the load
            slot.waiting.pop(handle.number, None)
            if not slot.waiting and slot.buffer is buffer:  # plant: last-ask
                self._drop_buffer(slot)
            self._launch_next(slot, handle.group)
        return buffer

    def arrive(self, group: Group) -> None:
        """Note that backward is in a group and asks for nothing that it swapped: load what it will ask for next."""
        self._arrive(group)
        with self._lock:
            self._load_ahead(group)

    def _arrive(self, group: Group) -> None:
        with self._lock:
            self._drop_finished()
            is_turn = self._turn.begins_in(group, self._tail_room_bytes(), self.limits.window_bytes // 8)
            if is_turn:
                self._prefetch.begin_backward()
        if is_turn:
            self._let_leave(group)
            with self._lock:
                self._learn_window()

    def _learn_window(self) -> None:
        """Use more of the window if compute waited for room there, and the link had pauses, in the last forward."""
        pause_ms = self._offloads.collect()
        if schedule.is_window_too_small(self._stalls.take_offload_ms(), pause_ms):
            self._room_bytes = schedule.deepened(self.room_bytes, self.limits.window_bytes)

    def _launch_next(self, asked: Slot, group: Group) -> None:
        """Load ahead, now that backward has got to `group` and asked for this slot."""
        if asked.group is group:
            group.cursor = min(group.cursor, asked.position - 1)
        self._load_ahead(group)

    def _load_ahead(self, group: Group) -> None:
        self._prefetch.launch(group, self.depth_bytes, self._launch_load, self.device.bytes_in_use)

    def _launch_load(self, slot: Slot, copy_stream: Stream | None = None) -> None:
        block, stream = slot.block, slot.stream
        if block is None or slot.offloaded is None:
            raise StateError(
                "A storage without a block cannot be loaded.", got=f"state {slot.state.value}", where=str(slot.label)
            )
        buffer = self._allocate(slot.num_bytes, stream)
        load = self.device.load_stream() if copy_stream is None else copy_stream
        # O5: after the allocation, so after all earlier users of that memory
        load.wait_event(stream.record_event())  # plant: load-after-stream
        load.wait_event(slot.offloaded)  # O4; plant: load-after-offload
        for event in block.last_uses:
            if event is not slot.offloaded:
                # O3: an earlier load of this block, on another stream; see `last_uses` below
                load.wait_event(event)  # plant: load-after-load
        is_learning = (
            self.depth_bytes < self.limits.prefetch_bytes
        )  # else nothing depends on pauses, and moments cost time
        slot.pause = self._loads.begin(load) if is_learning else None
        self._launching = load, slot.label, (buffer, block)
        try:
            self.device.launch_load(buffer, block, load)
        except Exception:
            self._launching = None
            raise
        self.stats.loaded_bytes += slot.num_bytes
        self.stats.num_loads += 1
        try:
            loaded = load.record_event()
        except Exception:
            self._launching = None
            if not self._settle(load, slot.label, (buffer, block)):
                slot.block = None  # a copy may still read it: it is never given back
            raise
        if is_learning:
            self._loads.end(load)
        self._loading.add(InFlight(None, stream, buffer, loaded, slot.num_bytes))  # O7; plant: hold-loading
        slot.move(Change.LAUNCH_LOAD)
        slot.buffer, slot.loaded = buffer, loaded
        block.last_uses = (loaded,)  # O3; the load came after the offload (O4); plant: block-notes-load
        self._launching = None
        trace.emit("swap.load", label=slot.label, bytes=slot.num_bytes)

    def _allocate(self, num_bytes: int, stream: Stream) -> Buffer:
        try:
            return self.device.allocate(num_bytes, stream)
        except MemoryError:
            if not self._give_up_prefetched():
                raise
        return self.device.allocate(num_bytes, stream)

    def _give_up_prefetched(self) -> bool:
        """Drop buffers that nobody has asked for yet: they can come again. Return whether there was one."""
        prefetched = self._prefetch.unclaimed()
        for slot in prefetched:
            if slot.loaded is not None:
                slot.loaded.join()  # rare and desperate: the memory must be free when the next allocation looks
                self._loading.remove(slot.loaded)
            self._drop_buffer(slot)
        self._prefetch.forget()
        return bool(prefetched)

    def _drop_buffer(self, slot: Slot) -> None:
        slot.move(Change.DROP_BUFFER)
        slot.buffer = None
        slot.loaded = None

    # -- by hand ------------------------------------------------------------------------------------------------------
    #
    # Someone else decides when something moves; the orders are the same. A stream given by the caller takes the place
    # of the engine's own. Nobody waits for room in the window here: the caller holds the source anyway, until it has
    # called `wait_offload`. `acquire` is the end of a load by hand, too.

    def hold(self, source: Buffer, num_bytes: int, stream: Stream, label: object) -> Slot:
        """Make a slot that belongs to no forward and stays until `launch_offload`.

        `stream`: the one whose pool the source's memory returns to. Who holds the source looks for changes in place.
        """
        return Slot(source, num_bytes, stream, Group(str(label), []), label, lambda: 0)

    def launch_offload(self, slot: Slot, copy_stream: Stream | None = None) -> bool:
        """Launch the offload of a held slot; return False, counted in `stats`, if no tier has room for it."""
        current = self.device.current_stream()
        with self._lock:
            self._drop_finished()
            offload = self.device.offload_stream() if copy_stream is None else copy_stream
            if current != slot.stream:
                # O1: the storage may have been written on either of the two
                offload.wait_event(current.record_event())  # plant: hand-after-caller
            reason = self._launch_offload(slot, slot.stream, offload)
        if reason is not None:
            self._keep(slot, reason)
        return reason is None

    def wait_offload(self, slot: Slot) -> None:
        """Make the current stream wait for a slot's offload, and drop the source. Does nothing if none is under way.

        A copy that failed leaves the source where it is, counted in `stats`.
        """
        with self._lock:
            self._drop_finished()
            offloaded, home = slot.offloaded, slot.stream
            is_held = slot.state is SlotState.D2H
        if offloaded is None:
            return
        if is_held:
            since = self._stalls.begin(home, offloaded)
            # O2: memory returns to the pool of this stream, whichever one the caller is on
            _wait(home, offloaded)  # plant: hand-source
            self._stalls.end("offload", home, since)
        current = self.device.current_stream()
        if current != home:
            since = self._stalls.begin(current, offloaded)
            _wait(current, offloaded)  # plant: hand-caller
            self._stalls.end("offload", current, since)
        if is_held:
            with self._lock:
                self._window.remove(offloaded)  # plant: hand-window
                self._finish_offload(InFlight(slot, home, None, offloaded, 0))

    def new_handle(self, slot: Slot) -> Handle:
        """Make a handle of a held slot.

        Unlike autograd's it waits for nothing before `launch_load`: no buffer is held for it.
        """
        handle = Handle(slot)
        slot.waiting.pop(handle.number, None)
        return handle

    def launch_load(self, handle: Handle, copy_stream: Stream | None = None) -> None:
        """Launch the load of a slot, if nothing of it is on the device; `acquire` waits for it."""
        with self._lock:
            self._drop_finished()
            self._load_early(handle.slot, copy_stream)
            handle.slot.waiting[handle.number] = None

    def launch_early(self, slot: Slot, copy_stream: Stream | None = None) -> None:
        """Launch the load of a slot that backward will still ask for, if nothing of it is on the device."""
        with self._lock:
            self._drop_finished()
            if slot.waiting:
                self._load_early(slot, copy_stream)

    def wait_group_offload(self, group: Group) -> None:
        """Call `wait_offload` with every slot of a group."""
        for slot in _living(group):
            self.wait_offload(slot)

    def launch_group_load(self, group: Group, copy_stream: Stream | None = None) -> None:
        """Launch the loads of what backward has not asked a group for yet, whatever `prefetch_bytes` says."""
        with self._lock:
            self._drop_finished()
            if not any(slot.waiting for slot in _living(group)):
                group.begin_pass()  # all was asked for already: someone gets ready for another backward
            for slot in group.in_order():
                if slot.waiting:
                    try:
                        self._load_early(slot, copy_stream)
                    except MemoryError:
                        return  # as in `Prefetch`: it comes when it is asked for

    def wait_group_load(self, group: Group) -> None:
        """Make the current stream wait for the loads of a group that are under way."""
        self.wait_loads(_living(group))

    def wait_loads(self, slots: list[Slot]) -> None:
        """Make the current stream wait for the loads of these slots that are under way."""
        current = self.device.current_stream()
        with self._lock:
            loads = [slot.loaded for slot in slots if slot.state is SlotState.H2D]
        for loaded in loads:
            if loaded is not None:
                since = self._stalls.begin(current, loaded)
                _wait(current, loaded)  # a load that failed raises where backward asks for it
                self._stalls.end("load", current, since)

    def _load_early(self, slot: Slot, copy_stream: Stream | None) -> None:
        if slot.state in (SlotState.HOST, SlotState.DISK):
            self._launch_load(slot, copy_stream)
            self._prefetch.add(slot)

    # -- housekeeping -------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Drop what is held for copies that are done by now."""
        with self._lock:
            self._drop_finished()

    def add_stats_to(self, total: SwapStats) -> None:
        """Add this engine's numbers, with what is done by now, to a sum.

        A wait of compute that is not over is counted later.
        """
        with self._lock:
            self._drop_finished()
            total.add(self.stats)

    def join(self) -> None:
        """Block the host until no copy is under way, and drop what was held for them."""
        while True:
            with self._lock:
                self._drop_finished()
                entries = [self._window.oldest(), self._loading.oldest()]
            events = [entry.event for entry in entries if entry is not None]
            if not events:
                return
            for event in events:
                _join(event)

    @property
    def in_flight_bytes(self) -> int:
        with self._lock:
            return self._window.held_bytes + self._loading.held_bytes


def _living(group: Group) -> list[Slot]:
    return [slot for ref in group.slots if (slot := ref()) is not None]


def _wait(stream: Stream, event: Event) -> BaseException | None:
    """Let `stream` wait for an event; return the error of a copy that failed, in place of raising it."""
    try:
        stream.wait_event(event)
    except Exception:
        if event.error is None:
            raise
    return event.error


def _join(event: Event) -> None:
    try:
        event.join()
    except Exception:
        if event.error is None:
            raise
