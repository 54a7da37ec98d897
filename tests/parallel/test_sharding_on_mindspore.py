"""Sharded cells on MindSpore train as one process does, and what cannot be right is refused in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support import processes

pytest.importorskip("mindspore")

from support import mindspore_sharded_pipelines as pipelines
from support import mindspore_sharding as training
from support import mindspore_sharding_programs as programs
from support import mindspore_sharding_states as states

DEADLINE_S = 90


@pytest.fixture(scope="module", autouse=True)
def processes_of_their_own() -> Iterator[None]:
    """A forward that raises inside of `value_and_grad` leaves MindSpore's process unfit for an index in a later hook.

    Whatever raises: a plain cell does it, too. So the tests after these get new processes.
    """
    yield
    for number in (1, 2, 4):
        processes.pool("mindspore", number).close()


def run(number: int, function: Any, *arguments: object) -> list[Any]:
    return processes.pool("mindspore", number).run(function, *arguments, deadline_s=DEADLINE_S)


@pytest.mark.parametrize(("num", "zero"), [(1, 3), (2, 1), (2, 2), (2, 3)])
def test_three_steps_of_adam_are_those_of_one_process(num: int, zero: int) -> None:
    assert max(run(num, training.steps, zero, "value_and_grad", 3, "float64")) <= 1e-12


@pytest.mark.parametrize("num", [1, 2])
def test_the_optimizer_of_mindspore_steps_on_local_parameters(num: int) -> None:
    """float32; one rank does the same operations as one process."""
    assert max(run(num, training.steps, 3, "tape", 2)) <= (0.0 if num == 1 else 1e-6)


def test_four_ranks_of_which_some_have_nothing_of_a_parameter() -> None:
    assert max(run(4, training.steps, 3, "value_and_grad", 2, "float64")) <= 1e-12


@pytest.mark.parametrize("title", programs.PROGRAMS)
def test_models_that_are_not_easy_train_as_in_one_process(title: str) -> None:
    assert run(2, programs.compare, title, 3) == [[], []]


@pytest.mark.parametrize(
    "title",
    [
        "tied",
        "a unit that some ranks pass by",
        "two forwards",
        "four microbatches",
        "weights",
        "regions inside of units",
    ],
)
@pytest.mark.parametrize("zero", [1, 2])
def test_the_tape_and_other_stages_of_zero_give_the_same(title: str, zero: int) -> None:
    assert run(2, programs.compare, title, zero, "tape") == [[], []]


@pytest.mark.parametrize("title", ["tied", "weights", "frozen parameters"])
def test_value_and_grad_of_this_package_gives_the_same(title: str) -> None:
    assert run(2, programs.compare, title, 3, "hp") == [[], []]


@pytest.mark.parametrize(("name", "zero"), [("one_f_one_b", 2), ("zbv", 3)])
def test_stages_of_a_pipeline_are_sharded(name: str, zero: int) -> None:
    assert run(4, pipelines.train, name, zero) == [[]] * 4


def test_norms_are_those_of_one_process() -> None:
    for ours, theirs in run(2, states.norms):
        assert ours == pytest.approx(theirs, rel=1e-12)


def test_a_model_without_memory_is_sharded_and_filled_afterwards() -> None:
    assert run(2, states.filled_afterwards) == [[], []]


@pytest.mark.parametrize("num", [2, 4])
def test_float32_sums_are_taken_in_the_order_of_the_ranks(num: int) -> None:
    assert run(num, states.order_of_sums) == [[]] * num


def test_copies_along_one_axis_and_parts_along_another() -> None:
    assert run(4, states.hybrid) == [[]] * 4


def test_weights_that_another_axis_cuts_as_well() -> None:
    assert max(run(4, states.over_two_axes)) <= 1e-6


@pytest.mark.parametrize(
    ("param", "reduce", "output", "largest"),
    [(None, "bfloat16", None, 2**-8), ("float16", "float32", "float32", 2**-8), ("float16", "float16", None, 2**-8)],
)
def test_mixed_precision(param: str | None, reduce: str | None, output: str | None, largest: float) -> None:
    """Half a unit in the last place of bfloat16 is 2**-9 of a value; a sum of two has two of them."""
    for error, wrong in run(2, states.mixed, param, reduce, output):
        assert 0 < error <= largest
        assert wrong == []


@pytest.mark.parametrize(
    ("zero", "reduce", "expected"),
    [(3, None, (24, 12, 0)), (3, "last", (24, 3, 0)), (2, None, (3, 12, 0)), (1, None, (3, 3, 0))],
)
def test_as_many_collectives_as_the_stage_says(zero: int, reduce: str | None, expected: tuple[int, int, int]) -> None:
    """Gathers, reductions and others, in four microbatches of three units."""
    assert run(2, states.collectives, zero, reduce) == [expected] * 2


@pytest.mark.parametrize("inside", [False, True])
def test_what_a_region_runs_again_is_not_gathered_once_more(inside: bool) -> None:
    assert run(2, states.collectives_of_regions, inside) == [(6, 3, 0)] * 2


@pytest.mark.parametrize("prefetch", [0, 1])
def test_one_block_is_whole_at_a_time(prefetch: int) -> None:
    assert run(1, states.most_whole_units, prefetch) == [1]


def test_nothing_is_left_of_a_step() -> None:
    assert run(1, states.growth) == [(0, 0, 0)]


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("kind", ["Exception", "Ctrl-C"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_an_error_is_right(where: str, kind: str, accumulates: bool) -> None:
    assert run(2, states.after_an_error, where, kind, 1 if accumulates else 3, accumulates) == [[], []]


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_that_change_between_forward_and_backward_are_an_error(zero: int) -> None:
    (said,) = run(1, states.changed_between, zero)
    assert said.startswith("StateError: Weights were changed between a forward and its backward")


@pytest.mark.parametrize("zero", [1, 3])
def test_new_weights_are_gathered_however_they_were_written(zero: int) -> None:
    assert run(2, states.new_weights_are_used, zero) == [[], []]


def test_a_write_in_forward_is_an_error_since_it_would_be_lost() -> None:
    for said in run(2, states.written_in_forward):
        assert said.startswith("StateError: A parameter was written to inside forward or backward")


def test_statistics_of_a_batch_normalization_stay_with_the_rank() -> None:
    assert run(2, states.statistics) == [0.0, 0.0]


def test_parameters_are_frozen_and_trained_again() -> None:
    assert run(2, states.frozen_and_not_any_more) == [[], []]


def test_a_unit_without_a_part_in_the_last_microbatch_is_an_error() -> None:
    """MindSpore takes gradients while backward passes: what comes later would be lost."""
    (said,) = run(1, states.late)
    assert said.startswith("StateError: There are gradients that come too late")


def test_a_copy_of_a_sharded_cell_says_what_it_is() -> None:
    for block, model, *wrong in run(2, states.of_a_copy):
        assert block.startswith("StateError: This cell is a copy of one that is sharded")
        assert model.startswith("StateError: This cell is a copy of one that is sharded")
        assert wrong == []


def test_graphs_are_refused_and_leave_the_model_as_it_was() -> None:
    ((in_jit, in_graph_mode, made, *wrong),) = run(1, states.compiled)
    for said in (in_jit, in_graph_mode, made):
        assert said.startswith("StateError: A sharded cell cannot be part of a graph: its parameters come and go")
    assert wrong == []


@pytest.mark.parametrize("when", ["around, before", "around, after", "of a unit, before", "inside, after"])
def test_a_backward_of_mindspores_own_is_refused(when: str) -> None:
    (said,) = run(1, states.recomputed, when)
    assert said.startswith("StateError: MindSpore's `Cell.recompute()`")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("twice", "ArgumentError: This module is sharded already."),
        ("fsdp2", "ArgumentError: MindSpore has no FSDP2."),
        ("list", "StateError: A cell holds parameters in a list"),
        ("hook", "StateError: A parameter has hooks"),
        ("optimizer", "StateError: MindSpore's optimizers compile their step"),
        ("replaced", "StateError: A sharded parameter was replaced by something else."),
    ],
)
def test_what_cannot_be_right_is_refused(what: str, words: str) -> None:
    (said,) = run(1, states.refusals)
    assert said[what].startswith(words)


def test_the_gradient_of_an_input_needs_none_of_parameters() -> None:
    assert run(2, states.input_gradient) == [0.0, 0.0]


def test_forwards_that_nothing_follows_leave_nothing() -> None:
    assert run(2, states.without_gradients) == [[], []]


def test_gradients_of_two_backwards_add_up_on_the_tape() -> None:
    assert run(2, states.kept_graph) == [[], []]


def test_a_parameter_that_no_rank_uses_has_no_gradient() -> None:
    used = [f"{name}.{kind}" for name in ("blocks.0", "left", "right") for kind in ("weight", "bias")]
    assert [sorted(found) for found in run(2, states.gradients_there)] == [sorted(used)] * 2


def test_names_order_and_values_are_those_of_the_model() -> None:
    assert run(2, states.names_and_state) == [[], []]
