"""Pinned host memory: blocks of exact sizes out of large slabs, under a hard budget.

A framework's own allocator of pinned memory rounds up to powers of two (1.5 to 2 times the memory); this one reserves
at most 1.05 times the bytes in use at the peak, for totals of 1 GiB and more (smaller ones may leave most of a first
slab of 32 MiB unused).

Pinning costs about 0.43 s per GiB, so memory is pinned in steps, mostly in the first training step, and never given
back on its own. The steps are small, since what the last one leaves unused counts against the 1.05: 1/32 of what is
there, between 32 MiB and 1 GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from hyper_parallel._base.errors import ArgumentError, describe
from hyper_parallel.core.swap.device import HostBlock
from hyper_parallel.core.swap.pool import BlockPool, Growth, PoolBlock, TierStats, check_budget

MIB = 1024**2
GROWTH = Growth(min_bytes=32 * MIB, max_bytes=1024 * MIB, share=1 / 32)


@final
class PinnedBlock(PoolBlock):
    """Pinned memory: `parts` of slabs, which are whatever `new_slab` returned; the platform makes the views.

    With `max_parts=1` there is one part, also as `slab` and `offset`.
    """

    __slots__ = ()


@final
class PinnedArena:
    """The tier of pinned host memory. It lives as long as its engine.

    `new_slab(num_bytes)`: pin that many bytes, or raise MemoryError or OSError; the arena then stops growing, and
    `take` answers None and counts it. `free_slab(slab)`: give them back; called by `trim` only, when no copy can touch
    them any more. `max_parts`: how many parts a block may have. 16 for a platform that copies part by part: then the
    bound on reserved bytes holds for sizes that change from step to step as well (at 1 they can take 1.7 times what
    they use). 1 for one that cannot.

    Example:
        >>> arena = PinnedArena(bytearray, lambda slab: None, budget_bytes=1 << 20, max_parts=1)
        >>> block = arena.take(1000)
        >>> block.num_bytes, arena.used_bytes
        (1000, 1000)
        >>> arena.give(block)
        >>> arena.used_bytes, arena.reserved_bytes
        (0, 1048576)
    """

    name = "host"

    def __init__(
        self,
        new_slab: Callable[[int], Any],
        free_slab: Callable[[Any], None],
        budget_bytes: int,
        *,
        max_parts: int,
        growth: Growth = GROWTH,
    ) -> None:
        self._pool: BlockPool[PinnedBlock] = BlockPool(
            PinnedBlock, new_slab, free_slab, budget_bytes, growth, max_parts=max_parts
        )

    def take(self, num_bytes: int) -> PinnedBlock | None:
        """Take a block; None, counted, past the budget or when no more memory can be pinned."""
        return self._pool.take(num_bytes)

    def give(self, block: HostBlock) -> None:
        """Take a block back: from any thread, at any moment, without blocking. It is free when `take` next looks."""
        if not isinstance(block, PinnedBlock) or block._pool is not self._pool:
            raise ArgumentError("This block is not from this arena.", got=describe(block))
        self._pool.give(block)

    def trim(self) -> int:
        """Give back slabs that hold no block, after joining the copies that used them last; return the bytes."""
        return self._pool.trim()

    @property
    def used_bytes(self) -> int:
        """Return the bytes that were asked for and not given back."""
        return self._pool.used_bytes

    @property
    def reserved_bytes(self) -> int:
        """Return the pinned bytes, in use or not."""
        return self._pool.reserved_bytes

    @property
    def budget_bytes(self) -> int:
        return self._pool.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, num_bytes: int) -> None:
        # Lower than what is pinned: nothing is unpinned, but no block is given that takes the use past it.
        check_budget(num_bytes)
        self._pool.budget_bytes = num_bytes

    def stats(self) -> TierStats:
        return self._pool.stats()
