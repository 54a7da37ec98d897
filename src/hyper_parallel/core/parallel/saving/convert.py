"""From and to PyTorch's own distributed checkpoints (DCP): `hp.convert`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.boxes import Box
from hyper_parallel.core.parallel.saving import folder
from hyper_parallel.core.parallel.saving.background import finish_running
from hyper_parallel.core.parallel.saving.checksums import sums_to_text
from hyper_parallel.core.parallel.saving.committing import write_synced
from hyper_parallel.core.parallel.saving.contents import split_state_key
from hyper_parallel.core.parallel.saving.files import Files
from hyper_parallel.core.parallel.saving.manifest import MANIFEST, Manifest, SavedFile, SavedItem, SavedTensor
from hyper_parallel.core.parallel.saving.rank_file import Content, write_rank_file
from hyper_parallel.core.parallel.saving.values import from_json, to_json
from hyper_parallel.core.parallel.saving.verify import everything
from hyper_parallel.platform import get_torch_platform
from hyper_parallel.platform.selection import backend
from hyper_parallel.platform.tensor_file import TensorSpec

__all__ = ["DcpBackend", "DcpContents", "convert"]


class DcpTensor(NamedTuple):
    """A tensor of a DCP folder. `read` gives its bytes, whole."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Any]


class DcpContents(NamedTuple):
    """What a DCP folder has, by the paths in the state dict that was saved: ("model", "layer.weight")."""

    tensors: Mapping[tuple[Any, ...], DcpTensor]
    values: Mapping[tuple[Any, ...], Any]


class DcpBackend(Protocol):
    """PyTorch's part."""

    folder: ClassVar[str] = "parallel.dcp"

    def is_dcp(self, path: str) -> bool: ...

    def read(self, path: str) -> DcpContents:
        """Look at a DCP folder. What is in its pickles is held against a list: nothing else is made, no code runs."""

    def write(self, path: str, state: Mapping[str, Any], tensor: Callable[[Any], Any]) -> None:
        """Write a state dict as a DCP folder; `tensor` makes (dtype, shape, bytes) of leaves that are tensors."""


