"""Blocks that are recomputed or swapped inside DistributedDataParallel: the gradients of the same run without this package."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from support import parallel_training as training
from support import processes
from support.parallel_training import NUM_BLOCKS, PER_STEP, UNIT_BYTES, WRAPPED, Outcome, Transformer

SOME = ("recompute", "mix", "swap wrapper")

# In the workers


def build(
    before: Callable[[Transformer], None], after: Callable[[Transformer], None], **options: Any
) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = Transformer()
    before(model)
    parallel = DistributedDataParallel(model, **options)
    after(model)
    return parallel


def compare(
    wraps: tuple[str, ...], directory: str, order: str = "wrap first", step: str = "one_backward", **options: Any
) -> dict[str, Outcome]:
    make = functools.partial(build, **options)
    return training.compare(make, wraps, order, directory, STEPS[step])


def two_micro_batches(model: DistributedDataParallel, step: int) -> None:
    for part in range(2):
        with model.no_sync() if part == 0 else contextlib.nullcontext():
            training.loss_of(model, 2 * step + part).backward()


def under_autocast(model: nn.Module, step: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = training.loss_of(model, step)
    loss.backward()


STEPS = {each.__name__: each for each in (training.one_backward, two_micro_batches, under_autocast)}


def compare_state_dicts(wrap: str) -> list[str]:
    """The keys that differ, with both kinds of state dicts and back."""
    plain = build(training.do_nothing, training.do_nothing)
    wrapped = build(functools.partial(training.wrap_blocks, name=wrap), training.do_nothing)
    found = []
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True, cpu_offload=True)):
        expected = get_model_state_dict(plain, options=options)
        found += training.differences(expected, get_model_state_dict(wrapped, options=options))
        other = {name: value + 1 for name, value in expected.items()}
        set_model_state_dict(wrapped, dict(other), options=options)  # it changes the dict it is given
        found += training.differences(other, get_model_state_dict(wrapped, options=options))
        set_model_state_dict(wrapped, dict(expected), options=options)
    return found + training.differences(plain.module.state_dict(), wrapped.module.state_dict())


def ranks_agree(wrap: str, directory: str) -> bool:
    """Whether every rank has the same gradients after a step: DDP's hooks ran."""
    with training.swapping(directory):
        model = build(functools.partial(training.wrap_blocks, name=wrap), training.do_nothing)
        training.one_backward(model, 0)
    for gradient in training.gradients(model).values():
        first = gradient.clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, gradient):
            return False
    return True


# Tests


def test_gradients_and_parameters_are_those_of_the_plain_run_and_exactly_the_activations_move(tmp_path: Path) -> None:
    outcomes = processes.pool("torch", 2).run(compare, WRAPPED, str(tmp_path))
    for outcome in outcomes:
        everything = outcome.pop("swap all")
        assert everything.differences == everything.moved_parameters == []
        # All that autograd saves but the blocks' inputs, which are not made in a region.
        assert everything.moved_bytes == training.NUM_STEPS * (everything.saved_bytes - NUM_BLOCKS * UNIT_BYTES)
    training.check(outcomes, PER_STEP)


def test_four_ranks(tmp_path: Path) -> None:
    training.check(processes.pool("torch", 4).run(compare, SOME, str(tmp_path)), PER_STEP)


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_options_of_ddp_change_nothing(option: str, tmp_path: Path) -> None:
    outcomes = processes.pool("torch", 2).run(compare, SOME, str(tmp_path), **{option: True})
    training.check(outcomes, PER_STEP)


def test_ddp_itself_refuses_reentrant_blocks_when_it_looks_for_unused_parameters(tmp_path: Path) -> None:
    with pytest.raises(processes.RankError, match="marked as ready twice"):
        processes.pool("torch", 2).run(compare, ("reentrant",), str(tmp_path), find_unused_parameters=True)


def test_blocks_may_be_wrapped_after_ddp(tmp_path: Path) -> None:
    outcomes = processes.pool("torch", 2).run(compare, SOME, str(tmp_path), order="wrap last")
    training.check(outcomes, PER_STEP)


def test_gradients_accumulate_without_sync(tmp_path: Path) -> None:
    outcomes = processes.pool("torch", 2).run(compare, SOME, str(tmp_path), step="two_micro_batches")
    training.check(outcomes, {wrap: 2 * num_bytes for wrap, num_bytes in PER_STEP.items()})


def test_autocast_inside_ddp_and_no_cast_of_a_weight_is_moved(tmp_path: Path) -> None:
    outcomes = processes.pool("torch", 2).run(compare, (*SOME, "swap all"), str(tmp_path), step="under_autocast")
    weights = {(32, 32), (64, 32), (32, 64)}
    for outcome in outcomes:
        for wrap, each in outcome.items():
            assert each.differences == [], wrap
            assert each.moved_parameters == [], wrap
            moved = [label for label in each.labels if any(f"bfloat16[{a}, {b}]" in label for a, b in weights)]
            assert moved == [], wrap


@pytest.mark.parametrize("wrap", SOME)
def test_gradients_are_averaged_over_ranks(wrap: str, tmp_path: Path) -> None:
    assert processes.pool("torch", 2).run(ranks_agree, wrap, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("wrap", ["recompute", "swap wrapper"])
def test_state_dicts_are_those_of_the_plain_model(wrap: str) -> None:
    assert processes.pool("torch", 2).run(compare_state_dicts, wrap) == [[], []]
