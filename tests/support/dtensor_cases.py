"""Operators on distributed tensors beside the same operators on whole ones: values and gradients, on every layout of small meshes.

Runs inside the worker processes of `support.processes`.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

import hyper_parallel as hp
from hyper_parallel import Layout, init_device_mesh
from hyper_parallel.platform.torch.dtensor import DTensor, distribute_tensor
from support.process_worker import keep_platform_groups

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "2": ((2,), ("tp",)),
    "4": ((4,), ("tp",)),
    "2x2": ((2, 2), ("dp", "tp")),
}


class Case(NamedTuple):
    """`run` on tensors of these shapes; an entry (shape, high) is a tensor of integers below `high`."""

    run: Callable[..., Any]
    inputs: tuple[Any, ...]
    tolerance: float = 2e-6  # sums of parts are added in another order


def _index(*shape: int, high: int) -> tuple[tuple[int, ...], int]:
    return shape, high


ELEMENTWISE: dict[str, Case] = {
    **{
        name: Case(getattr(torch, name), ((4, 6),))
        for name in (
            "exp",
            "tanh",
            "sigmoid",
            "relu",
            "abs",
            "sin",
            "cos",
            "neg",
            "square",
            "erf",
            "clone",
            "sign",
            "floor",
        )
    },
    **{name: Case(getattr(F, name), ((5, 3),)) for name in ("gelu", "silu", "softplus", "elu", "leaky_relu", "mish")},
    "add": Case(lambda x, y: x + y, ((4, 6), (4, 6))),
    "add, stretched": Case(lambda x, y: x + y, ((4, 5), (5,))),
    "add, stretched both ways": Case(lambda x, y: x + y, ((3, 1), (1, 4))),
    "add a number": Case(lambda x: x + 3, ((4, 6),)),
    "a number minus": Case(lambda x: 3 - x, ((5, 6),)),
    "sub": Case(lambda x, y: x - y, ((5, 6), (5, 1))),
    "mul": Case(lambda x, y: x * y, ((5, 6), (5, 6))),
    "mul a number": Case(lambda x: x * 2.5, ((4, 6),)),
    "div": Case(lambda x, y: x / (y.abs() + 1), ((4, 6), (6,))),
    "div by a number": Case(lambda x: x / 4, ((3, 6),)),
    "a number divided": Case(lambda x: 1 / (x.abs() + 1), ((3, 6),)),
    "pow": Case(lambda x: x**2, ((4, 6),)),
    "maximum": Case(torch.maximum, ((4, 6), (4, 6))),
    "where": Case(lambda x, y: torch.where(x > 0, x, y), ((4, 6), (4, 6))),
    "masked_fill": Case(lambda x, y: x.masked_fill(y > 0, -1.0), ((4, 6), (4, 6))),
    "clamp": Case(lambda x: x.clamp(-0.5, 0.5), ((4, 6),)),
    "addcmul": Case(lambda x, y, z: torch.addcmul(x, y, z, value=0.5), ((4, 6), (4, 6), (4, 6))),
    "lerp": Case(lambda x, y: torch.lerp(x, y, 0.3), ((4, 6), (4, 6))),
    "to float64": Case(lambda x: x.double().float(), ((4, 6),)),
    "mul in place": Case(lambda x: (x * 1).mul_(2.0), ((4, 6),)),
    "add in place": Case(lambda x, y: (x * 1).add_(y), ((4, 6), (4, 6))),
    "an activation in place, of a copy": Case(lambda x: F.silu(x + 0.0, inplace=True), ((4, 6),)),
    "cast to whole numbers": Case(lambda x: (x * 4).to(torch.int64), ((4, 6),)),
    "cast to short ones": Case(lambda x: (x * 4).short(), ((5, 6),)),
    "cast like another": Case(lambda x, i: (x * 4).type_as(i), ((4, 6), _index(3, high=4))),
    "dropout not training": Case(lambda x: F.dropout(x, 0.5, training=False), ((4, 6),)),
}
PRODUCTS: dict[str, Case] = {
    "matmul": Case(torch.matmul, ((4, 6), (6, 8))),
    "matmul, uneven": Case(torch.matmul, ((5, 3), (3, 7))),
    "matmul of stacks": Case(torch.matmul, ((2, 4, 6), (2, 6, 3))),
    "matmul, stretched": Case(torch.matmul, ((3, 4, 6), (6, 5))),
    "matmul, stretched stack": Case(torch.matmul, ((1, 4, 6), (3, 6, 5))),
    "matrix times vector": Case(torch.matmul, ((4, 6), (6,))),
    "vector times vector": Case(torch.matmul, ((6,), (6,))),
    "mm": Case(torch.mm, ((4, 6), (6, 4))),
    "bmm": Case(torch.bmm, ((4, 3, 5), (4, 5, 2))),
    "addmm": Case(torch.addmm, ((8,), (4, 6), (6, 8))),
    "linear": Case(F.linear, ((2, 4, 6), (8, 6))),
    "linear with bias": Case(F.linear, ((4, 6), (8, 6), (8,))),
    "linear with bias, uneven": Case(F.linear, ((3, 5), (7, 5), (7,))),
    "einsum": Case(lambda x, y: torch.einsum("bij,bjk->bik", x, y), ((2, 3, 4), (2, 4, 5))),
    "einsum, free": Case(lambda x, y: torch.einsum("i,j->ij", x, y), ((4,), (6,))),
    "outer": Case(torch.outer, ((4,), (6,))),
}
REDUCTIONS: dict[str, Case] = {
    "sum": Case(lambda x: x.sum(), ((4, 6),)),
    "sum of a dim": Case(lambda x: x.sum(1), ((4, 5),)),
    "sum of two dims": Case(lambda x: x.sum((0, 2)), ((4, 5, 2),)),
    "sum, dim kept": Case(lambda x: x.sum(0, keepdim=True), ((4, 6),)),
    "mean": Case(lambda x: x.mean(), ((5, 3),)),
    "mean of a dim": Case(lambda x: x.mean(-1), ((4, 5),)),
    "mean, dim kept": Case(lambda x: x.mean(-1, keepdim=True), ((4, 5),)),
    "prod": Case(lambda x: x.prod(), ((4,),)),
    "amax": Case(lambda x: x.amax(0), ((5, 3),)),
    "amin": Case(lambda x: x.amin((0, 1)), ((4, 4),)),
    "max": Case(lambda x: x.max(), ((4, 6),)),
    "max of a dim": Case(lambda x: x.max(1).values, ((4, 6),)),
    "amax, a part of nothing": Case(lambda x: x.amax((0, 1)), ((1, 1),)),
    "max of a number's first dim": Case(lambda x: x.max(0).values, ((),)),
    "nansum": Case(lambda x: torch.nansum(x, 0), ((5, 3),)),
    "mode": Case(lambda x: (x * 2).round().mode().values, ((4, 6),)),
    "var, uncorrected": Case(lambda x: x.var(False), ((4, 6),)),
    "var of the first dim": Case(lambda x: x.var(0), ((4, 6),)),
    "argmax": Case(lambda x: x.argmax(1), ((4, 6),)),
    "var": Case(lambda x: x.var(1), ((4, 6),)),
    "logsumexp": Case(lambda x: x.logsumexp(-1), ((4, 6),)),
    "norm": Case(lambda x: torch.linalg.vector_norm(x, dim=1), ((4, 6),)),
    "all": Case(lambda x: (x > 0).all(), ((4, 6),)),
    "softmax": Case(lambda x: F.softmax(x, -1), ((4, 6),)),
    "log_softmax": Case(lambda x: F.log_softmax(x, 0), ((5, 6),)),
    "cumsum": Case(lambda x: x.cumsum(1), ((4, 6),)),
    "sort": Case(lambda x: x.sort(1).values, ((4, 6),)),
    "topk": Case(lambda x: x.topk(2, 1).values, ((4, 6),)),
    "flip": Case(lambda x: x.flip(0), ((4, 6),)),
    "tril": Case(torch.tril, ((4, 4),)),
}
VIEWS: dict[str, Case] = {
    "view, merged": Case(lambda x: x.reshape(-1, 6), ((2, 4, 6),)),
    "view, split": Case(lambda x: x.view(2, 4, 2, 3), ((2, 4, 6),)),
    "view, both": Case(lambda x: x.reshape(4, 4, 3), ((2, 4, 6),)),
    "view, uneven": Case(lambda x: x.reshape(15, 2), ((5, 3, 2),)),
    "view, more dims": Case(lambda x: x.view(1, 4, 1, 6), ((4, 6),)),
    "flatten": Case(lambda x: x.flatten(1), ((4, 2, 3),)),
    "unflatten": Case(lambda x: x.unflatten(1, (2, -1)), ((4, 6),)),
    "permute": Case(lambda x: x.permute(2, 0, 1), ((2, 4, 6),)),
    "transpose": Case(lambda x: x.transpose(0, 1), ((4, 6),)),
    "T": Case(lambda x: x.T, ((4, 6),)),
    "mT": Case(lambda x: x.mT, ((2, 4, 6),)),
    "unsqueeze": Case(lambda x: x.unsqueeze(1), ((4, 6),)),
    "squeeze": Case(lambda x: x.squeeze(), ((4, 1, 6),)),
    "squeeze a dim": Case(lambda x: x.squeeze(1), ((2, 1, 2),)),
    "squeeze no dims": Case(lambda x: x.squeeze(()), ((1, 4, 1),)),
    "transpose of a number": Case(lambda x: x.transpose(0, -1), ((),)),
    "flip by name": Case(lambda x: torch.flip(x, dims=(0,)), ((4, 6),)),
    "reshape by name": Case(lambda x: torch.reshape(input=x, shape=(-1, 3)), ((4, 6),)),
    "repeat_interleave without a dim": Case(lambda x: x.repeat_interleave(2), ((3, 2),)),
    "expand": Case(lambda x: x.expand(3, 4, 6), ((4, 6),)),
    "expand a dim": Case(lambda x: x.expand(-1, 5), ((4, 1),)),
    "repeat": Case(lambda x: x.repeat(2, 1), ((4, 6),)),
    "cat": Case(lambda x, y: torch.cat([x, y], 0), ((4, 6), (3, 6))),
    "cat along the last": Case(lambda x, y: torch.cat((x, y), dim=-1), ((4, 6), (4, 2))),
    "stack": Case(lambda x, y: torch.stack([x, y], 1), ((4, 6), (4, 6))),
    "split": Case(lambda x: x.split(2, 1), ((4, 6),)),
    "split, uneven": Case(lambda x: x.split([1, 5], dim=1), ((4, 6),)),
    "chunk": Case(lambda x: torch.chunk(x, 3, -1), ((4, 6),)),
    "unbind": Case(lambda x: x.unbind(1), ((4, 3),)),
    "narrow": Case(lambda x: x.narrow(1, 1, 3), ((4, 6),)),
    "a number as index": Case(lambda x: x[1], ((4, 6),)),
    "slices": Case(lambda x: x[:, 1:4], ((4, 6),)),
    "slice with a step": Case(lambda x: x[::2, None, ...], ((4, 6),)),
    "rows by a tensor": Case(lambda x, i: x[i], ((5, 6), _index(4, high=5))),
    "columns by a tensor": Case(lambda x, i: x[:, i], ((5, 6), _index(4, high=6))),
    "a list as index": Case(lambda x: x[[2, 0]], ((5, 6),)),
    "lists beside slices": Case(lambda x: x[:, [0, 3], :, [1, 2]], ((3, 4, 2, 3),)),
    "a tensor beside a list": Case(lambda x, i: x[[1, 2], i], ((3, 4, 2), _index(2, high=4))),
    "a tensor after a slice with ends": Case(lambda x, i: x[1:, i], ((5, 6), _index(4, high=6))),
    "index_select": Case(lambda x, i: x.index_select(1, i), ((5, 6), _index(3, high=6))),
    "gather": Case(lambda x, i: x.gather(1, i), ((4, 6), _index(4, 3, high=6))),
    "pad": Case(lambda x: F.pad(x, (1, 2)), ((4, 6),)),
    "pad by reflection, a part of nothing": Case(lambda x: F.pad(x, (1, 2), mode="reflect"), ((1, 3),)),
}
LAYERS: dict[str, Case] = {
    "embedding": Case(F.embedding, (_index(2, 6, high=8), (8, 4))),
    "embedding, uneven": Case(F.embedding, (_index(3, high=5), (5, 4))),
    "layer_norm": Case(lambda x, w, b: F.layer_norm(x, (6,), w, b), ((2, 4, 6), (6,), (6,)), 1e-5),
    "layer_norm without weights": Case(lambda x: F.layer_norm(x, (6,)), ((3, 4, 6),), 1e-5),
    "rms_norm": Case(lambda x, w: F.rms_norm(x, (6,), w), ((2, 4, 6), (6,)), 1e-5),
    "attention": Case(F.scaled_dot_product_attention, ((2, 4, 3, 2),) * 3, 1e-5),
    "causal attention": Case(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ((4, 2, 5, 2),) * 3, 1e-5),
    "attention with a mask": Case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), (*((2, 4, 3, 2),) * 3, (3, 3)), 1e-5
    ),
    "attention of grouped heads": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), ((1, 8, 3, 2), (1, 4, 3, 2), (1, 4, 3, 2)), 1e-5
    ),
    "attention, stretched": Case(F.scaled_dot_product_attention, ((4, 3, 2), (2, 4, 5, 2), (2, 4, 5, 2)), 1e-5),
    "cross_entropy": Case(F.cross_entropy, ((6, 8), _index(6, high=8)), 1e-5),
    "cross_entropy, uneven": Case(F.cross_entropy, ((5, 7), _index(5, high=7)), 1e-5),
    "cross_entropy, some ignored": Case(lambda x, t: F.cross_entropy(x, t, ignore_index=2), ((6, 4), _index(6, high=4)), 1e-5),
    "cross_entropy, smoothed": Case(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), ((6, 8), _index(6, high=8)), 1e-5),
    "cross_entropy, each": Case(lambda x, t: F.cross_entropy(x, t, reduction="none"), ((6, 8), _index(6, high=8)), 1e-5),
    "cross_entropy, sum": Case(lambda x, t: F.cross_entropy(x, t, reduction="sum"), ((6, 8), _index(6, high=8)), 1e-5),
    "one_hot": Case(lambda i: F.one_hot(i, 5), (_index(4, 3, high=5),)),
}  # fmt: skip
FAMILIES: dict[str, dict[str, Case]] = {
    "elementwise": ELEMENTWISE,
    "products": PRODUCTS,
    "reductions": REDUCTIONS,
    "views": VIEWS,
    "layers": LAYERS,
}


def layouts_of(mesh: hp.DeviceMesh, ndim: int, is_floating: bool) -> Iterator[Layout]:
    """Every layout of a tensor: each axis splits a dim, in any order of axes, is replicated, or has partial sums."""
    places = [None, *range(ndim), *(["sum"] if is_floating else [])]
    for choice in itertools.product(places, repeat=mesh.ndim):
        partial = tuple((axis, "sum") for axis, place in zip(mesh.axis_names, choice, strict=True) if place == "sum")
        for order in itertools.permutations(range(mesh.ndim)):
            axes = tuple(tuple(mesh.axis_names[i] for i in order if choice[i] == dim) for dim in range(ndim))
            yield Layout(mesh, axes, partial)


def check_family(mesh_name: str, family: str, most_per_case: int) -> int:
    """How many combinations of layouts were compared; an error names the first that differs."""
    shape, axes = MESHES[mesh_name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    try:
        return sum(
            check_case(mesh, f"{family}: {name}", case, most_per_case) for name, case in FAMILIES[family].items()
        )
    finally:
        keep_platform_groups()


def check_case(mesh: hp.DeviceMesh, name: str, case: Case, most: int) -> int:
    choice = random.Random(zlib.crc32(name.encode()))  # the same on all ranks
    torch.manual_seed(choice.randrange(2**31))
    tensors = [_made(entry) for entry in case.inputs]
    options = [sorted(set(layouts_of(mesh, t.ndim, t.is_floating_point())), key=repr) for t in tensors]
    combinations = list(itertools.product(*options))
    chosen = combinations if len(combinations) <= most else choice.sample(combinations, most)
    wanted, gradients = _reference(case, tensors, choice)
    for layouts in chosen:
        try:
            _check(case, tensors, layouts, wanted, gradients)
        except AssertionError as error:
            raise AssertionError(f"{name} on {mesh} with {', '.join(map(str, layouts))}: {error}") from error
        except Exception as error:
            raise RuntimeError(f"{name} on {mesh} with {', '.join(map(str, layouts))}: {error}") from error
    return len(chosen)


def _made(entry: Any) -> torch.Tensor:
    if entry and isinstance(entry[0], tuple):
        shape, high = entry
        return torch.randint(0, high, shape)
    return torch.randn(entry)


def _reference(case: Case, tensors: list[torch.Tensor], choice: random.Random) -> Any:
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    results = _listed(case.run(*leaves))
    upstream = [torch.randn(r.shape) if r.requires_grad else None for r in results]
    recorded = [(r, g) for r, g in zip(results, upstream, strict=True) if g is not None]
    if recorded:
        torch.autograd.backward([r for r, _ in recorded], [g for _, g in recorded])
    return (results, upstream), [leaf.grad for leaf in leaves]


def _check(case: Case, tensors: list[torch.Tensor], layouts: Any, wanted: Any, gradients: list[Any]) -> None:
    inputs = [
        distribute_tensor(t, layout).detach().requires_grad_(t.is_floating_point())
        for t, layout in zip(tensors, layouts, strict=True)
    ]
    results = _listed(case.run(*inputs))
    expected, upstream = wanted
    assert len(results) == len(expected)
    total = None
    for result, right, grad in zip(results, expected, upstream, strict=True):
        assert isinstance(result, DTensor)
        assert result.shape == right.shape, f"shape {result.shape} for {right.shape}"
        _compare("result", result.full_tensor(), right, case.tolerance)
        if grad is not None:
            part = (result * distribute_tensor(grad, result.device_mesh)).sum()
            total = part if total is None else total + part
    if total is not None:
        total.backward()
    for index, (leaf, grad) in enumerate(zip(inputs, gradients, strict=True)):
        if grad is not None:
            assert leaf.grad is not None, f"no gradient of input {index}"
            _compare(f"gradient of input {index}", leaf.grad.full_tensor(), grad, 4 * case.tolerance)


def _compare(what: str, got: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    assert got.dtype == right.dtype, f"{what}: dtype {got.dtype} for {right.dtype}"
    if not got.is_floating_point():
        assert torch.equal(got, right), f"{what}: {got} for {right}"
        return
    difference = (got - right).abs().max().item() if got.numel() else 0.0
    scale = max(right.abs().max().item(), 1.0) if right.numel() else 1.0
    assert difference <= tolerance * scale, f"{what} differs by {difference:.2e}"


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]
