"""A sharded model trains as one process does that has the data of all ranks, whatever the model does."""

from __future__ import annotations

from typing import Any

import pytest

from support import (
    processes,
    sharding,
    sharding_changes,
    sharding_counts,
    sharding_fsdp2,
    sharding_optimizers,
    sharding_programs,
    sharding_refusals,
    sharding_reruns,
    sharding_steps,
    sharding_tensor_parallel,
    sharding_values,
)
from support.campaign import share
from support.sharding import Settings

DEADLINE_S = 120
PROGRAMS = {
    **sharding_programs.PROGRAMS,
    **sharding_values.PROGRAMS,
    **sharding_reruns.PROGRAMS,
    **sharding_changes.PROGRAMS,
}
STEPS = sharding_steps.PROGRAMS
EVERY_STAGE = [Settings(zero=3), Settings(zero=2, prefetch=2), Settings(zero=1, prefetch=0)]


def run(number: int, function: Any, *arguments: object) -> list[Any]:
    return processes.pool("torch", number).run(function, *arguments, deadline_s=DEADLINE_S)


def train(titles: list[str], settings: list[Settings]) -> dict[str, list[str]]:
    """What differs, by program; runs on every rank."""
    found = {}
    for title in titles:
        for each in settings:
            wrong = sharding.differences({**PROGRAMS, **STEPS}[title], each)
            if wrong:
                found[f"{title}, {each}"] = wrong
    return found


@pytest.mark.parametrize("title", PROGRAMS)
def test_two_ranks_train_as_one_process(title: str) -> None:
    """With two stages of ZeRO in turn; with all three in the campaign."""
    place = list(PROGRAMS).index(title)
    settings = [EVERY_STAGE[(place + number) % 3] for number in share(3, 2)]
    assert run(2, train, [title], settings) == [{}, {}]


def test_one_rank_alone_trains_as_one_process() -> None:
    assert run(1, train, list(PROGRAMS)[:: 3 // len(share(3, 1))], [Settings(num_steps=2)]) == [{}]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_four_ranks_train_as_one_process(zero: int) -> None:
    plain, hybrid = Settings(zero=zero, num_steps=2), Settings(zero=zero, prefetch=3, num_copies=2, num_steps=2)
    every = 18 // len(share(3, 1))  # an eighteenth in every run, a sixth in the campaign
    assert run(4, train, list(PROGRAMS)[zero::every], [plain]) == [{}] * 4
    assert run(4, train, list(PROGRAMS)[zero + 3 :: every], [hybrid]) == [{}] * 4


@pytest.mark.parametrize("reduce", ["each", "last"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_steps_of_several_microbatches_are_those_of_one_process(zero: int, reduce: str) -> None:
    assert run(2, train, list(STEPS), [Settings(zero, reduce=reduce, num_steps=2)]) == [{}] * 2
    hybrid = Settings(zero, num_copies=2, reduce=reduce, num_steps=2)
    assert run(4, train, list(STEPS)[zero :: 12 // len(share(3, 2))], [hybrid]) == [{}] * 4


@pytest.mark.parametrize("title", sharding_fsdp2.CASES)
def test_float32_is_that_of_fsdp2_bit_for_bit(title: str) -> None:
    assert run(2, sharding_fsdp2.differences, title) == [[], []]


COUNTS = {(3, "each"): (24, 12), (3, "last"): (24, 3), (2, None): (3, 12), (1, None): (3, 3)}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("zero", "reduce"), COUNTS)
def test_four_microbatches_of_three_units_take_so_many_collectives(zero: int, reduce: str | None, number: int) -> None:
    assert run(number, sharding_counts.microbatches, zero, reduce) == [[COUNTS[zero, reduce]] * 2] * number


@pytest.mark.parametrize("way", sharding_reruns.WAYS)
def test_a_rerun_in_backward_gathers_nothing_again(way: str) -> None:
    # Forward of a reentrant region has no gradients: to a unit it is an evaluation, which keeps nothing.
    assert run(2, sharding_counts.reruns, way, 2) == [(6 if "reentrant" in way else 3, 3)] * 2
    assert run(2, sharding_counts.reruns, way, 3) == [(6, 3)] * 2


@pytest.mark.parametrize("title", sharding_refusals.CASES)
def test_what_would_be_wrong_is_refused_and_the_next_step_is_right(title: str) -> None:
    for zero in (3, 2):
        for said, wrong in run(2, sharding_refusals.refused, title, zero):
            assert sharding_refusals.CASES[title][1] in said
            assert wrong == []


def test_a_shared_parameter_is_not_replaced_in_one_place_alone() -> None:
    assert all("several modules share" in said for said in run(2, sharding_refusals.untied))


def test_optimizers_step_in_backward_and_with_shards_that_have_no_elements() -> None:
    for zero in (1, 2, 3):
        assert run(2, sharding_optimizers.in_backward, zero) == [[], []]
    assert run(2, sharding_optimizers.clipped_and_fused) == [[], []]


def test_transforms_and_threads_get_what_one_process_gets() -> None:
    assert run(2, sharding_optimizers.transforms) == [[], []]
    assert run(2, sharding_optimizers.in_threads) == [[], []]


@pytest.mark.parametrize("way", ["before", "after"])
def test_blocks_that_are_compiled_before_or_after_train_as_well(way: str) -> None:
    assert run(2, sharding_optimizers.compiled, way) == [[], []]


@pytest.mark.parametrize("zero", [3, 2])
def test_parameters_that_are_cut_already_are_cut_once_more(zero: int) -> None:
    assert run(4, sharding_tensor_parallel.differences, zero) == [[]] * 4
