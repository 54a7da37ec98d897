"""Which modules of a model become regions; how they are found: `core/planner/model/blocks.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from torch import nn

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.planner.model import blocks
from hyper_parallel.platform.torch.regions.compiled_code import is_compiled
from hyper_parallel.platform.torch.wrappers.activation_wrapper import ActivationWrapper

_TYPES = blocks.ModuleTypes(
    sequences=(nn.ModuleList, nn.Sequential),
    mappings=(nn.ModuleDict,),
    not_called=(nn.ModuleList, nn.ModuleDict),
    wrapper=ActivationWrapper,
    children=nn.Module.named_children,
    parameters=nn.Module.parameters,
    modules=nn.Module.named_modules,
)


suggested = functools.partial(blocks.suggested, _TYPES)
check_ran = functools.partial(blocks.check_ran, _TYPES)


def find_blocks(model: nn.Module, regions: Sequence[str | type[nn.Module]] | None = None) -> dict[str, nn.Module]:
    """Find the modules that become regions: paths and modules, in the order of the model; none inside another.

    Raises:
        ValueError: nothing is found, a pattern matches nothing, a block is wrapped already, or see `check_called`.
    """
    found = blocks.find_blocks(_TYPES, model, regions)
    check_called(model, found)
    return found


COMPILE_BLOCKS = "Compile the blocks, not what is around them: `for block in model.layers: block.compile()`, then plan."


def check_called(model: nn.Module, paths: Iterable[str]) -> None:
    """Refuse a model in which something else decides how the blocks at these paths are called.

    Raises:
        ValueError: what is around them is compiled, so that Python is not asked when they run; or gradient
            checkpointing is on.
    """
    blocks = set(paths)
    around = {".".join(path.split(".")[:length]) for path in blocks for length in range(path.count(".") + 1)}
    for name in sorted(around):
        if is_compiled(model.get_submodule(name)):
            raise ArgumentError(
                "The model is compiled as a whole, and a plan is carried out in Python, around each block.",
                expected="compiled blocks, or no compiled code around them",
                got="torch.compile of " + (f"`{name}`" if name else "the model"),
                where=type(model).__name__,
                do=COMPILE_BLOCKS,
            )
    for name in sorted(around | blocks):
        module = model.get_submodule(name)
        # The flag of Hugging Face's models and of others that do as they do.
        if getattr(module, "gradient_checkpointing", False) is True and module.training:
            raise ArgumentError(
                "Gradient checkpointing is on, and a plan decides itself what is recomputed.",
                expected="blocks that run once, in forward",
                got=f"{type(module).__name__} with gradient_checkpointing=True",
                where=name or "the model",
                do=f"Switch it off before planning: `model.{_switch_off(model)}()`; "
                "for a Trainer, leave out the option of that name.",
            )


def _switch_off(model: nn.Module) -> str:
    """Name what switches gradient checkpointing off: newer versions of Hugging Face's models have another name for
    it.
    """
    new = "activation_checkpointing_disable"
    return new if hasattr(model, new) else "gradient_checkpointing_disable"
