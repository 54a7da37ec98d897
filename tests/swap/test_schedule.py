"""Decisions about prefetch and tail: exhaustive on small cases."""

from __future__ import annotations

import itertools

from hyper_parallel.core.swap.schedule import deepened, loads_to_launch, rises, tail

SIZES = [sizes for length in range(5) for sizes in itertools.product((1, 2, 5), repeat=length)]


def test_loads_are_a_prefix_that_fits_and_is_as_long_as_it_can_be() -> None:
    for sizes, unclaimed, limit in itertools.product(SIZES, (0, 1, 3), (1, 4, 8)):
        chosen = loads_to_launch(list(enumerate(sizes)), unclaimed, limit)
        assert chosen == list(range(len(chosen)))
        total = unclaimed + sum(sizes[: len(chosen)])
        if len(chosen) > 1 or (chosen and unclaimed):
            assert total <= limit
        if len(chosen) < len(sizes):
            assert total > 0, "with nothing unclaimed, at least one is launched"
            assert total + sizes[len(chosen)] > limit


def test_one_larger_than_the_limit_is_loaded_alone() -> None:
    assert loads_to_launch([("big", 100), ("small", 1)], 0, 10) == ["big"]
    assert loads_to_launch([("big", 100)], 1, 10) == []


def test_nothing_is_looked_at_past_the_first_that_does_not_fit() -> None:
    seen = []

    def candidates():
        for name, size in (("a", 4), ("b", 9), ("c", 1)):
            seen.append(name)
            yield name, size

    assert loads_to_launch(candidates(), 0, 10) == ["a"]
    assert seen == ["a", "b"]


def test_the_depth_grows_by_half_up_to_the_limit_and_never_shrinks() -> None:
    depths = [1]
    while depths[-1] < 100 and len(depths) < 50:
        depths.append(deepened(depths[-1], 100))
    assert depths == sorted(depths)
    assert depths[-1] == 100
    assert deepened(100, 100) == 100
    assert deepened(40, 10) == 40


def test_the_tail_is_the_newest_part_that_fits() -> None:
    for sizes, room in itertools.product(SIZES, (0, 1, 4, 8, 100)):
        kept = tail([list(enumerate(sizes))], room, 1_000)
        assert kept == set(range(len(kept)))
        assert sum(sizes[: len(kept)]) <= room
        if len(kept) < len(sizes):
            assert sum(sizes[: len(kept) + 1]) > room


def test_an_older_group_belongs_to_the_tail_only_while_the_newer_ones_are_small() -> None:
    groups = [[("a", 3), ("b", 3)], [("c", 3)], [("d", 3)]]
    assert tail(groups, 100, 6) == {"a", "b"}, "its backward gives time to bring back the others"
    assert tail(groups, 100, 7) == {"a", "b", "c"}
    assert tail(groups, 100, 100) == {"a", "b", "c", "d"}
    assert tail(groups, 5, 100) == {"a"}, "and never past the room"


def test_a_rise_is_what_the_highest_level_from_there_on_is_above() -> None:
    for levels in SIZES:
        assert rises(levels) == [max(levels[index:]) - level for index, level in enumerate(levels)]
