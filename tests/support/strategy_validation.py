"""What our rules decide, given to PyTorch's own validation of strategies, which simulates the ranks of one mesh axis in one process.

For an operator of PyTorch's database, a sample of its arguments and a choice of placements of its tensors, the rule is asked how the
arguments must lie and what comes out. The validator then makes parts that lie so, runs the local operation on them, puts the results together as
the rule says, and compares.

Runs inside a worker process of `support.processes` that has no framework: it makes a world of its own.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import warnings
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from hyper_parallel import DeviceMesh, Layout, init_device_mesh
from hyper_parallel._base.errors import HyperParallelError
from hyper_parallel.core.shard._op_dispatch import ArgumentSlot
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.torch.dtensor.backend import TorchDispatchBackend
from hyper_parallel.platform.torch.dtensor.function_table import TABLE
from support.op_database import database, stand_in_for_expecttest

RANKS = 2
# Local operations that know their rank, communicate, or draw random numbers: `support.op_database` runs them on real ranks.
LEFT_OUT = {"rows_of_a_part", "cross_entropy", "random", "like"}
ROUNDING = {"bfloat16", "half"}  # a partial sum that is cast loses bits that the sum does not: right within them alone


class Report(NamedTuple):
    num_operators: int
    counts: dict[str, int]  # of (operator, sample, combination of placements)
    wrong: list[str]


@contextlib.contextmanager
def simulated_mesh() -> Iterator[Any]:
    """A mesh of PyTorch whose ranks are simulated."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh as init_native_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        with LocalTensorMode(frozenset(range(RANKS))):
            mesh = init_native_mesh("cpu", (RANKS,))
        yield mesh
    finally:
        dist.destroy_process_group()


def function_of(info: Any) -> Any:
    """The operator as the table knows it."""
    return next((each for each in (info.op, info.method_variant) if each in TABLE), None)


def layouts_of(mesh: DeviceMesh, tensor: Any) -> list[Layout]:
    whole = Layout(mesh, ((),) * tensor.ndim)
    split = [
        Layout(mesh, tuple(("tp",) if each == dim else () for each in range(tensor.ndim))) for dim in range(tensor.ndim)
    ]
    partial = [Layout(mesh, ((),) * tensor.ndim, (("tp", "sum"),))] if tensor.is_floating_point() else []
    return [whole, *split, *partial]


def decided(function: Any, tree: Any, layouts: tuple[Layout, ...]) -> Any:
    """What the rule answers, with the layouts that it wants in the order of the tensors."""
    index = itertools.count()

    def slotted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        at = next(index)
        return ArgumentSlot(at, Spec(layouts[at], tuple(value.shape)))

    first, rest, named = pytree.tree_map(slotted, tree)
    prepared = TorchDispatchBackend().prepare(function, (first, *rest), named)
    assert prepared is not None
    wanted = dict(zip(prepared.order, prepared.answer.inputs, strict=True))
    return prepared, tuple(wanted[at] for at in range(len(layouts)))


def native(layout: Layout) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    dim, op = layout.dim_of("tp"), layout.partial_op("tp")
    return Shard(dim) if dim is not None else Replicate() if op is None else Partial(op)


def is_valid(local: Any, sample: Any, truth: Any, places: Any, native_mesh: Any, shift: int) -> tuple[bool | None, str]:
    """What PyTorch's validator says; None: it cannot tell."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.tensor._ops import strategy_validation as validation

    right = list(truth) if isinstance(truth, (list, tuple)) else truth
    tensors = validation.extract_tensors_from_sample(sample)
    with LocalTensorMode(frozenset(range(RANKS))):
        return validation.validate_combination(local, sample, tensors, places, right, RANKS, native_mesh, shift)


def check_sample(function: Any, sample: Any, most: int, mesh: DeviceMesh, native_mesh: Any, counts: Any) -> list[str]:
    from torch.distributed.tensor._ops import strategy_validation as validation

    tree = (sample.input, sample.args, sample.kwargs)
    tensors = validation.extract_tensors_from_sample(sample)
    if not tensors or any(0 in tensor.shape for _, tensor in tensors):
        counts["no tensor, or one of nothing"] += 1
        return []
    truth = function(sample.input, *sample.args, **sample.kwargs)
    if not all(isinstance(each, torch.Tensor) for each in pytree.tree_leaves(truth)):
        counts["no tensor comes out"] += 1
        return []
    combinations = list(itertools.product(*(layouts_of(mesh, tensor) for _, tensor in tensors)))
    if len(combinations) > most:
        combinations = random.Random(len(combinations)).sample(combinations, most)
    wrong = []
    for layouts in combinations:
        try:
            prepared, wanted = decided(function, tree, layouts)
        except HyperParallelError:
            counts["refused"] += 1
            continue
        answer = prepared.answer
        if answer.how in LEFT_OUT:
            counts["left out"] += 1
            continue
        local = prepared.local or (lambda func, args, kwargs: func(*args, **kwargs))
        places = tuple(map(native, wanted)), tuple(native(spec.layout) for spec in answer.outputs)
        pairs = [(sample, truth)]
        if validation.has_pmin_pmax(*places):  # values of one sign may hide what max and min do
            negated = validation.create_fully_negated_sample(sample)
            pairs.append((negated, function(negated.input, *negated.args, **negated.kwargs)))
        for (each, right), shift in itertools.product(pairs, (0, 1)):
            is_right, text = is_valid(
                lambda first, *rest, _local=local, **named: _local(function, (first, *rest), named),
                each, right, places, native_mesh, shift,
            )  # fmt: skip
            if not is_right:
                break
        counts["uneven" if is_right is None else "right" if is_right else "wrong"] += 1
        if is_right is False:
            wrong.append(f"{places}: {text}")
    return wrong


def check_rules(most_samples: int, most_combinations: int) -> Report:
    """Every operator that both the database and the table know."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    operators = set()
    with simulated_mesh() as native_mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the samples do is PyTorch's business
        for info in database():
            function = function_of(info)
            # float64 where there is one: the validator's tolerance is below what float32 loses in partial sums.
            dtype = next((each for each in (torch.float64, torch.float32) if info.supports_dtype(each, "cpu")), None)
            if function is None or dtype is None or info.name in ROUNDING:
                continue
            torch.manual_seed(zlib.crc32(info.formatted_name.encode()))
            samples = list(info.sample_inputs("cpu", dtype))
            before = counts["right"]
            for sample in random.Random(1).sample(samples, min(len(samples), most_samples)):
                found = check_sample(function, sample, most_combinations, mesh, native_mesh, counts)
                wrong += [f"{info.formatted_name}: {each}" for each in found]
            if counts["right"] > before:
                operators.add(info.name)
    return Report(len(operators), dict(counts), wrong)


def judged() -> dict[str, bool | None]:
    """What the validator says of some rules for `exp`, by their text."""
    stand_in_for_expecttest()
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.testing._internal.opinfo.core import SampleInput

    sample = SampleInput(torch.randn(4, 6))
    truth = torch.exp(sample.input)
    rules = {
        "P -> P": (Partial("sum"), Partial("sum")),
        "S(0) -> R": (Shard(0), Replicate()),
        "S(0) -> S(1)": (Shard(0), Shard(1)),
        "S(0) -> S(0)": (Shard(0), Shard(0)),
    }
    with simulated_mesh() as native_mesh:
        return {
            name: is_valid(torch.exp, sample, truth, ((source,), (target,)), native_mesh, 0)[0]
            for name, (source, target) in rules.items()
        }
