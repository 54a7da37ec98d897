"""An operator of MindSpore's hook as an object that can be compared, kept in a dictionary, and called.

The hook makes a new object per call. Older primitives come packed: `(primitive, name, arguments)`, with what they were
made with as attributes of the primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore.ops import Primitive

__all__ = ["Operator", "operator_of"]


class Operator:
    """An operator. It is equal to that of every other call of the same primitive with the same attributes."""

    __slots__ = ("_call", "_key", "attributes", "name", "primitive")

    def __init__(self, name: str, call: Callable[..., Any], primitive: Any = None) -> None:
        self.name = name
        self._call = call
        self.primitive = primitive
        self.attributes: dict[str, Any] = {} if primitive is None else primitive.attrs
        # Kept as text: attributes may be lists, which have no hash.
        self._key: Any = name if not self.attributes else (name, repr(sorted(self.attributes.items(), key=_by_name)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.primitive is None:
            return self._call(*args, **kwargs)
        return self._call(self.primitive, self.name, args)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operator) and self._key == other._key

    def __repr__(self) -> str:
        return f"Operator({self._key!r})"


def _by_name(item: tuple[str, Any]) -> str:
    return item[0]


def operator_of(func: Any, args: Sequence[Any]) -> tuple[Operator, Sequence[Any]]:
    """Return the operator of a call of the hook, and its own arguments."""
    if len(args) == 3 and type(args[1]) is str and isinstance(args[0], Primitive):
        return Operator(args[1], func, args[0]), args[2]
    return Operator(func.name, func), args
