"""Gradients of a unit on PyTorch: from what backward leaves on this rank to sums over all ranks, given to the shards.

One message for a unit. For each rank it has that rank's part of every gradient, and at its end one number for each
parameter: how many ranks had a gradient for it. So a parameter that one rank did not use gets the others' gradient, and
one that nobody used gets none, as in one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.parallel.sharding.cutting import offsets
from hyper_parallel.platform.communication.reductions import Reduction
from hyper_parallel.platform.torch.parallel.sharding.parameters import UnitParameter

__all__ = ["UnitGradients"]

_SMALL = (torch.bfloat16, torch.float16)  # sums of them are taken in float32


class UnitGradients:
    """The gradients of one unit.

    Args:
        parameters: all of the unit; `note_trained` says when it is others that need a gradient.
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
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._parameters = parameters
        self._transport = transport
        self._group = group
        self._num_parts = num_parts
        self._rank = rank
        self._replicas = replicas
        self._wire_dtype = wire_dtype
        self._aside: dict[str, torch.Tensor] = {}
        self._handle: Any = None
        self._on_its_way: Any = None
        self._summed: tuple[str, ...] = ()  # whose gradients are in the sums
        self._present: set[str] = set()  # of which this rank had a gradient in this step
        self._sums: torch.Tensor | None = None
        self._known_counts: tuple[tuple[str, ...], torch.Tensor] | None = None  # the last ones, for whom

    # -- what backward left --------------------------------------------------------------------------------------------

    def note_trained(self) -> None:
        """Note which parameters need a gradient now, and where their parts lie in a message."""
        self._trained = [parameter for parameter in self._parameters if parameter.local.requires_grad]
        self._names = tuple(parameter.name for parameter in self._trained)
        self._starts, self._num_values = offsets(_room(parameter) for parameter in self._trained)

    @property
    def is_trained(self) -> bool:
        return bool(self._trained)

    @property
    def has_aside(self) -> bool:
        return bool(self._aside)

    @property
    def has_sums(self) -> bool:
        return self._sums is not None

    @torch.no_grad()
    def put_aside(self, weight: float | None) -> None:
        for parameter in self._trained:
            grad = _taken(parameter)
            if grad is None:
                continue
            if weight is not None:
                grad = grad * weight if weight else torch.zeros_like(grad)
            earlier = self._aside.get(parameter.name)
            self._aside[parameter.name] = grad if earlier is None else earlier + grad

    def drop(self) -> None:
        for parameter in self._parameters:
            parameter.whole_local.grad = None
        self._aside, self._sums, self._present = {}, None, set()
        if self._handle is not None:
            self._handle.wait()
            self._handle = self._on_its_way = None

    # -- sent ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()  # gradients may have a graph themselves: backward(create_graph=True)
    def begin_reduce(self, weight: float | None) -> None:
        self._check_same_trained()
        rows = [self._row(parameter) for parameter in self._trained]
        wire = self._wire_dtype or reduce(torch.promote_types, {row.dtype for row in rows})
        rows.append(self._counts(rows[0].device))
        rows = [row if row.dtype is wire else row.to(wire) for row in rows if row.numel()]
        message = torch._chunk_cat(rows, 0, self._num_parts)
        values = message[:, : self._num_values]
        if weight == 0:  # what has no weight may be no number: the mean over nothing
            values.zero_()
        elif weight is not None:
            values.mul_(weight)
        self._send(message.view(-1))

    def _row(self, parameter: UnitParameter) -> torch.Tensor:
        """Take what this rank has of a gradient, zeros if nothing, so that chunks of dim 0 are the ranks' parts."""
        grad = parameter.whole_local.grad
        if self._aside:
            aside = self._aside.pop(parameter.name, None)
            if aside is not None:
                grad = aside if grad is None else grad + aside
        if grad is None:
            grad = torch.zeros_like(parameter.whole_local)
        else:
            self._present.add(parameter.name)
            parameter.whole_local.grad = None
        if grad.is_complex():
            grad = torch.view_as_real(grad)
        dim = parameter.part.dim
        if dim is None:
            return grad.reshape(1, -1).expand(self._num_parts, -1).contiguous()
        return grad.movedim(dim, 0).contiguous() if dim else grad

    def _counts(self, device: torch.device) -> torch.Tensor:
        """One for each parameter of which this rank has had a gradient, for each rank's part."""
        key = self._names if len(self._present) == len(self._names) else tuple(sorted(self._present))
        if self._known_counts is None or self._known_counts[0] != key:
            counts = torch.tensor([float(name in self._present) for name in self._names], device=device)
            self._known_counts = key, counts.repeat(self._num_parts)
        return self._known_counts[1]

    def _check_same_trained(self) -> None:
        if self._sums is None:
            self._summed = self._names
        elif self._summed != self._names:
            raise StateError(
                "Parameters were frozen, or not any more, between two microbatches of one step.",
                expected=", ".join(self._summed),
                got=", ".join(self._names),
                do="Change `requires_grad` between steps.",
            )

    def _send(self, message: torch.Tensor) -> None:
        transport, group = self._transport, self._group
        if message.dtype in _SMALL:
            splits = (message.shape[0] // self._num_parts,) * self._num_parts
            start = transport.launch_equal_exchange
            self._on_its_way, self._handle = transport.launch(
                "all_to_all_single", group, start, message, splits, splits, group
            )
            return
        self._on_its_way, self._handle = transport.launch(
            "reduce_scatter_tensor", group, transport.launch_reduce_scatter, message, Reduction.SUM, group
        )

    def end_reduce(self) -> None:
        self._handle.wait()
        total, self._handle, self._on_its_way = self._on_its_way, None, None
        if total.dtype in _SMALL:
            total = total.view(self._num_parts, -1).sum(0, dtype=torch.float32)
        if self._replicas is not None:
            transport, (group, _) = self._transport, self._replicas
            _, handle = transport.launch("all_reduce", group, transport.launch_all_reduce, total, Reduction.SUM, group)
            handle.wait()
        self._sums = total if self._sums is None else self._sums.add_(total)

    # -- given ---------------------------------------------------------------------------------------------------------

    def give(self, divisor: Any) -> None:
        sums, present = self._sums, self._present
        self._sums, self._present = None, set()
        if sums is None:
            return
        if len(present) < len(self._names):
            counts = sums[self._num_values :].tolist()
            present = {name for name, count in zip(self._names, counts, strict=True) if count}
        values = sums[: self._num_values]
        if not isinstance(divisor, int) or divisor != 1:
            values.div_(divisor)
        for parameter, start in zip(self._trained, self._starts, strict=True):
            if parameter.name in present:
                _give(parameter.local, self._shard_of(parameter, values, start))

    def _shard_of(self, parameter: UnitParameter, values: torch.Tensor, start: int) -> torch.Tensor:
        """Shape one part of the sums as the shard is."""
        local, dim = parameter.local, parameter.part.dim
        if not dim and values.dtype is local.dtype:
            return values.as_strided(local.shape, local.stride(), start)
        shape = list(local.shape)
        if dim:
            shape.insert(0, shape.pop(dim))
        if local.is_complex():
            found = torch.view_as_complex(values[start : start + 2 * math.prod(shape)].view(*shape, 2))
        else:
            found = values[start : start + math.prod(shape)].view(shape)
        found = found.to(local.dtype)
        return found.movedim(0, dim).contiguous() if dim else found


def _give(local: torch.Tensor, grad: torch.Tensor) -> None:
    if local._backward_hooks:
        for hook in local._backward_hooks.values():
            changed = hook(grad)
            grad = grad if changed is None else changed
    if local.grad is None:
        local.grad = grad
    else:
        local.grad += grad
    if local._post_accumulate_grad_hooks:
        for hook in local._post_accumulate_grad_hooks.values():
            hook(local)


def _taken(parameter: UnitParameter) -> torch.Tensor | None:
    grad = parameter.whole_local.grad
    parameter.whole_local.grad = None
    return grad


def _room(parameter: UnitParameter) -> int:
    return parameter.part.room * (2 if parameter.dtype.is_complex else 1)
