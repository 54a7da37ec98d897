"""Saving: `hp.save`, rule by rule as in the README, and `hp.Saving` for one that goes on in the background."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

import numpy as np

from hyper_parallel._base import trace
from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, CommunicationError, StateError, describe
from hyper_parallel._base.log import get_logger
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.dtensor.boxes import Box
from hyper_parallel.core.parallel.saving import folder
from hyper_parallel.core.parallel.saving.background import Saving, finish_running, keep_running
from hyper_parallel.core.parallel.saving.checksums import sums_to_text
from hyper_parallel.core.parallel.saving.contents import (
    Contents,
    backend_of,
    contents_of,
    merged_optimizer,
    parts_of_model,
)
from hyper_parallel.core.parallel.saving.description import Description, digest_of
from hyper_parallel.core.parallel.saving.manifest import MANIFEST, Manifest, SavedFile, SavedItem, SavedTensor
from hyper_parallel.core.parallel.saving.meeting import Meeting
from hyper_parallel.core.parallel.saving.meetings import new_meeting
from hyper_parallel.core.parallel.saving.rank_file import Content, Written, write_rank_file
from hyper_parallel.core.parallel.saving.staging import staged
from hyper_parallel.core.parallel.saving.values import to_json
from hyper_parallel.core.parallel.saving.writers import Item, WritePlan, plan_writing
from hyper_parallel.platform.arguments import check_flag
from hyper_parallel.platform.tensor_file import TensorSpec

__all__ = ["save"]

_logger = get_logger("saving")


@overload
def save(
    path: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any = ...,
    extra: Any = ...,
    background: Literal[False] = ...,
    keep: int | None = ...,
    timeout: float = ...,
) -> None: ...


@overload
def save(
    path: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any = ...,
    extra: Any = ...,
    background: Literal[True],
    keep: int | None = ...,
    timeout: float = ...,
) -> Saving: ...


def save(
    path: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any = None,
    extra: Any = None,
    background: bool = False,
    keep: int | None = None,
    timeout: float = 600.0,
) -> Saving | None:
    """Save a model, and an optimizer with it, as one folder. All ranks make the call.

    After any exception, kill or power cut the folder at `path` is the old one or the new one, never a mix.

    Args:
        path: the folder. It may be there if it is an earlier checkpoint of this format.
        model: a module or cell, its parameters plain or distributed; a list of `hp.PipelineStage`; an `hp.Pipeline`.
            Plain tensors of one name on several ranks count as copies.
        optimizer: its state is saved by the names of the model's parameters.
        extra: plain values, the same on every rank, which `load` returns.
        background: return as soon as the values are copied, and write while training goes on.
        keep: how many checkpoints to leave in the parent folder; older ones are removed after the commit.
        timeout: after how many seconds without progress a rank is given up and named.

    Returns: with `background` a `Saving`, else None.

    Raises:
        OSError: the disk is full or read-only, or a folder may not be written. An earlier checkpoint is unchanged.
        CommunicationError: another rank could not save, or does not answer; it is named.
        ValueError, TypeError: an argument that cannot be used, or a tensor that cannot be saved.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> model = torch.nn.Linear(4, 2)
        >>> hp.save("ckpt/step-100", model=model, extra={"step": 100})
        >>> hp.load("ckpt/step-100", model=model)
        {'step': 100}
    """
    finish_running()
    parts = parts_of_model(model)
    backend = backend_of(parts, "save")
    meeting = new_meeting("save", backend, path, timeout)
    job: _Job | None = None
    error: BaseException | None = None
    try:
        job = _Job(
            meeting=meeting,
            target=folder.target_of(path),
            contents=contents_of(backend, parts, optimizer, is_written=False),
            extra=to_json(extra, "extra"),
            keep=_checked_keep(keep),
        )
        check_flag(background, "background")
    except BaseException as raised:
        error = raised
    begun = time.perf_counter()
    opened = _open(meeting, job, error)
    if job is None:  # for the type checker: a round with an error raises
        raise StateError("A save has begun that cannot.")
    if not background:
        job.run(opened, job.sources(opened))
        _report(job, opened, begun)
        return None
    try:
        sources = staged(job.sources(opened), backend)
    except BaseException as raised:
        job.fail(opened, raised)
        raise
    saving = Saving(os.fspath(path), opened.num_bytes)

    def write() -> None:
        job.run(opened, sources, saving.note)
        _report(job, opened, begun)

    saving.start(write)
    keep_running(saving)
    return saving


@dataclass(frozen=True)
class _Opened:
    """What ranks agreed on when a save began."""

    partial: folder.Partial | None  # on rank 0
    path: str
    id: str
    plan: WritePlan
    names: dict[str, str]  # canonical key -> what this rank calls it
    items: list[Item]
    optimizer_ranks: set[int]
    num_bytes: int


@dataclass(frozen=True)
class Source:
    """A piece of a tensor that this rank writes: its name in the file, and its bytes when they are asked for."""

    spec: TensorSpec
    local: Any
    box: Box  # in the local tensor
    read: Callable[[], Any]


@dataclass
class _Job:
    """One save on this rank, from the call to the commit."""

    meeting: Meeting
    target: str
    contents: Contents
    extra: Any
    keep: int | None

    def sources(self, opened: _Opened) -> list[Source]:
        backend = self.contents.backend
        made = []
        for item in opened.items:
            held = self.contents.held[opened.names.get(item.key, item.key)]
            spec = TensorSpec(name_in_file(item, held.shape), held.dtype, item.box.sizes)
            box = item.box.inside(held.box) if item.box.sizes else item.box
            made.append(Source(spec, held.local, box, partial(_bytes_of, backend, held.local, box, held.box.sizes)))
        return made

    def run(self, opened: _Opened, sources: Sequence[Source], note: Callable[[int], None] | None = None) -> None:
        """Write this rank's file, and commit with the others."""
        error: BaseException | None = None
        mine: Any = None
        file_name = f"rank-{self.meeting.rank:05d}.safetensors"
        try:
            mine = {"optimizer": None}
            if self.meeting.rank in opened.optimizer_ranks:
                mine["optimizer"] = self.contents.optimizer_values
            if sources:
                progress = self.meeting.beat if note is None else _both(self.meeting.beat, note)
                contents = [Content(source.spec, source.read) for source in sources]
                written = write_rank_file(os.path.join(opened.path, file_name), contents, self.target, progress)
                mine |= _written_to_json(file_name, written, opened.items, self.contents, opened.names)
        except BaseException as raised:
            error = raised
        try:
            self.meeting.round(mine, partial(self._commit, opened), error)
        except BaseException as raised:
            if error is None and isinstance(raised, CommunicationError) and self._is_committed(opened):
                return  # rank 0 has ended, and its answer with it; it had committed
            self._discard(opened)
            raise
        if opened.partial is not None:
            opened.partial.close()
        self.meeting.leave()

    def fail(self, opened: _Opened, error: BaseException) -> None:
        """Tell the others that this rank cannot go on."""
        try:
            self.meeting.round(None, partial(self._commit, opened), error)
        except BaseException:
            self._discard(opened)

    def _is_committed(self, opened: _Opened) -> bool:
        try:
            return opened.partial is None and folder.read_manifest(self.target).id == opened.id
        except (OSError, ValueError):
            return False

    def _discard(self, opened: _Opened) -> None:
        if opened.partial is not None:
            folder.discard(opened.partial)

    def _commit(self, opened: _Opened, found: list[Any]) -> None:
        """On rank 0: write the manifest and rename. What it raises, all ranks raise."""
        if opened.partial is None:
            raise StateError("Only rank 0 commits a checkpoint.")
        manifest = _manifest_of(opened, found, self)
        for file in manifest.files:
            _wait_for_file(os.path.join(opened.path, file.name), file.num_bytes)
        self.meeting.beat()
        with folder.explained(self.target):
            _write_synced(os.path.join(opened.path, MANIFEST), manifest.to_bytes())
        folder.commit(opened.partial, self.target)
        if self.keep is not None:
            folder.retain(self.target, self.keep)


