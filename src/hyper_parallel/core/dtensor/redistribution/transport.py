"""What executing a plan needs of a framework: four local operations and five collectives.

Every collective is called with the ranks that take part, in the order in which pieces are counted, which is that of the
mesh. A framework's group may have another order (rule M4 of the README): who implements this puts pieces into the
group's order and back. No collective may change what it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

__all__ = ["Ranks", "Transport"]

Ranks: TypeAlias = "tuple[int, ...]"
Shape: TypeAlias = "tuple[int, ...]"
Tensor: TypeAlias = Any


class Transport(Protocol):
    """Implemented by each framework, and by the simulated ranks of the tests."""

    # -- local --------------------------------------------------------------------------------------------------------

    def slice(self, tensor: Tensor, starts: Shape, sizes: Shape) -> Tensor:
        """Return a box of a tensor; it may be a view."""

    def place(self, shape: Shape, pieces: Sequence[tuple[Shape, Tensor]], like: Tensor, fill: int | None) -> Tensor:
        """Put pieces, each with its starts, together to a new tensor; `fill` elsewhere, None if there is no elsewhere.

        The pieces do not overlap. There may be none, for a shape without elements or filled throughout. Dtype and
        device of `like`.
        """

    def reduce_local(self, tensors: Sequence[Tensor], op: str) -> Tensor:
        """Combine one or more tensors of one shape elementwise by `sum`, `max`, `min` or `prod`."""

    def divide(self, tensor: Tensor, divisor: int) -> Tensor:
        """Divide every element, into the same dtype."""

    # -- between ranks ------------------------------------------------------------------------------------------------

    def all_gather(self, tensor: Tensor, ranks: Ranks, dim: int) -> Tensor:
        """Join the tensors of all ranks, which have one shape, one after the other along a dim."""

    def reduce_scatter(self, tensor: Tensor, ranks: Ranks, dim: int, op: str) -> Tensor:
        """Reduce over all ranks, cut the result into equal chunks along a dim, and return this rank's."""

    def all_reduce(self, tensor: Tensor, ranks: Ranks, op: str) -> Tensor:
        """Reduce over all ranks, into a new tensor."""

    def all_to_all(self, tensor: Tensor, ranks: Ranks, split_dim: int, concat_dim: int) -> Tensor:
        """Send equal chunks along `split_dim` to the ranks; join what comes from them along `concat_dim`."""

    def all_to_all_v(
        self, pieces: Sequence[Tensor | None], shapes: Sequence[Shape | None], ranks: Ranks
    ) -> Sequence[Tensor | None]:
        """Send each rank its piece, and receive a piece of the given shape from each.

        None stands for nothing. This rank's own entries are None.
        """
