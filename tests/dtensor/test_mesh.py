"""The mesh: what it is for any rank, and what it asks the platform for."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import hyper_parallel.core.dtensor.mesh
from hyper_parallel import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.mesh import current_mesh
from hyper_parallel.core.shard.local_parts import mesh_coordinate
from support.interpreter import run_fresh


@dataclass(frozen=True)
class Group:
    ranks: tuple[int, ...]


class FakePlatform:
    """A process of a world, as a mesh sees it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.marked: list[Any] = []

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.world_size

    def create_group(self, rank_list: list[int]) -> Group:
        return Group(tuple(rank_list))

    def get_process_group_ranks(self, group: Group) -> list[int]:
        return list(group.ranks)

    def mark_created_groups(self, group: Any) -> None:
        self.marked.append(group)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch):
    def become(rank: int, world_size: int) -> FakePlatform:
        platform = FakePlatform(rank, world_size)
        monkeypatch.setattr(hyper_parallel.core.dtensor.mesh, "communicating_platform", lambda: platform)
        return platform

    return become


MESH = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("dp", "cp", "tp"))


def test_equal_arguments_give_the_same_mesh_however_they_are_written() -> None:
    ranks = [[0, 1], [2, 3]]
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
    assert DeviceMesh("cpu", np.array(ranks), mesh_dim_names=["dp", "tp"]) is mesh
    assert DeviceMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), rank_list=[0, 1, 2, 3]) is mesh
    assert init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) is mesh
    assert init_device_mesh("cpu", np.array([2, 2]), mesh_dim_names=("dp", "tp"), rank_list=range(4)) is mesh
    assert pickle.loads(pickle.dumps(mesh)) is mesh  # noqa: S301
    assert copy.copy(mesh) is mesh
    assert copy.deepcopy({"mesh": mesh})["mesh"] is mesh


def test_identity_includes_every_rank_the_names_and_the_device() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    others = [
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), rank_list=[0, 1, 3, 2]),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), rank_list=[0, 1, 2, 4]),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")),
        init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp")),
    ]
    assert len({mesh, *others}) == 6


def test_axes_without_names_are_numbered() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    assert mesh.axis_names == mesh.mesh_dim_names == ("axis0", "axis1")
    assert mesh is init_device_mesh("cpu", (2, 2), mesh_dim_names=("axis0", "axis1"))


def test_a_mesh_cannot_be_changed() -> None:
    with pytest.raises(RuntimeError, match="cannot be set"):
        MESH.shape = (24,)  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="cannot be set"):
        del MESH.ranks
    with pytest.raises(RuntimeError, match="cannot be set"):
        MESH.more = 1  # type: ignore[attr-defined]


def test_coordinates_ranks_and_axes_agree_with_numpy_for_every_rank() -> None:
    seed = 7
    generator = random.Random(seed)
    for shape in [(5,), (2, 3), (1, 4, 2), (2, 3, 2)]:
        ranks = generator.sample(range(100), int(np.prod(shape)))
        array = np.array(ranks).reshape(shape)
        mesh = DeviceMesh("cpu", array)
        assert mesh.ranks == mesh.rank_list == tuple(ranks)
        assert mesh.shape == mesh.mesh_shape == shape
        assert mesh.ndim == len(shape)
        assert mesh.size() == len(ranks)
        assert [mesh.size(axis) for axis in mesh.axis_names] == list(shape)
        for coordinate in np.ndindex(*shape):
            rank = int(array[coordinate])
            assert mesh.coordinate_of(rank) == coordinate
            assert mesh.rank_at(coordinate) == rank
            assert mesh.has_rank(rank)
            for count in range(1, len(shape) + 1):
                for axes in itertools.permutations(range(len(shape)), count):
                    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))
                    kept = [axis for axis in range(len(shape)) if axis in axes]
                    expected = array[index].transpose([kept.index(axis) for axis in axes])
                    assert mesh.ranks_along(axes, rank) == tuple(expected.ravel().tolist())
                    submesh = mesh.submesh(axes, rank)
                    assert submesh is DeviceMesh("cpu", expected, mesh_dim_names=[f"axis{axis}" for axis in axes])


