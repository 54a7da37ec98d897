"""A row of blocks is cut so that the dearest stage is as cheap as can be: compared with all cuts that there are."""

from __future__ import annotations

import itertools
import random

from hyper_parallel.core.parallel.pipeline.cutting import even_cut


def stages_of(costs: list[float], begins: list[int]) -> list[float]:
    return [sum(costs[begin:end]) for begin, end in itertools.pairwise([*begins, len(costs)])]


def test_of_all_cuts_it_is_one_of_the_best() -> None:
    chosen = random.Random(0)
    for _ in range(400):
        costs = [float(chosen.choice([0, 1, 2, 3, 5, 9])) for _ in range(chosen.randint(1, 8))]
        for num in range(1, len(costs) + 1):
            begins = even_cut(costs, num)
            assert len(begins) == num
            assert begins == sorted(set(begins))
            assert begins[0] == 0
            prices = [
                (max(parts), sum(part**2 for part in parts))
                for cut in itertools.combinations(range(1, len(costs)), num - 1)
                for parts in [stages_of(costs, [0, *cut])]
            ]
            found = stages_of(costs, begins)
            assert (max(found), sum(part**2 for part in found)) == min(prices)


def test_figures_that_add_up_with_rounding_are_cut_as_well() -> None:
    chosen = random.Random(1)
    for _ in range(50):
        costs = [chosen.random() for _ in range(40)]
        parts = stages_of(costs, even_cut(costs, 7))
        assert len(parts) == 7
        assert max(parts) <= sum(costs) / 7 + max(costs)
