"""Regions and wrappers on MindSpore: names, both ways of differentiating, a transformer, what its CPU does differently."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore")

from mindspore import Parameter, Tensor, nn, ops  # noqa: E402

from hyper_parallel.core.activation_checkpoint import policies  # noqa: E402
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy  # noqa: E402
from hyper_parallel.core.swap.by_hand.manager import SwapManager  # noqa: E402
from hyper_parallel.core.swap.by_hand.tensor import SwapTensor  # noqa: E402
from hyper_parallel.core.swap.config import configure_swap  # noqa: E402
from hyper_parallel.platform import selection  # noqa: E402
from hyper_parallel.platform.mindspore.activation_checkpoint import (  # noqa: E402
    ActivationWrapper,
    AsyncSaveOnCpu,
    CheckpointImpl,
    FuncCell,
    base_check_fn,
    checkpoint,
    checkpoint_wrapper,
    swap_wrapper,
)
from hyper_parallel.platform.mindspore.regions import random_ops  # noqa: E402
from support.backends import MindSporeBackend  # noqa: E402
from support.mindspore_training import (  # noqa: E402
    DRIVERS,
    Block,
    Transformer,
    batch,
    differentiate,
    loss_of,
    new_transformer,
    num_live_tensors,
    same,
    seed,
    train,
)
from support.swapping_state import check_nothing_left, offloaded_bytes  # noqa: E402

SAVE, SWAP, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE


@pytest.fixture(autouse=True)
def on_disk(tmp_path: Path) -> Iterator[None]:
    with (
        MindSporeBackend().active(),
        configure_swap(disk_dir=tmp_path, min_bytes=1, window_bytes="64KiB", prefetch_bytes="256KiB"),
    ):
        yield
        gc.collect()
        check_nothing_left()
    selection._forget()


def mixed(ctx: Any, op: str, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return {"MatMul": SAVE, "MatMulExt": SWAP, "Softmax": SWAP, "LayerNorm": SAVE}.get(op, RECOMPUTE)


WAYS: dict[str, Callable[[Any], Any]] = {
    "save": lambda cell: checkpoint_wrapper(cell, policy_fn=lambda ctx, op, *args, **kwargs: SAVE),
    "recompute": checkpoint_wrapper,
    "swap": swap_wrapper,
    "mix": lambda cell: checkpoint_wrapper(cell, policy_fn=mixed, swap_inputs=True),
}


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
def test_twenty_steps_of_a_transformer_are_those_of_the_plain_model(driver: str) -> None:
    expected = train(new_transformer(), 20)
    assert expected[0][0] > expected[-1][0]
    for name, wrap in WAYS.items():
        before = offloaded_bytes()
        assert same(train(new_transformer(wrap), 20, driver), expected), name
        assert (offloaded_bytes() > before) is (name in ("swap", "mix"))


@pytest.mark.parametrize("way", ["recompute", "mix"])
def test_a_draw_of_dropout_that_no_seed_brings_back_is_kept_as_bits(monkeypatch: Any, way: str) -> None:
    expected = train(new_transformer(), 3)
    monkeypatch.setattr(random_ops, "draws_the_same_again", lambda primitive: False)
    from hyper_parallel.platform.mindspore.regions import recording

    monkeypatch.setattr(recording, "draws_the_same_again", lambda primitive: False)
    assert same(train(new_transformer(WAYS[way]), 3), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_dropout_cell_that_is_used_again_drops_in_backward_what_it_dropped_in_forward(p: float, dtype: str) -> None:
    cell = nn.Dropout(p=p)
    cell.set_train()
    x = Tensor(np.random.RandomState(0).randn(32, 32).astype(dtype) + 3)
    for driver in DRIVERS:
        for _ in range(6):
            made = []

            def function(y: Any, made: list[Any] = made) -> Any:
                made.append(cell(y * 1))
                return made[-1] * made[-1]

            _, (gradient,) = differentiate(lambda y, f=function: checkpoint(f, y).sum(), (x,), [], driver)
            first = made[0].asnumpy()
            expected = 2 * first * (np.float32(1) / np.float32(1 - p)).astype(dtype) * (first != 0)
            # The kernel of the gradient rounds in its own order.
            assert np.allclose(gradient.asnumpy(), expected, rtol=2e-3 if dtype == "float16" else 1e-6)
            assert np.array_equal(gradient.asnumpy() != 0, first != 0)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_region_may_be_asked_twice(driver: str) -> None:
    x = Tensor(np.linspace(0.1, 1.0, 12).astype(np.float32).reshape(3, 4))

    def inner(y: Any) -> Any:
        return (y.exp() * y * y).sum()

    if driver == "value_and_grad":
        plain = mindspore.grad(lambda y: mindspore.grad(inner)(y).sum())(x)
        found = mindspore.grad(lambda y: mindspore.grad(lambda z: checkpoint(inner, z))(y).sum())(x)
        assert np.array_equal(found.asnumpy(), plain.asnumpy())
        return
    from mindspore._c_expression import run_backward
    from mindspore.graph.api import _pynative_executor

    def gradients(function: Any) -> list[np.ndarray]:
        _pynative_executor.set_grad_flag(True)
        leaf = x.data
        leaf.requires_grad_()
        loss = function(leaf)
        ones = ops.ones_like(loss)
        (first,) = run_backward((loss,), (ones,), True, False, (leaf,), True, accumulate_grad=False)
        (again,) = run_backward((loss,), (ones,), True, True, (leaf,), True, accumulate_grad=False)
        total = again.sum()
        (second,) = run_backward((total,), (ops.ones_like(total),), False, False, (leaf,), True, accumulate_grad=False)
        _pynative_executor.set_grad_flag(False)
        return [first.asnumpy(), again.asnumpy(), second.asnumpy()]

    for found, expected in zip(gradients(lambda y: checkpoint(inner, y)), gradients(inner), strict=True):
        assert np.array_equal(found, expected)


def test_a_region_may_take_a_gradient_itself() -> None:
    x = Tensor([1.0, 2.0])

    def function(y: Any) -> Any:
        return (mindspore.grad(lambda z: (z.exp() * z).sum())(y) * y).exp()

    expected = mindspore.grad(lambda y: function(y).sum())(x)
    for _ in range(2):
        found = mindspore.grad(lambda y: checkpoint(function, y).sum())(x)
        assert np.array_equal(found.asnumpy(), expected.asnumpy())


@pytest.mark.parametrize("driver", DRIVERS)
def test_several_forwards_may_be_alive(driver: str) -> None:
    model, wrapped = new_transformer(p=0.0), new_transformer(WAYS["mix"], p=0.0)

    def loss(each: Transformer) -> Callable[..., Any]:
        return lambda *batches: sum(loss_of(each, batches[2 * i], batches[2 * i + 1]) for i in range(len(batches) // 2))

    for each in (model, wrapped):
        each.set_train(False)
    batches = (*batch(0), *batch(1), *batch(2))
    expected = differentiate(loss(model), batches, model.trainable_params(), driver)[1]
    found = differentiate(loss(wrapped), batches, wrapped.trainable_params(), driver)[1]
    assert all(np.array_equal(a.asnumpy(), b.asnumpy()) for a, b in zip(found, expected, strict=True))


def test_casting_cells_cast_nothing_after_a_recomputation_that_stopped_inside_of_them() -> None:
    cell = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 4), nn.ReLU()).to_float(mindspore.float16)
    after = nn.Dense(4, 4)
    x = Tensor(np.random.RandomState(0).randn(3, 4).astype(np.float32))
    weights = cell.trainable_params()
    expected = differentiate(lambda y: cell(y).astype(mindspore.float32).sum(), (x,), weights, "tape")[1]
    for driver in DRIVERS:
        found = differentiate(lambda y: checkpoint(cell, y).astype(mindspore.float32).sum(), (x,), weights, driver)[1]
        assert all(np.array_equal(a.asnumpy(), b.asnumpy()) for a, b in zip(found, expected, strict=True))
        assert after(x).dtype == mindspore.float32


def test_what_is_written_by_index_is_made_again() -> None:
    x = Tensor(np.random.RandomState(0).randn(4, 6).astype(np.float32))

    def function(y: Any) -> Any:
        total = ops.zeros((4, 6), mindspore.float32)
        mask = ops.ones((4, 6), mindspore.float32)
        mask[1:3] = 0.5
        for row in range(4):
            total[row] = y[row] * (row + 1)
        return ((total * mask).exp() * total).sum()

    for driver in DRIVERS:
        for policy in (None, lambda ctx, op, *args, **kwargs: SAVE, ["Mul"]):
            expected = differentiate(function, (x,), [], driver)[1][0]
            found = differentiate(lambda y, p=policy: checkpoint(function, y, policy_fn=p), (x,), [], driver)[1][0]
            assert np.array_equal(found.asnumpy(), expected.asnumpy())


def test_statistics_of_a_batch_are_counted_once() -> None:
    x = Tensor(np.random.RandomState(0).randn(8, 6).astype(np.float32))

    def run(wrap: Callable[[Any], Any]) -> list[np.ndarray]:
        seed(1)
        cell = nn.SequentialCell(nn.BatchNorm1d(6), nn.Tanh(), nn.Dense(6, 2, weight_init="ones"))
        cell.set_train()
        wrapped = wrap(cell)
        _, gradients = differentiate(lambda y: (wrapped(y) ** 2).sum(), (x,), cell.trainable_params(), "value_and_grad")
        norm = cell[0]
        return [each.asnumpy().copy() for each in (*gradients, norm.moving_mean, norm.moving_variance)]

    expected = run(lambda cell: cell)
    for wrap in WAYS.values():
        assert all(np.array_equal(a, b) for a, b in zip(run(wrap), expected, strict=True))


def test_what_no_op_needs_is_not_run_again() -> None:
    from hyper_parallel.platform.mindspore.regions import replaying

    block = Block(16, p=0.0)
    x = Tensor(np.random.RandomState(0).randn(2, 8, 16).astype(np.float32))
    names: list[str] = []
    run = replaying.Replay._run_again

    def noted(self: Any, op: Any, call: Any, tensors: Any) -> Any:
        names.append(op.name)
        return run(self, op, call, tensors)

    def executed(policy: Any) -> list[str]:
        names.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replaying.Replay, "_run_again", noted)
            differentiate(lambda y: checkpoint(block, y, policy_fn=policy).sum(), (x,), [], "tape")
        return list(names)

    assert executed(None).count("MatMul") == 3, "nobody needs what the last one makes"
    products = executed(policies.save(policies.matmuls))
    assert "MatMul" not in products
    assert "MatMulExt" not in products
    assert "Softmax" in products
    saved = executed(lambda ctx, op, *args, **kwargs: SAVE)
    # Views cost nothing; primitives always run, or they would wait for ever (README).
    assert set(saved) <= {"Reshape", "Transpose", "LayerNorm", "BiasAdd", "Split"}


@pytest.mark.parametrize("reader", [lambda t: t[0], lambda t: t.asnumpy(), lambda t: bool(t.sum() > -1e9)])
def test_who_reads_what_was_left_out_gets_it(reader: Callable[[Any], Any]) -> None:
    x = Tensor(np.random.RandomState(0).randn(4, 6).astype(np.float32))

    def function(y: Any) -> Any:
        left_out = (y * 3).sin()
        reader(left_out)
        return (y * 2).exp() * y

    expected = mindspore.grad(lambda y: function(y).sum())(x)
    for _ in range(2):
        found = mindspore.grad(lambda y: checkpoint(function, y).sum())(x)
        assert np.array_equal(found.asnumpy(), expected.asnumpy())


# -- names ---------------------------------------------------------------------------------------------------------------


def layers() -> nn.Cell:
    class Layer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.SequentialCell(nn.Dense(2, 2))
            self.mlp = nn.Dense(2, 2)

        def construct(self, x: Any) -> Any:
            return self.mlp(self.attention(x))

    class Model(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.CellList([Layer(), Layer()])

        def construct(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    return Model()


@pytest.mark.parametrize("wraps", [(swap_wrapper,), (checkpoint_wrapper,), (checkpoint_wrapper, swap_wrapper)])
def test_layers_that_are_wrapped_and_assigned_again_keep_distinct_full_names(wraps: Any) -> None:
    model = layers()
    paths = [name for name, _ in model.parameters_and_names()]
    cells = [name for name, _ in model.cells_and_names()]
    names = [parameter.name for parameter in model.get_parameters()]
    assert names == paths
    for layer in model.layers:
        for wrap in wraps:
            layer.attention = wrap(layer.attention)
            layer.mlp = wrap(layer.mlp)
    assert [name for name, _ in model.parameters_and_names()] == paths
    assert [name for name, _ in model.cells_and_names()] == cells
    assert [parameter.name for parameter in model.get_parameters()] == names
    assert list(model.parameters_dict()) == names
    assert len({parameter.name for parameter in model.trainable_params()}) == len(names)
    model.update_parameters_name("model.")
    assert [parameter.name for parameter in model.get_parameters()] == ["model." + name for name in paths]


@pytest.mark.parametrize(
    "wrap", [swap_wrapper, checkpoint_wrapper, lambda cell: swap_wrapper(checkpoint_wrapper(cell))]
)
def test_a_wrapper_that_is_assigned_before_naming_is_named_like_its_cell(wrap: Any) -> None:
    class Model(nn.Cell):
        def __init__(self, wrap: Any) -> None:
            super().__init__()
            self.one = wrap(nn.Dense(2, 2))
            self.two = nn.SequentialCell(wrap(nn.Dense(2, 2)), wrap(nn.Dense(2, 2)))

    expected = [(name, parameter.name) for name, parameter in Model(lambda cell: cell).parameters_and_names()]
    assert [(name, parameter.name) for name, parameter in Model(wrap).parameters_and_names()] == expected
    assert expected[0] == ("one.weight", "one.weight")


def test_names_follow_the_rules_of_the_wrapper() -> None:
    wrapped = swap_wrapper(nn.Dense(2, 2))
    wrapped.update_parameters_name(None)
    assert wrapped.weight.name == "weight"
    wrapped.weight.is_init = True
    wrapped.update_parameters_name("a.")
    assert wrapped.weight.name == "a.weight"
    assert wrapped.weight.is_init is False
    wrapped.weight.is_init = True
    wrapped.update_parameters_name("a.")
    assert wrapped.weight.name == "a.weight"
    assert wrapped.weight.is_init is True
    wrapped.weight.name = "model.a.weight"
    wrapped.update_parameters_name("a.")
    assert wrapped.weight.name == "model.a.weight"
    wrapped.update_parameters_name("b.")
    assert wrapped.weight.name == "b.weight"


def test_a_checkpoint_saved_wrapped_loads_unwrapped_and_back(tmp_path: Path) -> None:
    plain, wrapped = layers(), layers()
    for layer in wrapped.layers:
        layer.attention = checkpoint_wrapper(swap_wrapper(layer.attention))
    for source, target in ((wrapped, plain), (plain, wrapped)):
        for parameter in source.get_parameters():
            parameter.set_data(Tensor(np.random.rand(*parameter.shape).astype(np.float32)))
        for path in (str(tmp_path / "weights.ckpt"),):
            mindspore.save_checkpoint(source, path)
            missing, _ = mindspore.load_param_into_net(target, mindspore.load_checkpoint(path))
            assert missing == []
        for a, b in zip(source.get_parameters(), target.get_parameters(), strict=True):
            assert np.array_equal(a.asnumpy(), b.asnumpy())
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    assert str(plain.load_state_dict(wrapped.state_dict())).startswith("<All keys matched")
    assert str(wrapped.load_state_dict(plain.state_dict())).startswith("<All keys matched")


def test_cells_in_a_wrapper_are_reached_as_before() -> None:
    inner = nn.SequentialCell(nn.Dense(2, 3), nn.ReLU())
    wrapped = swap_wrapper(checkpoint_wrapper(inner))
    assert wrapped.unwrap_cell is inner
    assert wrapped._ckpt_wrapped_module.unwrap_cell is inner
    assert wrapped.set_train() is wrapped
    assert inner.training
    assert inner[0].training
    assert wrapped.get_sub_cell("0") is inner[0]
    wrapped.set_train(False)
    assert not wrapped.training
    assert [name for name, _ in wrapped.name_cells().items()] == ["0", "1"]
    assert "SwapWrapper" in repr(wrapped)


def test_an_abstract_wrapper_cannot_be_made_and_a_function_has_no_parameters() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ActivationWrapper(nn.Dense(2, 2))
    cell = FuncCell(len)
    assert cell._fn is len
    assert list(cell.get_parameters()) == []
    with pytest.raises(ValueError, match="reentrant"):
        checkpoint_wrapper(nn.Dense(2, 2), CheckpointImpl.REENTRANT)


# -- swapping --------------------------------------------------------------------------------------------------------------


def test_what_may_be_swapped() -> None:
    assert base_check_fn(Tensor([1.0]))
    assert not base_check_fn(Parameter(Tensor([1.0])))
    assert not base_check_fn(3)
    assert not base_check_fn(ops.zeros((0, 3), mindspore.float32))
    offered: list[bool] = []
    layer = nn.Dense(2, 2)

    def note(tensor: Any) -> bool:
        offered.append(base_check_fn(tensor) and tensor.data_ptr() != layer.weight.data_ptr())
        return False

    mindspore.grad(lambda x: swap_wrapper(layer, note)(x).sum())(Tensor([[1.0, 2.0]]))
    assert offered
    assert all(offered), "a policy is never asked about a parameter"


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_views_come_back_as_they_were(dtype: str) -> None:
    kind = getattr(mindspore, dtype)
    x = Tensor(np.arange(48).reshape(4, 12) / 50).astype(kind)

    def function(y: Any) -> Any:
        base = y * 2
        a, b = base[1:3], base.reshape(12, 4)[2:10].transpose(1, 0)
        return (a * a).astype(mindspore.float32).sum() + (b * b).astype(mindspore.float32).sum()

    expected = mindspore.grad(function)(x)
    before = offloaded_bytes()
    for run in (swap_wrapper(function), checkpoint_wrapper(function, policy_fn=lambda *args, **kwargs: SWAP)):
        found = mindspore.grad(run)(x)
        assert np.array_equal(found.astype(mindspore.float32).asnumpy(), expected.astype(mindspore.float32).asnumpy())
    assert offloaded_bytes() > before


def test_a_block_counts_what_it_saw() -> None:
    blocks = []

    def function(y: Any) -> Any:
        blocks.append(AsyncSaveOnCpu(lambda tensor: tensor.shape == (2,)))
        with blocks[-1]:
            exp = y.exp()
            result = (exp * y).sum() + (y[:2].exp()).sum()
        shown = blocks[-1].storage.swap_storage
        assert [len(shown[index]) for index in range(3)] == [1, 1, 1]
        assert {shown[index][0].label for index in range(3)} == {"::(3,)"}
        shown[0][0].wait_offload()
        shown[0][0].async_load()
        shown[0][0].wait_load()
        assert np.array_equal(shown[0][0].get_val().asnumpy(), exp.asnumpy())
        return result

    mindspore.grad(function)(Tensor([1.0, 2.0, 3.0]))
    (block,) = blocks
    assert block.pack_count == block.unpack_count == block.count_idx == 3, "those that were swapped"
    assert block.storage is None
    assert not block.add_to_storage
    block.pack_count = 4
    assert block.pack_count == 4


def test_a_group_by_hand_moves_what_was_saved_in_it() -> None:
    manager = SwapManager()
    manager.set_current_group_name("by hand")
    x = Tensor(np.random.RandomState(0).randn(64, 64).astype(np.float32))

    def function(y: Any) -> Any:
        block = AsyncSaveOnCpu()
        with block:
            result = (y.exp() * y).sum()
        assert block.add_to_storage
        manager.launch_offload("by hand")
        manager.wait_offload("by hand")
        manager.launch_load("by hand")
        manager.wait_load("by hand")
        return result

    try:
        found = mindspore.grad(function)(x)
    finally:
        manager.set_current_group_name("")
    assert np.array_equal(found.asnumpy(), mindspore.grad(lambda y: (y.exp() * y).sum())(x).asnumpy())


def test_a_tensor_moved_by_hand_comes_back() -> None:
    values = np.random.RandomState(0).randn(16, 16).astype(np.float32)
    tensor = SwapTensor((Tensor(values) * 1)[2:5], "mine")
    tensor.async_offload()
    tensor.wait_offload()
    assert tensor.state.value == "disk"
    tensor.async_load()
    tensor.wait_load()
    assert np.array_equal(tensor.get_val().asnumpy(), values[2:5])


def test_layers_paired_by_hand_load_when_the_second_goes_backward() -> None:
    first, second = swap_wrapper(nn.Dense(8, 8)), swap_wrapper(nn.Dense(8, 8))
    for _ in range(2):
        SwapManager().set_forward_prefetch_layer(first, second)
    x = Tensor(np.random.RandomState(0).randn(4, 8).astype(np.float32))
    found = mindspore.grad(lambda y: second(first(y)).sum())(x)
    plain = mindspore.grad(lambda y: second.unwrap_cell(first.unwrap_cell(y)).sum())(x)
    assert np.array_equal(found.asnumpy(), plain.asnumpy())


def test_seeds_are_set_before_a_model_is_made() -> None:
    seed(3)
    first = ops.rand(4).asnumpy()
    seed(3)
    assert np.array_equal(ops.rand(4).asnumpy(), first)


# -- memory ----------------------------------------------------------------------------------------------------------------

MEMORY = """
import gc, sys
import numpy as np
import mindspore
from mindspore import Tensor, nn, ops
import hyper_parallel as hp
from hyper_parallel.platform.mindspore.activation_checkpoint import checkpoint_wrapper, swap_wrapper
hp.get_mindspore_platform()

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4 / 1024

