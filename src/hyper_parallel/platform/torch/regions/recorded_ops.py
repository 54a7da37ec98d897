"""The ops of a record run again, without the function that called them.

Only where it was shown that nothing in the function reads memory but by ops: see rules 8 to 12 in the README of this
folder. Whatever is in doubt raises `NotAsRecordedError`, and the function runs again instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from hyper_parallel.platform.torch.regions.call_template import Look, look_of
from hyper_parallel.platform.torch.regions.left_as_found import left_as_found
from hyper_parallel.platform.torch.regions.local_parts import version_of
from hyper_parallel.platform.torch.regions.op_traits import traits_of
from hyper_parallel.platform.torch.regions.placeholders import View
from hyper_parallel.platform.torch.regions.random_state import drawing, set_back
from hyper_parallel.platform.torch.regions.saved_values import Saved
from hyper_parallel.platform.torch.regions.surroundings import ParametersOfModule
from hyper_parallel.platform.torch.regions.values import (
    Argument,
    Constant,
    Origin,
    RecordedOp,
    Value,
)

_Tensor = torch.Tensor


class NotAsRecordedError(Exception):
    """The recorded ops cannot be run as they were."""


class Sources:
    """Where the recorded ops get what none of them makes."""

    def __init__(self, inputs: dict[Value, torch.Tensor], parameters: ParametersOfModule) -> None:
        self._inputs = inputs
        self._parameters = parameters
        self._outside: dict[int | None, torch.Tensor] | None = None

    def tensor(self, value: Value, look: Look) -> torch.Tensor:
        """The tensor of a value, or if there is none but memory, one that looks as asked for."""
        kept = value.kept
        if kept is not None:
            return kept.alias if type(kept) is Saved else View(*look, False, False).on(kept.memory(), value.device)
        given = self._inputs.pop(value, None)  # asked for once: who asks keeps it as long as it is needed
        if given is not None:
            return given
        if value.origin is not Origin.OUTSIDE:
            raise NotAsRecordedError
        if self._outside is None:
            self._outside = self._parameters.by_storage()
        tensor = self._outside.get(value.key)
        if tensor is None or version_of(tensor) != value.seen_version:
            raise NotAsRecordedError
        return tensor


def can_run(ops: Iterable[RecordedOp]) -> bool:
    """Whether each of these ops can be run from its template."""
    for op in ops:
        known = op.known
        if known is None or known.template is None or op.must_run:
            return False
        if not all(value is not None for value in op.reads):
            return False
        if not all(value.origin is Origin.MADE for _, value in op.targets):
            return False
    return True


def run_recorded(
    ops: list[RecordedOp],
    runs: Collection[int],
    wanted: set[Value],
    source: Callable[[Value, Look], torch.Tensor],
    *,
    restores_random_state: bool,
) -> dict[Value, torch.Tensor]:
    """Run the ops with these numbers in order, and give the wanted values.

    Args:
        source: gives the tensor of a value that no op here makes, in whatever view; it may raise NotAsRecordedError.

    Raises:
        NotAsRecordedError: a result looks different from the recorded one.
    """
    order = sorted(runs)
    last_reader: dict[Value, int] = {}
    for index in order:
        for value in ops[index].reads:
            last_reader[value] = index  # type: ignore[index] # `can_run` has seen that none is None
    found: dict[Value, torch.Tensor] = {}
    have: dict[Value, tuple[torch.Tensor, Look]] = {}
    own: set[Value] = set()  # in memory of this run
    states = [op.state for op in map(ops.__getitem__, order) if op.state is not None] if restores_random_state else []
    generators = {state.generator for state in states}
    # Below autograd, where the mode that recorded them ran them: no graph, no version counters to keep.
    drawn = set_back(generators)
    with left_as_found(drawn), drawn, torch._C._AutoDispatchBelowAutograd():  # plant: recorded-states
        for index in order:
            op = ops[index]
            known: Any = op.known
            tensors = []
            for value, look in zip(op.reads, known.template.looks):  # noqa: B905 - one for each
                at_hand = have.get(value)  # type: ignore[arg-type]
                if at_hand is None:
                    tensor = source(value, look)  # type: ignore[arg-type]
                    at_hand = have[value] = tensor, _ordinary_look(tensor)  # type: ignore[index]
                tensors.append(at_hand[0] if at_hand[1] == look else _seen(at_hand[0], look))  # plant: recorded-view
            if op.targets and not all(op.reads[position] in own for position, _ in op.targets):
                raise NotAsRecordedError  # in forward it was written once already
            if op.state is not None and restores_random_state:
                with drawing:
                    op.state.restore()  # plant: recorded-draws
                    result = known.template.call(traits_of(op.func).call, tensors)
            else:
                result = known.template.call(traits_of(op.func).call, tensors)
            _take(op.outputs, result, have, found, wanted, last_reader)
            if op.targets:
                _take_written(op, have, found, wanted, last_reader)
            own.update(op.makes)
            for value in op.reads:
                if last_reader[value] == index:  # type: ignore[index]
                    have.pop(value, None)  # type: ignore[arg-type]
            del tensors, result
    return found


def _take(
    outputs: Any,
    result: Any,
    have: dict[Value, tuple[torch.Tensor, Look]],
    found: dict[Value, torch.Tensor],
    wanted: set[Value],
    read: Collection[Value],
) -> None:
    """Put the results of an op where they are needed."""
    if type(outputs) is Value:
        if type(result) is not _Tensor:
            raise NotAsRecordedError
        look = _ordinary_look(result)
        if look[:3] != outputs.view[:3]:
            raise NotAsRecordedError
        if outputs in wanted:
            found[outputs] = result
        if outputs in read:
            have[outputs] = result, look
    elif type(outputs) in (list, tuple):
        if type(result) not in (list, tuple) or len(result) != len(outputs):
            raise NotAsRecordedError
        for each, got in zip(outputs, result):  # noqa: B905 - as many
            _take(each, got, have, found, wanted, read)
    elif type(outputs) is not Constant and type(outputs) is not Argument:
        raise NotAsRecordedError


def _take_written(
    op: RecordedOp,
    have: dict[Value, tuple[torch.Tensor, Look]],
    found: dict[Value, torch.Tensor],
    wanted: set[Value],
    read: Collection[Value],
) -> None:
    """The memory of what an op has written in place has another value now."""
    for position, value in op.targets:
        before: Any = op.reads[position]
        if before in wanted:
            raise NotAsRecordedError  # found, and written over: the other way knows whether that is an error
        if value in wanted:
            found[value] = have[before][0]
        if value in read:
            have[value] = have[before]


def _ordinary_look(tensor: torch.Tensor) -> Look:
    # A view of a complex tensor may be its conjugate, or the negative of its imaginary part, which no template tells.
    look = look_of(tensor)
    if look is None or look[0].is_complex:
        raise NotAsRecordedError
    return look


def _seen(tensor: torch.Tensor, look: Look) -> torch.Tensor:
    if tensor.dtype is look[0]:
        return tensor.as_strided(look[1], look[2], look[3])
    return View(*look, False, False).on(tensor.untyped_storage(), tensor.device)
