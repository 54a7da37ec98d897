"""What sharded cells on MindSpore are after errors, after changes from outside, and while they run."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore._c_expression import run_backward
from mindspore.graph.api import _no_grad, _pynative_executor

import hyper_parallel as hp
from hyper_parallel.platform.mindspore.communication import Communication
from support.mindspore_sharding import (
    Model,
    batch_of,
    by_tape,
    fill,
    locals_of,
    mesh_of,
    mine,
    part_of,
    rank,
    shard,
    size,
    square_mean,
    value_and_grad,
)
from support.mindspore_sharding_programs import Branches, checkpointed, left_over, used_on_some_ranks
from support.process_worker import keep_platform_groups

FLOAT64 = np.float64


def pair(make: Callable[[], nn.Cell] = Model, **options: Any) -> tuple[nn.Cell, nn.Cell]:
    """A whole model and the same one sharded."""
    whole, sharded = fill(make(), dtype=FLOAT64), fill(make(), dtype=FLOAT64)
    return whole, shard(sharded, getattr(sharded, "blocks", ()), **options)


def differs(whole: nn.Cell, sharded: nn.Cell, number: int = 0) -> list[str]:
    """What is not as in one process in a step of both, in words."""
    batch = batch_of(number, 4 * size(), dtype=FLOAT64)
    _, expected = value_and_grad(lambda x: square_mean(whole(x)), whole, batch)
    _, found = by_tape(lambda x: square_mean(sharded(x)), sharded, mine(batch))
    for local in locals_of(sharded):
        local._grad = None
    wrong = left_over(sharded)
    for parameter, full, grad in zip(sharded.trainable_params(), expected, found, strict=True):
        part = part_of(full, parameter)
        if part.shape != grad.shape or np.abs(part - grad).max(initial=0.0) > 1e-12:
            wrong.append(f"the gradient of {parameter.name}")
    return wrong


def message_of(function: Callable[[], object]) -> str:
    """The words of what it raises, beginning with the class."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# -- how often, and how much -------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the collectives that are begun."""
    transport, found = Communication.transport, Counter[str]()
    launch = transport.launch

    def noting(call: str, *args: Any, **kwargs: Any) -> Any:
        found[call] += 1
        return launch(call, *args, **kwargs)

    transport.launch = noting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del transport.launch


def collectives(zero: int, reduce: str | None, num: int = 4) -> tuple[int, int, int]:
    """Gathers, reductions and others in a step of some microbatches through three units."""
    sharded = fill(Model())
    shard(sharded, sharded.blocks, zero=zero)
    x = batch_of(0, 4)
    with counted() as found:
        for number in range(num):
            with hp.accumulate(sharded, last=number == num - 1, reduce=reduce):
                value_and_grad(lambda x: square_mean(sharded(x)), sharded, x)
    gathers, reductions = found.pop("all_gather_into_tensor"), found.pop("reduce_scatter_tensor")
    return gathers, reductions, found.total()


def collectives_of_regions(inside: bool) -> tuple[int, int, int]:
    """Gathers, reductions and others in one backward of three units, with regions around two of them, or inside."""
    sharded = fill(checkpointed(inside=inside)())
    shard(sharded, sharded.blocks)
    with counted() as found:
        value_and_grad(lambda x: square_mean(sharded(x)), sharded, batch_of(0, 4))
    gathers, reductions = found.pop("all_gather_into_tensor"), found.pop("reduce_scatter_tensor")
    return gathers, reductions, found.total()


def most_whole_units(prefetch: int) -> int:
    """How many of four blocks have memory for whole parameters at once, at most, in forward and backward."""
    sharded = fill(Model(depth=4))
    shard(sharded, sharded.blocks, prefetch=prefetch)
    memories = [unit.memory for unit in _units(sharded)[1:]]
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        now = sum(any(p.whole.untyped_storage().nbytes() for p in memory.parameters) for memory in memories)
        most = max(most, now)

    for block in sharded.blocks:
        block.down.register_forward_hook(look)
        block.down.register_backward_hook(look)
    value_and_grad(lambda x: square_mean(sharded(x)), sharded, batch_of(0, 4))
    return most


