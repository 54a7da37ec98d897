"""Which list of a model has the blocks that stages are made of.

Example: of Hugging Face's `LlamaForCausalLM` it is "model.layers". Their `config` says how many there are
(`num_hidden_layers`), and for many families which list it is (`base_model_pp_plan`). Of any other model it is its only
`nn.ModuleList` that is not inside another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hyper_parallel._base.errors import ArgumentError


def list_of_blocks(model: nn.Module, by: object) -> str:
    """The path of the list. `by`: paths of blocks, if a user named some; the list is the one that they are in."""
    found = _outermost(model)
    named = {name.rpartition(".")[0] for name in by} if isinstance(by, Sequence) and not isinstance(by, str) else set()
    chosen = [path for path in found if path in named] or _declared(model, found) or _of_declared_length(model, found)
    if len(chosen) != 1:
        raise ArgumentError(
            f"{type(model).__name__} does not say which list has its blocks.",
            expected="one nn.ModuleList that is not inside another one",
            got=", ".join(f"{path} of {len(found[path])}" for path in chosen or found) or "none",
            do='Name the blocks that stages begin with, by=["encoder.layers.4"]; or give modules of your own: '
            "PipelineStage(module, index, num_stages).",
        )
    return chosen[0]


def _outermost(model: nn.Module) -> dict[str, nn.ModuleList]:
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) and not is_inside:
            found[path] = module
    return found


def _declared(model: nn.Module, found: dict[str, nn.ModuleList]) -> list[str]:
    """What Hugging Face's plan for pipelines names."""
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and base in model._modules else ""
    return [path for path in found if path.startswith(prefix) and path.removeprefix(prefix) in plan]


def _of_declared_length(model: nn.Module, found: dict[str, nn.ModuleList]) -> list[str]:
    length = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    return [path for path, blocks in found.items() if length is None or len(blocks) == length]
