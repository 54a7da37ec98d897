"""How files are written for a user (checkpoints, plans, pages), and how they are opened to be read.

Guarantees:
- After any exception, kill or power cut the target holds the old file or the new one, never a mix.
- Only a plain file is replaced, never a folder, a device or a pipe.
- Nobody else decides what is written to: the new file has a name that cannot be guessed, is made exclusively, and a
  link that a stranger may have planted in a shared folder is refused.

    with replacing("plan.json") as file:      # makes .plan.json.0123abcd.part, locked, beside it
        file.write(b"...")                    # raises: the part vanishes, plan.json is what it was
                                              # ends: synced, renamed to plan.json, the folder synced
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, DamagedFileError, describe

__all__ = ["NewFile", "NotPlainError", "checked_path", "opened", "replacing", "write"]

_UNCHANGED = "the new content was not saved, and a file that was there is unchanged"
_WHERE = "to save there, its folder must exist and be writable, and it must be a plain file or new"
_NUM_LINKS = 40  # as many as Linux follows
# A part's name begins with so much of the target's. Both must stay below what a file system allows: 255 bytes; some
# allow 143.
_STEM_BYTES = 100


class NotPlainError(DamagedFileError):
    """What is to be read is a folder, a device or a pipe."""


class NewFile:
    """What `replacing` gives: the file that will take the target's place."""

    def __init__(self, descriptor: int, target: str) -> None:
        self._descriptor = descriptor
        self._target = target

    def write(self, content: bytes) -> None:
        rest = memoryview(content)
        with _explained(self._target, _UNCHANGED):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def seek(self, position: int) -> None:
        os.lseek(self._descriptor, position, os.SEEK_SET)


