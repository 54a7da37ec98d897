"""What a DTensor answers about itself: everything that is asked of it means the global tensor."""

from __future__ import annotations

from typing import Any

from mindspore import Parameter, Tensor
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.shard.spec import Spec

__all__ = ["GlobalMeta"]


class GlobalMeta:
    """The part of `DTensor` that answers questions.

    In the class's bases it comes before `Tensor`, whose answers would be those of this rank's part.
    """

    _spec: Spec
    _local: Tensor
    full_tensor: Any  # a method of `DTensor`

    @property
    def layout(self) -> Layout:
        return self._spec.layout

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._spec.layout.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.layout.mesh

    @property
    def _local_tensor(self) -> Tensor:
        return self._local

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        return tuple(self._local.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._spec.shape

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    def dim(self) -> int:
        return len(self._spec.shape)

    @property
    def size(self) -> int:
        """Return the number of elements, as `Tensor.size` does."""
        return self._spec.num_elements

    def numel(self) -> int:
        return self._spec.num_elements

    ndimension = dim
    nelement = numel

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return int(self._spec.num_elements * self._local.itemsize)

    @property
    def device(self) -> str:
        return str(self._local.device)

    @property
    def is_meta(self) -> bool:
        return bool(self._local.is_meta)

    def stride(self, dim: int | None = None) -> Any:
        """Return strides of the whole tensor, as if it lay in memory in the order of this rank's part."""
        local = self._local.stride()
        order = sorted(range(self.ndim), key=lambda at: (-local[at], at))
        strides, step = [0] * self.ndim, 1
        for at in reversed(order):
            strides[at] = step
            step *= max(self._spec.shape[at], 1)
        return tuple(strides) if dim is None else strides[dim]

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the same in bytes."""
        return tuple(step * self._local.itemsize for step in self.stride())

    def is_contiguous(self) -> bool:
        return bool(self._local.is_contiguous())

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._spec.shape[0]

    def __repr__(self) -> str:
        name = f", name={self.name}" if isinstance(self, Parameter) else ""
        return f"DTensor({self._local.dtype}{list(self._spec.shape)}{name}, {self._spec.layout}, here: {self._local})"

    __str__ = __repr__

    def __hash__(self) -> int:
        return id(self)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 and spec else repr(self)

    def item(self) -> Any:
        """Return the number, of the whole tensor."""
        if self._spec.num_elements != 1:
            raise ArgumentError("Only one element can be a number.", expected="one", got=f"shape {self._spec.shape}")
        with _no_grad():
            return self.full_tensor().item()

    def tolist(self) -> Any:
        """Return the whole tensor as lists."""
        with _no_grad():
            return self.full_tensor().tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        return int(self.item().__index__())
