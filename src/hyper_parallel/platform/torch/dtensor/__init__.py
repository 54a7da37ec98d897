"""Distributed tensors on PyTorch. Importing this makes the dispatcher know them."""

from hyper_parallel.platform.torch.dtensor import backend, questions  # noqa: F401 - imported for what they register
from hyper_parallel.platform.torch.dtensor.conversion import from_torch, mesh_from_torch, mesh_to_torch, to_torch
from hyper_parallel.platform.torch.dtensor.making import distribute_tensor
from hyper_parallel.platform.torch.dtensor.tensor import DTensor

__all__ = [
    "DTensor",
    "distribute_tensor",
    "from_torch",
    "mesh_from_torch",
    "mesh_to_torch",
    "to_torch",
]
