"""What the ranks of one machine call, in memory that they share: for a backend whose messages do not say which call they belong to.

A rank writes each call here before it begins, and looks at the others' when it is done: who has sent it anything has written before. Only what
is there is judged, so a rank that is slower or far ahead is no error, and no rank waits for another.

Layout: for each rank `_NUM_SLOTS` slots of `_SLOT_BYTES`; the call `number` of a group is in slot `number % _NUM_SLOTS`, moved on by the group.
The key is written last: a slot that is being written does not have the key that is looked for.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any

_SLOT_BYTES = 128
_NUM_SLOTS = 64
_KEY = struct.Struct("<QQH")  # group, number, bytes of the text
_JOIN_S = 30.0
_SETTLED_S = 0.002
_MOST_TEXT = _SLOT_BYTES - _KEY.size


class Board:
    """`memory` is shared by `num_ranks` ranks, of which this is `rank`."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self._memory = memory
        self._rank = rank

    @classmethod
    def join(cls, store: Any, rank: int, num_ranks: int) -> Board | None:
        """The board of this world, all of whose ranks call this; None where they are not all on one machine, or cannot share memory."""
        key, num_bytes = "hyper_parallel/board", num_ranks * _NUM_SLOTS * _SLOT_BYTES
        if rank == 0:
            descriptor = _make(num_bytes)
            store.set(key, f"{_machine()} /proc/{os.getpid()}/fd/{descriptor}")
        else:
            descriptor = _open(store.get(key))
        if descriptor < 0:
            store.add(f"{key}/not", 1)
            return None
        memory = mmap.mmap(descriptor, num_bytes)
        store.add(f"{key}/joined", 1)
        are_all_here = _wait_for_all(store, key, num_ranks)
        os.close(descriptor)  # not before: the others open it through this process
        if not are_all_here:
            memory.close()
            return None
        return cls(memory, rank)

    def write(self, group: str, number: int, text: str) -> None:
        """This rank begins its number-th call in a group."""
        key = zlib.crc32(group.encode())
        start = _place(self._rank, key, number)
        data = text.encode()[:_MOST_TEXT]
        _KEY.pack_into(self._memory, start, 0, 0, 0)
        self._memory[start + _KEY.size : start + _KEY.size + len(data)] = data
        _KEY.pack_into(self._memory, start, key, number, len(data))

    def find_other(self, group: str, number: int, text: str, ranks: Sequence[int]) -> tuple[int, str] | None:
        """A rank that has begun another call under this number, and that call."""
        key, mine = zlib.crc32(group.encode()), text.encode()[:_MOST_TEXT]
        for rank in ranks:
            start = _place(rank, key, number)
            seen: tuple[Any, bytes] | None = None
            while True:
                header = _KEY.unpack_from(self._memory, start)
                if header[:2] != (key, number):
                    break
                theirs = bytes(self._memory[start + _KEY.size : start + _KEY.size + header[2]])
                if theirs == mine:
                    break
                if seen == (header, theirs):
                    return rank, theirs.decode(errors="replace")
                # It may be written at this moment, by a rank that is far ahead: only what is the same a little later counts.
                seen = header, theirs
                time.sleep(_SETTLED_S)
        return None


def _place(rank: int, group: int, number: int) -> int:
    return (rank * _NUM_SLOTS + (group + number) % _NUM_SLOTS) * _SLOT_BYTES


def _wait_for_all(store: Any, key: str, num_ranks: int) -> bool:
    """Whether every rank has joined; all of them answer soon, since all of them start."""
    deadline = time.monotonic() + _JOIN_S
    while time.monotonic() < deadline and int(store.add(f"{key}/not", 0)) == 0:
        if int(store.add(f"{key}/joined", 0)) == num_ranks:
            return True
        time.sleep(0.01)
    return False


def _make(num_bytes: int) -> int:
    """A file without a name, which ends with its last user; -1 where the system has no such thing."""
    if not hasattr(os, "memfd_create"):
        return -1
    descriptor = os.memfd_create("hyper_parallel board")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def _open(published: str | bytes) -> int:
    """The descriptor of the shared file; -1 where it cannot be opened here."""
    text = published.decode() if isinstance(published, bytes) else published
    machine, _, path = text.partition(" ")
    if machine != _machine() or machine == "unknown":
        return -1
    try:
        return os.open(path, os.O_RDWR)
    except OSError:
        return -1
