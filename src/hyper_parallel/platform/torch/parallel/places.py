"""Where the values of a parameter are: plain, a DTensor, or PyTorch's own DTensor.

This is the one place that knows which box of a parameter this rank holds and how values get there; everything else
asks here.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed import tensor as native

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.dtensor.boxes import box_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.local_parts import mesh_coordinate
from hyper_parallel.platform.torch.devices import Devices
from hyper_parallel.platform.torch.dtensor.conversion import mesh_from_torch
from hyper_parallel.platform.torch.dtensor.tensor import DTensor, wrapped

__all__ = [
    "device_of",
    "is_part",
    "is_placeholder",
    "layout_of",
    "local_of",
    "store",
    "user_attributes",
    "whole_copy",
]


def local_of(tensor: Any) -> torch.Tensor:
    """The values of this rank."""
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, (DTensor, native.DTensor)) else tensor
    return local


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Say whether it has no memory yet."""
    return local_of(tensor).device.type == "meta"


def is_part(tensor: Any) -> bool:
    """Say whether other ranks have other parts of it."""
    if isinstance(tensor, DTensor):
        return not tensor._spec.layout.is_replicated
    return isinstance(tensor, native.DTensor) and not all(p.is_replicate() for p in tensor.placements)


def whole_copy(tensor: Any) -> torch.Tensor:
    """A plain copy of a tensor that is whole on every rank."""
    return local_of(tensor).detach().clone()


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """The layout; None of a plain tensor. Of PyTorch's DTensor its mesh counts alone, and dims are not said."""
    if isinstance(tensor, DTensor):
        return tensor._spec.layout
    if isinstance(tensor, native.DTensor):
        return Layout(mesh_from_torch(tensor.device_mesh), ((),) * tensor.ndim)
    return None


def device_of(tensor: torch.Tensor, device: torch.device) -> torch.device:
    """Where its values are, or will be: `device` if they may be anywhere."""
    if not is_placeholder(tensor):
        return local_of(tensor).device
    if isinstance(tensor, (DTensor, native.DTensor)):
        kind = tensor.device_mesh.device_type
        return Devices.device() if kind == Devices.device_type() else torch.device(kind)
    return device


@torch.no_grad()
def store(tensor: Any, whole: torch.Tensor, name: str) -> torch.Tensor:
    """Keep this rank's box of a whole tensor, and return the tensor that has it now.

    It is the same object, which modules and optimizers hold, unless PyTorch cannot give memory to that one.
    """
    part = _part(tensor, whole, name)
    if not is_placeholder(tensor):
        local_of(tensor).copy_(part)
        return tensor
    if part is not whole:
        part = part.to(device_of(tensor, whole.device), copy=True, memory_format=torch.contiguous_format)
    made: Any = part.detach()
    if isinstance(tensor, DTensor):
        made = wrapped(made, tensor._spec)
    elif isinstance(tensor, native.DTensor):
        made = native.DTensor.from_local(
            made,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return _replaced(tensor, made)


def _part(tensor: Any, whole: torch.Tensor, name: str) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        layout = tensor._spec.layout
        if layout.partial:
            raise StateError("A sum that lies in parts has no box.", got=repr(layout), where=name)
        box = box_of(layout, tensor._spec.shape, mesh_coordinate(layout.mesh))
        return whole[tuple(slice(start, end) for start, end in zip(box.starts, box.ends, strict=True))]
    if isinstance(tensor, native.DTensor):
        # PyTorch cuts it as it cut the parameter: also where two axes split one dim. Nothing is sent.
        cut = native.distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
        return cut._local_tensor
    return whole


def _replaced(tensor: Any, made: Any) -> torch.Tensor:
    """Put a tensor with memory in the place of one without, into the object that others hold."""
    attributes = user_attributes(tensor)
    if isinstance(tensor, nn.Parameter):
        kind = type(tensor)
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        if kind is not type(made) and not isinstance(tensor, (DTensor, native.DTensor)):
            made.__class__ = kind
    made.__dict__.update(attributes)
    if weakref.getweakrefcount(tensor):
        # PyTorch swaps no such tensor. Recurrent layers have weak references to theirs.
        return made
    torch.utils.swap_tensors(tensor, made)
    return tensor


def user_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What users have put on a tensor, and nothing of what a DTensor keeps of itself.

    Also not Hugging Face's mark of a tensor that has its values: it gets new ones.
    """
    return {key: value for key, value in tensor.__dict__.items() if key not in _NOT_OF_USERS}


_NOT_OF_USERS = {
    "_spec", "_local", "_local_tensor", "_values", "_origin", "_ties", "_view_of", "_is_param", "_is_hf_initialized"
}  # fmt: skip