def growth() -> tuple[int, int, int]:
    """How many more tensors and objects of this package there are after steps than before; and how many calls live."""
    sharded = fill(Model())
    shard(sharded, sharded.blocks)
    counts = []
    for number in range(8):
        value_and_grad(lambda x: square_mean(sharded(x)), sharded, batch_of(number, 4))
        gc.collect()
        kinds = Counter(type(each) for each in gc.get_objects())
        tensors = sum(num for kind, num in kinds.items() if issubclass(kind, Tensor))
        ours = sum(num for kind, num in kinds.items() if kind.__module__.startswith("hyper_parallel"))
        counts.append((tensors, ours))
    calls = sum(len(unit.calls) for unit in _units(sharded))
    return counts[-1][0] - counts[1][0], counts[-1][1] - counts[1][1], calls


def _units(model: nn.Cell) -> list[Any]:
    from hyper_parallel.core.parallel.sharding.fully_shard import units_in

    return units_in(model)


# -- errors ------------------------------------------------------------------------------------------------------------


class Failing(Model):
    """Raises where it is told to."""

    error: BaseException | None = None
    where = ""

    def construct(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.error is not None and number == 0 and self.where == "forward":
                raise self.error
            if self.error is not None and number == 0 and self.where == "backward":
                x.register_hook(self._raise)
        return self.last(x)

    def _raise(self, gradient: Tensor) -> None:
        assert self.error is not None
        raise self.error


def after_an_error(where: str, kind: str, zero: int, accumulates: bool) -> list[str]:
    """A step that fails in the middle, and what differs in the next one."""
    whole, sharded = pair(Failing, zero=zero)
    sharded.error, sharded.where = {"Exception": ValueError("planted"), "Ctrl-C": KeyboardInterrupt()}[kind], where
    batch = mine(batch_of(5, 4 * size(), dtype=FLOAT64))
    wrong = ["nothing was raised"]
    try:
        if accumulates:
            with hp.accumulate(sharded, last=False):
                sharded.error, error = None, sharded.error
                value_and_grad(lambda x: square_mean(sharded(x)), sharded, batch)
            sharded.error = error
            with hp.accumulate(sharded, last=True):
                value_and_grad(lambda x: square_mean(sharded(x)), sharded, batch)
        else:
            value_and_grad(lambda x: square_mean(sharded(x)), sharded, batch)
    except BaseException as error:
        wrong = [] if error is sharded.error or "planted" in str(error) else [repr(error)]
    sharded.error = None
    _pynative_executor.set_grad_flag(False)
    return wrong + differs(whole, sharded)


# -- changes from outside ----------------------------------------------------------------------------------------------


def changed_between(zero: int) -> str:
    """What is said where weights change between a forward and its backward."""
    _, sharded = pair(zero=zero)
    _pynative_executor.set_grad_flag(True)
    loss = square_mean(sharded(batch_of(0, 4, dtype=FLOAT64)))
    local = sharded.blocks[0].up.weight.to_local()
    ops.assign(local, local * 2)
    try:
        return message_of(
            lambda: run_backward((loss,), (ops.ones_like(loss),), False, False, (), True, accumulate_grad=True)
        )
    finally:
        _pynative_executor.set_grad_flag(False)


def new_weights_are_used(zero: int) -> list[str]:
    """Weights are written to in every way there is, also by a forward that keeps the unit whole."""
    whole, sharded = pair(zero=zero)
    wrong: list[str] = []
    for number, write in enumerate(("assign", "set_data", "copy_", "optimizer")):
        for model in (whole, sharded):
            for parameter in model.trainable_params():
                local = getattr(parameter, "_local", parameter)
                if not local.size:
                    continue
                new = local * 0.9
                if write == "assign":
                    ops.assign(local, new)
                elif write == "set_data":
                    local.set_data(new)
                elif write == "copy_":
                    local.copy_(new)
                else:
                    local.asnumpy()[...] *= 0.9
        wrong += [f"{write}: {each}" for each in differs(whole, sharded, number)]
    return wrong


class Writing(nn.Cell):
    """Writes to a parameter in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def construct(self, x: Tensor) -> Tensor:
        y = self.dense(x)
        ops.assign(self.dense.bias, self.dense.bias + 1.0)
        return y


def written_in_forward() -> str:
    sharded = shard(fill(Writing()), ())
    return message_of(lambda: value_and_grad(lambda x: square_mean(sharded(x)), sharded, batch_of(0, 4)))


class Normalized(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Dense(4, 4), nn.BatchNorm1d(4)

    def construct(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def statistics() -> float:
    """How far the statistics of a batch normalization are from those of one process with this rank's batch."""
    whole, sharded = fill(Normalized()), shard(fill(Normalized()), ())
    for model in (whole, sharded):
        model.set_train()
        value_and_grad(lambda x, model=model: square_mean(model(x)), model, mine(batch_of(0, 4 * size())))
    return float(np.abs(whole.norm.moving_mean.asnumpy() - sharded.norm.moving_mean.asnumpy()).max())


def frozen_and_not_any_more() -> list[str]:
    """Parameters are frozen after the model was sharded, and trained again."""
    whole, sharded = pair()
    wrong = []
    for flag in (False, True):
        for model in (whole, sharded):
            model.blocks[0].up.weight.requires_grad = flag
        wrong += differs(whole, sharded)
    return wrong


def late() -> str:
    """What is said where a unit has no part in the last microbatch."""
    sharded = fill(Model())
    shard(sharded, [sharded.first, *sharded.blocks])

    def step() -> None:
        with hp.accumulate(sharded, last=False):
            value_and_grad(lambda x: square_mean(sharded(x)), sharded, batch_of(0, 4))
        with hp.accumulate(sharded, last=True):
            value_and_grad(lambda x: square_mean(sharded.blocks[0](x)), sharded, batch_of(0, 4, 5))

    return message_of(step)


# -- refused -----------------------------------------------------------------------------------------------------------


def of_a_copy() -> list[str]:
    whole, sharded = pair()
    copied = copy.deepcopy(sharded)
    x = batch_of(0, 4, dtype=FLOAT64)
    return [message_of(lambda: copied.blocks[0](x)), message_of(lambda: copied(x)), *differs(whole, sharded)]


def compiled() -> list[str]:
    whole, sharded = pair()
    x = batch_of(0, 4, dtype=FLOAT64)

    @mindspore.jit
    def run(x: Tensor) -> Tensor:
        return sharded(x)

    in_jit = message_of(lambda: run(x))
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        in_mode = message_of(lambda: sharded(x))
        made = message_of(lambda: hp.fully_shard(Model(), mesh=mesh_of()))
    finally:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    return [in_jit, in_mode, made, *differs(whole, sharded)]


class Listed(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weights = mindspore.ParameterTuple([Parameter(ops.ones((2, 2)), name="a")])


def with_a_hook() -> nn.Cell:
    model = nn.Dense(2, 2)
    model.weight.register_hook(lambda gradient: gradient)
    return model


def refusals() -> dict[str, str]:
    _, sharded = pair()
    replaced = shard(fill(Model()), ())
    replaced.first.weight = Parameter(ops.ones((5, 4)), name="new")
    return {
        "twice": message_of(lambda: hp.fully_shard(sharded, mesh=mesh_of())),
        "fsdp2": message_of(lambda: hp.fully_shard(Model(), mesh=mesh_of(), engine="fsdp2")),
        "list": message_of(lambda: hp.fully_shard(Listed(), mesh=mesh_of())),
        "hook": message_of(lambda: hp.fully_shard(with_a_hook(), mesh=mesh_of())),
        "optimizer": message_of(lambda: nn.Adam(sharded.trainable_params())),
        "replaced": message_of(lambda: replaced(batch_of(0, 4))),
    }


class Around(nn.Cell):
    """A cell that has no parameters of its own."""

    def __init__(self, inner: nn.Cell) -> None:
        super().__init__()
        self.inner = inner

    def construct(self, x: Tensor) -> Tensor:
        return self.inner(x)


def recomputed(when: str) -> str:
    """What is said where a backward of MindSpore's own runs cells again."""
    model = Around(fill(Model()))
    if when == "around, before":
        model.inner.recompute()
    if when == "of a unit, before":
        model.inner.blocks[0].recompute()

    def step() -> None:
        shard(model.inner.blocks[0], (model.inner.blocks[1],))
        if when == "around, after":
            model.inner.recompute()
        if when == "inside, after":
            model.inner.blocks[0].up.recompute()
        value_and_grad(lambda x: square_mean(model(x)), model, batch_of(0, 4))

    return message_of(step)


# -- other ways to run -------------------------------------------------------------------------------------------------


def input_gradient() -> float:
    """How far the gradient of an input is from that of one process; nobody asks for those of parameters."""
    whole, sharded = pair()
    x = mine(batch_of(0, 4 * size(), dtype=FLOAT64))
    expected = mindspore.grad(lambda x: square_mean(whole(x)))(x)
    found = mindspore.grad(lambda x: square_mean(sharded(x)))(x)
    wrong = differs(whole, sharded)
    assert not wrong, wrong
    return float(np.abs(expected.asnumpy() - found.asnumpy()).max())


def without_gradients() -> list[str]:
    """Forwards that nothing follows, before, between and within others."""
    whole, sharded = pair()
    x = mine(batch_of(0, 4 * size(), dtype=FLOAT64))
    with _no_grad():
        same = np.array_equal(whole(x).asnumpy(), sharded(x).asnumpy())
    wrong = [] if same else ["values without gradients"]
    wrong += left_over(sharded) + differs(whole, sharded)
    _pynative_executor.set_grad_flag(True)
    loss = square_mean(sharded(x))  # nobody differentiates it
    _pynative_executor.set_grad_flag(False)
    wrong += differs(whole, sharded)
    del loss
    return wrong + differs(whole, sharded)


def kept_graph() -> list[str]:
    """Two backwards through one forward add up, as in one process."""
    whole, sharded = pair()
    x = mine(batch_of(0, 4 * size(), dtype=FLOAT64))
    by_tape(lambda x: square_mean(sharded(x)), sharded, x)
    once = [None if local._grad is None else local._grad.asnumpy().copy() for local in locals_of(sharded)]
    by_tape(lambda x: square_mean(sharded(x)), sharded, x)
    wrong = []
    for local, before in zip(locals_of(sharded), once, strict=True):
        if not np.allclose(local._grad.asnumpy(), 2 * before, rtol=1e-12, atol=1e-14):
            wrong.append(local.name)
        local._grad = None
    return wrong + differs(whole, sharded)


def hybrid() -> list[str]:
    """Copies along one axis, parts along another."""
    mesh = mesh_of((2, size() // 2), ("replicate", "dp"))
    whole, sharded = pair(mesh=mesh, replicate_axis="replicate")
    return differs(whole, sharded)


def mixed(param: str | None, reduce: str | None, output: str | None) -> tuple[float, list[str]]:
    """The largest relative difference of gradients from one process in float32, and dtypes that are wrong."""
    whole, sharded = fill(Model()), fill(Model())
    shard(sharded, sharded.blocks, precision=hp.MixedPrecision(param=param, reduce=reduce))
    sharded = Around(sharded)
    shard(sharded, (), precision=hp.MixedPrecision(param=param, reduce=reduce, output=output))
    batch = batch_of(0, 4 * size())
    _, expected = value_and_grad(lambda x: square_mean(whole(x)), whole, batch)
    seen = []

    def loss(x: Tensor) -> Tensor:
        output = sharded(x)
        seen.append(str(output.dtype).lower())
        return square_mean(output.to(mindspore.float32))

    _, found = value_and_grad(loss, sharded, mine(batch))
    wrong = [p.name for p in sharded.trainable_params() if p.dtype != mindspore.float32]
    wrong += [f"output {seen}"] if seen != [output or param or "float32"] else []
    worst = 0.0
    for parameter, full, grad in zip(sharded.trainable_params(), expected, found, strict=True):
        part = part_of(full, parameter)
        worst = max(worst, float(np.abs(part - grad).max(initial=0.0) / np.abs(full).max()))
    return worst, wrong


def order_of_sums() -> list[str]:
    """Whose gradients are not, bit for bit, those of all ranks added up in their order, over their number."""
    whole, sharded = fill(Model()), fill(Model())
    shard(sharded, sharded.blocks)
    batches = [batch_of(number, 4) for number in range(size())]
    _, found = value_and_grad(lambda x: square_mean(sharded(x)), sharded, batches[rank()])
    sums: list[Any] = [None] * len(found)
    for batch in batches:
        _, grads = value_and_grad(lambda x: square_mean(whole(x)), whole, batch)
        sums = [grad if known is None else known + grad for known, grad in zip(sums, grads, strict=True)]
    return [
        parameter.name
        for parameter, full, grad in zip(sharded.trainable_params(), sums, found, strict=True)
        if not np.array_equal(part_of(full / np.float32(size()), parameter), grad)
    ]


class TwoLayers(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(4, 6, has_bias=False), nn.Dense(6, 5, has_bias=False)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(ops.tanh(self.up(x)))


def over_two_axes() -> float:
    """How far gradients are from one process where another axis of the mesh cuts the weights as well; float32."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    tp = mesh["tp"]
    whole, sharded = fill(TwoLayers()), fill(TwoLayers())
    for cell, layout in ((sharded.up, tp.layout("tp", None)), (sharded.down, tp.layout(None, "tp"))):
        cell._params["weight"] = hp.get_platform().set_layout_into_parameter(cell.weight, layout)
    hp.fully_shard(sharded, mesh=mesh)
    batch = batch_of(0, 8)
    at = mesh.get_local_rank("dp")

    def loss(x: Tensor) -> Tensor:
        output = sharded(hp.DTensor.from_local(x, tp, tp.layout(None, None)))
        return square_mean(output.redistribute(tp, tp.layout(None, None)).to_local())

    _, expected = value_and_grad(lambda x: square_mean(whole(x)), whole, batch)
    _, found = value_and_grad(loss, sharded, Tensor(batch.asnumpy()[4 * at : 4 * at + 4]))
    worst = 0.0
    for parameter, full, grad in zip(sharded.trainable_params(), expected, found, strict=True):
        whole_grad = hp.DTensor.from_local(Tensor(grad), parameter.layout, shape=parameter.shape).full_tensor()
        worst = max(worst, float(np.abs(full - whole_grad.asnumpy()).max()))
    keep_platform_groups()
    return worst


def norms() -> tuple[float, float]:
    """The norm of all gradients, sharded and in one process; clipping makes of them what it does there."""
    whole, sharded = pair()
    batch = batch_of(0, 4 * size(), dtype=FLOAT64)
    by_tape(lambda x: square_mean(whole(x)), whole, batch)
    by_tape(lambda x: square_mean(sharded(x)), sharded, mine(batch))
    ours, theirs = hp.clip_grad_norm_(sharded, 0.5), hp.clip_grad_norm_(whole, 0.5)
    for parameter, full in zip(sharded.trainable_params(), whole.trainable_params(), strict=True):
        part = part_of(full._grad.asnumpy(), parameter)
        assert np.abs(part - parameter.to_local()._grad.asnumpy()).max(initial=0.0) <= 1e-12
    return float(ours), float(theirs)


def filled_afterwards() -> list[str]:
    """A model on the meta device is sharded, then filled: as one that was filled whole."""
    with hp.init_on_device("meta"):
        whole, sharded = Model(), Model()
    shard(sharded, sharded.blocks)
    x = batch_of(0, 4)
    said = message_of(lambda: sharded(x))
    wrong = [] if said.startswith("StateError: The parameters have no values") else [said]
    for model in (whole, sharded):
        hp.materialize(model, seed=3)
    for before, now in zip(whole.get_parameters(), sharded.get_parameters(), strict=True):
        if not np.array_equal(before.asnumpy(), now.full_tensor().asnumpy()):
            wrong.append(f"values of {before.name}")
    _, expected = value_and_grad(lambda x: square_mean(whole(x)), whole, x)
    _, found = value_and_grad(lambda x: square_mean(sharded(x)), sharded, x)
    for parameter, full, grad in zip(sharded.trainable_params(), expected, found, strict=True):
        if not np.array_equal(part_of(full, parameter), grad):
            wrong.append(f"gradient of {parameter.name}")
    return wrong


def gradients_there() -> list[str]:
    """Which parameters have gradients on the tape where ranks use different ones."""
    model = fill(Branches())
    shard(model, model.blocks)
    by_tape(lambda x: used_on_some_ranks(model, x, rank(), 0), model, batch_of(0, 4))
    return [parameter.name for parameter in model.trainable_params() if parameter.to_local()._grad is not None]


def names_and_state() -> list[str]:
    """Names, order and the state of a sharded model are those of the model."""
    whole, sharded = pair()
    names = [name for name, _ in whole.parameters_and_names()]
    wrong = [] if names == [name for name, _ in sharded.parameters_and_names()] else ["names"]
    wrong += [] if [p.name for p in whole.get_parameters()] == [p.name for p in sharded.get_parameters()] else ["name"]
    for before, now in zip(whole.get_parameters(), sharded.get_parameters(), strict=True):
        if not np.array_equal(before.asnumpy(), now.full_tensor().asnumpy()):
            wrong.append(f"values of {before.name}")
        if now.layout.mesh.axis_names != ("dp",):
            wrong.append(f"layout of {before.name}")
    return wrong
