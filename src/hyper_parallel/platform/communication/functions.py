"""Forward and backward of the collectives with gradient, once for both frameworks.

The two frameworks' custom functions have the same form (`forward(ctx, ...)`, `backward(ctx, grad)`, `apply` with
positional arguments). So the rules are written once, and made into classes of the framework's own kind by `Functions`.
Rules G1 and G2 are in the README.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import mul
from typing import Any

from hyper_parallel._base.errors import StateError
from hyper_parallel.platform.communication.collectives import (
    launch_all_gather,
    launch_equal_exchange,
    launch_exchange,
    launch_reduce_scatter,
)
from hyper_parallel.platform.communication.handles import Handle
from hyper_parallel.platform.communication.point_to_point import launch_receive, launch_send
from hyper_parallel.platform.communication.reductions import EXTREMES, Reduction
from hyper_parallel.platform.communication.sync_hook import Coordinator, Hook, meet
from hyper_parallel.platform.communication.transport import Transport
from hyper_parallel.platform.opaque import Group


class Functions:
    """The custom functions of one framework, made once when its communication is imported.

    `function` is the framework's class of custom functions.
    """

    def __init__(self, function: Any, transport: Transport) -> None:
        def apply(which: type, *arguments: Any) -> Any:
            return which.apply(*arguments)  # type: ignore[attr-defined]

        class AllGather(function):  # type: ignore[misc]
            @staticmethod
            def forward(ctx: Any, data: object, dim: int, group: Any, call: str) -> Any:
                ctx.arguments = (dim, group, call)
                return gather_along(transport, data, dim, group, call)

            @staticmethod
            def backward(ctx: Any, grad: object) -> Any:
                dim, group, call = ctx.arguments
                return apply(ReduceScatter, grad, dim, Reduction.SUM, group, call), None, None, None

        class ReduceScatter(function):  # type: ignore[misc]
            """Reduce by sum or average; each rank keeps its part."""

            @staticmethod
            def forward(ctx: Any, data: object, dim: int, op: Reduction, group: Any, call: str) -> Any:
                ctx.arguments = (dim, op, group, call)
                return scatter_along(transport, data, dim, op, group, call)

            @staticmethod
            def backward(ctx: Any, grad: object) -> Any:
                dim, op, group, call = ctx.arguments
                gathered = apply(AllGather, grad, dim, group, call)
                return averaged(transport, gathered, op, group), None, None, None, None

        class ReduceScatterExtreme(function):  # type: ignore[misc]
            @staticmethod
            def forward(ctx: Any, data: Any, dim: int, op: Reduction, group: Any, call: str) -> Any:
                ctx.arguments = (dim, group, call)
                output = scatter_along(transport, data, dim, op, group, call)
                ctx.save_for_backward(data, output)
                return output

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                dim, group, call = ctx.arguments
                data, output = ctx.saved_tensors
                whole = gather_along(transport, output, dim, group, call)
                holds = transport.where_equal(data, whole)
                count = all_reduced(transport, holds, Reduction.SUM, group, call)
                shared = apply(AllGather, grad, dim, group, call) * holds / count
                return shared, None, None, None, None

        class AllReduce(function):  # type: ignore[misc]
            """Reduce by sum or average, into a new tensor."""

            @staticmethod
            def forward(ctx: Any, data: object, op: Reduction, group: Any, call: str) -> Any:
                ctx.arguments = (op, group, call)
                return averaged(transport, all_reduced(transport, data, Reduction.SUM, group, call), op, group)

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return apply(AllReduce, grad, *ctx.arguments), None, None, None

        class AllReduceOther(function):  # type: ignore[misc]
            """Reduce by max, min or product, into a new tensor."""

            @staticmethod
            def forward(ctx: Any, data: Any, op: Reduction, group: Any, call: str) -> Any:
                ctx.arguments = (op, group, call)
                output = all_reduced(transport, data, op, group, call)
                ctx.save_for_backward(data, output)
                return output

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                op, group, call = ctx.arguments
                data, output = ctx.saved_tensors
                total = apply(AllReduce, grad, Reduction.SUM, group, call)
                if op in EXTREMES:
                    holds = transport.where_equal(data, output)
                    return total * holds / all_reduced(transport, holds, Reduction.SUM, group, call), None, None, None
                # The others' values themselves: the product divided by this rank's own would not do where that is 0.
                whole = apply(AllGather, data.reshape((1, *data.shape)), 0, group, call)
                return total * product_of_others(transport, whole, group), None, None, None

        class ExchangeFn(function):  # type: ignore[misc]
            """Exchange equal splits."""

            @staticmethod
            def forward(ctx: Any, data: Any, output_shape: Sequence[int], group: Any, call: str) -> Any:
                ctx.arguments = (tuple(data.shape), group, call)
                output, handle = launch_equal_exchange(transport, data, output_shape, group, call)
                handle.wait()
                return output

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return apply(ExchangeFn, grad, *ctx.arguments), None, None, None

        class ExchangeRows(function):  # type: ignore[misc]
            """Exchange uneven splits. With `is_lazy` the first use of the result waits."""

            @staticmethod
            def forward(
                ctx: Any,
                data: object,
                sent: Sequence[int],
                received: Sequence[int],
                group: Any,
                is_lazy: bool,
                call: str,
            ) -> Any:
                ctx.arguments = (received, sent, group, is_lazy, call)
                output, handle = launch_exchange(transport, data, sent, received, group, call)
                if is_lazy:
                    return transport.pending(output, handle)
                handle.wait()
                return output

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return apply(ExchangeRows, grad, *ctx.arguments), None, None, None, None, None

        class Pair(function):  # type: ignore[misc]
            @staticmethod
            def forward(ctx: Any, data: object, peer: int, group: Any) -> Any:
                ctx.arguments = (peer, group)
                return exchanged(transport, data, peer, group)

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return apply(Pair, grad, *ctx.arguments), None, None

        class FinishExchange(function):  # type: ignore[misc]
            """`x` was sent, and `received` is what came for it (leading dim: the ranks)."""

            @staticmethod
            def forward(ctx: Any, x: Any, received: Any, concat_dim: int, split_dim: int, group: Any, box: Any) -> Any:
                ctx.arguments = (tuple(x.shape), concat_dim, split_dim, group, box)
                return joined(transport, received, concat_dim)

            @staticmethod
            def backward(ctx: Any, grad: object) -> Any:
                shape, concat_dim, split_dim, group, box = ctx.arguments
                sent = transport.cat(stacked(transport, grad, num_ranks_of(transport, group), concat_dim), 0)
                call = "differentiable_async_a2a_wait"
                if box is None:
                    received = apply(ExchangeFn, sent, tuple(sent.shape), group, call)
                    return joined(transport, received, split_dim), None, None, None, None, None
                buffer, handle = launch_equal_exchange(transport, sent, sent.shape, group, call)
                entry = (handle, buffer)
                box.append(entry)
                transport.at_end_of_backward(lambda: check_was_taken(box, entry))
                return transport.zeros(shape, grad), None, None, None, None, None

        class SyncHook(function):  # type: ignore[misc]
            """Identity. It is a node of the graph even while its coordinator is disabled.

            So backward finds it whenever the coordinator is enabled.
            """

            @staticmethod
            def forward(ctx: Any, x: object, name: str, coordinator: Coordinator) -> Any:
                ctx.arguments = (name, coordinator)
                meet(Hook(name, is_backward=False), coordinator)
                return x

            @staticmethod
            def backward(ctx: Any, grad: object) -> Any:
                name, coordinator = ctx.arguments
                meet(Hook(name, is_backward=True), coordinator)
                return grad, None, None

        self.all_gather = AllGather
        self.reduce_scatter = ReduceScatter
        self.reduce_scatter_extreme = ReduceScatterExtreme
        self.all_reduce = AllReduce
        self.all_reduce_other = AllReduceOther
        self.exchange = ExchangeFn
        self.exchange_rows = ExchangeRows
        self.pair = Pair
        self.finish_exchange = FinishExchange
        self.sync_hook = SyncHook


def num_ranks_of(transport: Transport, group: Group) -> int:
    return len(transport.ranks_of(group))


def gather_along(transport: Transport, data: object, dim: int, group: Group, call: str) -> Any:
    gathered, handle = launch_all_gather(transport, data, group, call)
    handle.wait()
    if dim == 0:
        return gathered
    return transport.cat(transport.parts(gathered, num_ranks_of(transport, group), 0), dim)


def scatter_along(transport: Transport, data: object, dim: int, op: Reduction, group: Group, call: str) -> Any:
    num_ranks = num_ranks_of(transport, group)
    if dim != 0:
        data = transport.cat(transport.parts(data, num_ranks, dim), 0)
    native = Reduction.SUM if op is Reduction.AVG else op
    output, handle = launch_reduce_scatter(transport, data, native, group, call)
    handle.wait()
    return averaged(transport, output, op, group)


def all_reduced(transport: Transport, data: object, op: Reduction, group: Group, call: str) -> Any:
    output, handle = transport.launch(call, group, transport.launch_all_reduce, transport.copy(data), op, group)
    handle.wait()
    return output


def averaged(transport: Transport, data: Any, op: Reduction, group: Any) -> Any:
    return data / num_ranks_of(transport, group) if op is Reduction.AVG else data


def product_of_others(transport: Transport, whole: object, group: Group) -> Any:
    """Multiply what the other ranks have of values gathered along a new leading dim; 1 where there are no others."""
    ranks = transport.ranks_of(group)
    parts = transport.parts(whole, len(ranks), 0)
    others = [part.reshape(part.shape[1:]) for rank, part in zip(ranks, parts, strict=True) if rank != transport.rank()]
    return reduce(mul, others, 1)


def exchanged(transport: Transport, data: object, peer: int, group: Group) -> Any:
    received = transport.copy(data)
    if peer == transport.rank():
        return received
    if transport.rank() < peer:  # one of the two sends first, should a framework's sends wait for the receiver
        handles = [_send(transport, data, peer, group), _receive(transport, received, peer, group)]
    else:
        handles = [_receive(transport, received, peer, group), _send(transport, data, peer, group)]
    for handle in handles:
        handle.wait()
    return received


def _send(transport: Transport, data: object, peer: int, group: Group) -> Handle:
    return launch_send(transport, data, peer, group, 0, "p2p_exchange")


def _receive(transport: Transport, target: object, peer: int, group: Group) -> Handle:
    return launch_receive(transport, target, peer, group, 0, "p2p_exchange")


def joined(transport: Transport, pieces: Any, dim: int) -> Any:
    """Put the pieces along the leading dim side by side along `dim` of each."""
    parts = transport.parts(pieces, pieces.shape[0], 0)
    return transport.cat([part.reshape(part.shape[1:]) for part in parts], dim)


def stacked(transport: Transport, data: object, num_parts: int, dim: int) -> list[Any]:
    """Split a tensor into equal parts along a dim, each with a new leading dim."""
    return [part.reshape((1, *part.shape)) for part in transport.parts(data, num_parts, dim)]


def check_was_taken(box: list[Any], entry: tuple[Any, Any]) -> None:
    if any(pair is entry for pair in box):
        box[:] = [pair for pair in box if pair is not entry]
        raise StateError(
            "A gradient of `differentiable_async_a2a_wait` was not fetched from its handle_box.",
            expected="the box emptied before the end of backward",
            got="its entry still there; the zeros in its place were used",
            do="Pop (work, buffer) from the box, wait, and put the gradient in its place; or pass no handle_box.",
        )
