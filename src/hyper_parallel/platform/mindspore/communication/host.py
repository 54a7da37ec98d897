"""Collectives on the CPU, made of the few that MindSpore's backend there (mccl) has.

Those are all-reduce, all-gather, broadcast, send and receive, for some dtypes, into tensors that are all of their
memory: a write into a view is lost without a word. Everything is done when a call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import mindspore
import mindspore.mint.distributed as dist
from mindspore import Tensor, mint, ops
from mindspore.ops import ReduceOp

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.platform.communication.reductions import Reduction
from hyper_parallel.platform.mindspore.tensors import is_whole

NATIVE = {
    Reduction.SUM: ReduceOp.SUM,
    Reduction.MAX: ReduceOp.MAX,
    Reduction.MIN: ReduceOp.MIN,
    Reduction.PROD: ReduceOp.PROD,
}

_REDUCED = {mindspore.float32, mindspore.float16, mindspore.bfloat16, mindspore.int64, mindspore.int32, mindspore.int8}
_COMBINED = _REDUCED | {mindspore.float64}  # added and multiplied by the CPU's own operators
_COMBINE = {
    Reduction.SUM: lambda left, right: left + right,
    Reduction.PROD: lambda left, right: left * right,
    Reduction.MAX: ops.maximum,
    Reduction.MIN: ops.minimum,
}


_MOVED = _COMBINED | {mindspore.uint8, mindspore.bool_}


def check_dtype(tensor: Tensor) -> None:
    """Refuse what mccl does not know before anything is sent: its own failure leaves no group of the process usable."""
    if tensor.dtype not in _MOVED:
        raise ArgumentTypeError(
            "MindSpore's backend on the CPU cannot communicate this dtype.",
            expected=", ".join(sorted(str(dtype) for dtype in _MOVED)),
            got=describe(tensor),
            where="nothing was sent, and the group is as it was",
            do="Cast it first.",
        )


def all_reduce(tensor: Tensor, op: Reduction, group: str) -> None:
    """Reduce in place, into a tensor that is all of its memory."""
    if tensor.numel() == 0:
        return
    if tensor.dtype == mindspore.bool_:
        whole = tensor.to(mindspore.int32)
        dist.all_reduce(whole, NATIVE[op], group)
        tensor.copy_(whole.to(mindspore.bool_))
    elif tensor.dtype in _REDUCED:
        dist.all_reduce(tensor, NATIVE[op], group)
    else:  # float64 and the like: gathered as bytes are, and added up here
        tensor.copy_(reduce(_COMBINE[op], _gathered(tensor, group)))


def all_gather(tensor: Tensor, group: str) -> Tensor:
    if tensor.numel() == 0:
        shape = (tensor.shape[0] * dist.get_world_size(group), *tensor.shape[1:])
        return mint.empty(shape, dtype=tensor.dtype)
    if tensor.dtype == mindspore.bool_:
        return mint.cat(_gathered(tensor.to(mindspore.uint8), group), 0).to(mindspore.bool_)
    return mint.cat(_gathered(tensor, group), 0)


def reduce_scatter(tensor: Tensor, op: Reduction, ranks: Sequence[int], me: int, group: str) -> Tensor:
    """Reduce what every rank has for this one, in the order of the ranks.

    The parts are exchanged and put together here: half the bytes of an all-reduce.
    """
    length = tensor.shape[0] // len(ranks)
    if tensor.numel() == 0:
        return mint.empty((length, *tensor.shape[1:]), dtype=tensor.dtype)
    if tensor.dtype in _COMBINED and op in (Reduction.SUM, Reduction.PROD):
        splits = (length,) * len(ranks)
        return copied(reduce(_COMBINE[op], _exchanged(tensor, splits, splits, ranks, me, group)))
    whole = copied(tensor)
    all_reduce(whole, op, group)
    return copied(mint.narrow(whole, 0, me * length, length))


def broadcast(tensor: Tensor, src: int, group: str) -> None:
    """Copy the source's values in place, into a tensor that is all of its memory."""
    if tensor.numel() == 0:
        return
    # Into memory of its own: what is received into the result of `reshape` is lost without a word.
    whole = copied(_sendable(tensor))
    dist.broadcast(whole, src, group)
    _take(tensor, whole)


def send(tensor: Tensor, dst: int, group: str) -> None:
    if tensor.numel():
        dist.isend(_sendable(tensor), dst, group)


def receive(tensor: Tensor, src: int, group: str) -> None:
    """Receive in place, into a tensor that is all of its memory."""
    if tensor.numel() == 0:
        return
    whole = _sendable(tensor)
    dist.irecv(whole, src, group)
    _take(tensor, whole)


def all_to_all(
    tensor: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], ranks: Sequence[int], me: int, group: str
) -> Tensor:
    full = [piece for piece in _exchanged(tensor, input_splits, output_splits, ranks, me, group) if piece.shape[0]]
    if not full:
        return mint.empty((0, *tensor.shape[1:]), dtype=tensor.dtype)
    return mint.cat(full, 0) if len(full) > 1 else copied(full[0])


def _exchanged(
    tensor: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], ranks: Sequence[int], me: int, group: str
) -> list[Tensor]:
    """Exchange a piece with each rank, and return what came from each.

    A ring: in step d every rank sends to the d-th after it, and receives from the d-th before it.
    """
    num_ranks = len(ranks)
    starts = [sum(input_splits[:position]) for position in range(num_ranks)]
    pieces: list[Tensor] = [mint.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype) for rows in output_splits]
    pieces[me] = mint.narrow(tensor, 0, starts[me], input_splits[me])
    for step in range(1, num_ranks):
        to, source = (me + step) % num_ranks, (me - step) % num_ranks
        send(copied(mint.narrow(tensor, 0, starts[to], input_splits[to])), ranks[to], group)
        receive(pieces[source], ranks[source], group)
    return pieces


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor into one that is all of its own memory."""
    if tensor.numel() == 0:
        return mint.empty(tensor.shape, dtype=tensor.dtype)
    if is_whole(tensor):
        made = mint.empty(tensor.shape, dtype=tensor.dtype)
        made.copy_(tensor)
        return made
    # The CPU copies a view when it joins it to something, and nowhere else for every dtype.
    rows = tensor if tensor.ndim else tensor.reshape((1,))
    joined = mint.cat([rows, mint.empty((0, *rows.shape[1:]), dtype=tensor.dtype)], 0)
    return joined if tensor.ndim else joined.reshape(())


def _gathered(tensor: Tensor, group: str) -> list[Tensor]:
    parts = [mint.empty(tensor.shape, dtype=tensor.dtype) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group)
    return parts


def _sendable(tensor: Tensor) -> Tensor:
    """Return the same bits in a dtype that mccl sends."""
    if tensor.dtype == mindspore.bool_:
        return tensor.to(mindspore.uint8)
    if tensor.dtype == mindspore.float64:
        return copied(tensor.view(mindspore.int64))
    return tensor


def _take(target: Tensor, whole: Tensor) -> None:
    if whole is not target:
        target.copy_(whole.to(mindspore.bool_) if target.dtype == mindspore.bool_ else whole.view(target.dtype))


def write(target: Tensor, values: Any) -> None:
    """Write into a tensor that may be a view.

    The CPU writes views by index only, and not in bfloat16: that goes as its bits.
    """
    if target.dtype == mindspore.bfloat16:
        target.view(mindspore.int16)[:] = values.view(mindspore.int16)
    else:
        target[:] = values
