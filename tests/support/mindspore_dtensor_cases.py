"""MindSpore's operators on distributed tensors beside the same operators on whole ones: values and gradients, on every layout of small meshes.

Runs inside the worker processes of `support.processes`.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore._c_expression import run_backward
from mindspore.graph.api import _pynative_executor

import hyper_parallel as hp
from hyper_parallel import init_device_mesh
from hyper_parallel.core.dtensor.gradients import gradient_layout
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.mindspore.dtensor import DTensor, distribute_tensor
from hyper_parallel.platform.mindspore.dtensor.tensor import wrapped
from support.layouts import all_layouts
from support.process_worker import keep_platform_groups

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {"2": ((2,), ("tp",)), "2x2": ((2, 2), ("dp", "tp"))}


class Case(NamedTuple):
    """`run` on tensors of these shapes; an entry (shape, high) is a tensor of integers below `high`."""

    run: Callable[..., Any]
    inputs: tuple[Any, ...]
    tolerance: float = 2e-6  # sums of parts are added in another order


def _index(*shape: int, high: int) -> tuple[tuple[int, ...], int]:
    return shape, high


def _positive(x: Any) -> Any:
    return ops.abs(x) + 1


ELEMENTWISE: dict[str, Case] = {
    **{
        name: Case(getattr(ops, name), ((4, 6),))
        for name in (
            "exp", "tanh", "sigmoid", "relu", "abs", "sin", "cos", "neg", "square", "erf", "sign", "floor", "expm1", "relu6", "silu", "gelu", "softplus",
            "elu", "mish", "selu", "hardswish", "leaky_relu", "atan",
        )
    },
    "gelu by tanh": Case(lambda x: ops.gelu(x, "tanh"), ((5, 3),), 1e-5),
    "log": Case(lambda x: ops.log(_positive(x)), ((5, 3),)),
    "rsqrt": Case(lambda x: ops.rsqrt(_positive(x)), ((5, 3),)),
    "sqrt": Case(lambda x: _positive(x).sqrt(), ((5, 3),)),
    "add": Case(lambda x, y: x + y, ((4, 6), (4, 6))),
    "ops.add": Case(ops.add, ((4, 6), (4, 6))),
    "add, stretched": Case(lambda x, y: x + y, ((4, 5), (5,))),
    "add, stretched both ways": Case(lambda x, y: x + y, ((3, 1), (1, 4))),
    "add with a factor": Case(lambda x, y: mint.add(x, y, alpha=2), ((4, 6), (4, 6))),
    "add a number": Case(lambda x: x + 3, ((4, 6),)),
    "a number minus": Case(lambda x: 3 - x, ((5, 6),)),
    "minus a number": Case(lambda x: x - 1.5, ((5, 6),)),
    "a tensor without dims": Case(lambda x: Tensor(2.0) * x + Tensor(1.0), ((5, 6),)),
    "sub": Case(lambda x, y: x - y, ((5, 6), (5, 1))),
    "mul": Case(lambda x, y: x * y, ((5, 6), (5, 6))),
    "mul a number": Case(lambda x: x * 2.5, ((4, 6),)),
    "div": Case(lambda x, y: x / _positive(y), ((4, 6), (6,))),
    "div by a number": Case(lambda x: x / 4, ((3, 6),)),
    "a number divided": Case(lambda x: 1 / _positive(x), ((3, 6),)),
    "pow": Case(lambda x: x**2, ((4, 6),)),
    "pow of two": Case(lambda x, y: ops.pow(_positive(x), y), ((4, 6), (6,)), 1e-5),
    "maximum": Case(ops.maximum, ((4, 6), (4, 6))),
    "minimum": Case(ops.minimum, ((4, 6), (6,))),
    "where": Case(lambda x, y: ops.where(x > 0, x, y), ((4, 6), (4, 6))),
    "masked_fill": Case(lambda x, y: x.masked_fill(y > 0, -1.0), ((4, 6), (4, 6))),
    "clamp": Case(lambda x: x.clamp(-0.5, 0.5), ((4, 6),)),
    "lerp": Case(lambda x, y: ops.lerp(x, y, 0.3), ((4, 6), (4, 6))),
    "addcmul": Case(lambda x, y, z: ops.addcmul(x, y, z, Tensor(0.5)), ((4, 6), (4, 6), (4, 6))),
    "cast": Case(lambda x: x.to(mindspore.float64).to(mindspore.float32), ((4, 6),)),
    "cast to integers": Case(lambda x: (x * 4).to(mindspore.int32), ((4, 6),)),
    "comparison": Case(lambda x, y: x > y, ((4, 6), (4, 6))),
    "logical": Case(lambda x, y: ops.logical_and(x > 0, ops.logical_not(y > 0)), ((4, 6), (4, 6))),
    "zeros_like": Case(lambda x: ops.ones_like(x) - ops.zeros_like(x), ((5, 6),)),
    "copy": Case(lambda x: x.copy(), ((4, 6),)),
    "clone": Case(lambda x: x.clone() if isinstance(x, DTensor) else x.copy(), ((5, 6),)),
    "stop_gradient": Case(lambda x: ops.stop_gradient(x) * x, ((4, 6),)),
    "dropout not training": Case(lambda x: ops.dropout(x, 0.5, False), ((4, 6),)),
}  # fmt: skip
PRODUCTS: dict[str, Case] = {
    "matmul": Case(ops.matmul, ((4, 6), (6, 8))),
    "matmul, uneven": Case(ops.matmul, ((5, 3), (3, 7))),
    "matmul, an operator": Case(lambda x, y: x @ y, ((4, 6), (6, 3))),
    "matmul of stacks": Case(ops.matmul, ((2, 4, 6), (2, 6, 3))),
    "matmul, stretched": Case(ops.matmul, ((3, 4, 6), (6, 5))),
    "matmul, stretched stack": Case(ops.matmul, ((1, 4, 6), (3, 6, 5))),
    "matrix times vector": Case(ops.matmul, ((4, 6), (6,))),
    "mm": Case(ops.mm, ((4, 6), (6, 4))),
    "bmm": Case(ops.bmm, ((4, 3, 5), (4, 5, 2))),
    "MatMul, transposed": Case(lambda x, y: ops.MatMul(transpose_a=True, transpose_b=True)(x, y), ((6, 4), (3, 6))),
    "BatchMatMul, transposed": Case(lambda x, y: ops.BatchMatMul(transpose_b=True)(x, y), ((2, 4, 6), (2, 3, 6))),
    "addmm": Case(ops.addmm, ((4, 8), (4, 6), (6, 8))),
    "baddbmm": Case(ops.baddbmm, ((2, 4, 3), (2, 4, 6), (2, 6, 3))),
    "dense": Case(ops.dense, ((2, 4, 6), (8, 6))),
    "dense with bias": Case(ops.dense, ((4, 6), (8, 6), (8,))),
    "linear with bias, uneven": Case(mint.nn.functional.linear, ((3, 5), (7, 5), (7,))),
    "bias_add": Case(ops.bias_add, ((4, 6), (6,))),
    "ger": Case(ops.ger, ((4,), (6,))),
    "outer": Case(ops.outer, ((4,), (6,))),
}
REDUCTIONS: dict[str, Case] = {
    "sum": Case(lambda x: x.sum(), ((4, 6),)),
    "sum of a dim": Case(lambda x: x.sum(1), ((4, 5),)),
    "sum of two dims": Case(lambda x: x.sum((0, 2)), ((4, 5, 2),)),
    "sum, dim kept": Case(lambda x: ops.sum(x, 0, True), ((4, 6),)),
    "sum by names": Case(lambda x: x.sum(axis=1, keepdims=True), ((4, 6),)),
    "reduce_sum": Case(lambda x: ops.ReduceSum(keep_dims=True)(x, (1,)), ((3, 6),)),
    "mean": Case(lambda x: x.mean(), ((5, 3),)),
    "mean of a dim": Case(lambda x: x.mean(-1), ((4, 5),)),
    "mean, dim kept": Case(lambda x: ops.mean(x, -1, True), ((4, 5),)),
    "prod": Case(lambda x: ops.prod(x), ((4,),)),
    "prod of a dim": Case(lambda x: ops.prod(x, 1), ((3, 4),)),
    "amax": Case(lambda x: ops.amax(x, 0), ((5, 3),)),
    "amin": Case(lambda x: ops.amin(x, (0, 1)), ((4, 4),)),
    "max": Case(lambda x: x.max(), ((4, 6),)),
    "max of a dim": Case(lambda x: ops.max(x, 1)[0], ((4, 6),)),
    "argmax": Case(lambda x: ops.argmax(x, 1), ((4, 6),)),
    "argmax, a method": Case(lambda x: x.argmax(1), ((5, 4),)),
    "mean in another dtype": Case(lambda x: x.mean(1, dtype=mindspore.float64).to(mindspore.float32), ((4, 5),)),
    "var": Case(lambda x: x.var(1), ((4, 6),), 1e-5),
    "all": Case(lambda x: (x > 0).all(), ((4, 6),)),
    "any of a dim": Case(lambda x: ops.any(x > 1, 1), ((4, 6),)),
    "std": Case(lambda x: ops.std(x, 1), ((4, 6),), 1e-5),
    "norm": Case(lambda x: ops.norm(x, dim=1), ((4, 6),)),
    "logsumexp": Case(lambda x: ops.logsumexp(x, 1), ((4, 6),)),
    "softmax": Case(lambda x: ops.softmax(x, -1), ((4, 6),)),
    "log_softmax": Case(lambda x: ops.log_softmax(x, 0), ((5, 6),)),
    "cumsum": Case(lambda x: ops.cumsum(x, 1), ((4, 6),)),
    "sort": Case(lambda x: ops.sort(x, 1)[0], ((4, 6),)),
    "topk": Case(lambda x: ops.topk(x, 2)[0], ((4, 6),)),
    "flip": Case(lambda x: ops.flip(x, (0,)), ((4, 6),)),
    "triu": Case(ops.triu, ((4, 4),)),
}
VIEWS: dict[str, Case] = {
    "view, merged": Case(lambda x: x.reshape(-1, 6), ((2, 4, 6),)),
    "view, split": Case(lambda x: x.view(2, 4, 2, 3), ((2, 4, 6),)),
    "view, both": Case(lambda x: ops.reshape(x, (4, 4, 3)), ((2, 4, 6),)),
    "view, uneven": Case(lambda x: x.reshape((15, 2)), ((5, 3, 2),)),
    "view, more dims": Case(lambda x: x.view(1, 4, 1, 6), ((4, 6),)),
    "flatten": Case(lambda x: x.flatten(start_dim=1), ((4, 2, 3),)),
    "ops.flatten": Case(ops.flatten, ((4, 2, 3),)),
    "permute": Case(lambda x: x.permute(2, 0, 1), ((2, 4, 6),)),
    "transpose": Case(lambda x: x.transpose(0, 1), ((4, 6),)),
    "ops.transpose": Case(lambda x: ops.transpose(x, (0, 2, 1)), ((2, 4, 6),)),
    "swapaxes": Case(lambda x: x.swapaxes(0, 1), ((4, 6),)),
    "T": Case(lambda x: x.T, ((4, 6),)),
    "t": Case(lambda x: x.t(), ((4, 6),)),
    "mT": Case(lambda x: x.mT, ((2, 4, 6),)),
    "unsqueeze": Case(lambda x: x.unsqueeze(1), ((4, 6),)),
    "squeeze": Case(lambda x: x.squeeze(), ((4, 1, 6),)),
    "squeeze a dim": Case(lambda x: ops.squeeze(x, 1), ((2, 1, 2),)),
    "expand": Case(lambda x: x.broadcast_to((3, 4, 6)), ((4, 6),)),
    "expand a dim": Case(lambda x: x.expand(-1, 5), ((4, 1),)),
    "tile": Case(lambda x: ops.tile(x, (2, 1)), ((4, 6),)),
    "repeat_interleave": Case(lambda x: ops.repeat_interleave(x, 2, 1), ((4, 3),)),
    "cat": Case(lambda x, y: ops.cat([x, y], 0), ((4, 6), (3, 6))),
    "cat along the last": Case(lambda x, y: mint.cat((x, y), -1), ((4, 6), (4, 2))),
    "stack": Case(lambda x, y: ops.stack([x, y], 1), ((4, 6), (4, 6))),
    "addn": Case(lambda x, y: ops.addn([x, y, x]), ((4, 6), (4, 6))),
    "split": Case(lambda x: x.split(2, 1), ((4, 6),)),
    "ops.split": Case(lambda x: ops.split(x, 2, 1), ((4, 6),)),
    "split, uneven": Case(lambda x: ops.split(x, [1, 5], 1), ((4, 6),)),
    "chunk": Case(lambda x: ops.chunk(x, 3, -1), ((4, 6),)),
    "unstack": Case(lambda x: ops.unstack(x, 1), ((4, 3),)),
    "narrow": Case(lambda x: mint.narrow(x, 1, 1, 3), ((4, 6),)),
    "strided_slice": Case(lambda x: ops.strided_slice(x, (0, 1), (4, 4), (1, 1)), ((4, 6),)),
    "a number as index": Case(lambda x: x[1], ((4, 6),)),
    "numbers from the end": Case(lambda x: x[-1, ..., -2], ((4, 3, 6),)),
    "slices": Case(lambda x: x[:, 1:4], ((4, 6),)),
    "slice with a step": Case(lambda x: x[::2, None, ...], ((4, 6),)),
    "rows by a tensor": Case(lambda x, i: x[i], ((5, 6), _index(4, high=5))),
    "columns by a tensor": Case(lambda x, i: x[:, i], ((5, 6), _index(4, high=6))),
    "gather": Case(lambda x, i: ops.gather(x, i, 1), ((5, 6), _index(3, high=6))),
    "gather_elements": Case(lambda x, i: ops.gather_elements(x, 1, i), ((4, 6), _index(4, 3, high=6))),
    "pad": Case(lambda x: ops.pad(x, (1, 2)), ((4, 6),)),
}
LAYERS: dict[str, Case] = {
    "embedding": Case(lambda i, w: ops.gather(w, i, 0), (_index(2, 6, high=8), (8, 4))),
    "embedding, uneven": Case(lambda i, w: ops.gather(w, i, 0), (_index(3, high=5), (5, 4))),
    "layer norm": Case(lambda x, w, b: ops.LayerNorm(-1, -1)(x, w, b)[0], ((2, 4, 6), (6,), (6,)), 1e-5),
    "layer norm, uneven": Case(lambda x, w, b: ops.LayerNorm(1, 1)(x, w, b)[0], ((3, 6), (6,), (6,)), 1e-5),
    "cross_entropy": Case(ops.cross_entropy, ((6, 8), _index(6, high=8)), 1e-5),
    "cross_entropy, uneven": Case(ops.cross_entropy, ((5, 7), _index(5, high=7)), 1e-5),
    "cross_entropy, some ignored": Case(lambda x, t: ops.cross_entropy(x, t, ignore_index=2), ((6, 4), _index(6, high=4)), 1e-5),
    "cross_entropy, smoothed": Case(lambda x, t: ops.cross_entropy(x, t, label_smoothing=0.1), ((6, 8), _index(6, high=8)), 1e-5),
    "cross_entropy, each": Case(lambda x, t: ops.cross_entropy(x, t, reduction="none"), ((6, 8), _index(6, high=8)), 1e-5),
    "cross_entropy, sum": Case(lambda x, t: ops.cross_entropy(x, t, reduction="sum"), ((6, 8), _index(6, high=8)), 1e-5),
    "nll_loss": Case(lambda x, t: ops.nll_loss(ops.log_softmax(x, -1), t), ((6, 8), _index(6, high=8)), 1e-5),
    "softmax cross entropy": Case(
        lambda x, t: nn.SoftmaxCrossEntropyWithLogits(sparse=True)(x, t), ((6, 8), _index(6, high=8)), 1e-5
    ),
    "mse_loss": Case(ops.mse_loss, ((5, 6), (5, 6))),
    "one_hot": Case(lambda i: ops.one_hot(i, 5), (_index(3, 3, high=5),)),
    "attention by hand": Case(
        lambda q, k, v: ops.matmul(ops.softmax(ops.matmul(q, k.swapaxes(-1, -2)) / 2, -1), v), ((2, 4, 3, 2),) * 3, 1e-5
    ),
}  # fmt: skip
FAMILIES: dict[str, dict[str, Case]] = {
    "elementwise": ELEMENTWISE,
    "products": PRODUCTS,
    "reductions": REDUCTIONS,
    "views": VIEWS,
    "layers": LAYERS,
}


def check_families(mesh_name: str, families: list[str], most_per_case: int) -> int:
    """How many combinations of layouts were compared; an error names, for each operator, the first that differs."""
    shape, axes = MESHES[mesh_name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    _pynative_executor.set_grad_flag(True)
    count, wrong = 0, []
    try:
        for family in families:
            for name, case in FAMILIES[family].items():
                try:
                    count += check_case(mesh, f"{family}: {name}", case, most_per_case)
                except Exception as error:
                    wrong.append(str(error))
    finally:
        _pynative_executor.set_grad_flag(False)
        keep_platform_groups()
    assert not wrong, f"{len(wrong)} operators are wrong:\n" + "\n".join(wrong)
    return count


def check_case(mesh: hp.DeviceMesh, name: str, case: Case, most: int) -> int:
    choice = random.Random(zlib.crc32(name.encode()))  # the same on all ranks
    numbers = np.random.default_rng(choice.randrange(2**31))
    tensors = [_made(entry, numbers) for entry in case.inputs]
    options = [sorted(set(all_layouts(mesh, t.ndim, ["sum"] if _is_float(t) else [])), key=repr) for t in tensors]
    combinations = list(itertools.product(*options))
    chosen = combinations if len(combinations) <= most else choice.sample(combinations, most)
    wanted = _reference(case, tensors, numbers)
    for layouts in chosen:
        try:
            _check(case, tensors, layouts, wanted)
        except Exception as error:
            what = str(error).partition("\n---")[0]  # without MindSpore's own stack
            raise AssertionError(f"{name} on {mesh} with {', '.join(map(str, layouts))}: {what}") from error
    return len(chosen)


def _is_float(tensor: Any) -> bool:
    return tensor.dtype in (mindspore.float32, mindspore.float64)


def _made(entry: Any, numbers: Any) -> Tensor:
    if isinstance(entry[0], tuple):
        shape, high = entry
        return Tensor(numbers.integers(0, high, shape).astype(np.int32))
    return Tensor(numbers.standard_normal(entry).astype(np.float32))


def gradients_of(total: Tensor, leaves: list[Tensor]) -> list[Any]:
    """By the tape; `total` has one element."""
    return list(
        run_backward((total,), (ops.ones_like(total),), False, False, tuple(leaves), True, accumulate_grad=False)
    )


def leaf(tensor: Tensor) -> Tensor:
    made = ops.stop_gradient(tensor)
    made.requires_grad_()
    return made


def _reference(case: Case, tensors: list[Tensor], numbers: Any) -> Any:
    inputs = [leaf(t) if _is_float(t) else t for t in tensors]
    results = _listed(case.run(*inputs))
    upstream = [
        Tensor(numbers.standard_normal(r.shape).astype(np.float32)) if r._requires_grad else None for r in results
    ]
    parts = [(r * g).sum() for r, g in zip(results, upstream, strict=True) if g is not None]
    leaves = [t for t in inputs if t._requires_grad]
    gradients = gradients_of(sum(parts[1:], parts[0]), leaves) if parts else None
    return results, upstream, gradients


def _check(case: Case, tensors: list[Tensor], layouts: Any, wanted: Any) -> None:
    inputs = []
    for tensor, layout in zip(tensors, layouts, strict=True):
        made = distribute_tensor(tensor, layout).detach()
        inputs.append(made.requires_grad_() if _is_float(tensor) else made)
    results = _listed(case.run(*inputs))
    expected, upstream, gradients = wanted
    assert len(results) == len(expected)
    total = None
    for result, right, grad in zip(results, expected, upstream, strict=True):
        assert isinstance(result, DTensor), f"{type(result).__name__}"
        assert result.shape == right.shape, f"shape {result.shape} for {right.shape}"
        _compare("result", result.full_tensor(), right, case.tolerance)
        if grad is not None:
            part = (result * distribute_tensor(grad, result.device_mesh)).sum()
            total = part if total is None else total + part
    if total is None:
        return
    leaves = [each for each in inputs if each._local._requires_grad]
    found = gradients_of(total.to_local(), [each.to_local() for each in leaves])
    for index, (each, local, right) in enumerate(zip(leaves, found, gradients, strict=True)):
        if right is None:  # some operators of MindSpore have no gradient at all
            assert local is None, f"a gradient of input {index}"
            continue
        assert local is not None, f"no gradient of input {index}"
        assert local.shape == each.local_shape, f"gradient of input {index}: {local.shape} for {each.local_shape}"
        whole = wrapped(local, Spec(gradient_layout(each.layout), each.shape)).full_tensor()
        _compare(f"gradient of input {index}", whole, right, 4 * case.tolerance)


def _compare(what: str, got: Tensor, right: Tensor, tolerance: float) -> None:
    assert got.dtype == right.dtype, f"{what}: dtype {got.dtype} for {right.dtype}"
    mine, theirs = got.asnumpy(), right.asnumpy()
    if not _is_float(right):
        assert np.array_equal(mine, theirs), f"{what}: {mine} for {theirs}"
        return
    difference = np.abs(mine - theirs).max() if mine.size else 0.0
    scale = max(np.abs(theirs).max(), 1.0) if theirs.size else 1.0
    assert difference <= tolerance * scale, f"{what} differs by {difference:.2e}"


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]
