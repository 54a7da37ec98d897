"""Checkpoints from a shell: checked, shown, converted."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.core.parallel.saving import convert as converting
from hyper_parallel.core.parallel.saving import folder, hugging_face
from hyper_parallel.core.parallel.saving.manifest import Manifest
from hyper_parallel.core.parallel.saving.verify import Verified, verify

__all__ = ["Shown", "checked", "converted", "shown"]

_MOST_ROWS = 40


def checked(path: Path) -> Verified:
    """Compare every byte with the checksums."""
    return verify(path)


@dataclass(frozen=True)
class Shown:
    """What a checkpoint says of itself."""

    path: Path
    manifest: Manifest

    def as_dict(self) -> dict[str, Any]:
        found = self.manifest
        return {
            "path": str(self.path),
            "id": found.id,
            "saved_at": found.saved_at,
            "about": dict(found.about),
            "bytes": found.num_bytes,
            "files": [file.name for file in found.files],
            "tensors": {
                key: {"dtype": tensor.dtype, "shape": list(tensor.shape), "items": len(tensor.items)}
                for key, tensor in found.tensors.items()
            },
            "aliases": dict(found.aliases),
            "groups": None if found.optimizer is None else found.optimizer["groups"],
            "extra": found.extra,
        }

    def __str__(self) -> str:
        found = self.manifest
        when = datetime.datetime.fromtimestamp(found.saved_at).astimezone().isoformat(timespec="seconds")
        about = ", ".join(f"{name}: {value}" for name, value in found.about.items())
        lines = [f"{self.path}: {found.num_bytes} bytes in {len(found.files)} files, saved {when}; {about}"]
        rows = [(key, str(tensor), f"{len(tensor.items)} items") for key, tensor in found.tensors.items()]
        width = max((len(key) for key, _, _ in rows[:_MOST_ROWS]), default=0)
        lines += [f"  {key:{width}}  {text}, {items}" for key, text, items in rows[:_MOST_ROWS]]
        if len(rows) > _MOST_ROWS:
            lines.append(f"  and {len(rows) - _MOST_ROWS} more; --json has all")
        lines += [f"  {alias} is {key}" for alias, key in found.aliases.items()]
        if found.extra is not None:
            lines.append(f"extra: {found.extra}")
        return "\n".join(lines)


def shown(path: Path) -> Shown:
    """Read the manifest alone."""
    return Shown(path, folder.read_manifest(folder.target_of(path)))


def converted(source: Path, target: Path, *, to_hugging_face: bool) -> str:
    """Convert, and say to what."""
    if to_hugging_face:
        hugging_face.export_hugging_face(source, target)
        return f"{target}: the model of {source}, for Hugging Face's libraries"
    converting.convert(source, target)
    return f"{target}: {source}, converted"
