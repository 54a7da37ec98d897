"""A rank that dies at any write, sync or rename of a save leaves the old checkpoint or the new one, never a mix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import killed_checkpoints, processes

EVERY = 1 if os.environ.get("HYPER_PARALLEL_CAMPAIGN") == "full" else 29
CASES = [
    killed_checkpoints.Case(num_ranks, victim, within, over_old)
    for num_ranks, victim in ((2, 0), (2, 1), (4, 0), (4, 3))
    for within in (False, True)
    for over_old in (False, True)
]


def test_a_kill_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    """Each file call in the full campaign; in every run each 29th, beginning at another one in each case."""
    (found,) = processes.pool("none", 1).run(
        killed_checkpoints.kill_everywhere, str(tmp_path), CASES, EVERY, 12, deadline_s=1200
    )
    assert list(found) == CASES
    for case, (calls, *outcomes) in found.items():
        assert int(calls.split()[0]) >= 10, case
        assert 1 <= outcomes.count("none left") <= 3, (
            case
        )  # a call more or less: a save waits for files it does not see
        if case.victim:  # only rank 0 commits, and not without the others
            assert outcomes.count("new") <= 4, (case, outcomes)
    kinds = {outcome for _, *outcomes in found.values() for outcome in outcomes}
    assert kinds == {"old", "new", "none left"}


def test_a_full_disk_on_one_rank_is_said_on_all_and_the_old_checkpoint_is_whole(tmp_path: Path) -> None:
    (said,) = processes.pool("none", 1).run(killed_checkpoints.with_full_disk, str(tmp_path), deadline_s=60)
    for victim in (0, 1):
        own, other = said[2 * victim + victim], said[2 * victim + 1 - victim]
        assert own.startswith("OSError")
        assert "No space left" in own
        assert "one that was there is unchanged" in own
        assert other.startswith("CommunicationError")
        assert f"failed on rank {victim}" in other
        assert "No space left" in other


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_whose_disk_hangs_is_named(victim: int, tmp_path: Path) -> None:
    (said,) = processes.pool("none", 1).run(killed_checkpoints.with_hanging_disk, str(tmp_path), victim, deadline_s=60)
    assert len(said) == 2
    for text in said:
        assert f"rank {victim} did not get on for" in text
