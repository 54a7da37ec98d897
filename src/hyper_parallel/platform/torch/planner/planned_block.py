"""The wrapper of a block that is under a plan."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any, final

from torch import nn

from hyper_parallel.platform.torch.regions.compiled_code import not_compiled, prepare_for_compiled_code
from hyper_parallel.platform.torch.wrappers.activation_wrapper import ActivationWrapper, list_wrappers


@final
class PlannedBlock(ActivationWrapper):
    """A block whose calls a plan decides about.

    A plan is on one model, and is taken off that one. So a copy, and what is loaded from a file, is the block without
    the plan; a file can be loaded without this package.
    """

    def __init__(self, block: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__(block)
        self.__dict__["_planned_call"] = call
        prepare_for_compiled_code(before_it_is_compiled=True)

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._planned_call(self._checkpoint_wrapped_module, *args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return operator.getitem, ((self._checkpoint_wrapped_module,), 0)

    def __copy__(self) -> nn.Module:
        return copy.copy(self._checkpoint_wrapped_module)


def planned_blocks(model: nn.Module) -> list[str]:
    """List the paths of blocks that are under a plan."""
    return [name for name, wrapper in list_wrappers(model) if isinstance(wrapper, PlannedBlock)]
