"""Programs with distributed tensors on real ranks, beside the same on one device (PyTorch)."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import dtensor_programs as programs
from support import processes
from support.campaign import share

pytest.importorskip("torch")


def on_ranks(function, *arguments, ranks: int = 4):
    return processes.pool("torch", ranks).run(function, *arguments, deadline_s=120)


def test_a_tensor_parallel_mlp_has_the_gradients_of_one_device_and_sends_what_it_must() -> None:
    for found in on_ranks(programs.tensor_parallel_mlp, ranks=2):
        assert found["difference"] < 1e-6
        assert found["input"] < 1e-5
        assert found["forward"] == {"all_reduce": 1}
        assert found["backward"] == {"all_reduce": 1}
        assert found["why"] == ["asked", "gradient"]
        assert "all_reduce" in found["text"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_tensor_parallel_llama_block_sends_one_reduction_per_half_and_direction(ranks: int) -> None:
    for found in on_ranks(programs.llama_block, False, ranks, ranks=ranks):
        assert found["difference"] < 1e-6
        assert found["input"] < 1e-5
        assert found["forward"] == {"all_reduce": 2}
        assert found["backward"] == {"all_reduce": 2}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sequence_parallel_llama_block_gathers_and_scatters(ranks: int) -> None:
    for found in on_ranks(programs.llama_block, True, ranks, ranks=ranks):
        assert found["difference"] < 1e-6
        assert found["input"] < 1e-5
        assert found["forward"] == {"all_gather": 2, "reduce_scatter": 2}
        # the weights of the two norms meet a split sequence: their gradients are summed
        assert found["backward"] == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2}


@pytest.mark.parametrize("optimizer", programs.OPTIMIZERS)
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_optimizers_train_as_on_one_device(optimizer: str, clip: bool) -> None:
    assert max(on_ranks(programs.trained, optimizer, clip)) < 2e-6


@pytest.mark.parametrize("mesh", ["4", "2x2"])
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (2, 3, 5)], ids=str)
def test_any_layout_becomes_any_other_and_so_do_gradients(mesh: str, shape: tuple[int, ...]) -> None:
    count = len(share(400, 25))
    assert on_ranks(programs.random_redistributions, mesh, shape, 11, count) == [count] * 4


def test_random_tensors_are_those_of_one_device_whatever_the_mesh() -> None:
    for found in on_ranks(programs.one_stream_of_random_numbers):
        assert all(found)


def test_dropout_draws_the_same_for_replicas_and_others_for_parts() -> None:
    for found in on_ranks(programs.dropout_by_part):
        assert found.pop("share") == pytest.approx(0.5, abs=0.15)
        assert all(found.values()), found


def test_pytorchs_own_tensors_share_the_memory() -> None:
    for found in on_ranks(programs.to_torch_and_back):
        assert all(found.values()), found


def test_pytorchs_clipping_is_right_where_a_part_of_the_model_is_sharded() -> None:
    for found in on_ranks(programs.clipped_by_pytorch, ranks=2):
        assert all(found.values()), found


def test_pytorchs_placements_and_meshes_are_taken_wherever_ours_are() -> None:
    for found in on_ranks(programs.pytorchs_words, ranks=2):
        assert all(found.values()), found


def test_pytorchs_ways_of_saving_work_or_say_what_to_use(tmp_path: Path) -> None:
    for found in on_ranks(programs.saved_by_pytorch, str(tmp_path), ranks=2):
        assert "another rank's part" in found.pop("another rank's file")
        assert "`hp.distribute_tensor(tensor, mesh, placements)` of a whole tensor" in found.pop("whole tensors")
        assert "get_model_state_dict" in found.pop("save_checkpoint")
        (said,) = found.pop("PyTorch's whole tensors")
        assert "`platform.get_model_state_dict(model, options=options)`" in said
        assert all(found.values()), found


def test_mistakes_are_told_on_every_rank_and_nobody_waits() -> None:
    for said in on_ranks(programs.errors):
        assert said["no rule"].startswith("NoRuleError: The operator `fft_fft` has no rule")
        assert "hp.DistributedOp" in said["no rule"]
        assert "different meshes" in said["two meshes"]
        assert "plain tensor" in said["plain"]
        assert "distribute_tensor" in said["plain"]
        assert "(4, 6)" in said["shapes"]
        assert "pp" in said["axis"]
        assert "dims" in said["dims"]
        assert "to_local" in said["numpy"]
        assert "DFunction" in said["below"]
        assert "pass `shape`" in said["uneven"]
        assert "rank 3" in said["one rank is wrong"]
        assert "rank 1" not in said["one rank is wrong"]
        assert "in place" in said["in place"] or "No strategy" in said["in place"]
        assert "No strategy" in said["activation in place"]
        assert "torch.where" in said["mask"]
        assert "copy_" in said["out"]
        assert "change nothing" in said["set"]
        assert "softmax" in said["implicit"]
        assert "redistribute" in said["implicit"]
        assert "from_local" in said["class"]


def test_operators_without_a_rule_compute_on_whole_tensors_if_asked() -> None:
    for found in on_ranks(programs.unknown_ops_on_whole_tensors):
        assert all(found.values()), found


def test_gradients_of_every_kind_are_those_of_one_device() -> None:
    for found in on_ranks(programs.gradients_of_every_kind):
        assert all(found.values()), found


def test_a_weight_in_two_places_stays_one_and_buffers_come_along() -> None:
    for found in on_ranks(programs.tied_weights_and_buffers):
        assert all(found.values()), found


def test_a_local_function_runs_on_shards_with_the_gradients_of_one_device() -> None:
    for found in on_ranks(programs.local_functions):
        assert all(found.values()), found


def test_the_gradient_of_an_average_is_that_of_its_value() -> None:
    for found in on_ranks(programs.averages):
        assert all(found.values()), found


def test_axes_may_split_a_dim_in_any_order() -> None:
    assert all(on_ranks(programs.layouts_in_any_order))
