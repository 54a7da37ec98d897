"""Folders of Hugging Face: safetensors files, with an index where there are several. Both ways."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from hyper_parallel._base import files as base_files
from hyper_parallel._base.errors import ArgumentError
from hyper_parallel._base.files import checked_path
from hyper_parallel.core.dtensor.boxes import Box
from hyper_parallel.core.parallel.saving import folder as folders
from hyper_parallel.core.parallel.saving.background import finish_running
from hyper_parallel.core.parallel.saving.contents import backend_of
from hyper_parallel.core.parallel.saving.files import Files, Wanted
from hyper_parallel.core.parallel.saving.load import Source, load_from
from hyper_parallel.core.parallel.saving.manifest import Manifest, SavedFile, SavedItem, SavedTensor, damaged
from hyper_parallel.core.parallel.saving.meeting import Meeting
from hyper_parallel.core.parallel.saving.meetings import new_meeting
from hyper_parallel.core.parallel.saving.reading import parts_of
from hyper_parallel.platform.tensor_file import TensorSpec, open_tensors, write_tensors

__all__ = ["export_hugging_face", "import_hugging_face"]

_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
_SHARD_BYTES = 5_000_000_000  # what Hugging Face's own libraries take


def export_hugging_face(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Write the model of a checkpoint as Hugging Face's libraries read it. One process does; no framework is needed.

    Names are those of the model, so a `transformers` model loads its own by `from_pretrained` once its `config.json` is
    beside them. A tied weight is written once. One tensor is in memory at a time, and checked before it is written.

    Raises:
        DamagedFileError: a byte of the checkpoint is not what was written.
        ValueError: the folder has safetensors files already.

    Example:
        >>> import os, torch, hyper_parallel as hp
        >>> hp.save("ckpt/step-1", model=torch.nn.Linear(4, 2))
        >>> hp.export_hugging_face("ckpt/step-1", "exported")
        >>> os.listdir("exported")
        ['model.safetensors']
    """
    finish_running()
    source, target = folders.target_of(path), folders.target_of(folder)
    manifest = folders.read_manifest(source)
    os.makedirs(target, exist_ok=True)
    taken = sorted(name for name in os.listdir(target) if name.endswith(".safetensors") or name == _INDEX)
    if taken:
        raise ArgumentError(
            "This folder has weights already.", expected="a folder without", got=taken[0], where=target,
            do="Export to another folder, or remove these first.",
        )  # fmt: skip
    tensors = {
        key.removeprefix("model/"): tensor for key, tensor in manifest.tensors.items() if key.startswith("model/")
    }
    with Files(source, manifest.files) as files:

        def read(name: str) -> Any:
            tensor = tensors[name]
            whole = Box((0,) * len(tensor.shape), tensor.shape)
            wanted = Wanted(f"model/{name}", tensor, parts_of(tensor, whole))
            files.check([wanted], lambda: None)
            data = np.empty(tensor.num_bytes, np.uint8)
            if data.size:
                files.read_tensor(wanted, whole, data)
            return data

        shards = list(_shards(tensors))
        place: dict[str, str] = {}
        for number, names in enumerate(shards):
            file = _ONE_FILE if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            specs = [TensorSpec(name, tensors[name].dtype, tensors[name].shape) for name in names]
            write_tensors(os.path.join(target, file), specs, read, metadata={"format": "pt"})
            place |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.num_bytes for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": place}, indent=2)
        base_files.write(os.path.join(target, _INDEX), text.encode())


def _shards(tensors: dict[str, SavedTensor]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.num_bytes > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.num_bytes
    yield names


def import_hugging_face(
    folder: str | os.PathLike[str], *, model: Any, strict: bool = True, timeout: float = 600.0
) -> None:
    """Load weights of Hugging Face into a model, distributed or not. All ranks make the call; each reads what it needs.

    Files of other programs carry no checksums: of these a changed byte is not found. Files that this package has
    written do, and are checked whole.

    Args:
        folder: with `model.safetensors`, or several files and their index.
        model: as in `load`; of a weight that it ties one name in the files is enough.
        strict: whether names and dtypes have to be the same. Without it what both have is loaded, and cast.
        timeout: as in `load`.

    Raises:
        DamagedFileError: a file is cut, or no safetensors file.
        ValueError: names, shapes or dtypes differ; then nothing was touched on any rank.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> hp.save("ckpt/step-2", model=torch.nn.Linear(4, 2))
        >>> hp.export_hugging_face("ckpt/step-2", "weights")
        >>> hp.import_hugging_face("weights", model=torch.nn.Linear(4, 2))
    """
    finish_running()
    backend, no_model = backend_of(model, "import_hugging_face")
    meeting = new_meeting("import_hugging_face", backend, folder, timeout)

    def source() -> Source:
        if no_model is not None:
            raise no_model
        return _source_of(folder, meeting)

    load_from(source, backend, model, None, strict, meeting)


def _source_of(folder: str | os.PathLike[str], meeting: Meeting) -> Source:
    """Read the headers, and make of them what a manifest would say."""
    place = os.path.abspath(checked_path(folder))
    names = _file_names(place)
    files: list[SavedFile] = []
    tensors: dict[str, SavedTensor] = {}
    for index, name in enumerate(names):
        path = os.path.join(place, name)
        with open_tensors(path) as file:
            if file.verified and index % meeting.num_ranks == meeting.rank:
                file.read_all()  # checks each tensor; ranks share the files
            meeting.beat()
            specs = file.specs
        with base_files.opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            header_bytes = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
            files.append(SavedFile(name, size, header_bytes, zlib.crc32(os.pread(descriptor, header_bytes, 0))))
        start = header_bytes
        for spec in specs:
            key = f"model/{spec.name}"
            if key in tensors:
                raise damaged(place, f"{spec.name} in two files")
            box = Box((0,) * len(spec.shape), spec.shape)
            items = () if 0 in spec.shape else (SavedItem(index, start, box, None),)
            tensors[key] = SavedTensor(spec.dtype, spec.shape, items)
            start += spec.size_bytes
    text = json.dumps([[file.name, file.num_bytes, file.header_sum] for file in files])
    manifest = Manifest(id=f"{zlib.crc32(text.encode()):08x}", saved_at=0.0, files=tuple(files), tensors=tensors)
    return Source(place, manifest)


def _file_names(place: str) -> list[str]:
    index = os.path.join(place, _INDEX)
    if os.path.exists(index):
        try:
            with open(index, encoding="utf-8") as file:
                found = sorted(set(json.load(file)["weight_map"].values()))
            is_inside = all(os.path.basename(name) == name for name in found)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise damaged(index, f"{type(error).__name__}: {error}") from error
        if not is_inside:
            raise damaged(index, "a file outside of the folder")
        return found
    if os.path.exists(os.path.join(place, _ONE_FILE)):
        return [_ONE_FILE]
    raise FileNotFoundError(f"There are no weights in {place}: neither {_ONE_FILE} nor {_INDEX}.")