def test_a_flat_mesh_keeps_the_order_of_the_ranks() -> None:
    mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("dp", "tp"))
    assert mesh.flatten() is DeviceMesh("cpu", [3, 1, 2, 0], mesh_dim_names=("dp_tp",))
    assert mesh.flatten("world").axis_names == ("world",)


def test_what_concerns_this_process_is_asked_of_the_platform(process: Any) -> None:
    process(17, 24)  # coordinate (1, 1, 1)
    assert MESH.get_coordinate() == (1, 1, 1)
    assert [MESH.get_local_rank(axis) for axis in ("dp", "cp", "tp", -1)] == [1, 1, 1, 1]
    assert MESH["tp"] is DeviceMesh("cpu", [16, 17, 18, 19], mesh_dim_names=("tp",))
    assert MESH["dp", "tp"] is DeviceMesh("cpu", [[4, 5, 6, 7], [16, 17, 18, 19]], mesh_dim_names=("dp", "tp"))
    assert MESH["tp"].get_local_rank() == 1
    assert MESH.get_group("cp") == Group((13, 17, 21))
    assert MESH["cp"].get_group() == Group((13, 17, 21))
    assert MESH.get_group(("dp", "tp")) == Group((4, 5, 6, 7, 16, 17, 18, 19))


def test_a_mesh_without_this_process_says_so(process: Any) -> None:
    process(30, 40)
    assert MESH.get_coordinate() is None
    for ask in (lambda: MESH["tp"], lambda: MESH.get_group("tp"), lambda: MESH.get_local_rank("tp")):
        with pytest.raises(RuntimeError, match="does not have this process"):
            ask()


def test_a_group_of_ranks_that_were_not_started_is_refused(process: Any) -> None:
    process(0, 8)
    assert MESH.get_coordinate() == (0, 0, 0)
    with pytest.raises(RuntimeError, match="Expected 24 processes, got 8"):
        MESH.get_group("tp")


def test_a_mesh_is_made_of_existing_groups(process: Any) -> None:
    platform = process(5, 8)
    group = Group((4, 5, 6))
    assert DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)).ranks == (4, 5, 6)
    assert platform.marked == [group]
    axes = [Group((1, 5)), Group((4, 5))]
    made = DeviceMesh.from_group(axes, "cpu", [[0, 1], [4, 5]], mesh_dim_names=("dp", "tp"))
    assert made is DeviceMesh("cpu", [[0, 1], [4, 5]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="Several groups"):
        DeviceMesh.from_group(axes, "cpu")
    with pytest.raises(ValueError, match="not the axes"):
        DeviceMesh.from_group(axes[::-1], "cpu", [[0, 1], [4, 5]])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: init_device_mesh("cpu", (2, 2), rank_list=[0, 1, 2]), ValueError, "do not fill"),
        (lambda: init_device_mesh("cpu", (2, 2), rank_list=[0, 1, 2, 1]), ValueError, r"twice[\s\S]*\[1\]"),
        (lambda: init_device_mesh("cpu", (2, 2), rank_list=[0, 1, 2, -1]), ValueError, "negative"),
        (lambda: init_device_mesh("cpu", (2, 0)), ValueError, "at least 1"),
        (lambda: init_device_mesh("cpu", ()), ValueError, "at least one axis"),
        (lambda: init_device_mesh("cpu", 4), TypeError, "sequence"),  # type: ignore[arg-type]
        (lambda: init_device_mesh("cpu", (2, 2.0)), TypeError, "an int"),  # type: ignore[arg-type]
        (lambda: init_device_mesh("cpu", (2, True)), TypeError, "an int"),
        (lambda: init_device_mesh("", (2,)), TypeError, "type of its devices"),
        (lambda: DeviceMesh("cpu", [[0, 1], [2]]), ValueError, "no full array"),
        (lambda: DeviceMesh("cpu", [[0, 1], 2]), ValueError, "no full array"),
        (lambda: DeviceMesh("cpu", []), ValueError, "no full array"),
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",)), ValueError, "do not match"),
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "dp")), ValueError, "same name"),
        (lambda: init_device_mesh("cpu", (2,), mesh_dim_names=(3,)), TypeError, "has a name"),  # type: ignore[arg-type]
        (lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("",)), TypeError, "has a name"),
        (lambda: MESH.size("pp"), ValueError, "no such axis[\\s\\S]*'dp', 'cp', 'tp'"),
        (lambda: MESH.axis_index(3), ValueError, "no such axis"),
        (lambda: MESH.submesh(("dp", "dp"), 0), ValueError, "each once"),
        (lambda: MESH.submesh((), 0), ValueError, "at least one"),
        (lambda: MESH.coordinate_of(24), ValueError, "does not have this rank"),
        (lambda: MESH.rank_at((0, 0, 4)), ValueError, "outside"),
        (lambda: MESH.rank_at((0, 0)), ValueError, "outside"),
        (lambda: MESH.get_local_rank(), ValueError, "which one"),
    ],
)
def test_a_wrong_mesh_is_refused_in_words(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_meshes_can_be_entered_one_in_another() -> None:
    inner = MESH.submesh("tp", 0)
    assert current_mesh() is None
    with MESH:
        with inner, MESH:
            assert current_mesh() is MESH
        with pytest.raises(KeyError), inner:
            raise KeyError
        assert current_mesh() is MESH
    assert current_mesh() is None


def test_the_text_names_axes_sizes_and_unusual_ranks() -> None:
    assert repr(MESH) == "DeviceMesh(cpu, dp=2, cp=3, tp=4)"
    assert repr(MESH.submesh("tp", 5)) == "DeviceMesh(cpu, tp=4, ranks [4, 5, 6, 7])"


def test_mesh_layout_and_boxes_import_no_framework_and_no_numpy() -> None:
    program = """
from hyper_parallel import DeviceMesh, Layout, Partial, Replicate, Shard, init_device_mesh, layout
from hyper_parallel.core.dtensor.boxes import box_of
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
box_of(layout("dp", "tp", mesh=mesh), (8, 8), mesh.coordinate_of(3))
result = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "mindspore", "numpy"})
"""
    assert run_fresh(program) == []


# A mesh that cannot be


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch):
    def become(started: int | None, device_type: str | None) -> None:
        monkeypatch.setattr(hyper_parallel.core.dtensor.mesh, "started_world_size", lambda: started)
        monkeypatch.setattr(hyper_parallel.core.dtensor.mesh, "device_type_here", lambda: device_type)

    return become


