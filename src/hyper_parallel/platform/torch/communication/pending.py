"""A tensor whose values are still on their way: its first use waits.

Looking at its shape, dtype or device is no use, and a view of it is on its way as well. Anything else waits (on an
accelerator: the current stream does, the host goes on) and computes with the plain tensor. It is not for keeping:
`detach` gives the plain tensor, and so does every other operation, so that nothing of this class ends up in a model or
in `.grad`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from hyper_parallel.platform.communication.handles import Handle


class PendingTensor(torch.Tensor):
    """Stands for a tensor that is on its way, see the module; `_elem` is that tensor, `_handle` its communication's."""

    _elem: torch.Tensor
    _handle: Handle

    @staticmethod
    def __new__(cls, elem: torch.Tensor, handle: Handle) -> PendingTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=elem.device,
            requires_grad=False,
        )
        made._elem = elem
        made._handle = handle
        return made

    def trigger_wait(self) -> torch.Tensor:
        """Wait, and return the plain tensor, valid from now on.

        The name is that of PyTorch's own tensors of this kind.
        """
        self._handle.wait()
        return self._elem

    def __repr__(self, *, tensor_contents: object = None) -> str:
        state = "there" if self._handle.is_completed() else "on its way"
        return f"PendingTensor({list(self.shape)}, {self.dtype}, {state})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func in _VIEWS and isinstance(first, PendingTensor):
            return PendingTensor(func(first._elem, *args[1:], **(kwargs or {})), first._handle)
        plain = pytree.tree_map_only(PendingTensor, lambda tensor: tensor.trigger_wait(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def tolist(self) -> Any:
        return self.trigger_wait().tolist()

    def numpy(self, **kwargs: Any) -> Any:
        return self.trigger_wait().detach().numpy(**kwargs)


_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.t.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.alias.default,
}
