"""Saves of several ranks in which one rank dies before or within a chosen file call. Run inside worker processes.

The store is a folder of files, so that ranks are plain processes, forked for each kill: no framework's threads are in
the way. Tensors are NumPy arrays behind the same seam that a framework fulfils.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hyper_parallel._base import files as base_files
from hyper_parallel.core.dtensor.boxes import Box, chunk_range
from hyper_parallel.core.parallel.saving import committing, folder, load, meetings, rank_file, save
from hyper_parallel.core.parallel.saving.backend import Held
from hyper_parallel.core.parallel.saving.description import merged_spread

SHORT_S, LONG_S = 1.0, 20.0  # with a dead rank; where all are alive
NOT_FILE_CALLS = {"fspath", "fsdecode", "fsencode", "sched_getaffinity", "getpid"}


class FileStore:
    """`add` counts in the size of a file, which the kernel appends to whole."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _file(self, key: str) -> str:
        return os.path.join(self._path, key.replace("/", "_"))

    def add(self, key: str, amount: int) -> int:
        descriptor = os.open(self._file(key), os.O_CREAT | os.O_RDWR | os.O_APPEND)
        try:
            if amount:
                os.write(descriptor, b"x" * amount)
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def set(self, key: str, value: str) -> None:
        Path(self._file(key)).write_text(value)

    def get(self, key: str) -> str:
        return Path(self._file(key)).read_text()


class Arrays:
    """A "model": arrays by name, each cut along its first dim over the ranks, and one that all ranks have."""

    def __init__(self, fill: int, rank: int, num_ranks: int) -> None:
        self.arrays: dict[str, tuple[np.ndarray[Any, Any], tuple[int, ...], bool]] = {}
        for name, shape in (("a", (5, 300)), ("b", (3,)), ("c", (8, 9))):
            start, size = chunk_range(shape[0], num_ranks, rank)
            self.arrays[name] = whole(name, shape, fill)[start : start + size].copy(), shape, True
        self.arrays["all"] = whole("all", (7, 7), fill), (7, 7), False


def whole(name: str, shape: tuple[int, ...], fill: int) -> np.ndarray[Any, Any]:
    return (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + len(name)) * fill


class ArraysBackend:
    """See `SavingBackend`."""

    folder: ClassVar[str] = "none"
    name: ClassVar[str] = "NumPy"

    def __init__(self, rank: int, num_ranks: int, store: Any) -> None:
        self._rank, self._num_ranks, self._store = rank, num_ranks, store

    def rank(self) -> int:
        return self._rank

    def num_ranks(self) -> int:
        return self._num_ranks

    def store(self) -> Any:
        return None if self._store is None else (self._store, None)

    def tensors(self, module: Any) -> dict[str, Any]:
        return dict(module.arrays)

    def parameters(self, module: Any) -> dict[str, Any]:
        return {}

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, tuple)

    def held(self, tensor: Any, where: str, *, is_written: bool) -> Held:
        array, shape, is_cut = tensor
        if not is_cut:
            return Held("F32", shape, None, Box((0,) * len(shape), shape), array)
        boxes = {}
        for rank in range(self._num_ranks):
            start, size = chunk_range(shape[0], self._num_ranks, rank)
            boxes[rank] = Box((start,) + (0,) * (len(shape) - 1), (size, *shape[1:]))
        return Held("F32", shape, merged_spread(boxes), boxes[self._rank], array)

    def bytes_of(self, local: Any) -> Any:
        return np.ascontiguousarray(local).reshape(-1).view(np.uint8)

    def own_bytes(self, local: Any) -> Any:
        return local.reshape(-1).view(np.uint8)

    def note_written(self, local: Any) -> None: ...

    def write(self, local: Any, dtype: str, data: Any) -> None:
        raise NotImplementedError

    def launch_copy(self, local: Any, box: Box, out: Any) -> bool:
        return False

    def join_device(self, tensors: Sequence[Any]) -> None: ...

    def host_memory(self, num_bytes: int, tensors: Sequence[Any]) -> Any:
        return np.empty(max(1, num_bytes), np.uint8)

    def optimizer(self, optimizer: Any, parameters: Mapping[str, Any]) -> Any:
        raise NotImplementedError


