"""A communication that was launched. What it promises: H1 to H5 of the README."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hyper_parallel._base import trace

if TYPE_CHECKING:
    from hyper_parallel.platform.communication.roll_call import Record
    from hyper_parallel.platform.communication.transport import Transport


class Handle:
    """What `async_op=True` gives: `wait()` makes the result valid.

    Invariant: _record is not None while it has not been waited for
    """

    __slots__ = ("_error", "_finish", "_keep", "_record", "_transport", "_work")

    def __init__(
        self,
        transport: Transport,
        record: Record,
        work: object,
        finish: Callable[[], object] | None = None,
        keep: object = None,
    ) -> None:
        self._transport = transport
        self._record: Record | None = record
        self._work = work  # the framework's own; None where it is done already
        self._finish = finish  # what is left to do on this rank once everything has arrived
        self._keep = keep
        self._error: Exception | None = None

    def wait(self) -> None:
        """Make the result valid, for the current stream or (on the CPU) for the host.

        Raises:
            CommunicationError: it failed; which rank is missing, and what each was calling.
        """
        work, finish, record = self._work, self._finish, self._record  # in this order: another thread may end it now
        if record is None:
            if self._error is not None:
                raise self._error
            return
        trace.emit("communication.wait", call=record.call, number=record.number)
        try:
            if work is not None:
                try:
                    self._transport.join(work, record)
                except RuntimeError as error:
                    raise self._transport.roll_call.explain(record, error) from error
            record.log.num_done = max(record.log.num_done, record.number)
            if finish is not None:
                finish()
        except Exception as error:
            self._error = error
            self._end()
            raise
        self._end()  # not after Ctrl-C: then it is still on its way, and who waits again waits

    def _end(self) -> None:
        self._record = None
        self._work = self._finish = self._keep = None

    def is_completed(self) -> bool:
        """Whether `wait()` would return at once. Has no effect."""
        if self._record is None or self._work is None:
            return True
        return bool(self._transport.is_completed(self._work))

    def __repr__(self) -> str:
        if self._record is None:
            return f"<Handle: {'failed' if self._error else 'done'}>"
        return f"<Handle of {self._record.call}: launched>"
