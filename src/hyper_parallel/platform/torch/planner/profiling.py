"""Profiling one step of a model: a few real steps, each for one kind of number, and what they say together.

1. a plain step, to warm up (kernels are chosen, buffers made) and to see which blocks backward comes to;
2. plain steps by the clock: how long each block takes, forward and backward;
3. a plain step by the allocator: how high memory rises, block by block;
4. a step with every block as a region: its ops, what they read and make, what backward needs, how long each takes;
5. a step by the allocator in which every block is run again.

Where a plain step does not fit the device, 1 to 3 are steps in which every block is run again (its inputs are swapped,
too, if even that does not fit), and what a plain step would take is computed from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel._base.log import get_logger
from hyper_parallel.core.activation_checkpoint.replacement import replace
from hyper_parallel.core.planner.model.abilities import Abilities, HostCost
from hyper_parallel.core.planner.model.agreement import common_profile
from hyper_parallel.core.planner.model.choices import SAVE, SWAP, plain, recompute_all, recompute_ms
from hyper_parallel.core.planner.model.measured_span import MeasuredSpan
from hyper_parallel.core.planner.model.problem import Problem, evaluate
from hyper_parallel.core.planner.model.profile import Input, Region, StepProfile, StorageFacts, Turn
from hyper_parallel.core.planner.model.spans import as_allocated, with_common_times, with_peaks
from hyper_parallel.core.planner.solve.solver import BudgetError
from hyper_parallel.core.swap.config import current_config, default_min_bytes
from hyper_parallel.platform.torch.planner import signature
from hyper_parallel.platform.torch.planner.applying import Applied, unwrap
from hyper_parallel.platform.torch.planner.blocks import check_ran, find_blocks, suggested
from hyper_parallel.platform.torch.planner.link import measure_link
from hyper_parallel.platform.torch.planner.memory import free_bytes
from hyper_parallel.platform.torch.planner.meters import Clock, memory_meter
from hyper_parallel.platform.torch.planner.optimizer_state import optimizer_bytes
from hyper_parallel.platform.torch.planner.out_of_memory import attempt
from hyper_parallel.platform.torch.planner.profiled_ops import op_times, planned_ops
from hyper_parallel.platform.torch.planner.steps import (
    KeptOutput,
    LossFn,
    device_of,
    groups_of,
    is_alone,
    preserved,
    run_step,
    tensors_of,
    trained_tensors,
)
from hyper_parallel.platform.torch.planner.traced_steps import RecordedCall, note_shared, recording
from hyper_parallel.platform.torch.regions.compiled_code import compile_visibly
from hyper_parallel.platform.torch.regions.local_parts import local_tensor
from hyper_parallel.platform.torch.regions.surroundings import is_replaying
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import checkpoint_wrapper
from hyper_parallel.platform.torch.wrappers.replacement import TREE

_logger = get_logger("planner")
NUM_TIMED = 3
# Steps differ by so much of a step without a reason: less than that is not put down to regions.
_NOISE_SHARE = 0.03
Progress = Callable[[str], None]


class HowBlocksRun(Enum):
    """How blocks run while a step is measured; the first way that fits the device is taken."""

    PLAIN = "as they are"
    RECOMPUTE = "every block run again"
    SWAP_INPUTS = "every block run again, its inputs swapped"


class ProfiledModel:
    """One model, batch and loss, with which the planner runs real steps.

    It lives for one call of the planner.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        loss_fn: LossFn | None = None,
        *,
        regions: Sequence[Any] | None = None,
        optimizer: object = None,
        reserve_bytes: int = 0,
        keeps_output: bool = True,
    ) -> None:
        self.model = model
        self.batch = batch
        self.loss_fn = loss_fn
        self.device = device_of(model)
        self.blocks = find_blocks(model, regions)
        self._keeps_output = keeps_output
        self._kept_output = KeptOutput(model, batch, self.device)
        self._reached: list[int | None] = []  # for each call of a block: see `_Reached`
        self.extra_bytes = reserve_bytes + optimizer_bytes(optimizer, self.device, is_reserved=reserve_bytes > 0)

    # -- what is alive when forward begins -----------------------------------------------------------------------------

    def base_bytes(self) -> int:
        """Count parameters, gradients, buffers, optimizer state, the batch; on an accelerator all that the process has.

        And the output of the step before, once one was seen, if the training loop has it still.
        """
        return self._without_output_bytes() + self._output_bytes()

    def _output_bytes(self) -> int:
        return self._kept_output.num_bytes if self._keeps_output else 0

    def _without_output_bytes(self) -> int:
        trained = trained_tensors(self.model, self.batch)
        if self.device.type != "cpu":
            missing = [tensor for tensor in trained if tensor.grad is None and tensor.device == self.device]
            allocated = int(getattr(torch, self.device.type).memory_allocated(self.device))
            return allocated + sum(map(_num_bytes, missing)) + self.extra_bytes
        storages: dict[int, int] = {}
        for tensor in (*self.model.parameters(), *self.model.buffers(), *tensors_of(self.batch)):
            storage = local_tensor(tensor).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        return sum(storages.values()) + sum(map(_num_bytes, trained)) + self.extra_bytes

    def suggested_blocks(self, inside: str | None = None) -> list[str]:
        """List what could be planned instead of a block, or beside all of them: patterns for `regions=`."""
        return suggested(self.model, self.blocks, inside)

    # -- measuring -----------------------------------------------------------------------------------------------------

    def step(self, meter: Any = None) -> float:
        """Run one step that begins like every other.

        "start", "turn" and "end" are marked where a meter is given.
        """
        with self.preserved() as block, block as state, state.next_step():
            keeps = self._keeps_output and meter is not None
            return run_step(self.model, self.batch, self.loss_fn, self._kept_output, meter, keeps=keeps)

    def preserved(self) -> preserved:
        """Open a block for several steps in a row, and leave everything as `preserved` says."""
        return preserved(self.model, self.batch, self.loss_fn)

    def kept_by_op(self) -> list[tuple[str, str, str, int]]:
        """List nothing: a profile has ops of its own here."""
        return []

    def look_for_writes(self) -> None:
        """Run a step that shows what steps write, if none has shown it and the plain one fits the device.

        It runs before a plan is on the model.
        """
        with self.preserved() as block, block as state:
            if not state.is_watched:
                attempt(self.step, self.device)

    def peaks_within(self, num_steps: int, *, num_before: int) -> int | None:
        """Measure the highest point of some steps after others, as the model is now, above where they began.

        None: memory ran out.
        """
        self._empty_cache()
        found = attempt(lambda: [self.peak_bytes() for _ in range(num_before + num_steps)], self.device)[0]
        peaks = self._of_all(None if found is None else max(found[num_before:]))
        return None if None in peaks else max(peaks)

    def agreed(self, profile: Any) -> Any:
        """Agree with the ranks that hold parts of one model on one profile: see `common_profile`.

        Model and batch in it are this rank's. Such ranks take all their steps together: a plan that one of them refuses
        is to be refused by all, after as many steps.
        """
        common = common_profile(self._of_all(profile))
        if common is None:
            self._groups = []  # each plans by itself
            return profile
        return dataclasses.replace(common, identity=profile.identity)

    def free_bytes(self) -> int:
        """Count what the device has left; of ranks that plan together, that with the least."""
        return min(self._of_all(free_bytes(self.device)))

    @functools.cached_property
    def _groups(self) -> list[Any]:
        """The groups of ranks in which a step of the model communicates, as far as its parameters tell."""
        return [] if self.is_alone else groups_of(self.model)

    def _of_all(self, value: object) -> list[Any]:
        """Collect the value of each rank that plans together with this one, in their order."""
        values = {0 if self.is_alone else dist.get_rank(): value}
        for group in self._groups:
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, values, group)
            values = {rank: own_value for part in found for rank, own_value in part.items()}
        return [values[rank] for rank in sorted(values)]

    def peak_bytes(self) -> int:
        """Measure the highest point of one step above where it began.

        The model is taken as it is now, and nothing is changed by it.
        """
        with self.preserved() as block, block:
            if self._keeps_output and self._kept_output.sizes is None:
                self.step()  # how much the one before left
            meter = memory_meter(self.device)
            with meter.running():
                self.step(meter)
            return max(span.peak_bytes for span in meter.spans())

    @property
    def tells_time(self) -> bool:
        """Say whether the time of a few steps tells anything.

        On a CPU it is noise, and ranks would draw different conclusions from their own.
        """
        return self.device.type != "cpu" and self.is_alone

    @property
    def is_alone(self) -> bool:
        return is_alone()

    def step_ms_within(self) -> float | None:
        """Measure `step_ms`. None: memory ran out."""
        return attempt(self.step_ms, self.device)[0]

    def step_ms(self, num_steps: int = NUM_TIMED) -> float:
        """Measure the median time of a step, as the model is now."""
        with self.preserved() as block, block:
            times = []
            for _ in range(num_steps):
                clock = Clock(self.device)
                self.step(clock)
                times.append(sum(clock.spans().values()))
            return statistics.median(times)

    def profile(self, progress: Progress | None = None) -> Any:
        """Run the steps that the head of the file lists, and make a profile of them."""
        report_progress = progress or (lambda what: None)
        base_bytes = self._without_output_bytes()
        compile_visibly(self.model)
        with self.preserved() as block, block as state:
            way, timed, spans = self._steps(report_progress)
            report_progress("recording ops")
            with recording(self.model, self.blocks, self.device, swaps_inputs=way is HowBlocksRun.SWAP_INPUTS) as calls:
                self.step()
            written = tuple(state.written)
        base_bytes += self._output_bytes()
        report_progress("measuring the link")
        link, said = attempt(functools.partial(measure_link, self.device), self.device)
        if said is not None:
            _logger.warning("nothing will be swapped: there is no room to measure the link (%s)", said)
        common = [name for name in timed[0] if all(name in step_times for step_times in timed)]
        times = {name: statistics.median(step_times[name] for step_times in timed) for name in common}
        self._check_calls(calls, times)
        for index, call in enumerate(calls):
            # Without a mark it may have run again nevertheless: a hook is lost on a view that the next block writes
            # into.
            if f"backward {index}" not in times and not call.ran_again:
                call.forget_needed()
        note_shared(calls, self._held_storages())
        regions = [
            _region(call, index, times, self.device, link is not None, _min_bytes(self.device))
            for index, call in enumerate(calls)
        ]
        report_progress("measuring recomputation")
        decision = [_run_again(region, swaps_inputs=way is HowBlocksRun.SWAP_INPUTS) for region in regions]
        again, again_ms = self._measured_again(regions, decision)
        regions = with_common_times(regions if way is HowBlocksRun.PLAIN else _without_replay(regions, decision))
        if spans is not None and self.device.type != "cpu":  # a CPU's meter counts what was asked for
            regions = as_allocated(regions, spans, again, decision)
        regions, turn_bytes = with_peaks(regions, spans, again, decision)
        turn_ms = times.get(f"after {len(calls) - 1}", 0.0) + times.get("turn", 0.0)
        # By the same numbers that a plan is predicted with: no plan shall look faster than the plain step for the noise
        # in them.
        step_ms = turn_ms + sum(region.before_ms + region.forward_ms + region.backward_ms for region in regions)
        regions, host = self._host_cost(regions, decision, step_ms, again_ms)
        profile = StepProfile(
            regions=tuple(regions),
            base_bytes=base_bytes,
            peak_bytes=0 if spans is None else base_bytes + max(span.peak_bytes for span in spans),
            step_ms=step_ms,
            turn=Turn(turn_ms, turn_bytes),
            link=link,
            identity=dataclasses.replace(
                signature.identity(self.model, self.batch, self.blocks),
                autocast=calls[0].autocast,  # a model may switch it on itself
            ),
            abilities=Abilities(loads_by_region=True, turn_is_clear=True),
            host=host,
            min_swap_bytes=_min_bytes(self.device),
            shared_input_bytes=_shared_input_bytes(calls),
            keeps_output=self._keeps_output,
            written=written,
            is_plain_measured=spans is not None,
        )
        return profile if spans is not None else _with_computed_peak(profile)

    def _steps(
        self, report_progress: Progress
    ) -> tuple[HowBlocksRun, list[dict[str, float]], list[MeasuredSpan] | None]:
        """Measure steps in the first way of running them that fits the device.

        They are timed, and their memory is measured if the way is the plain one.

        Raises:
            BudgetError: none does.
        """
        said: str | None = None
        for way in HowBlocksRun:
            found, said = attempt(functools.partial(self._steps_in, way, report_progress), self.device)
            if said is None:
                return way, *found
            _logger.info("a step does not fit the device (%s): %s", way.value, said.partition("\n")[0])
        raise BudgetError(
            "A step runs out of memory even if every block is recomputed and its inputs are swapped.",
            expected="room for one block and what is outside of all blocks",
            got=(said or "").partition("\n")[0],
            do="Make the batch or the sequence smaller, or name smaller blocks: regions=[...].",
        )

    def _steps_in(
        self, way: HowBlocksRun, report_progress: Progress
    ) -> tuple[list[dict[str, float]], list[MeasuredSpan] | None]:
        with self._run_in(way) as wrappers:
            report_progress(
                "warming up" if way is HowBlocksRun.PLAIN else "the plain step does not fit; recomputing every block"
            )
            self._find_reached(wrappers)
            report_progress("measuring times")
            timed = [self._timed(wrappers) for _ in range(NUM_TIMED)]
            report_progress("measuring memory")
            return timed, self._measured() if way is HowBlocksRun.PLAIN else None

    @contextlib.contextmanager
    def _run_in(self, way: HowBlocksRun) -> Iterator[list[nn.Module]]:
        """Run blocks again in backward while the block is open, unless the way is the plain one.

        It gives the wrappers that do it.
        """
        if way is HowBlocksRun.PLAIN:
            yield []
            return
        swaps_inputs = way is HowBlocksRun.SWAP_INPUTS
        wrapped = {block: checkpoint_wrapper(block, swap_inputs=swaps_inputs) for block in self.blocks.values()}
        replace(TREE, self.model, wrapped)
        try:
            yield list(wrapped.values())
        finally:
            unwrap(self.model, wrapped)

    def _find_reached(self, wrappers: Iterable[nn.Module] = ()) -> None:
        """Run a step that tells which outputs of blocks backward comes to.

        A branch may be detached, or not lead to the loss.
        """
        reached = _Reached()
        handles = [block.register_forward_hook(reached.watch) for block in wrappers or self.blocks.values()]
        try:
            self.step()
        finally:
            for handle in (*handles, *reached.handles):
                handle.remove()
        self._reached = reached.outputs

    def _timed(self, wrappers: Iterable[nn.Module] = ()) -> dict[str, float]:
        clock = Clock(self.device)
        self._marked(clock, wrappers)
        return clock.spans()

    def _measured(self, wrappers: Iterable[nn.Module] = ()) -> list[MeasuredSpan]:
        self._empty_cache()
        meter = memory_meter(self.device)
        with meter.running():
            self._marked(meter, wrappers)
        return meter.spans()

    def _empty_cache(self) -> None:
        """Empty the allocator's cache before memory is measured.

        A block that other steps left there may be up to 1 MiB too large for what uses it, and would be counted as it
        is.
        """
        if self.device.type != "cpu":
            getattr(torch, self.device.type).empty_cache()

    def _measured_again(self, regions: list[Any], decision: list[Any]) -> tuple[list[MeasuredSpan], float]:
        """Measure a step in which every block is run again.

        Its memory is measured, and on an accelerator its time, when regions know their ops.
        """
        with self._again(regions, decision, by_framework=False, is_unwatched=False) as wrappers:
            self.step()
            spans = self._measured(wrappers)
            return spans, 0.0 if self.device.type == "cpu" else self.step_ms()

    def _step_ms_again(self, regions: list[Any], decision: list[Any], **ways: Any) -> float:
        """Measure the time of a step in which every block is run again in this way."""
        with self._again(regions, decision, **ways):
            self.step()  # what has not been seen yet is watched
            self.step()
            return self.step_ms()

    @contextlib.contextmanager
    def _again(self, regions: list[Any], decision: list[Any], **ways: Any) -> Iterator[list[nn.Module]]:
        applied = Applied(self.model, regions, decision, "recompute", **ways)
        try:
            with self.preserved() as block, block:
                yield applied.wrappers
        finally:
            applied.remove()

    def _host_cost(
        self, regions: list[Any], decision: list[Any], step_ms: float, again_ms: float
    ) -> tuple[list[Any], HostCost]:
        """Measure what regions cost beside the ops that they run again, where an accelerator waits for the host.

        The regions come back with what their ops take then. The framework's own checkpoint waits, too, where ops are
        small or need an answer from the device: that is what running them again costs.
        """
        computed_ms = sum(map(recompute_ms, regions, decision))
        noise_ms = _NOISE_SHARE * step_ms
        waits = again_ms - step_ms - computed_ms > noise_ms
        if not any(self._of_all(waits)):  # what follows are steps, which ranks take together
            return regions, HostCost(0.0)
        whole_ms = self._step_ms_again(regions, decision, by_framework=True, is_unwatched=False)
        unwatched_ms = self._step_ms_again(regions, decision, by_framework=False, is_unwatched=True)
        if whole_ms - step_ms - computed_ms > noise_ms and computed_ms > 0:
            regions = _with_slower_ops(regions, (whole_ms - step_ms) / computed_ms)
        least_ms = max(whole_ms, step_ms + computed_ms)
        region_ms, without_copies_ms = (
            ms / len(regions) if ms > noise_ms else 0.0 for ms in (again_ms - least_ms, unwatched_ms - least_ms)
        )
        return regions, HostCost(region_ms, without_copies_ms)

    def _marked(self, meter: object, wrappers: Iterable[nn.Module] = ()) -> None:
        """Run one step with marks where blocks, or the wrappers around them, begin and end."""
        marks = _Marks(meter, self._reached)
        # Not on a block inside a wrapper: a module with hooks gets all of its values when it runs again.
        handles = [handle for block in wrappers or self.blocks.values() for handle in marks.watch(block)]
        try:
            self.step(meter)
        finally:
            for handle in handles:
                handle.remove()
            for handle in marks.handles:
                handle.remove()

    def _held_storages(self) -> set[int]:
        """List the storages that are there before the step and after it, whatever blocks are given of them."""
        held = (*self.model.parameters(), *self.model.buffers(), *tensors_of(self.batch))
        return {local_tensor(tensor).untyped_storage()._cdata for tensor in held}

    def _check_calls(self, calls: list[RecordedCall], times: dict[str, float]) -> None:
        marked = sum(name.startswith("forward ") for name in times)
        check_ran(self.model, self.blocks, num_seen=len(calls), num_ran=marked)
        if marked != len(calls):
            raise ArgumentError(
                "The model does not run the same blocks in each step.",
                expected=f"{marked} calls of blocks, as in the step before",
                got=str(len(calls)),
                do="Switch off what skips blocks at random (layer drop), "
                "or runs them again in backward (torch.utils.checkpoint).",
            )


