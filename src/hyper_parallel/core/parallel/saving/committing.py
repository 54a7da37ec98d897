"""What rank 0 makes of what all ranks have written: the manifest, and when every file is there."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.parallel.saving.checksums import sums_to_text
from hyper_parallel.core.parallel.saving.contents import merged_optimizer
from hyper_parallel.core.parallel.saving.manifest import Manifest, SavedFile, SavedItem, SavedTensor
from hyper_parallel.core.parallel.saving.rank_file import Written
from hyper_parallel.core.parallel.saving.writers import Item, WritePlan

__all__ = ["manifest_of", "name_in_file", "wait_for_file", "write_synced", "written_to_json"]


def name_in_file(item: Item, shape: tuple[int, ...]) -> str:
    """Name an item in its file: the key, and the box where it is not the whole tensor."""
    if item.box.sizes == shape:
        return item.key
    ranges = ", ".join(f"{start}:{end}" for start, end in zip(item.box.starts, item.box.ends, strict=True))
    return f"{item.key}[{ranges}]"


def written_to_json(
    file_name: str, written: Written, items: Sequence[Item], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """What a rank tells of its file."""
    places = []
    for item in items:
        name = name_in_file(item, shapes[item.key])
        places.append([written.starts[name], sums_to_text(written.sums[name])])
    return {"file": [file_name, written.num_bytes, written.header_bytes, written.header_sum], "places": places}


def manifest_of(plan: WritePlan, found: Sequence[Any], *, id: str, extra: Any, framework: str) -> Manifest:
    """Put together what all ranks tell, by rank."""
    files: list[SavedFile] = []
    rows: dict[str, list[SavedItem]] = {key: [] for key in plan.tensors}
    for rank, entry in enumerate(found):
        if "file" not in entry:
            continue
        for item, (start, sums) in zip(plan.items[rank], entry["places"], strict=True):
            rows[item.key].append(SavedItem(len(files), start, item.box, sums))
        files.append(SavedFile(*entry["file"]))
    return Manifest(
        id=id,
        saved_at=time.time(),
        files=tuple(files),
        tensors={
            key: SavedTensor(tensor.dtype, tensor.shape, tuple(rows[key])) for key, tensor in plan.tensors.items()
        },
        aliases=plan.aliases,
        optimizer=merged_optimizer(entry["optimizer"] for entry in found),
        extra=extra,
        about={"framework": framework, "ranks": len(found)},
    )


def wait_for_file(path: str, num_bytes: int, timeout_s: float = 30.0) -> None:
    """Wait until a file that another rank has synced is seen here: a network's file system shows it late."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            got = os.stat(path).st_size
        except FileNotFoundError:
            got = -1
        if got == num_bytes:
            return
        if time.monotonic() > deadline:
            raise StateError(
                "Rank 0 does not see what another rank has written.",
                expected=f"{num_bytes} bytes",
                got="no such file" if got < 0 else f"{got} bytes",
                where=path,
                do="Save to a folder that all ranks share.",
            )
        time.sleep(0.05)


def write_synced(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
