"""Tensors that are one ordinary tensor and a description around it: DTensors, and results of collectives that are under way.

A region follows the ordinary tensor, this rank's part: it has the storage, and the version counter that ops on either side count.
Every rank runs the same ops in the same order with the same policy, so that all leave out the same ones; an op on DTensors may
communicate, and would wait for ever for a rank that does not run it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class Outer(NamedTuple):
    """What a DTensor is besides its local tensor."""

    kind: Any
    spec: Any

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Outer | None:
        """None for an ordinary tensor."""
        return cls(type(tensor), tensor._spec) if is_distributed(tensor) else None

    def around(self, local: torch.Tensor) -> torch.Tensor:
        tensor: torch.Tensor = self.kind(local, self.spec, requires_grad=False)
        return tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's own part, what a placeholder looks like, every other tensor itself. A collective under way is waited for."""
    if type(tensor) in PLAIN_TYPES:
        return tensor
    local: Any = getattr(tensor, "_local_tensor", tensor)
    if type(local) in PLAIN_TYPES:
        return local
    if not hasattr(local, "trigger_wait"):
        return getattr(local, "_local_tensor", local)
    with torch._C._DisableTorchDispatch():
        waited: torch.Tensor = local.trigger_wait()
    return waited


def is_distributed(tensor: torch.Tensor) -> bool:
    return type(tensor) not in PLAIN_TYPES and hasattr(tensor, "_local_tensor") and hasattr(tensor, "_spec")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its storage and a view, and nothing else but the description of a DTensor."""
    if type(tensor) in PLAIN_TYPES:
        return tensor.layout is torch.strided and not tensor.is_nested
    inner = getattr(tensor, "_local_tensor", tensor)
    if not is_distributed(tensor) and not hasattr(tensor, "trigger_wait"):
        return False
    return (type(inner) in PLAIN_TYPES or hasattr(inner, "trigger_wait")) and local_tensor(
        tensor
    ).layout is torch.strided


def version_of(tensor: torch.Tensor) -> int:
    """How often the memory was written through PyTorch, as far as the tensor knows; -1 where nobody counts."""
    if type(tensor) not in PLAIN_TYPES:
        tensor = local_tensor(tensor)
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor
        return -1


def storage_key(tensor: torch.Tensor) -> int | None:
    """What tells storages apart while a `Value` of them lives; None for tensors without a storage of their own."""
    if type(tensor) not in PLAIN_TYPES:
        tensor = local_tensor(tensor)
    try:
        key: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    return key
