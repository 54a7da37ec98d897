"""Safetensors files on raw bytes, written atomically and sealed with checksums.

Guarantees:
- After any exception, kill or power cut the target holds the old file or the new one, never a mix.
- A file written here that was changed afterwards, anywhere, raises `DamagedFileError`; no tensor of it is handed out
  before its checksum was right. Files of other programs load too, with `TensorFile.verified` False.
- Reading runs no code from the file: a header in JSON, and bytes.

Assumes that nobody shortens a file in place while it is open here (the kernel then kills the reader, SIGBUS);
`write_tensors` never does.

The seal is three entries of the header's `__metadata__`, which other readers show and ignore, and some white space:

    {"__metadata__":{"hyper_parallel.seal":"1 crc32 HHHHHHHH",           of the length and the header, with 0 for each H
                     "hyper_parallel.seal.tensors":"AAAAAAAABBBBBBBB…",  of each tensor, in the order of the file
                     …the user's entries…,
                     "hyper_parallel.seal.end":"hyper_parallel.seal hyper_parallel.seal"},
     …the tensors…} TAB SPACE TAB SPACE TAB

Any of these six traces is enough to demand the whole seal. Else damage to a single place, the seal's name, would turn a
sealed file into one that needs no check. So many, since two blocks that changed places cut up to four traces apart; one
of them behind the tensors, so that a block that overwrites all six overwrites the tensors' descriptions too.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    DamagedFileError,
    FrameworkMissingError,
    StateError,
    describe,
)
from hyper_parallel._base.extras import install_words
from hyper_parallel._base.files import NewFile, NotPlainError, checked_path, opened, replacing

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "TensorFile", "TensorRecord", "TensorSpec", "in_file_order", "open_tensors", "sealed_header", "write_tensors",
]  # fmt: skip

_BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32}
_BITS |= {"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8}
_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
_BITS |= {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}

_SEAL = "hyper_parallel.seal"
_TRACES = (_SEAL.encode(), b"\t \t \t")  # in JSON, a raw TAB stands between values only; nobody writes these there
# Where the header's own checksum stands in a sealed file: behind the length and how each such header starts.
_SUM_AT = 8 + len(f'{{"__metadata__":{{"{_SEAL}":"1 crc32 ')
_MAX_HEADER_BYTES = 100_000_000  # the stock library reads no longer one
_CHUNK_BYTES = 1 << 20


class TensorSpec(NamedTuple):
    """What a file says about a tensor: its name, the safetensors code of its dtype (`"BF16"`), its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def size_bytes(self) -> int:
        """The size of the content; ValueError with the reason where there is no such tensor."""
        bits = _BITS.get(self.dtype) if isinstance(self.dtype, str) else None
        if bits is None:
            raise ValueError(f"the dtype is none of {', '.join(_BITS)}")
        if not all(type(length) is int and length >= 0 for length in self.shape):
            raise ValueError("the shape is not made of whole numbers from 0 on")
        # Zeros left out: the stock library multiplies from the left, and gives up on [2**62, 4, 0] as well.
        if math.prod(length or 1 for length in self.shape) * bits >= 2**63:
            raise ValueError("the shape is too large")
        if math.prod(self.shape) * bits % 8:
            raise ValueError("it ends within a byte")
        return math.prod(self.shape) * bits // 8


class TensorRecord(NamedTuple):
    """A tensor with its content: contiguous, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write_tensors(
    path: str | os.PathLike[str],
    specs: Iterable[TensorSpec],
    read: Callable[[str], Buffer],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a sealed safetensors file in place of `path`, at once or not at all.

    Args:
        path: as `replacing` takes it: a symbolic link is followed unless a stranger may have planted it. The permission
            bits of a file that is there are kept.
        specs: all tensors. The file holds wide dtypes first, so that each tensor is aligned; else it keeps this order.
        read: called with each name once, in the order of the file; gives the content, contiguous and little-endian. It
            is written before the next call, so one buffer can serve all tensors.
        metadata: text for the file's `__metadata__`.

    Raises:
        ValueError, TypeError: a tensor or an entry that cannot be stored, or content that does not fit its spec.
        OSError: no such folder, no permission, a full disk. The file that was there is unchanged, unless the message
            says that the new one is in place and only the sync of its folder failed.

    Example:
        >>> write_tensors("w.safetensors", [TensorSpec("w", "F32", (2,))], {"w": bytes(8)}.__getitem__)
        >>> with open_tensors("w.safetensors") as file:
        ...     print(file.verified, file.specs, file.read("w").nbytes)
        True (TensorSpec(name='w', dtype='F32', shape=(2,)),) 8
    """
    ordered = in_file_order(specs)
    entries = _checked_metadata(metadata or {})
    header_bytes = len(_header(ordered, entries, "0" * 8 * len(ordered)))
    if header_bytes - 8 > _MAX_HEADER_BYTES:
        raise ArgumentError(
            "The names and the metadata do not fit into a safetensors header.",
            expected=f"at most {_MAX_HEADER_BYTES} bytes",
            got=f"{header_bytes - 8} bytes for {len(ordered)} tensors",
            do="Split the tensors over several files.",
        )
    with replacing(path) as file:
        file.seek(header_bytes)
        sums = "".join(_write_tensor(file, spec, read(spec.name)) for spec in ordered)
        header = _header(ordered, entries, sums)
        file.seek(0)
        file.write(header[:_SUM_AT] + _header_sum(header) + header[_SUM_AT + 8 :])


