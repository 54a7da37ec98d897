"""Steps of optimizers on lists of tensors (`torch._foreach_…`, `torch._fused_…`): local, where all lists lie alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.shard._op_dispatch import Prepared, Slot
from hyper_parallel.core.shard.decision import Decision
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.torch.dtensor.tensor import wrapped

__all__ = ["decide_for_lists"]


def decide_for_lists(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared:
    """Elementwise over lists: the i-th tensors of all lists belong together, and the others move to the first one's layout.

    Plain tensors stay as they are (the step count of an optimizer, a gradient scale).
    """
    slots: list[Slot] = []
    wanted: dict[int, Spec] = {}
    first = next(each for each in args if isinstance(each, (list, tuple)) and any(isinstance(x, Slot) for x in each))
    for value in (*args, *kwargs.values()):
        if isinstance(value, Slot):
            slots.append(value)
            wanted[value.index] = value.spec
        elif isinstance(value, (list, tuple)):
            for position, each in enumerate(value):
                if isinstance(each, Slot):
                    slots.append(each)
                    wanted[each.index] = _partner(name, first, position, each)
    if name == "_foreach_norm":
        raise ArgumentError(
            "`torch._foreach_norm` gives the norm of local parts.",
            do="Use `platform.clip_grad_norm_`, which knows the layouts.",
        )
    decision = Decision(tuple(wanted[slot.index].layout for slot in slots), ())
    specs = [each.spec if isinstance(each, Slot) else None for each in first]

    def call(func: Any, local_args: Sequence[Any], local_kwargs: dict[str, Any]) -> Any:
        result = func(*local_args, **local_kwargs)
        if not isinstance(result, (list, tuple)):
            return None
        return [
            wrapped(each, spec) if spec is not None and isinstance(each, torch.Tensor) else each
            for each, spec in zip(result, specs, strict=True)
        ]

    return Prepared(decision, [slot.index for slot in slots], call, None, is_raw=True)


def _partner(name: str, first: Sequence[Any], position: int, slot: Slot) -> Spec:
    partner = first[position] if position < len(first) else None
    if not isinstance(partner, Slot):
        raise ArgumentError(
            f"`{name}` mixes plain and distributed tensors.",
            expected="lists whose members at one position lie alike",
            got=f"{slot.spec} beside a plain tensor, position {position}",
        )
    return partner.spec
