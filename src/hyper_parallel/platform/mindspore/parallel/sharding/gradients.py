"""Gradients of a unit on MindSpore: from what backward leaves on this rank to sums over all ranks.

One message for a unit. For each rank it has that rank's part of every gradient, and at its end one number for each
parameter: how many ranks had a gradient for it. So a parameter that one rank did not use gets the others' gradient, and
one that nobody used gets none, as in one process. Numbers of bfloat16 and float16 are added up in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import StateError
from hyper_parallel.platform.communication.reductions import Reduction
from hyper_parallel.platform.mindspore.parallel.sharding.parameters import UnitParameter
from hyper_parallel.platform.mindspore.parallel.sharding.raw import (
    Numbers,
    numbers_of,
    numpy_dtype,
    parts_of,
    tensor_of,
)

__all__ = ["UnitGradients"]

_SMALL = (mindspore.bfloat16, mindspore.float16)


class UnitGradients:
    """The gradients of one unit.

    Args:
        parameters: all of the unit; those that need a gradient now are asked each time.
        group: the ranks among which parameters are cut, and `rank` this one's place.
        replicas: the ranks that have the same part, if there are several, and how many.
        wire_dtype: what gradients are sent in; None: their own dtype.
    """

    def __init__(
        self,
        parameters: Sequence[UnitParameter],
        transport: Any,
        group: Any,
        num_parts: int,
        rank: int,
        replicas: tuple[Any, int] | None,
        wire_dtype: Any,
    ) -> None:
        self._parameters = parameters
        self._transport = transport
        self._group = group
        self._num_parts = num_parts
        self._rank = rank
        self._replicas = replicas
        self._wire_dtype = wire_dtype
        self._left: dict[str, Tensor] = {}  # by backward
        self._aside: dict[str, Numbers] = {}
        self._handle: Any = None
        self._on_its_way: Any = None
        self._of: tuple[str, ...] = ()  # whose gradients are in the message, and in the sums
        self._sums: Numbers | None = None

    # -- what backward left --------------------------------------------------------------------------------------------

    def trained(self) -> list[UnitParameter]:
        return [parameter for parameter in self._parameters if parameter.is_trained]

    def leave(self, name: str, grad: Tensor) -> None:
        with _no_grad():
            earlier = self._left.get(name)
            self._left[name] = grad if earlier is None else earlier + grad

    @property
    def is_new(self) -> bool:
        return bool(self._left)

    @property
    def is_waiting(self) -> bool:
        return bool(self._left or self._aside)

    @property
    def has_sums(self) -> bool:
        return self._sums is not None

    def put_aside(self, weight: float | None) -> None:
        left, self._left = self._left, {}
        for name, grad in left.items():
            values = _weighted(numbers_of(grad), weight)
            earlier = self._aside.get(name)
            self._aside[name] = values.copy() if earlier is None else earlier + values

    def drop(self) -> None:
        self._left, self._aside, self._sums = {}, {}, None
        if self._handle is not None:
            self._handle.wait()
            self._handle = self._on_its_way = None

    # -- sent ----------------------------------------------------------------------------------------------------------

    def begin_reduce(self, weight: float | None) -> None:
        trained = self.trained()
        self._check_alike(tuple(parameter.name for parameter in trained))
        # Asked of the parameters, which are alike on all ranks: gradients may be missing here.
        kinds = {parameter.whole.dtype for parameter in trained}
        wire = self._wire_dtype or (kinds.pop() if len(kinds) == 1 else None)
        number = reduce(np.promote_types, (numpy_dtype(parameter.whole.dtype) for parameter in trained))
        if self._wire_dtype is not None:
            number = numpy_dtype(wire)
        rooms = [_room(parameter) for parameter in trained]
        message = np.zeros((self._num_parts, sum(rooms) + len(trained)), number)
        at = 0
        for place, (parameter, room) in enumerate(zip(trained, rooms, strict=True)):
            values = self._taken(parameter.name, weight)
            if values is not None:
                message[:, sum(rooms) + place] = 1
                for row, part in zip(message, parts_of(values, parameter.part), strict=True):
                    row[at : at + part.size] = part.reshape(-1)
            at += room
        self._send(message, wire)

    def _check_alike(self, names: tuple[str, ...]) -> None:
        if self._sums is not None and names != self._of:
            raise StateError(
                "Parameters were frozen, or not any more, between two microbatches of one step.",
                expected=", ".join(self._of),
                got=", ".join(names),
                do="Change `requires_grad` between steps.",
            )
        self._of = names

    def _taken(self, name: str, weight: float | None) -> Numbers | None:
        left, aside = self._left.pop(name, None), self._aside.pop(name, None)
        if left is None:
            return aside
        values = _weighted(numbers_of(left), weight)
        return values if aside is None else aside + values

    def _send(self, message: Numbers, wire: Any) -> None:
        transport, group = self._transport, self._group
        if wire in _SMALL:
            small = Tensor(message.reshape(-1)).to(wire)
            splits = (message.shape[1],) * self._num_parts
            self._on_its_way, self._handle = transport.launch(
                "all_to_all_single", group, transport.launch_equal_exchange, small, splits, splits, group
            )
            return
        sent = Tensor(message.reshape(-1))
        self._on_its_way, self._handle = transport.launch(
            "reduce_scatter_tensor", group, transport.launch_reduce_scatter, sent, Reduction.SUM, group
        )

    def end_reduce(self) -> None:
        self._handle.wait()
        received, self._handle, self._on_its_way = self._on_its_way, None, None
        total = numbers_of(received)
        if received.dtype in _SMALL:
            total = reduce(np.add, total.reshape(self._num_parts, -1))
        if self._replicas is not None:
            transport, (group, _) = self._transport, self._replicas
            shared = Tensor(total)
            _, handle = transport.launch("all_reduce", group, transport.launch_all_reduce, shared, Reduction.SUM, group)
            handle.wait()
            total = numbers_of(shared)
        self._sums = total.copy() if self._sums is None else self._sums + total

    # -- given ---------------------------------------------------------------------------------------------------------

    def taken_sums(self, divisor: Any) -> dict[str, Tensor]:
        """Return the gradients of the shards: the sums over `divisor`, of those that any rank had a gradient for."""
        sums, self._sums = self._sums, None
        if sums is None:
            return {}
        by_name = {parameter.name: parameter for parameter in self._parameters}
        given: dict[str, Tensor] = {}
        at, counts = 0, sums[sums.size - len(self._of) :]
        for name, count in zip(self._of, counts, strict=True):
            parameter = by_name[name]
            shape = parameter.part.shape_of(self._rank)
            size = math.prod(shape) * _per_element(parameter)
            if count:
                with np.errstate(divide="ignore", invalid="ignore"):
                    values = sums[at : at + size] / sums.dtype.type(divisor)
                given[name] = tensor_of(values, shape, parameter.dtype)
            at += _room(parameter)
        return given


def _weighted(values: Numbers, weight: float | None) -> Numbers:
    if weight is None:
        return values
    # What has no weight may be no number: the mean over nothing.
    return values * values.dtype.type(weight) if weight else np.zeros_like(values)


def _per_element(parameter: UnitParameter) -> int:
    return 2 if parameter.dtype in (mindspore.complex64, mindspore.complex128) else 1


def _room(parameter: UnitParameter) -> int:
    return parameter.part.room * _per_element(parameter)
