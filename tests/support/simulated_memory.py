"""Addresses of the simulated device: what lies where, and who may touch it when.

Two things are known of an address, at two different times. *Contents* change when an operation runs. The *history* of accesses is
written when an operation is enqueued: everything that can order two operations (stream order, events, what the host has seen done)
is known by then, so whether two accesses race does not depend on how fast the streams happen to run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class RaceError(AssertionError):
    """Two accesses of the same address, one of them a write, that no event orders."""

    def __init__(self, message: str, earlier: Operation, later: Operation | None) -> None:
        super().__init__(message)
        self.earlier = earlier  # enqueued first
        self.later = later  # None: the host itself


class Garbage:
    """What a reader finds where nobody has written what it expects. Whatever is computed from it is garbage, too."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


UNINITIALIZED = Garbage("uninitialized")  # never written
POISON = Garbage("poison")  # written when the memory was handed to its next owner
TORN = Garbage("torn")  # parts of several values


class FailedCopy(Garbage):
    """Left where a copy failed. A copy of it fails, too: the reader of a file knows that the file was not written."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("failed copy")
        self.error = error


class Range(NamedTuple):
    """Addresses [start, end) and who owned them when the access was enqueued. Holds no memory alive."""

    start: int
    end: int
    owner: str
    space: str  # "device", or the name of a tier

    def __str__(self) -> str:
        return f"{self.owner} at {self.space} [{self.start:#x}, {self.end:#x})"


class Operation:
    """One kernel or copy. Keeps ranges, never buffers: work in flight does not keep memory alive on a real device either."""

    __slots__ = ("duration_ms", "error", "fn", "name", "reads", "stream", "stream_index", "tick", "writes")

    def __init__(
        self,
        name: str,
        stream: str,
        stream_index: int,
        tick: int,
        reads: Sequence[Range],
        writes: Sequence[Range],
        fn: Callable[..., Any] | None,
    ) -> None:
        self.name = name
        self.stream = stream
        self.stream_index = stream_index
        self.tick = tick  # its number among the operations of its stream
        self.reads = reads
        self.writes = writes
        self.fn = fn
        self.duration_ms = 0.0
        self.error: BaseException | None = None  # why a copy failed, once it has run

    def __repr__(self) -> str:
        return f"'{self.name}' (operation {self.tick} of {self.stream})"


class Access(NamedTuple):
    operation: Operation
    range: Range
    is_write: bool

    def __str__(self) -> str:
        return f"{self.operation!r} {'writes' if self.is_write else 'reads'} {self.range}"


class _Piece:
    __slots__ = ("end", "start", "value")

    def __init__(self, start: int, end: int, value: Any) -> None:
        self.start = start
        self.end = end
        self.value = value


class RangeMap:
    """A value per address, stored per piece. Memory is mostly reused in equal sizes, so the exact hit is the fast path."""

    def __init__(self, default: Callable[[], Any], part: Callable[[Any], Any]) -> None:
        self._default = default
        self._part = part  # what each half of a piece holds when it is cut in two
        self._starts: list[int] = []
        self._at: dict[int, _Piece] = {}  # sorted(_at) == _starts; pieces do not overlap

    def pieces(self, start: int, end: int) -> list[_Piece]:
        """The pieces that tile [start, end); those across its ends are cut, holes are filled with the default."""
        piece = self._at.get(start)
        if piece is not None and piece.end == end:
            return [piece]
        self._cut(start)
        self._cut(end)
        tiles, position = [], start
        for at in [*self._starts[bisect_left(self._starts, start) : bisect_left(self._starts, end)], end]:
            if position < at:
                tiles.append(self._insert(position, at, self._default()))
            if at < end:
                tiles.append(self._at[at])
                position = self._at[at].end
        return tiles

    def put(self, start: int, end: int, value: Any) -> None:
        """One piece from start to end, whatever was there."""
        piece = self._at.get(start)
        if piece is not None and piece.end == end:
            piece.value = value
            return
        first, *rest = self.pieces(start, end)
        for piece in rest:
            del self._at[piece.start]
        if rest:
            low = bisect_left(self._starts, rest[0].start)
            del self._starts[low : low + len(rest)]
        first.end = end
        first.value = value

    def _insert(self, start: int, end: int, value: Any) -> _Piece:
        piece = self._at[start] = _Piece(start, end, value)
        insort(self._starts, start)
        return piece

    def _cut(self, address: int) -> None:
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return
        piece = self._at[self._starts[index]]
        if piece.start < address < piece.end:
            self._insert(address, piece.end, self._part(piece.value))
            piece.end = address
            piece.value = self._part(piece.value)


class Contents:
    """The value of each range, as the operations that have run left it."""

    def __init__(self) -> None:
        self._map = RangeMap(
            default=lambda: UNINITIALIZED, part=lambda value: value if isinstance(value, Garbage) else TORN
        )

    def read(self, range_: Range) -> Any:
        pieces = self._map.pieces(range_.start, range_.end)
        value = pieces[0].value
        if len(pieces) == 1 or (isinstance(value, Garbage) and all(piece.value is value for piece in pieces)):
            return value
        return TORN

    def write(self, range_: Range, value: Any) -> None:
        self._map.put(range_.start, range_.end, value)


class _Past:
    """The accesses of a piece that a new one must come after."""

    __slots__ = ("reads", "write")

    def __init__(self, write: Access | None, reads: dict[int, Access]) -> None:
        self.write = write  # the last one: whatever comes after it comes after those before it
        self.reads = reads  # since that write, the last of each stream


class History:
    """Finds accesses that are not ordered by happens-before.

    A clock says, per stream, up to which operation everything has surely happened. Streams have components; host threads only
    learn, as the host touches no simulated memory that it could race on except by `read`, which is over when it returns.
    """

    def __init__(self) -> None:
        self._map = RangeMap(default=lambda: _Past(None, {}), part=lambda past: _Past(past.write, dict(past.reads)))

    def find_conflict(self, range_: Range, is_write: bool, clock: Sequence[int]) -> Access | None:
        """An earlier access that one with this clock does not come after."""
        for piece in self._map.pieces(range_.start, range_.end):
            past = piece.value
            last = past.write
            if last is not None and clock[last.operation.stream_index] < last.operation.tick:
                return last
            if is_write:
                for index, access in past.reads.items():
                    if clock[index] < access.operation.tick:
                        return access
        return None

    def note(self, access: Access) -> None:
        range_ = access.range
        if access.is_write:
            self._map.put(range_.start, range_.end, _Past(access, {}))
        else:
            for piece in self._map.pieces(range_.start, range_.end):
                piece.value.reads[access.operation.stream_index] = access
