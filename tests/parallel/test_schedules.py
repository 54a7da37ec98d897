"""Every schedule that has a name: what it is defined for, that it is proved there, and that its figures are the published ones.

All of them, p 1 to 16, m 1 to 64, v 1 to 4: HYPER_PARALLEL_CAMPAIGN=full python3 start.py test tests/parallel/test_schedules.py
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest

import hyper_parallel as hp
from hyper_parallel import Schedule
from hyper_parallel.core.parallel.pipeline.actions import Kind
from support.campaign import share
from support.schedule_player import Player

ONE_EACH = ["gpipe", "one_f_one_b", "zb_h1", "zbv", "dualpipe", "dualpipe_v"]
Case = tuple[str, tuple[int, ...]]


def is_defined(name: str, p: int, m: int) -> bool:
    if name == "dualpipe":
        return p % 2 == 0 and m % 2 == 0 and m >= 2 * p
    return name != "dualpipe_v" or m >= 2 * p


def cases(most_ranks: int, most_microbatches: int) -> Iterator[Case]:
    for p in range(1, most_ranks + 1):
        for m in range(1, most_microbatches + 1):
            yield from ((name, (p, m)) for name in ONE_EACH if is_defined(name, p, m))
            yield from (("interleaved", (p, m, v)) for v in range(1, 5))


def made(case: Case) -> Schedule:
    return getattr(hp.schedules, case[0])(*case[1])


def bubble(name: str, p: int, m: int, v: int = 1) -> Fraction | None:
    """Idle time over a rank's work with F = I = W; None where there is no formula."""
    if name == "dualpipe":
        return Fraction(p - 2, 3 * m)
    found = {"gpipe": (1, 1), "one_f_one_b": (1, 1), "interleaved": (v, p), "zb_h1": (3, p), "zbv": (6, 2 * p - 1)}
    part, from_m = found.get(name, (3, 1))
    return Fraction(p - 1, part * m) if m >= from_m or (v == 1 and name == "interleaved") else None


def peaks(name: str, p: int, m: int, v: int = 1) -> list[Fraction] | None:
    """Microbatches that each rank keeps, in units of a rank's layers; None where there is no formula."""
    if name == "one_f_one_b" or (v == 1 and name == "interleaved"):
        return [Fraction(min(m, p - rank)) for rank in range(p)]
    if name == "interleaved":
        # Of m = p microbatches some ranks have them all at once.
        return [min(Fraction(m), p + Fraction(p - 1 - 2 * rank, v)) for rank in range(p)] if m % p == 0 else None
    if name == "zbv" and m < 2 * p - 1:
        return None
    return [
        {"gpipe": m, "zb_h1": min(m, p), "zbv": p, "dualpipe": p + 1, "dualpipe_v": p + Fraction(1, 2)}[name]
        + Fraction(0)
    ] * p


ALL = list(cases(16, 64))
assert len(ALL) == 9_152
STRIDE = 3_571  # a prime: the share of every run goes over all names and sizes


@pytest.mark.parametrize("part", range(8))
def test_every_schedule_is_proved_and_has_the_published_figures(part: int) -> None:
    for number in share(len(ALL), 56)[part::8]:
        prove(ALL[number * STRIDE % len(ALL)], zero=number % 4)


def test_every_small_schedule_is_proved_and_runs_with_blocking_sends() -> None:
    for number, case in enumerate(cases(4, 5)):
        prove(case, zero=number % 4)
        schedule = made(case)
        assert Player(schedule, number).works(), case
        assert Player(schedule.lower(zero=number % 4), number).works(), case


def prove(case: Case, zero: int) -> None:
    schedule = made(case)
    report, timeline = schedule.check(), schedule.simulate({"F": 1, "I": 1, "W": 1})
    assert timeline.peak == pytest.approx(report.peak, abs=1e-9), case
    wanted, kept = bubble(case[0], *case[1]), peaks(case[0], *case[1])
    assert wanted is None or timeline.bubble == pytest.approx(float(wanted), abs=1e-9), case
    assert kept is None or report.peak == pytest.approx([*map(float, kept)], abs=1e-9), case
    lowered = schedule.lower(zero=zero)
    assert lowered.check().peak == report.peak, case
    assert lowered.compute_only().ranks == schedule.ranks, case


