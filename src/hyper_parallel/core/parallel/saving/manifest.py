"""The manifest of a checkpoint: which box of which tensor lies where, with the checksum of everything.

    {"hyper_parallel.manifest":"1 crc32 HHHHHHHH",
     "id":"…", "saved_at":1795132800.25, "files":[…], "tensors":{…}, "aliases":{…}, "optimizer":…, "extra":…}

The checksum is of all bytes, with zeros in its own place. The first line is byte for byte the same in every manifest,
but for the checksum: a manifest in which it is not is damaged, or none.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hyper_parallel._base.errors import DamagedFileError
from hyper_parallel.core.dtensor.boxes import Box
from hyper_parallel.core.parallel.saving.checksums import CHUNK_BYTES
from hyper_parallel.core.parallel.saving.tiling import fault_of_tiling
from hyper_parallel.platform.tensor_file import TensorSpec

__all__ = ["MANIFEST", "Manifest", "SavedFile", "SavedItem", "SavedTensor", "is_manifest"]

MANIFEST = "manifest.json"
_HEAD, _TAIL = b'{"hyper_parallel.manifest":"1 crc32 ', b'",\n'
_SUM_END = len(_HEAD) + 8
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")


class SavedFile(NamedTuple):
    """A file of the folder. `header_sum` is of its first `header_bytes`; all that follows are tensors."""

    name: str
    num_bytes: int
    header_bytes: int
    header_sum: int


class SavedItem(NamedTuple):
    """A box of a tensor: in which file, from which byte on, and the checksums of its chunks, 8 digits each.

    Without checksums (a file of another program) nothing can be compared.
    """

    file: int
    start: int
    box: Box
    sums: str | None


class SavedTensor(NamedTuple):
    """A tensor, and the items that tile it."""

    dtype: str
    shape: tuple[int, ...]
    items: tuple[SavedItem, ...]

    @property
    def element_bytes(self) -> int:
        return TensorSpec("", self.dtype, ()).size_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint says. Made by a save, and checked when it is read.

    optimizer: None, or {"groups": [{"params": […], "options": {…}}], "values": {param: {name: value}}}.
    """

    id: str
    saved_at: float
    files: tuple[SavedFile, ...]
    tensors: Mapping[str, SavedTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizer: Any = None
    extra: Any = None
    about: Mapping[str, Any] = field(default_factory=dict)  # for people: framework, number of ranks

    def find(self, key: str) -> SavedTensor | None:
        return self.tensors.get(self.aliases.get(key, key))

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        rows = {
            key: [
                tensor.dtype,
                tensor.shape,
                [[item.file, item.start, item.box.starts, item.box.sizes, item.sums] for item in tensor.items],
            ]
            for key, tensor in self.tensors.items()
        }
        fields = {
            "id": self.id,
            "saved_at": self.saved_at,
            "about": dict(self.about),
            "chunk_bytes": CHUNK_BYTES,
            "files": self.files,
            "aliases": dict(self.aliases),
            "optimizer": self.optimizer,
            "extra": self.extra,
            "tensors": rows,
        }
        body = json.dumps(fields, separators=(",", ":")).encode()
        text = _HEAD + b"0" * 8 + _TAIL + body[1:] + b"\n"
        return _HEAD + b"%08x" % zlib.crc32(text) + text[_SUM_END:]

    @classmethod
    def from_bytes(cls, content: bytes, path: str) -> Manifest:
        """Read and check.

        Raises:
            DamagedFileError: a byte is not what was written, or this never was a manifest.
        """
        if not is_manifest(content) or content[_SUM_END : _SUM_END + len(_TAIL)] != _TAIL:
            raise damaged(path, "no manifest of a checkpoint, or a damaged one")
        expected = b"%08x" % zlib.crc32(_HEAD + b"0" * 8 + content[_SUM_END:])
        if content[len(_HEAD) : _SUM_END] != expected:
            raise damaged(path, "another one", f"checksum {expected.decode()}")
        try:
            return _checked(json.loads(content))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise damaged(path, f"{type(error).__name__}: {error}") from error


def is_manifest(content: bytes) -> bool:
    """Say whether this begins as a manifest does."""
    return content.startswith(_HEAD)


def damaged(path: str, got: str, expected: str | None = None) -> DamagedFileError:
    return DamagedFileError(
        f"{path} is damaged.", expected=expected, got=got, do="Load another copy or an earlier checkpoint."
    )


def _checked(fields: Mapping[str, Any]) -> Manifest:
    if fields["chunk_bytes"] != CHUNK_BYTES:
        raise ValueError(f"chunks of {fields['chunk_bytes']} bytes, where this version reads chunks of {CHUNK_BYTES}")
    files = tuple(SavedFile(*row) for row in fields["files"])
    for file in files:
        if not _FILE_NAME.fullmatch(file.name):
            raise ValueError(f"a file called {file.name!r}")
    if len({file.name for file in files}) != len(files):
        raise ValueError("one file twice")
    tensors = {key: _tensor(*row) for key, row in fields["tensors"].items()}
    proved: set[tuple[object, ...]] = set()
    for key, tensor in tensors.items():
        _check_tensor(key, tensor, files, proved)
    aliases = fields["aliases"]
    for alias, key in aliases.items():
        if alias in tensors or key not in tensors:
            raise ValueError(f"{alias!r} as another name of {key!r}")
    return Manifest(
        id=fields["id"],
        saved_at=float(fields["saved_at"]),
        files=files,
        tensors=tensors,
        aliases=aliases,
        optimizer=fields["optimizer"],
        extra=fields["extra"],
        about=fields["about"],
    )


def _tensor(dtype: str, shape: list[int], items: list[Any]) -> SavedTensor:
    return SavedTensor(
        dtype,
        tuple(shape),
        tuple(
            SavedItem(file, start, Box(tuple(starts), tuple(sizes)), sums) for file, start, starts, sizes, sums in items
        ),
    )


def _check_tensor(key: str, tensor: SavedTensor, files: tuple[SavedFile, ...], proved: set[tuple[object, ...]]) -> None:
    boxes = tuple(item.box for item in tensor.items)
    if (tensor.shape, boxes) not in proved:
        fault = fault_of_tiling(boxes, tensor.shape)
        if fault is not None:
            raise ValueError(f"{fault}, of tensor {key!r}")
        proved.add((tensor.shape, boxes))
    element_bytes = tensor.element_bytes
    for item in tensor.items:
        file = files[item.file]
        num_bytes = item.box.num_elements * element_bytes
        if item.file < 0 or item.start < file.header_bytes or item.start + num_bytes > file.num_bytes:
            raise ValueError(f"tensor {key!r} outside of {file.name}")
        if item.sums is not None and len(item.sums) != 8 * -(-num_bytes // CHUNK_BYTES):
            raise ValueError(f"{len(item.sums)} digits of checksums for {num_bytes} bytes of tensor {key!r}")
