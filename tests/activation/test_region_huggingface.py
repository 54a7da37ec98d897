"""Hugging Face models as they are, with regions around their layers: the gradients and random numbers of the plain run, bit for bit."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel import policies as p
from hyper_parallel.platform import selection
from support.swapping import Swapping

NUM_LAYERS = 2
NUM_BATCHES = 3


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    transformers = pytest.importorskip("transformers", reason="the models are in the package `transformers`")
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture(autouse=True)
def as_in_a_new_process(on_disk: Swapping) -> Iterator[None]:
    """Small enough a window that what is swapped really leaves; no framework is chosen afterwards."""
    with on_disk.configured(window_bytes="4KiB", prefetch_bytes="16KiB"):
        yield
    selection._forget()


# -- the models ---------------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    make: Callable[[Any], nn.Module]  # given the package
    layers: Callable[[Any], list[nn.ModuleList]]
    is_text: bool = True


def mixtral(transformers: Any, **options: Any) -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**LLAMA, num_local_experts=8, output_router_logits=True, **options)
    )


LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
}
MODELS = {
    "llama": Model(lambda hf: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), lambda model: [model.model.layers]),
    "gpt2": Model(
        lambda hf: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=NUM_LAYERS, n_head=4)),
        lambda model: [model.transformer.h],
    ),
    "mixtral": Model(mixtral, lambda model: [model.model.layers]),
    "t5": Model(
        lambda hf: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=NUM_LAYERS, num_heads=4, decoder_start_token_id=0
            )
        ),
        lambda model: [model.encoder.block, model.decoder.block],
    ),
    "vit": Model(
        lambda hf: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=32,
                num_hidden_layers=NUM_LAYERS,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=32,
                patch_size=8,
                hidden_dropout_prob=0.1,
                attention_probs_dropout_prob=0.1,
            )
        ),
        lambda model: [model.vit.encoder.layer if hasattr(model.vit, "encoder") else model.vit.layers],
        is_text=False,
    ),
}


def make(name: str, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return MODELS[name].make(transformers, **options).train()


def batch(name: str, number: int) -> dict[str, torch.Tensor]:
    """Each of another length and with other padding; the second is the longest."""
    generator = torch.Generator().manual_seed(number)
    if not MODELS[name].is_text:
        images = torch.randn(2 + number, 3, 32, 32, generator=generator)
        return {"pixel_values": images, "labels": torch.arange(2 + number) % 2}
    length = (5, 12, 9)[number]
    ids = torch.randint(1, 64, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length - 2 - number :] = 0
    ids[mask == 0] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trained(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Loss, logits, gradients and the random state after one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    out = model(**inputs)
    out.loss.backward()
    assert not torch.equal(torch.get_rng_state(), before), "dropout is on"
    gradients = {name: None if tensor.grad is None else tensor.grad for name, tensor in model.named_parameters()}
    return {
        "loss": out.loss.detach(),
        "logits": out.logits.detach(),
        "random state": torch.get_rng_state(),
        **gradients,
    }


@functools.cache
def plain(name: str) -> list[dict[str, torch.Tensor | None]]:
    return [trained(make(name), batch(name, number)) for number in range(NUM_BATCHES)]


def differences(got: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> list[str]:
    assert got.keys() == expected.keys()
    return [name for name in got if not _same(got[name], expected[name])]


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is right if left is None or right is None else torch.equal(left, right)


# -- the ways to wrap them ----------------------------------------------------------------------------------------------------


def assign(name: str, model: nn.Module, **options: Any) -> None:
    for layers in MODELS[name].layers(model):
        for i, layer in enumerate(layers):
            layers[i] = hp.checkpoint_wrapper(layer, **options)


def apply(name: str, model: nn.Module, **options: Any) -> None:
    kinds = tuple({type(layer) for layers in MODELS[name].layers(model) for layer in layers})
    hp.apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(hp.checkpoint_wrapper, **options),
        check_fn=lambda module: isinstance(module, kinds),
    )


def swap_everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP


# With dropout there is no fused attention on the CPU: its matrix products are ops of their own, in the attention's module.
IN_ATTENTION = p.in_module("**.self_attn", "**.attn", "**.attention", "**.SelfAttention", "**.EncDecAttention")
MIX = p.choose(p.swap(p.attention | (p.matmuls & IN_ATTENTION)), p.save(p.matmuls))

OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": {"policy_fn": swap_everything},
    "mix": {"policy_fn": MIX},
    "swap_inputs": {"swap_inputs": True},
}


@pytest.mark.parametrize("wrap", [assign, apply], ids=["checkpoint_wrapper", "apply_activation_checkpointing"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_random_state_are_those_of_the_plain_model(
    name: str, options: str, wrap: Callable[..., None], on_disk: Swapping
) -> None:
    expected = plain(name)
    model = make(name)
    names = list(model.state_dict())
    wrap(name, model, **OPTIONS[options])
    assert list(model.state_dict()) == names
    assert len(list(hp.wrappers(model))) == NUM_LAYERS * len(MODELS[name].layers(model))
    before = on_disk.offloaded_bytes, on_disk.loaded_bytes
    for number in range(NUM_BATCHES):
        got = trained(model, batch(name, number))
        assert not differences(got, expected[number]), f"batch {number}"
    moved = on_disk.offloaded_bytes - before[0], on_disk.loaded_bytes - before[1]
    assert all(num_bytes > 0 for num_bytes in moved) if options != "recompute" else moved == (0, 0)


@pytest.mark.parametrize("name", MODELS)
def test_the_mix_gives_every_answer_in_every_model(name: str) -> None:
    answers: Counter[CheckpointPolicy] = Counter()

    def noted(ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        answer = MIX(ctx, op, *args, **kwargs)
        answers[answer] += 1
        return answer

    model = make(name)
    assign(name, model, policy_fn=noted)
    trained(model, batch(name, 0))
    assert answers.keys() == {
        CheckpointPolicy.MUST_SWAP,
        CheckpointPolicy.MUST_SAVE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    }


# -- the names of ops ---------------------------------------------------------------------------------------------------------


class Keys:
    """A policy that recomputes everything and notes by which key each op of a forward would be known again."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str, int]] = Counter()

    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> bool:
        if not ctx.is_recompute:
            self.found[ctx.module, str(op), ctx.occurrence] += 1
        return False


