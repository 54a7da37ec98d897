"""Steps of optimizers on lists of tensors (`torch._foreach_…`, `torch._fused_…`): local, where all lists lie alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.shard._op_dispatch import ArgumentSlot, PreparedOp
from hyper_parallel.core.shard.rule_answer import RuleAnswer
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.torch.dtensor.movement import reduce_values
from hyper_parallel.platform.torch.dtensor.tensor import wrapped

__all__ = ["UNSCALE", "prepare_for_lists"]

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # of `torch.amp.GradScaler`


def prepare_for_lists(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> PreparedOp:
    """Prepare an elementwise call over lists.

    The i-th tensors of all lists belong together, and move to the first one's layout.

    Plain tensors stay as they are (the step count of an optimizer, a gradient scale).

    Raises:
        ValueError: a list has a plain tensor where another has a distributed one, or it is `_foreach_norm`.
    """
    slots: list[ArgumentSlot] = []
    wanted: dict[int, Spec] = {}
    first = next(
        value
        for value in args
        if isinstance(value, (list, tuple)) and any(isinstance(item, ArgumentSlot) for item in value)
    )
    for value in (*args, *kwargs.values()):
        if isinstance(value, ArgumentSlot):
            slots.append(value)
            wanted[value.index] = value.spec
        elif isinstance(value, (list, tuple)):
            for position, item in enumerate(value):
                if isinstance(item, ArgumentSlot):
                    slots.append(item)
                    wanted[item.index] = _partner(name, first, position, item)
    if name == "_foreach_norm":
        raise ArgumentError(
            "`torch._foreach_norm` gives the norm of local parts.",
            do="Use `platform.clip_grad_norm_`, which knows the layouts.",
        )
    answer = RuleAnswer(tuple(wanted[slot.index].layout for slot in slots), ())
    specs = [item.spec if isinstance(item, ArgumentSlot) else None for item in first]

    def call(func: Any, local_args: Sequence[Any], local_kwargs: dict[str, Any]) -> Any:
        result = func(*local_args, **local_kwargs)
        if name == UNSCALE:
            _share_infinities(local_args[1], [spec for spec in specs if spec is not None])
        if not isinstance(result, (list, tuple)):
            return None
        return [
            wrapped(value, spec) if spec is not None and isinstance(value, torch.Tensor) else value
            for value, spec in zip(result, specs, strict=True)
        ]

    return PreparedOp(answer, [slot.index for slot in slots], local=call, is_raw=True)


def _share_infinities(found: torch.Tensor, specs: Sequence[Spec]) -> None:
    """Tell all ranks that one has met a number that is none: all of them leave out the step."""
    axes: dict[Any, dict[str, None]] = {}
    for spec in specs:
        axes.setdefault(spec.layout.mesh, {}).update(dict.fromkeys(spec.layout.varying_axes))
    for mesh, names in axes.items():
        varying = tuple(axis for axis in mesh.axis_names if axis in names)
        if varying:
            found.copy_(reduce_values(found, mesh, varying, "max"))


def _partner(name: str, first: Sequence[Any], position: int, slot: ArgumentSlot) -> Spec:
    partner = first[position] if position < len(first) else None
    if not isinstance(partner, ArgumentSlot):
        raise ArgumentError(
            f"`{name}` mixes plain and distributed tensors.",
            expected="lists whose members at one position lie alike",
            got=f"{slot.spec} beside a plain tensor, position {position}",
        )
    return partner.spec
