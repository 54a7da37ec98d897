"""Programs with distributed tensors on real ranks, beside the same on one device (MindSpore)."""

from __future__ import annotations

from typing import Any

import pytest

from support import processes
from support.campaign import share

pytest.importorskip("mindspore")


def on_ranks(function: str, *arguments: Any, ranks: int = 4) -> list[Any]:
    from support import mindspore_dtensor_programs as programs

    return processes.pool("mindspore", ranks).run(getattr(programs, function), *arguments, deadline_s=300)


def check(found: list[dict[str, bool]]) -> None:
    for rank, outcomes in enumerate(found):
        assert all(outcomes.values()), f"rank {rank}: {[name for name, is_right in outcomes.items() if not is_right]}"


@pytest.mark.parametrize("driver", ["value_and_grad", "tape"])
@pytest.mark.parametrize("kind", ["Dense", "Linear"])
def test_a_tensor_parallel_mlp_has_the_gradients_of_one_device_and_sends_what_it_must(kind: str, driver: str) -> None:
    for rank, found in enumerate(on_ranks("tensor_parallel_mlp", kind, driver, ranks=2)):
        assert found["difference"] < 1e-6
        assert found["forward"] == {"all_reduce": 1}
        assert found["backward"] == {"all_reduce": 1}
        assert found["all"] == {"all_reduce": 2}
        assert found["value"]
        assert found["names"] == ["up.weight", "up.bias", "down.weight", "down.bias"]
        assert found["local"] == [(4, 6), (4,), (6, 4), (6,)], rank


@pytest.mark.parametrize("plan", ["by words", "by width", "by rows"])
def test_cells_of_the_framework_have_the_loss_and_gradients_of_one_device(plan: str) -> None:
    for found in on_ranks("cells", plan, ranks=2):
        assert len(found) == 7
        assert max(found.values()) < 5e-6, found


OPTIMIZERS = [
    "Adam",
    "by hand",
    "SGD",
    "AdamWeightDecay",
    "experimental AdamW",
]  # the first ones in every run: compiling takes seconds


@pytest.mark.parametrize("optimizer", [OPTIMIZERS[index] for index in share(5, 2)])
def test_steps_of_optimizers_on_local_parameters_are_those_of_one_device(optimizer: str) -> None:
    assert max(on_ranks("trained", optimizer, None)) < 5e-6


@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_gradients_are_clipped_by_the_norm_of_the_whole(norm: float) -> None:
    assert max(on_ranks("trained", "by hand", norm)) < 5e-6


def test_a_parameter_with_a_layout_is_copied_pickled_loaded_and_still_learns() -> None:
    check(on_ranks("parameters"))


def test_a_local_function_on_shards_has_right_gradients() -> None:
    check(on_ranks("on_shards"))


@pytest.mark.parametrize("shape", [(4, 8), (5, 3)], ids=["even", "uneven"])
def test_redistribution_between_random_layouts_has_right_values_and_gradients(shape: tuple[int, ...]) -> None:
    count = len(share(400, 20))
    assert on_ranks("random_redistributions", "2x2", shape, 7, count) == [count] * 4


def test_gradients_of_maxima_and_products_over_split_dims() -> None:
    check(on_ranks("gradients_of_extremes"))


def test_a_rank_without_rows_takes_part_in_the_gradients_of_views() -> None:
    for found in on_ranks("views_of_nothing"):
        assert max(found) < 2e-6


def test_random_numbers_do_not_depend_on_the_mesh() -> None:
    for found in on_ranks("one_stream_of_random_numbers"):
        assert all(found), found


def test_dropout_draws_alike_where_parts_are_alike() -> None:
    for found in on_ranks("dropout_by_part"):
        assert 0.4 < found.pop("share") < 0.6
        assert all(found.values()), found


def test_everything_that_is_asked_of_a_tensor_means_the_whole() -> None:
    check(on_ranks("what_it_looks_like"))


def test_unknown_operators_compute_on_whole_tensors_where_asked() -> None:
    check(on_ranks("unknown_ops_on_whole_tensors"))


def test_a_hook_gets_a_distributed_gradient_and_uses_are_reduced_once() -> None:
    check(on_ranks("hooks_of_gradients"))


def test_mistakes_are_said_on_every_rank() -> None:
    words = {
        "no rule": ["NotImplementedError", "`Diag` has no rule", "Spec[4, 6]", "hp.DistributedOp"],
        "two meshes": ["ValueError", "different meshes"],
        "plain": ["plain tensor among its distributed ones", "distribute_tensor"],
        "plain on the left": ["plain tensor among its distributed ones"],
        "plain in a list": ["plain tensor among its distributed ones"],
        "plain parameter": ["plain tensor among its distributed ones"],
        "shapes": ["ValueError", "do not fit together", "MatMulExt"],
        "stretched": ["ValueError", "do not fit together"],
        "dims": ["ValueError", "other dims"],
        "other mesh": ["ValueError", "another mesh"],
        "numpy": ["no memory of its own", "full_tensor"],
        "item": ["ValueError", "Only one element"],
        "write": ["NotImplementedError", "by index"],
        "mask": ["not by a mask"],
        "in place": ["NotImplementedError", "in place", "assign_add"],
        "plain in an older list": ["ValueError", "plain tensor"],
        "uneven": ["ValueError", "pass `shape`"],
        "one rank is wrong": ["ValueError", "rank 3"],
        "implicit": ["would have to move", "Softmax"],
        "class": ["TypeError", "from_local"],
        "a layout already": ["ValueError", "layout already"],
        "optimizer": ["RuntimeError", "p.to_local()"],
        "plain data": ["TypeError", "those of a DTensor"],
    }
    for said in on_ranks("errors"):
        assert set(said) == set(words)
        for name, parts in words.items():
            for part in parts:
                assert part in said[name], f"{name}: {said[name]}"


def test_no_method_of_a_tensor_answers_local_values_as_if_they_were_the_whole() -> None:
    assert on_ranks("methods_that_answer_plain_tensors", ranks=2) == [[], []]