def keys_of_batches(name: str, model: nn.Module) -> list[set[tuple[str, str, int]]]:
    keys = Keys()
    assign(name, model, policy_fn=keys)
    found = []
    for number in range(NUM_BATCHES):
        keys.found.clear()
        trained(model, batch(name, number))
        assert set(keys.found.values()) == {1}, "one key, one op"
        found.append(set(keys.found))
    return found


def unknown_shares(name: str, keys: list[set[tuple[str, str, int]]]) -> list[float]:
    """What part of each later batch's keys the first one did not have; printed."""
    first, *later = keys
    shares = [len(each - first) / len(each) for each in later]
    text = ", ".join(f"{share:.1%}" for share in shares)
    print(f"{name}: {', '.join(str(len(each)) for each in keys)} ops; unknown after the first batch: {text}")
    return shares


@pytest.mark.parametrize("name", MODELS)
def test_the_keys_of_ops_are_the_same_for_every_batch(name: str) -> None:
    """Mixtral, too: by default its experts are one grouped product."""
    assert unknown_shares(name, keys_of_batches(name, make(name))) == [0, 0]


def test_where_the_tokens_decide_which_experts_run_the_share_of_unknown_keys_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = make("mixtral", experts_implementation="eager")
    shares = unknown_shares("mixtral, one expert after the other", keys_of_batches("mixtral", model))
    # Five tokens a row, two experts a token: in the first and shortest batch some experts have nothing to do.
    assert all(0 <= share < 1 for share in shares)
    assert max(shares) > 0
    shown = capsys.readouterr().out
    assert "mixtral" in shown
    assert f"{shares[0]:.1%}, {shares[1]:.1%}" in shown
    print(shown, end="")


# -- caches -------------------------------------------------------------------------------------------------------------------


def contents(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.keys.detach().clone(), layer.values.detach().clone()) for layer in cache.layers]


@pytest.mark.parametrize("num_before", [0, 4], ids=["empty", "filled before"])
@pytest.mark.parametrize("options", OPTIONS)
def test_backward_leaves_the_returned_past_key_values_as_they_are(options: str, num_before: int) -> None:
    inputs = batch("llama", 1)
    ids, labels = inputs["input_ids"], inputs["labels"]

    def run(model: nn.Module) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        past = None
        if num_before:
            with torch.no_grad():
                past = model.eval()(input_ids=ids[:, :num_before]).past_key_values
            model.train()
        torch.manual_seed(7)
        out = model(input_ids=ids[:, num_before:], labels=labels[:, num_before:], past_key_values=past)
        before = contents(out.past_key_values)
        lengths = [out.past_key_values.get_seq_length(i) for i in range(NUM_LAYERS)]
        out.loss.backward()
        after = contents(out.past_key_values)
        assert [out.past_key_values.get_seq_length(i) for i in range(NUM_LAYERS)] == lengths
        assert lengths == [ids.shape[1]] * NUM_LAYERS
        assert all(
            torch.equal(one, other)
            for pair in zip(before, after, strict=True)
            for one, other in zip(*pair, strict=True)
        )
        return [parameter.grad for parameter in model.parameters()], after

    gradients, cache = run(make("llama"))
    model = make("llama")
    assign("llama", model, **OPTIONS[options])
    wrapped_gradients, wrapped_cache = run(model)
    assert all(map(torch.equal, wrapped_gradients, gradients))
    assert all(
        torch.equal(one, other)
        for pair in zip(wrapped_cache, cache, strict=True)
        for one, other in zip(*pair, strict=True)
    )
