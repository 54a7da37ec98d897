"""One profile for ranks that hold parts of one model, so that they make one plan of it.

They take all their steps together: a collective waits for every rank, in forward and where a block runs again. But they
need not run the same ops. Where sizes are uneven results look otherwise; and of a bias that is added once, one rank has
the values and the others have zeros, which is an op more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hyper_parallel.core.planner.model.choices import RECOMPUTE
from hyper_parallel.core.planner.model.profile import ProfiledOp, Region, StepProfile


def common_profile(profiles: Sequence[StepProfile]) -> StepProfile | None:
    """Take the profile with the highest peak, with the choices that all ranks have.

    None where ranks run other blocks: then no one plan fits them. The result is the same on every rank that gives the
    same profiles in the same order.
    """
    if len({tuple((region.path, region.call) for region in profile.regions) for profile in profiles}) > 1:
        return None
    chosen = max(profiles, key=lambda profile: profile.peak_bytes)
    of_ranks = zip(*(profile.regions for profile in profiles), strict=True)
    return dataclasses.replace(chosen, regions=tuple(map(_common_region, chosen.regions, of_ranks)))


def _common_region(region: Region, of_ranks: Sequence[Region]) -> Region:
    """Give the region the ops of all ranks.

    What only some ranks run is run again by these, and costs nothing here. Where backward does not need results of the
    same ops on all ranks, all of a block is run again or nothing: its collectives are repeated wherever anything is.
    """
    ranks = [{op.key: op for op in of_rank.ops} for of_rank in of_ranks]
    needed = [{key for key, op in rank.items() if op.is_needed} for rank in ranks]
    may_choose = all(keys == needed[0] for keys in needed)
    ops = [_common_op(op, [rank.get(op.key) for rank in ranks], may_choose=may_choose) for op in region.ops]
    known = {op.key for op in ops}
    # Parts are no ops of their own: no policy is asked about them.
    others = {key: op for rank in ranks for key, op in rank.items() if key not in known and op.part is None}
    ops += [
        ProfiledOp(op.module, op.name, op.call, op.occurrence, forward_ms=0.0, makes=(), choices=(RECOMPUTE,))
        for op in others.values()
    ]
    inputs = tuple(
        dataclasses.replace(given, may_swap=all(rank.inputs[index].may_swap for rank in of_ranks))
        for index, given in enumerate(region.inputs)
    )
    return dataclasses.replace(region, ops=tuple(ops), inputs=inputs)


def _common_op(op: ProfiledOp, of_ranks: Sequence[ProfiledOp | None], *, may_choose: bool) -> ProfiledOp:
    """Leave the op the choices that every rank has, and its result metas where all ranks have the same."""
    has_all = None not in of_ranks
    found = [other for other in of_ranks if other is not None]
    choices = tuple(choice for choice in op.choices if all(choice in rank.choices for rank in found))
    return dataclasses.replace(
        op,
        choices=choices if has_all and may_choose else (RECOMPUTE,),
        result_metas=op.result_metas if has_all and all(rank.result_metas == op.result_metas for rank in found) else (),
    )
