"""The schedules that can be had by name: pure functions of ranks p, microbatches m and chunks per rank v.

Each returns compute actions only; `Schedule.lower` adds sends, receives and what sharded parameters need. Idle time as
a share of a rank's work, with F = I = W per stage and no communication, and the most microbatches that rank r keeps, in
units of a rank's layers:

| name | idle / work | kept at most | defined for |
|---|---|---|---|
| `gpipe` | (p-1) / m | m | any m |
| `one_f_one_b` | (p-1) / m | min(m, p-r) | any m |
| `interleaved` | (p-1) / (v m) | p + (p-1)/v - 2r/v | any m; idle time from m = p, kept for m = 2p, 3p, ... |
| `zb_h1` | (p-1) / (3m) | min(m, p) | any m; the idle time from m = p |
| `zbv` | (p-1) / (6m) | p | any m; the figures from m = 2p-1 |
| `dualpipe` | (p-2) / (3m) | p + 1, parameters twice | p even, m even, m >= 2p |
| `dualpipe_v` | (p-1) / (3m) | p + 1/2 | m >= 2p |
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.parallel.pipeline.placement import Placement, in_a_loop, in_a_v, two_ways
from hyper_parallel.core.parallel.pipeline.rank_list import RankList
from hyper_parallel.core.parallel.pipeline.schedule import Schedule

__all__ = ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zbv", "dualpipe", "dualpipe_v"]

_MOST = 4_000_000  # microbatches at stages: a thousand ranks with four thousand microbatches take a gigabyte


def gpipe(p: int, m: int) -> Schedule:
    """Every forward first, then every backward: simple, and all microbatches are kept at once.

    Args:
        p: ranks, each with one stage.
        m: microbatches.

    Raises:
        ValueError: a number is not positive.

    Example:
        >>> import hyper_parallel as hp
        >>> print(hp.schedules.gpipe(2, 2))
        gpipe: 2 ranks, 2 stages, 2 microbatches
        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1F1 1B0 1B1
    """
    p, m = _sizes(p=p, m=m)

    def write(rank: int, to: RankList) -> None:
        for _ in range(m):
            to.forward(rank)
        for _ in range(m):
            to.backward(rank)

    return _written("gpipe", in_a_loop(p, 1, m), write)


def one_f_one_b(p: int, m: int) -> Schedule:
    """A forward, a backward, by turns: idle as long as `gpipe`, but rank r keeps p - r microbatches instead of all.

    Args:
        p: ranks, each with one stage.
        m: microbatches; fewer than p is fine.

    Raises:
        ValueError: a number is not positive.

    Example:
        >>> import hyper_parallel as hp
        >>> print(hp.schedules.one_f_one_b(2, 3))
        one_f_one_b: 2 ranks, 2 stages, 3 microbatches
        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    p, m = _sizes(p=p, m=m)

    def write(rank: int, to: RankList) -> None:
        num_ahead = min(m, p - 1 - rank)
        for _ in range(num_ahead):
            to.forward(rank)
        for done in range(m):
            if num_ahead + done < m:
                to.forward(rank)
            to.backward(rank)

    return _written("one_f_one_b", in_a_loop(p, 1, m), write)


