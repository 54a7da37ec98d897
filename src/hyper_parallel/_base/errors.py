"""The errors of this package.

Every error says what failed; what was expected and what was got; where; and one thing to do.

Guarantees: each class also inherits the built-in that a user would catch, so that `except ValueError` works without
knowing this module. An error that travels between processes arrives with all its parts. `describe` never raises and
never shows a tensor's numbers.
"""

from __future__ import annotations

import itertools
from typing import Any

__all__ = [
    "HyperParallelError",
    "ArgumentError",
    "ArgumentTypeError",
    "StateError",
    "FrameworkMissingError",
    "ComesLaterError",
    "NotProvidedError",
    "UnsupportedDeviceError",
    "DamagedFileError",
    "CommunicationError",
    "describe",
]


class HyperParallelError(Exception):
    """Base of all errors raised by this package.

    Example:
        >>> print(
        ...     HyperParallelError(
        ...         "The budget cannot be met.",
        ...         expected="at most 4 GiB",
        ...         got="6 GiB",
        ...         where="layers.3",
        ...         do="Raise the budget.",
        ...     )
        ... )
        The budget cannot be met.
        Expected at most 4 GiB, got 6 GiB; layers.3.
        Raise the budget.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: str | None = None,
        got: str | None = None,
        where: str | None = None,
        do: str | None = None,
    ) -> None:
        self.what = what
        self.expected = expected
        self.got = got
        self.where = where
        self.do = do
        super().__init__(_compose(what, expected, got, where, do))

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with the composed text as `what` and lose the parts; errors travel between
        # processes, so they must arrive as they left.
        parts = {"expected": self.expected, "got": self.got, "where": self.where, "do": self.do}
        return _rebuild, (type(self), self.what, parts)


class ArgumentError(HyperParallelError, ValueError):
    """An argument has the right type and a value that cannot be used."""


class ArgumentTypeError(HyperParallelError, TypeError):
    """An argument has the wrong type."""


class StateError(HyperParallelError, RuntimeError):
    """A call that is not possible now: something before it decided otherwise, or has not happened yet."""


class FrameworkMissingError(HyperParallelError, ImportError):
    """A framework or an optional package is needed and not installed."""


class ComesLaterError(HyperParallelError, NotImplementedError):
    """A name of the contract whose part of the package is not in this version yet."""


class NotProvidedError(HyperParallelError, NotImplementedError):
    """A user's own subclass of `Platform` lacks a method."""


class UnsupportedDeviceError(HyperParallelError, RuntimeError):
    """The framework has no such thing on this device."""


class DamagedFileError(HyperParallelError, ValueError):
    """A file is not what was written: cut, changed, or not of this format."""


class CommunicationError(HyperParallelError, RuntimeError):
    """A communication between ranks failed; says which rank is missing, and what each was calling."""


def describe(value: object, limit: int = 80) -> str:
    """Put a value into a short text for `got`: its type and value; a tensor or array by dtype and shape, not by
    numbers.

    Never fails: it is called where something is wrong already, and a value's own `repr` may be what is wrong.
    """
    if value is None:
        return "None"
    limit = limit if type(limit) is int and limit > 0 else 80
    name = type(value).__name__
    if (look := _look(value)) is not None:
        return f"{name} {look}"
    text = _text(value, limit)
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return f"{text} ({name})"


_MANY = 20  # items of a container that are looked at: the text is cut long before
_DEEP = 4


_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), dict: ("{", "}"), frozenset: ("frozenset({", "})")
}  # fmt: skip


def _look(value: object) -> str | None:
    """Return dtype and shape of a tensor or array as text, None for anything else.

    One number of NumPy's has both, and is shown as it is.
    """
    try:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is None or dtype is None or isinstance(value, type):
            return None
        if type(value).__module__ == "numpy" and type(value).__name__ != "ndarray":
            return None
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    except Exception:  # attributes of the user's own making
        return None


def _text(value: Any, limit: int, depth: int = 0) -> str:
    # Containers item by item: `repr` of a long one takes long, and that of a distributed tensor in it communicates.
    kind = type(value)
    if kind in _BRACKETS and value:
        if depth == _DEEP:
            return "…"
        items = list(itertools.islice(value.items() if kind is dict else value, _MANY))
        if kind is dict:
            parts = [f"{_text(key, limit, depth + 1)}: {_text(item, limit, depth + 1)}" for key, item in items]
        else:
            parts = [_text(item, limit, depth + 1) for item in items]
        parts += ["…"] if len(value) > _MANY else []
        opening, closing = _BRACKETS[kind]
        comma = "," if kind is tuple and len(parts) == 1 else ""
        return f"{opening}{', '.join(parts)}{comma}{closing}"
    if (look := _look(value)) is not None:
        return f"{kind.__name__} {look}"
    try:
        if kind is int and value.bit_length() > 4 * limit:  # Python refuses to write some thousand digits
            return f"a number of {value.bit_length()} bits"
        if kind in (str, bytes, bytearray):
            return repr(value[: limit + 1])
        if kind.__module__ == "numpy" and hasattr(value, "item"):
            return repr(value.item())
        return str(repr(value))
    except Exception as error:
        return f"<its repr raises {type(error).__name__}>"


def _compose(what: str, expected: str | None, got: str | None, where: str | None, do: str | None) -> str:
    parts = []
    if expected is not None:
        parts.append(f"expected {expected}")
    if got is not None:
        parts.append(f"got {got}")
    line = ", ".join(parts)
    if where is not None:
        line = f"{line}; {where}" if line else f"in {where}"
    lines = [what]
    if line:
        lines.append(line[0].upper() + line[1:] + ".")
    if do is not None:
        lines.append(do)
    return "\n".join(lines)


def _rebuild(cls: type[HyperParallelError], what: str, parts: dict[str, str | None]) -> HyperParallelError:
    return cls(what, **parts)
