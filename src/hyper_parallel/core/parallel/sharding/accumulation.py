"""Gradients over several microbatches: `accumulate`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel._base.log import get_logger

if TYPE_CHECKING:
    from hyper_parallel.core.parallel.sharding.unit import Unit

__all__ = ["Accumulation", "accumulating", "whole_step"]

_logger = get_logger("sharding")


@dataclass
class Accumulation:
    """Where a unit stands in a step. Outside of `accumulate` every backward is a step of its own.

    Attributes:
        is_last: whether gradients are given to the shards when this backward ends.
        holds: whether gradients wait on this rank until the last microbatch, and are sent once.
        weight: what gradients of this microbatch count, None for 1 with the sum over ranks divided by their number.
        sum_of_weights: of this rank's microbatches until now.
        divisor: what the sums of the last microbatch are divided by; None for the number of ranks.
        has_earlier: whether microbatches of the same step came before.
        has_lost: whether their gradients were dropped after an error.
        is_scheduled: whether a schedule runs the step: `whole_step`.
    """

    is_last: bool = True
    holds: bool = False
    weight: float | None = None
    sum_of_weights: float | None = None
    divisor: Any = None
    has_earlier: bool = False
    has_lost: bool = False
    is_scheduled: bool = False

    def check_weight(self, name: str) -> None:
        """Raise where a backward without a weight would end a step whose microbatches have weights."""
        if self.sum_of_weights is not None and self.weight is None:
            raise StateError(
                "A backward outside of `accumulate`, in the middle of a step whose microbatches have weights.",
                where=f"unit {name or 'of the whole module'}",
                do="Run the last microbatch with `hp.accumulate(module, last=True, weight=...)` first.",
            )


@contextmanager
def accumulating(units: Sequence[Unit], *, last: bool, weight: float | None, reduce: str | None) -> Iterator[None]:
    """Run one microbatch of a step; see `hp.accumulate`."""
    _check(units, last, weight)
    order = units[0].order
    with order.lock:
        for unit in units:
            state = unit.accumulation
            state.is_last = last
            state.holds = (unit.zero == 1) if reduce is None else reduce == "last"
            state.weight = weight
            if weight is not None:
                state.sum_of_weights = (state.sum_of_weights or 0.0) + weight  # plant: sum-of-weights
        if last and weight is not None:
            _share_weights(units)
    try:
        yield
        with order.lock:
            order.forget_what_failed(None, None)  # plant: lost-at-the-end
        _check_nothing_lost(units)  # plant: check-lost
    except BaseException:
        with order.lock:
            _logger.warning("an error inside `accumulate`: what was added up in this step is dropped")
            for unit in units:
                unit.forget_step()  # plant: failed-step
                unit.accumulation = Accumulation()
        raise
    with order.lock:
        if last:
            order.finish_step(units)  # plant: finish-step
        for unit in units:
            state = unit.accumulation
            if last:
                unit.accumulation = Accumulation()
            else:
                unit.accumulation = Accumulation(
                    sum_of_weights=state.sum_of_weights, has_earlier=True
                )  # plant: goes-on


@contextmanager
def whole_step(units: Sequence[Unit]) -> Iterator[None]:
    """Run a step whose schedule says when gradients are sent: `Order.reduce_now`, and once more when it ends."""
    order = units[0].order
    with order.lock:
        for unit in units:
            unit.accumulation = Accumulation(is_last=False, holds=True, is_scheduled=True)
    try:
        yield
    except BaseException:
        with order.lock:
            for unit in units:
                unit.forget_step(with_schedule=True)
                unit.accumulation = Accumulation()
        raise
    with order.lock:
        for unit in units:
            unit.accumulation = Accumulation(is_last=True, holds=True, is_scheduled=True)
        order.finish_step(units)
        for unit in units:
            unit.accumulation = Accumulation()


def _share_weights(units: Sequence[Unit]) -> None:
    """Add up the weights of all ranks, once for all units whose gradients are added up among the same ranks."""
    divisors: dict[object, Any] = {}
    for unit in units:
        key = unit.memory.reduces_among
        if key not in divisors:
            divisors[key] = unit.memory.total(unit.accumulation.sum_of_weights or 0.0)
        unit.accumulation.divisor = divisors[key]


def _check_nothing_lost(units: Sequence[Unit]) -> None:
    for unit in units:
        if unit.accumulation.has_lost:
            raise StateError(
                "Gradients of this step were dropped after an error.",
                where=f"unit {unit.name or 'of the whole module'}",
                do="Begin the step again, with its first microbatch.",
            )


def _check(units: Sequence[Unit], last: bool, weight: float | None) -> None:
    if not units:
        raise ArgumentError(
            "`accumulate` is for a model that is sharded.", do="Call `hp.fully_shard(module, mesh=...)` first."
        )
    if not isinstance(last, bool):
        raise ArgumentTypeError(
            "`last` says whether this is the last microbatch of a step.", expected="True or False", got=describe(last)
        )
    if weight is not None and (
        isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf
    ):
        raise ArgumentError(
            "`weight` is what a microbatch counts, such as its number of valid tokens.",
            expected="a number that is not negative",
            got=describe(weight),
        )
    has_sums = any(unit.accumulation.sum_of_weights is not None for unit in units)
    goes_on = has_sums or any(unit.memory.has_sums for unit in units)
    if goes_on and has_sums != (weight is not None):
        raise StateError(
            "The microbatches of one step either all have a weight, or none has.",
            expected="a weight" if has_sums else "no weight",
            got="none" if weight is None else f"weight {weight}",
            where="`accumulate`, after earlier microbatches of the same step",
        )
