"""Which modules of a model become regions; how they are found: `platform/regions/blocks.py`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hyper_parallel.platform.regions import blocks
from hyper_parallel.platform.torch.activation_checkpoint.activation_wrapper import ActivationWrapper

_KINDS = blocks.Kinds(
    sequences=(nn.ModuleList, nn.Sequential),
    not_called=(nn.ModuleList, nn.ModuleDict),
    wrapper=ActivationWrapper,
    children=nn.Module.named_children,
    parameters=nn.Module.parameters,
    modules=nn.Module.named_modules,
)


def find_blocks(model: nn.Module, regions: Sequence[str | type[nn.Module]] | None = None) -> dict[str, nn.Module]:
    """Paths and modules, in the order of the model; none inside another.

    Raises:
        ValueError: nothing is found, a pattern matches nothing, or a block is wrapped already.
    """
    return blocks.find_blocks(_KINDS, model, regions)
