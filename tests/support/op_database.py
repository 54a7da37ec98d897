"""The samples of PyTorch's own operator database on distributed tensors, beside the same calls on plain ones.

`database` is for any process; `run_ops` runs inside the worker processes of `support.processes`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
import types
import unittest
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

import hyper_parallel as hp
from hyper_parallel import DeviceMesh, Layout, init_device_mesh
from hyper_parallel._base.errors import HyperParallelError
from hyper_parallel.core.shard._op_dispatch import NoRuleError
from hyper_parallel.platform.torch.dtensor import DTensor
from hyper_parallel.platform.torch.dtensor.function_table import TABLE, names
from support.process_worker import keep_platform_groups

# Every tensor of a sample lies like this: split along its first dim, along its last, whole, a partial sum, or any of them by chance.
WAYS = ("first", "last", "whole", "partial", "mixed 1", "mixed 2", "mixed 3")
# float64: sums of parts in another order stay far below the tolerance, whatever an operator makes of them.
_DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
_TOLERANCE = 1e-6
# Values are the reader's luck: random, or of memory nobody has written. Shapes, dtypes and layouts are compared.
_WITHOUT_VALUES = """
rand_like randn_like randint_like bernoulli empty_like new_empty new_empty_strided empty empty_strided empty_permuted randint randn normal
normal_in_place multinomial uniform exponential cauchy geometric log_normal svd_lowrank pca_lowrank resize_ resize_as_
nn.functional.dropout nn.functional.alpha_dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.feature_alpha_dropout
nn.functional.rrelu nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d
"""


class Outcome(NamedTuple):
    call: str  # operator, form, number of the sample
    way: str
    verdict: str  # "right", "refused", "no rule", "wrong", "crash"
    text: str = ""


class Reference(NamedTuple):
    """What plain tensors give."""

    results: list[Any]
    upstream: list[torch.Tensor | None]  # gradients of the results
    gradients: list[torch.Tensor | None] | None  # of the inputs; None: no backward


class Call(NamedTuple):
    name: str
    function: Callable[..., Any]
    arguments: Any  # (input, args, kwargs)
    is_in_place: bool
    has_values: bool
    is_differentiable: bool

    def with_tensors(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """What the call answers for other tensors, and the tensor that it may change."""
        given = iter(tensors)
        first, rest, named = pytree.tree_map(
            lambda value: next(given) if isinstance(value, torch.Tensor) else value, self.arguments
        )
        if self.is_in_place:
            first = first * 1  # not the leaf
        torch.manual_seed(5)
        return self.function(first, *rest, **named), first


def stand_in_for_expecttest() -> None:
    """PyTorch's databases import it for tests that compare texts, which are not run here."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        module: Any = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase
        sys.modules["expecttest"] = module


def database() -> list[Any]:
    stand_in_for_expecttest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of importing PyTorch's internal test modules
        from torch.testing._internal.common_methods_invocations import op_db
    return list(op_db)


def can_be_distributed(info: Any) -> bool:
    """Not `torch.masked`, which asks for `layout == torch.strided` itself, nor what makes a sparse tensor."""
    return not info.name.startswith(("masked.", "sparse.")) and info.name != "to_sparse"


def has_rule(info: Any) -> bool:
    """Whether the table has the operator, as a function or as a method of its name."""
    return info.op in TABLE or (info.name.rpartition(".")[2] in names() and can_be_distributed(info))


def run_ops(
    wanted: Sequence[str], most_samples: int, ways: Sequence[str], *, is_unknown_replicated: bool
) -> list[Outcome]:
    """All calls of these operators on tensors that lie in these ways; the same on every rank.

    With `is_unknown_replicated` forward alone, as a function alone; otherwise forward and backward, as function, method, and in place.
    """
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    outcomes = []
    policy = hp.unknown_ops("replicate" if is_unknown_replicated else "error")
    try:
        with policy, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the samples do is PyTorch's business
            for info in database():
                if info.formatted_name in wanted:
                    for call in _calls(info, most_samples, has_one_form=is_unknown_replicated):
                        outcomes += _run_call(call, ways, mesh)
    finally:
        keep_platform_groups()
    return outcomes


