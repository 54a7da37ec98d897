"""When things happen, and what is kept meanwhile: worked by hand, and against each other."""

from __future__ import annotations

import itertools
import random

import pytest

import hyper_parallel as hp
from hyper_parallel import Schedule


def times(schedule: Schedule, costs: dict[str, object]) -> list[list[tuple[str, float, float]]]:
    return [[(str(bar.action), bar.start, bar.end) for bar in bars] for bars in schedule.simulate(costs).bars]  # type: ignore[arg-type]


def test_a_step_of_two_ranks_is_as_it_is_by_hand() -> None:
    assert times(hp.schedules.one_f_one_b(2, 2), {"F": 1, "B": 2}) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)],
        [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)],
    ]
    timeline = hp.schedules.one_f_one_b(2, 2).simulate({"F": 1, "B": 2})
    assert (timeline.time, timeline.busy, timeline.idle, timeline.bubble) == (9.0, (6.0, 6.0), (3.0, 3.0), 0.5)
    assert timeline.memory == (
        ((0.0, 0.0), (0.0, 1.0), (1.0, 2.0), (6.0, 1.0), (9.0, 0.0)),
        ((0.0, 0.0), (1.0, 1.0), (4.0, 0.0), (4.0, 1.0), (7.0, 0.0)),
    )


def test_transfers_take_time_beside_the_compute_and_one_after_the_other_on_a_line() -> None:
    costs = {"F": 1, "B": 2, "SEND_F": 3, "SEND_B": 0.5}
    assert times(hp.schedules.gpipe(2, 2), costs) == times(hp.schedules.gpipe(2, 2).lower(), costs) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 10.5, 12.5), ("0B1", 12.5, 14.5)],
        [("1F0", 4, 5), ("1F1", 7, 8), ("1B0", 8, 10), ("1B1", 10, 12)],
    ]  # fmt: skip


def test_stages_may_differ_and_gathers_and_reductions_take_time() -> None:
    schedule = hp.schedules.one_f_one_b(2, 1)
    assert times(schedule, {"F": [1, 4], "I": [1, 2], "W": 1}) == [
        [("0F0", 0, 1), ("0B0", 8, 10)],
        [("1F0", 1, 5), ("1B0", 5, 8)],
    ]
    timeline = schedule.lower(zero=2).simulate({"UNSHARD": 2, "REDUCE_GRAD": 5})
    assert timeline.bars[0][0].start == 2  # its parameters are whole then
    assert timeline.time == timeline.bars[0][-1].end + 5  # the last gradient is reduced


def test_a_pair_takes_what_both_take_or_what_is_said() -> None:
    schedule = Schedule.of([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]])
    assert schedule.simulate({"F": 1, "I": 2, "W": 3}).time == 1 + 6 + 5
    assert schedule.simulate({"F": 1, "I": 2, "W": 3, "OVERLAP_F_B": 5.5}).time == 1 + 5.5 + 5
    assert schedule.simulate({"F": 1}).peak == (2.0,)


def test_costs_that_are_left_out_follow_from_the_rest() -> None:
    schedule = Schedule.of([["0F0", "0F1", "0I0", "0W0", "0B1"]])
    assert schedule.simulate().time == 1 + 1 + 1 + 1 + 2
    assert schedule.simulate({"B": 6}).time == 1 + 1 + 3 + 3 + 6
    assert schedule.simulate({"I": 4}).time == 1 + 1 + 4 + 1 + 5
    assert schedule.simulate({"F": 0, "B": 0}).bubble == 0


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"G": 1}, "nothing of this kind"), ({"RECV_F": 1}, "nothing of this kind"), ({"F": -1}, "no cost of F"), ({"F": float("nan")}, "no cost of F"),
        ({"F": [1]}, "no cost of F"), ({"F": "fast"}, "no cost of F"), ({"W": None}, "no cost of W"), ({"I": float("inf")}, "no cost of I"),
        ([1, 2], "Costs are a table"),
    ],
)  # fmt: skip
def test_what_is_no_cost_is_refused(costs: object, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        hp.schedules.gpipe(2, 2).simulate(costs)  # type: ignore[arg-type]


def test_lowered_or_not_nothing_starts_early_and_every_rank_is_busy_as_long() -> None:
    for seed in range(60):
        numbers = random.Random(seed)
        name, p, m = (
            numbers.choice(["gpipe", "one_f_one_b", "zb_h1", "zbv", "dualpipe_v"]),
            numbers.randint(1, 4),
            numbers.randint(8, 12),
        )
        schedule: Schedule = getattr(hp.schedules, name)(p, m)
        costs = {
            kind: [numbers.uniform(0, 3) for _ in range(schedule.num_stages)]
            for kind in ("F", "I", "W", "SEND_F", "SEND_B")
        }
        plain, lowered = schedule.simulate(costs), schedule.lower(zero=numbers.randint(0, 3)).simulate(costs)
        assert (lowered.bars, lowered.peak) == (plain.bars, plain.peak), (seed, name, p, m)
        ends = {str(part): bar.end for bars in plain.bars for bar in bars for part in bar.action.parts or (bar.action,)}
        for bars in plain.bars:
            assert all(before.end <= after.start for before, after in itertools.pairwise(bars))
            for bar in bars:
                for part in bar.action.parts or (bar.action,):
                    if part.kind.value == "F" and part.stage:
                        assert bar.start >= ends[f"{part.stage - 1}F{part.microbatch}"]
