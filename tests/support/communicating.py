"""Collectives as cases: what each rank calls, in words of either framework, and what one process alone would compute.

`run_case` runs in the workers of `support.processes`; `expected` in the test. All numbers are small whole ones, so that sums and products
are exact in every dtype and order, and results are compared bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from support import backends
from support.process_worker import kept_group

KINDS = ("world", "halves", "interleaved", "single")
SHAPE = (4, 3)  # rows can be divided by every size of group here


class Setting(NamedTuple):
    """One way to run a case."""

    kind: str
    dtype: str
    is_contiguous: bool


class Case(NamedTuple):
    """`call(here, x)` is what a rank does; `together(xs)` what all ranks of a group get, from what all of them have.

    In `call`, `here` is a `Here`. `together` is written in PyTorch, for its gradients.
    """

    call: Callable[[Here, Any], Any]
    together: Callable[[list[Any]], list[Any]]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "int64")
    has_gradient: bool = False
    num_values: int = 5
    shape: tuple[int, ...] = SHAPE


class Here:
    """This rank in a group."""

    def __init__(self, backend: Any, kind: str) -> None:
        self.backend = backend
        self.platform = backend.platform
        self.rank = self.platform.get_rank()
        self.ranks = ranks_of(kind, self.rank, self.platform.get_world_size())
        self.group = None if kind == "world" else kept_group(self.platform, self.ranks)
        self.size = len(self.ranks)
        self.me = self.ranks.index(self.rank)
        self.peer = self.ranks[self.me ^ 1] if self.size > 1 else self.rank


@functools.cache
def backend_of(framework: str) -> Any:
    return backends.TorchBackend("cpu") if framework == "torch" else backends.MindSporeBackend()


def ranks_of(kind: str, rank: int, world_size: int) -> tuple[int, ...]:
    half = world_size // 2
    if kind == "world":
        return tuple(range(world_size))
    if kind == "halves":
        return tuple(range(half)) if rank < half else tuple(range(half, world_size))
    if kind == "interleaved":
        return tuple(range(rank % 2, world_size, 2))
    return (rank,)


def values(rank: int, shape: tuple[int, ...], num_values: int, seed: int = 0) -> np.ndarray:
    """Whole numbers from 1 to `num_values`, others on each rank; few values make ties."""
    return np.random.default_rng(97 * seed + rank).integers(1, num_values + 1, shape)


def settings(case: Case) -> Iterator[Setting]:
    for kind in KINDS:
        for dtype in case.dtypes:
            for is_contiguous in (True, False):
                yield Setting(kind, dtype, is_contiguous)


def run_case(framework: str, name: str) -> dict[Setting, tuple[Any, Any]]:
    """On every rank: setting -> (result, gradient or None)."""
    backend, case = backend_of(framework), CASES[name]
    found = {}
    with backend.active():
        for setting in settings(case):
            here = Here(backend, setting.kind)
            x = _input(backend, case, here.rank, setting)
            result = backend.numbers(case.call(here, x))
            gradient = None
            if case.has_gradient and setting.dtype == "float32":
                weight = backend.tensor(values(here.rank, result.shape, 7, seed=1))
                x = _input(backend, case, here.rank, setting)
                (gradient,) = backend.grad_of(lambda each, here=here, weight=weight: case.call(here, each) * weight, x)
            found[setting] = (np.array(result), gradient)
    return found


def expected(name: str, world_size: int) -> dict[tuple[Setting, int], tuple[Any, Any]]:
    """(setting, rank) -> (result, gradient or None), computed by this process alone."""
    import torch

    case = CASES[name]
    found = {}
    for setting in settings(case):
        for rank in range(world_size):
            ranks = ranks_of(setting.kind, rank, world_size)
            dtype = getattr(torch, setting.dtype)
            xs = [torch.tensor(values(each, case.shape, case.num_values)).to(dtype) for each in ranks]
            with_gradient = case.has_gradient and setting.dtype == "float32"
            if with_gradient:
                xs = [x.requires_grad_() for x in xs]
            results = case.together(xs)
            me = ranks.index(rank)
            gradient = None
            if with_gradient:
                weights = [
                    torch.tensor(values(each, tuple(y.shape), 7, seed=1)).float()
                    for each, y in zip(ranks, results, strict=True)
                ]
                sum((y * w).sum() for y, w in zip(results, weights, strict=True)).backward()
                gradient = xs[me].grad.numpy()
            result = results[me].detach()
            found[setting, rank] = (result.float().numpy() if setting.dtype == "bfloat16" else result.numpy(), gradient)
    return found


def _input(backend: Any, case: Case, rank: int, setting: Setting) -> Any:
    numbers = values(rank, case.shape, case.num_values)
    if setting.is_contiguous or len(case.shape) < 2:
        return backend.tensor(numbers, setting.dtype)
    made = backend.tensor(numbers.T.copy(), setting.dtype).T
    assert not made.is_contiguous()
    return made


# What one process would compute, in PyTorch


def _stacked(xs: list[Any]) -> Any:
    import torch

    return torch.stack(xs)


def _sum(xs: list[Any]) -> list[Any]:
    return [_stacked(xs).sum(0, dtype=xs[0].dtype)] * len(xs)


def _mean(xs: list[Any]) -> list[Any]:
    return [_stacked(xs).sum(0) / len(xs)] * len(xs)


def _max(xs: list[Any]) -> list[Any]:
    return [_stacked(xs).amax(0)] * len(xs)


def _min(xs: list[Any]) -> list[Any]:
    return [_stacked(xs).amin(0)] * len(xs)


def _prod(xs: list[Any]) -> list[Any]:
    product = xs[0]
    for x in xs[1:]:
        product = product * x
    return [product] * len(xs)


def _joined(dim: int) -> Callable[[list[Any]], list[Any]]:
    def joined(xs: list[Any]) -> list[Any]:
        import torch

        return [torch.cat(xs, dim)] * len(xs)

    return joined


def _scattered(reduce: Callable[[list[Any]], list[Any]], dim: int) -> Callable[[list[Any]], list[Any]]:
    return lambda xs: list(reduce(xs)[0].chunk(len(xs), dim)) if len(xs) > 1 else reduce(xs)


def _exchanged(xs: list[Any]) -> list[Any]:
    import torch

    parts = [x.chunk(len(xs), 0) for x in xs]
    return [torch.cat([part[me] for part in parts], 0) for me in range(len(xs))]


def _rows(me: int, size: int) -> tuple[list[int], list[int]]:
    """Uneven splits of the rows of `SHAPE`, with zeros: rank i sends nearly all to the rank after it, and nothing to itself."""
    if size == 1:
        return [SHAPE[0]], [SHAPE[0]]
    sent = {rank: [0] * size for rank in range(size)}
    for rank in range(size):
        sent[rank][(rank + 1) % size] = SHAPE[0] - rank % 2
        sent[rank][(rank + 2) % size] += rank % 2
    return sent[me], [sent[rank][me] for rank in range(size)]


def _exchanged_rows(xs: list[Any]) -> list[Any]:
    import torch

    size = len(xs)
    parts = [x.split(_rows(me, size)[0]) for me, x in enumerate(xs)]
    return [torch.cat([part[me] for part in parts], 0) for me in range(size)]


def _pairs(xs: list[Any]) -> list[Any]:
    return [xs[me ^ 1] for me in range(len(xs))] if len(xs) > 1 else [xs[0] * 1]


def _turned(xs: list[Any]) -> list[Any]:
    """Rows split, columns gathered."""
    import torch

    parts = [x.chunk(len(xs), 0) for x in xs]
    return [torch.cat([part[me] for part in parts], 1) for me in range(len(xs))]


# What a rank calls


def _group_info(here: Here) -> Any:
    """The same group in its three forms, one after the other over the ranks."""
    forms = [here.group, SimpleNamespace(group=here.group, rank_size=here.size) if here.group is not None else None]
    return forms[here.rank % 2]


def _all_reduce_in_place(here: Here, x: Any) -> Any:
    was_contiguous = x.is_contiguous()
    result = here.platform.all_reduce(x, _group_info(here))
    assert (result is x) == was_contiguous
    return result


def _launched(call: Callable[[Here, Any], tuple[Any, Any]]) -> Callable[[Here, Any], Any]:
    def run(here: Here, x: Any) -> Any:
        result, handle = call(here, x)
        handle.wait()
        handle.wait()
        assert handle.is_completed()
        return result

    return run


def _broadcast(here: Here, x: Any) -> Any:
    assert here.platform.broadcast(x, here.ranks[-1], here.group) is x
    return x


def _broadcast_reshaped(here: Here, x: Any) -> Any:
    reshaped = x.reshape((SHAPE[1], SHAPE[0]))
    here.platform.broadcast(reshaped, here.ranks[-1], here.group)
    return reshaped.reshape(SHAPE)


def _broadcast_async(here: Here, x: Any) -> tuple[Any, Any]:
    return here.platform.broadcast(x, src=here.ranks[0], group=here.group, async_op=True)


def _all_to_all_single(here: Here, x: Any) -> Any:
    result, work = here.platform.all_to_all_single(x, SHAPE, here.group)
    assert work is None
    return result


def _send_around(here: Here, x: Any) -> Any:
    """A ring: to the next, from the one before; into a tensor that is as contiguous as the one that is sent."""
    if here.size == 1:
        return x
    platform = here.platform
    after, before = here.ranks[(here.me + 1) % here.size], here.ranks[here.me - 1]
    into = here.backend.tensor(np.zeros(SHAPE[::-1]), _dtype_name(x)).T if not x.is_contiguous() else x * 0
    sending = platform.isend(x, after, here.group)
    receiving = platform.irecv(into, src=before, group=here.group, tag=0)
    receiving.wait()
    sending.wait()
    return into


def _dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.").lower()


def _around(xs: list[Any]) -> list[Any]:
    return [xs[me - 1] for me in range(len(xs))]


def _gather_scatter_uneven(here: Here, x: Any, name: str) -> Any:
    sent, received = _rows(here.me, here.size)
    return getattr(here.platform, name)(x, sent, received, here.group)


def _finish(here: Here, x: Any) -> Any:
    """Rows split, columns gathered, launched by hand and finished inside the graph."""
    platform = here.platform
    pieces = [
        platform.chunk(x, 0, here.size, index).reshape((1, SHAPE[0] // here.size, *SHAPE[1:]))
        for index in range(here.size)
    ]
    leading = platform.cat(pieces, 0)
    with platform.no_grad():
        received, work = platform.all_to_all_single(leading, leading.shape, here.group, async_op=True)
    return platform.differentiable_async_a2a_wait(x, work, received, here.group, here.size, 1, 0)


def _all_reduce(op: Any) -> Callable[[Here, Any], Any]:
    return lambda here, x: here.platform.differentiable_all_reduce(x, op, here.group)


def _reduce_scatter(op: str, axis: int) -> Callable[[Here, Any], Any]:
    return lambda here, x: here.platform.differentiable_reduce_scatter(x, here.size, axis, op, here.group)


FLOATS = ("float32", "bfloat16")
_WIDE = (3, 4)


def _cases() -> dict[str, Case]:
    plain = {
        "all_gather_into_tensor": Case(
            lambda here, x: here.platform.all_gather_into_tensor(x, _group_info(here)), _joined(0)
        ),
        "all_gather_into_tensor, async": Case(
            _launched(lambda here, x: here.platform.all_gather_into_tensor(x, here.group, async_op=True)), _joined(0)
        ),
        "all_reduce": Case(_all_reduce_in_place, _sum, dtypes=("float32", "bfloat16", "int64", "float64")),
        "all_reduce, async": Case(
            _launched(lambda here, x: here.platform.all_reduce(x, here.group, async_op=True)), _sum
        ),
        "reduce_scatter_tensor": Case(
            lambda here, x: here.platform.reduce_scatter_tensor(x, here.group), _scattered(_sum, 0)
        ),
        "reduce_scatter_tensor, async": Case(
            _launched(lambda here, x: here.platform.reduce_scatter_tensor(x, here.group, async_op=True)),
            _scattered(_sum, 0),
        ),
        "broadcast": Case(
            _broadcast, lambda xs: [xs[-1]] * len(xs), dtypes=("float32", "bfloat16", "int64", "float64")
        ),
        "broadcast, into a reshaped tensor": Case(_broadcast_reshaped, lambda xs: [xs[-1]] * len(xs)),
        "broadcast, async": Case(_launched(_broadcast_async), lambda xs: [xs[0]] * len(xs)),
        "all_to_all_single": Case(_all_to_all_single, _exchanged),
        "all_to_all_single, async": Case(
            _launched(lambda here, x: here.platform.all_to_all_single(x, SHAPE, here.group, True)), _exchanged
        ),
        "isend and irecv": Case(_send_around, _around),
    }
    graded = {
        "differentiable_all_gather_concat, dim 0": Case(
            lambda here, x: here.platform.differentiable_all_gather_concat(x, here.group, here.size, 0), _joined(0)
        ),
        "differentiable_all_gather_concat, dim -1": Case(
            lambda here, x: here.platform.differentiable_all_gather_concat(x, here.group, here.size, -1), _joined(1)
        ),
        "differentiable_all_reduce, sum": Case(_all_reduce("SUM"), _sum),
        "differentiable_all_reduce, avg": Case(_all_reduce("avg"), _mean, dtypes=FLOATS),
        "differentiable_all_reduce, mean": Case(_all_reduce("Mean"), _mean, dtypes=FLOATS),
        "differentiable_all_reduce, max": Case(_all_reduce("max"), _max, num_values=2),
        "differentiable_all_reduce, min": Case(_all_reduce("min"), _min, num_values=2),
        "differentiable_all_reduce, prod": Case(_all_reduce("prod"), _prod, num_values=3),
        "differentiable_reduce_scatter, sum": Case(_reduce_scatter("sum", 0), _scattered(_sum, 0)),
        "differentiable_reduce_scatter, sum along dim 1": Case(
            _reduce_scatter("sum", 1), _scattered(_sum, 1), shape=_WIDE
        ),
        "differentiable_reduce_scatter, avg": Case(_reduce_scatter("avg", -2), _scattered(_mean, 0), dtypes=FLOATS),
        "differentiable_reduce_scatter, max": Case(_reduce_scatter("max", 0), _scattered(_max, 0), num_values=2),
        "differentiable_reduce_scatter, min": Case(
            _reduce_scatter("min", 1), _scattered(_min, 1), num_values=2, shape=_WIDE
        ),
        "differentiable_all_to_all": Case(
            lambda here, x: here.platform.differentiable_all_to_all(x, SHAPE, here.group), _exchanged
        ),
        "differentiable_all_to_all, another shape": Case(
            lambda here, x: here.platform.differentiable_all_to_all(x, (12,), here.group),
            lambda xs: [each.reshape(12) for each in _exchanged(xs)],
        ),
        "differentiable_all_to_all_single": Case(
            lambda here, x: _gather_scatter_uneven(here, x, "differentiable_all_to_all_single"), _exchanged_rows
        ),
        "differentiable_all_to_all_single, equal": Case(
            lambda here, x: here.platform.differentiable_all_to_all_single(x, None, None, here.group), _exchanged
        ),
        "differentiable_all_to_all_single_async": Case(
            lambda here, x: _gather_scatter_uneven(here, x, "differentiable_all_to_all_single_async"), _exchanged_rows
        ),
        "p2p_exchange, pairs": Case(lambda here, x: here.platform.p2p_exchange(x, here.peer, here.group), _pairs),
        "p2p_exchange, itself": Case(
            lambda here, x: here.platform.p2p_exchange(x, here.rank, here.group), lambda xs: [x * 1 for x in xs]
        ),
        "differentiable_async_a2a_wait": Case(_finish, _turned),
    }
    return plain | {name: case._replace(has_gradient=True) for name, case in graded.items()}


CASES = _cases()