class _Reached:
    """Hooks that note for each call of a block the first of its outputs that a gradient comes to.

    None: backward does not come to this call.
    """

    def __init__(self) -> None:
        self.outputs: list[int | None] = []
        self.handles: list[Any] = []

    def watch(self, block: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled() or is_replaying():
            return
        number = len(self.outputs)
        self.outputs.append(None)
        for place, tensor in enumerate(tensors_of(output)):
            if tensor.requires_grad:
                self.handles.append(tensor.register_hook(functools.partial(self._note, number, place)))

    def _note(self, number: int, place: int, gradient: object) -> None:
        known = self.outputs[number]
        self.outputs[number] = place if known is None else min(known, place)


class _Marks:
    """Hooks that tell a meter where calls of blocks begin and end.

    In backward a block begins where its output's gradient is known. `reached`: see `_Reached`.
    """

    def __init__(self, meter: Any, reached: Sequence[int | None]) -> None:
        self.handles: list[Any] = []
        self._meter = meter
        self._reached = reached
        self._num_calls = 0

    def watch(self, block: nn.Module) -> list[Any]:
        return [block.register_forward_pre_hook(self._begin), block.register_forward_hook(self._end)]

    def _begin(self, block: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not is_replaying():
            self._meter.mark(f"forward {self._num_calls}")

    def _end(self, block: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or is_replaying():
            return
        number = self._num_calls
        self._num_calls += 1
        self._meter.mark(f"after {number}")
        place = self._reached[number] if number < len(self._reached) else None
        tensors = tensors_of(output)
        if place is not None and place < len(tensors) and tensors[place].requires_grad:
            mark = functools.partial(self._mark_backward, number)
            self.handles.append(tensors[place].register_hook(mark))

    def _mark_backward(self, number: int, gradient: Any) -> None:
        self._meter.mark(f"backward {number}")


def _min_bytes(device: torch.device) -> int:
    configured = current_config().min_bytes
    return default_min_bytes("disk" if device.type == "cpu" else "host") if configured is None else configured


def _region(
    noted: RecordedCall, index: int, times: dict[str, float], device: torch.device, has_link: bool, min_bytes: int
) -> Any:
    """Turn one call of a block into a region; its peaks come later."""
    record = noted.record
    if record is None or noted.times is None:
        raise ArgumentError("A block was not recorded.", where=noted.path)
    forward_ms = times.get(f"forward {index}", 0.0)
    op_ms = op_times(noted)
    scale = min(1.0, forward_ms / total) if (total := sum(op_ms)) > 0 else 1.0
    may_swap = has_link
    ops = planned_ops(noted, [ms * scale for ms in op_ms], device, min_bytes if may_swap else None)
    own = [value for value in noted.inputs if _is_activation(value, noted, device)]
    num_bytes = sum(value.num_bytes for value in own)
    merged = StorageFacts(num_bytes, is_residual=any(value in noted.needed_inputs for value in own))
    return Region(
        path=noted.path,
        call=noted.call,
        ops=tuple(ops),
        inputs=(Input(merged, may_swap=may_swap and num_bytes >= min_bytes),),
        forward_ms=forward_ms,
        backward_ms=times.get(f"backward {index}", 0.0),
        forward_peak_bytes=0,
        backward_peak_bytes=0,
        before_ms=times.get("start", 0.0) if index == 0 else times.get(f"after {index - 1}", 0.0),
        note_bytes=_note_bytes(record, device),
        is_dynamic=noted.is_dynamic,
    )


def _with_slower_ops(regions: list[Any], times: float) -> list[Any]:
    """Multiply what running an op again takes."""
    return [
        dataclasses.replace(
            region, ops=tuple(dataclasses.replace(op, forward_ms=op.forward_ms * times) for op in region.ops)
        )
        for region in regions
    ]


def _shared_input_bytes(calls: list[RecordedCall]) -> tuple[int, ...]:
    """Count the bytes of each storage that several calls are given."""
    shared = {value.ref.cdata: value.num_bytes for call in calls for value in call.shared}
    return tuple(shared.values())


def _note_bytes(record: Any, device: torch.device) -> int:
    """Count the states of generators that a region notes: at its begin, and before each random op."""
    if device.type != "cpu":
        return 0  # they are kept on the host
    num_states = 1 + sum(op.state is not None for op in record.ops)
    return num_states * _num_bytes(torch.get_rng_state())


def _is_activation(value: Any, noted: RecordedCall, device: torch.device) -> bool:
    return bool(value.device == device and value.num_bytes > 0 and value not in noted.shared)


def _run_again(region: Any, *, swaps_inputs: bool) -> Any:
    """Decide to keep inputs only, or not even these."""
    decision = recompute_all(region)
    if not swaps_inputs:
        return decision
    inputs = zip(region.inputs, decision.inputs, strict=True)
    return dataclasses.replace(
        decision, inputs=tuple(SWAP if choice == SAVE and given.may_swap else choice for given, choice in inputs)
    )


def _without_replay(regions: list[Any], decision: list[Any]) -> list[Any]:
    """Take the time of running again out of the backward of regions that were measured with it."""
    return [
        dataclasses.replace(region, backward_ms=max(region.backward_ms - recompute_ms(region, chosen), 0.0))
        for region, chosen in zip(regions, decision, strict=True)
    ]


def _with_computed_peak(profile: Any) -> Any:
    """Compute the peak of the plain step, which nobody has seen, by the rules that every plan is judged by."""
    decision = tuple(plain(region) for region in profile.regions)
    return dataclasses.replace(profile, peak_bytes=evaluate(Problem(profile, 0, 0, 0), decision).peak_bytes)


def _num_bytes(tensor: torch.Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()
