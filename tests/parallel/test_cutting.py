"""Which part of a parameter each rank keeps: every shape of up to three small dims, for 1 to 9 ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from hyper_parallel import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.boxes import box_of
from hyper_parallel.core.parallel.sharding.cutting import Cut, cut, offsets

RANKS = range(1, 10)
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 17, 18, 19)


def shapes() -> Iterator[tuple[int, ...]]:
    yield ()
    yield from ((length,) for length in range(41))
    yield from itertools.product(LENGTHS, repeat=2)
    yield from itertools.product((0, 1, 2, 3, 5, 9, 10), repeat=3)


ALL = list(shapes())


def mesh_of(num_ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_parts_lie_beside_each_other_and_have_everything_once(num_ranks: int) -> None:
    for shape in ALL:
        part = cut(shape, num_ranks)
        if part.dim is None:
            continue
        indices = [
            index
            for start, size in (part.range_of(rank) for rank in range(num_ranks))
            for index in range(start, start + size)
        ]
        assert indices == list(range(shape[part.dim])), shape


@pytest.mark.parametrize("num_ranks", RANKS)
def test_parts_are_the_boxes_of_the_layout_that_names_the_same_dim(num_ranks: int) -> None:
    mesh = mesh_of(num_ranks)
    for shape in ALL:
        part = cut(shape, num_ranks)
        layout = mesh.layout(*("dp" if dim == part.dim else None for dim in range(len(shape))))
        for rank in range(num_ranks):
            box = box_of(layout, shape, (rank,))
            assert box.sizes == part.shape_of(rank), shape
            if part.dim is not None:
                assert (box.starts[part.dim], box.sizes[part.dim]) == part.range_of(rank), shape


@pytest.mark.parametrize("num_ranks", RANKS)
def test_room_is_what_the_largest_part_needs(num_ranks: int) -> None:
    for shape in ALL:
        part = cut(shape, num_ranks)
        assert part.room == max(math.prod(part.shape_of(rank)) for rank in range(num_ranks)), shape


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_dim_is_chosen_that_gives_every_rank_something_where_there_is_one(num_ranks: int) -> None:
    for shape in ALL:
        part = cut(shape, num_ranks)
        if not shape or 0 in shape:
            assert part.dim is None, shape
            continue
        assert part.dim is not None, shape
        fitting = [dim for dim, length in enumerate(shape) if length >= num_ranks]
        if fitting:
            assert part.dim == fitting[0], shape
            assert shape[part.dim] >= num_ranks
        else:
            assert shape[part.dim] == max(shape), shape
            assert all(length < shape[part.dim] for length in shape[: part.dim]), shape


def test_a_dim_as_long_as_the_ranks_are_many_may_still_leave_a_rank_with_nothing() -> None:
    """Chunks are of the rounded-up size, as PyTorch's are: 9 on 8 ranks is 2, 2, 2, 2, 1 and nothing."""
    part = cut((9,), 8)
    assert [part.shape_of(rank)[0] for rank in range(8)] == [2, 2, 2, 2, 1, 0, 0, 0]


def test_what_every_rank_keeps_whole_has_no_ranges() -> None:
    part = cut((), 4)
    assert part == Cut((), None, 4)
    assert [part.shape_of(rank) for rank in range(4)] == [()] * 4
    assert part.room == 1
    assert cut((3, 0), 4).room == 0
    with pytest.raises(ValueError, match="keeps whole"):
        part.range_of(0)


def test_offsets_are_the_sums_of_what_comes_before() -> None:
    assert offsets([4, 2, 3]) == ([0, 4, 6], 9)
    assert offsets([]) == ([], 0)
    for sizes in itertools.product(range(3), repeat=4):
        starts, end = offsets(sizes)
        assert starts == [sum(sizes[:number]) for number in range(4)]
        assert end == sum(sizes)
