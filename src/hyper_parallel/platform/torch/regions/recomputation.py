"""The values that a region did not keep are made again: what must run for them, in which of three ways, and whether the result is right.

The recorded ops run by themselves where it was shown that nothing happens beside them; else the function is called
again, and ops that nothing needs are left out; and where something reads what was left out, every op runs. The rules are
in the README of this folder; `second_call` has the call itself, `replaying` what happens to each op in it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from hyper_parallel._base.errors import StateError
from hyper_parallel._base.log import get_logger
from hyper_parallel.core.activation_checkpoint.options import Options
from hyper_parallel.core.regions.passes import Pass
from hyper_parallel.core.regions.policy import RegionPolicy
from hyper_parallel.core.regions.rerun_errors import other_ops, other_values
from hyper_parallel.core.regions.rerun_plan import ReplayPlan, plan_replay
from hyper_parallel.core.regions.value_check import is_due
from hyper_parallel.platform.torch.regions.checksums import find_difference, storage_checksum
from hyper_parallel.platform.torch.regions.inputs import Inputs
from hyper_parallel.platform.torch.regions.module_paths import has_sharded_modules
from hyper_parallel.platform.torch.regions.placeholders import NeedsEverything
from hyper_parallel.platform.torch.regions.recorded_ops import (
    NotAsRecordedError,
    Sources,
    can_run,
    run_recorded,
)
from hyper_parallel.platform.torch.regions.recording import Record
from hyper_parallel.platform.torch.regions.region_function import RegionFunction
from hyper_parallel.platform.torch.regions.replaying import Replay
from hyper_parallel.platform.torch.regions.residuals import Recomputed
from hyper_parallel.platform.torch.regions.saved_tensors import changed_in_place
from hyper_parallel.platform.torch.regions.second_call import SecondCall
from hyper_parallel.platform.torch.regions.values import Origin, Value, has_ragged, is_available

_logger = get_logger("region")
# What PyTorch's own kernels say when they want to read the memory of a placeholder.
_PLACEHOLDER_READ = ("Cannot access data pointer", "unallocated storage", "data is not allocated yet")


def reads_placeholder(error: RuntimeError) -> bool:
    """Whether a kernel wanted memory that a placeholder does not have."""
    return not isinstance(error, StateError) and any(text in str(error) for text in _PLACEHOLDER_READ)


class Recomputation:
    """How the values of one call are made again.

    Fields:
        _plan: the ops to run and the values to take, when the forward is over
        _num_planned: for how many residuals
        _checksums: of values as the forward made them, where they are compared
    """

    def __init__(
        self,
        function: RegionFunction,
        inputs: Inputs,
        second_call: SecondCall,
        policy: RegionPolicy | None,
        options: Options,
    ) -> None:
        self._function = function
        self._inputs = inputs
        self._second_call = second_call
        self._policy = policy
        self._options = options
        self._plan: Any = None
        self._num_planned = 0
        self._checksums: dict[Value, torch.Tensor] = {}

    # -- when the forward is over -------------------------------------------------------------------------------------

    @property
    def takes(self) -> frozenset[Value]:
        """What is taken from where it is kept."""
        takes: frozenset[Value] = self._plan.takes
        return takes

    def plan(self, record: Record, residuals: list[Recomputed]) -> None:
        """Find out what must run, and what is taken, for these."""
        wanted = {each.value for each in residuals}
        if record.runs_everything and wanted:
            self._plan = ReplayPlan(*record.everything())
        else:
            self._plan = plan_replay(record.ops, wanted, is_available, stops=self._options.early_stop)
        self._num_planned = len(residuals)

    def note_checksums(self, residuals: list[Recomputed]) -> None:
        """Of what they still hold, if this call is one that is checked."""
        if residuals and is_due(self._function.key):
            for each in residuals:
                if each.value not in self._checksums and each.held is not None:
                    self._checksums[each.value] = storage_checksum(each.held, each.value.num_bytes)

    def where(self, record: Record, value: Value) -> str:
        """What an error about a value names."""
        return self._function.name if value.op < 0 else str(record.ops[value.op])

    # -- in backward --------------------------------------------------------------------------------------------------

    def run(self, record: Record, residuals: list[Recomputed], current: Pass) -> None:
        """Make every value that these residuals may ask for, and put it into the pass."""
        if self._second_call.surroundings.transform == "torch.func.vmap":
            raise self._transformed()
        self._plan_again(record, residuals)
        wanted = {each.value for each in residuals}
        waiting = Counter(each.value for each in residuals)
        found = self._run_recorded(record, current, wanted)
        if found is not None:
            current.put(found, set(), waiting)
            return
        replay = None if record.runs_everything else self._try_to_leave_out(record, current, wanted)
        if replay is None:
            record.is_touched |= not record.runs_everything
            record.runs_everything = True
            replay = self._run_everything(record, current, wanted)
        self._check_found(record, replay, wanted)
        if self._checksums:
            self._check_values(record, replay)
        current.put(replay.found, replay.written_over(), waiting)

    def _plan_again(self, record: Record, residuals: list[Recomputed]) -> None:
        """Plan for what is there now: kept values may have been changed since, and residuals gone."""
        changed = [value for value in self.takes if value.kept is not None and value.kept.is_changed()]
        for value in changed:
            value.kept = None
        if changed or len(residuals) != self._num_planned:
            self.plan(record, residuals)
            for value in self.takes:
                if not is_available(value):  # it was there when the forward ended
                    raise changed_in_place(self.where(record, value))

    def _run_recorded(self, record: Record, current: Pass, wanted: set[Value]) -> dict[Value, torch.Tensor] | None:
        """Run the recorded ops without the function, if that is known to be the same; None if it is not."""
        runs = self._plan.runs
        if not self._may_run_recorded(record) or not can_run(record.ops[index] for index in runs):
            return None
        proof = self._function.proof
        if proof.has_unseen is None:
            proof.has_unseen = not self._shows_everything(record, current)
        if proof.has_unseen:
            return None
        try:
            # First of all: to get them may mean another replay, of the region around this one.
            inputs = {
                value: self._tensor_of_input(value, current)
                for value in self.takes
                if value.kept is None and value.origin is Origin.INPUT
            }
            sources = Sources(inputs, self._second_call.parameters)
            return run_recorded(
                record.ops, runs, wanted, sources.tensor, restores_random_state=self._options.preserve_rng_state
            )
        except NotAsRecordedError:
            return None

    def _may_run_recorded(self, record: Record) -> bool:
        options = self._options
        return (
            self._function.module is not None  # what a function does may depend on what it has closed over
            and options.early_stop
            and not options.debug
            and not record.runs_everything
            and not record.has_launches
            and not record.before_write
            and not record.views_that_communicate
            and not record.has_news()
            and not self._checksums
            and self._second_call.surroundings.is_ordinary()
            and (self._policy is None or self._policy.is_pure)
            and self._inputs.are_ordinary()
            and not has_sharded_modules()
        )

    def _shows_everything(self, record: Record, current: Pass) -> bool:
        """Whether all that the function does is in the record: it runs again with placeholders for all tensors, and nothing reads one.

        A kernel that no mode sees would, wherever it gets its memory from.
        """
        try:
            replay = self._run_again(record, current, (frozenset(), frozenset()), set(), early_stop=False)
        except (NeedsEverything, Exception) as reader:
            _logger.info("%s: the function runs again in backward, not its ops (%s)", self._function.name, reader)
            return False
        return replay.first_unknown is None and all(replay.has_met(op) for op in record.ops)

    def _tensor_of_input(self, value: Value, current: Pass) -> torch.Tensor:
        index = self._inputs.index_of(value)
        if index is None:
            raise NotAsRecordedError
        return self._inputs.tensor(index, current)

    def _try_to_leave_out(self, record: Record, current: Pass, wanted: set[Value]) -> Replay | None:
        """Run what is needed; None if something reads what was left out, as ops that PyTorch does not see may.

        The first time of a function all is left out that ops do not need in their own memory, to the function's end (rule 19).
        """
        looks = not self._function.has_left_out() and self._can_look(record)
        try:
            replay = self._run_again(record, current, self._plan, wanted, early_stop=not looks, looks=looks)
        except NeedsEverything as reader:
            cause = str(reader)  # the error itself would hold the frames that hold it
        except RuntimeError as error:
            if not reads_placeholder(error):
                raise
            cause = str(error)
        else:
            if not replay.has_written_found():
                self._function.note_left_out(is_missed=False)
                return replay
            cause = "a result is written, and by no op"
        self._function.note_left_out(is_missed=True)
        _logger.info("%s: what was left out is read after all (%s); every op is run again", self._function.name, cause)
        return None

    def _can_look(self, record: Record) -> bool:
        """Whether a run can go on to the function's end, and with placeholders for arguments: no op runs that others wait for."""
        return (
            not record.has_launches
            and not record.views_that_communicate
            and not any(op.must_run for op in record.ops)
            and self._inputs.are_ordinary()
            and not has_sharded_modules()
            # They run other ops the second time, and their errors would hide that.
            and not any(isinstance(each, torch.jit.ScriptModule) for each in self._function.modules)
        )

    def _run_everything(self, record: Record, current: Pass, wanted: set[Value]) -> Replay:
        try:
            replay = self._run_again(record, current, record.everything(), wanted)
        except NeedsEverything as reader:
            raise StateError(
                "An input of a region is read that was not kept.",
                where=f"{self._function.name}, {reader}",
                do="Run the step again: from now on it is kept.",
            ) from None
        if replay.has_written_arguments():
            raise StateError(
                "An argument of a region is written by something that PyTorch does not see, and cannot be recomputed.",
                expected="arguments that ops alone write",
                got="other contents after the function has run again",
                where=self._function.name,
                do="Write into a clone of the argument, or with PyTorch's own ops.",
            )
        return replay

    def _run_again(
        self,
        record: Record,
        current: Pass,
        plan: tuple[Any, Any],
        wanted: set[Value],
        early_stop: bool = True,
        looks: bool = False,
    ) -> Replay:
        options = self._options
        replay = Replay(
            record,
            *plan,
            wanted,
            self._policy,
            check_outputs=options.check_outputs,
            early_stop=early_stop and options.early_stop and not (record.runs_everything or record.has_launches),
            restores_random_state=options.preserve_rng_state,
            looks=looks,
        )
        self._second_call.run(replay, current)
        return replay

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_found(self, record: Record, replay: Replay, wanted: set[Value]) -> None:
        missing = min((value.op for value in wanted if value not in replay.found), default=None)
        if missing is None:
            return
        if self._second_call.surroundings.transform is not None:
            raise self._transformed()
        if any(has_ragged(op.rest) for op in record.ops):
            raise StateError(
                "What a region did with nested tensors cannot be recomputed.",
                expected="ops on ordinary tensors",
                got="a nested tensor, whose ragged dim has another name in every run",
                where=self._function.name,
                do="Let a policy save or swap all of this region, or put swap_wrapper around it instead.",
            )
        first = replay.first_missing or record.ops[missing]
        raise other_ops(replay, first, record.ops, self._function.name, lists_ops=self._options.debug)

    def _transformed(self) -> StateError:
        return StateError(
            "What a region did inside of a transform cannot be recomputed outside of it.",
            expected="a plain call",
            got=f"{self._second_call.surroundings.transform} around it",
            where=self._function.name,
            do="Let a policy save or swap all of this region, or call it without the region there.",
        )

    def _check_values(self, record: Record, replay: Replay) -> None:
        values = sorted((value for value in self._checksums if value in replay.found), key=lambda value: value.op)
        found = [storage_checksum(replay.found[value], value.num_bytes) for value in values]
        index = find_difference([self._checksums[value] for value in values], found)
        if index is not None:
            raise other_values(self.where(record, values[index]))