def interleaved(p: int, m: int, v: int) -> Schedule:
    """1F1B with v chunks per rank: a v-th of the idle time, for v times the sends and some more memory.

    Microbatches go in rounds of p: all of a round at the first chunk, then at the next one.

    Args:
        p: ranks.
        m: microbatches. Where it is not a multiple of p, rounds are a little longer; with fewer than p there is one,
            and it is shorter.
        v: chunks per rank; stage s is on rank s % p.

    Raises:
        ValueError: a number is not positive.

    Example:
        >>> import hyper_parallel as hp
        >>> print(hp.schedules.interleaved(2, 2, 2))
        interleaved: 2 ranks, 4 stages, 2 microbatches
        rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    p, m, v = _sizes(p=p, m=m, v=v)
    num_rounds = max(1, m // p)
    # Microbatches of each round; longer ones first.
    rounds = [m // num_rounds + (number < m % num_rounds) for number in range(num_rounds)]

    def write(rank: int, to: RankList) -> None:
        chunks = [rank + chunk * p for chunk in range(v)]
        forwards = [stage for size in rounds for stage in chunks for _ in range(size)]
        backwards = [stage for size in rounds for stage in reversed(chunks) for _ in range(size)]
        num_ahead = min(len(forwards), (v - 1) * rounds[0] + (2 if v > 1 else 1) * (p - 1 - rank))
        for stage in forwards[:num_ahead]:
            to.forward(stage)
        for done, stage in enumerate(backwards):
            if num_ahead + done < len(forwards):
                to.forward(forwards[num_ahead + done])
            to.backward(stage)

    return _written("interleaved", in_a_loop(p, v, m), write)


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with weight gradients put off into idle time; every rank keeps as much as the first one of 1F1B.

    Args:
        p: ranks, each with one stage.
        m: microbatches.

    Raises:
        ValueError: a number is not positive.

    Example:
        >>> import hyper_parallel as hp
        >>> print(hp.schedules.zb_h1(2, 2))
        zb_h1: 2 ranks, 2 stages, 2 microbatches
        rank 0: 0F0 0F1 0I0 0W0 0I1 0W1
        rank 1: 1F0 1I0 1F1 1I1 1W0 1W1
    """
    p, m = _sizes(p=p, m=m)

    def write(rank: int, to: RankList) -> None:
        num_ahead = min(m, p - 1 - rank)
        for _ in range(num_ahead):
            to.forward(rank)
        for done in range(m):
            if num_ahead + done < m:
                to.forward(rank)
            to.input_grad(rank)
            if done >= rank:  # rank r is r microbatches behind with weights: so much more is kept there
                to.weight_grad()
        while to.num_left():
            to.weight_grad()

    return _written("zb_h1", in_a_loop(p, 1, m), write)


def zbv(p: int, m: int) -> Schedule:
    """Two chunks per rank in a V, weight gradients put off: half of the idle time of `zb_h1`, in the same memory.

    Args:
        p: ranks. Rank r has the stages r and 2p - 1 - r: the first and the last one are both on rank 0.
        m: microbatches.

    Raises:
        ValueError: a number is not positive.

    Example:
        >>> import hyper_parallel as hp
        >>> print(hp.schedules.zbv(1, 2))
        zbv: 1 rank, 2 stages, 2 microbatches
        rank 0: 0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1
    """
    p, m = _sizes(p=p, m=m)
    num_full = max(2 * p - 1, m)  # fewer do not fill the V: it is written for so many, and what is beyond m is left out

    def write(rank: int, to: RankList) -> None:
        near, far = rank, 2 * p - 1 - rank
        num_begun = [0, 0]

        def forward(chunk: int) -> None:
            to.forward((near, far)[chunk])
            num_begun[chunk] += 1

        def whole_backward(stage: int) -> None:
            to.input_grad(stage)
            to.weight_grad_of(stage)

        for _ in range(2 * (p - rank) - 1):
            forward(0)
        for _ in range(rank):
            forward(1)
            forward(0)
        for _ in range(p - rank):
            forward(1)
            whole_backward(far)
        while num_begun[1] < num_begun[0] or num_begun[0] < num_full:
            if num_begun[0] < num_full:
                forward(0)
            whole_backward(near)
            forward(1)
            whole_backward(far)
        for _ in range(rank):
            to.input_grad(near)
            to.input_grad(far)
        for _ in range(p - rank):
            to.input_grad(near)
            to.weight_grad_of(near)
        for stage in (far, near):
            for _ in range(to.num_left(stage)):
                to.weight_grad_of(stage)
        to.actions = [action for action in to.actions if (action.microbatch or 0) < m]

    return _written("zbv", in_a_v(p, m), write)


