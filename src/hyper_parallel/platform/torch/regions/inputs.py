"""The tensors among the arguments of a region: what is kept of them for backward, and how the function gets them again.

While the forward runs they are the tensors that were given. When it is over, each that backward may need is packed by who packs the inputs
(a swap, or the saved-tensor hooks around the region), and the others are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.regions.arguments import SavedArguments
from hyper_parallel.core.regions.passes import Pass
from hyper_parallel.platform.torch.regions.local_parts import PLAIN_TYPES, is_plain, local_tensor
from hyper_parallel.platform.torch.regions.placeholders import (
    View,
    another_placeholder,
    is_placeholder,
)
from hyper_parallel.platform.torch.regions.recording import Record
from hyper_parallel.platform.torch.regions.replaying import Replay
from hyper_parallel.platform.torch.regions.saved_tensors import Kept
from hyper_parallel.platform.torch.regions.saved_values import aliased
from hyper_parallel.platform.torch.regions.values import Value

_unsafe_view = torch.ops.aten._unsafe_view.default._op


class _Input(NamedTuple):
    """A tensor argument: how it looked, and how to get it back (None: nobody needs it)."""

    value: Value | None
    view: View | None
    num_bytes: int
    requires_grad: bool
    is_leaf: bool
    unpack: Callable[[], torch.Tensor] | None


class Inputs:
    """The tensor arguments of one call; they are known by their index."""

    def __init__(self, arguments: SavedArguments, where: str) -> None:
        self._arguments = arguments
        self._where = where
        self._kept: list[_Input] = []  # when the forward is over

    # -- forward ------------------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> list[torch.Tensor]:
        """As they were given; none when the forward is over."""
        return self._arguments.tensors

    def keep(
        self,
        record: Record,
        needed: Collection[Value],
        pack: Callable[[torch.Tensor], Any] | None,
        *,
        is_called_again: bool,
        reads_by_ops_only: bool,
    ) -> list[tuple[Value, Any]]:
        """The forward is over: keep the inputs that backward needs, and let go of all.

        Args:
            needed: what residuals are, and what the replay takes.
            pack: gives what is kept in place of a tensor; None: the hooks around this region do, and without any it is kept as it is.
            is_called_again: whether the function may be, and gets its arguments then.
            reads_by_ops_only: whether it is known to read no tensor but by ops.

        Returns:
            What is swapped, with its slot.
        """
        arguments = self._arguments
        swapped: list[tuple[Value, Any]] = []
        pack = pack or _pack_around()
        for value, tensor, is_direct in zip(record.inputs, arguments.tensors, arguments.is_direct, strict=True):
            unpack = None
            # One that was written in the region is either not needed, or a copy of what it was is kept in its value.
            may_be_read = is_called_again and (is_direct or not reads_by_ops_only)
            if value is None or (value.kept is None and record.is_current(value) and (value in needed or may_be_read)):
                packed = pack(tensor) if is_direct and pack is not None else Kept(tensor, self._where)
                unpack = packed.tensor
                slot = getattr(packed, "slot", None)
                if slot is not None and value is not None:
                    swapped.append((value, slot))
            view = View.of(tensor) if is_plain(tensor) else None
            num_bytes = 0 if value is None else value.num_bytes
            self._kept.append(_Input(value, view, num_bytes, tensor.requires_grad, tensor.is_leaf, unpack))
        arguments.forget_tensors()
        return swapped

    def given(self, record: Record, value: Value) -> torch.Tensor:
        """The tensor of a value, while the forward still runs."""
        return next(tensor for known, tensor in zip(record.inputs, self.tensors, strict=True) if known is value)

    # -- backward -----------------------------------------------------------------------------------------------------

    def are_kept(self) -> bool:
        """Whether the forward is over."""
        return bool(self._kept)

    def are_all_kept(self) -> bool:
        """Whether backward can have each of them, when the forward is over."""
        return all(each.unpack is not None for each in self._kept)

    def are_ordinary(self) -> bool:
        """Whether all are tensors with a storage of their own, and none is distributed."""
        return all(each.view is not None and each.view.outer is None for each in self._kept)

    def index_of(self, value: Value) -> int | None:
        """Which argument has a value; None if it has another one since."""
        return next((i for i, each in enumerate(self._kept) if each.value is value and each.unpack is not None), None)

    def tensor(self, index: int, current: Pass) -> torch.Tensor:
        """An input, laid out as it was. It comes back once for a backward."""
        if index not in current.inputs:
            each = self._kept[index]
            if each.unpack is None:
                raise StateError("An input of a region is needed that was not kept.", where=self._where)
            tensor = each.unpack()
            if each.view is not None and View.of(tensor) != each.view:
                tensor = _laid_out(tensor, each.view, each.num_bytes)  # hooks of others may give back another layout
            current.inputs[index] = tensor
        return current.inputs[index]

    def again(self, replay: Replay, current: Pass) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments, for a second call of the function."""
        return self._arguments.rebuild(lambda index: self._replayed(index, replay, current))

    def _replayed(self, index: int, replay: Replay, current: Pass) -> torch.Tensor:
        each = self._kept[index]
        if each.view is None or each.value is None:
            tensor = aliased(self.tensor(index, current))
        else:
            tensor = replay.input_tensor(each.value, each.view, lambda: self.tensor(index, current))
        tensor.requires_grad_(each.requires_grad)
        if each.is_leaf:  # plant: leaf-input
            return tensor
        # A leaf would be treated differently: autocast remembers leaves it has cast, and they cannot be written.
        with torch._C._DisableTorchDispatch():
            return no_leaf(tensor)


class _Packed:
    """A tensor as the saved-tensor hooks around a region have packed it."""

    def __init__(self, unpack: Callable[[Any], torch.Tensor], packed: object) -> None:
        self._unpack = unpack
        self._packed = packed

    def tensor(self) -> torch.Tensor:
        return self._unpack(self._packed)


def _pack_around() -> Callable[[torch.Tensor], _Packed] | None:
    """What the saved-tensor hooks around a region do; None without any."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if found is None:
        return None
    pack, unpack = found
    return lambda tensor: _Packed(unpack, pack(tensor))


def _laid_out(tensor: torch.Tensor, view: View, num_bytes: int) -> torch.Tensor:
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        storage = torch.empty(num_bytes, dtype=torch.uint8, device=tensor.device).untyped_storage()
        laid_out = view.on(storage, tensor.device)
        local_tensor(laid_out).copy_(local_tensor(tensor))
    return laid_out


def no_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor as the result of something, and no view."""
    if type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided:
        # To autograd this is an op like any other, and it is many times faster than a function of our own.
        result: torch.Tensor = _unsafe_view(tensor, tensor.size())
        if result.stride() == tensor.stride() and View.of(result) == View.of(tensor):
            return result
    made: torch.Tensor = _NoLeaf.apply(tensor)
    return made


class _NoLeaf(torch.autograd.Function):
    """The same tensor as the result of something."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        if is_placeholder(tensor):
            return another_placeholder(tensor)
        if not is_plain(tensor):
            return tensor.view_as(tensor)
        return View.of(tensor).on(local_tensor(tensor).untyped_storage(), tensor.device)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
