"""What one stage gives to the next: any nesting of tensors and plain values, as a form and the tensors in it.

Example: a stage returns `{"hidden": h, "length": 7}`, with `h` of float32[2, 8]. In its form `Place(0)` stands for `h`,
with the meta of one tensor; what is sent at each step is `h` alone. The form goes ahead of it the first
time, and each time where shapes are said to be dynamic.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.parallel.backend import ParallelBackend, TensorMeta
from hyper_parallel.platform.opaque import Tensor
from hyper_parallel.platform.trees import map_leaves

__all__ = ["Form", "form_of", "rebuilt"]


class Place:
    """Where a tensor stands in a form. No dataclass, which would be walked like the containers around it."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


@dataclass
class Form:
    """All of a message but its tensors. Compared by value, pickled, sent to another rank."""

    tree: Any
    metas: tuple[TensorMeta | None, ...]  # None: a gradient that is not there

    def check_same(self, other: Form, what: str) -> None:
        """Raise unless a message of this form may be received as the other one."""
        if self.metas != other.metas or not _is_equal(self.tree, other.tree):
            raise StateError(
                f"{what} is of another form than in the first step.",
                expected=str(other),
                got=str(self),
                do="Give Pipeline(..., dynamic_shapes=True) on all ranks; each message then says what it is.",
            )

    def __str__(self) -> str:
        tensors = [
            "no gradient" if meta is None else f"{meta.dtype}{list(meta.shape)}{' with gradient' * meta.requires_grad}"
            for meta in self.metas
        ]
        return ", ".join(tensors) or "no tensor"


def form_of(backend: ParallelBackend, value: object) -> tuple[Form, list[Tensor]]:
    """Take a value apart into its form and its tensors, in order."""
    tensors: list[Tensor] = []

    def place(leaf: object) -> object:
        if not backend.is_tensor(leaf):
            return leaf
        tensors.append(leaf)
        return Place(len(tensors) - 1)

    tree = map_leaves(place, value)
    return Form(tree, tuple(backend.meta(tensor) for tensor in tensors)), tensors


def rebuilt(form: Form, tensors: Sequence[Tensor]) -> Any:
    """The value of a form, with these tensors in it."""
    return map_leaves(lambda leaf: tensors[leaf.number] if isinstance(leaf, Place) else leaf, form.tree)


def _is_equal(one: object, other: object) -> bool:
    for as_compared in (lambda tree: tree, pickle.dumps):  # many a value is equal to itself alone, not to its copy
        with suppress(Exception):  # of values of the user's own making
            if as_compared(one) == as_compared(other):
                return True
    return False
