"""The log of what DTensors send.

It is counted under `comm_debug`, and refused under `explicit_communication` where nobody asked for it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["CommLog", "Communication", "check_may_move", "comm_debug", "explicit_communication", "note", "why"]


class Communication(NamedTuple):
    """One collective of this rank."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce", "all_to_all", …
    axes: tuple[str, ...]
    num_bytes: int  # those that this rank receives
    why: str  # "asked" (redistribute, full_tensor, …), "implied" by an operator, or "gradient"
    where: str  # the operator, or the two layouts


class CommLog:
    """What was sent while it was open.

    Example:
        >>> with comm_debug() as log:
        ...     pass
        >>> log.total
        0
    """

    def __init__(self) -> None:
        self.entries: list[Communication] = []

    @property
    def total(self) -> int:
        """Count the collectives."""
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        """Count the bytes that this rank received, all together."""
        return sum(entry.num_bytes for entry in self.entries)

    def counts(self, why: str | None = None) -> dict[str, int]:
        """Count the collectives by kind; `why` is "asked", "implied" or "gradient"."""
        return dict(Counter(entry.kind for entry in self.entries if why is None or entry.why == why))

    def __str__(self) -> str:
        if not self.entries:
            return "No communication."
        lines = [f"{self.total} collectives, {self.num_bytes:,} bytes received by this rank"]
        lines += [
            f"  {entry.kind:<16}{'·'.join(entry.axes):<12}{entry.num_bytes:>14,} B  {entry.why:<9}{entry.where}"
            for entry in self.entries
        ]
        return "\n".join(lines)


_logs: list[CommLog] = []  # one list per process: backward may run in another thread than the `with`
# Context variables: `overlap_forward_backward` carries them over to its other thread.
_is_explicit: ContextVar[bool] = ContextVar("communication is explicit", default=False)
_why: ContextVar[tuple[str, str]] = ContextVar("why is sent what is sent", default=("asked", ""))


@contextlib.contextmanager
def comm_debug() -> Iterator[CommLog]:
    """Count the communication of DTensors inside, backward included: `with hp.comm_debug() as c: ...; print(c)`."""
    log = CommLog()
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


@contextlib.contextmanager
def explicit_communication() -> Iterator[None]:
    """Raise where an operator inside would have to move its arguments; what is asked for by name is allowed."""
    before = _is_explicit.get()
    _is_explicit.set(True)
    try:
        yield
    finally:
        _is_explicit.set(before)


def check_may_move(operator: str, source: Layout, target: Layout) -> None:
    """Raise inside `explicit_communication`."""
    if _is_explicit.get():
        raise StateError(
            f"`{operator}` would have to move one of its arguments.",
            expected=repr(target),
            got=repr(source),
            where="hp.explicit_communication()",
            do="Call `redistribute` on it first.",
        )


@contextlib.contextmanager
def why(reason: str, where: str) -> Iterator[None]:
    """Note this reason beside everything that is sent inside."""
    before = _why.get()
    _why.set((reason, where))
    try:
        yield
    finally:
        _why.set(before)


def is_open() -> bool:
    return bool(_logs)


def note(kind: str, axes: tuple[str, ...], num_bytes: int) -> None:
    """Note one collective in every log that is open. Every collective of a DTensor comes here."""
    if _logs:
        reason, where = _why.get()
        entry = Communication(kind, axes, num_bytes, reason, where)
        for log in _logs:
            log.entries.append(entry)
