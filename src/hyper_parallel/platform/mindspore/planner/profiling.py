"""Profiling one step of a model: a few real steps, each for one kind of number, and what they say together.

1. a plain step, to warm up (kernels are chosen, buffers made);
2. plain steps by the clock: how long each block takes, forward and backward;
3. a plain step by the meter: how high memory rises, block by block, and what each block is given;
4. steps in which every block is run again, by the clock and by the meter;
5. where something can be swapped, a step that tells which storages of a block are large enough for it.

A block is one thing here: what it keeps is the difference between 3 and 4, and what running it again takes that between
2 and 4.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, nn, saved_tensors_hooks
from mindspore.communication import GlobalComm, get_group_size
from mindspore.graph.api import _pynative_executor

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.core.activation_checkpoint.replacement import replace
from hyper_parallel.core.planner.model.choices import RECOMPUTE, SWAP, recompute_all
from hyper_parallel.core.planner.model.measured_span import MeasuredSpan
from hyper_parallel.core.planner.model.profile import Input, ProfiledOp, Region, StepProfile, StorageFacts, Turn
from hyper_parallel.core.planner.model.spans import with_common_times, with_peaks
from hyper_parallel.core.swap.config import current_config, default_min_bytes
from hyper_parallel.platform.mindspore.planner import signature
from hyper_parallel.platform.mindspore.planner.applying import metas_of
from hyper_parallel.platform.mindspore.planner.blocks import check_ran, find_blocks, suggested
from hyper_parallel.platform.mindspore.planner.link import measure_link
from hyper_parallel.platform.mindspore.planner.memory import free_bytes
from hyper_parallel.platform.mindspore.planner.meters import Clock, is_cpu, memory_meter
from hyper_parallel.platform.mindspore.planner.model_state import ModelState
from hyper_parallel.platform.mindspore.planner.steps import LossFn, device_of, preserved, run_step, tensors_of
from hyper_parallel.platform.mindspore.regions.cell_paths import CellPaths
from hyper_parallel.platform.mindspore.regions.checkpoint import checkpoint
from hyper_parallel.platform.mindspore.regions.graph_mode import refuse_graph_mode
from hyper_parallel.platform.mindspore.regions.recording import Record, RegionMode
from hyper_parallel.platform.mindspore.regions.replays import is_replaying
from hyper_parallel.platform.mindspore.regions.saved_tensors import Kept, base_check_fn
from hyper_parallel.platform.mindspore.swap.storages import storage_address, storage_bytes, unseen
from hyper_parallel.platform.mindspore.wrappers.checkpoint_wrapper import CheckpointWrapper
from hyper_parallel.platform.mindspore.wrappers.replacement import TREE

NUM_TIMED = 3
_ALL = 0.9  # so much of what a block keeps must be large enough to be swapped; the rest stays, and the proof counts it
Progress = Callable[[str], None]
Times = dict[str, float]


class BlockCall:
    """What was seen of one call of a block.

    Attributes:
        given: address of each storage it was given -> bytes; each is alive when the next call begins, or was of no use
            to anybody
        given_bytes: of those that no other call was given
        result_metas: dtype and shape of its results
        swappable: sizes of the storages that autograd saved in it and that are large enough
    """

    def __init__(self, path: str, call: int) -> None:
        self.path = path
        self.call = call
        self.given: dict[int, int] = {}
        self.given_bytes = 0
        self.result_metas: tuple[str, ...] = ()
        self.swappable: list[int] = []


class ProfiledModel:
    """One model, batch and loss, with which the planner runs real steps.

    It lives for one call of the planner.
    """

    def __init__(
        self,
        model: nn.Cell,
        batch: Any,
        loss_fn: LossFn | None = None,
        *,
        regions: Sequence[Any] | None = None,
        optimizer: Any = None,
        reserve_bytes: int = 0,
        keeps_output: bool = True,  # of `value_and_grad` only the loss is left
    ) -> None:
        refuse_graph_mode("A planned step")
        self.model = model
        self.batch = batch
        self.loss_fn = loss_fn
        self.device = device_of(model)
        self.blocks = find_blocks(model, regions)
        self.extra_bytes = reserve_bytes + _optimizer_bytes(model, optimizer, self.device)

    def base_bytes(self) -> int:
        """Count parameters, buffers, the batch, optimizer state, and the gradients that a step makes.

        On an accelerator these count as they come.
        """
        if not is_cpu(self.device):
            return int(mindspore.runtime.memory_allocated()) + self.extra_bytes
        alive = {storage_address(tensor): storage_bytes(tensor) for tensor in self._outside()}
        gradients = sum(int(parameter.nbytes) for parameter in self.model.trainable_params())
        return sum(alive.values()) + gradients + self.extra_bytes

    def _outside(self) -> list[Tensor]:
        """List what is alive before and after a step."""
        return [*self.model.get_parameters(), *self.model.buffers(), *tensors_of(self.batch)]

    def suggested_blocks(self, inside: str | None = None) -> list[str]:
        """List what could be planned instead of a block, or beside all of them: patterns for `regions=`."""
        return suggested(self.model, self.blocks, inside)

    # -- measuring -----------------------------------------------------------------------------------------------------

    def step(self, meter: Any = None) -> float:
        """Run one step that begins like every other.

        "start", "turn" and "end" are marked where a meter is given.
        """
        with self.preserved() as block, block as state, state.next_step():
            if meter is None:
                return run_step(self.model, self.batch, self.loss_fn)
            meter.mark("start")
            loss = run_step(self.model, self.batch, self.loss_fn, lambda: meter.mark("turn"))
            meter.mark("end")
            return loss

    def preserved(self) -> contextlib.AbstractContextManager[contextlib.AbstractContextManager[ModelState]]:
        """Open a block for several steps in a row, and leave everything as `preserved` says."""
        return contextlib.nullcontext(preserved(self.model, self.batch, self.loss_fn))

    def agreed(self, profile: object) -> Any:
        """Give the profile back: each rank plans by its own."""
        return profile

    def free_bytes(self) -> int:
        return free_bytes(self.device)

    def look_for_writes(self) -> None:
        """Do nothing: `preserved` has copies of what steps may write."""

    def peaks_within(self, num_steps: int, *, num_before: int) -> int:
        """Measure the highest point of some steps after others, as the model is now, above where they began."""
        return max([self.peak_bytes() for _ in range(num_before + num_steps)][num_before:])

    def peak_bytes(self) -> int:
        """Measure the highest point of one step above where it began.

        The model is taken as it is now, and nothing is changed by it.
        """
        with self.preserved() as block, block:
            meter = memory_meter(self.device, self._outside())
            with meter.running():
                self.step(meter)
            return max(span.peak_bytes for span in meter.spans())

    tells_time = False  # on a CPU the time of a few steps is noise, and nothing was tried on others

    @property
    def is_alone(self) -> bool:
        return not GlobalComm.INITED or get_group_size() == 1

    def step_ms_within(self) -> float | None:
        return self.step_ms()

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
        base_bytes = self.base_bytes()
        with self.preserved() as block, block:
            report_progress("warming up")
            self.step()
            report_progress("measuring times")
            times = self._timed(self.blocks)
            report_progress("measuring memory")
            calls, spans = self._measured(self.blocks)
            self._check_calls(calls, times)
            report_progress("measuring the link")
            link = measure_link(self.device)
            min_bytes = _min_bytes(self.device)
            if link is not None:
                self._note_swappable(calls, min_bytes)
            report_progress("measuring recomputation")
            with self._wrapped(checkpoint) as wrappers:
                self.step()
                times_again = self._timed(wrappers)
                num_seen = _num_forwards(times_again)
                check_ran(self.model, self.blocks, num_seen=num_seen, num_ran=len(calls))
                _, again = self._measured(wrappers)
        shared = _note_given(calls)
        kept = _differences(spans, again)
        regions = [
            _region(call, index, times, times_again, kept[index], None if link is None else min_bytes)
            for index, call in enumerate(calls)
        ]
        decision = [recompute_all(region) for region in regions]
        regions, turn_bytes = with_peaks(with_common_times(regions), spans, again, decision)
        turn_ms = times.get(f"after {len(calls) - 1}", 0.0) + times.get("turn", 0.0)
        return StepProfile(
            regions=tuple(regions),
            base_bytes=base_bytes,
            peak_bytes=base_bytes + max(span.peak_bytes for span in spans),
            # By the same numbers that a plan is predicted with: no plan shall look faster than the plain step for the
            # noise in them.
            step_ms=turn_ms + sum(region.before_ms + region.forward_ms + region.backward_ms for region in regions),
            turn=Turn(turn_ms, turn_bytes),
            link=link,
            identity=signature.identity(self.model, self.batch, self.blocks),
            min_swap_bytes=min_bytes,
            shared_input_bytes=tuple(shared),
        )

    def _timed(self, blocks: dict[str, nn.Cell]) -> Times:
        timed = []
        for _ in range(NUM_TIMED):
            clock = Clock(self.device)
            self._marked(clock, _Marks(clock), blocks)
            timed.append(clock.spans())
        return {name: statistics.median(step_times[name] for step_times in timed) for name in timed[0]}

    def _measured(self, blocks: dict[str, nn.Cell]) -> tuple[list[BlockCall], list[MeasuredSpan]]:
        meter = memory_meter(self.device, self._outside())
        marks = _Marks(meter)
        with meter.running():
            self._marked(meter, marks, blocks)
        return marks.calls, meter.spans()

    def _marked(self, meter: Any, marks: _Marks, blocks: dict[str, nn.Cell]) -> None:
        """Run one step with marks where blocks, or the wrappers around them, begin and end."""
        handles = [handle for path, block in blocks.items() for handle in marks.watch(path, block)]
        try:
            self.step(meter)
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def _wrapped(self, function: Callable[..., Any]) -> Iterator[dict[str, nn.Cell]]:
        """Run every block by `function(block, *args, **kwargs)` while this is open.

        It gives the wrappers that do it, by path.
        """
        wrappers = {path: CheckpointWrapper(block, checkpoint_fn=function) for path, block in self.blocks.items()}
        replace(TREE, self.model, {self.blocks[path]: wrapper for path, wrapper in wrappers.items()})
        try:
            yield wrappers
        finally:
            replace(TREE, self.model, {wrapper: self.blocks[path] for path, wrapper in wrappers.items()})

    def kept_by_op(self) -> list[tuple[str, str, str, int]]:
        """List what autograd keeps of each block.

        With the block's path come the cell in it and the op that made a storage, and the bytes of that. It takes one
        step.
        """
        found: list[tuple[str, str, str, int]] = []
        paths = {id(block): path for path, block in self.blocks.items()}

        def run(block: nn.Cell, *args: Any, **kwargs: Any) -> Any:
            if not _pynative_executor.requires_grad():
                return block(*args, **kwargs)
            record = Record(None, CellPaths(block), keeps_random_state=False)
            storages: dict[int, tuple[str, str, str, int]] = {}
            given = tensors_of((args, kwargs))
            for tensor in given:
                record.add_input(tensor)
            addresses = set(map(storage_address, given))

            def pack(tensor: Tensor) -> Kept:
                with unseen():
                    node = record.node_of(tensor)
                    is_given = tensor.param_info is not None or (node is not None and node.base.op < 0)
                    is_given |= storage_address(tensor) in addresses
                    if not is_given and record.ops and storage_bytes(tensor):
                        op = record.ops[-1 if node is None else node.base.op]
                        storages[storage_address(tensor)] = (
                            paths[id(block)],
                            op.where.module,
                            op.name,
                            storage_bytes(tensor),
                        )
                    return Kept(tensor)

            with saved_tensors_hooks(pack, Kept.tensor), RegionMode(record) as mode:
                result = block(*args, **kwargs)
                mode.check()
            found.extend(storages.values())
            return result

        with self._wrapped(run):
            self.step()
        return found

    def _note_swappable(self, calls: list[BlockCall], min_bytes: int) -> None:
        """Run a step that notes which storages of what autograd saves in a block are large enough to be swapped."""
        left = iter(calls)

        def run(block: nn.Cell, *args: Any, **kwargs: Any) -> Any:
            if not _pynative_executor.requires_grad():
                return block(*args, **kwargs)
            found: dict[int, int] = {}
            given = {storage_address(tensor) for tensor in tensors_of((args, kwargs))}

            def pack(tensor: Tensor) -> Kept:
                address, num_bytes = storage_address(tensor), storage_bytes(tensor)
                if base_check_fn(tensor) and num_bytes >= min_bytes and address not in given:
                    found[address] = num_bytes
                return Kept(tensor)

            with saved_tensors_hooks(pack, Kept.tensor):
                result = block(*args, **kwargs)
            call = next(left, None)
            if call is not None:
                call.swappable = sorted(found.values(), reverse=True)
            return result

        with self._wrapped(run):
            self.step()

    def _check_calls(self, calls: list[BlockCall], times: Times) -> None:
        marked = _num_forwards(times)
        check_ran(self.model, self.blocks, num_seen=len(calls), num_ran=marked)
        for index, call in enumerate(calls):
            if f"backward {index}" not in times:
                raise ArgumentError(
                    "Backward does not reach a block: what it gives leads to no loss.",
                    where=call.path,
                    do="Name the blocks that are trained: regions=[...].",
                )
        if marked != len(calls):
            raise ArgumentError(
                "The model does not run the same blocks in each step.",
                expected=f"{marked} calls of blocks, as in the step before",
                got=str(len(calls)),
                do="Switch off what skips blocks at random (layer drop) while planning.",
            )


class _Marks:
    """Hooks that tell a meter where calls of blocks begin and end.

    In backward a block begins where its output's gradient is known.
    """

    def __init__(self, meter: Any) -> None:
        self.calls: list[BlockCall] = []
        self._meter = meter
        self._counts: Counter[str] = Counter()

    def watch(self, path: str, block: nn.Cell) -> list[Any]:
        def begin(cell: nn.Cell, args: object, kwargs: object) -> None:
            if _pynative_executor.requires_grad() and not is_replaying():
                self._begin(path, (args, kwargs))

        def end(cell: nn.Cell, args: object, output: object) -> None:
            if _pynative_executor.requires_grad() and not is_replaying():
                self._end(output)

        return [block.register_forward_pre_hook(begin, with_kwargs=True), block.register_forward_hook(end)]

    def _begin(self, path: str, arguments: Any) -> None:
        call = BlockCall(path, self._counts[path])
        self._counts[path] += 1
        call.given = {
            storage_address(tensor): storage_bytes(tensor)
            for tensor in tensors_of(arguments)
            if tensor.param_info is None and storage_bytes(tensor)
        }
        self._meter.mark(f"forward {len(self.calls)}")
        self.calls.append(call)

    def _end(self, output: Any) -> None:
        number = len(self.calls) - 1
        self.calls[number].result_metas = metas_of(output)
        self._meter.mark(f"after {number}")
        for tensor in tensors_of(output):
            if tensor._requires_grad:
                tensor.register_hook(lambda gradient: self._meter.mark(f"backward {number}"))
                return


def _num_forwards(times: Times) -> int:
    return sum(name.startswith("forward ") for name in times)


def _note_given(calls: Iterable[BlockCall]) -> list[int]:
    """Note what each call was given and no other one.

    It gives the sizes of what several are given, and somebody holds anyway.
    """
    calls = list(calls)
    counts = Counter(key for call in calls for key in call.given)
    shared = {}
    for call in calls:
        for key, num_bytes in call.given.items():
            if counts[key] > 1:
                shared[key] = num_bytes
            else:
                call.given_bytes += num_bytes
    return list(shared.values())


def _differences(spans: list[MeasuredSpan], again: list[MeasuredSpan]) -> list[int]:
    """Count how many bytes less each block has kept in the second of two steps."""
    levels = [{span.name: span.level_bytes for span in step} for step in (spans, again)]
    found: list[int] = []
    while f"after {len(found)}" in levels[0]:
        index = len(found)
        plain, managed = (level[f"after {index}"] - level[f"forward {index}"] for level in levels)
        found.append(max(plain - managed, 0))
    return found


def _region(
    call: BlockCall, index: int, times: Times, times_again: Times, kept_bytes: int, min_bytes: int | None
) -> Any:
    """Turn one call of a block into a region, with one op for all of it; its peaks come later.

    `min_bytes`: the smallest storage that is swapped; None where nothing is.
    """
    forward_ms, backward_ms = (times[f"{which} {index}"] for which in ("forward", "backward"))
    again_ms = sum(times_again[f"{which} {index}"] for which in ("forward", "backward"))
    choices = [RECOMPUTE]
    rest = kept_bytes - sum(call.swappable)
    made = [kept_bytes]
    if min_bytes is not None and call.swappable and 0 <= rest <= (1 - _ALL) * kept_bytes:
        choices.insert(0, SWAP)
        made = [*call.swappable, rest]
    op = ProfiledOp(
        module="",
        name=_NAME,
        call=0,
        occurrence=0,
        # At least its forward: two measured steps may differ by more than that on a busy machine.
        forward_ms=max(again_ms - forward_ms - backward_ms, forward_ms),
        makes=tuple(StorageFacts(num_bytes, is_residual=True) for num_bytes in made if num_bytes or kept_bytes == 0),
        reads_inputs=(0,),
        choices=tuple(choices),
        result_metas=call.result_metas,
    )
    may_swap = min_bytes is not None and call.given_bytes >= min_bytes
    return Region(
        path=call.path,
        call=call.call,
        ops=(op,),
        inputs=(Input(StorageFacts(call.given_bytes, is_residual=True), may_swap=may_swap),),
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        forward_peak_bytes=0,
        backward_peak_bytes=0,
        before_ms=times.get("start", 0.0) if index == 0 else times.get(f"after {index - 1}", 0.0),
    )


_NAME = "block"  # the one op of a region: all that it does


def _min_bytes(device: str) -> int:
    configured = current_config().min_bytes
    return default_min_bytes("disk" if is_cpu(device) else "host") if configured is None else configured


def _optimizer_bytes(model: nn.Cell, optimizer: object, device: str) -> int:
    """Count what an optimizer holds beside the parameters of the model.

    MindSpore's make their state when they are made.
    """
    if optimizer is None:
        return 0
    if not isinstance(optimizer, nn.Cell):
        raise ArgumentTypeError(
            "`optimizer` is the one that trains the model.",
            expected="an optimizer of mindspore.nn, or None",
            got=describe(optimizer),
        )
    if not is_cpu(device):
        return 0  # the allocator has counted it
    own = {id(parameter) for parameter in model.get_parameters()}
    return sum(int(parameter.nbytes) for parameter in optimizer.get_parameters() if id(parameter) not in own)