class Chain(nn.Cell):
    def construct(self, x):
        for _ in range(4):
            x = ops.tanh(x) * x
        return x

x = Tensor(np.random.RandomState(0).rand(2048, 1024).astype(np.float32))   # 8 MiB; a chain saves 9 of them
wraps = {{"plain": lambda c: c, "recompute": checkpoint_wrapper, "swap": swap_wrapper}}
wrap = wraps[{way!r}]
chains = [wrap(Chain()) for _ in range(5)]
peak = []

def loss(y):
    before = resident_mib()
    for chain in chains:
        y = chain(y)
    peak.append(resident_mib() - before)
    return y.sum()

with hp.configure_swap(disk_dir={directory!r}, window_bytes="16MiB", prefetch_bytes="16MiB"):
    gradient = mindspore.grad(loss)(x)
result = [peak[0], float(np.abs(gradient.asnumpy()).sum())]
"""


def test_memory_falls_as_computed(tmp_path: Path) -> None:
    from support.interpreter import run_fresh

    measured = {}
    for way in ("plain", "recompute", "swap"):
        measured[way] = run_fresh(MEMORY.format(way=way, directory=str(tmp_path)))
    held = {way: mib for way, (mib, _) in measured.items()}
    # Each chain saves 8 results of its own and its input; the last result is alive in all ways. A region keeps its input alone, swapping
    # what is in the window and the tail that backward needs first.
    assert 5 * 8 * 8 * 0.9 < held["plain"] < 5 * 9 * 8 * 1.2, held
    assert held["recompute"] < 5 * 8 + 9 * 8 + 24, held
    assert held["swap"] < held["plain"] / 2, held
    assert len({total for _, total in measured.values()}) == 1


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_replay_that_stops_where_tensors_come_in_a_list_leaves_none_behind(driver: str) -> None:
    x = Tensor(np.ones((4, 4), np.float32))
    met: list[str] = []

    def function(y: Any) -> Any:
        y = ops.exp(y)
        both = ops.cat([y, y], 0)  # nothing after `exp` is needed
        both = both * 2.0
        met.append("product")
        both = both + 1.0
        met.append("sum")
        return both

    def step() -> None:
        differentiate(lambda y: checkpoint(function, y).sum(), (x,), [], driver)

    for _ in range(3):
        step()
    live = num_live_tensors()
    met.clear()
    for _ in range(10):
        step()
    assert num_live_tensors() <= live
    # The second run stops, though not where the tensors come in a list, nor where their result is read.
    assert met.count("product") == 20
    assert met.count("sum") == 10


def test_dropouts_that_must_not_draw_again_share_one_stand_in() -> None:
    from hyper_parallel.platform.mindspore.regions import random_ops

    wrapped = [checkpoint_wrapper(nn.SequentialCell(nn.Dropout(p=0.37), nn.Tanh())) for _ in range(3)]
    for cell in wrapped:
        cell.set_train()
    x = Tensor(np.ones((8, 8), np.float32))
    before = len(random_ops._stand_ins)
    for _ in range(4):
        for cell in wrapped:
            differentiate(lambda y, cell=cell: cell(y).sum(), (x,), [], "tape")
    assert len(random_ops._stand_ins) == before + 1


# -- what the second run reads from outside ------------------------------------------------------------------------------


class FromOutside(nn.Cell):
    """Reads something from outside of itself, another one each time."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.read = read

    def construct(self, x: Any) -> Any:
        return ops.sin(x * self.read())


