"""What a Hugging Face model's own loss of a microbatch counts, so that losses of microbatches add up to the batch's.

Example: a batch of 4 rows is cut into 2 microbatches; in the first 10 labels count (they are not -100), in the second
30. The model's loss is a mean over those that count: of the whole batch it is (10 a + 30 b) / 40.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hyper_parallel._base.errors import ArgumentError, describe

_IGNORED = -100  # the label that PyTorch's cross entropy leaves out
_RECORDS = ("output_router_logits", "output_hidden_states", "output_attentions")


def check_options(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Refuse what needs all blocks in one place, and what counts labels a second time."""
    config = getattr(model, "config", None)
    asked = [name for name in _RECORDS if batch.get(name, getattr(config, name, False))]
    if asked:
        raise ArgumentError(
            "What blocks record is in several stages; a loss of the router's needs all of it.",
            expected=f"{asked[0]}=False",
            got="True",
            do=f"Set model.config.{asked[0]} = False, and leave it out of the batch.",
        )
    if batch.get("num_items_in_batch") is not None:
        raise ArgumentError(
            "A pipeline weighs microbatches by their labels itself.",
            expected="a batch without num_items_in_batch",
            got=describe(batch["num_items_in_batch"]),
            do="Leave it out; or give weights= to `step`.",
        )


def weight_of(model: nn.Module, batch: Mapping[str, Any]) -> float | None:
    """How many labels count; None where there are none."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if not isinstance(labels, torch.Tensor):
        return None
    kind = _kind(model)
    if kind == "ForCausalLM":
        counted = labels[..., 1:] if shifted is None else shifted
    elif kind in ("ForMaskedLM", "ForTokenClassification"):
        counted = labels
    elif kind in ("ForSequenceClassification", "ForImageClassification"):
        return float(labels.shape[0])
    else:
        raise ArgumentError(
            f"The loss of {type(model).__name__} is not one whose microbatches can be weighed.",
            expected="a loss over labels of tokens or rows",
            got=kind or "one of its own",
            do="Give weights= to `step`, what the loss of each microbatch counts.",
        )
    return float((counted != _IGNORED).sum())


def _kind(model: nn.Module) -> str | None:
    """Whose loss it is, in Hugging Face's words; None where the model's forward makes one of its own."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if hasattr(model, "_loss_function") or code is None or "loss_function" not in code.co_names:
        return None
    return getattr(model, "loss_type", None) or "ForCausalLM"  # which is also Hugging Face's choice
