"""The wrapper of a block that is under a plan."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any, final

from mindspore import nn

from hyper_parallel.platform.mindspore.wrappers.activation_wrapper import ActivationWrapper, list_wrappers


@final
class PlannedBlock(ActivationWrapper):
    """A block whose calls a plan decides about.

    A plan is on one model, and is taken off that one. So a copy is the block without the plan.
    """

    def __init__(self, block: nn.Cell, call: Callable[..., Any]) -> None:
        super().__init__(block)
        self.__dict__["_planned_call"] = call

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return self._planned_call(self._ckpt_wrapped_module, *args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return operator.getitem, ((self._ckpt_wrapped_module,), 0)

    def __copy__(self) -> nn.Cell:
        return copy.copy(self._ckpt_wrapped_module)


def planned_blocks(model: nn.Cell) -> list[str]:
    """List the paths of blocks that are under a plan."""
    return [name for name, wrapper in list_wrappers(model) if isinstance(wrapper, PlannedBlock)]
