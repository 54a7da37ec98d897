"""Executes plans on local tensors, for one rank.

`run` is a generator that asks for each collective and is sent its result, so that one text serves a rank that really
communicates (`redistribute`) and many simulated ranks that go step by step together (the tests).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.redistribution.plan import Plan
from hyper_parallel.core.dtensor.redistribution.steps import AllToAllStep, Kind, Step
from hyper_parallel.core.dtensor.redistribution.transport import Ranks, Transport

__all__ = ["Request", "redistribute", "run"]

Tensor: TypeAlias = Any


class Request(NamedTuple):
    """A call of a method of `Transport` that somebody else shall make."""

    method: str
    ranks: Ranks
    arguments: dict[str, Any]

    def perform(self, transport: Transport) -> Any:
        return getattr(transport, self.method)(ranks=self.ranks, **self.arguments)


def redistribute(local: Tensor, plan: Plan, coordinate: tuple[int, ...], transport: Transport) -> Tensor:
    """Carry out a plan on one rank; every rank of the mesh has to call it. Return the local tensor after it.

    The result may share memory with `local`, or be it: a plan without steps changes nothing.

    Raises:
        ValueError: the local tensor does not have the shape that the source layout gives it here.
    """
    work = run(local, plan, coordinate, transport)
    try:
        request = next(work)
        while True:
            request = work.send(request.perform(transport))
    except StopIteration as done:
        return done.value


def run(
    local: Tensor, plan: Plan, coordinate: tuple[int, ...], transport: Transport
) -> Generator[Request, Any, Tensor]:
    """Carry out a plan, yielding each collective instead of calling it.

    `transport` is asked for local operations alone.
    """
    if plan.steps:
        expected = plan.steps[0].box_before(coordinate).sizes
        if tuple(local.shape) != expected:
            raise ArgumentError(
                "The local tensor does not have the shape of its layout.",
                expected=f"{list(expected)}",
                got=f"{list(local.shape)}",
                where=f"{plan.source} of {list(plan.shape)}, coordinate {coordinate}",
                do="Pass the global shape with which the layout gives this rank that part.",
            )
    for step in plan.steps:
        local = yield from _step(local, step, coordinate, transport)
    return local


def _step(
    local: Tensor, step: Step, coordinate: tuple[int, ...], transport: Transport
) -> Generator[Request, Any, Tensor]:
    kind = step.kind
    if kind is Kind.SLICE:
        return _part(local, step.at_slice(coordinate), transport)
    if kind is Kind.PLACE:
        place = step.at_place(coordinate)
        if place is None:
            return transport.place(step.box_after(coordinate).sizes, [], local, step.fill)
        part, shape, starts = place
        return transport.place(shape, [(starts, _part(local, part, transport))], local, step.fill)
    if kind is Kind.FILL:
        return transport.place(tuple(local.shape), [], local, step.fill) if step.at_fill(coordinate) else local
    if kind is Kind.ALL_TO_ALL_V:
        own_step = step.at_all_to_all(coordinate)
        received = yield _all_to_all_request(local, own_step, transport)
        local = _received(local, own_step, received, step.op, transport)
    else:
        arguments: dict[str, Any] = {"tensor": local}
        if kind is Kind.ALL_TO_ALL:
            arguments |= {"split_dim": step.split_dim, "concat_dim": step.dim}
        elif kind is not Kind.ALL_REDUCE:
            arguments["dim"] = step.dim
        if step.op is not None:
            arguments["op"] = step.op
        local = yield Request(_METHODS[kind], step.group(coordinate), arguments)
    return local if step.divisor == 1 else transport.divide(local, step.divisor)


_METHODS = {
    Kind.ALL_GATHER: "all_gather",
    Kind.REDUCE_SCATTER: "reduce_scatter",
    Kind.ALL_REDUCE: "all_reduce",
    Kind.ALL_TO_ALL: "all_to_all",
}


def _all_to_all_request(local: Tensor, own_step: AllToAllStep, transport: Transport) -> Request:
    others = [box if position != own_step.me else None for position, box in enumerate(own_step.sends)]
    wanted = [box if position != own_step.me else None for position, box in enumerate(own_step.receives)]
    pieces = [None if box is None else _part(local, box, transport) for box in others]
    shapes = [None if box is None else box.sizes for box in wanted]
    return Request("all_to_all_v", own_step.ranks, {"pieces": pieces, "shapes": shapes})


def _received(
    local: Tensor, own_step: AllToAllStep, received: list[Tensor | None], op: str | None, transport: Transport
) -> Tensor:
    pieces: list[tuple[tuple[int, ...], Tensor] | None] = []
    for position, box in enumerate(own_step.receives):
        if box is None:
            pieces.append(None)
        elif position == own_step.me:
            pieces.append((box.starts, _part(local, _own(own_step), transport)))
        else:
            pieces.append((box.starts, received[position]))
    length = len(pieces) // own_step.num_summands
    summands = []
    for begin in range(0, len(pieces), length):
        found = [piece for piece in pieces[begin : begin + length] if piece is not None]
        if len(found) == 1 and tuple(found[0][1].shape) == own_step.shape:
            summands.append(found[0][1])
        else:
            summands.append(transport.place(own_step.shape, found, local, None))
    return summands[0] if op is None else transport.reduce_local(summands, op)


def _own(own_step: AllToAllStep) -> Any:
    return own_step.sends[own_step.me]


def _part(local: Tensor, box: Any, transport: Transport) -> Tensor:
    return local if tuple(local.shape) == box.sizes else transport.slice(local, box.starts, box.sizes)
