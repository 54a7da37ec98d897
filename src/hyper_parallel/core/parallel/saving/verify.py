"""Checking a checkpoint without a model: `hp.verify`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hyper_parallel.core.dtensor.boxes import Box
from hyper_parallel.core.parallel.saving import folder
from hyper_parallel.core.parallel.saving.files import Files, Wanted
from hyper_parallel.core.parallel.saving.manifest import Manifest
from hyper_parallel.core.parallel.saving.reading import parts_of

__all__ = ["Verified", "verify"]


@dataclass(frozen=True)
class Verified:
    """What was checked. `saved_at` is in seconds since 1970."""

    path: str
    num_files: int
    num_tensors: int
    num_bytes: int
    saved_at: float

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.num_tensors} tensors, {self.num_bytes} bytes in {self.num_files} files, all as written"
        )


def verify(path: str | os.PathLike[str]) -> Verified:
    """Read all of a checkpoint, and compare every byte with the checksums. One process does; no framework is needed.

    Raises:
        DamagedFileError: a byte is not what was written, or a file is missing; a ValueError.
        FileNotFoundError: there is no checkpoint.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> hp.save("ckpt/checked", model=torch.nn.Linear(4, 2))
        >>> hp.verify("ckpt/checked").num_tensors
        2
    """
    target = folder.target_of(path)
    manifest = folder.read_manifest(target)
    with Files(target, manifest.files) as files:
        for index in range(len(manifest.files)):
            files.open(index)
        files.check(everything(manifest), lambda: None)
    return Verified(os.fspath(path), len(manifest.files), len(manifest.tensors), manifest.num_bytes, manifest.saved_at)


def everything(manifest: Manifest) -> list[Wanted]:
    """All tensors of a checkpoint, whole."""
    return [
        Wanted(key, tensor, parts_of(tensor, Box((0,) * len(tensor.shape), tensor.shape)))
        for key, tensor in manifest.tensors.items()
    ]
