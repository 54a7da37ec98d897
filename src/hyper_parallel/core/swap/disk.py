"""The disk tier: blocks are ranges of files that have no name.

Files are made without a name (`O_TMPFILE`), or unlinked at once where the file system cannot do that, so that nothing
is left behind, whatever kills the process. Their space is reserved when they are made: a full disk is found by `take`,
which answers None, and hardly ever by a write. (Where a file system gives no such promise, the write's event carries
the error; see `disk_stream.py`.)

Guarantee: a descriptor is closed once, and never while a job uses it: its number may be another file's a moment later.

A forked child shares the parent's files, and would write over what the parent keeps there: in the child the tier starts
anew, and a block of the parent can be given back and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

from hyper_parallel._base.errors import ArgumentError, StateError, describe
from hyper_parallel.core.swap.device import HostBlock
from hyper_parallel.core.swap.pool import BlockPool, Growth, PoolBlock, TierStats, check_budget

MIB = 1024**2
# Each file costs a descriptor, of which a process often has 1024: they grow with what is there.
GROWTH = Growth(min_bytes=256 * MIB, max_bytes=2**63, share=1 / 8)
MAX_PARTS = 16
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)


@final
class DiskFile:
    """One unnamed file of a directory, its space reserved."""

    def __init__(self, directory: str, num_bytes: int) -> None:
        self.directory = directory
        self.num_bytes = num_bytes
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._num_users = 0  # jobs that read or write it now
        self._is_closed = False
        self._fds: list[int] = []  # the descriptor, for `__del__` from the moment in which it is open
        open_unnamed(directory, self._fds)
        self._fd = self._fds[0]
        try:
            _reserve(self._fd, num_bytes)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def in_use(self) -> Iterator[int]:
        """Give the descriptor, which stays open until the block is left."""
        if os.getpid() != self.pid:
            raise StateError(
                "A block on disk was used in a forked process.",
                expected=f"process {self.pid}",
                got=f"process {os.getpid()}",
                where=self.directory,
                do="Run forward and backward in one process.",
            )
        self._enter()
        try:
            yield self._fd
        finally:
            self._leave()

    def close(self) -> None:
        """Let no job begin; close the descriptor now, or let the last job under way do it."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._num_users == 0:
                os.close(self._fd)

    def _enter(self) -> None:
        with self._lock:
            if self._is_closed:
                raise StateError("The disk tier was closed while a block of it was in use.", where=self.directory)
            self._num_users += 1

    def _leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_last = self._is_closed and self._num_users == 0
        if is_last:
            os.close(self._fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # given: names are gone when Python ends
        # Nobody can hold the lock any more, and a job under way holds the file: so this never blocks and never cuts one
        # off.
        if not getattr(self, "_is_closed", True):
            self._is_closed = True
            for fd in getattr(self, "_fds", ()):
                close(fd)


@final
class DiskBlock(PoolBlock):
    """A block on disk: its `parts` are of `DiskFile`s.

    Invariant: is_written only if the whole block holds what the last write was given. A read checks it: what lies in a
    block whose write failed is the bytes of somebody else.
    """

    __slots__ = ("is_written",)

    def __init__(self, *parts_and_place: Any) -> None:
        super().__init__(*parts_and_place)
        self.is_written = False


@final
class DiskTier:
    """The tier of files: a directory and a budget.

    Example:
        >>> tier = DiskTier(tempfile.gettempdir(), budget_bytes=1 << 20)
        >>> block = tier.take(1000)
        >>> tier.used_bytes
        1000
        >>> tier.give(block)
        >>> tier.close()
    """

    name = "disk"

    def __init__(self, directory: str | os.PathLike[str], budget_bytes: int, *, growth: Growth = GROWTH) -> None:
        check_budget(budget_bytes)
        check_directory(directory)
        self.directory = os.path.abspath(os.fspath(directory))  # the working directory may change
        self._growth = growth
        self._pid = os.getpid()
        self._is_closed = False
        self._pool = self._new_pool(budget_bytes)

    def take(self, num_bytes: int) -> DiskBlock | None:
        """Take a block; None, counted, past the budget or when the disk is full."""
        return self._own_pool().take(num_bytes)

    def give(self, block: HostBlock) -> None:
        """Take a block back: from any thread, at any moment, without blocking. It is free when `take` next looks."""
        if isinstance(block, DiskBlock) and block._pool is self._pool:
            self._pool.give(block)
        elif not isinstance(block, DiskBlock) or block.parts[0].slab.pid == os.getpid():
            raise ArgumentError("This block is not from this tier.", got=describe(block))
        # else: the parent's block in a forked child; the parent has it, and gives it back itself

    def trim(self) -> int:
        """Give files that hold no block back to the disk, after joining their last copies; return the bytes."""
        return self._own_pool().trim()

    def close(self) -> None:
        """Close every file, in use or not; a job under way closes its own.

        Blocks can still be given back, and not be used.
        """
        self._is_closed = True
        self._own_pool().close()

    @property
    def used_bytes(self) -> int:
        """Return the bytes that were asked for and not given back."""
        return self._own_pool().used_bytes

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of files, in use or not."""
        return self._own_pool().reserved_bytes

    @property
    def budget_bytes(self) -> int:
        return self._pool.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, num_bytes: int) -> None:
        check_budget(num_bytes)
        self._own_pool().budget_bytes = num_bytes

    def stats(self) -> TierStats:
        return self._own_pool().stats()

    def _own_pool(self) -> BlockPool[DiskBlock]:
        if self._pid != os.getpid():
            # Not even the lock of the parent's pool is of use: a thread that is not here may hold it.
            pool = self._new_pool(self._pool.budget_bytes)
            if self._is_closed:
                pool.close()
            self._pool, self._pid = pool, os.getpid()
        return self._pool

    def _new_pool(self, budget_bytes: int) -> BlockPool[DiskBlock]:
        directory = self.directory  # not self: a cycle would keep files open until the garbage collector runs
        return BlockPool(
            DiskBlock,
            lambda num_bytes: DiskFile(directory, num_bytes),
            DiskFile.close,
            budget_bytes,
            self._growth,
            max_parts=MAX_PARTS,
            retries_after_give=True,  # unlike pinned memory, a disk is often full for a while only
        )


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Raise unless a file can be made and written there. It really is: permissions tell less than half of the truth."""
    path = os.path.abspath(os.fspath(directory))
    if not os.path.isdir(path):
        what = "is no directory" if os.path.exists(path) else "does not exist"
        raise ArgumentError(
            f"disk_dir {what}.",
            expected="a directory that can be written",
            got=path,
            do="Create it, or name another one.",
        )
    fds: list[int] = []
    try:
        try:
            open_unnamed(path, fds)
            os.write(fds[0], bytes(1))
        finally:
            for fd in fds:
                os.close(fd)
    except OSError as error:
        raise ArgumentError(
            "disk_dir cannot be written.",
            expected="a directory that can be written",
            got=f"{path} ({error.strerror}, errno {error.errno})",
            do="Change its permissions, free some space, or name another one.",
        ) from error


def open_unnamed(directory: str, fds: list[int]) -> None:
    """Add to `fds` a descriptor of a new file that no path leads to."""
    with contextlib.suppress(OSError, AttributeError):  # not every file system, kernel or system has it
        flags = os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        # From the opened file to the list all is C: no Ctrl-C comes in between, and no descriptor is lost.
        fds.extend(map(os.open, (directory,), (flags,), (0o600,)))
        return
    fd, path = tempfile.mkstemp(prefix="hyper-parallel-swap-", dir=directory)
    fds.append(fd)
    os.unlink(path)


def _reserve(fd: int, num_bytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise
        os.ftruncate(fd, num_bytes)  # holes: a full disk is then found by a write
