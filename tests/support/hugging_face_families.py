"""Hugging Face's families of causal language models, tiny and with random weights, cut into stages and trained.

    outcome("llama")  # "trains", or "refused: …" in the words of the error, or "not built: …"

A family trains if loss and gradients of four stages are those of a loop over the same microbatches, in float64. The two
microbatches have unequal numbers of labels that count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

import hyper_parallel as hp

NUM_STAGES = 4
_MOST_PARAMETERS = 3_000_000
_LARGEST_ERROR = 1e-12

# What a configuration is given of these, if it has such a value: families name their sizes in many ways.
_SIZES = {
    **dict.fromkeys(
        ["hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "rnn_hidden_size"], 32
    ),
    **dict.fromkeys(
        ["intermediate_size", "ffn_dim", "n_inner", "mlp_hidden_size", "intermediate_size_mlp", "d_ff"], 48
    ),
    **dict.fromkeys(["decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "lru_width"], 48),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers", "num_layers"], 4),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "num_local_experts", "num_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["mamba_n_heads", "attention_window", "sliding_window", "rotary_dim", "time_step_rank"], 4),
    **dict.fromkeys(["vocab_size", "n_positions", "max_position_embeddings", "max_seq_len"], 64),
    **dict.fromkeys(["vocab_size_per_layer_input", "attention_hidden_size"], 64),
    **dict.fromkeys(
        ["head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "state_size", "mamba_d_state"], 8
    ),
    **dict.fromkeys(["hidden_size_per_layer_input", "num_hash_buckets"], 8),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["mamba_d_head", "attention_head_dim"], 16),
    **dict.fromkeys(["num_key_value_heads", "num_experts_per_tok", "type_vocab_size", "expand"], 2),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "mamba_n_groups"], 1),
    **dict.fromkeys(["attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"], 0.0),
    **dict.fromkeys(["activation_dropout", "layerdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0),
    **dict.fromkeys(["residual_dropout", "router_jitter_noise", "input_jitter_noise"], 0.0),
}


def families() -> dict[str, str]:
    """The name of each family, and of its class."""
    from transformers.models.auto import modeling_auto

    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def make(family: str) -> nn.Module:
    """A model of four layers, or the reason why there is none as a `ValueError`."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class = getattr(transformers, families()[family])
    try:
        config = _tiny(CONFIG_MAPPING[family])
        with torch.device("meta"):
            num = sum(weight.numel() for weight in model_class(config).parameters())
    except Exception as error:  # of a family whose sizes do not go together
        raise ValueError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    if num > _MOST_PARAMETERS:
        raise ValueError(f"it has {num:,} parameters")
    torch.manual_seed(0)
    return model_class(config).double().train()


def _tiny(config_class: Any) -> Any:
    base = config_class()
    sizes = {name: size for name, size in _SIZES.items() if getattr(base, name, None) is not None}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if "kv_lora_rank" in sizes:
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = 4
    kinds = list(dict.fromkeys(getattr(base, "layer_types", None) or ()))
    if kinds:
        sizes["layer_types"] = [kinds[number % len(kinds)] for number in range(4)]
    while True:
        try:
            config = config_class(**sizes)
        except AttributeError as error:  # a value that is read only
            name = str(error).split("'")[1]
            name = "layer_types" if name == "layers_block_type" else name
            if name not in sizes:
                raise
            del sizes[name]
        else:
            config._experts_implementation = "eager"  # the grouped product has no float64
            return config


def batch(num_rows: int = 4) -> dict[str, torch.Tensor]:
    """Rows of eight tokens; of the first two few labels count."""
    ids = torch.randint(3, 64, (num_rows, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3:] = labels[1, 2:] = -100
    return {"input_ids": ids, "labels": labels}


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Around models that go to float32 for precision: here it would be less."""
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def looped(model: nn.Module, whole: dict[str, torch.Tensor], num: int) -> tuple[float, dict[str, torch.Tensor | None]]:
    """Loss and gradients of a loop over microbatches, each weighed by the labels that count."""
    parts = [
        dict(zip(whole, part, strict=True))
        for part in zip(*(value.chunk(num) for value in whole.values()), strict=True)
    ]
    counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    total = 0.0
    for part, count in zip(parts, counts, strict=True):
        if count:
            loss = model(**part, use_cache=False).loss * (count / sum(counts))
            loss.backward()
            total += loss.item()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return total, gradients


def outcome(family: str) -> str:
    """What becomes of a family: see the head of this file."""
    try:
        model = make(family)
    except ValueError as error:
        return f"not built: {error}"
    with float64():
        try:
            loss, gradients = looped(model, batch(), 2)
        except Exception as error:  # of a family that is not made for such sizes
            return f"not built: {type(error).__name__}: {error}".splitlines()[0]
        try:
            stages = hp.split_stages(model, NUM_STAGES)
            found = train(stages)
        except hp.HyperParallelError as error:
            return "refused: " + str(error).replace("\n", " ")
    error = abs(found - loss)
    for name, weight in model.named_parameters():
        expected = gradients[name]
        if (weight.grad is None) != (expected is None):
            return f"wrong: only one of the two has a gradient of {name}"
        if expected is not None:
            error = max(error, ((weight.grad - expected).abs().max() / (expected.abs().max() + 1e-3)).item())
    return "trains" if error <= _LARGEST_ERROR else f"wrong: differs by {error:.1e}"


def train(stages: Any) -> float:
    """One step of two microbatches in one process; a family that says not what its loss counts is told."""
    forward = [f"{stage}F{number}" for number in range(2) for stage in range(NUM_STAGES)]
    backward = [f"{stage}B{number}" for number in range(2) for stage in reversed(range(NUM_STAGES))]
    pipeline = hp.Pipeline(stages, hp.Schedule.of([[*forward, *backward]]))
    whole = batch()
    try:
        return pipeline.step(whole["input_ids"], labels=whole["labels"]).item()
    except hp.HyperParallelError as error:
        if "Give weights=" not in str(error):
            raise
    counts = [int((labels[:, 1:] != -100).sum()) for labels in whole["labels"].chunk(2)]
    return hp.Pipeline(stages, pipeline.schedule).step(**whole, weights=counts).item()
