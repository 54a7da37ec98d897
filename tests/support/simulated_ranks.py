"""All ranks of a mesh in one process, on NumPy arrays: plans run on all of them, step by step together, and every byte is counted."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel import Layout
from hyper_parallel.core.dtensor.boxes import Box, box_of
from hyper_parallel.core.dtensor.redistribution import Plan
from hyper_parallel.core.dtensor.redistribution.executor import Request, run

Array = np.ndarray[Any, Any]
Locals = dict[int, Array]

REDUCE = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}  # no average: not every backend has one
# Parts of sums are multiples of it, so that averages over any axes of the meshes used here are whole numbers.
UNIT = 24


class LocalOperations:
    """The part of `Transport` that needs no other rank."""

    def slice(self, tensor: Array, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Array:
        part = tensor[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
        assert part.shape == sizes, "a slice lies outside of its tensor"
        return part

    def place(
        self, shape: tuple[int, ...], pieces: Sequence[tuple[tuple[int, ...], Array]], like: Array, fill: int | None
    ) -> Array:
        made = np.full(shape, np.nan if fill is None else fill, like.dtype)
        written = np.zeros(shape, bool)
        for starts, piece in pieces:
            where = tuple(slice(start, start + size) for start, size in zip(starts, piece.shape, strict=True))
            assert made[where].shape == piece.shape, "a piece lies outside of its tensor"
            assert not written[where].any(), "two pieces overlap"
            made[where] = piece
            written[where] = True
        assert fill is not None or written.all(), "no piece covers a place"
        return made

    def reduce_local(self, tensors: Sequence[Array], op: str) -> Array:
        return functools.reduce(REDUCE[op], tensors)

    def divide(self, tensor: Array, divisor: int) -> Array:
        return tensor / divisor


class Run(NamedTuple):
    locals: Locals
    received: dict[int, float]  # elements, by rank
    sent: dict[int, float]
    methods: list[str]


def execute(plan: Plan, locals_before: Locals) -> Run:
    """Run a plan on all ranks. A group whose ranks ask for different things fails, as do pieces of another shape than announced."""
    mesh = plan.source.mesh
    operations: Any = LocalOperations()
    work = {rank: run(locals_before[rank], plan, mesh.coordinate_of(rank), operations) for rank in mesh.ranks}
    answers: dict[int, Any] = dict.fromkeys(mesh.ranks)
    after: Locals = {}
    counts: tuple[dict[int, float], dict[int, float]] = dict.fromkeys(mesh.ranks, 0.0), dict.fromkeys(mesh.ranks, 0.0)
    methods = []
    while True:
        requests: dict[int, Request] = {}
        for rank, generator in work.items():
            try:
                requests[rank] = generator.send(answers[rank])
            except StopIteration as done:
                after[rank] = done.value
        if not requests:
            return Run(after, *counts, methods)
        assert not after, "some ranks are done while others still communicate"
        assert len({request.method for request in requests.values()}) == 1
        methods.append(next(iter(requests.values())).method)
        answers = _answers(requests, *counts)


def _answers(requests: dict[int, Request], received: dict[int, float], sent: dict[int, float]) -> dict[int, Any]:
    answers: dict[int, Any] = {}
    for ranks in {request.ranks for request in requests.values()}:
        members = [requests[rank] for rank in ranks]
        for rank, request in zip(ranks, members, strict=True):
            assert request.ranks == ranks, f"rank {rank} is in another group than its peers think"
        tensors = [request.arguments.get("tensor") for request in members]
        settings = [
            {k: v for k, v in m.arguments.items() if k in ("dim", "op", "split_dim", "concat_dim")} for m in members
        ]
        assert all(setting == settings[0] for setting in settings)
        results, got, gave = _METHODS[members[0].method](tensors, members, **settings[0])
        for rank, result, num_got, num_gave in zip(ranks, results, got, gave, strict=True):
            answers[rank] = result
            received[rank] += num_got
            sent[rank] += num_gave
    return answers


def _same_shape(tensors: list[Array]) -> None:
    assert len({tensor.shape for tensor in tensors}) == 1, "ranks bring different shapes"


def _all_gather(tensors: list[Array], members: list[Request], dim: int) -> tuple[list[Array], list[float], list[float]]:
    _same_shape(tensors)
    bytes_each = [tensors[0].size * (len(tensors) - 1.0)] * len(tensors)
    return [np.concatenate(tensors, dim) for _ in tensors], bytes_each, bytes_each


def _chunks(tensor: Array, num: int, dim: int) -> list[Array]:
    assert tensor.shape[dim] % num == 0, "a dim is not divisible"
    return np.split(tensor, num, dim)


def _reduce_scatter(
    tensors: list[Array], members: list[Request], dim: int, op: str
) -> tuple[list[Array], list[float], list[float]]:
    _same_shape(tensors)
    num = len(tensors)
    results = _chunks(functools.reduce(REDUCE[op], tensors), num, dim)
    ring = [tensors[0].size * (num - 1) / num] * num
    return results, ring, ring


def _all_reduce(tensors: list[Array], members: list[Request], op: str) -> tuple[list[Array], list[float], list[float]]:
    _same_shape(tensors)
    num = len(tensors)
    ring = [2 * tensors[0].size * (num - 1) / num] * num
    return [functools.reduce(REDUCE[op], tensors) for _ in tensors], ring, ring


def _all_to_all(
    tensors: list[Array], members: list[Request], split_dim: int, concat_dim: int
) -> tuple[list[Array], list[float], list[float]]:
    _same_shape(tensors)
    num = len(tensors)
    chunks = [_chunks(tensor, num, split_dim) for tensor in tensors]
    each = [tensors[0].size * (num - 1) / num] * num
    return [np.concatenate([sent[to] for sent in chunks], concat_dim) for to in range(num)], each, each


def _all_to_all_v(tensors: list[None], members: list[Request]) -> tuple[list[Any], list[float], list[float]]:
    num = len(members)
    results, got = [], []
    gave = [0.0] * num
    for to in range(num):
        pieces = [members[source].arguments["pieces"][to] for source in range(num)]
        shapes = members[to].arguments["shapes"]
        assert pieces[to] is None
        assert [None if piece is None else piece.shape for piece in pieces] == list(shapes), "sent and expected differ"
        for source, piece in enumerate(pieces):
            gave[source] += 0 if piece is None else piece.size
        results.append(pieces)
        got.append(float(sum(piece.size for piece in pieces if piece is not None)))
    return results, got, gave


_METHODS: dict[str, Any] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all_v,
}


# -- what ranks hold --------------------------------------------------------------------------------------------------


def random_values(shape: tuple[int, ...], generator: random.Random) -> Array:
    """Whole numbers, as floats: their sums, products and averages here are exact."""
    flat = [float(UNIT * generator.randint(-50, 50)) for _ in range(int(np.prod(shape)))]
    return np.array(flat).reshape(shape)


def distribute(values: Array, layout: Layout, generator: random.Random) -> Locals:
    """Local tensors of a layout whose global value is `values`; partial ones are random parts of it."""
    parts = {(): values}
    for axis, op in layout.partial:
        num = layout.mesh.size(axis)
        parts = {
            (*coordinate, at): part
            for coordinate, value in parts.items()
            for at, part in enumerate(_parts(value, op, num, generator))
        }
    axes = [layout.mesh.axis_index(axis) for axis, _ in layout.partial]
    found = {}
    for rank in layout.mesh.ranks:
        coordinate = layout.mesh.coordinate_of(rank)
        whole = parts[tuple(coordinate[index] for index in axes)]
        found[rank] = np.array(whole[_index(box_of(layout, values.shape, coordinate))])
        found[rank].flags.writeable = False  # nothing may change what it is given
    return found


def _parts(value: Array, op: str, num: int, generator: random.Random) -> list[Array]:
    others = [random_values(value.shape, generator) for _ in range(num - 1)]
    if op in ("sum", "avg"):
        first = value * (num if op == "avg" else 1) - sum(others, np.zeros_like(value))
    elif op == "prod":
        others = [np.where(other >= 0, 1.0, -1.0) for other in others]
        first = value * functools.reduce(np.multiply, others, np.ones_like(value))
    else:
        sign = 1 if op == "max" else -1
        others = [value - sign * np.abs(other) for other in others]
        first = value
    parts = [first, *others]
    generator.shuffle(parts)
    return parts


def global_value(found: Locals, layout: Layout, shape: tuple[int, ...]) -> Array:
    """What local tensors mean: fails where shapes are wrong or replicas differ."""
    mesh = layout.mesh
    axes = [mesh.axis_index(axis) for axis, _ in layout.partial]
    wholes = {
        coordinate: np.full(shape, np.nan) for coordinate in itertools.product(*(range(mesh.shape[axis]) for axis in axes))
    }  # fmt: skip
    for rank in mesh.ranks:
        coordinate = mesh.coordinate_of(rank)
        box = box_of(layout, shape, coordinate)
        assert found[rank].shape == box.sizes, f"rank {rank} holds {found[rank].shape}, its box is {box.sizes}"
        whole = wholes[tuple(coordinate[axis] for axis in axes)]
        there = whole[_index(box)]
        assert np.isnan(there).all() or np.array_equal(there, found[rank]), f"rank {rank} differs from its replica"
        whole[_index(box)] = found[rank]
    for axis, op in reversed(layout.partial):
        num = mesh.size(axis)
        reduced = {}
        for coordinate in {key[:-1] for key in wholes}:
            whole = functools.reduce(
                REDUCE["sum" if op == "avg" else op], [wholes[(*coordinate, at)] for at in range(num)]
            )
            reduced[coordinate] = whole / num if op == "avg" else whole
        wholes = reduced
    return wholes[()]


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in zip(box.starts, box.ends, strict=True))
