"""Collectives without gradient.

Each launches, then either waits or returns the handle. A tensor that the framework cannot write in place (not
contiguous; on MindSpore's CPU any view) is worked on as a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from hyper_parallel.platform.communication.handles import Handle
from hyper_parallel.platform.communication.reductions import Reduction
from hyper_parallel.platform.communication.splits import check_divisible, check_output_shape
from hyper_parallel.platform.communication.transport import Transport, check_rank
from hyper_parallel.platform.interface import Platform
from hyper_parallel.platform.opaque import Group


class Collectives(Platform):
    transport: ClassVar[Transport]

    @classmethod
    def all_gather_into_tensor(cls, data: object, group_info: object, async_op: bool = False) -> Any:
        """Concatenate over ranks along dim 0. Returns the tensor, or `(tensor, handle)` with `async_op=True`."""
        call, transport = "all_gather_into_tensor", cls.transport
        transport.check_tensor(data, call)
        return _given(launch_all_gather(transport, data, transport.group(group_info, call), call), async_op)

    @classmethod
    def all_reduce(cls, data: Any, group_info: object, async_op: bool = False) -> Any:
        """Sum over ranks, in place when contiguous. Returns the tensor, or `(tensor, handle)` with `async_op=True`."""
        transport = cls.transport
        transport.check_tensor(data, "all_reduce")
        group = transport.group(group_info, "all_reduce")
        start = transport.launch_all_reduce
        if transport.is_writable_in_place(data):
            return _given(transport.launch("all_reduce", group, start, data, Reduction.SUM, group), async_op)
        copy = transport.copy(data)
        if not data.is_contiguous():
            return _given(transport.launch("all_reduce", group, start, copy, Reduction.SUM, group), async_op)
        # A contiguous view that the framework cannot write in place is still the caller's: the sum goes back into it.
        then = partial(transport.write, data, copy)
        _, handle = transport.launch("all_reduce", group, start, copy, Reduction.SUM, group, then=then)
        return _given((data, handle), async_op)

    @classmethod
    def reduce_scatter_tensor(cls, data: object, group_info: object, async_op: bool = False) -> Any:
        """Sum over ranks; each keeps its part of dim 0.

        Returns the tensor, or `(tensor, handle)` with `async_op=True`.
        """
        call, transport = "reduce_scatter_tensor", cls.transport
        transport.check_tensor(data, call)
        group = transport.group(group_info, call)
        return _given(launch_reduce_scatter(transport, data, Reduction.SUM, group, call), async_op)

    @classmethod
    def broadcast(cls, data: object, src: int, group: Group = None, async_op: bool = False) -> Any:
        """Copy world rank `src`'s values, in place. Returns the tensor, or `(tensor, handle)` with `async_op=True`."""
        transport = cls.transport
        transport.check_tensor(data, "broadcast")
        group = transport.group(group, "broadcast")
        src = check_rank(src, transport.ranks_of(group), "src", "broadcast")
        target, then = data, None
        if not transport.is_writable_in_place(data):
            target = transport.copy(data)
            then = None if src == transport.rank() else partial(transport.write, data, target)
        _, handle = transport.launch("broadcast", group, transport.launch_broadcast, target, src, group, then=then)
        return _given((data, handle), async_op)

    @classmethod
    def all_to_all_single(
        cls, input_tensor: object, output_shape: Sequence[int], group: Group = None, async_op: bool = False
    ) -> tuple[Any, Handle | None]:
        """Exchange equal splits of dim 0. Returns `(output, handle)`, the handle None without `async_op`."""
        call, transport = "all_to_all_single", cls.transport
        transport.check_tensor(input_tensor, call)
        output, handle = launch_equal_exchange(
            transport, input_tensor, output_shape, transport.group(group, call), call
        )
        if async_op:
            return output, handle
        handle.wait()
        return output, None

    @classmethod
    def barrier(cls, group: Group = None, async_op: bool = False, device_ids: object = None) -> Handle | None:
        """Wait until every rank is here. With `async_op=True`, return a handle that does."""
        transport = cls.transport
        group = transport.group(group, "barrier")
        _, handle = transport.launch("barrier", group, transport.launch_barrier, group, device_ids)
        if async_op:
            return handle
        handle.wait()
        return None


Launch = tuple[Any, Handle]


def launch_all_gather(transport: Transport, data: Any, group: Any, call: str) -> Launch:
    check_divisible(data.shape, 0, 1, call)
    return transport.launch(call, group, transport.launch_all_gather, transport.contiguous(data), group)


def launch_reduce_scatter(transport: Transport, data: Any, op: Reduction, group: Any, call: str) -> Launch:
    check_divisible(data.shape, 0, len(transport.ranks_of(group)), call)
    return transport.launch(call, group, transport.launch_reduce_scatter, transport.contiguous(data), op, group)


def launch_exchange(
    transport: Transport,
    data: object,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    group: Group,
    call: str,
) -> Launch:
    start = transport.launch_all_to_all
    return transport.launch(call, group, start, transport.contiguous(data), input_splits, output_splits, group)


def launch_equal_exchange(
    transport: Transport, data: Any, output_shape: Sequence[int], group: Any, call: str
) -> Launch:
    """Exchange equal splits of dim 0, one with each rank; the output has the shape that is asked for."""
    num_ranks = len(transport.ranks_of(group))
    shape = check_output_shape(data.shape, output_shape, num_ranks, call)
    splits = (data.shape[0] // num_ranks,) * num_ranks
    start = transport.launch_equal_exchange
    output, handle = transport.launch(call, group, start, transport.contiguous(data), splits, splits, group)
    return output.reshape(shape), handle


def _given(launched: Launch, async_op: bool) -> Any:
    if async_op:
        return launched
    output, handle = launched
    handle.wait()
    return output
