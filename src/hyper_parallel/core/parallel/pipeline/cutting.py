"""Where to cut a row of blocks, so that the dearest stage is as cheap as can be.

Example: blocks that cost 1, 1, 1, 1, 4 make two stages of 4 and 4. Of blocks that cost 3, 1, 1, 1, 1 three stages have
one of 3 whichever way they are cut; so the other two are made alike: 3, 2, 2.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence

__all__ = ["even_cut"]


def even_cut(costs: Sequence[float], num: int) -> list[int]:
    """The numbers of the blocks that stages begin with.

    Of all cuts into `num` stages of a block at least, those whose dearest stage is cheapest; of these, one with the
    smallest sum of squares.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    dearest, _ = _best(sums, num, lambda cost: cost, max)
    _, begins = _best(sums, num, lambda cost: cost * cost if cost <= dearest else math.inf, operator.add)
    return begins


def _best(
    sums: Sequence[float],
    num: int,
    price: Callable[[float], float],
    together: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The lowest price of a cut, `together` of the prices of its stages, and where its stages begin."""
    length = len(sums) - 1
    # rows[stage][end]: the lowest price of the first `end` blocks in `stage` + 1 stages, and where the last one begins
    rows = [{end: (price(sums[end]), 0) for end in range(1, length + 1)}]
    for stage in range(1, num):
        rows.append(
            {
                end: min(
                    (together(rows[-1][begin][0], price(sums[end] - sums[begin])), begin) for begin in range(stage, end)
                )
                for end in range(stage + 1, length + 1)
            }
        )
    begins, end = [], length
    for row in reversed(rows):
        begins.append(row[end][1])
        end = begins[-1]
    return rows[-1][length][0], begins[::-1]
