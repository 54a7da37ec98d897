"""Objects that exist once per value: comparing and hashing them is comparing and hashing an address.

A dictionary keyed on layouts is asked on every operator call, so no Python code may run for a hash or a comparison. An
interned class therefore defines neither `__eq__` nor `__hash__`; instead its `__new__` looks the value up in a table
and answers the object that is there. The tables keep what they hold: meshes and layouts are few, and none of them
depends on a tensor's size.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from hyper_parallel._base.errors import StateError

Self = TypeVar("Self", bound="Interned")


class Interned:
    """Base of immutable classes whose equal objects are one object.

    A copy is the object itself. A subclass brings `__new__`, `__slots__` and `__reduce__`.
    """

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise StateError(
            f"`{name}` of a {type(self).__name__} cannot be set: it is shared by everybody who made an equal one.",
            do=f"Make another {type(self).__name__}.",
        )

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        return self

    def _fill(self, **values: object) -> None:
        """Set attributes of an object that nobody else has seen yet."""
        for name, value in values.items():
            object.__setattr__(self, name, value)
