"""Blocks that are recomputed or swapped, and sharded with FSDP2: the gradients of the same sharded run without this package."""

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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hyper_parallel as hp
from support import parallel_training as training
from support import processes
from support.parallel_training import NUM_BLOCKS, PER_STEP, UNIT_BYTES, WRAPPED, Outcome, Transformer
from support.process_worker import kept_mesh

ORDERS = ["wrap first", "shard first"]
SOME = ("recompute", "mix", "swap wrapper")

# In the workers


def shard(model: Transformer, modules: list[nn.Module] | None = None, **options: Any) -> Transformer:
    """Each block, then the rest."""
    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),))
    bfloat16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    of_blocks = dict(options)
    if of_blocks.pop("casts_outputs", False):  # the blocks in bfloat16, all around them in float32
        of_blocks["mp_policy"] = MixedPrecisionPolicy(**bfloat16, output_dtype=torch.float32)
        del options["casts_outputs"]
    elif of_blocks.pop("is_mixed", False):
        options = of_blocks = {"mp_policy": MixedPrecisionPolicy(**bfloat16)}
    for block in model.blocks if modules is None else modules:
        fully_shard(block, mesh=mesh, **of_blocks)
    fully_shard(model, mesh=mesh, **options)
    return model


def build(before: Callable[[Transformer], None], after: Callable[[Transformer], None], **options: Any) -> Transformer:
    torch.manual_seed(0)
    model = Transformer()
    before(model)
    shard(model, **options)
    after(model)
    return model


def build_sharded_inside(before: Callable[[Transformer], None], after: Callable[[Transformer], None]) -> Transformer:
    """Attention and feed-forward are sharded each for itself, inside the blocks."""
    torch.manual_seed(0)
    model = Transformer()
    before(model)
    shard(model, [part for block in model.blocks for part in (block.attention, block.feed_forward)])
    after(model)
    return model


def build_with_prefetch(before: Callable[[Transformer], None], after: Callable[[Transformer], None]) -> Transformer:
    """The next block's parameters are gathered while one runs, in both directions."""
    model = build(before, training.do_nothing)
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    after(model)
    return model


BUILDS = {each.__name__: each for each in (build, build_sharded_inside, build_with_prefetch)}