def alternating(make: Any) -> Any:
    """Two lasting ones in turn."""
    return itertools.cycle([make(1.0), make(3.0)]).__next__


def made_anew(make: Any) -> Any:
    """A new one each time, gone when the op is done."""
    values = itertools.cycle([1.0, 3.0])
    return lambda: make(next(values))


@pytest.mark.parametrize("read", [alternating, made_anew])
@pytest.mark.parametrize(
    "make",
    [float, lambda value: Tensor(np.full(4, value, np.float32)), lambda value: Tensor(value, mindspore.float32)],
    ids=["number", "tensor", "scalar"],
)
def test_what_the_second_run_reads_from_outside_and_is_another_one_is_found(read: Any, make: Any) -> None:
    cell = checkpoint_wrapper(FromOutside(read(make)))
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"did not do what forward did[^£]*another tensor from outside"):
            mindspore.grad(lambda x: cell(x * 1).sum())(Tensor(np.ones(4, np.float32)))


def test_a_tensor_that_is_made_again_in_the_second_run_with_the_same_values_is_the_same() -> None:
    x = Tensor(np.linspace(0, 1, 4).astype(np.float32))
    make = FromOutside(lambda: Tensor(np.full(4, 2.0, np.float32)))
    expected = mindspore.grad(lambda y: make(y * 1).sum())(x)
    found = mindspore.grad(lambda y: checkpoint_wrapper(make)(y * 1).sum())(x)
    assert np.array_equal(found.asnumpy(), expected.asnumpy())


def test_a_generator_of_mindspores_that_a_cell_has_is_moved_by_one_forward_and_so_is_its_mode() -> None:
    class Drawing(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.generator = mindspore.Generator()
            self.generator.manual_seed(4)

        def construct(self, x: Tensor) -> Tensor:
            _, offset = self.generator._step(Tensor(1))  # as random ops of an accelerator take their seed and offset
            return ops.sin(x * float(offset.asnumpy())) * x

    plain, cell = Drawing(), Drawing()
    for call, each in ((plain, plain), (checkpoint_wrapper(cell), cell)):
        for _ in range(3):
            each.set_train()
            gradient = mindspore.grad(lambda x, call=call, each=each: _in_eval(call(x * 1.0), each).sum())(
                Tensor([0.3, 0.4])
            )
        each.found = gradient.asnumpy(), each.generator.get_state().asnumpy(), each.training, each._phase
    assert all(map(np.array_equal, plain.found, cell.found))
    assert cell.found[1][8] == 3


def _in_eval(result: Tensor, cell: nn.Cell) -> Tensor:
    cell.set_train(False)
    return result