def checked_path(path: object) -> str:
    """Return `path` as text, if it can name a file.

    Raises:
        TypeError: it is no text and no `os.PathLike` of text; bytes are neither.
        ValueError: it is empty, or no file system has such a name.

    Example:
        >>> import pathlib
        >>> checked_path(pathlib.PurePosixPath("run/plan.json"))
        'run/plan.json'
    """
    text: object = path
    if isinstance(path, os.PathLike):
        try:
            text = os.fspath(path)
        except Exception:  # of the user's own making
            text = None
    if not isinstance(text, str):
        raise ArgumentTypeError(
            "This is no path of a file.",
            expected="text or an os.PathLike of text, such as pathlib.Path",
            got=describe(path),
            do="Write os.fsdecode(path)." if isinstance(text, bytes) else None,
        )
    if not text:
        raise ArgumentError("An empty path names no file.", expected="a path", got=describe(path))
    try:
        possible = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise ArgumentError("No file can have this name.", expected="a path without NUL, in Unicode", got=ascii(text))
    return text


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file whole, or leave what was there. Raises as `replacing`."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[NewFile]:
    """Give a file to write: it becomes the file at `path` when the block ends, and vanishes when the block raises.

    Args:
        path: a symbolic link is followed if nobody else can have made it: in a folder that everybody may write to it
            has to belong to this user or to root. The permission bits of a file that is there are kept.

    Raises:
        TypeError, ValueError: as `checked_path`.
        OSError: no such folder, no permission, a full disk, a stranger's link, a device. The file that was there is
            unchanged, unless the message says that the new one is in place and only the sync of its folder failed.
    """
    text = checked_path(path)
    with _explained(text, _WHERE):
        target = _behind_links(text)
    _remove_leftovers(target)
    with ExitStack() as closing:
        with _explained(target, _WHERE):
            mode = _mode_of(target)
            # Opened first, since once the file is replaced as little as possible may still fail.
            folder_descriptor = os.open(os.path.dirname(target), os.O_RDONLY)
            closing.callback(os.close, folder_descriptor)
            descriptor, part = _create_part(target, private=mode is not None)
            closing.callback(os.close, descriptor)  # gives the lock back
        try:
            yield NewFile(descriptor, target)
            with _explained(target, _UNCHANGED):
                if mode is not None:
                    os.fchmod(descriptor, mode)
                os.fsync(descriptor)  # before the name changes, else a power cut could leave the name on empty blocks
                os.replace(part, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
        with _explained(target, "the new content is in place, but a power cut may bring the old one back"):
            _sync_folder(folder_descriptor)


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a file to read from, and give its descriptor.

    Raises:
        TypeError, ValueError: as `checked_path`.
        NotPlainError: it is a folder, a device or a pipe.
        OSError: there is no such file, or no permission.
    """
    text = checked_path(path)
    descriptor = os.open(text, os.O_RDONLY | os.O_NONBLOCK)  # else a named pipe would block here
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
            raise NotPlainError("This cannot be read.", expected="a plain file", got=what, where=text)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _explained(path: str, meaning: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # From the number, OSError makes itself a FileNotFoundError, a PermissionError and so on.
        raise OSError(error.errno, f"{error.strerror or error}; {meaning}", path) from error


def _behind_links(path: str) -> str:
    """Follow the links of `path`, and return the file that it means as a path of which no part is a link."""
    for _ in range(_NUM_LINKS):
        folder, name = os.path.split(path)
        folder = os.path.realpath(folder)
        path = os.path.join(folder, name)
        if not os.path.islink(path):
            return path
        # The rule of Linux for folders such as /tmp (protected_symlinks), which opens alone are held to.
        if os.stat(folder).st_mode & stat.S_IWOTH and os.lstat(path).st_uid not in (0, os.geteuid()):
            raise OSError(errno.EACCES, "It is a link that another user made, in a folder that everybody may write to")
        path = os.path.join(folder, os.readlink(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _sync_folder(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # a file system without it
            raise


def _mode_of(target: str) -> int | None:
    """Return the permission bits of the file that is there; None if there is none.

    Bits that change the user it runs as are not handed on.
    """
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):  # a folder; or a device, which os.replace would remove
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "Not a plain file")
    return mode & 0o777


def _stem(name: str) -> str:
    """Return what the names of a target's parts begin with. Two long names may share it, which the locks allow."""
    return os.fsencode(name)[:_STEM_BYTES].decode(errors="ignore")


def _create_part(target: str, *, private: bool) -> tuple[int, str]:
    """Make a new, locked file beside `target`, so that it can take its place."""
    folder, name = os.path.split(target)
    for _ in range(100):
        part = os.path.join(folder, f".{_stem(name)}.{secrets.token_hex(4)}.part")
        # The old file may be one that others cannot read; its own bits come when the new one is whole.
        permissions = 0o600 if private else 0o666
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
        except FileExistsError:
            continue
        ours = False
        try:
            # Since the call above, another writer may have taken the file for a leftover: it holds the lock, or it has
            # already removed the name. Then take another name.
            ours = _lock(descriptor) is not False and os.fstat(descriptor).st_nlink > 0
            if ours:
                return descriptor, part
        finally:
            if not ours:
                with suppress(OSError):
                    os.unlink(part)
                os.close(descriptor)
    raise OSError(errno.EAGAIN, "Other writers took 100 new files away")


def _lock(descriptor: int) -> bool | None:
    """Try to lock the file. Returns None where there are no locks, so that no other writer can take it either."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def _remove_leftovers(target: str) -> None:
    """Remove the `.part` files of writers that died; a live one holds the lock of its own.

    The save that follows needs nothing of this, so nothing that fails here stops it.
    """
    folder, name = os.path.split(target)
    of_target = re.compile(rf"\.{re.escape(_stem(name))}\.[0-9a-f]{{8}}\.part")
    with suppress(OSError):
        for part in filter(of_target.fullmatch, os.listdir(folder)):
            with suppress(OSError):
                descriptor = os.open(os.path.join(folder, part), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    if _lock(descriptor):
                        os.unlink(os.path.join(folder, part))
                finally:
                    os.close(descriptor)
