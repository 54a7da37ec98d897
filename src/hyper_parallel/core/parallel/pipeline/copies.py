"""Weights that are at several places of a pipeline, and have one gradient: the sum of all.

Two reasons for a copy. `dualpipe` sends half of the microbatches the other way, so each stage is on two ranks. And a
weight may be tied: an embedding in the first stage that is the head's weight in the last one.

Example: `tied={"embedding.weight": "words"}` at stage 0, `tied={"head.weight": "words"}` at stage 3. After the last
backward of a step the rank of stage 3 sends its gradient to that of stage 0, which adds it to its own and sends the sum
back. Both copies take the same step of an optimizer then, and stay equal to the bit.

Before the first step the copies are made equal, as the first one is.

Order: all ranks go through the copies in the same order. The first rank of each collects from the others in order, and
gives all the sum. Who waits there waits for a rank that has come as far, or will: nobody waits in a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.parallel.pipeline.exchange import Exchange
from hyper_parallel.core.parallel.pipeline.stage import PipelineStage, StageWeight
from hyper_parallel.platform.opaque import Tensor

__all__ = ["Copies"]


class _Owner(NamedTuple):
    """One copy of a weight. In order, the first one's rank collects."""

    rank: int
    stage: int
    name: str


class Copies:
    """The weights with copies, as all ranks know them, and this rank's part in adding up their gradients.

    Args:
        everywhere: for each rank, the weights of each of its stages.
    """

    def __init__(
        self,
        exchange: Exchange,
        stages: Mapping[int, PipelineStage],
        rank: int,
        everywhere: Sequence[Mapping[int, Sequence[StageWeight]]],
    ) -> None:
        self._exchange = exchange
        self._stages = stages
        self._rank = rank
        # One tensor that two stages of a rank share is one copy: autograd adds up there.
        called = {
            (at, weight.identity): weight.tied_as
            for at, its_stages in enumerate(everywhere)
            for weights in its_stages.values()
            for weight in weights
            if weight.tied_as is not None
        }
        found: dict[str, dict[tuple[int, int], _Owner]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for at, its_stages in enumerate(everywhere):
            for stage, weights in sorted(its_stages.items()):
                for weight in weights:
                    key = weight.tied_as or called.setdefault((at, weight.identity), f"stage {stage}: {weight.name}")
                    found.setdefault(key, {}).setdefault((at, weight.identity), _Owner(at, stage, weight.name))
                    if shapes.setdefault(key, weight.shape) != weight.shape:
                        raise ArgumentError(
                            f"Weights that are tied as {key!r} have one shape.",
                            expected=str(list(shapes[key])),
                            got=str(list(weight.shape)),
                            where=f"{weight.name} of stage {stage}",
                        )
        self._copies = {key: sorted(owners.values()) for key, owners in sorted(found.items()) if len(owners) > 1}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Put gradients of earlier steps aside, which are sums of all copies already, and add them again afterwards."""
        before = {owner: self._gradient(owner) for owner in self._mine()}
        for owner in before:
            self._stages[owner.stage].set_gradient(owner.name, None)
        try:
            yield
        finally:
            for owner, earlier in before.items():
                if earlier is not None:
                    later = self._gradient(owner)
                    stage = self._stages[owner.stage]
                    stage.set_gradient(owner.name, earlier if later is None else stage.backend.add(earlier, later))

    def _mine(self) -> list[_Owner]:
        return [owner for owners in self._copies.values() for owner in owners if owner.rank == self._rank]

    def _gradient(self, owner: _Owner) -> Tensor | None:
        return self._stages[owner.stage].gradient(owner.name)

    def make_equal(self) -> None:
        """Give all copies the first one's numbers. All ranks call it before their first step.

        Where weights get their numbers by chance, as after `init_parameters`, each copy has others.
        """
        for key, owners in self._copies.items():
            mine = [owner for owner in owners if owner.rank == self._rank]
            if not mine:
                continue
            root = owners[0].rank
            if root == self._rank:
                value = self._stages[owners[0].stage].weight(owners[0].name)
                for rank in sorted({owner.rank for owner in owners} - {root}):
                    self._exchange.send_gradient(("first", key, rank), rank, value)
            else:
                value = self._exchange.receive_gradient(("first", key, self._rank), root)
            for owner in mine:
                if owner != owners[0]:
                    self._stages[owner.stage].set_weight(owner.name, value)
        self._exchange.join()

    def add_up(self) -> None:
        """Make the gradient of each copy the sum of all. All ranks call it when their backwards are done."""
        for key, owners in self._copies.items():
            mine = [owner for owner in owners if owner.rank == self._rank]
            if not mine:
                continue
            root = owners[0].rank
            if root == self._rank:
                total = self._collected(key, owners)
                for rank in sorted({owner.rank for owner in owners} - {root}):
                    self._exchange.send_gradient((key, rank), rank, total)
            else:
                for owner in mine:
                    self._exchange.send_gradient((key, owner), root, self._gradient(owner))
                total = self._exchange.receive_gradient((key, self._rank), root)
            for owner in mine:
                self._stages[owner.stage].set_gradient(owner.name, total)
        self._exchange.join()

    def _collected(self, key: str, owners: Sequence[_Owner]) -> Tensor | None:
        total: Tensor | None = None
        for owner in owners:
            if owner.rank == self._rank:
                gradient = self._gradient(owner)
            else:
                gradient = self._exchange.receive_gradient((key, owner), owner.rank)
            if gradient is not None:
                total = self._stages[owners[0].stage].backend.add(total, gradient)
        return total
