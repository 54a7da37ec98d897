"""Changes for the time of a block, which are put back whatever ends it."""

from __future__ import annotations

from typing import Any


class PutBack:
    """A block that changes something: `change` begins it, `put_back` ends it, and may be called again where an interrupt came between."""

    def change(self) -> None:
        """What it was was noted before, when the object was made."""

    def put_back(self) -> None:
        """Whatever of the change has been made; twice is as good as once."""

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
    """Around such blocks: Ctrl-C may come as one of them begins or ends, before its first instruction or after its last.

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
