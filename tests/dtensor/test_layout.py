"""Placements and layouts: what they say, that equal ones are one object, and what they refuse."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel import DeviceMesh, Layout, Partial, Replicate, Shard, init_device_mesh, layout
from hyper_parallel.core.dtensor.gradients import gradient_divisor, gradient_layout
from hyper_parallel.core.dtensor.layout import check_same_mesh
from hyper_parallel.core.dtensor.placements import REDUCE_OPS, Placement
from support.layouts import all_layouts

MESH = init_device_mesh("cpu", (2, 3, 1, 4), mesh_dim_names=("dp", "cp", "ep", "tp"))
SMALL = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_equal_placements_are_one_object() -> None:
    for make in (lambda: Shard(1), lambda: Shard(-1), lambda: Replicate(), lambda: Partial(), lambda: Partial("max")):
        placement = make()
        assert make() is placement
        assert copy.deepcopy(placement) is placement
        assert pickle.loads(pickle.dumps(placement)) is placement  # noqa: S301
    assert Partial() is Partial("sum")
    assert len({Shard(0), Shard(1), Replicate(), *map(Partial, REDUCE_OPS)}) == 8
    with pytest.raises(RuntimeError, match="cannot be set"):
        Shard(0).dim = 1  # type: ignore[misc]


def test_a_placement_can_be_asked_what_it_is() -> None:
    assert [p.is_shard() for p in (Shard(1), Replicate(), Partial())] == [True, False, False]
    assert [p.is_replicate() for p in (Shard(1), Replicate(), Partial())] == [False, True, False]
    assert [p.is_partial() for p in (Shard(1), Replicate(), Partial())] == [False, False, True]
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")
    assert repr([Shard(1), Replicate(), Partial("avg")]) == "[Shard(1), Replicate(), Partial('avg')]"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Shard("0"), TypeError, "an int"),  # type: ignore[arg-type]
        (lambda: Shard(True), TypeError, "an int"),
        (lambda: Shard(1.0), TypeError, "an int"),  # type: ignore[arg-type]
        (lambda: Partial("mean"), ValueError, "one of sum, avg, max, min, prod, got 'mean'"),
        (lambda: Partial(None), TypeError, "named by a string"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_placement_is_refused_in_words(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_equal_layouts_are_one_object_however_they_are_written() -> None:
    made = Layout(MESH, (("dp",), ("cp", "tp"), ()))
    assert MESH.layout("dp", ("cp", "tp"), None) is made
    assert MESH.layout(["dp"], ["cp", "tp"], ()) is made
    assert layout("dp", ("cp", "tp"), None, mesh=MESH) is made
    with MESH:
        assert layout("dp", ("cp", "tp"), None) is made
    assert Layout.from_placements(MESH, (Shard(0), Shard(-2), Replicate(), Shard(1)), 3) is made
    assert pickle.loads(pickle.dumps(made)) is made  # noqa: S301
    assert copy.deepcopy(made) is made
    assert MESH.layout("dp", ("tp", "cp"), None) is not made
    assert hp.layout is layout

    summed = MESH.layout(None, partial={"tp": "max", "dp": "sum"})
    assert summed.partial == (("dp", "sum"), ("tp", "max"))
    assert MESH.layout(None, partial=[("dp", "sum"), ("tp", "max")]) is summed
    assert (
        MESH.layout(None, partial="tp") is MESH.layout(None, partial=["tp"]) is MESH.layout(None, partial={"tp": "sum"})
    )


def test_layouts_compare_and_hash_by_their_address() -> None:
    assert Layout.__eq__ is object.__eq__
    assert Layout.__hash__ is object.__hash__
    assert DeviceMesh.__hash__ is object.__hash__
    assert Shard.__hash__ is object.__hash__


def test_a_layout_answers_what_rules_ask() -> None:
    made = MESH.layout("dp", ("ep", "tp"), None, partial={"cp": "sum"})
    assert made.ndim == 3
    assert [made.axes_of(dim) for dim in (0, 1, -1)] == [("dp",), ("ep", "tp"), ()]
    assert [made.dim_of(axis) for axis in MESH.axis_names] == [0, None, 1, 1]
    assert [made.partial_op(axis) for axis in MESH.axis_names] == [None, "sum", None, None]
    assert made.varying_axes == ("dp", "cp", "tp")
    assert made.replicated_axes == ("ep",)
    assert not made.is_replicated
    assert MESH.layout("ep", None).is_replicated
    assert MESH.layout(partial="ep").is_replicated
    assert MESH.layout().ndim == 0


def test_other_layouts_are_made_from_one() -> None:
    made = MESH.layout("dp", None, partial={"cp": "sum", "tp": "max"})
    assert made.with_dims(None, "dp") is MESH.layout(None, "dp", partial={"cp": "sum", "tp": "max"})
    assert made.without_partial() is MESH.layout("dp", None)
    assert made.without_partial("cp") is MESH.layout("dp", None, partial={"tp": "max"})
    assert made.replace(partial=()) is MESH.layout("dp", None)
    assert made.replace(axes_per_dim=("dp",)) is MESH.layout("dp", partial={"cp": "sum", "tp": "max"})
    assert made.replace() is made


def test_a_layout_in_mesh_order_has_placements_and_another_one_says_why_not() -> None:
    assert MESH.layout("tp", ("dp", "cp"), partial="ep").placements == (Shard(1), Shard(1), Partial(), Shard(0))
    swapped = MESH.layout(("tp", "dp"))
    assert not swapped.has_placements
    with pytest.raises(ValueError, match="no placements[\\s\\S]*tp·dp"):
        _ = swapped.placements
    # An axis of one rank splits nothing, wherever it stands.
    assert MESH.layout(("ep", "dp")).placements == (Shard(0), Replicate(), Shard(0), Replicate())


def test_placements_and_layouts_convert_into_each_other() -> None:
    choices: list[Placement] = [Shard(0), Shard(1), Replicate(), Partial("sum"), Partial("max")]
    seen = set()
    for placements in itertools.product(choices, repeat=2):
        made = Layout.from_placements(SMALL, placements, 2)
        assert made.placements == placements
        seen.add(made)
    assert len(seen) == 25
    everything = all_layouts(SMALL, 2, ops=("sum", "max"))
    assert len(everything) == len(set(everything)) == 27  # the two more split a dim by tp, then dp
    assert seen == {made for made in everything if made.has_placements}


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: MESH.layout("pp"), ValueError, "no such axis[\\s\\S]*got 'pp'"),
        (lambda: MESH.layout("dp,tp"), ValueError, "no such axis[\\s\\S]*got 'dp,tp'"),
        (lambda: MESH.layout(None, partial="pp"), ValueError, "no such axis"),
        (lambda: MESH.layout("dp", "dp"), ValueError, "'dp' splits dim 0 and splits dim 1"),
        (lambda: MESH.layout(("dp", "dp")), ValueError, "'dp' splits dim 0 and splits dim 0"),
        (lambda: MESH.layout("dp", partial="dp"), ValueError, "'dp' splits dim 0 and is partial"),
        (lambda: MESH.layout(partial=[("dp", "sum"), ("dp", "max")]), ValueError, "twice"),
        (lambda: MESH.layout(partial={"dp": "mean"}), ValueError, "no such reduction"),
        (lambda: MESH.layout(partial={"dp": 1}), TypeError, "with their reduction"),  # type: ignore[dict-item]
        (lambda: MESH.layout(0), TypeError, "by which mesh axes"),  # type: ignore[arg-type]
        (lambda: MESH.layout(("dp", 1)), TypeError, "by which mesh axes"),  # type: ignore[arg-type]
        (lambda: MESH.layout({"dp": 1}), TypeError, "by which mesh axes"),  # type: ignore[arg-type]
        (lambda: Layout(MESH, "dp"), TypeError, "one entry per tensor dim"),
        (lambda: Layout("cpu", ("dp",)), TypeError, "needs a mesh"),  # type: ignore[arg-type]
        (lambda: layout("dp"), ValueError, "needs a mesh[\\s\\S]*with mesh"),
        (lambda: Layout.from_placements(SMALL, (Shard(0),), 2), ValueError, "Expected 2 placements, got 1"),
        (lambda: Layout.from_placements(SMALL, (Shard(2), Shard(0)), 2), ValueError, "no such dim[\\s\\S]*'dp'"),
        (lambda: Layout.from_placements(SMALL, (Shard(-3), Shard(0)), 2), ValueError, "no such dim"),
        (
            lambda: Layout.from_placements(SMALL, (None, Shard(0)), 2),  # type: ignore[arg-type]
            TypeError,
            "placement is missing",
        ),
        (
            lambda: Layout.from_placements(SMALL, ([], Shard(0)), 2),  # type: ignore[arg-type]
            TypeError,
            "placement is missing",
        ),
        (lambda: SMALL.layout("dp").axes_of(1), ValueError, "no such dim"),
        (lambda: SMALL.layout("dp").without_partial("pp"), ValueError, "no such axis"),
        (lambda: check_same_mesh(SMALL.layout("dp"), MESH.layout("dp")), ValueError, "different meshes"),
    ],
)
def test_a_wrong_layout_is_refused_in_words(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_refused_layout_is_not_remembered() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="twice"):
            MESH.layout("dp", "dp")


def test_the_text_shows_each_dim_and_what_is_partial() -> None:
    assert repr(MESH.layout("dp", ("cp", "tp"), None, partial="ep")) == "Layout(dp, cp·tp, -; partial sum over ep)"
    assert repr(MESH.layout(None, partial={"dp": "sum", "cp": "max", "tp": "sum"})) == (
        "Layout(-; partial sum over dp·tp; partial max over cp)"
    )
    assert repr(MESH.layout()) == "Layout(scalar)"


def test_the_gradient_of_a_partial_sum_is_replicated_and_that_of_a_maximum_is_a_sum() -> None:
    made = MESH.layout("dp", None, partial={"cp": "sum", "tp": "avg"})
    assert gradient_layout(made) is MESH.layout("dp", None)
    assert gradient_divisor(made) == 4
    assert gradient_divisor(MESH.layout("dp", None)) == 1
    assert gradient_layout(MESH.layout("dp", partial={"cp": "max", "tp": "sum"})) is MESH.layout("dp", partial="cp")
    with pytest.raises(ValueError, match="depend on its values"):
        gradient_layout(MESH.layout(None, partial={"cp": "prod"}))
    assert gradient_layout(MESH.layout(None, partial={"ep": "prod"})) is MESH.layout(None)
