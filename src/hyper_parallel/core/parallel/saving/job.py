"""One save on one rank: what is agreed with the others, what is written, and the commit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, CommunicationError, StateError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.dtensor.boxes import Box
from hyper_parallel.core.parallel.saving import folder
from hyper_parallel.core.parallel.saving.backend import SavingBackend
from hyper_parallel.core.parallel.saving.committing import (
    manifest_of,
    name_in_file,
    wait_for_file,
    write_synced,
    written_to_json,
)
from hyper_parallel.core.parallel.saving.contents import Contents, contents_of
from hyper_parallel.core.parallel.saving.description import Description, digest_of
from hyper_parallel.core.parallel.saving.manifest import MANIFEST
from hyper_parallel.core.parallel.saving.meeting import Meeting
from hyper_parallel.core.parallel.saving.rank_file import Content, write_rank_file
from hyper_parallel.core.parallel.saving.staging import Source
from hyper_parallel.core.parallel.saving.values import to_json
from hyper_parallel.core.parallel.saving.writers import Item, WritePlan, plan_writing, size_bytes
from hyper_parallel.platform.tensor_file import TensorSpec

__all__ = ["Job", "Opened"]


_known: dict[str, Description] = {}  # by digest: what ranks held at the last save, so that it need not travel again


@dataclass(frozen=True)
class Opened:
    """What ranks agreed on when a save began."""

    path: str  # of the folder that is not committed yet
    id: str
    plan: WritePlan
    names: dict[str, str]  # canonical key -> what this rank calls it
    items: list[Item]
    optimizer_ranks: set[int]
    num_bytes: int


class Job:
    """One save on this rank, from the call to the commit."""

    target: str
    contents: Contents
    extra: Any
    keep: int | None

    def __init__(self, meeting: Meeting, backend: SavingBackend) -> None:
        self.meeting = meeting
        self.backend = backend
        self._made: folder.Partial | None = None  # by rank 0

    def prepare(self, path: object, model: object, optimizer: object, extra: object, keep: object) -> None:
        """Look at what is to be saved. Whatever is wrong with it on this rank is raised here."""
        self.target = folder.target_of(path)
        self.extra = to_json(extra, "extra")
        self.keep = _checked_keep(keep)
        self.contents = contents_of(self.backend, model, optimizer, is_written=False)

    def open(self, error: BaseException | None) -> Opened:
        """Agree with the other ranks on the folder, on what each rank holds, and on who writes what."""
        try:
            return self._open(error)
        except BaseException:
            self._discard()
            raise

    def _open(self, error: BaseException | None) -> Opened:
        meeting = self.meeting
        text = "" if error is not None else self.contents.description().to_text()
        first = meeting.round(None if error is not None else self._first(text), self._first_answer, error)
        meeting.beat()
        distinct: list[str] = first["distinct"]
        if first["wanted"]:
            mine = text if meeting.rank in first["wanted"] else None
            told = meeting.round(mine, lambda given: [given[rank] for rank in first["wanted"]])
            _learn(distinct, told)
        try:
            plan = plan_writing([_known[digest] for digest in distinct], first["of"])
        except BaseException as raised:  # all ranks have the same one, and meet once more to end alike
            meeting.round(None, _nothing, raised)
            raise
        items = plan.items[meeting.rank]
        return Opened(
            path=first["path"],
            id=first["id"],
            plan=plan,
            names={canonical: own for own, canonical in plan.names[first["of"][meeting.rank]].items()},
            items=items,
            optimizer_ranks=set(first["optimizer"]),
            num_bytes=sum(size_bytes(plan.tensors[item.key].dtype, item.box.sizes) for item in items),
        )

    def _first(self, text: str) -> dict[str, Any]:
        return {
            "target": self.target,
            "extra": digest_of(json.dumps(self.extra)),
            "keep": self.keep,
            "holds": digest_of(text),
            "optimizer": digest_of(json.dumps(self.contents.optimizer_values)),
            "known": digest_of(" ".join(sorted(_known))),
        }

    def _first_answer(self, given: list[Any]) -> Any:
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
        self._made = folder.make_partial(self.target)
        first_with: dict[str, int] = {}
        first_optimizer: dict[str, int] = {}
        for rank, entry in enumerate(given):
            first_with.setdefault(entry["holds"], rank)
            first_optimizer.setdefault(entry["optimizer"], rank)
        number_of = {digest: number for number, digest in enumerate(first_with)}
        is_same = all(entry["known"] == given[0]["known"] for entry in given)
        return {
            "path": self._made.path,
            "id": self._made.id,
            "distinct": list(first_with),
            "of": [number_of[entry["holds"]] for entry in given],
            "wanted": [rank for digest, rank in first_with.items() if not (is_same and digest in _known)],
            "optimizer": list(first_optimizer.values()),
        }

    def sources(self, opened: Opened) -> list[Source]:
        made = []
        for item in opened.items:
            held = self.contents.held[opened.names.get(item.key, item.key)]
            spec = TensorSpec(name_in_file(item, held.shape), held.dtype, item.box.sizes)
            box = item.box.inside(held.box) if item.box.sizes else item.box
            made.append(
                Source(spec, held.local, box, partial(_bytes_of, self.backend, held.local, box, held.box.sizes))
            )
        return made

    def run(self, opened: Opened, sources: Sequence[Source], note: Callable[[int], None] | None = None) -> None:
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
                shapes = {key: tensor.shape for key, tensor in opened.plan.tensors.items()}
                mine |= written_to_json(file_name, written, opened.items, shapes)
        except BaseException as raised:
            error = raised
        try:
            self.meeting.round(mine, partial(self._commit, opened), error)
        except BaseException as raised:
            if error is None and isinstance(raised, CommunicationError) and self._is_committed(opened):
                return  # rank 0 has ended, and its answer with it; it had committed
            self._discard()
            raise
        if self._made is not None:
            self._made.close()
        self.meeting.leave()

    def fail(self, opened: Opened, error: BaseException) -> None:
        """Tell the others that this rank cannot go on."""
        try:
            self.meeting.round(None, partial(self._commit, opened), error)
        except BaseException:
            self._discard()

    def _is_committed(self, opened: Opened) -> bool:
        try:
            return self._made is None and folder.read_manifest(self.target).id == opened.id
        except (OSError, ValueError):
            return False

    def _discard(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            folder.discard(made)

    def _commit(self, opened: Opened, found: list[Any]) -> None:
        """On rank 0: write the manifest and rename. What it raises, all ranks raise."""
        if self._made is None:
            raise StateError("Only rank 0 commits a checkpoint.")
        manifest = manifest_of(opened.plan, found, id=opened.id, extra=self.extra, framework=self.backend.name)
        for file in manifest.files:
            wait_for_file(os.path.join(opened.path, file.name), file.num_bytes)
        self.meeting.beat()
        with folder.explained(self.target):
            write_synced(os.path.join(opened.path, MANIFEST), manifest.to_bytes())
        folder.commit(self._made, self.target)
        if self.keep is not None:
            folder.retain(self.target, self.keep)


def _learn(distinct: list[str], texts: list[str]) -> None:
    told = {digest_of(text): Description.from_text(text) for text in texts}
    known = {digest: _known[digest] for digest in distinct if digest in _known}
    _known.clear()
    _known.update(known | told)


def _nothing(given: list[Any]) -> None:
    """What rank 0 answers where nobody goes on."""


def _bytes_of(backend: Any, local: Any, box: Box, sizes: tuple[int, ...]) -> Any:
    """The bytes of a box of a local tensor, as a flat array."""
    data = backend.bytes_of(local)
    if box.sizes == sizes:
        return data
    shaped = data.reshape(*sizes, -1)
    part = shaped[tuple(slice(start, end) for start, end in zip(box.starts, box.ends, strict=True))]
    return np.ascontiguousarray(part).reshape(-1)


def _checked_keep(keep: object) -> int | None:
    if keep is None:
        return None
    number = as_int(keep)
    if number is None:
        raise ArgumentTypeError("`keep` is a number of checkpoints.", expected="1 or more", got=describe(keep))
    if number < 1:
        raise ArgumentError("`keep` is a number of checkpoints.", expected="1 or more", got=describe(keep))
    return number


def _both(beat: Callable[[], None], note: Callable[[int], None]) -> Callable[[], None]:
    def both() -> None:
        beat()
        note(1)

    return both
