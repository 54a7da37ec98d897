"""Blocks that change something for a while, and put it back whatever ends them: an error, Ctrl-C, a second Ctrl-C.

    class Fewer(PutBack):                       # notes in `__init__` what there is to put back
        def change(self): ...
        def put_back(self): ...                 # may be called twice

    fewer = Fewer()
    with put_back_on_error(fewer), fewer:       # the outer block covers the instants in which `fewer` begins and ends
        ...

Guarantees: once `change` has begun, `put_back` runs, also when an interrupt comes inside of `change` or `put_back`.
Assumes: what there was is noted in `__init__`, and `put_back` does no harm where nothing was changed.
"""

from __future__ import annotations

from typing import Any


class PutBack:
    """A block that changes something: `change` begins it, `put_back` ends it."""

    def change(self) -> None:
        """Make the change. What there was before was noted when this object was made."""

    def put_back(self) -> None:
        """Undo as much of the change as has been made. Called twice where an interrupt came between; once is enough."""

    def __enter__(self) -> Any:
        try:
            self.change()
        except BaseException:
            self.put_back()
            raise

    def __exit__(self, *_error: object) -> None:
        try:
            self.put_back()
        except BaseException:
            self.put_back()
            raise


class put_back_on_error:  # noqa: N801 - used like a function
    """Covers such blocks while one begins or ends: Ctrl-C may come before its first instruction or after its last.

    >>> with put_back_on_error(change), change:  # doctest: +SKIP
    ...     ...
    """

    __slots__ = ("_changes",)

    def __init__(self, *changes: Any) -> None:
        self._changes = [change for change in changes if isinstance(change, PutBack)]

    def __enter__(self) -> Any:
        pass

    def __exit__(self, kind: object, *_error: object) -> None:
        if kind is None:
            return  # the blocks themselves have put back what they changed
        try:
            self._put_back()
        except BaseException:  # a second Ctrl-C
            self._put_back()
            raise

    def _put_back(self) -> None:
        for change in reversed(self._changes):
            change.put_back()