# The table of the facts, written down: p, m, v -> idle time over work.
TABLE = {
    "gpipe": {(4, 8): 0.375, (4, 16): 0.188, (8, 16): 0.438, (8, 32): 0.219},
    "one_f_one_b": {(4, 8): 0.375, (4, 16): 0.188, (8, 16): 0.438, (8, 32): 0.219},
    "interleaved": {(4, 8, 2): 0.188, (4, 16, 2): 0.094, (8, 16, 2): 0.219, (8, 32, 2): 0.109, (4, 8, 4): 0.094, (8, 32, 4): 0.055},
    "zb_h1": {(4, 8): 0.125, (4, 16): 0.062, (8, 16): 0.146, (8, 32): 0.073},
    "zbv": {(4, 8): 0.062, (4, 16): 0.031, (8, 16): 0.073, (8, 32): 0.036},
    "dualpipe_v": {(4, 8): 0.125, (4, 16): 0.062, (8, 16): 0.146, (8, 32): 0.073},
}  # fmt: skip


def test_idle_times_are_those_of_the_published_table() -> None:
    for name, row in TABLE.items():
        for sizes, value in row.items():
            assert made((name, sizes)).simulate().bubble == pytest.approx(value, abs=6e-4), (name, sizes)


@pytest.mark.parametrize(
    ("p", "m", "pair", "time"),
    [(4, 16, 1.0, 51.0), (4, 16, 0.95, 49.05), (4, 16, 0.9, 47.1), (8, 64, 1.0, 199.0), (8, 64, 0.95, 190.2), (8, 64, 0.9, 181.3)],
)  # fmt: skip
def test_what_overlapping_is_worth_is_what_was_seen(p: int, m: int, pair: float, time: float) -> None:
    # Half a rank's layers at each of two stages.
    timeline = hp.schedules.dualpipe_v(p, m).simulate({"F": 0.5, "I": 0.5, "W": 0.5, "OVERLAP_F_B": 1.5 * pair})
    assert timeline.time == pytest.approx(time, abs=0.06)


def test_most_kept_at_four_ranks_is_what_was_seen() -> None:
    assert hp.schedules.interleaved(4, 8, 2).check().peak == (5.5, 4.5, 3.5, 2.5)
    assert hp.schedules.interleaved(4, 8, 4).check().peak[0] == 4.75
    assert hp.schedules.interleaved(8, 16, 4).check().peak[::7] == (9.75, 6.25)
    assert set(hp.schedules.dualpipe(4, 8).check().peak) == {5.0}


# -- what is not defined -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes", "nearest"),
    [
        ("dualpipe", (3, 12), "p=2 or p=4"), ("dualpipe", (1, 4), "p=2"), ("dualpipe", (4, 7), "m=8"),
        ("dualpipe", (4, 9), "m=8 or m=10"), ("dualpipe", (4, 1), "m=8"), ("dualpipe_v", (4, 7), "m=8, or the schedule zbv"),
        ("dualpipe_v", (1, 1), "m=2"),
    ],
)  # fmt: skip
def test_a_schedule_that_is_not_defined_names_the_nearest_that_is(
    name: str, sizes: tuple[int, ...], nearest: str
) -> None:
    with pytest.raises(hp.HyperParallelError, match=f"{name} is not defined for this") as raised:
        made((name, sizes))
    assert isinstance(raised.value, ValueError)
    assert f"The nearest that works: {nearest}" in str(raised.value)


@pytest.mark.parametrize("name", [*ONE_EACH, "interleaved"])
@pytest.mark.parametrize("wrong", [0, -1, 2.0, "4", None, True])
def test_what_is_no_number_of_things_is_refused(name: str, wrong: object) -> None:
    for at in range(3 if name == "interleaved" else 2):
        sizes = [4, 8, 2][: 3 if name == "interleaved" else 2]
        sizes[at] = wrong  # type: ignore[call-overload]
        with pytest.raises((ValueError, TypeError), match="is a number of things"):
            getattr(hp.schedules, name)(*sizes)


@pytest.mark.parametrize("name", [*ONE_EACH, "interleaved"])
def test_a_schedule_that_no_memory_holds_is_refused(name: str) -> None:
    for sizes in ((10**30, 4), (4, 2**62), (4_000, 4_000)):
        with pytest.raises(ValueError, match="too large to be made"):
            getattr(hp.schedules, name)(*sizes, *([2] if name == "interleaved" else []))


# -- shapes --------------------------------------------------------------------------------------------------------------------------


def test_one_rank_runs_its_stages_one_after_the_other_and_is_never_idle() -> None:
    for case in [
        ("gpipe", (1, 3)),
        ("one_f_one_b", (1, 3)),
        ("interleaved", (1, 3, 3)),
        ("zb_h1", (1, 3)),
        ("zbv", (1, 3)),
        ("dualpipe_v", (1, 3)),
    ]:
        assert made(case).simulate().bubble == 0, case
        assert made(case).lower().check().num_transfers == 0, case


def test_stages_lie_where_the_schedules_say() -> None:
    assert hp.schedules.interleaved(4, 4, 2).placement.routes == ((0, 1, 2, 3, 0, 1, 2, 3),)
    assert hp.schedules.zbv(4, 4).placement.routes == ((0, 1, 2, 3, 3, 2, 1, 0),)
    assert hp.schedules.dualpipe_v(4, 8).placement.routes == hp.schedules.zbv(4, 8).placement.routes
    both = hp.schedules.dualpipe(4, 8).placement
    assert both.routes == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert both.route_of == (0, 0, 0, 0, 1, 1, 1, 1)
    assert [both.stages_on(rank) for rank in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]


def test_a_schedule_and_its_actions_do_not_change() -> None:
    schedule = hp.schedules.zbv(2, 3)
    assert schedule == hp.schedules.zbv(2, 3)
    assert hash(schedule) == hash(hp.schedules.zbv(2, 3))
    with pytest.raises(AttributeError):
        schedule.name = "another"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        schedule.ranks[0][0].stage = 3  # type: ignore[misc]


def test_where_it_is_seen_from_actions_the_placement_is_that_of_the_generator() -> None:
    for case in cases(4, 8):
        schedule = made(case)
        assert Schedule.of(schedule.ranks).placement == schedule.placement, case


# -- lowering ------------------------------------------------------------------------------------------------------------------------


def count(schedule: Schedule, kind: Kind) -> int:
    return sum(action.kind is kind for actions in schedule.ranks for action in actions)


@pytest.mark.parametrize(("zero", "unshards", "reductions"), [(0, 0, 8), (1, 8, 8), (2, 8, 64)])
def test_gathers_and_reductions_are_as_many_as_the_stage_of_zero_says(
    zero: int, unshards: int, reductions: int
) -> None:
    lowered = hp.schedules.interleaved(4, 8, 2).lower(zero=zero)
    assert count(lowered, Kind.UNSHARD) == count(lowered, Kind.RESHARD) == unshards
    assert count(lowered, Kind.REDUCE) == reductions
    assert count(lowered, Kind.SEND_F) == count(lowered, Kind.RECV_F) == 7 * 8


def test_with_zero_3_as_many_stages_are_unsharded_as_are_used_and_prefetched() -> None:
    schedule = hp.schedules.interleaved(2, 8, 4)
    assert schedule.lower(zero=2).check().most_unsharded == (4, 4)
    for prefetch in range(3):
        assert schedule.lower(zero=3, prefetch=prefetch).check().most_unsharded == (1 + prefetch,) * 2
    pairs = hp.schedules.dualpipe_v(2, 8).lower(zero=3, prefetch=0)
    assert pairs.check().most_unsharded == (2, 2)


def test_what_was_lowered_can_be_lowered_again_another_way() -> None:
    schedule = hp.schedules.zbv(3, 5)
    assert schedule.lower(zero=3).lower(zero=1) == schedule.lower(zero=1)


def test_a_gradient_is_sent_before_gradients_are_reduced() -> None:
    last = hp.schedules.one_f_one_b(2, 1).lower(zero=2).ranks[1]
    assert [str(action) for action in last] == [
        "1UNSHARD",
        "1RECV_F0",
        "1F0",
        "1B0",
        "1RESHARD",
        "1SEND_B0",
        "1REDUCE_GRAD",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero": 4}, "shard"),
        ({"zero": "1"}, "shard"),
        ({"zero": 3, "prefetch": -1}, "prefetch"),
        ({"prefetch": None}, "prefetch"),
    ],
)
def test_a_way_to_lower_that_there_is_not_is_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hp.schedules.gpipe(2, 2).lower(**options)
