"""The solver's own words go nowhere.

HiGHS leaves a line on standard output now and then, whatever it is told
(`HighsMipSolverData::transformNewIntegerFeasibleSolution ...`). It prints by C's `stdout`. In glibc that is a variable
that may be set, so it is another stream while the solver runs. File descriptor 1 and Python's `sys.stdout` stay as they
are: what other threads and child processes print meanwhile comes out, when they print it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import NamedTuple


class _CookieFunctions(ctypes.Structure):
    """What a stream of `fopencookie` calls.

    There is no function to write, so what is written is gone.
    """

    _fields_ = (
        ("read", ctypes.c_void_p),
        ("write", ctypes.c_void_p),
        ("seek", ctypes.c_void_p),
        ("close", ctypes.c_void_p),
    )


class _Streams(NamedTuple):
    stdout: ctypes.c_void_p  # the variable
    nowhere: int  # a stream


_lock = threading.Lock()
_num_inside = 0
_before: int | None = None


@contextlib.contextmanager
def quiet_solver() -> Iterator[None]:
    """Let what C prints to standard output go nowhere while the block runs.

    Several threads may be in such a block: the last to leave it puts the stream back.
    """
    global _num_inside, _before
    streams = _streams()
    if streams is None:
        yield
        return
    with _lock:
        if _num_inside == 0:
            _before, streams.stdout.value = streams.stdout.value, streams.nowhere
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                streams.stdout.value = _before


@functools.cache
def _streams() -> _Streams | None:
    """Find C's `stdout`, and make a stream that leads nowhere.

    None where this is not glibc: `stdout` may be read-only there.

    The stream is never closed, since another thread may be printing to it; it has no file descriptor.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.fopencookie.restype = ctypes.c_void_p
    libc.fopencookie.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _CookieFunctions]
    nowhere = libc.fopencookie(None, b"w", _CookieFunctions())
    return _Streams(ctypes.c_void_p.in_dll(libc, "stdout"), nowhere) if nowhere else None
