"""Plans executed on real ranks, on either framework: the collectives are the platform's, failures named as its.

Ranks come in the order of the mesh (rule M4), groups have the ascending one: where the two differ, pieces are put into
the group's order and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hyper_parallel.platform.communication.collectives import launch_exchange
from hyper_parallel.platform.communication.functions import all_reduced, gather_along, scatter_along
from hyper_parallel.platform.communication.reductions import Reduction
from hyper_parallel.platform.opaque import Tensor

__all__ = ["LocalTensors", "PlatformTransport"]

Note = Callable[[str, "tuple[int, ...]", int], None]  # kind of collective, ranks, bytes that this rank receives


class LocalTensors(Protocol):
    """What a framework brings for plans beside its collectives: local operations as in `Transport`."""

    like: Any  # a rank that sends nothing takes dtype and device from it
    itemsize: int

    def slice(self, tensor: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> Any: ...
    def place(
        self, shape: Sequence[int], pieces: Sequence[tuple[Sequence[int], Any]], like: object, fill: int | None
    ) -> Any: ...
    def reduce_local(self, tensors: Sequence[Any], op: str) -> Any: ...
    def divide(self, tensor: Tensor, divisor: int) -> Any: ...


class PlatformTransport:
    """The collectives of one redistribution.

    Args:
        platform: of the tensors' framework.
        tensors: its local operations.
        note: is told every collective.
    """

    def __init__(self, platform: Any, tensors: LocalTensors, note: Note) -> None:
        self._platform = platform
        self._transport = platform.transport
        self._tensors = tensors
        self._note = note
        self.slice = tensors.slice
        self.place = tensors.place
        self.reduce_local = tensors.reduce_local
        self.divide = tensors.divide

    def all_gather(self, tensor: Tensor, ranks: tuple[int, ...], dim: int) -> Any:
        self._note("all_gather", ranks, self._num_bytes(tensor) * (len(ranks) - 1))
        gathered = gather_along(self._transport, tensor, dim, self._group(ranks), "redistribute")
        order = _order(ranks)
        if order is None:
            return gathered
        blocks = self._transport.parts(gathered, len(ranks), dim)
        return self._transport.cat([blocks[order.index(position)] for position in range(len(ranks))], dim)

    def reduce_scatter(self, tensor: Tensor, ranks: tuple[int, ...], dim: int, op: str) -> Any:
        self._note("reduce_scatter", ranks, self._num_bytes(tensor) * (len(ranks) - 1) // len(ranks))
        order = _order(ranks)
        if order is not None:
            blocks = self._transport.parts(tensor, len(ranks), dim)
            tensor = self._transport.cat([blocks[position] for position in order], dim)
        return scatter_along(self._transport, tensor, dim, Reduction(op), self._group(ranks), "redistribute")

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...], op: str) -> Any:
        self._note("all_reduce", ranks, 2 * self._num_bytes(tensor) * (len(ranks) - 1) // len(ranks))
        return all_reduced(self._transport, tensor, Reduction(op), self._group(ranks), "redistribute")

    def all_to_all(self, tensor: Tensor, ranks: tuple[int, ...], split_dim: int, concat_dim: int) -> Any:
        pieces = self._transport.parts(tensor, len(ranks), split_dim)
        self._note("all_to_all", ranks, self._num_bytes(tensor) * (len(ranks) - 1) // len(ranks))
        shapes = [tuple(piece.shape) for piece in pieces]
        return self._transport.cat(self._exchanged(pieces, shapes, ranks), concat_dim)

    def all_to_all_v(self, pieces: Sequence[Any], shapes: Sequence[Any], ranks: tuple[int, ...]) -> list[Any]:
        received = sum(math.prod(shape) for shape in shapes if shape is not None)
        self._note("all_to_all_v", ranks, received * self._tensors.itemsize)
        return self._exchanged(pieces, shapes, ranks)

    def _num_bytes(self, tensor: Any) -> int:
        return int(math.prod(tensor.shape)) * self._tensors.itemsize

    def _exchanged(self, pieces: Sequence[Any], shapes: Sequence[Any], ranks: tuple[int, ...]) -> list[Any]:
        order = _order(ranks) or list(range(len(ranks)))
        nothing = self._transport.zeros((0,), self._tensors.like)
        flat = [nothing if pieces[position] is None else pieces[position].reshape(-1) for position in order]
        sends = [int(piece.shape[0]) for piece in flat]
        receives = [0 if shapes[position] is None else math.prod(shapes[position]) for position in order]
        given = self._transport.cat(flat, 0)
        output, handle = launch_exchange(self._transport, given, sends, receives, self._group(ranks), "redistribute")
        handle.wait()
        result: list[Any] = [None] * len(ranks)
        begin = 0
        for position, length in zip(order, receives, strict=True):
            if shapes[position] is not None:
                result[position] = output[begin : begin + length].reshape(tuple(shapes[position]))
            begin += length
        return result

    def _group(self, ranks: tuple[int, ...]) -> Any:
        return self._platform.create_group(list(ranks))


def _order(ranks: tuple[int, ...]) -> list[int] | None:
    """Return the positions in ascending order of rank; None if they are in that order."""
    order = sorted(range(len(ranks)), key=lambda position: ranks[position])
    return None if order == list(range(len(ranks))) else order
