"""Models that are built without memory are filled with the values of one process, however they are cut."""

from __future__ import annotations

import random
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hyper_parallel as hp
from support.backends import Backend
from support.campaign import share
from support.interpreter import run_fresh
from support.numbers_on_ranks import chosen, layers, run  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("chosen")

MODELS = ["sequence", "llama", "gpt2", "mixtral"]


# -- on ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["layouts", "fsdp2"])
@pytest.mark.parametrize("model", MODELS)
def test_parts_are_those_of_one_process_bit_for_bit(model: str, way: str) -> None:
    assert run(4, "filled", model, way) == [[]] * 4


def test_parts_of_fully_shard_and_tensor_parallel_together_are_as_well() -> None:
    assert run(4, "filled", "sequence", "2d") == [[]] * 4


@pytest.mark.parametrize(("ranks", "stages", "is_cut"), [(2, 2, False), (4, 4, False), (4, 2, False), (4, 2, True)])
def test_stages_with_a_tied_embedding_are_as_well_and_so_is_their_norm(ranks: int, stages: int, is_cut: bool) -> None:
    assert run(ranks, "filled_in_stages", stages, is_cut) == [[]] * ranks


def test_random_models_in_random_stages_and_layouts_are_as_well() -> None:
    for seed in share(400, 12):
        assert run(4, "filled_randomly", seed) == [[]] * 4


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zbv", "dualpipe"])
def test_a_pipeline_is_filled_after_it_was_made(schedule: str) -> None:
    assert run(2, "pipeline_on_meta", schedule) == [[], []]


@pytest.mark.parametrize("begins_with_values", [False, True])
def test_a_model_of_fully_shard_trains_after_it_and_is_filled_again(begins_with_values: bool) -> None:
    assert run(2, "trained_with_fsdp2", begins_with_values) == [[], []]


def test_a_rank_never_holds_more_than_its_parts_and_one_whole_module() -> None:
    for most, parts, module in run(4, "most_bytes"):
        assert parts < most <= parts + module


def test_layouts_and_stages_are_as_well_on_mindspore() -> None:
    assert run(2, "filled_in_layouts", framework="mindspore") == [[], []]
    assert run(2, "filled_in_stages", framework="mindspore") == [[], []]


def test_ranks_with_other_seeds_are_told() -> None:
    for answer in run(2, "other_seeds"):
        assert "one seed" in answer


def test_without_a_seed_all_ranks_take_that_of_the_first() -> None:
    first, second = run(2, "drawn_seed")
    assert first == second


def test_stages_whose_modules_have_the_same_names_are_refused() -> None:
    for answer in run(2, "stages_with_one_name"):
        assert "'0' twice" in answer


# -- in one process, on both frameworks ---------------------------------------------------------------------------------


def on_meta(make: Callable[..., Any], *arguments: object) -> Any:
    with hp.init_on_device("meta"):
        return make(*arguments)


def numbers(backend: Backend, platform: Any, model: Any) -> dict[str, np.ndarray]:
    return {name: backend.numbers(value) for name, value in platform.parameters_dict(model).items()}


def test_values_depend_on_the_seed_and_the_name_alone(backend: Backend, platform: Any) -> None:
    first, again, other = (on_meta(layers, backend) for _ in range(3))
    assert all(parameter.is_meta for parameter in platform.parameters_dict(first).values())
    assert hp.materialize(first, 0) is first
    platform.manual_seed(1234)
    hp.materialize(again, 0)
    hp.materialize(other, 1)
    values = numbers(backend, platform, first)
    assert all(np.array_equal(values[name], value) for name, value in numbers(backend, platform, again).items())
    assert not np.array_equal(values["0.weight"], numbers(backend, platform, other)["0.weight"])
    assert not np.array_equal(values["0.weight"], values["1.weight"])


def test_generators_go_on_as_if_nothing_had_been_drawn(backend: Backend, platform: Any) -> None:
    model = on_meta(layers, backend)
    hp.manual_seed(0)
    expected = random.random(), np.random.random()
    hp.manual_seed(0)
    hp.materialize(model, 3)
    assert (random.random(), np.random.random()) == expected


def test_blocks_are_nested_end_with_an_error_and_hold_for_their_thread(backend: Backend, platform: Any) -> None:
    elsewhere: list[bool] = []

    def build() -> None:
        model = layers(backend)
        elsewhere.extend(parameter.is_meta for parameter in platform.parameters_dict(model).values())

    def fail() -> None:
        raise KeyError

    with hp.init_on_device("meta"):
        with hp.init_on_device("cpu"):
            inner = layers(backend)
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    with pytest.raises(KeyError), hp.init_on_device("meta"):
        fail()
    after = layers(backend)
    for model in (inner, after):
        assert not any(parameter.is_meta for parameter in platform.parameters_dict(model).values())
    assert elsewhere == [False] * 4


def test_what_is_no_model_is_refused(backend: Backend) -> None:
    for wrong in (3, [], [layers(backend), 3]):
        with pytest.raises(TypeError, match="takes a model"):
            hp.materialize(wrong, 0)
    with pytest.raises(TypeError, match="whole number"):
        hp.materialize(layers(backend), 0.5)
    with pytest.raises(ValueError, match="twice"):
        hp.materialize([layers(backend), layers(backend)], 0)


