"""Local calls that are not just the operator on local tensors.

They know local shapes, counts of the whole tensor, parts of a table, or draw random numbers. Each takes the operator
and its arguments with local tensors in the places of the distributed ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import ArgumentTypeError, StateError
from hyper_parallel.core.dtensor.boxes import box_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.local_parts import mesh_coordinate
from hyper_parallel.core.shard.rule_answer import LocalCall, RuleAnswer
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.mindspore.devices import Devices
from hyper_parallel.platform.mindspore.tensors import filled

__all__ = ["check_seeded", "local_call"]


# `mindspore.common.seed` is hidden behind a function of the same name.
_seeds: Any = importlib.import_module("mindspore.common.seed")


# These add up, or multiply; where a rank has nothing, they get one such neutral element.
_NEUTRAL = {
    **dict.fromkeys(
        [
            "MatMulExt",
            "MatMul",
            "BatchMatMul",
            "Mm",
            "MmExt",
            "BatchMatMulExt",
            "BmmExt",
            "Mv",
            "Dot",
            "Dense",
            "Addmm",
            "Baddbmm",
            "SumExt",
            "DeprecatedSum",
            "ReduceSum",
            "MeanExt",
            "ReduceMean",
        ],
        0,
    ),
    **dict.fromkeys(["ProdExt", "DeprecatedProd", "ReduceProd"], 1),
}


def local_call(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall | None:
    """Return the local implementation that an answer names; None: the operator itself."""
    call = None if answer.how is None else _MAKERS[answer.how](answer, inputs, name)
    coordinate = _coordinate(answer.inputs[0])
    if all(0 in spec.local_shape_at(coordinate) for spec in answer.outputs):
        return _unrecorded(call)
    return _of_nothing(call, _NEUTRAL[name]) if name in _NEUTRAL and _sums_nothing(answer, inputs) else call


def _unrecorded(call: LocalCall | None) -> LocalCall:
    """Keep a call out of the graph where this rank makes nothing.

    Some gradients refuse to compute with nothing; its inputs get zeros by rule T3.
    """

    def without_graph(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with _no_grad():
            return func(*args, **kwargs) if call is None else call(func, args, kwargs)

    return without_graph


def _sums_nothing(answer: RuleAnswer, inputs: Sequence[Spec]) -> bool:
    """Say whether this rank has no elements of an input, and some of the output."""
    coordinate = _coordinate(answer.inputs[0])
    mine = [
        Spec(layout, spec.shape).local_shape_at(coordinate) for layout, spec in zip(answer.inputs, inputs, strict=True)
    ]
    return any(0 in shape for shape in mine) and 0 not in answer.outputs[0].local_shape_at(coordinate)


def _of_nothing(call: LocalCall | None, neutral: int) -> LocalCall:
    """Add up one neutral element in the place of nothing: on the CPU a sum over nothing is what memory held before."""

    def on_something(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = [
            filled(tuple(max(length, 1) for length in value.shape), neutral, value.dtype, None, "a sum over nothing")
            if isinstance(value, Tensor) and value.numel() == 0
            else value
            for value in args
        ]
        return func(*given, **kwargs) if call is None else call(func, given, kwargs)

    return on_something


def _coordinate(layout: Layout) -> tuple[int, ...]:
    return mesh_coordinate(layout.mesh)


def _to_local_shape(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall:
    shape = answer.outputs[0].local_shape_at(_coordinate(answer.outputs[0].layout))
    if name in ("BroadcastTo", "BroadcastToView", "Expand", "ExpandAs"):
        return lambda func, args, kwargs: ops.broadcast_to(args[0], shape)
    return lambda func, args, kwargs: args[0].reshape(shape)


def _squeeze(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall:
    shape = answer.outputs[0].local_shape_at(_coordinate(answer.outputs[0].layout))
    return lambda func, args, kwargs: args[0].reshape(shape)


def _mean(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall | None:
    """Divide a local sum by the global count: uneven parts weigh what they should."""
    before = {axis for axis, _ in answer.inputs[0].partial}
    if all(axis in before for axis, _ in answer.outputs[0].layout.partial):
        return None
    count, dims, keepdim, dtype = (answer.facts[key] for key in ("count", "dims", "keepdim", "dtype"))

    def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        x = args[0] if dtype is None else args[0].to(dtype)
        return ops.sum(x, dims, keepdim) / count

    return call


def _copy(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall | None:
    return (lambda func, args, kwargs: args[0].copy()) if Devices.device_type() == "cpu" else None


def _stack(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall | None:
    dim = answer.facts["dim"]
    return (lambda func, args, kwargs: ops.stack(args[0], dim)) if Devices.device_type() == "cpu" else None


def _nothing_of_nothing(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall | None:
    """Make an empty result for operators that refuse a tensor without elements."""
    shapes = [spec.local_shape_at(_coordinate(spec.layout)) for spec in answer.outputs]
    if not any(0 in shape for shape in shapes):
        return None

    def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        dtype = args[0].dtype if name != "OneHot" else args[2].dtype
        made = tuple(mint.empty(shape, dtype=dtype) for shape in shapes)
        return made if len(made) > 1 else made[0]

    return call


def _getitem(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall:
    items = answer.facts["index"]
    return lambda func, args, kwargs: _taken(args[0], items)


def _taken(x: Tensor, items: Sequence[Any]) -> Tensor:
    """Index by `narrow` and `gather`, whose gradients the CPU has for every dtype, also of nothing."""
    used = sum(item is not None and item is not Ellipsis for item in items)
    whole = [slice(None)] * (x.ndim - used)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    shape: list[int] = []
    dim = 0
    for item in [*items[:at], *whole, *items[at + 1 :]]:
        if item is None:
            shape.append(1)
            continue
        length = x.shape[dim]
        if isinstance(item, slice):
            start, stop, step = item.indices(length)
            chosen = range(start, stop, step)
            if len(chosen) != length and (step == 1 or not chosen):
                x = mint.narrow(x, dim, chosen.start if chosen else 0, len(chosen))
            elif step != 1:
                x = ops.gather(x, Tensor(list(chosen), mindspore.int32), dim)
            shape.append(len(chosen))
        else:
            x = mint.narrow(x, dim, item % length, 1)
        dim += 1
    return x.reshape(tuple(shape))


def _index(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall:
    dim = answer.facts["dim"]
    length = inputs[0].shape[dim]

    def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        items = args[1] if isinstance(args[1], tuple) else (args[1],)
        positions = next(item for item in items if isinstance(item, Tensor))
        if positions.dtype == mindspore.bool_:
            raise ArgumentTypeError(
                "A distributed tensor is indexed by positions, not by a mask: how much it chooses is not known.",
                expected="a tensor of integers",
                got="one of bool",
                do="Use `ops.where`, or `hp.DTensor.to_local` and your own layout.",
            )
        return ops.gather(args[0], ops.where(positions < 0, positions + length, positions), dim)

    return call


def _rows_of_a_part(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall:
    """Let each rank look up the rows it has, and leave zeros for the others; the parts are then summed."""
    table_first = name == "Gather"
    table = inputs[0 if table_first else 1]
    layout = answer.inputs[0 if table_first else 1]
    box = box_of(layout, table.shape, _coordinate(layout))
    first, count = box.starts[0], box.sizes[0]

    def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        weight, ids = (args[0], args[1]) if table_first else (args[1], args[0])
        if count == 0:
            return mint.zeros((*ids.shape, weight.shape[1]), dtype=weight.dtype)
        is_here = ops.logical_and(ids >= first, ids < first + count)
        rows = ops.gather(weight, ops.where(is_here, ids - first, ops.zeros_like(ids)), 0)
        return rows * is_here.unsqueeze(-1).to(rows.dtype)

    return call


def check_seeded(layout: Layout) -> None:
    """Raise where ranks would draw different numbers for the same elements."""
    if len(layout.mesh.ranks) > 1 and _seeds._GLOBAL_SEED is None:
        raise StateError(
            "Random numbers of a distributed tensor need a seed, the same on all ranks.",
            expected="`mindspore.set_seed(number)` before",
            got="no seed: every rank would draw its own numbers",
        )


def _dropout(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall | None:
    """Let ranks that hold the same part draw the same numbers, and others draw others."""
    layout = answer.outputs[0].layout
    box = box_of(layout, answer.outputs[0].shape, _coordinate(layout))

    def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        check_seeded(layout)
        if layout.is_replicated:
            return func(*args, **kwargs)  # the numbers of a single device
        if args[0].numel() == 0:
            return args[0], args[0]
        # A primitive made now would get these seeds; the place of the part changes them.
        first, second = _seeds._get_graph_seed(0, "dropout")
        for start in box.starts:
            second = (second * 1103515245 + start + 12345) % (2**31 - 1)
        return ops.Dropout(args[1], first, second + 1)(args[0])

    return call


def _as_it_is(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> None:
    """Call the operator itself."""


_MAKERS: dict[str, Callable[..., LocalCall | None]] = {
    "by_positions": _as_it_is,  # primitives that gather take no masks; an index does, and has its own call
    "to_local_shape": _to_local_shape,
    "squeeze": _squeeze,
    "mean": _mean,
    "copy": _copy,
    "stack": _stack,
    "nothing_of_nothing": _nothing_of_nothing,
    "getitem": _getitem,
    "index": _index,
    "rows_of_a_part": _rows_of_a_part,
    "dropout": _dropout,
}
