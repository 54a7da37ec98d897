"""A communication that was launched. What it promises: H1 to H5 of the README."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hyper_parallel._base import trace

if TYPE_CHECKING:
    from hyper_parallel.platform.communication.roll_call import CallEntry
    from hyper_parallel.platform.communication.transport import Transport


class Handle:
    """What `async_op=True` gives: `wait()` makes the result valid.

    Invariant: _entry is not None while it has not been waited for
    """

    __slots__ = ("_entry", "_error", "_finish", "_keep", "_transport", "_work")

    def __init__(
        self,
        transport: Transport,
        entry: CallEntry,
        work: object,
        finish: Callable[[], object] | None = None,
        keep: object = None,
    ) -> None:
        self._transport = transport
        self._entry: CallEntry | None = entry
        self._work = work  # the framework's own; None where it is done already
        self._finish = finish  # what is left to do on this rank once everything has arrived
        self._keep = keep
        self._error: Exception | None = None

    def wait(self) -> None:
        """Make the result valid, for the current stream or (on the CPU) for the host.

        Raises:
            CommunicationError: it failed; which rank is missing, and what each was calling.
        """
        work, finish, entry = self._work, self._finish, self._entry  # in this order: another thread may end it now
        if entry is None:
            if self._error is not None:
                raise self._error
            return
        trace.emit("communication.wait", call=entry.call, number=entry.number)
        try:
            if work is not None:
                try:
                    self._transport.join(work, entry)
                except RuntimeError as error:
                    raise self._transport.roll_call.explain(entry, error) from error
            entry.log.num_done = max(entry.log.num_done, entry.number)
            if finish is not None:
                finish()
        except Exception as error:
            self._error = error
            self._end()
            raise
        self._end()  # not after Ctrl-C: then it is still on its way, and who waits again waits

    def _end(self) -> None:
        self._entry = None
        self._work = self._finish = self._keep = None

    def is_completed(self) -> bool:
        """Say whether `wait()` would return at once. Has no effect."""
        if self._entry is None or self._work is None:
            return True
        return bool(self._transport.is_completed(self._work))

    def __repr__(self) -> str:
        if self._entry is None:
            return f"<Handle: {'failed' if self._error else 'done'}>"
        return f"<Handle of {self._entry.call}: launched>"