def compare_with_replicas(wraps: tuple[str, ...], order: str, directory: str) -> dict[str, Outcome]:
    mesh = kept_mesh((dist.get_world_size() // 2, 2), ("replicas", "shards"))
    return compare(wraps, order, directory, mesh=mesh)


def compare(
    wraps: tuple[str, ...], order: str, directory: str, how: str = "build", step: str = "one_backward", **options: Any
) -> dict[str, Outcome]:
    return training.compare(functools.partial(BUILDS[how], **options), wraps, order, directory, backward=STEPS[step])


def two_micro_batches(model: Transformer, step: int) -> None:
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        training.loss_of(model, 2 * step + part).backward()


def two_forwards_then_backward(model: Transformer, step: int) -> None:
    losses = [training.loss_of(model, 2 * step + part) for part in range(2)]
    (losses[0] + losses[1]).backward()


def evaluation_between(model: Transformer, step: int) -> None:
    loss = training.loss_of(model, step)
    with torch.no_grad():
        training.loss_of(model, step + 10)
    loss.backward()


STEPS = {
    each.__name__: each
    for each in (training.one_backward, two_micro_batches, two_forwards_then_backward, evaluation_between)
}


def compare_state_dicts(wrap: str, order: str) -> list[str]:
    """The keys that differ: sharded, full, of the optimizer, and after loading."""
    wrapping = functools.partial(training.wrap_blocks, name=wrap)
    plain = build(training.do_nothing, training.do_nothing)
    wrapped = build(wrapping, training.do_nothing) if order == "wrap first" else build(training.do_nothing, wrapping)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (plain, wrapped)]
    for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
        torch.manual_seed(1)
        training.one_backward(model, 0)
        optimizer.step()
    found = []
    full = StateDictOptions(full_state_dict=True)
    for options in (StateDictOptions(), full):
        expected = get_model_state_dict(plain, options=options)
        got = get_model_state_dict(wrapped, options=options)
        found += training.differences(local_parts(expected), local_parts(got))
        of_optimizers = [
            get_optimizer_state_dict(model, optimizer, options=options)
            for model, optimizer in zip((plain, wrapped), optimizers, strict=True)
        ]
        found += sorted(set(of_optimizers[0]["state"]) ^ set(of_optimizers[1]["state"]))
        other = {name: value + 1 for name, value in expected.items()}
        set_model_state_dict(wrapped, dict(other), options=options)
        found += training.differences(local_parts(other), local_parts(get_model_state_dict(wrapped, options=options)))
        set_model_state_dict(wrapped, dict(expected), options=options)
    found += training.differences(local_parts(plain.state_dict()), local_parts(wrapped.state_dict()))
    return found


def local_parts(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: training.local(value) for name, value in state.items()}


class KeepsDetached(torch.autograd.Function):
    """Saves a weight as a tensor that does not know that it is one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight.detach())
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, training.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KeepsDetached.apply(x, self.weight)


def moved_of_a_detached_weight(wrap: str, order: str, directory: str) -> tuple[list[str], list[str]]:
    """What was moved that is no activation, and which gradients are not those of the plain run."""

    def make(is_wrapped: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(training.WIDTH, training.WIDTH), nn.Sequential(Scale(), nn.GELU()))
        torch.manual_seed(3)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        if is_wrapped and order == "wrap first":
            model[1] = training.WRAPS[wrap](model[1])
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        if is_wrapped and order != "wrap first":
            model[1] = training.WRAPS[wrap](model[1])
        return model

    x = torch.rand(2, 5, training.WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for is_wrapped in (False, True):
        model = make(is_wrapped)
        with training.swapping(directory), training.watched_engine(model) as moved:
            for _ in range(2):
                model(x).square().mean().backward()
        found.append(training.gradients(model))
    return [each.label for each in moved if each.is_parameter], training.differences(*found)


def seen_by_a_policy(order: str) -> tuple[set[str], set[str]]:
    """Modules and ops."""
    paths, ops = set(), set()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        paths.add(ctx.module)
        ops.add(str(op))
        return False

    def wrap(model: Transformer) -> None:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = hp.checkpoint_wrapper(block, policy_fn=policy)

    steps = (wrap, training.do_nothing) if order == "wrap first" else (training.do_nothing, wrap)
    training.one_backward(build(*steps), 0)
    return paths, ops


# Tests


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_and_parameters_are_those_of_the_plain_run_and_exactly_the_activations_move(
    order: str, tmp_path: Path
) -> None:
    wraps = WRAPPED if order == "wrap first" else (*SOME, "swap", "swap all")
    outcomes = processes.pool("torch", 2).run(compare, wraps, order, str(tmp_path), reshard_after_forward=True)
    for outcome in outcomes:
        everything = outcome.pop("swap all")
        assert everything.differences == everything.moved_parameters == []
        # All that autograd saves but the blocks' inputs, which are not made in a region.
        assert everything.moved_bytes == training.NUM_STEPS * (everything.saved_bytes - NUM_BLOCKS * UNIT_BYTES)
    training.check(outcomes, PER_STEP)


@pytest.mark.parametrize("order", ORDERS)
def test_parameters_may_stay_gathered_between_forward_and_backward(order: str, tmp_path: Path) -> None:
    outcomes = processes.pool("torch", 2).run(compare, SOME, order, str(tmp_path), reshard_after_forward=False)
    training.check(outcomes, PER_STEP)


@pytest.mark.parametrize("order", ORDERS)
def test_four_ranks(order: str, tmp_path: Path) -> None:
    training.check(processes.pool("torch", 4).run(compare, SOME, order, str(tmp_path)), PER_STEP)


@pytest.mark.parametrize("order", ORDERS)
def test_four_ranks_as_two_replicas_of_two_shards(order: str, tmp_path: Path) -> None:
    training.check(processes.pool("torch", 4).run(compare_with_replicas, SOME, order, str(tmp_path)), PER_STEP)


@pytest.mark.parametrize("order", ORDERS)
def test_mixed_precision_moves_half_the_bytes_and_no_cast_of_a_parameter(order: str, tmp_path: Path) -> None:
    outcomes = processes.pool("torch", 2).run(compare, (*SOME, "swap all"), order, str(tmp_path), is_mixed=True)
    for outcome in outcomes:
        everything = outcome.pop("swap all")
        assert everything.differences == everything.moved_parameters == []
        assert everything.moved_bytes == training.NUM_STEPS * (everything.saved_bytes - NUM_BLOCKS * UNIT_BYTES // 2)
    training.check(outcomes, {wrap: num_bytes // 2 for wrap, num_bytes in PER_STEP.items()})


@pytest.mark.parametrize("order", ORDERS)
def test_casts_of_inputs_and_outputs_are_made_in_both_runs(order: str, tmp_path: Path) -> None:
    outcomes = processes.pool("torch", 2).run(compare, SOME, order, str(tmp_path), casts_outputs=True)
    training.check(outcomes)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("step", ["two_micro_batches", "two_forwards_then_backward"])
def test_gradients_accumulate(order: str, step: str, tmp_path: Path) -> None:
    outcomes = processes.pool("torch", 2).run(compare, SOME, order, str(tmp_path), step=step)
    training.check(outcomes, {wrap: 2 * num_bytes for wrap, num_bytes in PER_STEP.items()})


@pytest.mark.parametrize("order", ORDERS)
def test_an_evaluation_between_forward_and_backward_changes_nothing(order: str, tmp_path: Path) -> None:
    outcomes = processes.pool("torch", 2).run(compare, SOME, order, str(tmp_path), step="evaluation_between")
    training.check(outcomes, PER_STEP)


@pytest.mark.parametrize("how", ["build_sharded_inside", "build_with_prefetch"])
@pytest.mark.parametrize("order", ORDERS)
def test_parameters_gathered_inside_a_region(order: str, how: str, tmp_path: Path) -> None:
    outcomes = processes.pool("torch", 2).run(compare, SOME, order, str(tmp_path), how=how)
    training.check(outcomes, PER_STEP)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("wrap", ["swap wrapper", "swap all"])
def test_a_weight_is_known_by_its_memory(order: str, wrap: str, tmp_path: Path) -> None:
    assert processes.pool("torch", 2).run(moved_of_a_detached_weight, wrap, order, str(tmp_path)) == [([], [])] * 2


@pytest.mark.parametrize("order", ORDERS)
def test_a_policy_is_asked_about_the_work_of_the_module_alone_and_with_its_path(order: str) -> None:
    parts = ["", "dropout", "norm1", "norm2", "attention", *(f"attention.w{name}" for name in "qkvo")]
    parts += ["feed_forward", "feed_forward.w1", "feed_forward.w2"]
    expected = {f"blocks.{index}.{part}".rstrip(".") for index in range(NUM_BLOCKS) for part in parts}
    for paths, ops in processes.pool("torch", 2).run(seen_by_a_policy, order):
        assert set(paths) == expected
        assert not [op for op in ops if op.startswith(("c10d", "fsdp"))]


@pytest.mark.parametrize(("order", "wrap"), [("wrap first", "recompute"), ("shard first", "swap wrapper")])
def test_state_dicts_are_those_of_the_plain_model(order: str, wrap: str) -> None:
    assert processes.pool("torch", 2).run(compare_state_dicts, wrap, order) == [[], []]
