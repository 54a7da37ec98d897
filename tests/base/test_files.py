"""Everything that is written for a user is written in one way: whole or not at all, and over plain files only."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel._base import files
from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, HyperParallelError
from hyper_parallel.core.planner.plan.plan import MemoryPlan
from hyper_parallel.platform.tensor_file import open_tensors, write_tensors
from hyper_parallel.report.page import write_report
from support.made_plans import plan_of

PLAN = plan_of(is_empty=True)
WRITERS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda path: files.write(path, b"new"),
    "checkpoint": lambda path: write_tensors(path, [], {}.__getitem__),
    "plan": PLAN.save,
    "page": lambda path: write_report(PLAN, path, curve_seconds=0.0),
}
READERS: dict[str, Callable[[Any], Any]] = {"checkpoint": open_tensors, "plan": MemoryPlan.load}

written = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
read = pytest.mark.parametrize("load", READERS.values(), ids=READERS)


class Pathlike:
    def __init__(self, path: Any) -> None:
        self._path = path

    def __fspath__(self) -> Any:
        if isinstance(self._path, Exception):
            raise self._path
        return self._path


@written
def test_a_longest_name_is_written_and_nothing_else_is_left(write: Callable[[Any], Any], tmp_path: Path) -> None:
    for name in ("n" * 255, "n" * 242, "ü" * 127):
        target = tmp_path / name
        write(target)
        write(target)
        assert os.listdir(tmp_path) == [name]
        target.unlink()


@written
def test_a_link_at_a_name_that_could_be_guessed_is_not_written_to(write: Callable[[Any], Any], tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    target = tmp_path / "target"
    for name in (f"target.{os.getpid()}.part", ".target.part", "target.part", "target.tmp"):
        (tmp_path / name).symlink_to(precious)
    write(target)
    assert precious.read_text() == "precious"
    assert not target.is_symlink()


@written
def test_a_strangers_link_in_a_shared_folder_is_refused(
    write: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious, link = tmp_path / "precious", tmp_path / "link"
    precious.write_text("precious")
    link.symlink_to(precious)
    lstat, me = os.lstat, os.geteuid()

    def of_a_stranger(path: Any, **options: Any) -> os.stat_result:
        found = lstat(path, **options)
        return os.stat_result((*found[:4], me + 1, *found[5:])) if str(path) == str(link) else found

    monkeypatch.setattr(os, "lstat", of_a_stranger)
    tmp_path.chmod(0o1777)
    with pytest.raises(PermissionError, match="another user made"):
        write(link)
    assert precious.read_text() == "precious"
    tmp_path.chmod(0o755)  # nobody else could have planted it here: a link that the folder's owner wants
    write(link)
    assert link.is_symlink()
    assert precious.read_bytes() != b"precious"


def test_links_in_a_circle_end_in_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        files.write(tmp_path / "a", b"")


def _device(folder: Path) -> str:
    return "/dev/null"


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


def _folder(folder: Path) -> str:
    return str(folder)


@written
@pytest.mark.parametrize("make", [_device, _pipe, _folder])
def test_what_is_no_plain_file_is_never_replaced(
    write: Callable[[Any], Any], make: Callable[[Path], str], tmp_path: Path
) -> None:
    path = make(tmp_path)
    before = os.stat(path)
    with pytest.raises(OSError, match="Not a plain file"):
        write(path)
    after = os.stat(path)
    assert (after.st_ino, stat.S_IFMT(after.st_mode)) == (before.st_ino, stat.S_IFMT(before.st_mode))


WRONG_PATHS = [
    (b"plan", ArgumentTypeError), (3, ArgumentTypeError), (None, ArgumentTypeError), (True, ArgumentTypeError),
    (Pathlike(b"plan"), ArgumentTypeError), (Pathlike(3), ArgumentTypeError), (Pathlike(KeyError("no")), ArgumentTypeError),
    ("", ArgumentError), (Pathlike(""), ArgumentError), ("a\0b", ArgumentError), ("\ud800", ArgumentError),
]  # fmt: skip


@pytest.mark.parametrize("call", [*WRITERS.values(), *READERS.values()], ids=[*WRITERS, "load", "load plan"])
def test_what_can_name_no_file_is_told_before_anything_is_written(
    call: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, kind in WRONG_PATHS:
        with pytest.raises(kind):
            call(path)
    assert os.listdir(tmp_path) == []


@written
def test_any_path_of_text_is_taken(
    write: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate(("0", Path("1"), Pathlike("2"), "./3", tmp_path / "4")):
        write(path)
        assert (tmp_path / str(number)).is_file()


@written
def test_a_file_that_is_replaced_keeps_who_may_read_it_and_not_as_whom_it_runs(
    write: Callable[[Any], Any], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_text("old")
    target.chmod(0o6751)
    write(target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o751


@written
def test_a_missing_folder_is_named(write: Callable[[Any], Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"its folder must exist.*nowhere/target"):
        write(tmp_path / "nowhere" / "target")


@read
def test_what_is_no_plain_file_is_not_read(load: Callable[[Any], Any], tmp_path: Path) -> None:
    for path in (_pipe(tmp_path), "/dev/zero", tmp_path):
        with pytest.raises(HyperParallelError, match="a folder|a device or a pipe"):
            load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a file of Linux")
@read
def test_a_file_of_the_system_that_cannot_be_read_is_told_so(load: Callable[[Any], Any]) -> None:
    with pytest.raises(HyperParallelError):
        load("/proc/self/mem")
