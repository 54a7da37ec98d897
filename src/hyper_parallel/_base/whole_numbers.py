"""Whole numbers as users have them: Python's, NumPy's, whatever can be an index.

Guarantees: what comes back is an `int` of Python's own, or None; an `__index__` that fails counts as none.
"""

from __future__ import annotations

import operator

__all__ = ["as_int"]


def as_int(value: object) -> int | None:
    """Return a whole number as Python's int; None for everything else, also for a bool (Python's or NumPy's).

    Example:
        >>> as_int(3), as_int(True), as_int(2.0)
        (3, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(type(value), "__index__") or _is_bool(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # a tensor of several numbers, or of none yet (meta); an `__index__` that fails
        return None


def _is_bool(value: object) -> bool:
    return str(getattr(value, "dtype", "")).rpartition(".")[2].lower() in ("bool", "bool_")
