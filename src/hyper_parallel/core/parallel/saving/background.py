"""A save that goes on while training does, and the one of this process that may be under way."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable

from hyper_parallel.core.parallel.saving.checksums import CHUNK_BYTES

__all__ = ["Saving", "finish_running", "keep_running"]


class Saving:
    """A save in the background. `hp.save(..., background=True)` returns it.

    The values are copied already: training may change them. Whoever does not wait hears of an error at the next save or
    load; a process that ends waits for the save, and writes its error to standard error.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> saving = hp.save("ckpt/last", model=torch.nn.Linear(2, 2), background=True)
        >>> saving.wait()
        >>> saving.is_done
        True
    """

    def __init__(self, path: str, num_bytes: int) -> None:
        self.path = path
        self._num_bytes = num_bytes
        self._written_bytes = 0
        self._error: BaseException | None = None
        self._is_told = False
        self._thread: threading.Thread | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begin. Not a daemon: the interpreter waits for it before it ends."""

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="hyper_parallel save")
        self._thread.start()

    def note(self, num_chunks: int) -> None:
        self._written_bytes = min(self._num_bytes, self._written_bytes + num_chunks * CHUNK_BYTES)

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, well or not. Does not wait."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is committed.

        Raises: what went wrong, each time it is asked.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._is_told = True
            raise self._error

    def __repr__(self) -> str:
        if not self.is_done:
            return f"Saving({self.path!r}: {self._written_bytes} of {self._num_bytes} bytes of this rank)"
        return f"Saving({self.path!r}: {'failed' if self._error else 'done'})"


_running: list[Saving] = []


def keep_running(saving: Saving) -> None:
    _running.append(saving)


def _tell_at_end() -> None:
    """Say of a save that failed, and of which nobody heard, that it did: after this nobody can be told."""
    for saving in _running:
        if saving._error is not None and not saving._is_told:
            sys.stderr.write(f"hyper_parallel: the checkpoint {saving.path} was not saved.\n{saving._error}\n")


atexit.register(_tell_at_end)  # the interpreter has waited for the thread before


def finish_running() -> None:
    """Wait for the save that is under way, and raise its error if nobody was told."""
    while _running:
        saving = _running.pop()
        if saving._is_told:
            continue
        saving.wait()