def name_in_file(item: Item, shape: tuple[int, ...]) -> str:
    """Name an item in its file: the key, and the box where it is not the whole tensor."""
    if item.box.sizes == shape:
        return item.key
    ranges = ", ".join(f"{start}:{end}" for start, end in zip(item.box.starts, item.box.ends, strict=True))
    return f"{item.key}[{ranges}]"


_known: dict[str, Description] = {}  # by digest: what ranks held at the last save, so that it need not travel again


def _open(meeting: Meeting, job: _Job | None, error: BaseException | None) -> _Opened:
    """Agree on the folder, on what each rank holds, and on who writes what."""
    text, mine = "", None
    made: list[folder.Partial] = []
    if job is not None and error is None:
        text = job.contents.description().to_text()
        mine = {
            "target": job.target,
            "extra": digest_of(json.dumps(job.extra)),
            "keep": job.keep,
            "holds": digest_of(text),
            "optimizer": digest_of(json.dumps(job.contents.optimizer_values)),
            "known": digest_of(" ".join(sorted(_known))),
        }
    try:
        first = meeting.round(mine, partial(_first_answer, made), error)
        if job is None:
            raise StateError("A save has begun that cannot.")
        meeting.beat()
        digests: list[str] = first["holds"]
        if first["wanted"]:
            texts = meeting.round(
                text if meeting.rank in first["wanted"] else None, lambda given: [given[rank] for rank in first["wanted"]]
            )
            told = {digest_of(told): Description.from_text(told) for told in texts}
            known = {digest: _known[digest] for digest in set(digests) if digest in _known}
            _known.clear()
            _known.update(known | told)
        distinct = list(dict.fromkeys(digests))
        index = {digest: number for number, digest in enumerate(distinct)}
        try:
            plan = plan_writing([_known[digest] for digest in distinct], [index[digest] for digest in digests])
        except BaseException as raised:
            job.fail(_Opened(made[0] if made else None, "", "", WritePlan([], {}, {}, []), {}, [], set(), 0), raised)
            made.clear()
            raise
    except BaseException:
        if made:
            folder.discard(made[0])
        raise
    own_names = {canonical: own for own, canonical in plan.names[index[digests[meeting.rank]]].items()}
    items = plan.items[meeting.rank]
    num_bytes = sum(TensorSpec("", plan.tensors[item.key].dtype, item.box.sizes).size_bytes for item in items)
    return _Opened(
        made[0] if made else None, first["path"], first["id"], plan, own_names, items, set(first["optimizer"]), num_bytes
    )


