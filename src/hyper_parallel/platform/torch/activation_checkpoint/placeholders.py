"""Tensors with everything but memory: shape, strides, dtype, device, and a storage that claims its size.

They stand for results that nothing needs while a function is run again. Views of them are made as of any tensor. Reading their
memory from Python (`data_ptr`, `numpy`, `tolist`, a Triton launch) raises in PyTorch itself; whoever runs an op on one must
look first (`replaying` does).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class View(NamedTuple):
    """How a tensor looks at its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        return cls(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        """The same look at another storage. No autograd, no dispatch mode sees it."""
        with torch._C._DisableTorchDispatch():
            tensor = torch.empty(0, dtype=self.dtype, device=device)
            tensor.set_(storage, self.offset, self.size, self.stride)
            if self.is_conj:
                tensor = torch._conj(tensor)
            if self.is_neg:
                tensor = torch._neg_view(tensor)
        return tensor


def placeholder(view: View, num_bytes: int, device: torch.device) -> torch.Tensor:
    """A tensor that looks like `view` on a storage of `num_bytes`, without memory."""
    storage = torch._C._construct_storage_from_data_pointer(0, device, num_bytes)
    tensor = view.on(storage, device)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor
