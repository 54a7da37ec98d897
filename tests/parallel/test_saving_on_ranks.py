"""Checkpoints on real ranks: what one plan saves, every other plan loads, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hyper_parallel as hp
from support import processes

pytest.importorskip("torch")

from support import saving_programs as programs

DEADLINE_S = 120


def run(number: int, function: Any, *arguments: object, framework: str = "torch") -> list[Any]:
    return processes.pool(framework, number).run(function, *arguments, deadline_s=DEADLINE_S)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each plan on each number of ranks."""
    folder = tmp_path_factory.mktemp("saved")
    for number, plans in programs.ON_RANKS.items():
        run(number, programs.save_all, str(folder), plans)
    return folder


@pytest.mark.parametrize("number", programs.ON_RANKS)
def test_every_plan_loads_what_every_plan_saved(number: int, saved: Path) -> None:
    """16 plans times 16: dp, tp, pp, fsdp2 and their products, on 1 to 4 ranks, uneven."""
    for wrong in run(number, programs.load_all, str(saved), programs.ON_RANKS[number]):
        assert wrong == []


def test_every_checkpoint_is_whole(saved: Path) -> None:
    assert len([hp.verify(path) for path in saved.iterdir()]) == sum(map(len, programs.ON_RANKS.values()))


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_a_load_that_fails_on_one_rank_leaves_the_models_of_all(wrong_rank: int, saved: Path) -> None:
    found = run(2, programs.load_with_one_wrong_rank, str(saved), wrong_rank)
    for rank, (heard, is_unchanged, next_time) in enumerate(found):
        assert is_unchanged
        assert next_time == ("", "")
        kind, text = heard
        assert kind == ("ArgumentError" if rank == wrong_rank else "CommunicationError"), heard
        assert "has tensors that the checkpoint has not" in text or f"failed on rank {wrong_rank}" in text


def test_ranks_that_disagree_are_told_so_and_nothing_is_saved(tmp_path: Path) -> None:
    words = [
        "same `extra`",
        "same folder",
        "different tensors of one name",
        "plain values",
        "which framework its argument belongs to",
        "",
    ]
    for heard in run(2, programs.save_unlike_others, str(tmp_path)):
        for (kind, text), expected in zip(heard, words, strict=True):
            assert expected in text, heard
            assert bool(kind) == bool(expected)
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named_and_the_next_save_works(
    absent: int, in_background: bool, tmp_path: Path
) -> None:
    found = run(3, programs.save_without, str(tmp_path), absent, in_background)
    for rank, (kind, text) in enumerate(found):
        assert kind == ("" if rank == absent else "CommunicationError")
        assert rank == absent or f"rank {absent} did not get on" in text
    assert [path.name for path in tmp_path.iterdir()] == ["second"]


def test_a_save_does_not_meet_a_load(tmp_path: Path) -> None:
    for kind, text in run(2, programs.save_and_load_at_once, str(tmp_path)):
        assert (kind, "Ranks save and load at the same time" in text) == ("CommunicationError", True)


def test_two_weights_of_two_stages_under_one_name_are_refused(tmp_path: Path) -> None:
    for kind, text in run(2, programs.stages_with_one_name_for_two, str(tmp_path)):
        assert "Two stages of a pipeline call two weights by one name" in text, kind


def test_a_weight_that_stages_share_is_saved_once(tmp_path: Path) -> None:
    assert run(2, programs.tied_stages, str(tmp_path)) == [[], []]
    assert hp.verify(tmp_path / "a").num_tensors == 3 * 4  # three weights; two moments and a count of steps for each


def test_training_goes_on_from_a_checkpoint_on_two_ranks(tmp_path: Path) -> None:
    assert run(2, programs.train_on_after_load, str(tmp_path)) == [[], []]


def test_saves_in_the_background_run_beside_collectives(tmp_path: Path) -> None:
    assert run(2, programs.save_in_background_between_collectives, str(tmp_path)) == [[], []]


def test_what_one_framework_saves_the_other_loads_on_other_ranks(tmp_path: Path) -> None:
    """MindSpore on 2 ranks, PyTorch on 1, and MindSpore again: plain, and split along two dims, with nn.Adam."""
    pytest.importorskip("mindspore")
    from support import mindspore_saving

    ours, theirs = tmp_path / "saved", tmp_path / "back"
    run(2, mindspore_saving.save_all, str(ours), framework="mindspore")
    assert run(2, mindspore_saving.load_all, str(ours), framework="mindspore") == [[], []]
    assert run(1, mindspore_saving.load_on_pytorch, str(ours), str(theirs)) == [[]]
    assert run(2, mindspore_saving.load_all, str(theirs), framework="mindspore") == [[], []]