def _first_answer(made: list[folder.Partial], given: list[Any]) -> Any:
    """On rank 0: hold what ranks want against each other, and make the folder."""
    words = {"target": "folder", "extra": "`extra`", "keep": "`keep`"}
    for name, word in words.items():
        others = [str(rank) for rank, entry in enumerate(given) if entry[name] != given[0][name]]
        if others:
            raise ArgumentError(
                f"All ranks save with the same {word}.",
                expected=f"that of rank 0{'' if name == 'extra' else ', ' + describe(given[0][name])}",
                got=f"another one on rank {', '.join(others)}",
                do="Gather what differs from rank to rank first, for example by `platform.all_gather_object`.",
            )
    made.append(folder.make_partial(given[0]["target"]))
    first_with: dict[str, int] = {}
    first_optimizer: dict[str, int] = {}
    for rank, entry in enumerate(given):
        first_with.setdefault(entry["holds"], rank)
        first_optimizer.setdefault(entry["optimizer"], rank)
    is_same = all(entry["known"] == given[0]["known"] for entry in given)
    wanted = [rank for digest, rank in first_with.items() if not (is_same and digest in _known)]
    return {
        "path": made[0].path,
        "id": made[0].id,
        "holds": [entry["holds"] for entry in given],
        "wanted": wanted,
        "optimizer": list(first_optimizer.values()),
    }


def _bytes_of(backend: Any, local: Any, box: Box, sizes: tuple[int, ...]) -> Any:
    """The bytes of a box of a local tensor, as a flat array."""
    data = backend.bytes_of(local)
    if box.sizes == sizes:
        return data
    shaped = data.reshape(*sizes, -1)
    part = shaped[tuple(slice(start, end) for start, end in zip(box.starts, box.ends, strict=True))]
    return np.ascontiguousarray(part).reshape(-1)


def _written_to_json(
    file_name: str, written: Written, items: Sequence[Item], contents: Contents, names: dict[str, str]
) -> dict[str, Any]:
    places = []
    for item in items:
        name = name_in_file(item, contents.held[names.get(item.key, item.key)].shape)
        places.append([written.starts[name], sums_to_text(written.sums[name])])
    return {"file": [file_name, written.num_bytes, written.header_bytes, written.header_sum], "places": places}


def _manifest_of(opened: _Opened, found: list[Any], job: _Job) -> Manifest:
    files: list[SavedFile] = []
    rows: dict[str, list[SavedItem]] = {key: [] for key in opened.plan.tensors}
    for rank, entry in enumerate(found):
        if "file" not in entry:
            continue
        for item, (start, sums) in zip(opened.plan.items[rank], entry["places"], strict=True):
            rows[item.key].append(SavedItem(len(files), start, item.box, sums))
        files.append(SavedFile(*entry["file"]))
    return Manifest(
        id=opened.id,
        saved_at=time.time(),
        files=tuple(files),
        tensors={
            key: SavedTensor(tensor.dtype, tensor.shape, tuple(rows[key]))
            for key, tensor in opened.plan.tensors.items()
        },
        aliases=opened.plan.aliases,
        optimizer=merged_optimizer(entry["optimizer"] for entry in found),
        extra=job.extra,
        about={"framework": job.contents.backend.name, "ranks": job.meeting.num_ranks},
    )


def _wait_for_file(path: str, num_bytes: int, timeout_s: float = 30.0) -> None:
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


def _write_synced(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked_keep(keep: object) -> int | None:
    if keep is None:
        return None
    number = as_int(keep)
    if number is None:
        raise ArgumentTypeError("`keep` is a number of checkpoints.", expected="1 or more", got=describe(keep))
    if number < 1:
        raise ArgumentError("`keep` is a number of checkpoints.", expected="1 or more", got=describe(keep))
    return number


def _report(job: _Job, opened: _Opened, begun: float) -> None:
    seconds = time.perf_counter() - begun
    rate = opened.num_bytes / seconds / 2**30
    _logger.info("saved %s: %d bytes of this rank in %.2f s, %.2f GiB/s", job.target, opened.num_bytes, seconds, rate)
    trace.emit("saving.save", path=job.target, bytes=opened.num_bytes, seconds=seconds)


def _both(beat: Callable[[], None], note: Callable[[int], None]) -> Callable[[], None]:
    def both() -> None:
        beat()
        note(1)

    return both

