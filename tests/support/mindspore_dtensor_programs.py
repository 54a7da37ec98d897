"""Programs with distributed tensors that run inside the worker processes of `support.processes`, on MindSpore."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore._c_expression import run_backward
from mindspore.graph.api import _pynative_executor

import hyper_parallel as hp
from hyper_parallel import Partial, Replicate, Shard, ShardPlan, init_device_mesh
from hyper_parallel.core.dtensor.gradients import gradient_layout
from hyper_parallel.platform.mindspore.dtensor import DTensor
from support.layouts import all_layouts
from support.mindspore_dtensor_cases import MESHES, gradients_of, leaf
from support.process_worker import keep_platform_groups


def mesh_named(name: str) -> hp.DeviceMesh:
    shape, axes = MESHES[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=axes)


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return Tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def whole(grad: Tensor, of: DTensor) -> np.ndarray:
    """Both drivers give this rank's part of a gradient, as a plain tensor."""
    made = DTensor.from_local(grad, gradient_layout(of.layout), shape=of.shape)
    return made.full_tensor().asnumpy()


# -- modules ------------------------------------------------------------------------------------------------------------


class MLP(nn.Cell):
    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = {"Dense": nn.Dense, "Linear": mint.nn.Linear}[kind]
        self.up = layer(6, 8)
        self.down = layer(8, 6)
        for index, parameter in enumerate(self.get_parameters()):
            parameter.set_data(tensor(*parameter.shape, seed=index + 1))

    def construct(self, x: Any) -> Any:
        return self.down(ops.gelu(self.up(x)))


PLAN = ShardPlan(
    parameters={"up.*": ("tp",), "up.weight": ("tp", None), "down.weight": (None, "tp")}, outputs={"": (None, None)}
)


def tensor_parallel_mlp(kind: str, driver: str) -> dict[str, Any]:
    """Gradients beside those of one device, and what was sent."""
    mesh = mesh_named("2")
    plain, sharded = MLP(kind), hp.shard_module(MLP(kind), mesh, PLAN)
    x = tensor(5, 6)
    mine = hp.distribute_tensor(x, mesh)
    right = list(plain.get_parameters())
    found = list(sharded.get_parameters())
    logs: dict[str, Any] = {}

    def loss(module: Any, value: Any) -> Any:
        with hp.comm_debug() as logs["forward"]:
            out = module(value)
        return (out * out).sum()

    if driver == "value_and_grad":
        _, (gx, expected) = mindspore.value_and_grad(lambda v: loss(plain, v), 0, right)(x)
        with hp.comm_debug() as everything:
            value, (gm, grads) = mindspore.value_and_grad(lambda v: loss(sharded, v), 0, found)(mine)
    else:
        _pynative_executor.set_grad_flag(True)
        given = leaf(x)
        total = loss(plain, given)
        gx, *expected = run_backward(
            (total,), (ops.ones_like(total),), False, False, (given, *right), True, accumulate_grad=False
        )
        mine.requires_grad_()
        with hp.comm_debug() as everything:
            value = loss(sharded, mine)
            run_backward(
                (value.to_local(),), (ops.ones_like(value.to_local()),), False, False, (), True, accumulate_grad=True
            )
        _pynative_executor.set_grad_flag(False)
        gm, grads = mine._local._grad, [each._grad for each in found]
        assert all(each.grad.layout is each.layout for each in found)
    assert all(isinstance(each, DTensor) and isinstance(each, Parameter) for each in found)
    differences = [
        np.abs(whole(grad, each) - one.asnumpy()).max() / max(np.abs(one.asnumpy()).max(), 1.0)
        for grad, each, one in zip((gm, *grads), (mine, *found), (gx, *expected), strict=True)
    ]
    keep_platform_groups()
    kinds = everything.counts("gradient")
    return {
        "difference": float(max(differences)), "forward": logs["forward"].counts(), "backward": kinds, "all": everything.counts(),
        "names": [each.name for each in found], "local": [each.local_shape for each in found], "value": isinstance(value, DTensor),
    }  # fmt: skip


