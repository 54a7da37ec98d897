"""`Spec`: what a rule knows of a tensor, its layout and its global shape.

Interned, so that a cache finds it by its address.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_parallel.core.dtensor.boxes import box_of, check_shape
from hyper_parallel.core.dtensor.interned import Interned
from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["Spec"]


class Spec(Interned):
    """A layout with a global shape. Equal ones are the same object.

    The table is emptied when it has grown large (programs with ever new sequence lengths): two equal specs may then be
    different objects, which costs a cache miss and nothing else.

    Example:
        >>> from hyper_parallel import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        >>> Spec(mesh.layout("dp", None), (5, 3))
        Spec[5, 3] Layout(dp, -)
    """

    __slots__ = ("layout", "num_elements", "shape")
    layout: Layout
    shape: tuple[int, ...]
    num_elements: int
    _made: ClassVar[dict[tuple[Layout, tuple[int, ...]], Spec]] = {}
    _LIMIT: ClassVar[int] = 65536

    def __new__(cls, layout: Layout, shape: Sequence[int]) -> Spec:
        key = layout, tuple(shape)
        found = cls._made.get(key)
        if found is not None:
            return found
        check_shape(layout, key[1])
        made = object.__new__(cls)
        made._fill(layout=layout, shape=key[1], num_elements=math.prod(key[1]))
        if len(cls._made) >= cls._LIMIT:
            cls._made.clear()
        return cls._made.setdefault(key, made)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def has_empty_parts(self) -> bool:
        """Say whether a rank holds nothing of the tensor: the last one of every axis holds least."""
        last = tuple(size - 1 for size in self.layout.mesh.shape)
        return 0 in self.local_shape_at(last)

    def local_shape_at(self, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what the rank at this coordinate of the mesh holds."""
        return box_of(self.layout, self.shape, coordinate).sizes

    def __repr__(self) -> str:
        return f"Spec{list(self.shape)} {self.layout}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec, (self.layout, self.shape)
