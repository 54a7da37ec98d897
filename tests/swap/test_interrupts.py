"""Ctrl-C in the memory of the tiers and in the threads of the disk: no byte is lost or given twice, no order, and nobody waits for ever."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.core.swap.arena import PinnedArena, PinnedBlock
from hyper_parallel.core.swap.disk import DiskTier
from hyper_parallel.core.swap.disk_stream import DiskStream
from hyper_parallel.core.swap.pool import Growth
from support.ctrl_c import CtrlC

MIB = 1024**2
GRAIN_BYTES = 16 * 1024


class Event:
    """A copy that is never done, unless `all_done`."""

    all_done = False
    error = None

    def query(self) -> bool:
        return Event.all_done

    def join(self) -> None:
        assert Event.all_done


class Ledger:
    """An arena, and what is known of it from outside: which copies used each part of its memory last."""

    def __init__(self, max_parts: int) -> None:
        growth = Growth(min_bytes=4 * MIB, max_bytes=4 * MIB, share=1 / 32)
        self.arena = PinnedArena(
            lambda num_bytes: [num_bytes], lambda slab: None, 12 * MIB, max_parts=max_parts, growth=growth
        )
        self.held: list[PinnedBlock] = []
        self.users: dict[tuple[int, int], Event] = {}

    def take(self, num_bytes: int) -> None:
        block = self.arena.take(num_bytes)
        if block is not None:
            self.held.append(block)

    def give(self, number: int) -> None:
        self.arena.give(self.held.pop(number % len(self.held)))

    def use(self, num_old: int) -> None:
        """Check the blocks that are new, and let a copy use each."""
        places = [place for block in self.held for place in _places(block)]
        assert len(places) == len(set(places)), "two blocks have the same memory"
        for block in self.held[num_old:]:
            known = set(map(id, block.last_uses))
            for place in _places(block):
                assert place not in self.users or id(self.users[place]) in known, "a copy under way is forgotten"
            event = Event()
            block.last_uses = (event,)
            self.users |= dict.fromkeys(_places(block), event)


def _places(block: PinnedBlock) -> Iterator[tuple[int, int]]:
    """The grains that lie wholly in a block."""
    for slab, offset, num_bytes in block.parts:
        for grain in range(-(-offset // GRAIN_BYTES), (offset + num_bytes) // GRAIN_BYTES):
            yield id(slab), grain


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("max_parts", [1, 4])
def test_ctrl_c_at_any_place_of_an_arena_loses_no_memory_and_no_copy(
    max_parts: int, is_joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept, what is loose, what is met by parts, and what needs a new slab; at each place once."""
    num_interrupts = 0
    for at in itertools.count(1):
        monkeypatch.setattr(Event, "all_done", False)
        rng = random.Random(7)
        ledger = Ledger(max_parts)
        for _ in range(8):
            ledger.take(rng.choice((1, 2, 3)) * MIB // 2 - 100)
        ledger.use(0)
        for _ in range(3):
            ledger.give(rng.randrange(8))
        if is_joined:
            assert ledger.arena.take(6 * MIB) is None  # too much: so what is free is joined
        given_bytes = ledger.held[0].num_bytes
        ledger.give(0)
        num_old = len(ledger.held)
        with CtrlC(at) as interrupt:
            try:
                ledger.take(given_bytes)
                ledger.take(MIB // 2)
                ledger.take(MIB - 100)
                ledger.take(MIB * 3 // 4)
                ledger.take(MIB * 2)
                ledger.take(MIB * 3)
            except KeyboardInterrupt:
                num_interrupts += 1
        if not interrupt.is_over:
            break
        ledger.use(num_old)
        assert ledger.arena.used_bytes == sum(block.num_bytes for block in ledger.held), interrupt.where
        num_old = len(ledger.held) - 1
        ledger.give(0)
        for _ in range(4):
            ledger.take(MIB // 2)
        ledger.use(num_old)
        while ledger.held:
            ledger.give(0)
        assert ledger.arena.used_bytes == 0, interrupt.where
        monkeypatch.setattr(Event, "all_done", True)
        assert ledger.arena.reserved_bytes == ledger.arena.trim(), interrupt.where
        assert ledger.arena.stats().num_slabs == ledger.arena.reserved_bytes == 0, interrupt.where
    print(f"{num_interrupts} interrupts")
    assert num_interrupts > 100


def test_ctrl_c_at_any_place_of_a_launch_leaves_a_stream_that_does_its_jobs_in_order(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    kept: Any = tier.take(1000)
    for at in itertools.count(1):
        stream = DiskStream("interrupted", idle_s=0.01)
        done: list[int] = []
        with CtrlC(at) as interrupt:
            try:
                stream.launch_write(kept, lambda: memoryview(bytes(1000))).join(10)
                stream.launch_call("1", lambda done=done: done.append(1)).join(10)
            except KeyboardInterrupt:
                pass
        events = [
            stream.launch_call(str(number), lambda number=number, done=done: done.append(number))
            for number in range(2, 50)
        ]
        target = bytearray(1000)
        if kept.is_written:
            stream.launch_read(kept, lambda target=target: memoryview(target)).join(10)
        events[-1].join(10)
        assert done in ([*range(1, 50)], [*range(2, 50)]), interrupt.where
        stream.close(10)
        if not interrupt.is_over:
            break
    assert at > 30
    tier.give(kept)
    tier.close()
    deadline = threading.Event()
    for _ in range(200):
        if not any(thread.name == "hyper-parallel-interrupted" for thread in threading.enumerate()):
            return
        deadline.wait(0.05)
    raise AssertionError("a thread of a stream stays")