class Speaker(nn.Cell):
    """Of MindSpore's own cells: an embedding, a norm, a layer of attention without heads, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.norm = nn.LayerNorm((6,))
        self.mix = nn.Dense(6, 6, has_bias=False)
        self.out = nn.Dense(6, 10)
        self.loss = nn.CrossEntropyLoss()
        self.register_buffer("scale", Tensor(np.full(6, 0.5, np.float32)))
        for index, parameter in enumerate(self.get_parameters()):
            parameter.set_data(tensor(*parameter.shape, seed=index + 1))

    def construct(self, ids: Any, targets: Any) -> Any:
        x = self.norm(self.table(ids)) * self.scale
        weights = ops.softmax(ops.matmul(self.mix(x), x.swapaxes(-1, -2)), -1)
        x = x + ops.matmul(weights, x)
        return self.loss(self.out(x).reshape(-1, 10), targets.reshape(-1))


PLANS: dict[str, ShardPlan] = {
    "by words": ShardPlan(parameters={"table.embedding_table": ("tp", None), "out.weight": ("tp", None), "out.bias": ("tp",)}),
    "by width": ShardPlan(parameters={"table.embedding_table": (None, "tp"), "mix.weight": (None, "tp"), "out.weight": (None, "tp")}),
    "by rows": ShardPlan(inputs={"": [("tp", None), ("tp", None)]}),
}  # fmt: skip


def cells(plan: str) -> dict[str, float]:
    """Differences of the loss and of the gradients beside one device."""
    mesh = mesh_named("2")
    plain, sharded = Speaker(), hp.shard_module(Speaker(), mesh, PLANS[plan])
    numbers = np.random.default_rng(5)
    ids, targets = (Tensor(numbers.integers(0, 10, (3, 4)).astype(np.int32)) for _ in range(2))
    right, found = list(plain.get_parameters()), list(sharded.get_parameters())
    one, expected = mindspore.value_and_grad(plain, None, right)(ids, targets)
    mine, grads = mindspore.value_and_grad(sharded, None, found)(
        *(hp.distribute_tensor(each, mesh) for each in (ids, targets))
    )
    keep_platform_groups()
    differences = {
        each.name: float(np.abs(whole(grad, each) - exact.asnumpy()).max())
        for each, grad, exact in zip(found, grads, expected, strict=True)
    }
    return {"loss": abs(mine.item() - one.item()), **differences}


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: nn.SGD(p, 0.05, momentum=0.9),
    "Adam": lambda p: nn.Adam(p, 0.01),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.01),
    "experimental AdamW": lambda p: mindspore.experimental.optim.AdamW(p, 0.01),
    "by hand": None,
}


def _assigned(parameters: list[Any], grads: list[Any]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        change = grad * 0.1
        if isinstance(parameter, DTensor):
            change = DTensor.from_local(change, gradient_layout(parameter.layout), shape=parameter.shape)
        ops.assign_sub(parameter, change)


def trained(optimizer: str, clip: float | None) -> float:
    """The largest difference of parameters after some steps on a mesh of 2x2, sharded both ways, beside one device."""
    mesh = mesh_named("2x2")
    plan = ShardPlan(
        parameters={"up.weight": ("tp", "dp"), "up.bias": ("tp",), "down.weight": (("dp", "tp"), None)},
        inputs={"": ("dp", None)},
    )
    plain, sharded = MLP("Dense"), hp.shard_module(MLP("Dense"), mesh, plan)
    platform = hp.get_mindspore_platform()
    make = OPTIMIZERS[optimizer]
    if make is not None:
        steps = [make(list(plain.trainable_params())), make([each.to_local() for each in sharded.trainable_params()])]
    for number in range(3):
        x = tensor(6, 6, seed=number)
        norms = []
        for index, module in enumerate((plain, sharded)):
            parameters = list(module.trainable_params())
            grads = mindspore.value_and_grad(lambda v, m=module: (m(v) * m(v)).mean(), None, parameters)(x)[1]
            if clip is not None:
                for parameter, grad in zip(parameters, grads, strict=True):
                    parameter._grad = grad
                norms.append(float(platform.clip_grad_norm_(module, 0.05, clip).asnumpy()))
                grads = tuple(parameter._grad for parameter in parameters)
            if make is None:
                _assigned(parameters, grads)
            else:
                steps[index](grads)
        if clip is not None:
            assert abs(norms[0] - norms[1]) < 2e-6 * norms[0], norms
    keep_platform_groups()
    return max(
        float(np.abs(mine.full_tensor().asnumpy() - right.asnumpy()).max())
        for mine, right in zip(sharded.get_parameters(), plain.get_parameters(), strict=True)
    )


def parameters() -> dict[str, bool]:
    """A parameter with a layout: its part, copies, data that are put in."""
    mesh = mesh_named("2x2")
    platform = hp.get_mindspore_platform()
    values = tensor(5, 4)
    layout = mesh.layout("dp", "tp")
    made = platform.set_layout_into_parameter(Parameter(values, name="weight"), layout)
    copied = copy.deepcopy(made)
    pickled = pickle.loads(pickle.dumps(made))  # noqa: S301 - of our own process
    frozen = platform.set_layout_into_parameter(Parameter(values, name="w", requires_grad=False), layout)
    other = hp.distribute_tensor(values * 2, mesh, [Shard(1), Replicate()])
    result = {
        "kinds": all(isinstance(each, Parameter) and isinstance(each, DTensor) for each in (made, copied, pickled)),
        "names": [each.name for each in (made, copied, pickled)] == ["weight"] * 3,
        "layouts": all(each.layout is layout for each in (made, copied, pickled)),
        "learns": made.requires_grad and copied.requires_grad and not frozen.requires_grad,
        "local shape": platform.get_param_local_shape(made) == made.local_shape,
        "local data": platform.get_param_local_data(made) is made.to_local(),
        "whole": all(
            np.array_equal(each.full_tensor().asnumpy(), values.asnumpy()) for each in (made, copied, pickled)
        ),
    }
    platform.load_into_param(made, other)
    result["loaded"] = np.array_equal(made.full_tensor().asnumpy(), values.asnumpy() * 2)
    result["copies are their own"] = np.array_equal(copied.full_tensor().asnumpy(), values.asnumpy())
    platform.update_param_data(made, hp.distribute_tensor(values * 3, layout))
    result["bound"] = np.array_equal(made.full_tensor().asnumpy(), values.asnumpy() * 3)
    (grad,) = mindspore.value_and_grad(lambda: (made * made).sum(), None, [made])()[1]
    result["learns after that"] = np.allclose(whole(grad, made), values.asnumpy() * 6)
    keep_platform_groups()
    return result


def on_shards() -> dict[str, bool]:
    """`custom_shard`: a local function, whose replicated argument gets the sum of the gradients of all ranks."""
    mesh = mesh_named("2x2")
    values, factor = tensor(4, 6), tensor(6, seed=1)
    run = hp.custom_shard(lambda x, f: x * f, mesh, [("dp", None), (None,)], ["dp", None])
    x, f = hp.distribute_tensor(values, mesh), hp.distribute_tensor(factor, mesh)
    out = run(x, f)
    grads = mindspore.value_and_grad(lambda a, b: run(a, b).sum(), (0, 1))(x, f)[1]
    keep_platform_groups()
    return {
        "layout": out.layout is mesh.layout("dp", None),
        "value": np.allclose(out.full_tensor().asnumpy(), values.asnumpy() * factor.asnumpy()),
        "gradients": np.allclose(whole(grads[0], x), np.broadcast_to(factor.asnumpy(), (4, 6)))
        and np.allclose(whole(grads[1], f), values.asnumpy().sum(0), atol=1e-5),
    }


# -- redistribution -----------------------------------------------------------------------------------------------------


def random_redistributions(mesh_name: str, shape: tuple[int, ...], seed: int, count: int) -> int:
    """Random pairs of layouts: the values, and the gradient of a sum with random weights."""
    mesh = mesh_named(mesh_name)
    choice = random.Random(seed)
    layouts = sorted(set(all_layouts(mesh, len(shape), ["sum", "avg"])), key=repr)
    _pynative_executor.set_grad_flag(True)
    for index in range(count):
        source, target = choice.choice(layouts), choice.choice(layouts)
        x, weights = tensor(*shape, seed=index), tensor(*shape, seed=index + 1)
        start = hp.distribute_tensor(x, source).detach().requires_grad_()
        moved = start.redistribute(target)
        assert moved.layout is target
        where = f"{source} -> {target}"
        assert np.allclose(moved.full_tensor().asnumpy(), x.asnumpy(), rtol=0, atol=1e-6), where
        total = (moved * hp.distribute_tensor(weights, mesh)).sum().reduce_partial()
        (grad,) = gradients_of(total.to_local(), [start.to_local()])
        divisor = np.prod([mesh.size(axis) for axis, op in source.partial if op == "avg"])
        assert np.allclose(whole(grad, start), weights.asnumpy() / divisor, rtol=0, atol=1e-6), where
    _pynative_executor.set_grad_flag(False)
    keep_platform_groups()
    return count


def gradients_of_extremes() -> dict[str, bool]:
    """Of `max`, `min` and `prod` over split dims, and of what is partial by them, as on one device."""
    mesh = mesh_named("2x2")
    values = tensor(4, 6)
    found = {}
    for name, run in {
        "max": lambda x: (ops.amax(x, 0) * 2).sum(),
        "min": lambda x: (ops.amin(x, (0, 1)) * 2).sum(),
        "prod": lambda x: (ops.prod(x, 1) * 2).sum(),
    }.items():
        right = mindspore.grad(run)(values).asnumpy()
        x = hp.distribute_tensor(values, mesh, [Shard(0), Shard(1)])
        found[name] = np.allclose(whole(mindspore.grad(run)(x), x), right, rtol=1e-5, atol=1e-5)
    keep_platform_groups()
    return found


# -- the tensor itself --------------------------------------------------------------------------------------------------


def one_stream_of_random_numbers() -> list[bool]:
    """Factories on meshes draw what one device draws, and leave the seeds where it leaves them."""
    found = []
    mesh = mesh_named("2x2")
    for layout in (mesh.layout(("dp", "tp"), None), mesh.layout("tp", "dp")):
        for ours, theirs in ((hp.rand, ops.rand), (hp.randn, ops.randn)):
            mindspore.set_seed(5)
            mine, after = ours((6, 3), layout), ops.rand(3)
            mindspore.set_seed(5)
            found.append(np.array_equal(mine.full_tensor().asnumpy(), theirs(6, 3).asnumpy()))
            found.append(np.array_equal(after.asnumpy(), ops.rand(3).asnumpy()))
    for made, value in ((hp.ones, 1), (hp.zeros, 0)):
        found.append(
            np.array_equal(made((5, 3), mesh, [Shard(0), Partial()]).full_tensor().asnumpy(), np.full((5, 3), value))
        )
    found.append(hp.full((5, 3), 2.5, mesh.layout("tp", None)).sum().item() == 2.5 * 15)
    found.append(hp.empty((5, 3), mesh.layout("tp", None), dtype=mindspore.float16).shape == (5, 3))
    keep_platform_groups()
    return found


def dropout_by_part() -> dict[str, Any]:
    """Replicas draw the same numbers, parts draw others, and the gradient has the mask of the value."""
    mesh = mesh_named("2x2")
    mindspore.set_seed(3)
    x = hp.distribute_tensor(ops.ones((8, 64)), mesh.layout("dp", None))
    kept: list[Any] = []

    def run(value: Any) -> Any:
        kept.append(ops.dropout(value, 0.5))
        return kept[-1].sum()

    grad = mindspore.grad(run)(x)
    after = ops.rand(2).asnumpy().tolist()
    second = ops.dropout(x, 0.5).to_local().asnumpy()
    mine = kept[0].to_local().asnumpy()
    everyone: list[Any] = [None] * 4
    platform = hp.get_mindspore_platform()
    platform.all_gather_object(everyone, (mine, after), platform.create_group([0, 1, 2, 3]))
    keep_platform_groups()
    parts, states = [each[0] for each in everyone], [each[1] for each in everyone]
    return {
        "replicas agree": np.array_equal(parts[0], parts[1]) and np.array_equal(parts[2], parts[3]),
        "parts differ": not np.array_equal(parts[0], parts[2]),
        "next ones differ": not np.array_equal(second, mine),
        "generators agree": all(state == states[0] for state in states),
        "share": float(np.count_nonzero(np.stack(parts[::2])) / (8 * 64)),
        "gradient": np.array_equal(grad.asnumpy(), mine),
    }


def what_it_looks_like() -> dict[str, bool]:
    """Everything means the global tensor."""
    mesh = mesh_named("2x2")
    values = np.arange(20, dtype=np.float32).reshape(5, 4)
    x = hp.distribute_tensor(Tensor(values), mesh, [Shard(0), Shard(1)])
    total = x.sum()
    result = {
        "shape": x.shape == (5, 4) and x.ndim == x.dim() == 2 and len(x) == 5,
        "sizes": x.size == x.numel() == 20 and x.nbytes == 80,
        "stride": x.stride() == (4, 1) and x.stride(0) == 4 and x.strides == (16, 4),
        "dtype and device": x.dtype == mindspore.float32 and x.device == "CPU" and not x.is_meta,
        "layout": x.layout is mesh.layout("dp", "tp") and x.placements == (Shard(0), Shard(1)) and x.device_mesh is mesh,
        "local": x.local_shape == x.to_local().shape,
        "numbers": total.item() == float(total) == int(total) == 190 and bool(total),
        "list": x.tolist() == values.tolist(),
        "repr": "DTensor(Float32[5, 4], Layout(dp, tp)" in repr(x) and repr(x) == str(x),
        "rows": [row.tolist() for row in x] == values.tolist(),
        "contains": 7.0 in x and 99.0 not in x,
        "partial": hp.distribute_tensor(Tensor(values), mesh, [Partial(), Partial("max")]).reduce_partial().tolist() == values.tolist(),
        "plain on the left": (Tensor(2.0) * x).tolist() == (values * 2).tolist() and (Tensor(1.0) - x).tolist() == (1 - values).tolist(),
        "copy": copy.deepcopy(x).tolist() == values.tolist() and copy.deepcopy(x).layout is x.layout,
        "from_local": DTensor.from_local(x.to_local(), mesh, [Shard(0), Shard(1)], shape=(5, 4), run_check=True).tolist() == values.tolist(),
    }  # fmt: skip
    keep_platform_groups()
    return result


def errors() -> dict[str, str]:
    """What each mistake says, on this rank; nobody waits for anybody."""
    mesh, other = mesh_named("2x2"), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = hp.distribute_tensor(tensor(4, 6), mesh, [Shard(0), Replicate()])
    said: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            said[name] = f"{','.join(kind.__name__ for kind in type(error).__mro__)}: {error}"
        else:
            said[name] = "nothing"

    rank = mesh.get_rank()
    rows = 2 - mesh.get_local_rank("dp")
    note("no rule", lambda: ops.diag(x))
    note("two meshes", lambda: x + hp.distribute_tensor(tensor(4, 6), other, [Shard(0)]))
    note("plain", lambda: x + tensor(4, 6))
    note("plain on the left", lambda: tensor(4, 6) * x)
    note("plain in a list", lambda: mint.cat([x, tensor(4, 6)], 0))
    note("plain parameter", lambda: nn.Dense(6, 3)(x))
    note("shapes", lambda: ops.matmul(x, x))
    note("stretched", lambda: x + hp.distribute_tensor(tensor(5), mesh))
    note("dims", lambda: x.redistribute(mesh.layout("dp")))
    note("other mesh", lambda: x.redistribute(other.layout("tp", None)))
    note("numpy", lambda: x.asnumpy())
    note("item", lambda: x.item())
    note("write", lambda: x.__setitem__(0, 1.0))
    note("mask", lambda: x[x > 0])
    note("in place", lambda: x.add_(x))
    note("plain in an older list", lambda: ops.stack([x, tensor(4, 6)]))
    note("uneven", lambda: DTensor.from_local(mint.zeros((rows, 6)), mesh, [Shard(0), Replicate()], run_check=True))
    note(
        "one rank is wrong",
        lambda: DTensor.from_local(
            mint.zeros((2 if rank == 3 else 1, 6)), mesh, [Shard(0), Replicate()], shape=(2, 6), run_check=True
        ),
    )
    with hp.explicit_communication():
        note("implicit", lambda: ops.softmax(x, 0))
    note("class", lambda: DTensor(mint.zeros((2,))))
    note("a layout already", lambda: hp.get_mindspore_platform().set_layout_into_parameter(x, mesh.layout(None, None)))
    weight = hp.get_mindspore_platform().set_layout_into_parameter(
        Parameter(tensor(4, 6), name="w"), mesh.layout("dp", None)
    )
    note("optimizer", lambda: nn.Adam([weight]))
    note("plain data", lambda: hp.get_mindspore_platform().load_into_param(x, tensor(4, 6)))
    keep_platform_groups()
    return said


def unknown_ops_on_whole_tensors() -> dict[str, bool]:
    mesh = mesh_named("2x2")
    values = tensor(4, 4)
    x = hp.distribute_tensor(values, mesh, [Shard(0), Shard(1)])

    def run(value: Any) -> Any:
        return (ops.trace(value) * 3).sum()

    with hp.unknown_ops("replicate"):
        y = ops.trace(x)
        grad = mindspore.grad(run)(x)
    keep_platform_groups()
    return {
        "value": np.allclose(y.full_tensor().asnumpy(), np.trace(values.asnumpy())),
        "layout": y.layout.is_replicated,
        "gradient": np.allclose(whole(grad, x), np.eye(4) * 3),
    }


def hooks_of_gradients() -> dict[str, bool]:
    """A hook gets the gradient as a DTensor; what one tensor gets from several uses is reduced once."""
    mesh = mesh_named("2x2")
    values, weight = tensor(4, 6), tensor(6, 6, seed=1)
    seen: list[Any] = []

    def run(x: Any, w: Any, is_watched: bool) -> Any:
        hidden = ops.matmul(x, w)
        if is_watched:
            hidden.register_hook(seen.append)
        return (hidden * hidden).sum() + ops.exp(hidden * 0.1).sum()

    right = mindspore.grad(lambda a, b: run(a, b, False), (0, 1))(values, weight)
    x = hp.distribute_tensor(values, mesh, [Shard(0), Replicate()])
    w = hp.distribute_tensor(weight, mesh, [Replicate(), Replicate()])
    with hp.comm_debug() as log:
        found = mindspore.grad(lambda a, b: run(a, b, True), (0, 1))(x, w)
    keep_platform_groups()
    return {
        "gradients": all(
            np.allclose(whole(mine, each), one.asnumpy(), rtol=1e-5, atol=1e-4)
            for mine, each, one in zip(found, (x, w), right, strict=True)
        ),
        "hook": len(seen) == 1 and isinstance(seen[0], DTensor) and seen[0].shape == (4, 6),
        "reduced once": log.counts() == {"all_reduce": 1},
    }


def views_of_nothing() -> list[float]:
    """A tensor of fewer rows than ranks, reshaped before it meets a split weight: who has no row takes part in every reduction all the same."""
    mesh = mesh_named("2x2")
    found = []
    _pynative_executor.set_grad_flag(True)
    for rows in (1, 2):

        def run(x: Any, w: Any, rows: int = rows) -> Any:
            y = ops.dense(x.reshape(rows, 1, 6), w)
            return (y * y).sum()

        values, weight = leaf(tensor(rows, 6)), leaf(tensor(8, 6, seed=1))
        right = gradients_of(run(values, weight), [values, weight])
        source, w = (
            hp.distribute_tensor(each, mesh.layout("tp", None)).detach().requires_grad_() for each in (values, weight)
        )
        total = run((source * 1).redistribute(mesh.layout("dp", None)), w)
        grads = gradients_of(total.to_local(), [source.to_local(), w.to_local()])
        found += [
            float(np.abs(whole(grad, each) - one.asnumpy()).max())
            for grad, each, one in zip(grads, (source, w), right, strict=True)
        ]
    _pynative_executor.set_grad_flag(False)
    keep_platform_groups()
    return found


# Methods that answer a plain tensor, and may: what can be pickled, and shapes that say nothing about values.
_MAY_BE_PLAIN = {"__reduce_ex__", "to_local", "full_tensor", "_local_tensor"}


def methods_that_answer_plain_tensors() -> list[str]:
    """Every public method of a tensor is called, with a few kinds of arguments: what MindSpore does past the hook is a plain tensor."""
    # A mesh of this rank alone: some hundred calls, and nobody to wait for.
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",), rank_list=[hp.get_mindspore_platform().get_rank()])
    found = []
    for name in sorted(dir(DTensor)):
        is_private = name.startswith("_") and not name.startswith("__")
        if is_private or name in _MAY_BE_PLAIN | {"__class__", "__init_subclass__", "__new__", "__init__"}:
            continue
        x = hp.distribute_tensor(tensor(4, 4), mesh, [Shard(0)])
        for arguments in ((), (1,), (x,), ((0, 1),)):
            try:
                value = getattr(x, name)
                value = value(*arguments) if callable(value) else value
            except Exception:  # noqa: S112 - most do not take these arguments, or have no rule
                continue
            if _has_plain(value):
                found.append(name)
                break
    keep_platform_groups()
    return found


def _has_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_plain, value))
    # `tensor_split` makes its empty pieces by itself, of the whole shape.
    return isinstance(value, (Tensor, np.ndarray)) and not isinstance(value, DTensor) and value.size > 0
