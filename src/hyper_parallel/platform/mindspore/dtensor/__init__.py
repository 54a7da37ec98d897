"""Distributed tensors on MindSpore. Importing this makes the dispatcher know them."""

from hyper_parallel.platform.mindspore.dtensor import backend  # noqa: F401 - imported for what it registers
from hyper_parallel.platform.mindspore.dtensor.making import distribute_tensor
from hyper_parallel.platform.mindspore.dtensor.tensor import DTensor

__all__ = [
    "DTensor",
    "distribute_tensor",
]
