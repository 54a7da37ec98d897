"""Which ranges of a few large slab parts are free: sizes and offsets only, no memory.

A *slab part* is what the owner adds in one call, known by its number and size; the pools add each slab whole.

Two kinds of free ranges:

- *loose* ranges lie in one sorted list, are joined with their free neighbours, and are cut by best fit.
- *kept* ranges are what was given back, uncut, by size. A request of exactly that size takes one of them, at the lowest
address.

A training step asks for the same sizes again and again, in an order that varies a little. From kept ranges every such
request is met without a cut, so whatever order it comes in, the second step needs no byte more than the first. Only
when a request fits nowhere are the kept ranges joined to the loose ones, and looked through again.

Steps whose sizes change (sequences of different lengths) leave free ranges that are all too small. With `max_parts`
above 1 a request is then met by several of them, the largest first; without that such steps can take three times the
memory they use.

Every free range carries *tags* (events of those who used it last); joining ranges joins their tags, and what is cut off
has all of them. Tags that are not live any more are dropped when a range is taken.

Assumes one caller at a time: whoever shares an allocator brings the lock. A call that is cut off (Ctrl-C) leaves the
lists half changed: the owner knows that, and calls `restore`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Mapping
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from hyper_parallel._base.errors import StateError

Tag = TypeVar("Tag")


class Piece(NamedTuple):
    """[offset, offset + num_bytes) of a slab part."""

    slab_part: int
    offset: int
    num_bytes: int


Pieces: TypeAlias = tuple[Piece, ...]  # what meets one request


class RangeAllocator(Generic[Tag]):
    """Says which pieces of the slab parts a request gets, and takes pieces back.

    Invariant: every byte of a slab part is in exactly one taken, kept or loose piece; no two loose ones touch.

    `max_parts`: pieces one request may be met by. `min_part_bytes`: the smallest of them but the last.
    """

    def __init__(
        self,
        alignment: int = 1,
        is_live: Callable[[Tag], bool] = lambda tag: True,
        *,
        max_parts: int = 1,
        min_part_bytes: int = 1,
    ) -> None:
        self.alignment = alignment
        self.max_parts = max_parts
        self.min_part_bytes = max(min_part_bytes, alignment)
        self._is_live = is_live
        self._slab_part_bytes: dict[int, int] = {}
        self._free_bytes: dict[int, int] = {}  # by slab part, loose and kept
        self._next_slab_part = 0
        self._taken: set[Pieces] = set()
        self._loose: list[tuple[int, int, int]] = []  # (bytes, slab_part, offset), sorted: best fit is one bisection
        self._loose_at: dict[tuple[int, int], tuple[int, tuple[Tag, ...]]] = {}  # (slab_part, offset) -> bytes, tags
        self._loose_ending: dict[tuple[int, int], int] = {}  # (slab_part, end) -> offset
        self._kept: dict[int, list[Pieces]] = {}  # bytes -> heap
        self._kept_tags: dict[Pieces, tuple[Tag, ...]] = {}
        # Tags that a call takes out of the lists above: noted before it does, so that `restore` finds every tag.
        self._moving: list[tuple[Tag, ...]] = []

    def aligned(self, num_bytes: int) -> int:
        """Return the bytes that a request of that size takes."""
        return -(-num_bytes // self.alignment) * self.alignment

    # -- slab parts ---------------------------------------------------------------------------------------------------

    def add_slab_part(self, num_bytes: int, tags: tuple[Tag, ...] = ()) -> int:
        """Add a slab part, all free, and return its number, which is never used again."""
        slab_part = self._next_slab_part
        self._next_slab_part += 1
        self._slab_part_bytes[slab_part] = self._free_bytes[slab_part] = num_bytes
        self._moving = [tags]
        self._insert(Piece(slab_part, 0, num_bytes), tags)
        return slab_part

    def remove_slab_part(self, slab_part: int) -> tuple[Tag, ...]:
        """Forget a slab part that is wholly free, and return the tags of all that was in it."""
        if not self.is_free(slab_part):
            raise StateError(
                "A region with pieces in use cannot be removed.",
                expected=f"{self._slab_part_bytes[slab_part]} free bytes",
                got=f"{self._free_bytes[slab_part]}",
                where=f"region {slab_part}",
            )
        self._loosen()
        tags = self._remove(slab_part, 0)[1]
        del self._slab_part_bytes[slab_part], self._free_bytes[slab_part]
        return tags

    def restore(self, slab_part_bytes: Mapping[int, int], taken: Collection[Pieces]) -> None:
        """Begin again from what is certain, after a call that was cut off: the slab parts, and what is taken of them.

        The rest is loose. Nobody knows any more which tags belong to which free range: each of them has all.
        May be cut off and called again as well.
        """
        lost = (*self._kept_tags.values(), *(tags for _, tags in self._loose_at.values()), *self._moving)
        tags = self._live(tuple({id(tag): tag for carried in lost for tag in carried}.values()))
        self._moving = [tags]  # first: from here on it is the only place that has them
        self._slab_part_bytes, self._free_bytes = dict(slab_part_bytes), dict(slab_part_bytes)
        self._taken = set(taken)
        self._loose, self._loose_at, self._loose_ending = [], {}, {}
        self._kept, self._kept_tags = {}, {}
        ends = [Piece(slab_part, num_bytes, 0) for slab_part, num_bytes in slab_part_bytes.items()]
        slab_part, end = -1, 0
        for piece in sorted([*ends, *(piece for pieces in taken for piece in pieces)]):
            begin = end if piece.slab_part == slab_part else 0
            if piece.offset > begin:
                self._insert(Piece(piece.slab_part, begin, piece.offset - begin), tags)
            slab_part, end = piece.slab_part, piece.offset + piece.num_bytes
            self._free_bytes[slab_part] -= piece.num_bytes

    def is_free(self, slab_part: int) -> bool:
        return self._free_bytes[slab_part] == self._slab_part_bytes[slab_part]

    def slab_part_bytes(self, slab_part: int) -> int:
        return self._slab_part_bytes[slab_part]

    def free_slab_parts(self) -> list[int]:
        return [slab_part for slab_part in self._slab_part_bytes if self.is_free(slab_part)]

    @property
    def free_bytes(self) -> int:
        return sum(self._free_bytes.values())

    # -- requests -----------------------------------------------------------------------------------------------------

    def take(self, num_bytes: int) -> tuple[Pieces, tuple[Tag, ...]] | None:
        """Take pieces of `aligned(num_bytes)` together, with the live tags of what lay there; None if none fit."""
        size = self.aligned(num_bytes)
        found = self._take_kept(size) or self._take_loose(size, max_parts=1)
        if found is None:
            self._loosen()
            found = self._take_loose(size, self.max_parts)
        if found is not None:
            self._taken.add(found[0])
            for piece in found[0]:
                self._free_bytes[piece.slab_part] -= piece.num_bytes
        return found

    def give(self, pieces: Pieces, tags: tuple[Tag, ...] = ()) -> None:
        """Take back what `take` returned."""
        if pieces not in self._taken:
            raise StateError(
                "A range was given back that is not in use.", expected="what `take` returned", got=str(pieces)
            )
        self._taken.remove(pieces)
        for piece in pieces:
            self._free_bytes[piece.slab_part] += piece.num_bytes
        heapq.heappush(self._kept.setdefault(sum(piece.num_bytes for piece in pieces), []), pieces)
        self._kept_tags[pieces] = tags

    def _take_kept(self, size: int) -> tuple[Pieces, tuple[Tag, ...]] | None:
        heap = self._kept.get(size)
        if not heap:
            return None
        tags = self._live(self._kept_tags[heap[0]])  # asks foreign code, which may raise: before anything changes
        self._moving = [tags]
        pieces = heapq.heappop(heap)
        del self._kept_tags[pieces]
        return pieces, tags

    def _take_loose(self, size: int, max_parts: int) -> tuple[Pieces, tuple[Tag, ...]] | None:
        pieces = self._find_loose(size, max_parts)
        if not pieces:
            return None
        # Each list of tags is asked for once, and all of them before anything changes, as above.
        live = {piece: self._live(self._loose_at[piece.slab_part, piece.offset][1]) for piece in pieces}
        self._moving = [*live.values()]
        tags: tuple[Tag, ...] = ()
        for piece in pieces:
            found_bytes, _ = self._remove(piece.slab_part, piece.offset)
            if found_bytes > piece.num_bytes:
                rest = Piece(piece.slab_part, piece.offset + piece.num_bytes, found_bytes - piece.num_bytes)
                self._insert(rest, live[piece])
            tags = _joined(tags, live[piece])
        return pieces, tags

    def _find_loose(self, size: int, max_parts: int) -> Pieces:
        """Choose the head of the smallest range that is large enough; else the largest one, and so on for the rest."""
        pieces: list[Piece] = []
        num_left = len(self._loose)  # ranges that are not used up, the smallest
        while size > 0:
            index = bisect_left(self._loose, (size, -1, -1), hi=num_left)
            if index < num_left:
                _, slab_part, offset = self._loose[index]
                pieces.append(Piece(slab_part, offset, size))
                break
            if len(pieces) + 1 >= max_parts or num_left == 0 or self._loose[num_left - 1][0] < self.min_part_bytes:
                return ()
            num_left -= 1
            num_bytes, slab_part, offset = self._loose[num_left]
            part_bytes = num_bytes // self.alignment * self.alignment  # the end of a slab part may be odd
            pieces.append(Piece(slab_part, offset, part_bytes))
            size -= part_bytes
        return tuple(pieces)

    # -- loose ranges -------------------------------------------------------------------------------------------------

    def _loosen(self) -> None:
        """Join all kept ranges to the loose ones."""
        # Only live tags are joined, or a slab part of thousands of blocks would carry thousands.
        # `_live` is asked before anything changes.
        live = {pieces: self._live(tags) for pieces, tags in self._kept_tags.items()}
        self._moving = [*live.values(), *(tags for _, tags in self._loose_at.values())]
        self._kept.clear()
        self._kept_tags.clear()
        for pieces, tags in live.items():
            for piece in pieces:
                self._insert(piece, tags)

    def _live(self, tags: tuple[Tag, ...]) -> tuple[Tag, ...]:
        return tuple(tag for tag in tags if self._is_live(tag))

    def _insert(self, piece: Piece, tags: tuple[Tag, ...]) -> None:
        """Add a loose range, joined with its loose neighbours."""
        slab_part, offset, num_bytes = piece
        end = offset + num_bytes
        before = self._loose_ending.get((slab_part, offset))
        if before is not None:
            offset = before
            tags = _joined(self._remove(slab_part, before)[1], tags)
        if (slab_part, end) in self._loose_at:
            more_bytes, more_tags = self._remove(slab_part, end)
            end += more_bytes
            tags = _joined(tags, more_tags)
        insort(self._loose, (end - offset, slab_part, offset))
        self._loose_at[slab_part, offset] = (end - offset, tags)
        self._loose_ending[slab_part, end] = offset

    def _remove(self, slab_part: int, offset: int) -> tuple[int, tuple[Tag, ...]]:
        num_bytes, tags = self._loose_at.pop((slab_part, offset))
        del self._loose_ending[slab_part, offset + num_bytes]
        del self._loose[bisect_left(self._loose, (num_bytes, slab_part, offset))]
        return num_bytes, tags


def _joined(first: tuple[Tag, ...], second: tuple[Tag, ...]) -> tuple[Tag, ...]:
    """Join two lists of tags without repeats: many blocks of one group carry the same event.

    Tags are told apart by identity, since events need not be comparable.
    """
    if not first or not second:
        return first or second
    return tuple({id(tag): tag for tag in (*first, *second)}.values())
