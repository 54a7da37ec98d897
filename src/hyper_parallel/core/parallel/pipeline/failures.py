"""What the sides of an overlap raise, and how two errors become one."""

from __future__ import annotations

from hyper_parallel._base.errors import StateError


class OtherSideError(StateError):
    """This side of an overlap was let go because the other one has failed, or because `abort` was called."""


class SideTimeoutError(StateError, TimeoutError):
    """A side of an overlap has waited longer than its coordinator allows."""


def attach(first: BaseException, side: str, error: BaseException) -> None:
    """Note on `first` what a side has raised beside it.

    It stands there in words in `__notes__`, and as an object at the end of the chain of `__context__`. Python prints
    the chain on every version, and the notes from 3.11 on.
    """
    text = str(error).partition("\n")[0] if isinstance(error, OtherSideError) else str(error)
    note = f"The {side} side raised as well: {type(error).__name__}: {text}"
    notes = [*getattr(first, "__notes__", ()), note]
    first.__notes__ = notes  # type: ignore[attr-defined] # Python 3.10 has no `add_note`
    _cut(error, first)
    last, seen = first, {id(first)}
    while (before := last.__cause__ or last.__context__) is not None and id(before) not in seen:
        seen.add(id(before))
        last = before
    if id(error) not in seen:
        last.__context__ = error


def _cut(error: BaseException, first: BaseException) -> None:
    """Cut every link from `error` to `first`: a cycle would keep both, and all that their frames hold."""
    todo, seen = [error], set()
    while todo:
        link = todo.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        if link.__cause__ is first:
            link.__cause__ = None
        if link.__context__ is first:
            link.__context__ = None
        todo += [found for found in (link.__cause__, link.__context__) if found is not None]
