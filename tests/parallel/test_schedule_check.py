"""The check of a schedule: it says yes to what works and no to what does not, and where, and why.

Damaged schedules, all 100,000: HYPER_PARALLEL_CAMPAIGN=full python3 start.py test tests/parallel/test_schedule_check.py
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import replace

import pytest

import hyper_parallel as hp
from hyper_parallel import Schedule, ScheduleError
from hyper_parallel.core.parallel.pipeline.actions import Action
from support.campaign import share
from support.damaged_schedules import damaged, is_right, random_schedule
from support.schedule_player import Player


@pytest.mark.parametrize("part", range(4))
def test_of_damaged_schedules_the_check_says_what_running_them_shows(part: int) -> None:
    seen: Counter[tuple[str, bool]] = Counter()
    for number in share(100_000, 2_000)[part::4]:
        seed = random.Random(number)
        what, schedule = damaged(random_schedule(seed), seed)
        works = Player(schedule, number).works()
        seen[what, works] += 1
        assert is_right(schedule) == works, f"case {number}, {what}: running it says {works}\n{schedule}"
    for what in ("move", "swap", "swap neighbours"):  # some of these do no harm
        assert min(seen[what, True], seen[what, False]) > sum(seen.values()) / 100, seen
    # A stage may reduce what it has once more, or once less where more follows. Nothing else may come twice, or not at all.
    assert seen["double", True] + seen["delete", True] < sum(seen.values()) / 20, seen


def test_a_schedule_that_works_does_so_in_any_order_of_ranks_and_one_that_does_not_in_none() -> None:
    for number in range(40):
        seed = random.Random(number)
        schedule = random_schedule(seed)
        assert {Player(schedule, turn).works() for turn in range(5)} == {True}
        _, broken = damaged(schedule, seed)
        assert len({Player(broken, turn).works() for turn in range(5)}) == 1


# -- in words ------------------------------------------------------------------------------------------------------------------------

GOOD = [["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]


def without(rank: int, text: str) -> list[list[str]]:
    return [[each for each in actions if number != rank or each != text] for number, actions in enumerate(GOOD)]


@pytest.mark.parametrize(
    ("lists", "rank", "position", "words"),
    [
        (without(0, "0B0"), 0, -1, "rank 0: the backward of microbatch 0 at stage 0 is missing"),
        (without(1, "1RECV_F0"), 1, -1, "rank 1: receiving the input of microbatch 0 at stage 1 is missing"),
        (without(0, "0SEND_F0"), 0, -1, "rank 0: sending the result of microbatch 0 at stage 0 is missing"),
        ([["0F0", "0I0"]], 0, -1, "rank 0: the weight gradient of microbatch 0 at stage 0 is missing"),
        ([["0F0", "0W0"]], 0, -1, "rank 0: the input gradient of microbatch 0 at stage 0 is missing"),
        ([["0F0", "0B0", "0I0"]], 0, -1, "rank 0: the backward of microbatch 0 at stage 0 is there whole and in parts"),
        ([["0F0", "0F0", "0B0"]], 0, 1, "rank 0, position 1, 0F0: it is there already, at position 0"),
        ([["0B0", "0F0"]], 0, 0, "rank 0, position 0, 0B0: it needs the forward of microbatch 0 at stage 0 before it"),
        ([["0F0", "0W0", "0I0"]], 0, 1, "0W0: it needs the input gradient of microbatch 0 at stage 0 before it"),
        ([["0F0", "1B0"], ["1F0", "0B0"]], 0, 1, "rank 0, position 1, 1B0: microbatch 0 has stage 1 on rank 1"),
        ([["0UNSHARD", "0F0", "0RESHARD", "0B0"]], 0, 3, "0B0: the parameters of stage 0 are not unsharded here"),
        ([["0UNSHARD", "0UNSHARD", "0F0", "0B0"]], 0, 1, "0UNSHARD: stage 0 is unsharded already"),
        ([["0UNSHARD", "0F0", "0B0"]], 0, 3, "rank 0: stage 0 is still unsharded at the end"),
        ([["0F0", "0REDUCE_GRAD", "0B0"]], 0, 1, "0REDUCE_GRAD: stage 0 has no gradient that was not reduced"),
        ([["0F0", "0F1", "0B0", "0REDUCE_GRAD", "0B1"]], 0, 5, "rank 0: the gradients of stage 0 are not reduced at the end"),
        ([["0F0", "0B0", "0SEND_F0"]], 0, 2, "0SEND_F0: there is no stage 1 to exchange with"),
        ([["0F0", "0SEND_F0", "1F0", "1B0", "0B0"]], 0, 1, "0SEND_F0: stage 1 is on the same rank: nothing is sent"),
        ([["0F0", "(0B0;0F1)OVERLAP_F_B", "0B1"]], 0, 1, "a pair is a forward and a whole backward"),
        ([["(0F0;0B0)OVERLAP_F_B"]], 0, 0, "it needs the forward of microbatch 0 at stage 0 before it"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_rank_position_action_and_reason(
    lists: list[list[str]], rank: int, position: int, words: str
) -> None:
    with pytest.raises(ScheduleError) as raised:
        Schedule.of(lists).check()
    assert (raised.value.problems[0].rank, raised.value.problems[0].position) == (rank, position)
    assert words in str(raised.value)


def test_sends_that_wait_for_each_other_are_named_on_both_sides() -> None:
    # Both ranks send first: that ends where sends are buffered, and hangs where they are not.
    lists = [
        ["0F0", "0SEND_F0", "0F1", "0RECV_B0", "0SEND_F1", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", "1RECV_F1", "1SEND_B0", "1F1", "1B1", "1SEND_B1"],
    ]
    with pytest.raises(ScheduleError) as raised:
        Schedule.of(lists).check()
    assert str(raised.value).splitlines()[1:3] == [
        "- rank 0, position 3, 0RECV_B0: it waits forever for sending the gradient of microbatch 0 at stage 1: rank 1 stands at position 3, 1RECV_F1",
        "- rank 1, position 3, 1RECV_F1: it waits forever for sending the result of microbatch 1 at stage 0: rank 0 stands at position 3, 0RECV_B0",
    ]


def test_a_rank_that_waits_for_one_that_is_done_says_so() -> None:
    with pytest.raises(
        ScheduleError, match="it waits forever for forward of microbatch 0 at stage 0: rank 0 stands at position 0, 0B0"
    ):
        Schedule.of([["0B0", "0F0"], ["1F0", "1B0"]]).check()


def test_many_problems_are_counted_and_an_error_travels_between_processes() -> None:
    with pytest.raises(ScheduleError, match="- and 2 more") as raised:
        Schedule.of([["0F8"] + ["0B8"] * 8], name="mine").check()
    assert isinstance(raised.value, ValueError)
    copy = pickle.loads(pickle.dumps(raised.value))  # noqa: S301
    assert (str(copy), copy.problems) == (str(raised.value), raised.value.problems)


def test_what_cannot_run_is_neither_simulated_nor_lowered() -> None:
    broken = Schedule.of([["0B0", "0F0"]])
    for call in (broken.simulate, broken.lower):
        with pytest.raises(ScheduleError, match="it needs the forward"):
            call()


# -- what is no schedule -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([], "There is no forward"), ([["0B0"]], "There is no forward"), ([["0F1000", "0B0"]], "Microbatches are missing"),
        ([["0F0", "2F0"]], "no action of stage 1"), ([["0F0", "0B0garbage"]], "no action of a pipeline"), ([["0F"]], "no action of a pipeline"),
        ([["0UNSHARD1"]], "no action of a pipeline"), ([["(0F0)OVERLAP_F_B"]], "no action of a pipeline"), ([["-1F0"]], "no action of a pipeline"),
        ([["0F99999999999"]], "no action of a pipeline"), ([[3]], "This is no action"), (7, "no lists of actions"),
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_refused_in_words(lists: object, words: str) -> None:
    with pytest.raises(hp.HyperParallelError, match=words):
        Schedule.of(lists)  # type: ignore[arg-type]


def test_what_is_no_schedule_is_not_made_by_hand_either() -> None:
    good = hp.schedules.gpipe(2, 2)
    for parts in (
        (list(good.ranks), good.placement),
        (((3,),), good.placement),
        (good.ranks, None),
        (good.ranks, good.placement, 7),
        ((), good.placement),
    ):
        with pytest.raises(TypeError, match="no lists of actions|no schedule"):
            Schedule(*parts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no routes of microbatches"):
        replace(good.placement, routes=((0, 1), (0,)))


def test_actions_are_written_as_they_are_read() -> None:
    for text in [
        "0F0",
        "12B3",
        "2I0",
        "3W2",
        "0SEND_F1",
        "1RECV_F1",
        "1SEND_B1",
        "0RECV_B1",
        "0UNSHARD",
        "0RESHARD",
        "0REDUCE_GRAD",
    ]:
        assert str(Action.parse(f" {text} ")) == text
    pair = Action.parse("( 0F0; 1B0 )OVERLAP_F_B")
    assert (str(pair), [part.kind.name for part in pair.parts]) == ("(0F0;1B0)OVERLAP_F_B", ["FORWARD", "BACKWARD"])


# -- what is kept --------------------------------------------------------------------------------------------------------------------


def test_what_stages_keep_can_be_given_in_bytes_and_partly_freed_by_input_gradients() -> None:
    schedule = hp.schedules.zb_h1(2, 4)
    assert schedule.check().peak == (2.0, 2.0)
    assert schedule.check(activations=[100, 70]).peak == (200.0, 140.0)
    # With the last rank one microbatch behind with its weights: one whole, and a quarter of another one.
    assert schedule.check(activations=[100, 80], after_input_grad=0.25).peak == (200.0, 100.0)
    assert schedule.simulate(activations=[100, 80], after_input_grad=0.25).peak == (200.0, 100.0)
    for wrong in ([1.0], [1.0, -1.0], [1.0, "many"], 3, [1.0, float("nan")]):
        with pytest.raises(ValueError, match="one number for each stage"):
            schedule.check(activations=wrong)  # type: ignore[arg-type]
    for wrong in (2, -0.5, None, "half"):
        with pytest.raises(ValueError, match="part of a whole"):
            schedule.check(after_input_grad=wrong)  # type: ignore[arg-type]


def test_a_report_says_what_was_proved() -> None:
    assert str(hp.schedules.zbv(2, 4).lower(zero=2).check()).splitlines() == [
        "2 ranks, 4 stages, 4 microbatches: complete, in order, free of deadlock",
        "most microbatches kept at rank: 0: 2, 1: 2",
        "transfers: 16, also if every send blocks until it is received",
        "most stages unsharded at rank: 0: 2, 1: 2",
    ]
