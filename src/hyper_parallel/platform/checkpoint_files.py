"""Tensors by name in a file, the same file on both frameworks: saving and loading.

`tensor_file` has the format and its promises; a framework brings a `TensorCodec`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from hyper_parallel._base import trace
from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.files import checked_path
from hyper_parallel._base.log import get_logger
from hyper_parallel.platform import tensor_file
from hyper_parallel.platform.arguments import unknown_name
from hyper_parallel.platform.opaque import Tensor
from hyper_parallel.platform.tensor_file import TensorRecord, TensorSpec

_logger = get_logger("platform")
_FORMATS = ("safetensors",)


class LoadedTensors(dict[str, Any]):
    """Tensors by name.

    `verified`: every byte was checked against the file's seal; files of other programs have none.
    """

    verified: bool = False
    metadata: dict[str, str]


class TensorCodec(Protocol):
    """How a framework's tensors become bytes and back."""

    tensor_type: Any

    def code(self, tensor: Tensor) -> str | None:
        """Return the file's code for the tensor's dtype, or None if it has none."""

    def refusal(self, tensor: Tensor) -> str | None:
        """Say why this tensor cannot be written (no data, a part of a larger one); None if it can."""

    def content(self, tensor: Tensor) -> Any:
        """Return the tensor's bytes on the host: contiguous, little-endian."""

    def tensor(self, record: TensorRecord) -> Any:
        """Make a new tensor with a copy of the record's bytes."""


def save(tensors: object, path: str | os.PathLike[str], ckpt_format: str, codec: TensorCodec) -> None:
    """Write all tensors at `path`, whole or not at all.

    `tensors` is a dict of them; a backend makes one of a module.
    """
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError("Nothing to save.", expected="a module or a dict of tensors", got=describe(tensors))
    _check_format(ckpt_format)
    path = checked_path(path)
    specs = [_spec(name, tensor, codec) for name, tensor in tensors.items()]
    tensor_file.write_tensors(path, specs, lambda name: codec.content(tensors[name]))
    trace.emit("platform.save_checkpoint", path=path, tensors=len(specs))


def load(path: str | os.PathLike[str], ckpt_format: str, codec: TensorCodec) -> LoadedTensors:
    """Read all tensors of a file; every one is checked before the first is made."""
    _check_format(ckpt_format)
    path = checked_path(path)
    with tensor_file.open_tensors(path) as file:
        loaded = LoadedTensors({record.name: codec.tensor(record) for record in file.read_all()})
        loaded.verified = file.verified
        loaded.metadata = file.metadata
    if not loaded.verified:
        _logger.info("%s was written by another program: its tensors carry no checksums to compare", path)
    trace.emit("platform.load_checkpoint", path=path, tensors=len(loaded), verified=loaded.verified)
    return loaded


def _spec(name: Any, tensor: Any, codec: TensorCodec) -> TensorSpec:
    if not isinstance(name, str) or not isinstance(tensor, codec.tensor_type):
        raise ArgumentTypeError(
            "A checkpoint holds tensors by name.",
            expected="names and tensors",
            got=describe(tensor),
            where=f"entry {name!r}",
        )
    reason = codec.refusal(tensor)
    if reason is not None:
        raise ArgumentError(f"A tensor cannot be saved: {reason}", got=describe(tensor), where=f"entry {name!r}")
    code = codec.code(tensor)
    if code is None:
        raise ArgumentError(
            "A tensor's dtype has no place in a safetensors file.",
            got=describe(tensor),
            where=f"entry {name!r}",
            do="Cast it before saving.",
        )
    return TensorSpec(name, code, tuple(int(length) for length in tensor.shape))


def _check_format(ckpt_format: object) -> None:
    if ckpt_format not in _FORMATS:
        raise unknown_name("No such checkpoint format.", ckpt_format, _FORMATS)
