"""Slower memory of the simulated device: blocks with addresses, reused as soon as they are given back.

A block given back is the first to be taken again at its size, while copies may still be reading or writing it: whoever forgets
`last_uses` (O3, O9) is found by the race check.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from support.simulated_device import SimulatedDevice
from support.simulated_memory import Range


class SimulatedBlock:
    """New for each `take`, so that a use after `give` is seen; only addresses and `last_uses` pass to the next owner."""

    __slots__ = ("is_live", "last_uses", "num_bytes", "range")

    def __init__(self, num_bytes: int, range_: Range, last_uses: tuple[Any, ...]) -> None:
        self.num_bytes = num_bytes
        self.range = range_
        self.last_uses = last_uses
        self.is_live = True

    def __repr__(self) -> str:
        return f"<{self.range}>"


class SimulatedTier:
    """Implements `Tier`. `budget_bytes` bounds the reserved bytes; `exact=False` rounds blocks up to powers of two, as pinned memory is."""

    def __init__(
        self, device: SimulatedDevice, name: str = "host", budget_bytes: int = 1 << 40, *, exact: bool = True
    ) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.num_taken = 0
        self._device = device
        self._exact = exact
        self._used_bytes = 0
        self._reserved_bytes = 0
        self._live: dict[int, Range] = {}
        self._free: dict[
            int, list[tuple[int, tuple[Any, ...]]]
        ] = {}  # reserved size -> (start, last uses), the last given last
        self._given: deque[SimulatedBlock] = deque()
        self._takes_until_failure = 0
        device.tiers.append(self)
        self._next_address = len(device.tiers) << 50  # each tier has addresses of its own

    def take(self, num_bytes: int) -> SimulatedBlock | None:
        with self._device._lock:
            if self._device._enter_or_fail("take") or self._is_made_to_fail():
                return None
            self._take_back()
            size = self._size(num_bytes)
            free = self._free.get(size)
            if free:
                start, last_uses = free.pop()
            elif self._make_room(size):
                start, last_uses = self._next_address, ()
                self._next_address += size
                self._reserved_bytes += size
            else:
                return None
            self.num_taken += 1
            self._used_bytes += num_bytes
            # The range is what a copy touches; the rest of a rounded block belongs to it and is never touched.
            range_ = Range(start, start + max(num_bytes, 1), f"block {self.num_taken}", self.name)
            self._live[start] = range_
            return SimulatedBlock(num_bytes, range_, last_uses)

    def give(self, block: Any) -> None:
        if not block.is_live:
            raise ValueError(f"A block was given back twice: {block.range}.")
        block.is_live = False
        self._given.append(block)  # no lock: this may run inside any other call, in a finalizer

    @property
    def used_bytes(self) -> int:
        with self._device._lock:
            self._take_back()
            return self._used_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._reserved_bytes

    def fail_take(self, n: int) -> None:
        """Make the n-th `take` from now on (1: the next) return None."""
        self._takes_until_failure = n

    def live_blocks(self) -> list[str]:
        with self._device._lock:
            self._take_back()
            return [str(range_) for range_ in self._live.values()]

    def _size(self, num_bytes: int) -> int:
        size = max(num_bytes, 1)
        return size if self._exact else 1 << (size - 1).bit_length()

    def _is_made_to_fail(self) -> bool:
        self._takes_until_failure -= 1
        return self._takes_until_failure == 0

    def _make_room(self, size: int) -> bool:
        """Return free blocks of other sizes to the system, as far as needed; their addresses are not seen again."""
        for other, free in self._free.items():
            while free and self._reserved_bytes + size > self.budget_bytes:
                free.pop(0)
                self._reserved_bytes -= other
        return self._reserved_bytes + size <= self.budget_bytes

    def _take_back(self) -> None:
        while self._given:
            block = self._given.popleft()
            self._used_bytes -= block.num_bytes
            del self._live[block.range.start]
            self._free.setdefault(self._size(block.num_bytes), []).append((block.range.start, block.last_uses))
