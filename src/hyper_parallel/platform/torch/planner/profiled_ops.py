"""The recorded ops of a region as the planner sees them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from hyper_parallel.core.planner.model.choices import RECOMPUTE, SAVE, SWAP, Choice
from hyper_parallel.core.planner.model.profile import ProfiledOp, StorageFacts
from hyper_parallel.platform.torch.planner import signature
from hyper_parallel.platform.torch.planner.traced_steps import RecordedCall, is_made
from hyper_parallel.platform.torch.regions.op_traits import traits_of
from hyper_parallel.platform.torch.regions.values import Argument, Constant, Fresh


def planned_ops(noted: RecordedCall, op_ms: list[float], device: torch.device, min_bytes: int | None) -> list[Any]:
    """Turn a call's recorded ops into those of a profile.

    After an op whose residuals are chosen one by one come its parts: see `_parts`.
    """
    places: dict[Any, int] = {}  # of values, among the planner's ops
    last: list[int] = []  # by the number of a recorded op: its last part, or itself
    ops: list[Any] = []
    record = noted.record
    paths = None if record is None else record.paths
    for op, ms in zip(record.ops if record else [], op_ms, strict=True):
        own = len(ops)
        made = [value for value in op.makes if value.device == device]
        parts = _parts(op, made, noted, min_bytes)
        places |= dict.fromkeys(made, own)
        read = [value for value in op.reads if value is not None and is_made(value)]
        reads = {places.get(value, last[value.op] if value.op < op.index else own) for value in read}
        whole = ProfiledOp(
            module=op.module if paths is None else paths.below(op.module),
            name=str(op.func),
            call=op.call,
            occurrence=op.occurrence_in_call,
            forward_ms=ms,
            makes=tuple(
                StorageFacts(v.num_bytes, v in noted.needed, noted.freed_after.get(v)) for v in made if v not in parts
            ),
            reads=tuple(sorted(reads - {own})),
            reads_inputs=(0,)
            if any(value is not None and value.op < 0 and value in noted.inputs for value in op.reads)
            else (),
            choices=(RECOMPUTE,) if parts else _choices(made, noted, min_bytes),
            result_metas=() if op.targets else tuple(_metas(op.outputs)),
        )
        ops.append(whole)
        for value in parts:
            places[value], part = len(ops), op.makes.index(value)
            ops.append(
                dataclasses.replace(
                    whole,
                    name=f"{whole.name}[{part}]",
                    forward_ms=0.0,
                    makes=(StorageFacts(value.num_bytes, True, noted.freed_after.get(value)),),
                    reads=(own,),
                    reads_inputs=(),
                    choices=_choices([value], noted, min_bytes),
                    result_metas=(),
                    part=part,
                )
            )
        last.append(len(ops) - 1)
    return ops if len(ops) == len(last) else [_renumbered(op, last) for op in ops]


def _parts(op: Any, made: list[Any], noted: RecordedCall, min_bytes: int | None) -> list[Any]:
    """List the residuals that are chosen one by one.

    Those among what compiled code made, if there is more than one to swap: that is all of a block at once. And those of
    an op that also makes what backward does not need: of a dropout the mask is kept, and not its result.
    """
    if op.targets or not all(value in noted.current for value in made):
        return []
    parts = [value for value in made if value in noted.needed and value.num_bytes > 0]
    if traits_of(op.func).has_schema:
        return parts if any(value.num_bytes > 0 and value not in noted.needed for value in made) else []
    if min_bytes is None:
        return []
    return parts if sum(SWAP in _choices([value], noted, min_bytes) for value in parts) > 1 else []


def _choices(made: list[Any], noted: RecordedCall, min_bytes: int | None) -> tuple[Choice, ...]:
    """List what can be done with what an op made."""
    if not sum(value.num_bytes for value in made) or not all(value in noted.current for value in made):
        return (RECOMPUTE,)
    is_large = min_bytes is not None and max(value.num_bytes for value in made) >= min_bytes
    if is_large and not any(value.is_weight_cast for value in made):
        return SAVE, SWAP, RECOMPUTE
    return SAVE, RECOMPUTE


def _renumbered(op: Any, last: list[int]) -> Any:
    """Put the profile's numbers where a recorded op's were: a storage is gone after an op and all of its parts."""
    makes = (
        value if value.freed_after is None else dataclasses.replace(value, freed_after=last[value.freed_after])
        for value in op.makes
    )
    return dataclasses.replace(op, makes=tuple(makes))


def _metas(outputs: object) -> list[str]:
    """List dtype and shape of an op's results: "float32[2, 8]"."""
    if isinstance(outputs, Fresh):
        return [signature.tensor_meta(outputs.view.dtype, outputs.view.size)]
    if isinstance(outputs, (list, tuple)) and not isinstance(outputs, (Argument, Constant)):
        return [meta for item in outputs for meta in _metas(item)]
    return []


def op_times(noted: RecordedCall) -> list[float]:
    """Measure each recorded op in milliseconds; views and the like, which the record leaves out, are passed over."""
    record, times = noted.record, noted.times
    if record is None or times is None:
        return []
    found: list[float] = []
    position = 0
    for op in record.ops:
        while position < len(times.ops) and times.ops[position][0] is not op.func:
            position += 1
        if position == len(times.ops):
            found.append(0.0)
            continue
        _, begin, end = times.ops[position]
        found.append(times.clock.between(begin, end))
        position += 1
    return found
