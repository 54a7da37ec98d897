"""The file of one rank: a sealed safetensors file, written by several threads straight from memory.

Which bytes lie where is known before the first is written. Threads take chunks: each is copied once, into a buffer that
stays in the processor's cache, summed and written from there. So what is summed is what is written, even if somebody
changes the tensor meanwhile. The header comes last, with the checksums.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.parallel.saving.checksums import CHUNK_BYTES, combined
from hyper_parallel.core.parallel.saving.folder import explained, sync_folder
from hyper_parallel.core.parallel.saving.threads import num_threads, running
from hyper_parallel.platform.tensor_file import TensorSpec, in_file_order, sealed_header

__all__ = ["Content", "Written", "write_rank_file"]

_MOST_UNDER_WAY = 64  # chunks: what is copied to the host for them alone stays little
_SYNC_BYTES = 64 << 20  # the disk begins so early, and not when all is written


class Content(NamedTuple):
    """A tensor of the file. `read` gives its bytes as they lie in memory: a flat array of uint8."""

    spec: TensorSpec
    read: Callable[[], Any]


class Written(NamedTuple):
    """What the manifest says of the file: its sizes, and the checksums of each tensor's chunks, by name."""

    num_bytes: int
    header_bytes: int
    header_sum: int
    starts: dict[str, int]
    sums: dict[str, list[int]]


def write_rank_file(path: str, contents: Sequence[Content], target: str, on_progress: Callable[[], None]) -> Written:
    """Write a new file and sync it.

    Raises:
        OSError: the disk is full, or cannot be written; says that `target` was not saved.
    """
    by_name = {content.spec.name: content for content in contents}
    specs = in_file_order(content.spec for content in contents)
    header_bytes = len(sealed_header(specs, {}, [0] * len(specs)))
    starts, end = {}, header_bytes
    for spec in specs:
        starts[spec.name] = end
        end += spec.size_bytes
    sums = {spec.name: [0] * -(-spec.size_bytes // CHUNK_BYTES) for spec in specs}
    with explained(target):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _check_room(descriptor, end)
            os.ftruncate(descriptor, end)
            _write_all(
                descriptor, [(by_name[spec.name], starts[spec.name], sums[spec.name]) for spec in specs], on_progress
            )
            totals = [combined(zip(sums[spec.name], _chunk_sizes(spec.size_bytes), strict=True)) for spec in specs]
            header = sealed_header(specs, {}, totals)
            _write(descriptor, memoryview(header), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(os.path.dirname(path))
    return Written(end, header_bytes, zlib.crc32(header), starts, sums)


def _chunk_sizes(num_bytes: int) -> list[int]:
    whole, rest = divmod(num_bytes, CHUNK_BYTES)
    return [CHUNK_BYTES] * whole + ([rest] if rest else [])


def _check_room(descriptor: int, num_bytes: int) -> None:
    """Find out at once that the disk is too full, where it tells."""
    found = os.fstatvfs(descriptor)
    if found.f_blocks and found.f_bavail * found.f_frsize < num_bytes:
        raise OSError(
            errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {num_bytes} bytes, {found.f_bavail * found.f_frsize} are free"
        )


def _write_all(
    descriptor: int, jobs: Sequence[tuple[Content, int, list[int]]], on_progress: Callable[[], None]
) -> None:
    """Write all tensors. Large ones are shared by the threads, chunk by chunk."""
    writing = _Writing(descriptor)
    is_small = sum(content.spec.size_bytes for content, _, _ in jobs) <= 4 * CHUNK_BYTES
    count = 1 if is_small else num_threads()
    with running([writing.write_chunks] * count + [writing.flush]):
        try:
            for content, start, sums in jobs:
                data = content.read() if sums and not writing.errors else None
                for index in range(len(sums)):
                    if writing.errors:
                        break
                    writing.put(data, start, sums, index)
                    on_progress()
        finally:
            writing.end(count)
    if writing.errors:
        raise writing.errors[0]


class _Writing:
    """The queue of chunks between the thread that reads tensors and those that write. Lives for one file."""

    def __init__(self, descriptor: int) -> None:
        self.errors: list[BaseException] = []
        self._descriptor = descriptor
        self._chunks: queue.SimpleQueue[tuple[Any, int, list[int], int] | None] = queue.SimpleQueue()
        self._flushes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._room = threading.Semaphore(_MOST_UNDER_WAY)
        self._unsynced_bytes = 0

    def put(self, data: Any, start: int, sums: list[int], index: int) -> None:
        self._room.acquire()
        self._chunks.put((data, start, sums, index))
        self._unsynced_bytes += CHUNK_BYTES
        if self._unsynced_bytes >= _SYNC_BYTES:
            self._unsynced_bytes = 0
            self._flushes.put(True)

    def end(self, num_threads: int) -> None:
        for _ in range(num_threads):
            self._chunks.put(None)
        self._flushes.put(False)

    def write_chunks(self) -> None:
        buffer = np.empty(CHUNK_BYTES, np.uint8)
        while (job := self._chunks.get()) is not None:
            try:
                if not self.errors:
                    self._write_chunk(buffer, *job)
            except BaseException as error:
                self.errors.append(error)  # the thread goes on taking chunks, so that nobody waits for room
            finally:
                self._room.release()

    def _write_chunk(self, buffer: Any, data: Any, start: int, sums: list[int], index: int) -> None:
        begin = index * CHUNK_BYTES
        size = min(CHUNK_BYTES, data.size - begin)
        buffer[:size] = data[begin : begin + size]
        view = memoryview(buffer)[:size]
        sums[index] = zlib.crc32(view)
        _write(self._descriptor, view, start + begin)

    def flush(self) -> None:
        """Let the disk begin while there is more to write."""
        while self._flushes.get():
            if not self.errors:
                try:
                    os.fdatasync(self._descriptor)
                except OSError as error:
                    self.errors.append(error)


def _write(descriptor: int, data: memoryview, start: int) -> None:
    while data:
        num = os.pwrite(descriptor, data, start)
        data, start = data[num:], start + num
