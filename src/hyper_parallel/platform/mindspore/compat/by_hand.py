"""What moves by hand need of MindSpore: a tensor to hold and its parts, and hooks that tell a cell's turn.

What `core/swap/by_hand` calls is at the end: `BACKEND`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import mindspore
from mindspore import Tensor, nn

from hyper_parallel.core.swap.by_hand.layer_order import ORDER
from hyper_parallel.core.swap.by_hand.tensor import ByHandBackend, Held, Parts
from hyper_parallel.platform.arguments import check_module
from hyper_parallel.platform.mindspore.regions.saved_tensors import base_check_fn
from hyper_parallel.platform.mindspore.swap.device import flat, is_on_host, tensor_on
from hyper_parallel.platform.mindspore.swap.engines import engine_of
from hyper_parallel.platform.mindspore.swap.storages import (
    Look,
    aliased,
    storage_address,
    storage_bytes,
)
from hyper_parallel.platform.trees import leaves


class PinnedAlias:
    """An alias of a tensor that shares its storage and not its graph."""

    __slots__ = ("_is_movable", "stream", "value")

    def __init__(self, tensor: Tensor) -> None:
        # Asked of the tensor itself: an alias of a parameter is no parameter.
        self._is_movable = type(tensor) is Tensor and base_check_fn(tensor)
        self.value = aliased(tensor)
        self.stream = None if is_on_host(tensor) or tensor.is_meta else mindspore.runtime.current_stream()

    def read_version(self) -> int:
        """Return how often it was written; on the CPU always 0, since MindSpore counts no writes there."""
        return 0 if is_on_host(self.value) else int(self.value._version)

    def parts(self) -> Any:
        found = engine_of(str(self.value.device)) if self._is_movable else None
        if found is None:
            return None
        num_bytes = storage_bytes(self.value)
        return Parts(found[0], flat(self.value), num_bytes, storage_address(self.value), _rebuilder(self.value))


def _rebuilder(tensor: Tensor) -> Callable[[Any], Tensor]:
    look = Look.of(tensor)
    return lambda buffer: tensor_on(buffer, look)


# Functions of this module, and no closures: a model that has them can be pickled.


def _first_begins(cell: nn.Cell, _args: object) -> None:
    ORDER.first_begins(cell)


def _second_begins(cell: nn.Cell, _args: object) -> None:
    ORDER.second_begins(cell)


def _second_ends(cell: nn.Cell, _args: object, output: object) -> None:
    launch = ORDER.second_ends(cell)
    if launch is None:
        return
    # On the nodes of this very output, not on the cell: several forwards may be alive, and each loads what is its own.
    for tensor in leaves(output):
        if isinstance(tensor, Tensor) and tensor._grad_node is not None:
            tensor._grad_node.register_prehook(_ignoring_gradients(launch))


def _ignoring_gradients(launch: Callable[[], None]) -> Callable[..., None]:
    return lambda *_gradients: launch()


class MindSporeByHand:
    """What `ByHandBackend` asks for."""

    folder: ClassVar[str] = ByHandBackend.folder

    def hold(self, tensor: Tensor) -> Held:
        return PinnedAlias(tensor)

    def hook_order(self, first: nn.Cell, second: nn.Cell) -> None:
        for cell in (first, second):
            check_module(cell, nn.Cell, "set_forward_prefetch_layer")
        # A hook is looked for by identity: a copy of a cell has the hooks, too, and needs no others.
        if _first_begins not in (first._lazy_forward_pre_hook or {}).values():
            first.register_forward_pre_hook(_first_begins)
        if _second_begins not in (second._lazy_forward_pre_hook or {}).values():
            second.register_forward_pre_hook(_second_begins)
        if _second_ends not in (second._lazy_forward_hook or {}).values():
            second.register_forward_hook(_second_ends)


BACKEND: ByHandBackend = MindSporeByHand()
