"""Moving activations by hand: groups by name, the storages in them, and the tensors in those."""

from hyper_parallel.core.swap.manager import SwapManager
from hyper_parallel.core.swap.storage import Storage
from hyper_parallel.core.swap.swap_tensor import SwapTensor

__all__ = ["SwapManager", "SwapTensor", "Storage"]
