"""The rules that have a name: those of users' own functions and operators, and those that replace built-in ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hyper_parallel._base.errors import ArgumentError

__all__ = ["by_name", "on_change", "register", "unregister"]

_rules: dict[str, Any] = {}
_listeners: list[Callable[[], None]] = []
_builtin_names: set[str] = set()
_lock = threading.Lock()


def register(name: str, rule: object, *, override: bool = False) -> None:
    """Register a user's rule. Raise where the name is taken, unless `override` is given."""
    with _lock:
        is_taken = name in _rules or name in _builtin_names
        if is_taken and not override:
            whose = type(_rules[name]).__name__ if name in _rules else "this package"
            raise ArgumentError(
                "An operator has one rule.",
                expected="a name that is free",
                got=f"{name!r}, which has a rule of {whose}",
                do="Choose another name, or pass `override=True` to replace it.",
            )
        _rules[name] = rule
    _changed()


def unregister(name: str) -> None:
    """Forget a user's rule; a built-in one that it had replaced counts again."""
    with _lock:
        _rules.pop(name, None)
    _changed()


def by_name(name: str) -> Any | None:
    """Return the user's rule of that name, or None."""
    return _rules.get(name)


def names_taken(names: set[str]) -> None:
    """Note names that built-in rules have."""
    _builtin_names.update(names)


def on_change(listener: Callable[[], None]) -> None:
    """Have a function called after every change: what was decided by the old rules must be forgotten."""
    _listeners.append(listener)


def _changed() -> None:
    for listener in _listeners:
        listener()
