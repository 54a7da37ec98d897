"""What autograd keeps in place of a residual of a region: `tensor()` gives it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hyper_parallel.platform.torch.regions.local_parts import local_tensor, version_of
from hyper_parallel.platform.torch.regions.placeholders import View
from hyper_parallel.platform.torch.regions.region_swap import Arrival, Swapped
from hyper_parallel.platform.torch.regions.saved_tensors import changed_in_place
from hyper_parallel.platform.torch.regions.saved_values import aliased
from hyper_parallel.platform.torch.regions.values import OpPlace, Value

if TYPE_CHECKING:
    from hyper_parallel.platform.torch.regions.frame import Frame


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
            self._kept = FromKept(self._held, place)
            if isinstance(self.value.kept, Swapped):
                self._kept.leave(self.value.kept)

    def is_as_saved(self) -> bool:
        """Whether no version tells that it was written since; asked while the forward runs."""
        return self._held is not None and version_of(self._held) == self.version

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
    """A residual that is an argument of the region, or a view of one.

    While the forward runs it holds the tensor, and after that if an op has written it and no version tells (running statistics).
    """

    __slots__ = ("__weakref__", "_device", "_frame", "_held", "_version", "_view", "value")

    def __init__(self, frame: Frame, value: Value, tensor: torch.Tensor) -> None:
        self._frame = frame
        self.value = value
        self._view = View.of(tensor)
        self._device = tensor.device
        self._held: torch.Tensor | None = aliased(tensor)
        self._version = version_of(tensor)

    def is_as_saved(self) -> bool:
        """Whether no version tells that it was written since; asked while the forward runs."""
        return self._held is not None and version_of(self._held) == self._version

    def let_go(self) -> None:
        """The forward is over, and backward gets it from the arguments."""
        self._held = None

    def tensor(self) -> torch.Tensor:
        if self._held is not None:
            if version_of(self._held) != self._version:
                raise changed_in_place(f"an input of {self._frame.name}", self._version, version_of(self._held))
            return self._held
        tensor = self._frame.input_tensor(self.value)
        if View.of(tensor) == self._view:
            return tensor
        return self._view.on(local_tensor(tensor).untyped_storage(), self._device)


class FromKept:
    """A residual that a policy saved, as an alias of its own, or swapped."""

    __slots__ = ("__weakref__", "_alias", "_kept", "_place", "_version", "_view", "arrival")

    def __init__(self, tensor: torch.Tensor, place: OpPlace, arrival: Arrival | None = None) -> None:
        self.arrival = arrival  # set only where it stays
        self._place = place
        self._alias: torch.Tensor | None = aliased(tensor)
        self._version = version_of(tensor)

    def is_as_saved(self) -> bool:
        """Whether no version tells that it was written since."""
        return self._alias is not None and version_of(self._alias) == self._version

    def leave(self, swapped: Swapped) -> None:
        """It has been swapped."""
        if self._alias is not None:
            self._kept = swapped.another()
            self._view = View.of(self._alias), self._alias.device
            self._alias = None

    def tensor(self) -> torch.Tensor:
        alias = self._alias
        if alias is None:
            view, device = self._view
            return view.on(self._kept.memory(), device)
        if self.arrival is not None:
            self.arrival.note()
        version = version_of(alias)
        if version != self._version:
            raise changed_in_place(str(self._place), self._version, version)
        return alias
