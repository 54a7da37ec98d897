"""Blocks that are recomputed or swapped under PyTorch's tensor parallel: the gradients of the same run without this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef

import hyper_parallel as hp
from hyper_parallel import policies
from support import parallel_training as training
from support import processes
from support.parallel_training import NUM_BLOCKS, UNIT_BYTES, WRAPPED, Outcome, Transformer
from support.process_worker import kept_mesh

ORDERS = ["wrap first", "parallelize first"]
SOME = ("recompute", "mix", "swap wrapper")


def per_step(world_size: int) -> dict[str, int]:
    split = UNIT_BYTES // world_size
    return {
        # q, k, v; scores; attention; w1, each split; wo's result before it is summed over ranks. Nothing needs w2's result.
        "swap": NUM_BLOCKS * ((3 + 1 + 1 + 2) * split + UNIT_BYTES),
        "mix": NUM_BLOCKS * (2 * split + UNIT_BYTES),  # w1, and the input
        "swap inputs": NUM_BLOCKS * UNIT_BYTES,
    }


# In the workers


def plan_of_block(is_sequence_parallel: bool) -> dict[str, Any]:
    plan: dict[str, Any] = {f"attention.w{name}": ColwiseParallel() for name in "qkv"}
    plan["feed_forward.w1"] = ColwiseParallel()
    if not is_sequence_parallel:
        return plan | {"attention.wo": RowwiseParallel(), "feed_forward.w2": RowwiseParallel()}
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    return plan | {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(**gathered),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "feed_forward": PrepareModuleInput(**gathered),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }


def parallelize(model: Transformer, mesh: DeviceMesh, is_sequence_parallel: bool) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, plan_of_block(is_sequence_parallel))
    if is_sequence_parallel:
        around = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, around)


def build(
    before: Callable[[Transformer], None],
    after: Callable[[Transformer], None],
    is_sequence_parallel: bool = False,
    mesh: DeviceMesh | None = None,
) -> Transformer:
    torch.manual_seed(0)
    model = Transformer()
    before(model)
    tensor_mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh["tensor"]
    parallelize(model, tensor_mesh, is_sequence_parallel)
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    after(model)
    return model


def one_backward(model: nn.Module, step: int, mesh: DeviceMesh | None = None) -> None:
    """Ranks that hold parts of one model see the same batch and draw the same random numbers."""
    group = 0 if mesh is None else mesh["data"].get_local_rank()
    torch.manual_seed(1000 * step + group)
    training.loss_of(model, 10 * step + group, is_same_everywhere=True).backward()


def compare(wraps: tuple[str, ...], order: str, directory: str, is_sequence_parallel: bool) -> dict[str, Outcome]:
    make = functools.partial(build, is_sequence_parallel=is_sequence_parallel)
    return training.compare(make, wraps, order, directory, one_backward)


def compare_in_two_dimensions(wraps: tuple[str, ...], order: str, directory: str) -> dict[str, Outcome]:
    mesh = kept_mesh((dist.get_world_size() // 2, 2), ("data", "tensor"))
    make = functools.partial(build, is_sequence_parallel=True, mesh=mesh)
    return training.compare(make, wraps, order, directory, functools.partial(one_backward, mesh=mesh))


def compare_state_dicts(order: str) -> list[str]:
    wrapping = functools.partial(training.wrap_blocks, name="recompute")
    plain = build(training.do_nothing, training.do_nothing)
    wrapped = build(wrapping, training.do_nothing) if order == "wrap first" else build(training.do_nothing, wrapping)
    found = []
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        states = [get_model_state_dict(model, options=options) for model in (plain, wrapped)]
        found += training.differences(
            *({name: training.local(value) for name, value in state.items()} for state in states)
        )
    return found


def on_dtensors(x: DTensor, weight: DTensor) -> torch.Tensor:
    """Ops on DTensors alone: some communicate without a word, among them a slice, which is a view elsewhere."""
    y = x.sigmoid()
    z = (y @ weight).cos() + y.redistribute(placements=[Replicate()]).exp() * y
    return (z[1:3].tanh().sum() + (z * z).sum()).full_tensor()


def gradients_on_dtensors(policy: Any, directory: str, num_rows: int) -> tuple[list[str], int]:
    """With one row less than there are ranks, the last rank has none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(7)
    x, weight = torch.rand(num_rows, 6, generator=generator), torch.rand(6, 6, generator=generator)

    def gradients(call: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
        leaves = {
            "x": distribute_tensor(x, mesh, [Shard(0)]).requires_grad_(),
            "weight": distribute_tensor(weight, mesh, [Replicate()]).requires_grad_(),
        }
        call(leaves["x"], leaves["weight"]).backward()
        return {name: training.local(leaf.grad) for name, leaf in leaves.items()}

    expected = gradients(on_dtensors)
    with training.swapping(directory), training.watched_engine(nn.Module()) as moved:
        got = gradients(functools.partial(hp.checkpoint, on_dtensors, policy_fn=policy))
    return training.differences(expected, got), sum(each.num_bytes for each in moved)


def is_held(wrap: str, directory: str) -> list[bool]:
    """Whether activations live between forward and backward: gathered inputs of attention, and results of w1."""
    seen: list[StorageWeakRef] = []

    def note(*found: Any) -> None:
        tensor = found[-1][0] if isinstance(found[-1], tuple) else found[-1]
        seen.append(StorageWeakRef(training.local(tensor.detach()).untyped_storage()))

    with training.swapping(directory):
        model = build(functools.partial(training.wrap_blocks, name=wrap), training.do_nothing, True)
        for block in model.blocks:
            block.attention.register_forward_pre_hook(note)  # after the one that gathers
            block.feed_forward.w1.register_forward_hook(note)
        loss = training.loss_of(model, 0, is_same_everywhere=True)
        training.join_swapping()
        held = [not each.expired() for each in seen]
        loss.backward()
    return held


# Tests


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_and_parameters_are_those_of_the_plain_run_and_exactly_the_activations_move(
    world_size: int, order: str, tmp_path: Path
) -> None:
    wraps = WRAPPED if (world_size, order) == (2, "wrap first") else SOME
    outcomes = processes.pool("torch", world_size).run(compare, wraps, order, str(tmp_path), False)
    for outcome in outcomes:
        outcome.pop("swap all", None)
    training.check(outcomes, per_step(world_size))


@pytest.mark.parametrize("order", ORDERS)
def test_sequence_parallel(order: str, tmp_path: Path) -> None:
    wraps = (*SOME, "save", "swap all")
    training.check(processes.pool("torch", 2).run(compare, wraps, order, str(tmp_path), True))


@pytest.mark.parametrize("order", ORDERS)
def test_fsdp2_and_sequence_parallel_in_two_dimensions(order: str, tmp_path: Path) -> None:
    training.check(processes.pool("torch", 4).run(compare_in_two_dimensions, SOME, order, str(tmp_path)))


@pytest.mark.parametrize("num_rows", [8, 5, 3])
def test_dtensors_with_uneven_and_empty_parts(num_rows: int, tmp_path: Path) -> None:
    pool = processes.pool("torch", 4)
    some = policies.ops("aten.sigmoid")
    for policy in (None, policies.save(some), policies.swap(some)):
        found = pool.run(gradients_on_dtensors, policy, str(tmp_path), num_rows)
        assert [differences for differences, _ in found] == [[]] * 4, policy
        moved = sum(num_bytes for _, num_bytes in found)
        assert moved == (num_rows * 6 * 4 if policy == policies.swap(some) else 0), policy


@pytest.mark.parametrize(("wrap", "expected"), [("plain", True), ("recompute", False), ("swap wrapper", False)])
def test_what_is_recomputed_or_swapped_is_not_held(wrap: str, expected: bool, tmp_path: Path) -> None:
    for held in processes.pool("torch", 2).run(is_held, wrap, str(tmp_path)):
        assert held == [expected] * 2 * NUM_BLOCKS


@pytest.mark.parametrize("order", ORDERS)
def test_state_dicts_are_those_of_the_plain_model(order: str) -> None:
    assert processes.pool("torch", 2).run(compare_state_dicts, order) == [[], []]
