"""A CPU with less memory: within `limited`, an op after which more is alive than there is room for raises what CUDA raises."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LimitedMemory(TorchDispatchMode):
    """Counts the storages of a model and of all that ops make while it is active, whoever runs them in this thread, backward included.

    What a kernel takes and gives back by itself is not seen, so a step takes a little less here than by the allocator's events.
    """

    supports_higher_order_operators = True

    def __init__(self, model: torch.nn.Module, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.num_failures = 0
        self._refs: dict[int, tuple[StorageWeakRef, int]] = {}
        self._level = 0  # of all in `_refs`, some of which may be gone
        self._add([*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())])

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._add([result])
        if self._level > self.limit_bytes:
            self._forget_what_is_gone()
        if self._level > self.limit_bytes:
            self.num_failures += 1
            del result
            raise torch.OutOfMemoryError(
                f"CUDA out of memory (simulated). {self._level} bytes are alive after {func}; there is room for {self.limit_bytes}."
            )
        return result

    def _add(self, values: Any) -> None:
        for each in tree_leaves(values):
            if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu":
                storage = each.untyped_storage()
                known = self._refs.get(storage._cdata)
                if known is None or known[0].expired():
                    self._level += storage.nbytes() - (0 if known is None else known[1])
                    self._refs[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _forget_what_is_gone(self) -> None:
        self._refs = {key: each for key, each in self._refs.items() if not each[0].expired()}
        self._level = sum(num_bytes for _, num_bytes in self._refs.values())
