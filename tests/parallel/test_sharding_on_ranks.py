"""A sharded model trains as one process does that has the data of all ranks, whatever the model does."""

from __future__ import annotations

from typing import Any

import pytest

from support import processes, sharding, sharding_programs, sharding_reruns, sharding_steps, sharding_values
from support.sharding import Settings

DEADLINE_S = 120
PROGRAMS = {**sharding_programs.PROGRAMS, **sharding_values.PROGRAMS, **sharding_reruns.PROGRAMS}
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
    assert run(2, train, [title], EVERY_STAGE) == [{}, {}]


def test_one_rank_alone_trains_as_one_process() -> None:
    assert run(1, train, list(PROGRAMS), [Settings(num_steps=2)]) == [{}]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_four_ranks_train_as_one_process(zero: int) -> None:
    plain, hybrid = Settings(zero=zero, num_steps=2), Settings(zero=zero, prefetch=3, num_copies=2, num_steps=2)
    assert run(4, train, list(PROGRAMS)[zero::6], [plain]) == [{}] * 4
    assert run(4, train, list(PROGRAMS)[zero + 3 :: 6], [hybrid]) == [{}] * 4


@pytest.mark.parametrize("reduce", ["each", "last"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_steps_of_several_microbatches_are_those_of_one_process(zero: int, reduce: str) -> None:
    assert run(2, train, list(STEPS), [Settings(zero, reduce=reduce, num_steps=2)]) == [{}] * 2
    hybrid = Settings(zero, num_copies=2, reduce=reduce, num_steps=2)
    assert run(4, train, list(STEPS)[:4], [hybrid]) == [{}] * 4