@pytest.mark.parametrize(
    "make",
    [
        lambda: init_device_mesh("cpu", (16,)),
        lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),  # made before, too
        lambda: init_device_mesh("cpu", (1, 2), rank_list=[0, 2]),
        lambda: DeviceMesh("cpu", [[0, 1], [2, 3]]),
        lambda: DeviceMesh("cpu", [2]),
    ],
)
def test_a_mesh_with_ranks_that_were_not_started_is_refused_when_it_is_made(make: Any, world: Any) -> None:
    make()
    world(2, "cpu")
    with pytest.raises(RuntimeError, match=r"not started.\nExpected \d+ processes, got 2; DeviceMesh"):
        make()


def test_parts_of_a_larger_mesh_and_one_that_was_saved_can_still_be_looked_at(world: Any) -> None:
    saved = pickle.dumps(MESH)
    world(1, "cpu")
    assert pickle.loads(saved) is MESH  # noqa: S301 - of this test
    assert MESH.submesh("tp", 5).ranks == (4, 5, 6, 7)
    assert MESH.flatten().ranks == MESH.ranks


def test_a_mesh_of_devices_that_are_not_there_is_refused_when_it_is_made(world: Any) -> None:
    world(2, "cpu")
    for make in (lambda: init_device_mesh("cuda", (2,)), lambda: DeviceMesh("npu", [0])):
        with pytest.raises(RuntimeError, match=r'does not have.\nExpected "cpu", got "(cuda|npu)"'):
            make()
    world(None, "cpu")
    with pytest.raises(RuntimeError, match="does not have"):
        init_device_mesh("cuda", (1,))
    assert init_device_mesh("cuda", (1024,)).size() == 1024, "a plan for another machine"
    world(2, "cuda")
    assert init_device_mesh("cuda", (2,)).size() == 2
    assert init_device_mesh("meta", (2,)).size() == 2


def test_no_tensor_lies_on_a_mesh_of_which_the_world_has_a_part(process: Any) -> None:
    process(0, 1)
    with pytest.raises(RuntimeError, match=r"not started.\nExpected 24 processes, got 1"):
        mesh_coordinate(MESH)
    process(5, 24)
    assert mesh_coordinate(MESH) == (0, 1, 1)
