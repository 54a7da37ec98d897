"""Moving activations by hand: groups by name, the storages in them, and the tensors in those."""

from hyper_parallel.core.swap.by_hand.manager import SwapManager
from hyper_parallel.core.swap.by_hand.storage import Storage
from hyper_parallel.core.swap.by_hand.tensor import SwapTensor

__all__ = ["SwapManager", "SwapTensor", "Storage"]
