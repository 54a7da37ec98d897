"""Which of the stored tensors are swapped, once it is known how many bytes of each region should be.

No set of tensors has exactly the bytes that were asked for. What one region swaps too much, the next swaps less, so
that the sum over all regions so far stays close to what it should be: window and prefetch limit even out the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hyper_parallel.core.planner.model.choices import (
    SAVE,
    SWAP,
    Choice,
    Decision,
    RegionDecision,
    allowed,
    bytes_of,
    plain,
)
from hyper_parallel.core.planner.model.problem import Cost, Problem, evaluate
from hyper_parallel.core.planner.model.profile import Region
from hyper_parallel.core.planner.solve.block import Base
from hyper_parallel.core.planner.solve.rows import Case

_STEPS = 1 << 18  # sums of bytes are told apart to this part of their total
_TIDY = 1e-4  # a plan with fewer different regions may take this part longer


def split(
    case: Case, bases: Sequence[Base], swapped_bytes: Sequence[float], budget_bytes: int
) -> tuple[Decision, Cost] | None:
    """Swap about as much of each region as it should, in some ways, and take the fastest.

    None where no way is within the budget.
    """
    best: tuple[Decision, Cost] | None = None
    for decision in _splits(case, bases, swapped_bytes, budget_bytes):
        cost = evaluate(case.problem, decision)
        if cost.peak_bytes > budget_bytes:
            continue
        if best is None or cost.step_ms < best[1].step_ms * (1 - _TIDY):
            best = decision, cost
    return best


def _splits(case: Case, bases: Sequence[Base], swapped_bytes: Sequence[float], budget_bytes: int) -> Iterator[Decision]:
    if not case.swaps or not bases:
        yield tuple(base.decision for base in bases)
        return
    least = _least_swapped(case, bases, budget_bytes)
    slack = min(case.problem.window_bytes, case.problem.prefetch_bytes) / 4
    for slack_bytes, rounds_up in ((slack, False), (0.0, False), (0.0, True)):
        yield _carried(bases, swapped_bytes, least, slack_bytes, rounds_up)


def _carried(
    bases: Sequence[Base], swapped_bytes: Sequence[float], least: Sequence[int], slack_bytes: float, rounds_up: bool
) -> Decision:
    """Choose what is swapped, region by region; what one swaps too much the next swaps less.

    Where a choice made for an earlier region is off by no more than the slack, it is made again.
    """
    decision = []
    used: dict[object, dict[tuple[int, ...], int]] = {}
    should = done = 0.0
    for base, asked, at_least in zip(bases, swapped_bytes, least, strict=True):
        should += asked
        done += base.region_bytes.swapped_bytes
        floor = max(at_least, should - 0.5 if rounds_up else 0.0) - done
        known = used.setdefault((base.decision, base.free), {})  # a region that decides alike may not swap the same
        positions = _used_before(known, floor, should - done, slack_bytes)
        if positions is None:
            chosen = nearest([num_bytes for _, num_bytes in base.free], floor, should - done)
            positions = tuple(base.free[number][0] for number in chosen)
            known[positions] = sum(base.free[number][1] for number in chosen)
        done += known[positions]
        decision.append(base.swapping(positions) if positions else base.decision)
    return tuple(decision)


def _used_before(
    known: dict[tuple[int, ...], int], floor: float, target: float, slack_bytes: float
) -> tuple[int, ...] | None:
    fitting = {
        positions: abs(num_bytes - target)
        for positions, num_bytes in known.items()
        if num_bytes >= floor and abs(num_bytes - target) <= slack_bytes
    }
    return min(fitting, key=lambda positions: fitting[positions], default=None)


def _least_swapped(case: Case, bases: Sequence[Base], budget_bytes: int) -> list[int]:
    """Count what each region and those before it must swap together, lest those after it cannot make up for it."""
    rooms = case.rooms(budget_bytes)
    extras = [*(base.region_bytes.extra_bytes for base in bases[1:]), 0]
    stored = 0
    least = []
    for base, extra, room in zip(bases, extras, rooms[1:], strict=True):
        stored += base.store_bytes
        least.append(stored + extra - room)
    for index in reversed(range(len(bases) - 1)):
        later = bases[index + 1]
        least[index] = max(least[index], least[index + 1] - later.free_bytes - later.region_bytes.swapped_bytes)
    return least


def tidied(problem: Problem, decision: Decision, budget_bytes: int) -> Decision:
    """Take back swaps that the budget does not ask for, and leave plain what does nothing else than a plain region.

    A step never gets slower by either. The solver sees no difference where the link has time to spare.
    """
    regions = problem.profile.regions
    by_region = [bytes_of(region, chosen) for region, chosen in zip(regions, decision, strict=True)]
    swaps = any(region_bytes.swapped_bytes for region_bytes in by_region)
    rooms = Case(problem, swaps).rooms(budget_bytes)[1:]
    extras = [*(region_bytes.extra_bytes for region_bytes in by_region[1:]), 0]
    kept = itertools.accumulate(region_bytes.kept_bytes for region_bytes in by_region)
    slack = [room - extra - total for room, extra, total in zip(rooms, extras, kept, strict=True)]
    changed = list(decision)
    left = slack[-1] if slack else 0
    for index in reversed(range(len(regions))):
        left = min(left, slack[index])
        if by_region[index].swapped_bytes:
            changed[index], saved_bytes = _saving(regions[index], decision[index], left)
            left -= saved_bytes
        changed[index] = _plain_if_it_is(regions[index], changed[index])
    return tuple(changed)


def _saving(region: Region, decision: RegionDecision, room_bytes: int) -> tuple[RegionDecision, int]:
    """Save some of what is swapped instead, the largest first, and say how much that is."""
    ops, inputs = list(decision.ops), list(decision.inputs)
    swapped: list[tuple[int, list[Choice | None], int]] = [
        (op.num_bytes, ops, index) for index, op in enumerate(region.ops) if ops[index] == SWAP and SAVE in allowed(op)
    ]
    swapped += [
        (given.value.num_bytes, inputs, index) for index, given in enumerate(region.inputs) if inputs[index] == SWAP
    ]
    saved_bytes = 0
    for num_bytes, choices, index in sorted(swapped, key=lambda entry: -entry[0]):
        if saved_bytes + num_bytes <= room_bytes:
            choices[index] = SAVE
            saved_bytes += num_bytes
    return RegionDecision(False, tuple(ops), tuple(inputs)), saved_bytes


def _plain_if_it_is(region: Region, decision: RegionDecision) -> RegionDecision:
    if not region.may_be_plain or decision.is_plain:
        return decision
    done = bytes_of(region, decision)
    return decision if done.swapped_bytes or done.kept_bytes < region.residual_bytes else plain(region)


def nearest(sizes: Sequence[int], floor: float, target: float) -> list[int]:
    """Choose sizes whose sum is at least `floor` and nearest to `target`, by index; all of them where no sum is enough.

    It is exact where the sizes sum up to less than 2**18; above that, sums are rounded down to steps.
    """
    total = sum(sizes)
    if floor >= total or not total:
        return list(range(len(sizes))) if floor > 0 else []
    step = max(1.0, total / _STEPS)
    steps = [int(size / step) for size in sizes]
    reachable = [1]  # bit n: the sizes so far have a subset of n steps
    for num_steps in steps:
        reachable.append(reachable[-1] | reachable[-1] << num_steps)
    lowest, wanted = (max(-int(-value // step), 0) for value in (floor, target))
    sums = reachable[-1] >> lowest
    if not sums:  # all of it, rounded down, is too little
        return list(range(len(sizes)))
    above, below = sums >> max(wanted - lowest, 0), sums & ((1 << max(wanted - lowest, 0)) - 1)
    options = []
    if above:
        options.append(max(wanted, lowest) + (above & -above).bit_length() - 1)
    if below:
        options.append(lowest + below.bit_length() - 1)
    left = min(options, key=lambda option: abs(option - target / step))
    chosen = []
    for index in reversed(range(len(sizes))):
        if not reachable[index] >> left & 1:
            chosen.append(index)
            left -= steps[index]
    return chosen[::-1]