def _calls(info: Any, most_samples: int, has_one_form: bool) -> Iterator[Call]:
    dtype = next((each for each in _DTYPES if info.supports_dtype(each, "cpu")), None)
    if dtype is None:
        return
    torch.manual_seed(zlib.crc32(info.formatted_name.encode()))
    random.seed(1)
    try:
        samples = list(info.sample_inputs("cpu", dtype))
    except Exception:  # samples that need a GPU
        return
    forms = {"": info.op} if has_one_form else {"": info.op, ".": info.method_variant, "_": info.inplace_variant}
    for number in range(0, len(samples), max(1, len(samples) // most_samples)):
        sample = samples[number]
        arguments = pytree.tree_map(_rounded, (sample.input, sample.args, sample.kwargs))
        if not _tensors(arguments) or any(each.layout is not torch.strided for each in _tensors(arguments)):
            continue  # nothing to distribute, or a sparse tensor
        for form, function in forms.items():
            is_in_place = form == "_"
            if function is None or (is_in_place and not isinstance(sample.input, torch.Tensor)):
                continue
            yield Call(
                f"{info.formatted_name}{form} {number}", function, arguments, is_in_place, _has_values(info, sample),
                info.supports_autograd and dtype.is_floating_point and not has_one_form,
            )  # fmt: skip


def _has_values(info: Any, sample: Any) -> bool:
    return info.name not in _WITHOUT_VALUES.split() and not sample.kwargs.get("dropout_p")


def _rounded(value: Any) -> Any:
    """With few bits after the point, so that summands add up exactly: a comparison of partial sums is otherwise a matter of luck."""
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float64, torch.complex128):
        return value
    if value.layout is not torch.strided:
        return value
    if value.is_complex():
        return torch.view_as_complex(_rounded(torch.view_as_real(value.resolve_conj())))
    return (value * 2.0**20).round() / 2.0**20


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(arguments) if isinstance(each, torch.Tensor)]


def _run_call(call: Call, ways: Sequence[str], mesh: DeviceMesh) -> Iterator[Outcome]:
    tensors = _tensors(call.arguments)
    try:
        reference = _reference(call, tensors)
    except Exception:
        return  # a call that plain tensors refuse, such as one in place that would enlarge its tensor
    for way in ways:
        choice = random.Random(zlib.crc32(f"{call.name} {way}".encode()))  # the same on all ranks
        places = [_place(each, way, choice) for each in tensors]
        try:
            problem = _check(call, tensors, places, reference, mesh)
        except NoRuleError as error:
            yield Outcome(call.name, way, "no rule", str(error))
        except HyperParallelError as error:
            yield Outcome(call.name, way, "refused", str(error))
        except Exception as error:
            yield Outcome(call.name, way, "crash", f"{places}: {type(error).__name__}: {error}")
        else:
            yield Outcome(call.name, way, "wrong" if problem else "right", f"{places}: {problem}" if problem else "")


def _reference(call: Call, tensors: Sequence[torch.Tensor]) -> Reference:
    leaves = [each.clone().requires_grad_(call.is_differentiable and each.is_floating_point()) for each in tensors]
    results = pytree.tree_leaves(call.with_tensors(leaves)[0])
    if not call.is_differentiable:
        return Reference(results, [None] * len(results), None)
    generator = torch.Generator().manual_seed(3)
    upstream = [
        torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.dtype)
        if isinstance(each, torch.Tensor) and each.requires_grad and each.is_floating_point()
        else None
        for each in results
    ]
    pairs = [(each, grad) for each, grad in zip(results, upstream, strict=True) if grad is not None]
    if pairs:
        torch.autograd.backward([each for each, _ in pairs], [grad for _, grad in pairs])
    return Reference(results, upstream, [leaf.grad for leaf in leaves])


