"""What autograd keeps in place of a residual of a region: `tensor()` gives it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor

from hyper_parallel.platform.mindspore.regions.saved_tensors import Swapped
from hyper_parallel.platform.mindspore.swap.storages import Look, aliased, looking, watcher

if TYPE_CHECKING:
    from hyper_parallel.platform.mindspore.regions.frame import Frame


class Recomputed:
    """A residual that is made again. While the region's forward runs it still holds the tensor.

    `value` is a result of an op, or what autograd saved after one; `saved_after` the op after which it did.
    """

    __slots__ = ("__weakref__", "_frame", "_held", "_kept", "_look", "saved_after", "value")

    def __init__(self, frame: Frame, value: object, tensor: Tensor, saved_after: int) -> None:
        self._frame: Frame | None = frame
        self.value = value
        self.saved_after = saved_after
        self._look = Look.of(tensor)
        self._held: Tensor | None = tensor
        self._kept: FromKept | None = None
        watching = watcher()
        if watching is not None:
            watching.holds(tensor)

    @property
    def held(self) -> Tensor | None:
        return self._held

    def keep(self, kept: FromKept) -> None:
        """A policy has kept the value after it was saved here."""
        self._kept = kept
        self._held = None
        self._frame = None

    def let_go(self) -> None:
        self._held = None

    def tensor(self) -> Tensor:
        if self._kept is not None:
            return self._kept.tensor()
        if self._held is not None:
            return aliased(self._held)
        if self._frame is None:
            raise RuntimeError("A residual of a region has neither a frame nor a value.")
        return looking(self._frame.recomputed(self), self._look)


class FromInput:
    """A residual that is an argument of the region, or a view of one."""

    __slots__ = ("__weakref__", "_frame", "_look", "position")

    def __init__(self, frame: Frame, position: int, tensor: Tensor) -> None:
        self._frame = frame
        self.position = position
        self._look = Look.of(tensor)

    def tensor(self) -> Tensor:
        return looking(self._frame.input_tensor(self.position), self._look)


class FromKept:
    """A residual that a policy saved, as an alias of its own, or swapped."""

    __slots__ = ("_kept", "_look")

    def __init__(self, kept: object, tensor: Tensor) -> None:
        self._look = Look.of(tensor)
        self._kept = kept.another(self._look) if isinstance(kept, Swapped) else aliased(tensor)

    def tensor(self) -> Tensor:
        if isinstance(self._kept, Swapped):
            return self._kept.tensor()
        kept: Tensor = self._kept
        return kept
