"""Redistribution on simulated ranks.

Every pair of layouts is right and frugal, and the plans are the ones that are meant.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from hyper_parallel import DeviceMesh, Layout, init_device_mesh
from hyper_parallel.core.dtensor.boxes import box_of
from hyper_parallel.core.dtensor.gradients import gradient_divisor, gradient_layout, plan_gradient, value_reductions
from hyper_parallel.core.dtensor.redistribution import CostModel, Plan, plan_redistribution, redistribute
from hyper_parallel.core.dtensor.redistribution.cost import received_elements
from hyper_parallel.core.dtensor.redistribution.partial import partial_work
from hyper_parallel.core.dtensor.redistribution.paths import ways
from hyper_parallel.core.dtensor.redistribution.steps import Kind
from support import simulated_ranks
from support.campaign import share
from support.layouts import all_layouts
from support.redistribution_bounds import least_received, least_received_by_each
from support.simulated_ranks import distribute, execute, global_value, random_values

MESH_2X4 = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
# Ranks in no order, as on a machine whose neighbours are not numbered one after the other.
MESH_2X3 = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"), rank_list=[9, 3, 4, 0, 7, 2])
MESH_2X2X2 = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
MESH_2X1X3 = init_device_mesh("cpu", (2, 1, 3), mesh_dim_names=("a", "b", "c"))
MESH_2X3X2 = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("a", "b", "c"))


class Family(NamedTuple):
    """Pairs of layouts to try: all of them in a full campaign, or as many as `in_every_run`."""

    mesh: DeviceMesh
    shape: tuple[int, ...]
    ops: tuple[str, ...]
    in_every_run: int

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.mesh.shape))
        return f"{sizes}-{'x'.join(map(str, self.shape))}-{'-'.join(self.ops)}"

    def pairs(self) -> Iterator[tuple[Layout, Layout, random.Random]]:
        layouts = all_layouts(self.mesh, len(self.shape), self.ops)
        numbers = list(range(len(layouts) ** 2))
        random.Random(str(self)).shuffle(numbers)
        for index in share(len(numbers), min(self.in_every_run, len(numbers))):
            source, target = divmod(numbers[index], len(layouts))
            yield layouts[source], layouts[target], random.Random(f"{self} {index}")


EVERY = 10**9
FAMILIES = [
    *(Family(mesh, shape, ("sum",), EVERY) for mesh in (MESH_2X4, MESH_2X3) for shape in ((24, 24), (5, 7), (1, 3))),
    *(Family(MESH_2X2X2, shape, ("sum",), 1200) for shape in ((8, 16), (5, 7))),
    *(Family(mesh, (5, 7), ("sum", "avg", "max", "min", "prod"), 400) for mesh in (MESH_2X4, MESH_2X3)),
    Family(MESH_2X2X2, (5, 7), ("sum", "avg", "max", "prod"), 600),
    *(Family(mesh, shape, ("sum",), 400) for mesh in (MESH_2X4, MESH_2X3) for shape in ((8, 12, 12), (3, 5, 7))),
    *(Family(MESH_2X2X2, shape, ("sum",), 300) for shape in ((8, 4, 8), (5, 3, 7))),
    *(Family(MESH_2X3X2, shape, ("sum",), 300) for shape in ((12, 24), (7, 10))),
    Family(MESH_2X1X3, (5, 7), ("sum", "max"), 300),
    Family(MESH_2X4, (0, 5), ("sum", "max"), 100),
    Family(MESH_2X2X2, (), ("sum", "avg", "max", "prod"), 1000),
    Family(MESH_2X4, (7,), ("sum", "max"), EVERY),
]


def busiest_rank_bound(source: Layout, target: Layout, shape: tuple[int, ...]) -> float:
    """Count what the rank that must receive most must receive.

    That is what it lacks of its box, (n-1) boxes per reduce-scatter, 2 (n-1)/n per all-reduce.
    """
    reduced = [axis for run in partial_work(source, target).runs for axis in run]
    scattered = math.prod(source.mesh.size(axis) for axis in reduced if target.dim_of(axis) is not None)
    everywhere = math.prod(source.mesh.size(axis) for axis in reduced if target.dim_of(axis) is None)
    most = 0.0
    for rank in source.mesh.ranks:
        coordinate = source.mesh.coordinate_of(rank)
        before, after = box_of(source, shape, coordinate), box_of(target, shape, coordinate)
        both = before.intersection(after)
        missing = after.num_elements - (both.num_elements if both else 0)
        most = max(most, missing + after.num_elements * (scattered - 1 + 2 * (everywhere - 1) / everywhere))
    return most


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_pair_of_layouts_is_right_and_receives_nearly_the_fewest_bytes(family: Family) -> None:
    shape = family.shape
    ratios, busiest = [], []
    for source, target, generator in family.pairs():
        plan = plan_redistribution(source, target, shape, 4)
        values = random_values(shape, generator)
        done = execute(plan, distribute(values, source, generator))
        assert np.array_equal(global_value(done.locals, target, shape), values), plan

        received = done.received
        for rank in family.mesh.ranks:
            at = family.mesh.coordinate_of(rank)
            assert received[rank] == pytest.approx(sum(received_elements(step, at) for step in plan.steps)), plan
        assert plan.received_bytes == pytest.approx(4 * max(received.values())), plan
        assert sum(received.values()) == pytest.approx(sum(done.sent.values()))
        assert plan.is_local == (not done.methods)

        if not source.partial and not target.partial:
            least = least_received_by_each(source, target, shape)
            for rank in family.mesh.ranks:
                assert received[rank] == least[family.mesh.coordinate_of(rank)], plan
        least_of_all = least_received(source, target, shape)
        if not shape:
            continue  # one element cannot be shared among ranks
        if least_of_all == 0:
            assert sum(received.values()) == 0, plan
            continue
        ratios.append(sum(received.values()) / least_of_all)
        # Where a sum is made out of pieces in another order, the bound that lets any rank of the axis have an element
        # is not always met (4 of 7,557 pairs on 2x3x2, uneven: 2.5); these receive less than what they lack of their
        # boxes.
        lacking = least_received_by_each(source, target, shape).sum()
        assert ratios[-1] <= 2 + 1e-9 or (target.partial and ratios[-1] <= 3 and sum(received.values()) <= lacking), (
            plan
        )
        busiest.append(max(received.values()) / busiest_rank_bound(source, target, shape))
        assert busiest[-1] <= 2 + 1e-9, plan
    if ratios:
        print(
            f"{len(ratios)} pairs that communicate; of the fewest bytes {np.mean(ratios):.3f} on average, "
            f"{max(ratios):.2f} at most"
        )
        assert np.mean(ratios) <= 1.2
        assert np.mean(busiest) <= 1.2


LINEAR_FAMILIES = [
    Family(MESH_2X4, (8, 12), ("sum", "avg"), 500),
    Family(MESH_2X3, (5, 7), ("sum", "avg"), 500),
    Family(MESH_2X2X2, (5, 7), ("sum", "avg"), 500),
]


@pytest.mark.parametrize("family", LINEAR_FAMILIES, ids=str)
def test_the_gradient_of_every_redistribution_is_that_of_one_device(family: Family) -> None:
    shape = family.shape
    for source, target, generator in family.pairs():
        gradient = random_values(shape, generator)
        before = {
            rank: part / gradient_divisor(target)
            for rank, part in distribute(gradient, gradient_layout(target), generator).items()
        }
        back = plan_gradient(source, target, shape)
        found = {
            rank: part * back.multiplier / back.divisor for rank, part in execute(back.plan, before).locals.items()
        }
        expected = distribute(gradient, gradient_layout(source), generator)
        for rank in family.mesh.ranks:
            assert np.array_equal(found[rank], expected[rank] / gradient_divisor(source)), (source, target)

        # The loss is linear in the tensor, so moving the local tensors by `change` moves it by their product with the
        # gradient, and a tensor that several ranks hold is moved once.
        change = distribute(random_values(shape, generator), source, generator)
        after = execute(plan_redistribution(source, target, shape), change).locals
        moved = sum((found[rank] * change[rank]).sum() for rank in family.mesh.ranks if _is_first_replica(source, rank))
        assert moved == (gradient * global_value(after, target, shape)).sum(), (source, target)


def test_gradients_of_what_stays_a_maximum_move_with_it_and_of_what_becomes_one_are_summed() -> None:
    generator = random.Random(3)
    maximum = {"b": "max"}
    source, target = MESH_2X4.layout("a", None, partial=maximum), MESH_2X4.layout(None, "a", partial=maximum)
    parts = [random_values((5, 7), generator) for _ in range(4)]  # of each coordinate on b
    gradients = {
        rank: parts[coordinate[1]][:, slice(*((0, 4) if coordinate[0] == 0 else (4, 7)))]
        for rank in MESH_2X4.ranks
        for coordinate in [MESH_2X4.coordinate_of(rank)]
    }
    moved = execute(plan_gradient(source, target, (5, 7)).plan, gradients).locals
    for rank in MESH_2X4.ranks:
        row, part = MESH_2X4.coordinate_of(rank)
        assert np.array_equal(moved[rank], parts[part][(slice(0, 3), slice(3, 5))[row]])

    replicated = MESH_2X4.layout(None, None)
    whole = {rank: parts[MESH_2X4.coordinate_of(rank)[1]] for rank in MESH_2X4.ranks}
    back = plan_gradient(replicated, replicated.replace(partial=maximum), (5, 7)).plan
    for local in execute(back, whole).locals.values():
        assert np.array_equal(local, sum(parts))


def test_reductions_whose_gradients_need_values_are_listed_in_order() -> None:
    plain = MESH_2X2X2.layout(None)

    def listed(source: dict[str, str], target: dict[str, str]) -> Any:
        return value_reductions(plain.replace(partial=source), plain.replace(partial=target))

    assert listed({"a": "sum", "b": "avg"}, {}) == ()
    assert listed({"a": "max"}, {"a": "max"}) == ()
    assert listed({}, {"a": "max"}) == ()
    assert listed({"a": "max"}, {}) == (("a", "max"),)
    assert listed({"a": "sum", "b": "max", "c": "max"}, {}) == (("c", "max"), ("b", "max"))
    assert listed({"a": "max", "b": "sum", "c": "avg"}, {}) == (("c", "avg"), ("b", "sum"), ("a", "max"))
    assert listed({"a": "sum", "b": "max"}, {"b": "max"}) == (("b", "max"),)
    with pytest.raises(ValueError, match="Call `differentiable_all_reduce` over c, b before"):
        plan_gradient(plain.replace(partial={"b": "prod", "c": "prod"}), plain, (4,))


def _is_first_replica(layout: Layout, rank: int) -> bool:
    coordinate = layout.mesh.coordinate_of(rank)
    return all(coordinate[layout.mesh.axis_index(axis)] == 0 for axis in layout.replicated_axes)


def kinds(plan: Plan) -> list[str]:
    return [step.kind.value for step in plan.steps]


@pytest.mark.parametrize(
    ("source", "target", "shape", "expected"),
    [
        (MESH_2X4.layout("a", "b"), MESH_2X4.layout("a", "b"), (8, 8), []),
        (MESH_2X4.layout(None, None), MESH_2X4.layout("a", "b"), (8, 8), ["slice"]),
        (MESH_2X4.layout("a", None), MESH_2X4.layout(("a", "b"), None), (5, 8), ["slice"]),
        (MESH_2X4.layout("a", None), MESH_2X4.layout(None, None), (8, 8), ["all-gather"]),
        (MESH_2X4.layout(None, ("b", "a")), MESH_2X4.layout(None, None), (8, 8), ["all-gather"]),
        (MESH_2X4.layout(None, ("b", "a")), MESH_2X4.layout(None, "b"), (8, 8), ["all-gather"]),
        (MESH_2X4.layout("b", None), MESH_2X4.layout(None, None), (5, 8), ["all-to-all-v"]),
        (MESH_2X4.layout("b", None), MESH_2X4.layout(None, "b"), (8, 8), ["all-to-all"]),
        (MESH_2X4.layout(("a", "b"), None), MESH_2X4.layout("a", "b"), (8, 8), ["all-to-all"]),
        (MESH_2X4.layout("b", None), MESH_2X4.layout(None, "b"), (8, 7), ["all-to-all-v"]),
        (MESH_2X4.layout(("a", "b"), None), MESH_2X4.layout(("b", "a"), None), (8, 8), ["all-to-all-v"]),
        (MESH_2X4.layout(None, None, partial="a"), MESH_2X4.layout(None, None), (8, 8), ["all-reduce"]),
        (MESH_2X4.layout(None, partial=("a", "b")), MESH_2X4.layout(None), (5,), ["all-reduce"]),
        (MESH_2X4.layout(None, None, partial="b"), MESH_2X4.layout("b", None), (8, 8), ["reduce-scatter"]),
        (MESH_2X4.layout(None, None, partial="b"), MESH_2X4.layout(None, "b"), (8, 8), ["reduce-scatter"]),
        (MESH_2X4.layout(None, None, partial="b"), MESH_2X4.layout("b", None), (7, 8), ["all-to-all-v"]),
        (MESH_2X4.layout(None, partial="b"), MESH_2X4.layout("a"), (8,), ["slice", "all-reduce"]),
        (MESH_2X4.layout(None, None), MESH_2X4.layout(None, None, partial="a"), (8, 8), ["fill"]),
        (MESH_2X4.layout("a", None), MESH_2X4.layout(None, None, partial="a"), (8, 8), ["place"]),
        (MESH_2X4.layout("a", None), MESH_2X4.layout("b", None, partial="a"), (8, 8), ["place"]),
        (MESH_2X4.layout(None), MESH_2X4.layout(None, partial={"a": "max"}), (8,), []),
        (MESH_2X4.layout(None), MESH_2X4.layout(None, partial={"a": "avg"}), (8,), []),
        (MESH_2X4.layout("a", partial="b"), MESH_2X4.layout(None, partial="b"), (8,), ["all-gather"]),
        (MESH_2X1X3.layout("b"), MESH_2X1X3.layout(None, partial="b"), (8,), []),
    ],
    ids=str,
)
def test_a_plan_is_the_collective_that_one_would_call(
    source: Layout, target: Layout, shape: tuple[int, ...], expected: list[str]
) -> None:
    assert kinds(plan_redistribution(source, target, shape)) == expected


def test_plans_are_made_once() -> None:
    source, target = MESH_2X4.layout("a", None), MESH_2X4.layout(None, "a")
    plan = plan_redistribution(source, target, (8, 8))
    assert plan_redistribution(source, target, [8, 8]) is plan
    assert plan_redistribution(source, target, (8, 8), 2) is not plan


def test_a_large_mesh_gathers_small_tensors_one_axis_at_a_time_and_a_slow_launch_makes_it_one_step() -> None:
    mesh = init_device_mesh("cpu", (16, 16), mesh_dim_names=("a", "b"))
    source, target = mesh.layout("a", "b"), mesh.layout(None, None)
    plan = plan_redistribution(source, target, (64, 64))
    assert [(step.kind, step.axes) for step in plan.steps] == [(Kind.ALL_GATHER, ("a",)), (Kind.ALL_GATHER, ("b",))]
    slow = CostModel(launch_us=1000.0)
    assert kinds(plan_redistribution(source, target, (64, 64), model=slow)) == ["all-to-all-v"]


def test_a_large_tensor_is_scattered_by_the_framework_axis_by_axis_and_a_small_one_at_once() -> None:
    source, target = MESH_2X4.layout(None, None, partial=("a", "b")), MESH_2X4.layout("a", "b")
    assert kinds(plan_redistribution(source, target, (4096, 4096))) == ["reduce-scatter", "reduce-scatter"]
    assert kinds(plan_redistribution(source, target, (8, 8))) == ["all-to-all-v"]


def test_what_can_be_sliced_after_a_reduction_is_not_received_first() -> None:
    source, target = MESH_2X2X2.layout(None, partial=("a", "c")), MESH_2X2X2.layout(("a", "b"))
    plan = plan_redistribution(source, target, (64,), 1)
    assert plan.received_bytes == 16 + 16  # a quarter over `a`, and the same again to reduce it over `c`


def test_the_busiest_rank_does_not_reduce_everything_alone() -> None:
    # One row goes to the first of eight ranks. It would receive seven rows; all-reduced, everybody receives less than
    # two.
    source, target = MESH_2X4.layout(None, None, partial=("a", "b")), MESH_2X4.layout(("a", "b"), None)
    plan = plan_redistribution(source, target, (1, 4), 1)
    assert kinds(plan) == ["all-reduce", "slice"]
    assert plan.received_bytes == 7


def test_no_rank_of_a_large_mesh_sends_more_than_its_box_to_each_of_its_group() -> None:
    mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("a", "b"))
    plan = plan_redistribution(mesh.layout("a", None), mesh.layout(None, "a"), (8, 8))
    done = execute(plan, distribute(np.zeros((8, 8)), mesh.layout("a", None), random.Random(0)))
    assert set(done.sent.values()) == {12.0}  # each row of replicas exchanges among itself


def test_a_cap_on_memory_takes_another_way_or_says_what_the_smallest_needs() -> None:
    source, target = MESH_2X4.layout(None, ("a", "b")), MESH_2X4.layout(("b", "a"), None)
    free = plan_redistribution(source, target, (64, 64))
    from_all = sorted({plan.peak_bytes for plan in _plans_under_all_caps(source, target, (64, 64), free)})
    assert len(from_all) > 1
    assert all(peak <= free.peak_bytes for peak in from_all)
    values = random_values((64, 64), random.Random(0))
    small = plan_redistribution(source, target, (64, 64), max_peak_bytes=from_all[0])
    done = execute(small, distribute(values, source, random.Random(1)))
    assert np.array_equal(global_value(done.locals, target, (64, 64)), values)
    with pytest.raises(MemoryError, match=rf"at most {from_all[0] - 1} bytes, got {from_all[0]} for the smallest"):
        plan_redistribution(source, target, (64, 64), max_peak_bytes=from_all[0] - 1)


def _plans_under_all_caps(source: Layout, target: Layout, shape: tuple[int, ...], plan: Plan) -> Iterator[Plan]:
    try:
        while True:
            yield plan
            plan = plan_redistribution(source, target, shape, max_peak_bytes=plan.peak_bytes - 1)
    except MemoryError:
        return


def test_every_way_that_a_plan_is_chosen_from_is_right() -> None:
    generator = random.Random(5)
    layouts = all_layouts(MESH_2X2X2, 2, ("sum", "max"))
    num_ways = 0
    for _ in share(5000, 150):
        source, target = generator.choice(layouts), generator.choice(layouts)
        values = random_values((5, 6), generator)
        for steps in ways(source, target, (5, 6)):
            plan = Plan(source, target, (5, 6), 4, steps, 0.0, 0, 0.0)
            done = execute(plan, distribute(values, source, generator))
            assert np.array_equal(global_value(done.locals, target, (5, 6)), values), plan
            num_ways += 1
    assert num_ways > 300


class OneRank(simulated_ranks.LocalOperations):
    """A transport that is alone, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def all_gather(self, **arguments: Any) -> Any:
        self.calls.append(("all_gather", arguments))
        return np.concatenate([arguments["tensor"]] * len(arguments["ranks"]), arguments["dim"])