def in_file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Check what is to be written, and put it in the order in which a file has it: wide dtypes first."""
    known: dict[str, TensorSpec] = {}
    for spec in specs:
        _check_text(spec.name, "a tensor's name")
        if spec.name == "__metadata__" or spec.name in known:
            got = "it twice" if spec.name in known else "the one name that safetensors keeps for itself"
            raise ArgumentError(f"The tensor name {spec.name!r} cannot be used.", expected="each name once", got=got)
        try:
            _ = spec.size_bytes
        except ValueError as error:
            raise ArgumentError(f"The tensor {spec.name!r} cannot be stored: {error}.", got=str(spec)) from None
        known[spec.name] = spec
    # PyTorch's reader needs each tensor to start at a multiple of its element; the sort is stable.
    return sorted(known.values(), key=lambda spec: -_BITS[spec.dtype])


def _checked_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        _check_text(key, "a key of the metadata")
        _check_text(value, f"the metadata's {key!r}")
        if key.startswith(_SEAL):
            raise ArgumentError(f"The metadata's key {key!r} is one of the seal's own.", do="Leave it out.")
    return dict(metadata)


def _check_text(text: object, role: str) -> None:
    if not isinstance(text, str):
        raise ArgumentTypeError(f"A tensor file needs text as {role}.", expected="str", got=describe(text))
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise ArgumentError(f"JSON has no such text as {role}.", expected="Unicode", got=ascii(text)) from None


def _header(specs: list[TensorSpec], metadata: dict[str, str], sums: str) -> bytes:
    """Make the length and the header, with zeros for the header's own checksum.

    It has one size for any `sums` of these tensors.
    """
    seal = {_SEAL: "1 crc32 00000000", f"{_SEAL}.tensors": sums}
    fields: dict[str, Any] = {"__metadata__": {**seal, **metadata, f"{_SEAL}.end": f"{_SEAL} {_SEAL}"}}
    start = 0
    for spec in specs:
        stop = start + spec.size_bytes
        fields[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(fields, separators=(",", ":")).encode() + _TRACES[1]
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def sealed_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str], sums: Sequence[int]) -> bytes:
    """Make the length and the header of a sealed file, from tensors in the file's order and their checksums."""
    header = _header(list(specs), _checked_metadata(metadata), "".join(f"{checksum:08x}" for checksum in sums))
    return header[:_SUM_AT] + _header_sum(header) + header[_SUM_AT + 8 :]


def _header_sum(header: bytes) -> bytes:
    return b"%08x" % zlib.crc32(header[:_SUM_AT] + b"00000000" + header[_SUM_AT + 8 :])


def _write_tensor(file: NewFile, spec: TensorSpec, content: Buffer) -> str:
    try:
        view = memoryview(content)
        big_endian = view.format.startswith((">", "!"))
        view = view.cast("B") if view.nbytes else memoryview(b"")  # a view with a length of zero cannot be cast
    except (TypeError, ValueError, BufferError):  # ValueError: an element that Python has no letter for
        raise ArgumentTypeError(
            f"The content of tensor {spec.name!r} cannot be written.",
            expected="a contiguous bytes-like object",
            got=describe(content),
            do="Give its bytes, for example `array.view(numpy.uint8)` of a contiguous array.",
        ) from None
    if big_endian:
        raise ArgumentError(f"The content of tensor {spec.name!r} is big-endian.", expected="little-endian content")
    if view.nbytes != spec.size_bytes:
        raise ArgumentError(
            f"The content of tensor {spec.name!r} has the wrong size.",
            expected=f"{spec.size_bytes} bytes for {spec}",
            got=f"{view.nbytes} bytes",
        )
    checksum = 0
    for start in range(0, view.nbytes, _CHUNK_BYTES):
        # A copy, since another thread may still train on the tensor: what is summed must be what is written.
        chunk = bytes(view[start : start + _CHUNK_BYTES])
        checksum = zlib.crc32(chunk, checksum)
        file.write(chunk)
    return f"{checksum:08x}"


