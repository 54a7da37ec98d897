"""Models that nobody wrote for stages are cut into them and train as in one process, or are refused in words.

All families of Hugging Face's: HYPER_PARALLEL_CAMPAIGN=full python3 start.py test tests/parallel/test_stages_of_models.py
"""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.platform import selection
from support import listed_models as listed
from support import processes
from support.campaign import share
from support.schedule_names import SCHEDULES

transformers = pytest.importorskip("transformers", reason="the models are in the package `transformers`")

from support import hugging_face_families as families  # noqa: E402 - needs the package

IN_EVERY_RUN = [
    "llama",
    "gpt2",
    "mixtral",
    "qwen2",
    "qwen3_moe",
    "gemma3_text",
    "opt",
    "bloom",
    "gpt_neox",
    "mamba",
    "deepseek_v3",
    "phi3",
    "bert",
    "whisper",
]
REFUSED = {
    "glm_moe_dsa": "`prev_topk_indices` of block 1, which depends on what a block has returned",
    "hrm_text": "got model.L_module.layers of 4, model.H_module.layers of 4",
    "hy_v4": "`prev_topk_indices` of block 1, which depends on what a block has returned",
    "inkling2_text": "argument 1 of block 1, which depends on model.embed_tokens.weight",
    "roformer": "given more than the hidden states that depends on weights",
    "rwkv": "its forward could not be followed",
    "xlm": "got transformer.attentions of 4, transformer.layer_norm1 of 4",
    "zamba": "which depends on model.embed_tokens.weight",
}  # docs/pipelines.md has them, too


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)
    selection._forget()


# -- Hugging Face's ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", IN_EVERY_RUN)
def test_a_family_trains_in_stages_as_in_one_process(family: str) -> None:
    assert families.outcome(family) == "trains"


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_cut_is_refused_in_words(family: str) -> None:
    said = families.outcome(family)
    assert said.startswith("refused: ")
    assert REFUSED[family] in said


@pytest.mark.skipif(os.environ.get("HYPER_PARALLEL_CAMPAIGN") != "full", reason="all families are a campaign")
def test_of_all_families_none_trains_otherwise_than_in_one_process() -> None:
    outcomes = {family: families.outcome(family).partition(":")[0] for family in families.families()}
    assert [family for family, outcome in outcomes.items() if outcome == "wrong"] == []
    if transformers.__version__.startswith("5.23."):  # of which docs/pipelines.md tells
        assert {family for family, outcome in outcomes.items() if outcome == "refused"} == set(REFUSED)
        assert Counter(outcomes.values()) == {"trains": 131, "refused": 8, "not built": 50}


@pytest.mark.parametrize(
    ("family", "name", "way"),
    [("gpt2", "zbv", "a dict"), ("mixtral", "one_f_one_b", "keywords"), ("llama", "interleaved", "arguments")],
)
def test_ranks_train_it_with_tied_weights_padding_and_few_labels(family: str, name: str, way: str) -> None:
    run = processes.pool("torch", 2).run
    assert run(listed.train_family, family, name, way, deadline_s=120) == [[], []]


@pytest.mark.parametrize("seed", share(60, 2))
def test_ranks_train_any_family_by_any_schedule(seed: int) -> None:
    choose = random.Random(f"families {seed}")
    family = choose.choice([family for family in IN_EVERY_RUN if family != "whisper"])  # which weighs no labels
    num_ranks = choose.choice([2, 2, 4])
    name = choose.choice(sorted(SCHEDULES) if num_ranks == 2 else ["gpipe", "one_f_one_b", "zb_h1"])
    way = choose.choice(["a dict", "keywords", "arguments"])
    run = processes.pool("torch", num_ranks).run
    assert run(listed.train_family, family, name, way, num_ranks, deadline_s=120) == [[]] * num_ranks


def test_copies_of_a_weight_that_ranks_have_filled_by_chance_begin_equal() -> None:
    first, second = processes.pool("torch", 2).run(listed.filled_copies, "one_f_one_b", deadline_s=120)
    assert first == second
    assert len(first) == 1


