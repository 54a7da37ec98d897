"""Sharded units on a simulated rank: random programs, exact numbers of collectives, exact bytes, planted bugs.

All 20,000 programs: HYPER_PARALLEL_CAMPAIGN=full python3 start.py test tests/parallel/test_sharding_order.py
"""

from __future__ import annotations

from collections import Counter

import pytest

from hyper_parallel.core.parallel.sharding import order as real
from support.campaign import share
from support.planted_bugs import SHARDING
from support.planting import Bug, beside, unchanged
from support.sharding_cases import COUNTS, NUM_RANKS, peak_of
from support.simulated_sharding import ACTIONS, Program

SEEDS = share(20_000, 60)


def test_random_programs_compute_with_what_is_right_and_lose_nothing() -> None:
    """Two ranks, which use other parameters, begin the same collectives in the same order."""
    played: Counter[str] = Counter()
    for seed in SEEDS:
        begun = []
        for rank in (0, 1):
            program = Program(seed, rank=rank)
            try:
                program.run()
            except BaseException as error:
                error.add_note(f"seed {seed}, rank {rank}: {', '.join(program.said)}")
                raise
            begun.append(program.rank.collectives)
            played.update(program.said)
        assert begun[0] == begun[1], f"seed {seed}"
    missed = {*ACTIONS, "FailureError", "Interrupt", "begun again"} - set(played)
    assert not missed


@pytest.mark.parametrize("what", COUNTS)
def test_units_are_gathered_and_reduced_exactly_so_often(what: str) -> None:
    """Of three units, in four microbatches where nothing else is said."""
    count, expected = COUNTS[what]
    assert count(real) == expected


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_most_bytes_in_use_are_those_of_the_formula(zero: int, prefetch: int, microbatches: int) -> None:
    """The table under "Memory" in the folder's README.md."""
    for num_blocks in (6, 9):
        for block, model in ((1000, 1000), (1000, 10)):
            whole = num_blocks * block + model
            shards = whole // NUM_RANKS
            found = peak_of(zero, prefetch, num_blocks, block_bytes=block, model_bytes=model, microbatches=microbatches)
            if zero == 3:
                expected = 2 * shards + 2 * model + (4 + max(prefetch, 1)) * block + block // NUM_RANKS
            else:
                expected = 2 * shards + whole + model + 2 * block + block // NUM_RANKS
            if microbatches > 1:
                expected += whole if zero == 1 else shards
            assert found == expected, (num_blocks, block, model)


def find_planted(bug: Bug, seeds: range) -> str | None:
    """What was said of the bug; None if nothing was found."""
    order = beside(bug, real.Order)
    try:
        for what, (count, expected) in COUNTS.items():
            if (found := count(order)) != expected:
                return f"{what}: {found}"
        for (zero, runs), expected_peak in PEAKS.items():
            if (peak := peak_of(zero, 2, 5, runs=runs, order=order)) != expected_peak:
                return f"the most bytes: {peak}"
        for seed in seeds:
            begun = []
            for rank in (0, 1):
                program = Program(seed, rank=rank, order=order, actions=_actions(seed))
                program.run()
                begun.append(program.rank.collectives)
            assert begun[0] == begun[1], f"seed {seed}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _actions(seed: int) -> tuple[str, ...]:
    """All at first, then each of them with each of a few others."""
    seed -= NUM_MIXED
    return ACTIONS if seed < 0 else (ACTIONS[seed % len(ACTIONS)], OTHERS[seed // len(ACTIONS)])


PEAKS = {(zero, runs): peak_of(zero, 2, 5, runs=runs) for zero in (2, 3) for runs in ("once", "again in backward")}
NUM_MIXED = 8
OTHERS = ("step", "accumulated", "two_forwards")
FEW = range(NUM_MIXED + len(ACTIONS) * len(OTHERS))


@pytest.mark.parametrize("bug", SHARDING, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found = find_planted(bug, FEW)
    assert found is not None, "nothing found: the programs are blind here, or the statement does nothing"
    print(found)


def test_nothing_is_found_where_nothing_was_planted() -> None:
    assert find_planted(Bug("none", "goes-on", unchanged), range(len(ACTIONS))) is None
