"""PyTorch's own distributed checkpoints, read without running what is in their pickles, and written."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata

from hyper_parallel._base.errors import ArgumentError, DamagedFileError
from hyper_parallel.core.parallel.saving.convert import DcpBackend, DcpContents, DcpTensor
from hyper_parallel.platform.torch.checkpoint_files import CODES, DTYPES

# All that a `.metadata` of tensors and plain values needs. Each makes an object of given fields, and does nothing else.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
} | {
    ("torch.distributed.checkpoint.metadata", name): getattr(dcp_metadata, name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
    if hasattr(dcp_metadata, name)
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return found


class TorchDcp:
    """See `DcpBackend`."""

    folder: ClassVar[str] = DcpBackend.folder

    def is_dcp(self, path: str) -> bool:
        return os.path.isfile(os.path.join(path, ".metadata"))

    def read(self, path: str) -> DcpContents:
        name = os.path.join(path, ".metadata")
        try:
            with open(name, "rb") as file:
                found = _Unpickler(file).load()
            entries, storage = found.state_dict_metadata, found.storage_data
            paths = found.planner_data or {}
            places = {(index.fqn, tuple(index.offset or ())): info for index, info in storage.items()}
        except OSError:
            raise
        except Exception as error:
            raise DamagedFileError(
                f"{name} is damaged, or no metadata of a checkpoint.", got=f"{type(error).__name__}: {error}",
                do="Save it anew with DCP, with tensors and plain values alone.",
            ) from error  # fmt: skip
        tensors: dict[tuple[Any, ...], DcpTensor] = {}
        values: dict[tuple[Any, ...], Any] = {}
        for key, entry in entries.items():
            at = tuple(paths.get(key, (key,)))
            if isinstance(entry, dcp_metadata.TensorStorageMetadata):
                code = CODES.get(entry.properties.dtype)
                if code is None:
                    raise ArgumentError(
                        "A dtype has no place in a checkpoint.", got=str(entry.properties.dtype), where=key
                    )
                chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
                infos = [_place(places, key, offsets, path) for offsets, _ in chunks]
                read = _reader(key, entry.properties.dtype, tuple(entry.size), chunks, infos)
                tensors[at] = DcpTensor(code, tuple(entry.size), read)
            else:
                values[at] = _loaded(key, *_place(places, key, (), path))
        return DcpContents(tensors, values)

    def write(self, path: str, state: Mapping[str, Any], tensor: Callable[[Any], Any]) -> None:
        def made(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: made(item) for key, item in value.items()}
            found = tensor(value)
            if found is None:
                return value
            dtype, shape, data = found
            return torch.from_numpy(data).view(DTYPES[dtype]).reshape(shape)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            writer = dcp.FileSystemWriter(path, sync_files=True)
            dcp.save(made(state), storage_writer=writer, no_dist=True)


def _place(places: Mapping[Any, Any], key: str, offsets: tuple[int, ...], path: str) -> tuple[str, int, int]:
    info = places.get((key, offsets), places.get((key, ())))
    if info is None or getattr(info, "transform_descriptors", None):
        what = "it is compressed" if info is not None else f"no place of the part at {list(offsets)}"
        raise DamagedFileError(f"A part of {key} cannot be read.", got=what, where=path)
    if os.path.basename(info.relative_path) != info.relative_path:
        raise DamagedFileError("A file lies outside of the folder.", got=repr(info.relative_path), where=path)
    return os.path.join(path, info.relative_path), int(info.offset), int(info.length)


def _loaded(key: str, file: str, offset: int, length: int) -> Any:
    try:
        with open(file, "rb") as stream:
            stream.seek(offset)
            return torch.load(io.BytesIO(stream.read(length)), map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise DamagedFileError(
            f"{file} is damaged, or has more than tensors and plain values.",
            got=f"{type(error).__name__}: {error}".splitlines()[0][:200],
            where=key,
        ) from error


def _reader(
    key: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]],
    places: list[tuple[str, int, int]],
) -> Callable[[], Any]:
    def read() -> Any:
        whole = torch.empty(shape, dtype=dtype)
        covered = 0
        for (offsets, sizes), place in zip(chunks, places, strict=True):
            part = _loaded(key, *place)
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes or part.dtype != dtype:
                raise DamagedFileError(f"A part of {key} is not what the metadata says.", where=place[0])
            box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            whole[box] = part
            covered += part.numel()
        if covered != whole.numel():
            raise DamagedFileError(
                f"The parts of {key} do not make up the whole.", expected=f"{whole.numel()} elements", got=str(covered)
            )
        return whole.reshape(-1).view(torch.uint8).numpy()

    return read


BACKEND: DcpBackend = TorchDcp()