def dualpipe(p: int, m: int) -> Schedule:
    """Microbatches from both ends: every stage is at two ranks, and forwards run beside backwards of the other way.

    The pairs pay where they hide an exchange (experts); without that the idle time is that of `zb_h1` or more.

    Args:
        p: ranks, an even number. Rank r has the stages r and p - 1 - r.
        m: microbatches, an even number of at least 2p; the first half begins at rank 0, the second one at the last
            rank.

    Raises:
        ValueError: it is not defined for these; the nearest that work are named.

    Example:
        >>> import hyper_parallel as hp
        >>> hp.schedules.dualpipe(2, 4).placement
        Placement(routes=((0, 1), (1, 0)), route_of=(0, 0, 1, 1))
    """
    p, m = _sizes(p=p, m=m)
    if p % 2:
        _refuse("dualpipe", "an even number of ranks", f"p={p}", f"p={p + 1}" if p == 1 else f"p={p - 1} or p={p + 1}")
    if m < 2 * p:
        _refuse("dualpipe", f"at least 2p = {2 * p} microbatches", f"m={m}", f"m={2 * p}")
    if m % 2:
        _refuse("dualpipe", "an even number of microbatches", f"m={m}", f"m={m - 1} or m={m + 1}")

    def write(rank: int, to: RankList) -> None:
        there, back = (rank, p - 1 - rank)
        near, far = (there, back) if rank < p // 2 else (back, there)
        _write_dual(to, near, far, min(rank, p - 1 - rank), p // 2, m // 2)

    # At every rank one of its stages has the first half of the microbatches and the other one the second half.
    return _written("dualpipe", two_ways(p, m), write, lambda rank: {rank: 0, p - 1 - rank: m // 2})


def dualpipe_v(p: int, m: int) -> Schedule:
    """`dualpipe` folded into a V: two chunks per rank, each stage once, forwards and backwards in pairs.

    Args:
        p: ranks. Rank r has the stages r and 2p - 1 - r.
        m: microbatches, at least 2p.

    Raises:
        ValueError: there are fewer than 2p microbatches; `zbv` is defined there.

    Example:
        >>> import hyper_parallel as hp
        >>> print(hp.schedules.dualpipe_v(1, 2))
        dualpipe_v: 1 rank, 2 stages, 2 microbatches
        rank 0: 0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1
    """
    p, m = _sizes(p=p, m=m)
    if m < 2 * p:
        _refuse("dualpipe_v", f"at least 2p = {2 * p} microbatches", f"m={m}", f"m={2 * p}, or the schedule zbv")

    def write(rank: int, to: RankList) -> None:
        _write_dual(to, rank, 2 * p - 1 - rank, rank, p, m)

    return _written("dualpipe_v", in_a_v(p, m), write)


def _write_dual(to: RankList, near: int, far: int, depth: int, num_ranks: int, num_microbatches: int) -> None:
    """Write one rank of both dual pipes, in the eight steps of DeepSeek's.

    Args:
        near: the stage whose microbatches come early to this rank; `far`: that whose microbatches have been through
            more ranks.
        depth: how far the rank is from where microbatches begin; the deepest is `num_ranks` - 1.
        num_microbatches: of each of the two stages.
    """
    num_beyond = num_ranks - 1 - depth
    for _ in range(2 * num_beyond):
        to.forward(near)
    for _ in range(depth + 1):
        to.forward(near)
        to.forward(far)
    for _ in range(num_beyond):
        to.input_grad(far)
        to.weight_grad()
        to.forward(far)
    for turn in range(num_microbatches - 2 * num_ranks + depth + 1):
        if turn == 0 and num_beyond == 0:
            # Not a pair: the backward's gradient goes on later, and what waits for the forward goes on earlier.
            to.forward(near)
            to.backward(far)
        else:
            to.pair(near, far)
        to.pair(far, near)
    for _ in range(num_beyond):
        to.backward(far)
        to.pair(far, near)
    # The second half of these backwards puts its weight gradients off, to have work for what would be idle time.
    stages = [stage for _ in range(depth + 1) for stage in (far, near)]
    num_whole = (depth + 1) // 2 * 2 + (1 if depth % 2 == 0 else 0)
    for stage in stages[:num_whole]:
        to.backward(stage)
    for stage in stages[num_whole:]:
        to.input_grad(stage)
    for _ in range(num_beyond):
        to.weight_grad()
        to.input_grad(near)
    while to.num_left():
        to.weight_grad()


def _written(
    name: str,
    placement: Placement,
    write: Callable[[int, RankList], None],
    first: Callable[[int], dict[int, int]] = lambda rank: {},
) -> Schedule:
    lists = []
    for rank in range(placement.num_ranks):
        to = RankList(first(rank))
        write(rank, to)
        lists.append(tuple(to.actions))
    return Schedule(tuple(lists), placement, name)


def _sizes(**sizes: int) -> list[int]:
    found = []
    for name, value in sizes.items():
        number = as_int(value)
        if number is None:
            raise ArgumentTypeError(f"{name} is a number of things.", expected="a whole number", got=describe(value))
        if number < 1:
            raise ArgumentError(f"{name} is a number of things.", expected="1 or more", got=describe(value))
        found.append(number)
    if math.prod(found) > _MOST:
        raise ArgumentError(
            "This schedule would be too large to be made.",
            expected=f"{' x '.join(sizes)} of at most {_MOST}",
            got=", ".join(f"{name}={describe(number)}" for name, number in zip(sizes, found, strict=True)),
        )
    return found


def _refuse(name: str, expected: str, got: str, nearest: str) -> None:
    raise ArgumentError(
        f"{name} is not defined for this.", expected=expected, got=got, do=f"The nearest that works: {nearest}."
    )
