"""Plain Python values as JSON, and back as they were: tuples stay tuples, and keys of dicts stay numbers.

Example: `{3: (1, 2.5)}` becomes `{"!dict": [[3, {"!tuple": [1, 2.5]}]]}`.
"""

from __future__ import annotations

import base64
from typing import Any

from hyper_parallel._base.errors import ArgumentTypeError, describe

__all__ = ["from_json", "to_json"]

_MOST_DEEP = 100


def to_json(value: object, where: str, depth: int = 0) -> Any:
    """Make of a value what JSON can say.

    Raises:
        TypeError: it is no plain value, with the place in it.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(
        value, (bool, int, float, str)
    ):  # of a subclass such as NumPy's float64, or an enumeration of numbers
        for plain in (bool, int, float, str):
            if isinstance(value, plain):
                return plain(value)
    if depth > _MOST_DEEP:
        raise ArgumentTypeError("A value is nested too deeply, or in itself.", where=where[:200])
    if isinstance(value, (bytes, bytearray)):
        return {"!bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        made = [to_json(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(items)]
        name = {tuple: "!tuple", set: "!set", frozenset: "!set"}.get(type(value))
        return made if name is None and not isinstance(value, tuple) else {name or "!tuple": made}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not any(key.startswith("!") for key in value):
            return {key: to_json(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        pairs = [
            [to_json(key, f"a key of {where}", depth + 1), to_json(item, f"{where}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {"!dict": pairs}
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "shape", (1,)):
        return to_json(value.item(), where, depth + 1)
    raise ArgumentTypeError(
        "A checkpoint keeps plain values beside tensors.",
        expected="numbers, text, bytes, None, and lists, tuples, sets and dicts of them",
        got=describe(value),
        where=where,
        do="Give `.tolist()` of a tensor or an array, or the parts that it is made from.",
    )


def from_json(value: Any) -> Any:
    """Make the value that `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "!tuple":
            return tuple(from_json(item) for item in content)
        if kind == "!set":
            return {from_json(item) for item in content}
        if kind == "!bytes":
            return base64.b64decode(content)
        if kind == "!dict":
            return {from_json(key): from_json(item) for key, item in content}
    return {key: from_json(item) for key, item in value.items()}