def _place(tensor: torch.Tensor, way: str, choice: random.Random) -> int | str:
    """The dim that is split, "whole" or "partial"."""
    can_be_partial = tensor.is_floating_point() or tensor.is_complex()
    if way.startswith("mixed"):
        return choice.choice(["whole", *range(tensor.ndim), *(["partial"] if can_be_partial else [])])
    if way == "partial":
        return "partial" if can_be_partial else "whole"
    return "whole" if way == "whole" or not tensor.ndim else 0 if way == "first" else tensor.ndim - 1


def _distributed(tensor: torch.Tensor, place: int | str, mesh: DeviceMesh) -> DTensor:
    whole = Layout(mesh, ((),) * tensor.ndim)
    if place == "partial":
        generator = torch.Generator().manual_seed(7)
        rank, others = mesh.get_rank(), mesh.size("tp") - 1
        summands = [
            (torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 64).round().div(64).to(tensor.dtype)
            for _ in range(others)
        ]
        local = summands[rank] if rank < others else tensor - sum(summands)
        return DTensor.from_local(local, Layout(mesh, whole.axes_per_dim, (("tp", "sum"),)), shape=tensor.shape)
    split = Layout(mesh, tuple(("tp",) if dim == place else () for dim in range(tensor.ndim)))
    made = hp.distribute_tensor(tensor, split)
    return DTensor.from_local(made.to_local().clone(), split, shape=tensor.shape)


def _check(call: Call, tensors: Any, places: Any, reference: Reference, mesh: DeviceMesh) -> str | None:
    """What is wrong, or None."""
    inputs = [_distributed(each, place, mesh) for each, place in zip(tensors, places, strict=True)]
    for each in inputs:
        if reference.gradients is not None and each.is_floating_point():
            each.requires_grad_()
    result, target = call.with_tensors(inputs)
    if call.is_in_place and result is not target:
        return "another tensor than the one that was to be changed"
    results = pytree.tree_leaves(result)
    if len(results) != len(reference.results):
        return f"{len(results)} results for {len(reference.results)}"
    total = None
    for index, (each, right, grad) in enumerate(zip(results, reference.results, reference.upstream, strict=True)):
        problem = _difference(f"result {index}", each, right, call.has_values)
        if problem:
            return problem
        if grad is not None:
            part = (each * hp.distribute_tensor(grad, mesh)).sum()
            total = part if total is None else total + part
    if total is None or not call.has_values:
        return None
    total.backward()
    for index, (leaf, right) in enumerate(zip(inputs, reference.gradients or [], strict=True)):
        problem = None if right is None else _difference(f"gradient {index}", leaf.grad, right, has_values=True)
        if problem:
            return problem
    return None


def _difference(what: str, got: Any, right: Any, has_values: bool) -> str | None:
    if not isinstance(right, torch.Tensor):
        return None if got == right else f"{what}: {got} for {right}"
    if not isinstance(got, DTensor):
        return f"{what} is a {type(got).__name__}"
    if (tuple(got.shape), got.dtype) != (tuple(right.shape), right.dtype):
        return f"{what}: {got.dtype}{list(got.shape)} for {right.dtype}{list(right.shape)}"
    coordinate = got.device_mesh.get_coordinate()
    if coordinate is None or got.local_shape != got._spec.local_shape_at(coordinate):
        return f"{what}: a part of shape {got.local_shape} in {got._spec}"
    if not has_values:
        return None
    with torch.no_grad():
        full = got.full_tensor()
    tolerance = max(_TOLERANCE, 16 * torch.finfo(right.dtype).eps) if right.dtype.is_floating_point else _TOLERANCE
    with contextlib.suppress(RuntimeError):  # dtypes that cannot be compared so are compared by bits
        if torch.allclose(full, right, rtol=tolerance, atol=tolerance, equal_nan=True):
            return None
    return None if torch.equal(full, right) else f"{what}: other values in {got._spec}"