class _Watched:
    """Stands in for the module `os` and passes each call of its functions through `on_call`."""

    def __init__(self, on_call: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> None:
        self._on_call = on_call

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        if not callable(value) or isinstance(value, type) or name in NOT_FILE_CALLS:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._on_call(name, lambda *found: value(*found, **kwargs), args)

        return call


@contextlib.contextmanager
def watched(on_call: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> Iterator[None]:
    """Pass every file call of a save, inside the block, through `on_call`; the exchange of folders too."""
    modules = [folder, committing, rank_file, base_files]
    stand_in = _Watched(on_call)
    exchange = folder._exchange
    for module in modules:
        module.os = stand_in  # type: ignore[attr-defined]
    folder._exchange = lambda *args: on_call("exchange", exchange, args)
    try:
        yield
    finally:
        for module in modules:
            module.os = os  # type: ignore[attr-defined]
        folder._exchange = exchange


@contextlib.contextmanager
def as_rank(rank: int, num_ranks: int, store: Any) -> Iterator[ArraysBackend]:
    """`hp.save` and `hp.load` as this rank makes them, of `Arrays`."""
    backend = ArraysBackend(rank, num_ranks, store)
    meetings._last[:] = [None, 0]
    before = save.backend_of, load.backend_of
    save.backend_of = load.backend_of = lambda model, call: (backend, None)  # type: ignore[assignment]
    try:
        yield backend
    finally:
        save.backend_of, load.backend_of = before


def fork(function: Callable[[], object]) -> int:
    """A process that runs the function and ends with 0, or with 1 if it raises."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - a rank that is killed has nothing to say
        function()
        status = 0
    except Exception:
        status = 1
    finally:
        os._exit(status)


def save_as(
    rank: int, num_ranks: int, store: str, target: str, fill: int, on_call: Any = None, timeout_s: float = 20.0
) -> None:
    with as_rank(rank, num_ranks, FileStore(store)):
        watching = contextlib.nullcontext() if on_call is None else watched(on_call)
        with watching:
            save.save(target, model=Arrays(fill, rank, num_ranks), extra=fill, timeout=timeout_s)


class KillAt:
    """Ends the process at the n-th file call, before it or within it."""

    def __init__(self, stop_at: int, *, within: bool) -> None:
        self._stop_at, self._within, self._count = stop_at, within, 0

    def __call__(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._count += 1
        if self._count == self._stop_at:
            if self._within and name in ("write", "pwrite"):
                half = memoryview(args[1])[: len(args[1]) // 2]
                getattr(os, name)(args[0], half, *args[2:])
            elif self._within:
                function(*args)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the signal comes when this thread gives way
        return function(*args)


def content_of(target: str, num_ranks: int = 1) -> int:
    """The fill that a checkpoint has, in all tensors and `extra`; raises where it is a mix or damaged."""
    with as_rank(0, 1, None):
        model = Arrays(0, 0, 1)
        for array, _, _ in model.arrays.values():
            array[:] = -1
        fill = load.load(target, model=model)
    for name, (array, shape, _) in model.arrays.items():
        if not np.array_equal(array, whole(name, shape, fill)):
            raise RuntimeError(f"{name} is not that of {fill}")
    return int(fill)


def save_steps(base: str, num_ranks: int) -> None:
    """Two checkpoints, "1" and "2", of as many ranks."""
    for fill in (1, 2):
        if any(_all_save(Path(base, f"store-{fill}"), num_ranks, str(Path(base, str(fill))), fill)):
            raise RuntimeError("a rank could not save")


def _all_save(
    store: Path,
    num_ranks: int,
    target: str,
    fill: int,
    watchers: Mapping[int, Any] | None = None,
    timeout_s: float = LONG_S,
) -> list[int]:
    """Save on all ranks, in processes of their own: how they ended."""
    store.mkdir(parents=True)
    found = watchers or {}
    return _join([
        fork(partial(save_as, rank, num_ranks, str(store), target, fill, found.get(rank), timeout_s))
        for rank in range(num_ranks)
    ])  # fmt: skip


def two_jobs(base: str) -> int:
    """Two jobs that know nothing of each other save to one place again and again; whose checkpoint is there at last."""
    target = str(Path(base, "ckpt", "step"))

    def job(fill: int) -> None:
        for _ in range(25):
            save_as(0, 1, base, target, fill)

    if any(_join([fork(partial(job, fill)) for fill in (1, 2)])):
        raise RuntimeError("a job could not save")
    if os.listdir(Path(base, "ckpt")) != ["step"]:
        raise RuntimeError(f"left: {os.listdir(Path(base, 'ckpt'))}")
    return content_of(target)


class Case(NamedTuple):
    """Which rank is killed, whether within a call or before it, and whether an old checkpoint is in the place."""

    num_ranks: int
    victim: int
    within: bool
    over_old: bool


def trial(base: str, case: Case, stop_at: int) -> str:
    """Kill the victim at one of its file calls; what is found then: "old" or "new", or "none left" if it ended first."""
    place = Path(base, "-".join(map(str, (*case, stop_at))))
    target = str(place / "ckpt" / "step")

    def all_save(fill: int, on_call: Any = None, timeout_s: float = LONG_S) -> list[int]:
        store = place / f"store-{fill}-{time.monotonic_ns()}"
        return _all_save(store, case.num_ranks, target, fill, {case.victim: on_call}, timeout_s)

    if case.over_old:
        all_save(1)
    statuses = all_save(2, KillAt(stop_at, within=case.within), SHORT_S)
    was_killed = statuses[case.victim] == -signal.SIGKILL
    if not was_killed and any(statuses):  # no rank was dead, though one was slow
        statuses = all_save(2, KillAt(stop_at, within=case.within))
        was_killed = statuses[case.victim] == -signal.SIGKILL
    try:
        fill: int | None = content_of(target)
    except FileNotFoundError:
        fill = None
    if fill not in (1 if case.over_old else None, 2) or (not was_killed and fill != 2):
        raise RuntimeError(f"{fill} is found after call {stop_at}, {case}")
    if not was_killed and any(statuses):
        raise RuntimeError(f"a save without a kill ended with {statuses}, {case}")
    # The next save of all ranks works, and nothing is left of the dead one.
    again = all_save(3)
    if any(again) or content_of(target) != 3 or os.listdir(place / "ckpt") != ["step"]:
        raise RuntimeError(
            f"the next save ends with {again}, {os.listdir(place / 'ckpt')} after call {stop_at}, {case}"
        )
    shutil.rmtree(place)
    if not was_killed:
        return "none left"
    return "new" if fill == 2 else "old"


def kill_everywhere(base: str, cases: Sequence[Case], every: int, at_once: int) -> dict[Case, list[str]]:
    """Trials of each case, at every n-th file call; what each found. Ranks wait for dead ones, so many run at once."""
    found: dict[Case, list[str]] = {}
    todo = []
    for number, case in enumerate(cases):
        num_calls = _num_calls(base, case)
        found[case] = [f"{num_calls} calls"]
        todo += [(case, stop_at) for stop_at in range(1 + number % every, num_calls + 1, every)]
        todo.append((case, num_calls + 1))
    running: dict[int, tuple[Case, int]] = {}
    while todo or running:
        while todo and len(running) < at_once:
            case, stop_at = todo.pop()
            running[fork(partial(_write_trial, base, case, stop_at))] = case, stop_at
        pid, status = os.waitpid(-1, 0)
        case, stop_at = running.pop(pid)
        said = Path(base, f"said-{pid}").read_text()
        if status:
            raise RuntimeError(said)
        found[case].append(said)
    return found


def _write_trial(base: str, case: Case, stop_at: int) -> None:
    said = Path(base, f"said-{os.getpid()}")
    try:
        said.write_text(trial(base, case, stop_at))
    except BaseException as error:
        said.write_text(f"{type(error).__name__}: {error}")
        raise


def _num_calls(base: str, case: Case) -> int:
    place = Path(base, "counted-" + "-".join(map(str, case)))
    counts = place / "calls"
    place.mkdir()
    target = str(place / "ckpt" / "step")

    def count(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with open(counts, "ab") as file:
            file.write(b"x")
        return function(*args)

    for fill in (1, 2) if case.over_old else (2,):
        watchers = {case.victim: count} if fill == 2 else None
        _all_save(place / f"store-{fill}", case.num_ranks, target, fill, watchers)
    number = counts.stat().st_size
    shutil.rmtree(place)
    return number


def _join(children: Sequence[int]) -> list[int]:
    deadline = time.monotonic() + 60
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    statuses[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for child in children:
                if child not in statuses:
                    os.kill(child, signal.SIGKILL)
            raise RuntimeError("a rank hangs")
        time.sleep(0.001)
    return [statuses[child] for child in children]


def with_hanging_disk(base: str, victim: int) -> list[str]:
    """Three ranks, of which one hangs in its first write: what the others say."""
    target, store = str(Path(base, "ckpt", "step")), Path(base, "store")
    store.mkdir()

    def hang(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "pwrite":
            time.sleep(1000)
        return function(*args)

    def tell(rank: int) -> None:
        try:
            save_as(rank, 3, str(store), target, 2, hang if rank == victim else None, SHORT_S)
        except RuntimeError as error:
            Path(base, f"said-{rank}").write_text(str(error))

    children = {rank: fork(partial(tell, rank)) for rank in range(3)}
    _join([children[rank] for rank in range(3) if rank != victim])
    os.kill(children[victim], signal.SIGKILL)
    _join([children[victim]])
    return [Path(base, f"said-{rank}").read_text() for rank in range(3) if rank != victim]


def with_full_disk(base: str) -> list[str]:
    """Two ranks, of which one meets a full disk at each of its writes: what each says, and the old one is whole."""
    target = str(Path(base, "ckpt", "step"))
    said = []
    for rank in (0, 1):
        store = Path(base, f"store-{rank}")
        store.mkdir()
        _all_save(Path(base, f"first-{rank}"), 2, target, 1)

        def full(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            if name == "pwrite":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args)

        def tell(r: int, victim: int = rank, store: Path = store) -> None:
            try:
                save_as(r, 2, str(store), target, 2, full if r == victim else None)
            except (OSError, RuntimeError) as error:
                Path(base, f"said-{victim}-{r}").write_text(f"{type(error).__name__}: {error}")

        _join([fork(partial(tell, r)) for r in range(2)])
        said += [Path(base, f"said-{rank}-{r}").read_text() for r in range(2)]
        if content_of(target) != 1 or os.listdir(Path(base, "ckpt")) != ["step"]:
            raise RuntimeError(f"{os.listdir(Path(base, 'ckpt'))} after a full disk on rank {rank}")
    return said
