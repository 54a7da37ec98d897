"""Blocks out of slabs under a hard budget: what the pinned arena and the disk tier have in common.

A *slab* is one large piece of slower memory: registered host memory, or a file. Blocks are ranges of slabs. The pool
asks its owner for a new slab when no free range fits, never past the budget, and keeps slabs until `trim`.

Guarantees:
    - reserved_bytes <= budget_bytes, unless the budget was lowered later (then nothing new is reserved)
    - a block carries the events of all earlier users of its memory that were not done when it was taken
    - `give` takes no lock and calls nothing: a finaliser may call it at any bytecode, also inside `take` of the same
      thread
    - a block that is gone without `give` (Ctrl-C came in between, or in a finaliser) is free as well: C does that,
      where no Ctrl-C comes
    - a call that Ctrl-C cuts off leaves a mark, and the next one begins again from what is certain: the slabs and the
      blocks that are out

Assumes that no finaliser calls anything else of a pool: the lock is not reentrant. It is held while a slab is made,
which takes about half a second per GiB of pinned memory, so other threads wait for the growth instead of growing as
well.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel.core.swap.device import Event
from hyper_parallel.core.swap.ranges import Pieces, RangeAllocator
from hyper_parallel.core.swap.sizes import format_size

ALIGNMENT = 512  # of every block: what copy engines and direct input and output of files ask for
PAGE_BYTES = 4096
MIN_PART_BYTES = 1024**2  # copies of less do not reach the speed of the link


class Part(NamedTuple):
    """Bytes [offset, offset + num_bytes) of a slab."""

    slab: Any
    offset: int
    num_bytes: int


class _Out(weakref.ref["PoolBlock"]):
    """A block that is out: what the pool has to know of it, also when the block is gone."""

    __slots__ = ("last_uses", "num_bytes", "pieces")

    last_uses: tuple[Event, ...]
    num_bytes: int
    pieces: Pieces

    # A weak reference is otherwise compared by what it leads to.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class PoolBlock:
    """A range of a slab, or several. Abstract: each tier has its own final class of blocks."""

    __slots__ = ("__weakref__", "_is_out", "_out", "_pool", "num_bytes", "parts")

    def __init__(
        self, parts: tuple[Part, ...], last_uses: tuple[Event, ...], pool: BlockPool[Any], pieces: Pieces
    ) -> None:
        self.parts = parts  # in the order of the block's bytes
        self.num_bytes = sum(part.num_bytes for part in parts)
        self._pool = pool
        self._out = _Out(self, pool._note_gone)
        self._out.last_uses, self._out.num_bytes, self._out.pieces = last_uses, self.num_bytes, pieces
        self._is_out = (
            True  # deleted by `give`: that is one step of the interpreter, so that of two calls one is found out
        )

    @property
    def last_uses(self) -> tuple[Event, ...]:
        """Return what the writer of the block must wait for (O3, O9); its own copies then take their place."""
        return self._out.last_uses

    @last_uses.setter
    def last_uses(self, events: tuple[Event, ...]) -> None:
        self._out.last_uses = events

    @property
    def slab(self) -> Any:
        """Return the slab of the only part."""
        return self._only_part().slab

    @property
    def offset(self) -> int:
        """Return the offset of the only part."""
        return self._only_part().offset

    def _only_part(self) -> Part:
        if len(self.parts) > 1:
            # A copy of [offset, offset + num_bytes) would silently run into somebody else's block.
            raise StateError(
                "A block has no single place.",
                expected="one part",
                got=f"{len(self.parts)}",
                do="Copy each of its `parts`, or make the tier with max_parts=1.",
            )
        return self.parts[0]

    @property
    def last_use(self) -> Event | None:
        """Return the last of `last_uses`. Setting it replaces them all: right once a copy has waited for them."""
        return self.last_uses[-1] if self.last_uses else None

    @last_use.setter
    def last_use(self, event: Event | None) -> None:
        self.last_uses = () if event is None else (event,)

    def __repr__(self) -> str:
        places = ", ".join(str(part.offset) for part in self.parts)
        return f"<{type(self).__name__} of {format_size(self.num_bytes)} at {places}>"


AnyBlock = TypeVar("AnyBlock", bound=PoolBlock)


@dataclass(frozen=True)
class Growth:
    """Says how large the next slab is: a share of what is there, within limits, a whole number of the blocks asked for.

    The share bounds what is reserved and not used at the peak. The whole number leaves no rest at a slab's end that a
    workload of one size could not use; and a block larger than the step gets a slab of its own, exactly.
    """

    min_bytes: int
    max_bytes: int
    share: float

    def slab_bytes(self, block_bytes: int, reserved_bytes: int, room_bytes: int) -> int:
        step = min(max(int(reserved_bytes * self.share), self.min_bytes), self.max_bytes)
        wanted = max(step // block_bytes, 1) * block_bytes
        return min(-(-wanted // PAGE_BYTES) * PAGE_BYTES, room_bytes)


class TierStats(NamedTuple):
    """Bytes of a tier now and at most, and how often it had no block to give."""

    used_bytes: int
    peak_used_bytes: int
    reserved_bytes: int
    budget_bytes: int
    num_slabs: int
    num_growths: int
    num_over_budget: int  # refused, since a block or the slab for it would go past the budget
    num_no_memory: int  # refused, since the system had no more
    failure: str | None  # what the system said last


class BlockPool(Generic[AnyBlock]):
    """Gives and takes back blocks of slabs; what it guarantees stands at the head of the file.

    `new_slab(num_bytes)` may raise MemoryError or OSError: growing then stops until `trim`, or, with
    `retries_after_give`, until a block came back. `free_slab(slab)` is called when nothing uses the slab any more.
    """

    def __init__(
        self,
        block_class: Callable[..., AnyBlock],
        new_slab: Callable[[int], Any],
        free_slab: Callable[[Any], None],
        budget_bytes: int,
        growth: Growth,
        *,
        max_parts: int = 1,
        retries_after_give: bool = False,
    ) -> None:
        check_budget(budget_bytes)
        self.budget_bytes = budget_bytes
        self._block_class = block_class
        self._new_slab = new_slab
        self._free_slab = free_slab
        self._growth = growth
        self._retries_after_give = retries_after_give
        # Given back, or gone, and not yet free: the only field touched without the lock. One may be here twice.
        self._given: deque[_Out] = deque()
        self._note_gone = self._given.append  # what a block that is gone calls; one object for all
        self._outs: set[_Out] = set()  # what is not free; the truth about it, with the slabs
        self._is_changing = False  # what follows is being changed; with nobody inside: a call was cut off there
        self._lock = threading.Lock()
        self._ranges: RangeAllocator[Event] = RangeAllocator(
            ALIGNMENT, lambda event: not event.query(), max_parts=max_parts, min_part_bytes=MIN_PART_BYTES
        )
        self._slabs: dict[int, tuple[Any, int]] = {}  # by slab part, with their bytes
        self._reserved_bytes = 0  # of slabs, also of those that `trim` is about to free
        self._used_bytes = 0  # as asked for
        self._used_aligned_bytes = 0
        self._peak_used_bytes = 0
        self._num_growths = 0
        self._num_over_budget = 0
        self._num_no_memory = 0
        self._failure: str | None = None
        self._has_stopped_growing = False
        self._is_closed = False

    def take(self, num_bytes: int) -> AnyBlock | None:
        if num_bytes <= 0:
            raise ArgumentError("A block must have at least one byte.", got=describe(num_bytes))
        with self._lock:
            self._check_open()
            self._drain()
            self._is_changing = True
            block = self._take(num_bytes)
            self._is_changing = False
            return block

    def give(self, block: AnyBlock) -> None:
        try:
            del block._is_out
        except AttributeError:
            raise StateError("A block was given back twice.", got=repr(block)) from None
        self._given.append(block._out)

    def trim(self) -> int:
        """Join the last uses of slabs without a block in use and free those slabs; return the freed bytes."""
        leaving: dict[int, tuple[Any, int, tuple[Event, ...]]] = {}
        freed_bytes = 0
        try:
            with self._lock:
                self._drain()
                self._is_changing = True
                self._has_stopped_growing = False
                # Out of the allocator first: while this thread joins, no other may take a block there.
                for slab_part in self._ranges.free_slab_parts():
                    events = self._ranges.remove_slab_part(slab_part)
                    leaving[slab_part] = (*self._slabs[slab_part], events)
                    del self._slabs[slab_part]
                self._is_changing = False
            for slab_part, (slab, num_bytes, events) in list(leaving.items()):
                for event in events:
                    _join(event)
                del leaving[slab_part]
                freed_bytes += num_bytes
                self._free_slab(slab)
        finally:
            with self._lock:
                self._drain()
                self._reserved_bytes -= freed_bytes
                # A join failed: a copy may still run there, so it stays ours.
                for slab, num_bytes, events in leaving.values():
                    self._slabs[self._ranges.add_slab_part(num_bytes, events)] = slab, num_bytes
        return freed_bytes

    def close(self) -> None:
        """Free every slab, in use or not; what that means for a copy under way is the business of `free_slab`."""
        with self._lock:
            self._is_closed = True
            slabs = [slab for slab, _ in self._slabs.values()]
            self._slabs.clear()
            self._reserved_bytes = 0
        for slab in slabs:
            self._free_slab(slab)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._drain()
            return self._used_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._reserved_bytes

    def stats(self) -> TierStats:
        with self._lock:
            self._drain()
            return TierStats(
                used_bytes=self._used_bytes,
                peak_used_bytes=self._peak_used_bytes,
                reserved_bytes=self._reserved_bytes,
                budget_bytes=self.budget_bytes,
                num_slabs=len(self._slabs),
                num_growths=self._num_growths,
                num_over_budget=self._num_over_budget,
                num_no_memory=self._num_no_memory,
                failure=self._failure,
            )

    # -- inside; the lock is held -------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError(
                "The tier was closed.", expected="an open one", got="a request for a block", do="Configure it anew."
            )

    def _mend(self) -> None:
        """Begin again from what is certain, after a call that was cut off."""
        if not self._is_closed:
            slab_bytes = {slab_part: num_bytes for slab_part, (_, num_bytes) in self._slabs.items()}
            self._ranges.restore(slab_bytes, [out.pieces for out in self._outs])
        self._used_bytes = sum(out.num_bytes for out in self._outs)
        self._used_aligned_bytes = sum(self._ranges.aligned(out.num_bytes) for out in self._outs)

    def _take(self, num_bytes: int) -> AnyBlock | None:
        size = self._ranges.aligned(num_bytes)
        if self._used_aligned_bytes + size > self.budget_bytes:
            self._num_over_budget += 1
            return None
        found = self._ranges.take(num_bytes)
        if found is None and self._grow(size):
            found = self._ranges.take(num_bytes)
        if found is None:
            return None
        pieces, events = found
        self._used_bytes += num_bytes
        self._used_aligned_bytes += size
        self._peak_used_bytes = max(self._peak_used_bytes, self._used_bytes)
        block = self._block_class(self._parts(pieces, size - num_bytes), events, self, pieces)
        self._outs.add(block._out)
        return block

    def _parts(self, pieces: Pieces, padding_bytes: int) -> tuple[Part, ...]:
        parts = [Part(self._slabs[piece.slab_part][0], piece.offset, piece.num_bytes) for piece in pieces]
        parts[-1] = parts[-1]._replace(num_bytes=parts[-1].num_bytes - padding_bytes)
        return tuple(parts)

    def _drain(self) -> None:
        """Make what was given back free. `give` may go on meanwhile, also in this thread."""
        if self._is_changing:
            self._mend()
        self._is_changing = True
        while self._given:
            out = self._given[0]  # it leaves the queue last: if this is cut off, it comes again
            if out in self._outs:
                self._used_bytes -= out.num_bytes
                self._used_aligned_bytes -= self._ranges.aligned(out.num_bytes)
                if not self._is_closed:
                    self._ranges.give(out.pieces, out.last_uses)
                    if self._retries_after_give:
                        self._has_stopped_growing = False
                self._outs.remove(out)
            self._given.popleft()
        self._is_changing = False

    def _grow(self, size: int) -> bool:
        """Add a slab with room for `size` bytes; return False, counted, if there can be none."""
        room_bytes = self.budget_bytes - self._reserved_bytes
        if size > room_bytes:
            self._num_over_budget += 1
            return False
        wanted = self._growth.slab_bytes(size, self._reserved_bytes, room_bytes)
        # Where a whole step is too much, the block alone may still fit.
        for num_bytes in () if self._has_stopped_growing else sorted({wanted, size}, reverse=True):
            try:
                slab = self._new_slab(num_bytes)
            except (MemoryError, OSError) as error:
                self._failure = f"{type(error).__name__}: {error}"
                continue
            try:
                self._slabs[self._ranges.add_slab_part(num_bytes)] = slab, num_bytes
            except BaseException:
                self._free_slab(slab)  # nobody else knows it
                raise
            self._reserved_bytes += num_bytes
            self._num_growths += 1
            return True
        self._has_stopped_growing = True
        self._num_no_memory += 1
        return False


def check_budget(budget_bytes: int) -> None:
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int):
        raise ArgumentTypeError("A budget is a number of bytes.", expected="an int", got=describe(budget_bytes))
    if budget_bytes <= 0:
        raise ArgumentError("A tier without a byte is no tier.", expected="a budget above 0", got=str(budget_bytes))


def _join(event: Event) -> None:
    """Wait for the end of a copy. One that failed is over as well: only its end matters here."""
    try:
        event.join()
    except Exception:
        if event.error is None:
            raise
