"""What the ranks of one machine call, in memory that they share.

For a backend that confuses calls, or ends the process over them. A rank writes each call here before it begins. Where
nothing may be sent that does not fit (gloo), it looks at the others' before it begins: of two ranks, the later one
finds the other's call, and does not start its own. Where the first of two would wait in vain (MindSpore's CPU), it
looks when it is done: who has sent it anything has written before. Only what is there is judged, so a rank that is
slower, far ahead or on another machine is no error, and no rank waits for another.

Layout: for each rank `_NUM_SLOTS` slots of `_SLOT_BYTES`. The call `number` of a group is in slot
`number % _NUM_SLOTS`, moved on by the group. The key is written last: a slot that is being written does not have the
key that is looked for.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

try:
    import fcntl
except ImportError:  # no such system has memory to share this way
    fcntl = None  # type: ignore[assignment]

_SLOT_BYTES = 128
_NUM_SLOTS = 64
_KEY = struct.Struct("<QQH")  # group, number, bytes of the text
_SETTLED_S = 0.002
_MOST_TEXT = _SLOT_BYTES - _KEY.size


class Board:
    """Memory that `num_ranks` ranks share, as this one, `rank`, sees it.

    It lives as long as the world. Its maker's descriptor keeps it open for ranks that come later.
    """

    def __init__(self, memory: mmap.mmap, rank: int, descriptor: int = -1) -> None:
        self._memory = memory
        self._rank = rank
        self._descriptor = descriptor  # of the rank that made it: the others open it through that process
        self._fence = threading.Lock()

    @classmethod
    def join(cls, store: Any, rank: int, num_ranks: int, is_maker: bool | None = None) -> Board | None:
        """Return the board of this world; None for a rank that is not on the maker's machine, or cannot share memory.

        One rank makes it (the first, unless it is told), and the others wait until it has.
        """
        num_bytes = num_ranks * _NUM_SLOTS * _SLOT_BYTES
        if not (rank == 0 if is_maker is None else is_maker):
            descriptor = _open(store.get(_KEY_OF_PATH), num_bytes)
            if descriptor < 0:
                return None
            memory = mmap.mmap(descriptor, num_bytes)
            os.close(descriptor)
            return cls(memory, rank)
        descriptor = _make(num_bytes)
        store.set(_KEY_OF_PATH, f"{_machine()} /proc/{os.getpid()}/fd/{descriptor}")
        return None if descriptor < 0 else cls(mmap.mmap(descriptor, num_bytes), rank, descriptor)

    def close(self) -> None:
        self._memory.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def write(self, group: str, number: int, text: str) -> None:
        """Note that this rank begins its number-th call in a group."""
        key = zlib.crc32(group.encode())
        start = _place(self._rank, key, number)
        data = text.encode()[:_MOST_TEXT]
        _KEY.pack_into(self._memory, start, 0, 0, 0)
        self._memory[start + _KEY.size : start + _KEY.size + len(data)] = data
        _KEY.pack_into(self._memory, start, key, number, len(data))
        with self._fence:  # hazard: without it a processor may read the others' slots before this one can be seen
            pass

    def find_other(self, group: str, number: int, text: str, ranks: Sequence[int]) -> tuple[int, str] | None:
        """Find a rank that has begun another call under this number, and that call."""
        key, mine = zlib.crc32(group.encode()), text.encode()[:_MOST_TEXT]
        agreed = _KEY.pack(key, number, len(mine)) + mine
        for rank in ranks:
            start = _place(rank, key, number)
            if rank == self._rank or self._memory[start : start + len(agreed)] == agreed:
                continue
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
                # A rank that is far ahead may be writing it at this moment: only what is the same a little later
                # counts.
                seen = header, theirs
                time.sleep(_SETTLED_S)
        return None


def _place(rank: int, group: int, number: int) -> int:
    return (rank * _NUM_SLOTS + (group + number) % _NUM_SLOTS) * _SLOT_BYTES


def _make(num_bytes: int) -> int:
    """Make a file without a name, which ends with its last user, and whose size is fixed; -1 where there is no such
    thing.
    """
    if not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
        return -1
    descriptor = os.memfd_create("hyper_parallel board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def _open(published: str | bytes, num_bytes: int) -> int:
    """Return the descriptor of the shared file; -1 where it cannot be opened here.

    Who can write to the store must not be able to name a file of this user's, and have it written: only another
    process's descriptor of memory with this size is taken, which its maker has sealed. A file on a disk cannot be
    sealed.
    """
    text = published.decode(errors="replace") if isinstance(published, bytes) else published
    machine, _, path = text.partition(" ")
    if machine != _machine() or machine == "unknown" or not _DESCRIPTOR.fullmatch(path):
        return -1
    try:
        if not _is_memory(os.stat(path), num_bytes):  # before it is opened, which a device would notice
            return -1
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        if _is_memory(os.fstat(descriptor), num_bytes):
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if seals & fcntl.F_SEAL_SHRINK and seals & fcntl.F_SEAL_GROW:
                return descriptor
    except (OSError, AttributeError):  # no sealed memory, or a system without
        pass
    os.close(descriptor)
    return -1


def _is_memory(status: os.stat_result, num_bytes: int) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_size == num_bytes


_KEY_OF_PATH = "hyper_parallel/board"
_DESCRIPTOR = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
