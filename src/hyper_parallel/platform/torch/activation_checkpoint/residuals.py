"""What autograd keeps in place of a residual of a region: `tensor()` gives it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.platform.torch.activation_checkpoint.local_parts import local_tensor, version_of
from hyper_parallel.platform.torch.activation_checkpoint.placeholders import View
from hyper_parallel.platform.torch.activation_checkpoint.region_swap import Arrival, Swapped
from hyper_parallel.platform.torch.activation_checkpoint.saved_tensors import changed_in_place
from hyper_parallel.platform.torch.activation_checkpoint.saved_values import aliased
from hyper_parallel.platform.torch.activation_checkpoint.values import OpPlace, Value

if TYPE_CHECKING:
    from hyper_parallel.platform.torch.activation_checkpoint.frame import Frame


_Tensor = torch.Tensor
_ORDINARY = (False, False, None)  # neither conjugate nor negative, and nothing around it


class Recomputed:
    """A residual that is made again. While the region's forward runs it still holds the tensor."""

    __slots__ = ("__weakref__", "_frame", "_held", "_kept", "_view", "value", "version")

    def __init__(self, frame: Frame, value: Value, tensor: torch.Tensor) -> None:
        self._frame = frame
        self.value = value
        self._held: torch.Tensor | None = aliased(tensor)
        self.version = version_of(tensor)
        self._kept: FromKept | None = None

    def keep(self, place: OpPlace) -> None:
        """A policy has kept the value after it was saved here (by a view of it)."""
        if self._held is not None:
            self._kept = FromKept(self.value.kept, self._held, place)

    @property
    def held(self) -> torch.Tensor | None:
        return self._held

    def let_go(self) -> None:
        """The forward is over."""
        held, self._held = self._held, None
        if held is not None:
            self._view = _view_of_result(self.value, held)

    def tensor(self) -> torch.Tensor:
        if self._kept is not None:
            return self._kept.tensor()
        if self._held is not None:
            if version_of(self._held) != self.version:
                raise changed_in_place(self._frame.where(self.value), self.version, version_of(self._held))
            return self._held
        tensor = self._frame.recomputed(self)
        seen = View.of(tensor)
        if seen == self._view:
            return tensor
        if seen[0] is self._view[0] and seen[4:] == self._view[4:] == _ORDINARY:
            with torch._C._DisableTorchDispatch():
                return tensor.as_strided(*self._view[1:4])
        return self._view.on(local_tensor(tensor).untyped_storage(), self.value.device)


# Views of residuals that look at a value otherwise than the op that made it: those of one step are those of the next.
_views: dict[View, View] = {}
_MOST_VIEWS = 4096


def _view_of_result(value: Value, tensor: torch.Tensor) -> View:
    """How a tensor looks at a value that an op made: mostly as that op gave it, or as in the step before, and then this needs no object of its own."""
    made: View | None = getattr(value, "view", None)
    view = View.of(tensor) if made is None or type(tensor) is not _Tensor else made.or_own(tensor)
    if view is made or view.outer is not None:
        return view
    if len(_views) >= _MOST_VIEWS:  # shapes that are never the same
        _views.clear()
    return _views.setdefault(view, view)


class FromInput:
    """A residual that is an argument of the region, or a view of one."""

    __slots__ = ("__weakref__", "_device", "_frame", "_view", "value")

    def __init__(self, frame: Frame, value: Value, tensor: torch.Tensor) -> None:
        self._frame = frame
        self.value = value
        self._view = View.of(tensor)
        self._device = tensor.device

    def tensor(self) -> torch.Tensor:
        tensor = self._frame.input_tensor(self.value)
        if View.of(tensor) == self._view:
            return tensor
        return self._view.on(local_tensor(tensor).untyped_storage(), self._device)


class FromKept:
    """A residual that a policy saved, as an alias of its own, or swapped."""

    __slots__ = ("_alias", "_arrival", "_device", "_kept", "_place", "_version", "_view")

    def __init__(self, kept: Any, tensor: torch.Tensor, place: OpPlace, arrival: Arrival | None = None) -> None:
        self._arrival = arrival
        self._place = place
        if isinstance(kept, Swapped):
            self._kept = kept.another()
            self._alias: torch.Tensor | None = None
            self._view = View.of(tensor)
            self._device = tensor.device
        else:
            self._alias = aliased(tensor)
            self._version = version_of(tensor)

    def tensor(self) -> torch.Tensor:
        alias = self._alias
        if alias is None:
            return self._view.on(self._kept.memory(), self._device)
        if self._arrival is not None:
            self._arrival.note()
        version = version_of(alias)
        if version != self._version:
            raise changed_in_place(str(self._place), self._version, version)
        return alias
