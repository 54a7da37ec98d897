"""Random models, units and steps on ranks train as in one process: 1,000 with `HYPER_PARALLEL_CAMPAIGN=full`."""

from __future__ import annotations

from collections import Counter

import pytest

from support import processes
from support.campaign import share
from support.sharding_random import FEATURES, many, wrong_of

DEADLINE_S = 300
AT_ONCE = 20
ALL = {2: 700, 4: 300}
IN_EVERY_RUN = {2: 14, 4: 6}


def _without_what_does_not_matter(seed: int, size: int) -> tuple[set[str], list[str]]:
    """Leave features out as long as the program still fails."""
    pool = processes.pool("torch", size)
    without: set[str] = set()
    wrong = ["it fails together with others only"]
    for feature in [None, *FEATURES]:
        tried = without | ({feature} if feature else set())
        try:
            found = [wrong for wrong, _ in pool.run(wrong_of, seed, size, tried, deadline_s=20)]
        except processes.RankError as error:
            found = [[str(error)[:500]]]
        if any(found):
            without, wrong = tried, next(each for each in found if each)
    return without, wrong


@pytest.mark.parametrize("size", [2, 4])
def test_random_sharded_models_train_as_one_process(size: int) -> None:
    seeds = share(ALL[size], IN_EVERY_RUN[size])
    met: Counter[str] = Counter()
    for start in range(0, len(seeds), AT_ONCE):
        some = seeds[start : start + AT_ONCE]
        try:
            answers = processes.pool("torch", size).run(many, some, size, deadline_s=DEADLINE_S)
        except processes.RankError as error:
            pytest.fail(f"among the seeds {some}: {error}")
        for failed, features in answers:
            met += features
            for seed in failed:
                without, wrong = _without_what_does_not_matter(seed, size)
                pytest.fail(f"seed {seed} on {size} ranks, also without {sorted(without)}: {wrong[:3]}")
    if len(seeds) == ALL[size]:
        assert not {feature for feature in FEATURES if not met[feature]} - ({"copies"} if size == 2 else set())