class _Leaf:
    """A tensor of the checkpoint in the state dict that is written."""

    def __init__(self, key: str) -> None:
        self.key = key


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Make of a DCP folder a checkpoint of this format, or of such a checkpoint a DCP folder; the source tells which.

    In a DCP folder the model is under "model", or is all of the state dict; the optimizer is under "optimizer" or
    "optim", by names of parameters, as `torch.distributed.checkpoint.state_dict.get_state_dict` gives it. One process
    does, with PyTorch.

    Raises:
        DamagedFileError: the checkpoint is not what was written, or the pickles of the DCP folder hold what tensors and
            plain values do not need.
        ValueError: the source is neither, or the target is there.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> import torch.distributed.checkpoint as dcp
        >>> model = torch.nn.Linear(4, 2)
        >>> hp.save("ckpt/step-3", model=model)
        >>> hp.convert("ckpt/step-3", "as-dcp")
        >>> dcp.load({"model": model.state_dict()}, checkpoint_id="as-dcp", no_dist=True)
    """
    finish_running()
    origin, place = folder.target_of(source), folder.target_of(target)
    formats = backend(get_torch_platform(), DcpBackend, "convert")
    if os.path.lexists(place) and not (os.path.isdir(place) and not os.listdir(place)):
        raise ArgumentError("The target is there already.", expected="a new folder", where=place)
    if folder.is_checkpoint(origin):
        _to_dcp(origin, place, formats)
    elif formats.is_dcp(origin):
        _from_dcp(formats.read(origin), place)
    else:
        raise ArgumentError(
            "This is no checkpoint that could be converted.",
            expected="a folder with a manifest.json of this format, or with PyTorch's .metadata",
            where=origin,
        )


def _to_dcp(origin: str, place: str, formats: DcpBackend) -> None:
    manifest = folder.read_manifest(origin)
    state: dict[str, Any] = {"model": {}}
    for key in manifest.tensors:
        if key.startswith("model/"):
            state["model"][key.removeprefix("model/")] = _Leaf(key)
    for alias, key in manifest.aliases.items():
        if alias.startswith("model/"):
            state["model"][alias.removeprefix("model/")] = _Leaf(key)
    if manifest.optimizer is not None:
        states: dict[str, dict[str, Any]] = {}
        for key in manifest.tensors:
            if key.startswith("optimizer/"):
                param, name = split_state_key(key)
                states.setdefault(param, {})[name] = _Leaf(key)
        for param, values in manifest.optimizer["values"].items():
            states.setdefault(param, {}).update(from_json(values))
        groups = [{"params": group["params"], **from_json(group["options"])} for group in manifest.optimizer["groups"]]
        state["optimizer"] = {"state": states, "param_groups": groups}
    if manifest.extra is not None:
        state["extra"] = from_json(manifest.extra)
    partial = folder.make_partial(place)
    try:
        with Files(origin, manifest.files) as files:
            wanted = {found.key: found for found in everything(manifest)}

            def tensor(leaf: Any) -> Any:
                if not isinstance(leaf, _Leaf):
                    return None
                found = wanted[leaf.key]
                files.check([found], lambda: None)
                data = np.empty(found.tensor.num_bytes, np.uint8)
                if data.size:
                    files.read_tensor(found, Box((0,) * len(found.tensor.shape), found.tensor.shape), data)
                return found.tensor.dtype, found.tensor.shape, data

            formats.write(partial.path, state, tensor)
        folder.commit(partial, place)
    except BaseException:
        folder.discard(partial)
        raise
    partial.close()


def _from_dcp(found: DcpContents, place: str) -> None:
    keys: dict[str, DcpTensor] = {}
    for path, tensor in found.tensors.items():
        keys[_key_of(path)] = tensor
    optimizer, extra = _values_of(found.values, has_state=any(key.startswith("optimizer/") for key in keys))
    partial = folder.make_partial(place)
    try:
        specs = {key: TensorSpec(key, tensor.dtype, tensor.shape) for key, tensor in keys.items()}
        contents = [Content(specs[key], tensor.read) for key, tensor in keys.items()]
        name = "rank-00000.safetensors"
        written = write_rank_file(os.path.join(partial.path, name), contents, place, lambda: None)
        tensors = {}
        for key, tensor in keys.items():
            box = Box((0,) * len(tensor.shape), tensor.shape)
            items = (SavedItem(0, written.starts[key], box, sums_to_text(written.sums[key])),)
            tensors[key] = SavedTensor(tensor.dtype, tensor.shape, () if 0 in tensor.shape else items)
        file = SavedFile(name, written.num_bytes, written.header_bytes, written.header_sum)
        manifest = Manifest(
            id=partial.id, saved_at=time.time(), files=(file,), tensors=tensors, optimizer=optimizer, extra=extra,
            about={"framework": "PyTorch's DCP", "ranks": 1},
        )  # fmt: skip
        with folder.explained(place):
            write_synced(os.path.join(partial.path, MANIFEST), manifest.to_bytes())
        folder.commit(partial, place)
    except BaseException:
        folder.discard(partial)
        raise
    partial.close()


_OPTIMIZERS = ("optimizer", "optim")


def _key_of(path: tuple[Any, ...]) -> str:
    if len(path) == 1:
        return f"model/{path[0]}"
    if path[0] == "model" and len(path) == 2:
        return f"model/{path[1]}"
    if path[0] in _OPTIMIZERS and len(path) == 4 and path[1] == "state":
        return f"optimizer/{path[2]}/{path[3]}"
    raise ArgumentError(
        "A tensor of the DCP folder is neither of a model nor of an optimizer.",
        expected='it under "model", under "optimizer", or alone',
        got=".".join(map(str, path)),
        do="Save it anew with DCP, with the model under \"model\".",
    )  # fmt: skip


def _values_of(values: Mapping[tuple[Any, ...], Any], *, has_state: bool) -> tuple[Any, Any]:
    """Put plain values where they belong: options and state of the optimizer, and all else into `extra`."""
    groups: dict[int, dict[str, Any]] = {}
    states: dict[str, dict[str, Any]] = {}
    extra: dict[str, Any] = {}
    for path, value in values.items():
        if path[0] in _OPTIMIZERS and len(path) > 1 and path[1] == "param_groups":
            if len(path) == 2:
                groups |= {index: dict(group) for index, group in enumerate(value)}
            elif len(path) == 3:
                groups.setdefault(path[2], {}).update(value)
            else:
                groups.setdefault(path[2], {})[path[3]] = value
        elif path[0] in _OPTIMIZERS and len(path) == 4 and path[1] == "state":
            states.setdefault(path[2], {})[path[3]] = to_json(value, ".".join(map(str, path)))
        elif path[0] == "extra" and len(path) == 1:
            extra = value
        else:
            level = extra
            for step in path[1 if path[0] == "extra" else 0 : -1]:
                level = level.setdefault(step, {})
            level[path[-1]] = value
    optimizer = None
    if groups or states or has_state:
        made = []
        for _, group in sorted(groups.items()):
            params = list(group.pop("params", []))
            made.append({"params": params, "options": to_json(group, "a parameter group")})
        optimizer = {"groups": made, "values": states}
    return optimizer, to_json(extra, "extra") if extra else None