def test_one_rank_executes_a_plan_through_its_transport() -> None:
    transport: Any = OneRank()
    plan = plan_redistribution(MESH_2X3.layout(None, "b"), MESH_2X3.layout(None, None), (2, 6))
    local = np.ones((2, 2))
    assert redistribute(local, plan, (1, 1), transport).shape == (2, 6)
    [(method, arguments)] = transport.calls
    assert method == "all_gather"
    assert arguments["ranks"] == (0, 7, 2)  # in the order of the mesh
    assert arguments["dim"] == 1
    same = plan_redistribution(MESH_2X3.layout(None, "b"), MESH_2X3.layout(None, "b"), (2, 6))
    assert redistribute(local, same, (1, 1), transport) is local


def test_wrong_arguments_are_refused_in_words() -> None:
    source = MESH_2X4.layout("a", None)
    with pytest.raises(ValueError, match="different meshes"):
        plan_redistribution(source, MESH_2X3.layout("a", None), (4, 4))
    with pytest.raises(ValueError, match="does not fit the layout"):
        plan_redistribution(source, MESH_2X4.layout("a"), (4, 4))
    with pytest.raises(ValueError, match="An element has a size"):
        plan_redistribution(source, source, (4, 4), 0)
    with pytest.raises(ValueError, match="`bytes_per_us` is not positive"):
        CostModel(bytes_per_us=0.0)
    with pytest.raises(ValueError, match="`peer_us` is negative"):
        CostModel(peer_us=-1.0)
    plan = plan_redistribution(source, MESH_2X4.layout(None, None), (4, 4))
    with pytest.raises(ValueError, match=r"Expected \[2, 4\], got \[4, 4\]"):
        redistribute(np.zeros((4, 4)), plan, (0, 0), OneRank())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="depend on its values"):
        plan_gradient(source, MESH_2X4.layout("a", None, partial={"b": "prod"}), (4, 4))


