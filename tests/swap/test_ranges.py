"""Ranges: every answer of the allocator is compared with a map that has one entry per byte."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.swap.ranges import Piece, Pieces, RangeAllocator

FREE = None


class ByteMap:
    """The model: who owns each byte, and whose tags lie on it."""

    def __init__(self, ranges: RangeAllocator[str], dead: set[str]) -> None:
        self.ranges = ranges
        self.dead = dead
        self.owner: dict[tuple[int, int], int | None] = {}
        self.tags: dict[tuple[int, int], set[str]] = {}
        self.live: dict[int, Pieces] = {}
        self.numbers = itertools.count()

    def add_slab_part(self, num_bytes: int) -> None:
        slab_part = self.ranges.add_slab_part(num_bytes)
        for offset in range(num_bytes):
            self.owner[slab_part, offset] = FREE
            self.tags[slab_part, offset] = set()

    def take(self, num_bytes: int) -> int | None:
        size = self.ranges.aligned(num_bytes)
        found = self.ranges.take(num_bytes)
        if found is None:
            assert not self.fits(size), f"{size} bytes fit: {self.runs()}"
            return None
        pieces, tags = found
        assert sum(piece.num_bytes for piece in pieces) == size
        assert len(pieces) <= self.ranges.max_parts
        assert all(piece.num_bytes >= self.ranges.min_part_bytes for piece in pieces[:-1])
        number = next(self.numbers)
        expected: set[str] = set()
        for place in _places(pieces):
            assert self.owner[place] is FREE
            self.owner[place] = number
            expected |= self.tags[place]
        assert all(piece.offset % self.ranges.alignment == 0 for piece in pieces)
        assert set(tags) >= expected - self.dead, "an event of an earlier user is lost"
        assert not set(tags) & self.dead, "an event that is over is still carried"
        assert len(set(tags)) == len(tags)
        self.live[number] = pieces
        return number

    def give(self, number: int, tags: tuple[str, ...] = ()) -> None:
        pieces = self.live.pop(number)
        self.ranges.give(pieces, tags)
        for place in _places(pieces):
            self.owner[place] = FREE
            self.tags[place] = set(tags)

    def runs(self) -> list[int]:
        """Lengths of free stretches, the longest first."""
        lengths: list[int] = []
        before: tuple[int, int] | None = None
        for place in sorted(self.owner):
            if self.owner[place] is not FREE:
                before = None
                continue
            if before == (place[0], place[1] - 1):
                lengths[-1] += 1
            else:
                lengths.append(1)
            before = place
        return sorted((length // self.ranges.alignment * self.ranges.alignment for length in lengths), reverse=True)

    def fits(self, size: int) -> bool:
        for num_parts, run in enumerate(self.runs(), 1):
            if run >= size:
                return True
            if num_parts == self.ranges.max_parts or run < self.ranges.min_part_bytes:
                return False
            size -= run
        return False

    def check(self) -> None:
        assert self.ranges.free_bytes == sum(owner is FREE for owner in self.owner.values())


def _places(pieces: Pieces) -> Iterator[tuple[int, int]]:
    for piece in pieces:
        for offset in range(piece.offset, piece.offset + piece.num_bytes):
            yield piece.slab_part, offset


@pytest.mark.parametrize("max_parts", [1, 2])
def test_every_short_sequence_of_requests_agrees_with_the_byte_map(max_parts: int) -> None:
    def follow(choices: tuple[int, ...]) -> None:
        model = ByteMap(RangeAllocator(max_parts=max_parts), set())
        model.add_slab_part(4)
        model.add_slab_part(3)
        for choice in choices:
            if choice < 4:
                model.take(choice + 1)
            elif len(model.live) > choice - 4:
                model.give(sorted(model.live)[choice - 4])
            model.check()

    for choices in itertools.product(range(7), repeat=5):
        follow(choices)


@pytest.mark.parametrize("seed", range(40))
def test_random_sequences_agree_with_the_byte_map(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    dead: set[str] = set()
    ranges: RangeAllocator[str] = RangeAllocator(
        rng.choice([1, 4]),
        lambda tag: tag not in dead,
        max_parts=rng.choice([1, 1, 2, 5]),
        min_part_bytes=rng.choice([1, 8]),
    )
    model = ByteMap(ranges, dead)
    sizes = [rng.randint(1, 40) for _ in range(5)]  # a few sizes again and again, as in training, and any now and then
    for step in range(400):
        kind = rng.random()
        if step == 0 or kind < 0.02:
            model.add_slab_part(rng.randint(20, 90))
        elif kind < 0.55:
            model.take(rng.choice(sizes) if rng.random() < 0.8 else rng.randint(1, 60))
        elif model.live:
            tags = tuple(f"{step}.{n}" for n in range(rng.randint(0, 2)))
            model.give(rng.choice(sorted(model.live)), tags)
            dead.update(tag for tag in tags if rng.random() < 0.5)
        model.check()
    for number in sorted(model.live):
        model.give(number)
    assert ranges.free_slab_parts() == sorted({slab_part for slab_part, _ in model.owner})
    for slab_part in ranges.free_slab_parts():
        ranges.remove_slab_part(slab_part)  # finds it in one piece, or fails
    assert ranges.free_bytes == 0


def test_the_smallest_range_that_fits_is_cut() -> None:
    ranges: RangeAllocator[str] = RangeAllocator()
    for num_bytes in (50, 20, 30):
        ranges.add_slab_part(num_bytes)
    assert ranges.take(25) == ((Piece(2, 0, 25),), ())
    assert ranges.take(5) == ((Piece(2, 25, 5),), ())
    assert ranges.take(20) == ((Piece(1, 0, 20),), ())


def test_the_same_sizes_in_any_order_find_room_in_the_same_regions() -> None:
    ranges: RangeAllocator[str] = RangeAllocator()
    sizes = [7, 3, 5, 3, 7, 1]
    for size in sizes:  # each in a slab part of its own: a wrong cut cannot be made good
        ranges.add_slab_part(size)
    taken = [ranges.take(size) for size in sizes]
    for order in itertools.permutations(range(len(sizes))):
        for found in taken:
            assert found is not None
            ranges.give(found[0])
        taken = [ranges.take(sizes[index]) for index in order]
        assert None not in taken


def test_a_request_is_met_by_several_ranges_only_if_none_is_large_enough() -> None:
    ranges: RangeAllocator[str] = RangeAllocator(max_parts=3)
    for num_bytes in (10, 8, 6, 4):
        ranges.add_slab_part(num_bytes)
    assert ranges.take(9) == ((Piece(0, 0, 9),), ())
    # the largest first, and the rest from the smallest range that has it
    assert ranges.take(13) == ((Piece(1, 0, 8), Piece(2, 0, 5)), ())
    assert ranges.take(7) is None  # 4 + 1 + 1 bytes are left
    assert ranges.take(6) == ((Piece(3, 0, 4), Piece(2, 5, 1), Piece(0, 9, 1)), ())


def test_a_part_is_not_smaller_than_allowed() -> None:
    ranges: RangeAllocator[str] = RangeAllocator(max_parts=3, min_part_bytes=5)
    ranges.add_slab_part(4)
    ranges.add_slab_part(4)
    assert ranges.take(5) is None
    ranges.add_slab_part(5)
    assert ranges.take(6) == ((Piece(2, 0, 5), Piece(0, 0, 1)), ())


def test_tags_of_joined_ranges_are_all_carried_and_each_once() -> None:
    ranges: RangeAllocator[str] = RangeAllocator()
    ranges.add_slab_part(3)
    taken = [ranges.take(1), ranges.take(1), ranges.take(1)]
    for found, tags in zip(taken, [("a", "b"), ("b",), ("c",)], strict=True):
        assert found is not None
        ranges.give(found[0], tags)
    found = ranges.take(2)
    assert found is not None
    assert sorted(found[1]) == ["a", "b", "c"]


def test_a_tag_check_that_raises_changes_nothing() -> None:
    def explode(tag: str) -> bool:
        raise OSError(tag)

    ranges: RangeAllocator[str] = RangeAllocator(is_live=explode)
    ranges.add_slab_part(10)
    first = ranges.take(4)
    assert first is not None
    ranges.give(first[0], ("a",))
    for size in (4, 10):  # from the kept ranges, and after joining them
        with pytest.raises(OSError, match="a"):
            ranges.take(size)
        assert ranges.free_bytes == 10
    ranges._is_live = lambda tag: True
    assert ranges.take(4) == (first[0], ("a",))


def test_what_is_not_in_use_cannot_be_given_back() -> None:
    ranges: RangeAllocator[str] = RangeAllocator()
    ranges.add_slab_part(10)
    found = ranges.take(4)
    assert found is not None
    with pytest.raises(StateError, match="not in use"):
        ranges.give((Piece(0, 0, 3),))
    ranges.give(found[0])
    with pytest.raises(StateError, match="not in use"):
        ranges.give(found[0])


def test_a_region_with_a_piece_in_use_cannot_be_removed() -> None:
    ranges: RangeAllocator[str] = RangeAllocator()
    slab_part = ranges.add_slab_part(10)
    found = ranges.take(4)
    assert found is not None
    with pytest.raises(StateError, match="Expected 10 free bytes, got 6"):
        ranges.remove_slab_part(slab_part)
    ranges.give(found[0], ("a",))
    assert ranges.remove_slab_part(slab_part) == ("a",)
