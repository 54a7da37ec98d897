"""A model without its weights: the modules around its blocks are copied, the blocks and the weights come as asked.

Example: of a Llama's skeleton for the last stage, `model.embed_tokens` is a copy of the user's module without a weight,
`model.layers.0` is an `Elsewhere`, `model.layers.1` and `model.norm` have the user's own parameters.

What was left out computes nothing: where its weight is used, there is a tensor of NaN, a single number in memory. So
whatever it would have had a part in is NaN, too, and cannot be taken for a result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from hyper_parallel._base.errors import ArgumentError

# Of each module: what two of them do not share.
_TABLES = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


class LeftOut(NamedTuple):
    """A weight that a skeleton does not have."""

    owner: nn.Module
    path: str
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def fill(self, device: torch.device, value: float) -> torch.Tensor:
        """Put a tensor of the weight's shape in its place, no parameter, one number in memory, if none is there."""
        there = self.owner.__dict__.get(self.name)
        if there is not None and there.device == device:
            return there
        number = value if self.dtype.is_floating_point or self.dtype.is_complex else 0
        filled = torch.full((), number, dtype=self.dtype, device=device).expand(self.shape)
        self.owner.__dict__[self.name] = filled
        return filled


class Skeleton(NamedTuple):
    model: nn.Module
    left_out: list[LeftOut]


def skeleton_of(
    model: nn.Module, path: str, blocks: Mapping[str, nn.Module], is_here: Callable[[str, str], bool]
) -> Skeleton:
    """Copy the modules of a model that are outside of the list at `path`.

    Args:
        blocks: what is in the list instead, by name.
        is_here: asked with a module's path and a parameter's name, whether the copy has this parameter.
    """
    outside = {name: module for name, module in model.named_modules() if not f"{name}.".startswith(f"{path}.")}
    _check_apart(model, path, outside)
    copies = {id(module): _copied(module) for module in outside.values()}
    the_list = model.get_submodule(path)
    copies[id(the_list)] = of_list = _copied(the_list)
    of_list._modules = dict(blocks)
    left_out = []
    for name, module in outside.items():
        made = copies[id(module)]
        made._modules = {key: copies.get(id(child), child) for key, child in module._modules.items()}
        for key, weight in module._parameters.items():
            if weight is not None and not is_here(name, key):
                del made._parameters[key]
                left_out.append(LeftOut(made, name, key, weight.shape, weight.dtype))
    return Skeleton(copies[id(model)], left_out)


def _copied(module: nn.Module) -> nn.Module:
    made = copy.copy(module)
    for table in _TABLES:
        made.__dict__[table] = copy.copy(module.__dict__[table])
    return made


def _check_apart(model: nn.Module, path: str, outside: Mapping[str, nn.Module]) -> None:
    inside = {id(module) for module in model.get_submodule(path).modules()}
    both = [name for name, module in outside.items() if id(module) in inside]
    if both:
        raise ArgumentError(
            "A module of a block is used outside of the blocks, too.",
            expected=f"modules that are in {path} only",
            got=", ".join(both),
            do="Give modules of your own: PipelineStage(module, index, num_stages).",
        )


class Elsewhere(nn.Module):
    """Stands in the list for a block that another stage has. It has the block's plain attributes, and no weight."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        own = self.__dict__
        own.update({name: value for name, value in block.__dict__.items() if name not in own})
        inner = getattr(block, "_checkpoint_wrapped_module", block)
        for name in dir(inner):  # properties and attributes of its class as well, such as "attention_type"
            if not hasattr(self, name) and isinstance(value := getattr(inner, name, None), _PLAIN):
                own[name] = value


_PLAIN = (bool, int, float, str)
