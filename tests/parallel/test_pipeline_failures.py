"""One rank of a pipeline is killed, stalls or raises, anywhere: every rank ends in time, and says for whom it waited.

All 200: HYPER_PARALLEL_CAMPAIGN=full python3 start.py test tests/parallel/test_pipeline_failures.py
"""

from __future__ import annotations

import re

import pytest

from support import pipeline_failures as failures
from support import processes
from support.campaign import share

GRACE_S = 5  # to ask the others why, beyond the time that a call waits


@pytest.mark.parametrize("seed", share(200, 6))
def test_every_rank_ends_in_time_and_names_whom_it_waited_for(seed: int) -> None:
    failure = failures.failure_of(seed)
    pool = processes.pool("torch", failure.num_ranks, call_s=failures.CALL_S)
    died: dict[int, str] = {}
    try:
        found = dict(enumerate(pool.run(failures.run, seed, deadline_s=40, grace_s=20)))
    except processes.RankError as error:
        found, died = error.results, error.failures
    finally:
        pool.close()  # its group is broken
    if failure.where == "loss" and not (died or found[failure.victim][2]):
        assert all(text == "" for text, _, _ in found.values()), (failure, found)  # this rank makes no loss
        return
    assert died == ({failure.victim: "was ended by SIGKILL"} if failure.way == "dies" else {}), failure
    longest_s = (failures.STALL_S if failure.way == "stalls" else failures.CALL_S) + GRACE_S
    for rank, (text, seconds, has_come) in found.items():
        assert seconds < longest_s + GRACE_S, (failure, rank, seconds)
        if rank != failure.victim:
            named = {
                int(number) for ranks in re.findall(r"ranks? ([\d, ]+)", text) for number in re.findall(r"\d", ranks)
            }
            assert text.startswith("CommunicationError"), (failure, rank, text)
            assert named - {rank}, (failure, rank, text)
        else:
            assert has_come, failure
            assert text.startswith("ValueError: on purpose") if failure.way == "raises" else text, (failure, text)
