"""Which box a rank holds: compared with cutting lists of indices, and with PyTorch's own chunks."""

from __future__ import annotations

import itertools

import pytest

from hyper_parallel import Layout, init_device_mesh
from hyper_parallel.core.dtensor.boxes import Box, box_of, boxes_of, chunk_range, local_shape, max_local_shape
from support.layouts import all_layouts

MESHES = [
    init_device_mesh("cpu", (4,), mesh_dim_names=("a",)),
    init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b")),
    init_device_mesh("cpu", (2, 1, 3), mesh_dim_names=("a", "b", "c")),
    init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"), rank_list=[7, 6, 5, 4, 3, 2, 1, 0]),
]


def cut(indices: list[int], num_chunks: int) -> list[list[int]]:
    """Whole chunks of the rounded-up size from the front; what is left; nothing for the rest."""
    size = -(-len(indices) // num_chunks)
    chunks = []
    for _ in range(num_chunks):
        chunks.append(indices[:size])
        indices = indices[size:]
    return chunks


def indices_of(layout: Layout, dim: int, length: int, coordinate: tuple[int, ...]) -> list[int]:
    indices = list(range(length))
    for axis in layout.axes_per_dim[dim]:
        at = layout.mesh.axis_names.index(axis)
        indices = cut(indices, layout.mesh.shape[at])[coordinate[at]]
    return indices


def test_five_rows_on_four_ranks_are_two_two_one_and_none() -> None:
    assert [chunk_range(5, 4, index) for index in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]


def test_chunks_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for length, num_chunks in itertools.product(range(1, 20), range(1, 9)):
        sizes = [len(chunk) for chunk in torch.arange(length).chunk(num_chunks)]
        sizes += [0] * (num_chunks - len(sizes))
        assert [chunk_range(length, num_chunks, index)[1] for index in range(num_chunks)] == sizes


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_every_box_of_every_layout_is_what_cutting_lists_gives(mesh) -> None:
    for layout in all_layouts(mesh, 2):
        for shape in itertools.product((0, 1, 2, 5, 8, 13), (3, 6)):
            largest = max_local_shape(layout, shape)
            held: set[tuple[int, int]] = set()
            for rank, box in boxes_of(layout, shape):
                coordinate = mesh.coordinate_of(rank)
                assert box is box_of(layout, shape, coordinate)
                expected = [indices_of(layout, dim, shape[dim], coordinate) for dim in range(2)]
                got = [list(range(start, end)) for start, end in zip(box.starts, box.ends, strict=True)]
                assert got == expected
                assert all(0 <= start <= length for start, length in zip(box.starts, shape, strict=True))
                assert local_shape(layout, list(shape), coordinate) == box.sizes
                assert all(size <= most for size, most in zip(box.sizes, largest, strict=True))
                held |= set(itertools.product(*expected))
            assert len(held) == shape[0] * shape[1]


def test_two_boxes_have_in_common_what_their_points_have_in_common() -> None:
    boxes = [Box((a, b), (m, n)) for a, b, m, n in itertools.product(range(3), range(2), range(3), range(1, 3))]
    for first, second in itertools.product(boxes, repeat=2):
        points = [
            set(itertools.product(*(range(s, e) for s, e in zip(box.starts, box.ends, strict=True))))
            for box in (first, second)
        ]
        assert first.num_elements == len(points[0])
        assert first.is_empty == (not points[0])
        both = first.intersection(second)
        common = points[0] & points[1]
        if both is None:
            assert not common
            continue
        assert set(itertools.product(*(range(s, e) for s, e in zip(both.starts, both.ends, strict=True)))) == common
        assert min(common) == tuple(a + b for a, b in zip(both.offset_in(second), second.starts, strict=True))
        assert both.inside(second) == Box(both.offset_in(second), both.sizes)


def test_a_scalar_is_one_box_without_dims() -> None:
    mesh = MESHES[1]
    assert box_of(mesh.layout(), (), (0, 0)) == Box((), ())
    assert Box((), ()).num_elements == 1
    assert not Box((), ()).is_empty
    assert Box((), ()).intersection(Box((), ())) == Box((), ())


def test_wrong_shapes_and_coordinates_are_refused() -> None:
    layout = MESHES[1].layout("a", None)
    with pytest.raises(ValueError, match="does not fit the layout"):
        box_of(layout, (4,), (0, 0))
    with pytest.raises(ValueError, match="does not fit the layout"):
        box_of(layout, (4, -1), (0, 0))
    with pytest.raises(ValueError, match="outside"):
        box_of(layout, (4, 4), (0, 3))