def test_names_are_those_of_the_whole_model_and_every_weight_is_in_a_stage() -> None:
    model = families.make("llama")
    stages = hp.split_stages(model, 3, by=["model.layers.1", "model.layers.3"])
    names = [name for stage in stages for name, _ in stage.module.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert "model.embed_tokens.weight" in dict(stages[0].module.named_parameters())
    assert all(
        weight is model.get_parameter(name) for stage in stages for name, weight in stage.module.named_parameters()
    )


def test_a_stage_lets_go_of_the_blocks_of_others_without_the_collector() -> None:
    model = families.make("llama")
    gc.collect()
    gc.disable()
    try:
        first, second = hp.split_stages(model, 2)
        weight = weakref.ref(model.model.layers[3].mlp.up_proj.weight)
        assert any(weight() is parameter for parameter in second.module.parameters())
        del model, second
        assert weight() is None
    finally:
        gc.enable()
    assert first.module.config.num_hidden_layers == 4


def test_a_step_leaves_nothing_to_the_collector() -> None:
    model = families.make("llama")
    pipeline = hp.Pipeline(hp.split_stages(model, 2), listed.one_process(2, 2))
    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            pipeline.step(families.batch())
            pipeline.zero_grad()
            counts.append(sum(isinstance(found, torch.Tensor) for found in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[2] == counts[-1]


def test_a_model_without_data_is_cut_and_each_stage_filled_by_itself() -> None:
    with torch.device("meta"):
        model = families.make("llama")
    stages = hp.split_stages(model, 2)
    for stage in stages:
        stage.init_parameters()
    loss = hp.Pipeline(stages, listed.one_process(2, 2)).step(families.batch())
    whole = families.make("llama")
    for stage in stages:
        whole.load_state_dict(stage.module.state_dict(), strict=False)
    with families.float64():
        assert abs(loss.item() - families.looped(whole, families.batch(), 2)[0]) < 1e-5
    assert model.model.norm.weight.device.type == "meta"


@pytest.mark.parametrize(
    "way", ["regions in the model", "regions in the stages", "a region around a stage", "their own"]
)
def test_regions_inside_of_stages_change_no_bit_while_several_microbatches_are_alive(way: str) -> None:
    def trained(way: str) -> dict[str, torch.Tensor]:
        model = families.make("llama")
        layers = model.model.layers
        if way == "regions in the model":
            for number, layer in enumerate(layers):
                layers[number] = hp.checkpoint_wrapper(layer)
        if way == "their own":
            model.activation_checkpointing_enable({"use_reentrant": False})
        stages = hp.split_stages(model, 2)
        for stage in stages:
            own = stage.module.model.layers
            for number in (2 * stage.index, 2 * stage.index + 1):
                own[number] = hp.checkpoint_wrapper(own[number]) if way == "regions in the stages" else own[number]
        if way == "a region around a stage":
            stages = [hp.PipelineStage(hp.checkpoint_wrapper(stage.module), stage.index, 2) for stage in stages]
        return step_twice(stages, model)

    assert_same(trained(way), trained("nothing"))


def test_memory_plans_of_stages_change_no_bit_while_several_microbatches_are_alive() -> None:
    def trained(is_planned: bool) -> dict[str, torch.Tensor]:
        model = families.make("llama")
        stages = hp.split_stages(model, 2)
        part = {key: value[:2] for key, value in families.batch().items()}
        if is_planned:
            hidden = torch.randn(2, 8, 32, dtype=torch.float64, requires_grad=True)
            for stage, batch in zip(stages, [part, {"received": hidden, **part}], strict=True):
                loss_fn = None if stage.is_last else torch.sum
                plan = hp.plan_memory(stage.module, batch, loss_fn=loss_fn, budget="90%", progress=False)
                assert not plan.is_empty
                plan.apply(stage.module)
        return step_twice(stages, model)

    assert_same(trained(is_planned=True), trained(is_planned=False))


def step_twice(stages: list[hp.PipelineStage], model: nn.Module) -> dict[str, torch.Tensor]:
    pipeline = hp.Pipeline(stages, hp.schedules.zbv(1, 2))
    losses = [pipeline.step(families.batch()) for _ in range(4)]  # from the third one on, regions know their program
    return {"loss": losses[-1], **{name: weight.grad for name, weight in model.named_parameters()}}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found.values(), expected.values(), strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda batch: batch | {"output_hidden_states": True}, "Expected output_hidden_states=False"),
        (lambda batch: batch | {"num_items_in_batch": 7}, "weighs microbatches by their labels itself"),
        (lambda batch: {"input_ids": batch["input_ids"]}, "The last stage gives no loss"),
    ],
)
def test_a_batch_that_would_be_counted_wrongly_is_refused(change: Callable[[Any], Any], words: str) -> None:
    pipeline = hp.Pipeline(hp.split_stages(families.make("llama"), 2), listed.one_process(2, 2))
    with pytest.raises(ValueError, match=words):
        pipeline.step(change(families.batch()))


