"""Stages whose parameters are sharded over data parallel ranks: when they are whole, and when gradients are sent.

The schedule says it: `0UNSHARD`, `0RESHARD`, `0REDUCE_GRAD`. So nothing is gathered or sent inside a forward or a
backward, and two threads can run a pair of them.

Example: with `zero=2`, rank 0 of `one_f_one_b(2, 2)` does
`0UNSHARD 0F0 0F1 0B0 0REDUCE_GRAD 0B1 0RESHARD 0REDUCE_GRAD`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hyper_parallel.core.parallel.pipeline.actions import Action, Kind
from hyper_parallel.core.parallel.pipeline.stage import PipelineStage
from hyper_parallel.core.parallel.sharding.accumulation import whole_step
from hyper_parallel.core.parallel.sharding.fully_shard import units_in
from hyper_parallel.core.parallel.sharding.order import ORDER

__all__ = ["ShardedStages"]


class ShardedStages:
    """The units of this rank's stages."""

    def __init__(self, stages: Mapping[int, PipelineStage]) -> None:
        self._of = {index: units_in(stage.module) for index, stage in stages.items()}

    @property
    def zero(self) -> int:
        """How a schedule is lowered for them; 0 where nothing is sharded."""
        return max((unit.zero for units in self._of.values() for unit in units), default=0)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all actions of a step: at its end the shards have their gradients."""
        units = list(dict.fromkeys(unit for units in self._of.values() for unit in units))
        if not units:
            yield
            return
        with whole_step(units):
            yield

    def do(self, action: Action) -> None:
        """Carry out an action that is a stage's and no microbatch's."""
        for unit in self._of[action.stage]:
            if action.kind is Kind.UNSHARD:
                unit.unshard()
            elif action.kind is Kind.RESHARD:
                unit.reshard()
        if action.kind is Kind.REDUCE:
            ORDER.reduce_now(self._of[action.stage])
