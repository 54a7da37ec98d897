"""Folders of checkpoints: made beside, committed by one rename, found by the time in their manifests, and removed.

    ckpt/step-100.partial-0123456789abcdef/    files of all ranks, then the manifest; locked by rank 0
    ckpt/step-100/                             after the rename

A folder that is there already changes places with the new one in one call (Linux), and is then removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, DamagedFileError, describe
from hyper_parallel._base.files import NotPlainError, checked_path, opened
from hyper_parallel._base.log import get_logger
from hyper_parallel.core.parallel.saving.manifest import MANIFEST, Manifest, damaged, is_manifest

__all__ = ["Partial", "commit", "latest", "make_partial", "read_manifest", "retain"]

_logger = get_logger("saving")
_UNCHANGED = "the checkpoint was not saved, and one that was there is unchanged"
_PARTIAL = r"\.partial-[0-9a-f]{16}"


class Partial(NamedTuple):
    """A folder that is being written. Its lock ends with the descriptor."""

    path: str
    id: str
    descriptor: int

    def close(self) -> None:
        os.close(self.descriptor)


def target_of(path: object) -> str:
    """Return the folder that a checkpoint is saved as: behind links, and without a slash at the end."""
    text = os.path.realpath(checked_path(path))
    if text == os.path.dirname(text):
        raise ArgumentError("A checkpoint is a folder of its own.", got=describe(path))
    return text


def make_partial(target: str) -> Partial:
    """Make the folder beside the target that ranks write into. Folders above are made.

    Raises:
        ValueError: the target is there, and is no checkpoint.
        OSError: no permission, a read-only or full disk.
    """
    parent, name = os.path.split(target)
    with explained(target):
        os.makedirs(parent, exist_ok=True)
        check_replaceable(target)
        _remove_leftovers(parent, name)
        for _ in range(100):
            made = _new_partial(target)
            if made is not None:
                return made
    raise OSError(errno.EAGAIN, "Other jobs took 100 new folders away", target)


def _new_partial(target: str) -> Partial | None:
    """Make a locked folder. None where another job has taken it for one of a dead writer before it was locked."""
    number = secrets.token_hex(8)
    path = f"{target}.partial-{number}"
    os.mkdir(path)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with contextlib.suppress(FileNotFoundError):
        if _lock(descriptor) is not False and os.stat(path).st_ino == os.fstat(descriptor).st_ino:
            return Partial(path, number, descriptor)
    os.close(descriptor)
    return None


def check_replaceable(target: str) -> None:
    """Raise where something is in the place of the target that is no checkpoint of ours."""
    try:
        names = os.listdir(target)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        names = ["it is a file"]
    if names and not is_checkpoint(target):
        raise ArgumentError(
            "This place is taken by something that is no checkpoint of this package.",
            expected="a new folder, an empty one, or an earlier checkpoint",
            got=f"{len(names)} entries, such as {min(names)!r}",
            where=target,
            do="Save to another folder, or remove this one.",
        )


def commit(partial: Partial, target: str) -> None:
    """Put a complete folder in the place of the target, by one rename."""
    with explained(target):
        sync_folder(partial.path)
        try:
            os.rename(partial.path, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            check_replaceable(target)
            _exchange(partial.path, target)
        sync_folder(os.path.dirname(target))
    shutil.rmtree(partial.path, ignore_errors=True)  # the old one, where places were changed


def discard(partial: Partial) -> None:
    """Remove a folder that will not be committed, and let go of its lock."""
    shutil.rmtree(partial.path, ignore_errors=True)
    partial.close()


def read_manifest(folder: str) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedFileError: it is not what was written.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        content = _content(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        there = "no such folder"
        if os.path.isdir(folder):
            there = "a folder without a manifest"
            if any(re.search(_PARTIAL + "$", name) for name in (folder, *os.listdir(folder))):
                there += " (a save that did not finish is no checkpoint)"
        raise FileNotFoundError(
            errno.ENOENT, f"There is no checkpoint here: {there}. `hp.latest(folder)` finds the newest", folder
        ) from error
    except NotPlainError as error:
        raise damaged(path, str(error.got)) from None
    return Manifest.from_bytes(content, path)


def is_checkpoint(folder: str) -> bool:
    """Say whether a folder is a committed checkpoint, whole or damaged."""
    if re.search(_PARTIAL + "$", folder):
        return False
    try:
        with opened(os.path.join(folder, MANIFEST)) as descriptor:
            return is_manifest(os.read(descriptor, 256))
    except (OSError, DamagedFileError):
        return False


def latest(folder: object) -> str | None:
    """Find the newest committed checkpoint in a folder, by the time in the manifests; None where there is none.

    Saves that did not finish, and what is no checkpoint, do not count.

    Raises:
        DamagedFileError: a manifest is not what was written, so that its time cannot be trusted.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> for step in (9, 10):
        ...     hp.save(f"ckpt/step-{step}", model=torch.nn.Linear(2, 2))
        >>> hp.latest("ckpt")
        'ckpt/step-10'
    """
    text = checked_path(folder)
    found = _saves_in(text)
    return os.path.join(text, found[-1][1]) if found else None


def retain(target: str, num: int) -> None:
    """Remove the oldest checkpoints beside the target, and the target never, until `num` are left."""
    parent, name = os.path.split(target)
    try:
        saves = [save for _, save in _saves_in(parent) if save != name]
    except (OSError, DamagedFileError) as error:
        _logger.warning("nothing older was removed: %s", error)
        return
    for save in saves[: max(0, len(saves) + 1 - num)]:
        old = os.path.join(parent, save)
        away = f"{old}.partial-{secrets.token_hex(8)}"
        try:
            os.rename(old, away)  # readers never see a half
            shutil.rmtree(away)
        except OSError as error:
            _logger.warning("an older checkpoint was not removed: %s", error)


def _saves_in(folder: str) -> list[tuple[float, str]]:
    names = sorted(name for name in os.listdir(folder) if is_checkpoint(os.path.join(folder, name)))
    saves = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            saves.append((read_manifest(os.path.join(folder, name)).saved_at, name))
    return sorted(saves)


def sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # a file system without it
            raise
    finally:
        os.close(descriptor)


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Say in errors of the file system what they mean for the checkpoint."""
    try:
        yield
    except OSError as error:
        # From the number, OSError makes itself a FileNotFoundError, a PermissionError and so on.
        raise OSError(error.errno, f"{error.strerror or error}; {_UNCHANGED}", path) from error


def _content(path: str) -> bytes:
    with opened(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read()


def _lock(descriptor: int) -> bool | None:
    """Try to lock a folder. None where there are no locks, so that nobody takes it for one of a dead writer."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def _remove_leftovers(parent: str, name: str) -> None:
    """Remove what saves of this very name have left that died; a live one holds its lock."""
    of_target = re.compile(re.escape(name) + _PARTIAL)
    with contextlib.suppress(OSError):
        for found in filter(of_target.fullmatch, os.listdir(parent)):
            path = os.path.join(parent, found)
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
                try:
                    if _lock(descriptor):
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(descriptor)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(first: str, second: str) -> None:
    """Let two folders change names, in one step."""
    try:
        rename: Any = ctypes.CDLL(None, use_errno=True).renameat2  # glibc on Linux
    except (AttributeError, OSError, TypeError):
        number = errno.ENOSYS
    else:
        if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise ArgumentError(
            "An earlier checkpoint is in this place, and this file system cannot exchange folders in one step.",
            expected="a folder that is not there yet",
            where=second,
            do='Save each step under a name of its own, such as f"ckpt/step-{step}"; `keep=` removes older ones.',
        )
    raise OSError(number, os.strerror(number), second)