def test_the_text_of_a_plan_shows_its_steps() -> None:
    plan = plan_redistribution(MESH_2X4.layout("a", None, partial="b"), MESH_2X4.layout("a", "b"), (8, 8))
    assert repr(plan) == (
        "Plan(Layout(a, -; partial sum over b) -> Layout(a, b) of [8, 8], 96 bytes received)\n"
        "  reduce-scatter sum over b: Layout(a, -; partial sum over b) -> Layout(a, b)"
    )


def test_what_stays_partial_and_in_which_order_the_rest_is_reduced() -> None:
    mesh = MESH_2X2X2
    plain = mesh.layout(None)

    def work(source: dict[str, str], target: dict[str, str]) -> Any:
        return partial_work(plain.replace(partial=source), plain.replace(partial=target))

    assert work({}, {}) == ((), (), ())
    assert work({"a": "sum", "b": "avg"}, {}) == ((), (("a", "b"),), ())
    assert work({"a": "sum", "b": "max", "c": "max"}, {}) == ((), (("b", "c"), ("a",)), ())
    assert work({"a": "sum", "b": "max", "c": "sum"}, {}) == ((), (("c",), ("b",), ("a",)), ())
    assert work({"a": "sum", "b": "max"}, {"a": "sum"}) == (("a",), (("b",),), ())
    # The maximum comes before the sum: it cannot stay while the sum goes.
    assert work({"a": "sum", "b": "max"}, {"b": "max"}) == ((), (("b",), ("a",)), (("b", "max"),))
    assert work({"a": "sum", "b": "avg"}, {"b": "avg"}) == (("b",), (("a",),), ())
    assert work({"a": "max"}, {"a": "sum"}) == ((), (("a",),), (("a", "sum"),))
    # Ones that stand for "no factor" on `a` would be summed over `b`.
    assert work({"b": "sum"}, {"a": "prod", "b": "sum"}) == ((), (("b",),), (("a", "prod"), ("b", "sum")))
    assert work({"b": "max"}, {"a": "prod", "b": "max"}) == (("b",), (), (("a", "prod"),))


def test_pairs_of_a_family_are_all_pairs() -> None:
    family = Family(MESH_2X4, (4, 4), (), EVERY)
    layouts = all_layouts(MESH_2X4, 2)
    assert {(source, target) for source, target, _ in family.pairs()} == set(itertools.product(layouts, repeat=2))
