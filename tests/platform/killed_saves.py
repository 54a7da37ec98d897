"""Saves that stop at a chosen file call. Imported by the tests of tensor files, and run by them as a program:

    killed_saves.py kill FOLDER            kill a save before and within each of its file calls; print what was found
    killed_saves.py race TARGET FILL NUM   save NUM times, as one of several writers of the same target

A program of its own, since a process with the threads of a framework cannot be forked safely.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hyper_parallel._base import files
from hyper_parallel.platform.tensor_file import TensorSpec, open_tensors, write_tensors

NOT_FILE_CALLS = {"fspath", "fsdecode", "fsencode"}
SPECS = [TensorSpec("a", "F32", (300,)), TensorSpec("none", "F32", (0,)), TensorSpec("b", "U8", (700,))]

# (name of the call, the real function, its arguments) -> result
FileCall = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]


class _Watched:
    """Stands in for a module and passes each call of its functions through `on_call`."""

    def __init__(self, module: Any, on_call: FileCall) -> None:
        self._module = module
        self._on_call = on_call

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not callable(value) or isinstance(value, type) or name in NOT_FILE_CALLS:
            return value

        def call(*args: Any) -> Any:
            return self._on_call(name, value, args)

        return call


@contextmanager
def watched(on_call: FileCall) -> Iterator[None]:
    """Pass every file call of the writer, inside the block, through `on_call`."""
    files.os = _Watched(os, on_call)  # type: ignore[attr-defined]
    sys.modules["fcntl"] = _Watched(fcntl, on_call)  # type: ignore[assignment]
    try:
        yield
    finally:
        files.os = os  # type: ignore[attr-defined]
        sys.modules["fcntl"] = fcntl


def save(target: Path, fill: int, metadata: dict[str, str] | None = None) -> None:
    contents = {spec.name: bytes([fill]) * spec.size_bytes for spec in SPECS}
    write_tensors(target, SPECS, contents.__getitem__, metadata=metadata)


def parts(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".part"))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_save(target: Path, stop_at: int, within: bool) -> bool:
    """Whether the save was killed; False: it has fewer file calls than `stop_at`."""
    child = os.fork()
    if child == 0:
        count = 0

        def on_call(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            nonlocal count
            count += 1
            if count == stop_at:
                if within and name == "write":
                    os.write(args[0], args[1][: len(args[1]) // 2])
                elif within:
                    function(*args)
                _die()
            return function(*args)

        status = 3
        try:
            with watched(on_call):
                save(target, 2)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    if status != 0:
        raise RuntimeError(f"the save ended with status {status} at call {stop_at}")
    return False


def kill_everywhere(folder: Path) -> dict[str, int]:
    target = folder / "model.safetensors"
    save(target, 2)
    new = target.read_bytes()
    save(target, 1)
    old = target.read_bytes()
    found = {"kills": 0, "old": 0, "new": 0, "left_over": 0}
    for within in (False, True):
        for leftovers in ([], [f".{target.name}.0123abcd.part"]):
            stop_at = 0
            killed = True
            while killed:
                stop_at += 1
                target.write_bytes(old)
                for name in leftovers:
                    (folder / name).write_bytes(b"of a writer that died")
                killed = _killed_save(target, stop_at, within)
                where = f"call {stop_at}, within={within}, leftovers={leftovers}"
                content = target.read_bytes()
                if content not in (old, new) or (not killed and content != new):
                    raise RuntimeError(f"a mix after {where}")
                with open_tensors(target) as file:
                    if [record.name for record in file.read_all()] != ["a", "none", "b"] or not file.verified:
                        raise RuntimeError(f"does not load after {where}")
                if killed:
                    found["kills"] += 1
                    found["old" if content == old else "new"] += 1
                    found["left_over"] += len(parts(folder)) > 0
                save(target, 2)
                if parts(folder) or target.read_bytes() != new:
                    raise RuntimeError(f"the next save leaves {os.listdir(folder)} after {where}")
    return found


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        print(json.dumps(kill_everywhere(Path(sys.argv[2]))))
    else:
        for _ in range(int(sys.argv[4])):
            save(Path(sys.argv[2]), int(sys.argv[3]))