def test_a_loss_that_is_not_hugging_faces_wants_weights() -> None:
    model = families.make("llama")
    model.loss_function = lambda logits, labels, **_: logits.sum()
    pipeline = hp.Pipeline(hp.split_stages(model, 2), listed.one_process(2, 2))
    with pytest.raises(ValueError, match="Give weights= to `step`"):
        pipeline.step(families.batch())
    assert pipeline.step(families.batch(), weights=[1, 1]).isfinite()


# -- any model with a list of blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [listed.in_order, listed.by_keyword])
def test_a_model_of_ones_own_needs_only_an_example(calls: Any) -> None:
    model = listed.Listed(calls)
    ids = listed.ids()
    model(ids).square().mean().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    stages = hp.split_stages(model, 2, batch={"ids": ids[:1]})
    assert [next(iter(dict(stage.module.named_parameters()))) for stage in stages] == [
        "places",
        "blocks.2.linear.weight",
    ]
    pipeline = hp.Pipeline(stages, listed.one_process(2, 2), loss_fn=lambda out, _: out.square().mean())
    pipeline.step(ids)
    assert all(torch.allclose(weight.grad, expected[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (listed.backwards, "not called in order"),
        (listed.with_change_between, "block 1 is not given what the one before it has returned, as it is"),
        (listed.with_first_hidden, "argument 1 of block 0, which depends on "),
        (listed.with_notes, "its blocks share something that they can fill"),
        (listed.with_weight_under_no_grad, "argument 1 of block 0"),
    ],
)
def test_a_model_whose_blocks_need_more_than_hidden_states_is_refused(calls: Any, words: str) -> None:
    with pytest.raises(ValueError, match="cannot be cut by itself") as caught:
        hp.split_stages(listed.Listed(calls), 2, batch={"ids": listed.ids()})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("calls", "words"),
    [(listed.twice, "A block is called twice"), (listed.with_words_after, "words.weight")],
)
def test_what_only_the_first_step_can_see_is_refused_there(calls: Any, words: str) -> None:
    stages = hp.split_stages(listed.Listed(calls), 2, batch={"ids": listed.ids()})
    pipeline = hp.Pipeline(stages, listed.one_process(2, 2), loss_fn=lambda out, _: out.square().mean())
    with pytest.raises(RuntimeError, match=words):
        pipeline.step(listed.ids())


# -- by cost -----------------------------------------------------------------------------------------------------------


def test_weights_are_counted_where_nothing_is_measured() -> None:
    stages = hp.split_stages(families.make("llama"), 3, by="cost")
    assert str(stages) == (
        "stage 0: model.layers.0, 23.4% of the cost\n"
        "stage 1: model.layers.1 to model.layers.2, 46.9% of the cost\n"
        "stage 2: model.layers.3, 29.7% of the cost"
    )  # the last one has the head


def test_measuring_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    model(torch.randn(8, 4)).sum().backward()
    before = [tensor.clone() for tensor in (*model.state_dict().values(), *(w.grad for w in model.parameters()))]
    random = torch.get_rng_state()
    stages = hp.split_stages(model, 2, by="cost", batch=torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), random)
    after = [*model.state_dict().values(), *(weight.grad for weight in model.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert min(stages.costs) > 0


def test_all_ranks_cut_by_the_figures_of_the_first_one() -> None:
    first, second = processes.pool("torch", 2).run(listed.measured_costs, deadline_s=120)
    assert first == second
    assert len(first) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"by": "cost", "costs": [1, 2]}, "Expected 4 finite numbers from 0"),
        ({"by": "cost", "costs": [0, 0, 0, 0]}, "Blocks cost something"),
        ({"costs": [1, 1, 1, 1]}, 'Expected by="cost"'),
        ({"by": "weight"}, 'Expected "layers", "cost" or a list of names'),
    ],
)
def test_costs_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hp.split_stages(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), 2, **options)


def test_a_model_without_data_cannot_be_measured() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="without data cannot be measured"):
        hp.split_stages(model, 2, by="cost", batch=torch.ones(1, 2))


def test_a_rank_without_the_batch_says_so() -> None:
    with pytest.raises(processes.RankError) as caught:
        processes.pool("torch", 2).run(listed.batch_on_the_first_rank_only, deadline_s=5)
    assert "Each stage of such a model takes the whole batch" in str(caught.value.results.get(1))
