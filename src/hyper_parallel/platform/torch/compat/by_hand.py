"""What moves by hand need of PyTorch: a tensor to hold and its parts, and hooks that tell a module's turn.

What `core/swap/by_hand` calls is at the end: `BACKEND`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from hyper_parallel.core.swap.by_hand.layer_order import ORDER
from hyper_parallel.core.swap.by_hand.tensor import ByHandBackend, Held, Parts
from hyper_parallel.platform.arguments import check_module
from hyper_parallel.platform.torch.regions.local_parts import PLAIN_TYPES
from hyper_parallel.platform.torch.regions.saved_tensors import base_check_fn
from hyper_parallel.platform.torch.swap.device import flat
from hyper_parallel.platform.torch.swap.engines import engine_of
from hyper_parallel.platform.trees import leaves


class PinnedAlias:
    """An alias of a tensor that shares its storage and its version, and not its graph."""

    __slots__ = ("_is_movable", "stream", "value")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._is_movable = _is_movable(tensor)  # asked of the tensor itself: an alias of a parameter is no parameter
        self.value = tensor.detach()
        self.stream = _current_stream(tensor.device)

    def read_version(self) -> int:
        return 0 if self.value.is_inference() else self.value._version

    def parts(self) -> Any:
        found = engine_of(self.value.device) if self._is_movable else None
        storage = self.value.untyped_storage() if found is not None else None
        if found is None or storage is None or storage.nbytes() == 0:
            return None
        return Parts(found[0], flat(self.value), storage.nbytes(), storage._cdata, _rebuilder(self.value))


# Functions of this module, and no closures: a model that has them can be pickled.


def _first_begins(module: nn.Module, _args: object) -> None:
    ORDER.first_begins(module)


def _second_begins(module: nn.Module, _args: object) -> None:
    ORDER.second_begins(module)


def _second_ends(module: nn.Module, _args: object, output: object) -> None:
    launch = ORDER.second_ends(module)
    if launch is None:
        return
    # On the nodes of this very output, not on the module: several forwards may be alive, and each loads what is its
    # own.
    for tensor in leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(_ignoring_gradients(launch))


def _ignoring_gradients(launch: Callable[[], None]) -> Callable[[Any], None]:
    return lambda _gradients: launch()


def _current_stream(device: torch.device) -> Any:
    find: Any = getattr(getattr(torch, device.type, None), "current_stream", None)
    return None if device.type == "cpu" or find is None else find(device)


def _is_movable(tensor: torch.Tensor) -> bool:
    """Tell whether the whole of a tensor is in its storage, and the storage is nobody's parameter."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
        and base_check_fn(tensor)
    )


def _rebuilder(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    dtype, size, stride, offset = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def rebuild(buffer: torch.Tensor) -> torch.Tensor:
        view = torch.empty(0, dtype=dtype, device=buffer.device)
        return view.set_(buffer.untyped_storage(), offset, size, stride)

    return rebuild


class TorchByHand:
    """What `ByHandBackend` asks for."""

    folder: ClassVar[str] = ByHandBackend.folder

    def hold(self, tensor: torch.Tensor) -> Held:
        return PinnedAlias(tensor)

    def hook_order(self, first: nn.Module, second: nn.Module) -> None:
        for module in (first, second):
            check_module(module, nn.Module, "set_forward_prefetch_layer")
        # A hook is looked for by identity: a copy of a module has the hooks, too, and needs no others.
        if _first_begins not in first._forward_pre_hooks.values():
            first.register_forward_pre_hook(_first_begins)
        if _second_begins not in second._forward_pre_hooks.values():
            second.register_forward_pre_hook(_second_begins)
        if _second_ends not in second._forward_hooks.values():
            second.register_forward_hook(_second_ends)


BACKEND: ByHandBackend = TorchByHand()