def test_a_second_call_gives_the_same_values_or_says_that_mindspore_runs_an_initializer_once(
    backend: Backend, platform: Any
) -> None:
    model = hp.materialize(on_meta(layers, backend), 0)
    before = {name: value.copy() for name, value in numbers(backend, platform, model).items()}
    if backend.name.startswith("torch"):
        platform.parameters_dict(model)["0.bias"].data.fill_(3.0)
        hp.materialize(model, 0)
    else:
        with pytest.raises(RuntimeError, match=r"runs once.* got none for 0\.weight"):
            hp.materialize(model, 0)
    for name, value in numbers(backend, platform, model).items():
        assert np.array_equal(value, before[name])


# -- in one process, on PyTorch -----------------------------------------------------------------------------------------


@pytest.fixture
def nn() -> Any:
    pytest.importorskip("torch")
    from torch import nn

    return nn


def test_a_model_with_values_begins_again(nn: Any) -> None:
    import torch

    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    parameters = list(model.parameters())
    model[1].running_mean.fill_(5)
    hp.materialize(model, 0)
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
    fresh = hp.materialize(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))), 0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name])


class Frequencies:
    """What a rotary embedding has: numbers that its constructor computes and nothing else."""

    @staticmethod
    def of(nn: Any) -> Any:
        import torch

        module = nn.Linear(2, 2)
        module.register_buffer("inverse", 1 / torch.arange(1.0, 4.0), persistent=False)
        return module


def test_buffers_that_a_constructor_computes_are_kept_or_named(nn: Any) -> None:
    import torch

    kept = hp.materialize(on_meta(Frequencies.of, nn), 0)
    assert kept.inverse.tolist() == pytest.approx([1, 1 / 2, 1 / 3])
    with torch.device("meta"):
        lost = Frequencies.of(nn)
    with pytest.raises(RuntimeError, match="none for inverse"):
        hp.materialize(lost, 0)
    assert not lost.weight.is_meta
    assert lost.inverse.is_meta


def test_a_tensor_that_is_no_buffer_and_has_no_memory_is_named(nn: Any) -> None:
    import torch

    with torch.device("meta"):
        module = nn.Linear(2, 2)
        module.table = torch.arange(3)
    with pytest.raises(RuntimeError, match="table on the meta device"):
        hp.materialize(nn.Sequential(module), 0)
    assert module.weight.is_meta


def test_a_parameter_that_nothing_writes_is_named(nn: Any) -> None:
    import torch

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4))

        def reset_parameters(self) -> None:
            self.weight.data[:2] = 1.0

    model = nn.Sequential(nn.Linear(3, 3), Scale(), Half())
    before = model[1].weight.clone()
    with pytest.raises(RuntimeError, match=r"none for 1\.weight, 2\.weight"):
        hp.materialize(model, 0)
    assert torch.equal(model[1].weight, before)


def test_an_initialiser_around_writes_to_the_modules_in_it(nn: Any) -> None:
    import torch

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.own = nn.Parameter(torch.empty(3))

        def reset_parameters(self) -> None:
            nn.init.zeros_(self.inner.bias)
            nn.init.normal_(self.own)

    model = hp.materialize(on_meta(Around), 0)
    assert model.inner.bias.tolist() == [0.0, 0.0]
    assert model.inner.weight.abs().sum() > 0


def test_an_initialiser_that_reads_other_modules_is_an_error_and_leaves_the_tables_as_they_were(nn: Any) -> None:
    import torch

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Linear(2, 2), nn.Linear(2, 2)

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.target.weight.copy_(self.source.weight)

    model = Copies()
    parameters = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="An initialiser failed"):
        hp.materialize(model, 0)
    assert all(value is parameters[name] for name, value in model.named_parameters())


def test_wrapped_shared_and_recurrent_modules_have_the_values_of_plain_ones(nn: Any) -> None:
    import torch

    def make() -> Any:
        shared = nn.Linear(4, 4)
        return nn.Sequential(shared, nn.LSTM(4, 4), nn.MultiheadAttention(4, 2), shared)

    plain, wrapped = hp.materialize(make(), 0), on_meta(make)
    wrapped[0] = hp.checkpoint_wrapper(wrapped[0])
    parameter = wrapped[3].weight
    hp.materialize(wrapped, 0)
    assert wrapped[3].weight is parameter is wrapped[0].weight
    found = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in wrapped.named_parameters()}
    for name, value in plain.named_parameters():
        assert torch.equal(value, found[name])
    inputs = torch.ones(2, 1, 4)
    assert torch.equal(plain[1](inputs)[0], wrapped[1](inputs)[0])


def test_a_lazy_module_is_refused(nn: Any) -> None:
    with pytest.raises(RuntimeError, match="does not know its sizes"):
        hp.materialize(nn.Sequential(nn.LazyLinear(2)), 0)


def test_of_two_frameworks_that_are_installed_the_imported_one_is_meant(nn: Any) -> None:
    program = """
        import sys, torch, hyper_parallel as hp
        with hp.init_on_device("meta"):
            model = torch.nn.Linear(2, 2)
        assert model.weight.is_meta
        hp.manual_seed(3)
        first = torch.rand(2)
        torch.manual_seed(3)
        assert torch.equal(first, torch.rand(2))
        assert "mindspore" not in sys.modules
    """
    assert run_fresh(textwrap.dedent(program), HYPER_PARALLEL_PLATFORM="") is None


def test_values_need_memory(nn: Any) -> None:
    with pytest.raises(ValueError, match="Values need memory"):
        hp.materialize(nn.Linear(2, 2), 0, device="meta")
