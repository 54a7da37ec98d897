"""Containers of values, walked without knowing a framework: mappings, lists, (named) tuples, dataclasses, sets.

The type of every container is kept. The input is never changed: each container on the way is rebuilt.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from hyper_parallel._base.errors import ArgumentTypeError, describe

Leaf = Callable[[Any], Any]


def map_leaves(fn: Leaf, tree: object) -> Any:
    """Apply `fn` to everything in `tree` that is not a container, and return the tree of the results."""
    if not callable(fn):
        raise ArgumentTypeError("The function to apply comes first.", expected="a callable", got=describe(fn))
    return _map(fn, tree)


def leaves(tree: object) -> Iterator[Any]:
    """Give everything in `tree` that is not a container, in order."""
    children = _children(tree)
    if children is None:
        yield tree
        return
    for child in children:
        yield from leaves(child)


def _children(tree: Any) -> list[Any] | None:
    if isinstance(tree, MutableMapping):
        return list(tree.values())
    if isinstance(tree, (list, tuple, set, frozenset)):
        return list(tree)
    if _is_dataclass_value(tree):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    return None


def _map(fn: Leaf, tree: Any) -> Any:
    # Mappings come before dataclasses: Hugging Face's outputs are both, and there the mapping's items are the truth.
    if isinstance(tree, MutableMapping):
        mapped = copy.copy(tree)  # keeps the default factory, the order and the attributes of a subclass
        for key, value in tree.items():
            mapped[key] = _map(fn, value)
        return mapped
    if isinstance(tree, (set, frozenset)):
        items = [_map(fn, item) for item in tree]
        try:
            return type(tree)(items)
        except TypeError as error:
            raise ArgumentTypeError(
                "The function made something of a set's item that no set can hold.",
                expected="a hashable value",
                got=describe(next((item for item in items if not _is_hashable(item)), None)),
                do="Use a list or tuple in place of the set.",
            ) from error
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(fn, item) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(fn, item) for item in tree)
    if _is_dataclass_value(tree):
        mapped = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # object.__setattr__: a frozen dataclass is rebuilt too, and fields with init=False keep their place
            object.__setattr__(mapped, field.name, _map(fn, getattr(tree, field.name)))
        return mapped
    return fn(tree)


def _is_dataclass_value(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
