"""A pipeline's schedule as data: what every rank does, in order. Immutable, without a framework."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hyper_parallel._base import files
from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, DamagedFileError, describe
from hyper_parallel.core.parallel.pipeline import checking, drawing, lowering, pytorch_csv, simulation
from hyper_parallel.core.parallel.pipeline.actions import COMPUTE, Action, Kind
from hyper_parallel.core.parallel.pipeline.costs import Cost, cost_function
from hyper_parallel.core.parallel.pipeline.keeping import Keeping
from hyper_parallel.core.parallel.pipeline.placement import Placement, found_in
from hyper_parallel.core.parallel.pipeline.simulation import Timeline
from hyper_parallel.core.parallel.pipeline.verdict import Report, counted

__all__ = ["Schedule"]

_MOST_BYTES = 256 * 1024**2  # of a file: a schedule of 64 ranks and 1,024 microbatches has 10 MB


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does, in order.

    Made by `hp.schedules`, by `Schedule.of`, or read from a file of PyTorch's. It may hold compute actions only, or,
    after `lower`, the sends, receives and leases of parameters, too.

    Attributes:
        ranks: the actions of each rank.
        placement: which rank has which stage, for which microbatch.
        name: for people.

    Example:
        >>> import hyper_parallel as hp
        >>> schedule = hp.Schedule.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
        >>> print(schedule.check())
        2 ranks, 2 stages, 2 microbatches: complete, in order, free of deadlock
        most microbatches kept at rank: 0: 2, 1: 1
        >>> schedule.simulate({"F": 1, "I": 1, "W": 1}).bubble
        0.5
    """

    ranks: tuple[tuple[Action, ...], ...]
    placement: Placement
    name: str = ""

    def __post_init__(self) -> None:
        lists = self.ranks if isinstance(self.ranks, tuple) else ()
        if not lists or not all(isinstance(actions, tuple) and {*map(type, actions)} <= {Action} for actions in lists):
            raise ArgumentTypeError(
                "These are no lists of actions.",
                expected="a tuple of actions for each rank; Schedule.of takes lists and texts",
                got=describe(self.ranks),
            )
        if not isinstance(self.placement, Placement) or not isinstance(self.name, str):
            raise ArgumentTypeError(
                "This is no schedule.",
                expected="a Placement, and text as its name",
                got=f"{describe(self.placement)}, {describe(self.name)}",
            )

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_microbatches(self) -> int:
        return self.placement.num_microbatches

    @staticmethod
    def of(ranks: Iterable[Iterable[Action | str]], *, name: str = "") -> Schedule:
        """Make a schedule of the actions of each rank; where a stage lives is seen from its forwards.

        Nothing is proved here: `check` does.

        Args:
            ranks: for each rank its actions, or their texts.
            name: for people.

        Raises:
            TypeError: these are no lists of actions.
            ValueError: a text is no action; there is no forward; a stage is missing, or a number is far beyond what the
                lists can hold.

        Example:
            >>> import hyper_parallel as hp
            >>> hp.Schedule.of([["0F0", "1F0", "1B0", "0B0"]]).num_stages
            2
        """
        try:
            lists = tuple(tuple(_action(action) for action in actions) for actions in ranks)
        except TypeError as error:
            if isinstance(error, ArgumentTypeError):
                raise
            raise ArgumentTypeError(
                "These are no lists of actions.", expected="for each rank a list", got=describe(ranks)
            ) from None
        return Schedule(lists, _placement_of(lists), name)

    @staticmethod
    def load(path: str | os.PathLike[str], *, name: str = "") -> Schedule:
        """Read a file of `torch.distributed.pipelining`: one line per rank, one action per cell; empty cells are idle.

        Raises:
            OSError: there is no such file.
            ValueError: it is damaged, or no schedule. Whether a schedule can run is for `check` to say.
        """
        with files.opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > _MOST_BYTES:
                raise DamagedFileError(
                    "This is no schedule.", expected=f"at most {_MOST_BYTES} bytes", got=str(size), where=str(path)
                )
            with os.fdopen(os.dup(descriptor), "rb") as file:
                return Schedule.of(pytorch_csv.read(file.read(), str(path)), name=name or Path(path).stem)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the schedule as PyTorch's CSV.

        PyTorch reads compute actions as `compute_only`, and what `lower` made as `compute_comms`.
        """
        files.write(path, self.to_csv().encode())
        return Path(path)

    def to_csv(self) -> str:
        """Write the schedule as the text of PyTorch's CSV.

        Example:
            >>> import hyper_parallel as hp
            >>> print(hp.schedules.one_f_one_b(2, 2).to_csv())
            0F0,0F1,0B0,0B1
            1F0,1B0,1F1,1B1
            <BLANKLINE>
        """
        return pytorch_csv.write(self.ranks)

    def compute_only(self) -> Schedule:
        """Leave out sends, receives and leases."""
        if all(action.kind in COMPUTE for actions in self.ranks for action in actions):
            return self
        return replace(self, ranks=tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in self.ranks))

    def lower(self, *, zero: int = 0, prefetch: int = 1) -> Schedule:
        """Add what the compute actions need: sends and receives, leases of sharded parameters, reductions of gradients.

        Args:
            zero: how parameters are sharded over the ranks that hold the same stage. 0: not at all, gradients are
                reduced once. 1: parameters are gathered once and stay to the end of the step, gradients are reduced
                once. 2: the same, let go of after the last use, and gradients are reduced after every microbatch. 3: as
                2, and only stages in use and the next ones are gathered.
            prefetch: with `zero=3`, how many stages more than those in use.

        Raises:
            ValueError: the compute actions cannot run, as `check`; an argument is none of these.

        Example:
            >>> import hyper_parallel as hp
            >>> print(hp.schedules.one_f_one_b(2, 1).lower())
            one_f_one_b: 2 ranks, 2 stages, 1 microbatch
            rank 0: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD
            rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD
        """
        computing = self.compute_only()
        return replace(self, ranks=lowering.lowered(computing, computing.simulate().bars, zero, prefetch))

    def check(self, *, activations: Sequence[float] | None = None, after_input_grad: float = 1.0) -> Report:
        """Prove that the schedule runs, and count what it keeps.

        Every microbatch has its forward and its backward at every stage, once, in order and at the right rank. All that
        an action needs is there when it begins. Nobody waits forever, even if every send blocks until it is received,
        and every receive until it is sent. Parameters are unsharded while they are used, and not in the end. No
        gradient stays unreduced.

        Args:
            activations: what one microbatch keeps at each stage, in any unit; by default a stage's part of a rank's
                layers, so that a peak of 4 means four microbatches at all layers of one rank.
            after_input_grad: the part of it that stays between an input gradient and its weight gradient.

        Raises:
            ScheduleError: (a ValueError) what is wrong, by rank, position and action.
        """
        keeping = Keeping(self.num_ranks, self.num_stages, activations, after_input_grad)
        return self._proved if keeping.is_default else checking.check(self, keeping)

    @cached_property
    def _proved(self) -> Report:
        return checking.check(self, Keeping(self.num_ranks, self.num_stages))

    def simulate(
        self,
        costs: Mapping[str, Cost] | None = None,
        *,
        activations: Sequence[float] | None = None,
        after_input_grad: float = 1.0,
    ) -> Timeline:
        """Say when everything happens, if ranks wait for what they need alone.

        Sends, gathers and reductions run beside the compute.

        Args:
            costs: times by kind, in any unit, each one number or one per stage: "F", "I", "W" (1 if not named), "B" (I
                + W), "OVERLAP_F_B" (F + B), and 0 if not named: "SEND_F", "SEND_B", "UNSHARD", "REDUCE_GRAD". A
                transfer waits for the one before it from the same rank to the same rank in the same direction.
            activations, after_input_grad: as in `check`.

        Raises:
            ValueError: the schedule cannot run, or a cost is no time.

        Example:
            >>> import hyper_parallel as hp
            >>> timeline = hp.schedules.zbv(4, 8).simulate({"F": 1, "I": 1, "W": 1})
            >>> timeline.time, timeline.bubble, timeline.peak
            (51.0, 0.0625, (4.0, 4.0, 4.0, 4.0))
        """
        keeping = Keeping(self.num_ranks, self.num_stages, activations, after_input_grad)
        cost = cost_function(self.num_stages, {} if costs is None else costs)
        _ = self._proved  # what cannot run has no time
        return simulation.simulate(self, cost, keeping)

    def draw(self, path: str | os.PathLike[str], costs: Mapping[str, Cost] | None = None) -> Path:
        """Write one self-contained page: every rank over time, its idle time, and what it keeps.

        Args:
            path: where; the page is there whole, or what was there stays.
            costs: as in `simulate`.
        """
        target = files.checked_path(path)
        files.write(target, drawing.page(self, self.simulate(costs)).encode())
        return Path(target)

    def __str__(self) -> str:
        sizes = [(self.num_ranks, "rank"), (self.num_stages, "stage"), (self.num_microbatches, "microbatch")]
        head = f"{self.name or 'schedule'}: " + ", ".join(map(counted, *zip(*sizes, strict=True)))
        return "\n".join(
            [head, *(f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.ranks))]
        )


def _action(value: object) -> Action:
    if isinstance(value, str):
        return Action.parse(value)
    if isinstance(value, Action):
        return value
    raise ArgumentTypeError("This is no action.", expected="an Action, or its text", got=describe(value))


def _placement_of(lists: Sequence[Sequence[Action]]) -> Placement:
    homes: dict[tuple[int, int], int] = {}
    stages: dict[tuple[int, int], None] = {}
    num_microbatches = num_parts = 0
    for rank, actions in enumerate(lists):
        for action in actions:
            for part in action.parts or (action,):
                num_parts += 1
                stages[part.stage, rank] = None
                if part.microbatch is not None:
                    num_microbatches = max(num_microbatches, part.microbatch + 1)
                    if part.kind is Kind.FORWARD:
                        homes.setdefault((part.stage, part.microbatch), rank)
    if not homes:
        raise ArgumentError(
            "There is no forward in this schedule.", expected="an action such as 0F0", got=f"{num_parts} actions"
        )
    if num_microbatches > num_parts:  # before a table as long as a stranger's number is made
        raise ArgumentError(
            "Microbatches are missing in this schedule.",
            expected=f"microbatches 0 to {num_microbatches - 1}, since the last one is named",
            got=f"{num_parts} actions",
        )
    return found_in(homes, stages, num_microbatches)
