"""A rank that stalls, dies or raises in a sharded step: the others end in time and name it, and the next job is right.

200 of them with `HYPER_PARALLEL_CAMPAIGN=full`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support import processes
from support.campaign import share
from support.sharding_failures import CALL_S, WAYS, Failure, fail, failure_of

GRACE_S = 5  # what the specification gives beyond the timeout
SAID = {"dies": "does not answer", "stalls": "did not call it", "raises": "did not call it"}


@pytest.mark.parametrize("seed", share(200, 4))
def test_the_others_end_in_time_and_name_the_rank_that_failed(seed: int, tmp_path: Path) -> None:
    failure = failure_of(seed)
    pool = processes.pool("torch", failure.size, call_s=CALL_S)
    if failure.way == "dies":
        with pytest.raises(processes.RankError) as caught:
            pool.run(fail, failure, str(tmp_path), deadline_s=60, grace_s=30)
        assert caught.value.failures == {failure.victim: "was ended by SIGKILL"}, caught.value
        results = caught.value.results
    else:
        results = dict(enumerate(pool.run(fail, failure, str(tmp_path), deadline_s=60, grace_s=30)))
        assert results[failure.victim][0] == "on purpose"
        assert [wrong for _, _, wrong in results.values()] == [[]] * failure.size, "the next job starts clean"
    for rank in set(range(failure.size)) - {failure.victim}:
        _check_words(failure, *results[rank][:2])


def _check_words(failure: Failure, text: str, elapsed_s: float) -> None:
    first = text.splitlines()[0]
    assert "did not finish: " in first, (failure, text)
    assert f"rank {failure.victim}" in first, (failure, text)
    assert SAID[failure.way] in first, (failure, text)
    assert elapsed_s < CALL_S + GRACE_S, (failure, elapsed_s, text)


def test_failures_are_of_all_kinds() -> None:
    for seeds in (range(200), range(4)):
        assert {failure_of(seed).way for seed in seeds} == set(WAYS)
