"""Loading: `hp.load`. First all ranks check all that they will read; then, and only then, the model is written to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel._base import trace
from hyper_parallel._base.errors import ArgumentError, StateError
from hyper_parallel._base.log import get_logger
from hyper_parallel.core.parallel.saving import folder
from hyper_parallel.core.parallel.saving.backend import Held, SavingBackend
from hyper_parallel.core.parallel.saving.background import finish_running
from hyper_parallel.core.parallel.saving.checksums import CHUNK_BYTES
from hyper_parallel.core.parallel.saving.contents import (
    Contents,
    backend_of,
    contents_of,
    split_state_key,
    state_key,
)
from hyper_parallel.core.parallel.saving.files import Files, Wanted
from hyper_parallel.core.parallel.saving.manifest import Manifest, SavedTensor
from hyper_parallel.core.parallel.saving.meeting import Meeting
from hyper_parallel.core.parallel.saving.meetings import new_meeting
from hyper_parallel.core.parallel.saving.reading import parts_of
from hyper_parallel.core.parallel.saving.threads import for_each, num_threads
from hyper_parallel.core.parallel.saving.values import from_json
from hyper_parallel.platform.arguments import check_flag

__all__ = ["load"]

_logger = get_logger("saving")
_MOST_NAMES = 5


def load(
    path: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any = None,
    strict: bool = True,
    timeout: float = 600.0,
) -> Any:
    """Load a checkpoint into a model, and into an optimizer. All ranks make the call.

    The model may be cut and distributed in another way than the one that was saved, on another number of ranks, and
    with the other framework. Each rank reads what it needs. If anything is wrong on any rank, nothing is touched.

    Args:
        path: the folder of a checkpoint.
        model: as in `save`; its parameters have memory already.
        optimizer: gets its state by names of parameters. Without it, state in the checkpoint is left alone.
        strict: whether names and dtypes have to be the same. Without it what both have is loaded, and cast.
        timeout: after how many seconds without progress a rank is given up and named.

    Returns: what `extra` was when it was saved.

    Raises:
        DamagedFileError: a byte is not what was written; a ValueError.
        FileNotFoundError: there is no checkpoint.
        ValueError: names, shapes or dtypes differ.
        CommunicationError: another rank could not load, or does not answer; it is named.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> hp.save("ckpt/first", model=torch.nn.Linear(4, 2), extra={"step": 1})
        >>> hp.load("ckpt/first", model=torch.nn.Linear(4, 2))
        {'step': 1}
    """
    finish_running()
    backend, no_model = backend_of(model, "load")
    meeting = new_meeting("load", backend, path, timeout)

    def source() -> Source:
        if no_model is not None:
            raise no_model
        target = folder.target_of(path)
        return Source(target, folder.read_manifest(target))

    extra = load_from(source, backend, model, optimizer, strict, meeting)
    return from_json(extra)


@dataclass(frozen=True)
class Source:
    """What is loaded: files in a folder, and what they hold."""

    folder: str
    manifest: Manifest


@dataclass(frozen=True)
class _Target:
    """A tensor of this rank that is to be loaded."""

    wanted: Wanted
    held: Held


def load_from(
    make_source: Any, backend: SavingBackend, model: Any, optimizer: Any, strict: bool, meeting: Meeting
) -> Any:
    """Load what `make_source` finds, in two phases; return its `extra`."""
    begun = time.perf_counter()
    error: BaseException | None = None
    loading: _Loading | None = None
    mine: Any = None
    try:
        check_flag(strict, "strict")
        source = make_source()
        contents = contents_of(backend, model, optimizer, is_written=True)
        loading = _Loading(source, contents, strict)
        num_bytes = loading.files.check((target.wanted for target in loading.targets), meeting.beat)
        mine = {"id": source.manifest.id, "used": hex(loading.used_bits())}
    except BaseException as raised:
        error = raised
    try:
        answer = meeting.round(mine, _agree, error)
        if loading is None:
            raise StateError("A load has begun that cannot.")
        loading.check_all_used(int(answer["used"], 16))
        loading.write()
    finally:
        if loading is not None:
            loading.files.close()
    meeting.leave()
    seconds = time.perf_counter() - begun
    _logger.info("loaded %s: %d bytes of this rank in %.2f s, %.2f GiB/s",
                 loading.source.folder, num_bytes, seconds, num_bytes / seconds / 2**30)  # fmt: skip
    trace.emit("saving.load", path=loading.source.folder, bytes=num_bytes, seconds=seconds)
    return loading.source.manifest.extra


def _agree(given: Sequence[Any]) -> Any:
    """On rank 0: all ranks have read the same manifest; what all of them use."""
    others = [str(rank) for rank, entry in enumerate(given) if entry["id"] != given[0]["id"]]
    if others:
        raise ArgumentError(
            "The ranks load different checkpoints.",
            expected=f"save {given[0]['id']} on all ranks",
            got=f"another one on rank {', '.join(others)}",
            do="Give all ranks the same folder; ask `hp.latest` on one rank and tell the others.",
        )
    used = 0
    for entry in given:
        used |= int(entry["used"], 16)
    return {"used": hex(used)}


class _Loading:
    """One load on this rank. Making it changes nothing; `write` does."""

    def __init__(self, source: Source, contents: Contents, strict: bool) -> None:
        self.source = source
        self.targets: list[_Target] = []
        self.files = Files(source.folder, source.manifest.files)
        self._contents = contents
        self._strict = strict
        self._keys = {key: number for number, key in enumerate(sorted(source.manifest.tensors))}
        self._used: set[str] = set()
        self._add_model()
        self._has_optimizer = contents.optimizer is not None
        if self._has_optimizer:
            self._add_optimizer()

    def used_bits(self) -> int:
        return sum(1 << self._keys[key] for key in self._used)

    def check_all_used(self, used: int) -> None:
        """Raise where the checkpoint has tensors that no rank has a place for; the same on all ranks."""
        if not self._strict:
            return
        kinds = ("model/", "optimizer/") if self._has_optimizer else ("model/",)
        left = [key for key, number in self._keys.items() if key.startswith(kinds) and not used >> number & 1]
        if left:
            raise ArgumentError(
                "The checkpoint has tensors that the model has not.",
                expected="the same names",
                got=_some(left),
                where=self.source.folder,
                do="Build the model that was saved, or load with strict=False.",
            )

    def write(self) -> None:
        """Write to the model: all has been checked."""
        backend = self._contents.backend
        direct: list[tuple[_Target, Any]] = []
        others: list[tuple[_Target, Any]] = []
        for target in self.targets:
            if target.held.box.is_empty or 0 in target.held.shape:
                continue
            memory = None
            if target.held.dtype == target.wanted.tensor.dtype:
                memory = backend.own_bytes(target.held.local)
            (others if memory is None else direct).append((target, memory))

        def read(pair: tuple[_Target, Any]) -> None:
            self.files.read_tensor(pair[0].wanted, pair[0].held.box, pair[1])

        is_small = sum(memory.size for _, memory in direct) <= 4 * CHUNK_BYTES
        for_each(direct, read, 1 if is_small else num_threads(), lambda: None)
        for target, _ in direct:
            backend.note_written(target.held.local)
        for target, _ in others:
            num_bytes = target.held.box.num_elements * target.wanted.tensor.element_bytes
            data = np.empty(num_bytes, np.uint8)
            self.files.read_tensor(target.wanted, target.held.box, data)
            backend.write(target.held.local, target.wanted.tensor.dtype, data)
        if self._contents.optimizer is not None:
            self._contents.optimizer.assign(self._state_values, self._options)

    def _add_model(self) -> None:
        manifest, contents = self.source.manifest, self._contents
        missing: list[str] = []
        further: dict[str, list[str]] = {}
        for alias, key in contents.aliases.items():
            further.setdefault(key, []).append(alias)
        for key, held in contents.held.items():
            found: dict[str, SavedTensor] = {}
            for name in (key, *further.get(key, ())):
                tensor = manifest.find(name)
                if tensor is not None:
                    found[manifest.aliases.get(name, name)] = tensor
            if not found:
                missing.append(key)
                continue
            self._used.update(found)
            (canonical, tensor), *others = found.items()
            for other, apart in others:
                self._check_tied(canonical, tensor, other, apart)
            self._add(canonical, tensor, held, key)
        if missing and self._strict:
            raise ArgumentError(
                "The model has tensors that the checkpoint has not.",
                expected="the same names",
                got=_some(missing),
                where=self.source.folder,
                do="Build the model that was saved, or load with strict=False, which leaves these as they are.",
            )

    def _add(self, canonical: str, tensor: SavedTensor, held: Held, name: str) -> None:
        if tensor.shape != held.shape:
            raise ArgumentError(
                "A tensor has another shape in the checkpoint.",
                expected=str(tensor),
                got=f"{held.dtype}{list(held.shape)} in the model",
                where=_bare(name),
                do="Build the model that was saved.",
            )
        if tensor.dtype != held.dtype and self._strict:
            raise ArgumentError(
                "A tensor has another dtype in the checkpoint.",
                expected=str(tensor),
                got=f"{held.dtype}{list(held.shape)} in the model",
                where=_bare(name),
                do="Build the model in that dtype, or load with strict=False, which casts.",
            )
        self._used.add(canonical)
        self.targets.append(_Target(Wanted(canonical, tensor, parts_of(tensor, held.box)), held))

    def _check_tied(self, key: str, tensor: SavedTensor, other: str, apart: SavedTensor) -> None:
        """The model has one tensor where the checkpoint has two: right only if these are equal."""
        if self._strict and _content(tensor) != _content(apart):
            raise ArgumentError(
                "The model ties two tensors that are not equal in the checkpoint.",
                expected="one tensor, or two with equal values saved alike",
                got=f"{_bare(key)} and {_bare(other)}",
                where=self.source.folder,
                do=f"Untie them, or load with strict=False, which takes {_bare(key)}.",
            )

    def _add_optimizer(self) -> None:
        manifest, optimizer = self.source.manifest, self._contents.optimizer
        saved = manifest.optimizer
        if optimizer is None:
            return
        if saved is None:
            if self._strict:
                raise ArgumentError(
                    "The checkpoint has no state of an optimizer.",
                    where=self.source.folder,
                    do="Load without `optimizer`, or with strict=False.",
                )
            self._contents.optimizer = None
            return
        local_names = self._local_names(optimizer.groups(), optimizer.states())
        wanted: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        keys: dict[tuple[str, str], str] = {}
        for key in (*manifest.tensors, *manifest.aliases):
            if key.startswith("optimizer/"):
                saved_param, name = split_state_key(key)
                param = local_names.get(saved_param)
                tensor = manifest.find(key)
                if param is not None and tensor is not None and (param, name) not in keys:
                    wanted.setdefault(param, {})[name] = tensor.dtype, tensor.shape
                    keys[param, name] = manifest.aliases.get(key, key)
        for (param, name), held in optimizer.targets(wanted, strict=self._strict).items():
            canonical = keys[param, name]
            self._add(canonical, manifest.tensors[canonical], held, state_key(param, name))
        self._state_values = {
            local_names[param]: from_json(values) for param, values in saved["values"].items() if param in local_names
        }
        self._options = {
            local_names[param]: from_json(group["options"])
            for group in saved["groups"]
            for param in group["params"]
            if param in local_names
        }
        if self._strict:
            self._check_groups(optimizer.groups())

    def _local_names(self, groups: Iterable[Any], states: Mapping[str, Any]) -> dict[str, str]:
        """What the parameters that the optimizer has are called in the checkpoint -> what they are called here."""
        aliases = self.source.manifest.aliases
        known = {param: param for group in groups for param in group.params} | {param: param for param in states}
        made: dict[str, str] = {}
        for alias, key in self._contents.aliases.items():
            if _bare(key) in known:
                made[_bare(alias)] = _bare(key)
        for param in known:
            canonical = aliases.get(f"model/{param}")
            if canonical is not None:
                made.setdefault(_bare(canonical), param)
        return made | known

    def _check_groups(self, groups: Sequence[Any]) -> None:
        """Each group of the optimizer has to get one set of options."""
        for index, group in enumerate(groups):
            unknown = [param for param in group.params if param not in self._options]
            if unknown:
                raise ArgumentError(
                    "The optimizer trains parameters that the saved one did not.",
                    expected="parameters of the saved groups",
                    got=_some(unknown),
                    where=f"group {index} of the optimizer",
                    do="Make the optimizer as it was, or load with strict=False.",
                )
            kinds = {repr(self._options[param]) for param in group.params}
            if len(kinds) > 1:
                raise ArgumentError(
                    "A group of the optimizer has parameters of several groups that were saved.",
                    expected="groups as they were saved",
                    where=f"group {index} of the optimizer",
                    do="Make the groups as they were, or load with strict=False.",
                )

    _state_values: dict[str, Any]
    _options: dict[str, Any]


def _content(tensor: SavedTensor) -> Any:
    return tensor.dtype, tensor.shape, sorted((item.box, item.sums) for item in tensor.items)


def _bare(key: str) -> str:
    return key.removeprefix("model/")


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MOST_NAMES} more" if len(keys) > _MOST_NAMES else ""
    return ", ".join(_bare(key) for key in keys[:_MOST_NAMES]) + more
