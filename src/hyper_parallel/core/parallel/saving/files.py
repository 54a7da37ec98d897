"""The files of a checkpoint as they are read: their sizes, headers and chunks checked, parts of tensors copied out.

Assumes that nobody writes into a file of a committed checkpoint in place while it is read: what was checked is read a
second time, into its tensor.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel._base.files import NotPlainError, opened
from hyper_parallel.core.dtensor.boxes import Box
from hyper_parallel.core.parallel.saving.checksums import CHUNK_BYTES, sums_from_text
from hyper_parallel.core.parallel.saving.manifest import SavedFile, SavedItem, SavedTensor, damaged
from hyper_parallel.core.parallel.saving.reading import Part, chunks_of, runs_of
from hyper_parallel.core.parallel.saving.threads import for_each, num_threads

__all__ = ["Files", "Wanted"]

_BLOCK_BYTES = 8 << 20
_PIECE_BYTES = 256 << 10  # stays in the processor's cache between the read and the checksum
_of_thread = threading.local()  # memory that is new costs as much as the read


class Wanted(NamedTuple):
    """A tensor of the checkpoint, and the parts of it that are read."""

    key: str
    tensor: SavedTensor
    parts: Sequence[Part]


class Files:
    """The files of one folder, opened when they are needed. A context manager."""

    def __init__(self, folder: str, files: Sequence[SavedFile]) -> None:
        self._folder = folder
        self._files = files
        self._descriptors: dict[int, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def open(self, index: int) -> None:
        """Open a file, and check that it has the size and the header that the manifest says."""
        if index in self._descriptors:
            return
        file = self._files[index]
        path = os.path.join(self._folder, file.name)
        try:
            with opened(path) as descriptor:
                size = os.fstat(descriptor).st_size
                if size != file.num_bytes:
                    raise damaged(path, f"{size} bytes", f"{file.num_bytes} bytes")
                header = os.pread(descriptor, file.header_bytes, 0)
                if zlib.crc32(header) != file.header_sum:
                    raise damaged(
                        path, "the header of another file, or a damaged one", f"checksum {file.header_sum:08x}"
                    )
                self._descriptors[index] = os.dup(descriptor)
        except (FileNotFoundError, NotPlainError) as error:
            got = "no such file" if isinstance(error, FileNotFoundError) else str(error.got)
            raise damaged(path, got, f"a file of {file.num_bytes} bytes") from error

    def check(self, wanted: Iterable[Wanted], on_progress: Callable[[], None]) -> int:
        """Compare the checksums of all chunks that are to be read; return how many bytes these are.

        Raises:
            DamagedFileError: a byte of them is not what was written, with the tensor that it is of.
        """
        jobs: list[tuple[str, SavedItem, int, int, int]] = []
        seen: set[tuple[int, int, int]] = set()
        total = 0
        for key, tensor, parts in wanted:
            for part in parts:
                item = part.item
                self.open(item.file)
                if item.sums is None:
                    continue
                sums = sums_from_text(item.sums)
                num_bytes = item.box.num_elements * tensor.element_bytes
                for chunk in chunks_of(part, tensor.element_bytes):
                    if (item.file, item.start, chunk) in seen:
                        continue
                    seen.add((item.file, item.start, chunk))
                    size = min(CHUNK_BYTES, num_bytes - chunk * CHUNK_BYTES)
                    jobs.append((key, item, chunk, size, sums[chunk]))
                    total += size
        count = 1 if total <= 4 * CHUNK_BYTES else num_threads()
        # Neighbours stay together, so that each thread reads one way through a file.
        size = max(1, min(32, len(jobs) // count))
        for_each([jobs[at : at + size] for at in range(0, len(jobs), size)], self._check_chunks, count, on_progress)
        return total

    def _check_chunks(self, jobs: Sequence[tuple[str, SavedItem, int, int, int]]) -> None:
        buffer = _buffer()
        for key, item, chunk, size, expected in jobs:
            got = 0
            for at in range(0, size, _PIECE_BYTES):
                view = buffer[: min(_PIECE_BYTES, size - at)]
                self._read(item.file, item.start + chunk * CHUNK_BYTES + at, view)
                got = zlib.crc32(view, got)
            if got != expected:
                path = os.path.join(self._folder, self._files[item.file].name)
                raise damaged(path, f"{got:08x} in {key}, part {chunk} of {item.box}", f"checksum {expected:08x}")

    def _read(self, file: int, start: int, view: memoryview) -> None:
        descriptor = self._descriptors[file]
        while view:
            num = os.preadv(descriptor, [view], start)
            if num == 0:
                path = os.path.join(self._folder, self._files[file].name)
                raise damaged(path, "the end of the file", "more bytes")
            view, start = view[num:], start + num

    def read_tensor(self, wanted: Wanted, box: Box, out: Any) -> None:
        """Read a box of a tensor into a flat array of its bytes."""
        element_bytes = wanted.tensor.element_bytes
        shaped = out.reshape(*box.sizes, element_bytes)
        for part in wanted.parts:
            inside = part.box.inside(box)
            target = shaped[tuple(slice(start, end) for start, end in zip(inside.starts, inside.ends, strict=True))]
            self.open(part.item.file)
            if part.box == part.item.box and target.flags.c_contiguous:
                self._read(part.item.file, part.item.start, _flat(target))
                continue
            runs = list(itertools.islice(runs_of(part, element_bytes), 2))
            if len(runs) == 1 and target.flags.c_contiguous:
                self._read(part.item.file, part.item.start + runs[0].start, _flat(target))
            else:
                target[...] = self._gathered(part, element_bytes).reshape(target.shape)

    def _gathered(self, part: Part, element_bytes: int) -> Any:
        """Read a part whose runs lie apart, many runs at a time."""
        sizes, inside = part.item.box.sizes, part.box.inside(part.item.box)
        made = np.empty(part.box.num_elements * element_bytes, np.uint8)
        dim = len(sizes)
        while dim > 0 and inside.sizes[dim - 1] == sizes[dim - 1]:
            dim -= 1
        strides = [element_bytes * math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
        if dim < 2:  # one run
            run = next(runs_of(part, element_bytes))
            self._read(part.item.file, part.item.start + run.start, _flat(made))
            return made
        num_bytes = inside.sizes[dim - 1] * strides[dim - 1]
        stride, num_rows = strides[dim - 2], inside.sizes[dim - 2]
        rows = made.reshape(-1, num_bytes)
        at = 0
        leading = [range(start, start + size) for start, size in zip(inside.starts, inside.sizes, strict=True)][
            : dim - 2
        ]
        step = max(1, _BLOCK_BYTES // stride)
        buffer = np.empty(stride * (step - 1) + num_bytes, np.uint8)
        for place in itertools.product(*leading):
            begin = sum(index * width for index, width in zip(place, strides, strict=False))
            begin += inside.starts[dim - 2] * stride + inside.starts[dim - 1] * strides[dim - 1]
            for row in range(0, num_rows, step):
                count = min(step, num_rows - row)
                block = buffer[: stride * (count - 1) + num_bytes]
                self._read(part.item.file, part.item.start + begin + row * stride, _flat(block))
                spread = np.lib.stride_tricks.as_strided(block, (count, num_bytes), (stride, 1), writeable=False)
                rows[at : at + count] = spread
                at += count
        return made


def _buffer() -> memoryview:
    if not hasattr(_of_thread, "buffer"):
        _of_thread.buffer = memoryview(bytearray(_PIECE_BYTES))
    found: memoryview = _of_thread.buffer
    return found


def _flat(array: Any) -> memoryview:
    return memoryview(array.reshape(-1))
