"""The plan of a recomputation: compared with every possible one on small programs."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

from hyper_parallel.core.regions.rerun_plan import plan_replay


class Op(NamedTuple):
    reads: tuple[int | None, ...]
    makes: tuple[int, ...]
    must_run: bool = False


def random_ops(rng: random.Random) -> tuple[list[Op], int]:
    num_inputs = rng.randint(1, 2)
    num_values = num_inputs
    ops = []
    for _ in range(rng.randint(1, 7)):
        reads = tuple(rng.choice([*range(num_values), None]) for _ in range(rng.randint(0, 2)))
        makes = tuple(range(num_values, num_values + rng.randint(0, 2)))
        num_values += len(makes)
        ops.append(Op(reads, makes, rng.random() < 0.1))
    return ops, num_inputs


def is_enough(ops: list[Op], runs: set[int], wanted: set[int], available: set[int]) -> bool:
    """Whether running these ops, in order, finds all it reads and makes all that is wanted."""
    there = set(available)
    for index, op in enumerate(ops):
        if index in runs:
            if any(read is not None and read not in there for read in op.reads):
                return False
            there |= set(op.makes)
        elif op.must_run:
            return False
    return wanted <= there


def test_the_plan_is_enough_and_no_smaller_one_is() -> None:
    for seed in range(2_000):
        rng = random.Random(seed)
        ops, num_inputs = random_ops(rng)
        made = [value for op in ops for value in op.makes]
        available = {*range(num_inputs), *(value for value in made if rng.random() < 0.3)}
        wanted = {value for value in [*range(num_inputs), *made] if rng.random() < 0.4}
        plan = plan_replay(ops, wanted, available.__contains__)
        assert is_enough(ops, set(plan.runs), wanted, available & set(plan.takes)), seed
        smallest = min(
            (
                number
                for number in range(len(ops) + 1)
                for runs in itertools.combinations(range(len(ops)), number)
                if is_enough(ops, set(runs), wanted, available)
            ),
        )
        assert len(plan.runs) == smallest, seed


def test_what_is_available_is_taken_and_its_op_does_not_run() -> None:
    ops = [Op((0,), (1,)), Op((1,), (2,)), Op((2,), (3,))]
    plan = plan_replay(ops, [3], {0, 2}.__contains__)
    assert plan.runs == {2}
    assert plan.takes == {2}


def test_an_op_that_must_run_brings_what_it_reads() -> None:
    ops = [Op((0,), (1,)), Op((1,), (), must_run=True), Op((0,), (2,))]
    plan = plan_replay(ops, [], {0}.__contains__)
    assert plan.runs == {0, 1}
    assert plan.takes == {0}


def test_nothing_wanted_is_nothing_run() -> None:
    assert plan_replay([Op((0,), (1,))], [], {0}.__contains__) == (frozenset(), frozenset())