class TensorFile:
    """An open safetensors file; `open_tensors` makes it. A context manager.

    verified: whether the file is sealed. The header then was checked on opening; each tensor is on reading.
    metadata: the user's entries, without the seal.
    specs: in the order of the file.
    """

    def __init__(self, path: str, content: mmap.mmap) -> None:
        data_start = 8 + int.from_bytes(content[:8], "little")
        header = content[:data_start]
        self.path = path
        self.verified = _check_seal(path, header)
        try:
            fields = json.loads(header[8:].decode(), object_pairs_hook=_unique)
            metadata: dict[str, str] = fields.pop("__metadata__", None) or {}
            self.metadata = {key: value for key, value in metadata.items() if not key.startswith(_SEAL)}
            places = _places(fields, data_start, len(content))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _damaged(path, str(error)) from error
        self.specs = tuple(places)
        self._content: mmap.mmap | None = content
        sums = metadata.get(f"{_SEAL}.tensors", "")
        self._tensors = {
            spec.name: (spec, place, sums[8 * i : 8 * i + 8]) for i, (spec, place) in enumerate(places.items())
        }

    def read(self, name: str) -> memoryview:
        """Return the content of one tensor, checked if the file is sealed: a read-only view of the file, not a copy.

        Raises:
            DamagedFileError: the content is not what was written.
        """
        if self._content is None:
            raise StateError(f"{self.path} is closed.", do="Read inside the `with` block.")
        if name not in self._tensors:
            raise ArgumentError(f"{self.path} has no tensor {name!r}.", expected=f"one of its {len(self.specs)} names")
        spec, place, expected = self._tensors[name]
        view = memoryview(self._content)[place]
        if self.verified and (got := f"{zlib.crc32(view):08x}") != expected:
            raise _damaged(self.path, f"{got} in tensor {name!r}, {spec}", expected=f"checksum {expected}")
        return view

    def read_all(self) -> list[TensorRecord]:
        """Return all tensors in the order of the file, each checked before any is handed out."""
        return [TensorRecord(*spec, self.read(spec.name)) for spec in self.specs]

    def close(self) -> None:
        """Close the file. A view that is still held keeps the mapping alive, so it never points to nowhere."""
        if self._content is not None:
            with suppress(BufferError):
                self._content.close()
            self._content = None

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_tensors(path: str | os.PathLike[str]) -> TensorFile:
    """Open a safetensors file and check its header. Example: see `write_tensors`.

    Raises:
        DamagedFileError: it is cut, changed, or no safetensors file; a folder too.
        FileNotFoundError: there is no such file.
        FrameworkMissingError: the package `safetensors` is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise FrameworkMissingError(
            "Reading a tensor file needs the package `safetensors`.",
            got=str(error),
            do=install_words("files"),
        ) from error
    name = checked_path(path)
    content = _map(name)
    try:
        try:
            # Before our own look, since it bounds the header's length, nesting and numbers. It opens the path a second
            # time, and a save may put a newer file there in between; so `TensorFile` checks again what it relies on.
            with safe_open(name, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise _damaged(name, f"in the words of the safetensors library: {error}") from error
        return TensorFile(name, content)
    except BaseException:
        content.close()
        raise


def _map(path: str) -> mmap.mmap:
    try:
        with opened(path) as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes < 8:
                raise _damaged(path, f"{size_bytes} bytes", expected="8 bytes and more")
            return mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ)
    except NotPlainError as error:
        raise _damaged(path, str(error.got)) from None


def _check_seal(path: str, header: bytes) -> bool:
    """Say whether there is a seal; raise when there is one and it is not right."""
    if not any(trace in header for trace in _TRACES):
        return False
    # Compared as text: as numbers, a damaged "0A" would equal "0a".
    if header[_SUM_AT : _SUM_AT + 8] != _header_sum(header):
        got = "another one (damage; or another program wrote the file anew and copied the metadata)"
        raise _damaged(path, got, expected="the header that was sealed")
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of pairs, each name once.

    Two readers may choose differently between two values of one name, so there must be one.
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name that stands twice in the header")
    return fields


def _places(fields: dict[str, Any], data_start: int, end: int) -> dict[TensorSpec, slice]:
    """Find where in the file each tensor lies, in the file's order.

    Together they must fill it from `data_start` to `end`.
    """
    if not all(isinstance(field, dict) for field in fields.values()):  # the stock library also takes lists
        raise ValueError("a tensor that is not described by a JSON object")
    places = {}
    start = data_start
    for name, field in sorted(fields.items(), key=lambda item: item[1]["data_offsets"]):
        spec = TensorSpec(name, field["dtype"], tuple(field["shape"]))
        stop = start + spec.size_bytes
        if field["data_offsets"] != [start - data_start, stop - data_start]:
            raise ValueError(f"{spec} at {field['data_offsets']} for tensor {name!r}, not next to the one before")
        places[spec] = slice(start, stop)
        start = stop
    if start != end:
        raise ValueError(f"{end} bytes, where the header describes {start}")
    return places


def _damaged(path: str, got: str, expected: str | None = None) -> DamagedFileError:
    return DamagedFileError(
        f"{path} is damaged, or no safetensors file.",
        expected=expected,
        got=got,
        do="Load another copy or an earlier checkpoint.",
    )
