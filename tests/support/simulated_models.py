"""Random models, trained on the simulated device by a tiny framework: what `core/planner/model/timeline.py` predicts is compared with it.

The framework really runs: ops are kernels on buffers of the byte-exact allocator, autograd and the regions hold buffers by reference and drop
them, the real engine swaps, the race check looks at every access, and each residual that backward gets is compared with what
forward made. It shares no code with the timeline.

For bytes to be equal the two must agree on when a copy is done, so both follow one clock, which is written down as C1 to C5 in
`virtual_device.py`. On this device (`TimedDevice`): streams run all they are given at once, and each entry has the virtual time at which a real
stream would be done with it; the host sees an event done when its time is not later than the compute stream's, less the host's lead, or
than the last time the host waited for compute. All times and speeds here are sums of powers of two: no rounding, so times are equal, too.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.planner.model import choices
from hyper_parallel.core.planner.model.profile import Input, Link, ProfiledOp, Region, StepProfile, StorageFacts, Turn
from hyper_parallel.core.swap.engine import Limits, SwapEngine
from hyper_parallel.core.swap.slot import Handle
from support.simulated_device import SimulatedBuffer, SimulatedDevice
from support.simulated_stream import PROMPT, Lane, SimulatedEvent, SimulatedMoment, SimulatedStream
from support.simulated_tier import SimulatedBlock, SimulatedTier

SIZES = (0, 1, 3, 8, 8, 16, 16, 24, 50, 64)


class MismatchError(AssertionError):
    """The timeline says something else than what happened."""


@dataclass(frozen=True)
class Case:
    """A model, a decision, and what the engine may do."""

    profile: StepProfile
    decision: choices.Decision
    window_bytes: int
    prefetch_bytes: int
    on_full: str = "wait"
    first_window_bytes: int | None = None
    min_bytes: int = 0
    host_bytes: int | None = None
    host_lead_ms: float = 0.0
    num_steps: int = 3

    def limits(self) -> Limits:
        first = self.first_window_bytes
        return Limits(self.window_bytes, self.prefetch_bytes, self.on_full, first_window_bytes=first)

    def __str__(self) -> str:
        lines = []
        for region, chosen in zip(self.profile.regions, self.decision, strict=True):
            lines.append(f"  plain={chosen.is_plain} {dataclasses.replace(region, ops=(), inputs=())}")
            lines += [f"    {choice}: {each}" for each, choice in zip(region.inputs, chosen.inputs, strict=True)]
            lines += [f"    {choice}: {op}" for op, choice in zip(region.ops, chosen.ops, strict=True)]
        rest = dataclasses.replace(self, profile=dataclasses.replace(self.profile, regions=()), decision=())
        return "\n".join([repr(rest), *lines])


# -- the device -----------------------------------------------------------------------------------------------------------


class TimedDevice(SimulatedDevice):
    """A simulated device whose events are done by virtual time."""

    def __init__(self, link: Link | None, host_lead_ms: float) -> None:
        super().__init__(num_compute_streams=1, profile=PROMPT)
        self.link = link
        self.host_lead_ms = host_lead_ms
        self.synced_ms = 0.0
        self.hidden_bytes = 0  # of what is allocated, what kernels need only while they run
        self.copies: list[tuple[str, float, float, int]] = []  # direction, start, end, bytes
        self.stalls: list[tuple[str, float, float]] = []  # direction, start, how long
        self._copy_ms = 0.0

    @property
    def compute_lane(self) -> Lane:
        return self.compute_streams[0].lane

    def done_ms(self, lane: Lane) -> float:
        """When a stream is done with all it has been given."""
        self.run_all()
        return lane.times_ms[-1]

    def host_ms(self) -> float:
        return max(self.done_ms(self.compute_lane) - self.host_lead_ms, self.synced_ms)

    def is_past(self, marked: SimulatedEvent | SimulatedMoment) -> bool:
        return self.event_ms(marked) <= self.host_ms()

    def event_ms(self, marked: SimulatedEvent | SimulatedMoment) -> float:
        self.run_all()
        return marked.lane.times_ms[marked.position]

    def sync(self) -> None:
        self.synced_ms = self.done_ms(self.compute_lane)

    def run_all(self) -> None:
        lanes = self._scheduler.lanes
        while any(lane.queue for lane in lanes):
            for lane in lanes:
                lane.step()

    def current_stream(self) -> TimedStream:
        return TimedStream(super().current_stream().lane, self)

    def offload_stream(self) -> TimedStream:
        return TimedStream(self._offload_lane, self)

    def load_stream(self) -> TimedStream:
        return TimedStream(self._load_lane, self)

    def bytes_in_use(self) -> int:
        return self.allocated_bytes - self.hidden_bytes

    def launch_offload(self, block: Any, source: Any, stream: Any) -> None:
        self._time_copy("offload", source.num_bytes, stream.lane, self._load_lane)
        super().launch_offload(block, source, stream)

    def launch_load(self, buffer: Any, block: Any, stream: Any) -> None:
        self._time_copy("load", buffer.num_bytes, stream.lane, self._offload_lane)
        super().launch_load(buffer, block, stream)

    def _time_copy(self, direction: str, num_bytes: int, lane: Lane, other: Lane) -> None:
        assert self.link is not None
        speed = self.link.out_bytes_per_ms if direction == "offload" else self.link.in_bytes_per_ms
        start, left, self._copy_ms = self.done_ms(lane), float(num_bytes), 0.0
        both = self.link.both_bytes_per_ms
        if both is not None and both < speed and self.done_ms(other) > start:
            # As long as the other direction is busy with what it has, this one is slower; the other stays as it is.
            self._copy_ms = min(self.done_ms(other) - start, left / both)
            left -= self._copy_ms * both
        self._copy_ms += left / speed
        self.copies.append((direction, start, start + self._copy_ms, num_bytes))

    def _duration_ms(self, fn: Any) -> float:
        is_copy = type(fn).__name__ == "_Copy"
        return self._copy_ms if is_copy else super()._duration_ms(fn)


class TimedStream(SimulatedStream):
    __slots__ = ("device",)

    def __init__(self, lane: Lane, device: TimedDevice) -> None:
        super().__init__(lane)
        self.device = device

    def record_event(self) -> TimedEvent:
        return TimedEvent(super().record_event(), self.device)

    def record_time(self) -> TimedMoment:
        return TimedMoment(super().record_time(), self.device)

    def wait_event(self, event: Any) -> None:
        start = self.device.done_ms(self.lane)
        super().wait_event(event.marked)
        stalled = self.device.done_ms(self.lane) - start
        if stalled and self.lane is self.device.compute_lane:
            self.device.stalls.append((event.marked.lane.name, start, stalled))


class TimedEvent:
    """An event that the host sees done when its time has come."""

    def __init__(self, marked: SimulatedEvent, device: TimedDevice) -> None:
        self.marked = marked
        self.device = device

    @property
    def error(self) -> BaseException | None:
        return self.marked.error

    def query(self) -> bool:
        is_done = self.device.is_past(self.marked)
        return is_done and self.marked.query()  # which tells the race check that the host knows

    def join(self) -> None:
        self.marked.join()
        device, marked = self.device, self.marked
        device.synced_ms = max(device.synced_ms, device.event_ms(marked))


class TimedMoment:
    def __init__(self, marked: SimulatedMoment, device: TimedDevice) -> None:
        self.marked = marked
        self.device = device

    def query(self) -> bool:
        return self.device.is_past(self.marked)

    def ms_since(self, earlier: Any) -> float:
        return self.marked.ms_since(earlier.marked)


class TimedTier(SimulatedTier):
    """Has room for so many bytes, however they are cut. Of free blocks it gives the one whose last copy is done first."""

    def __init__(self, device: TimedDevice, num_bytes: int | None) -> None:
        super().__init__(device)
        self.device = device
        self.num_bytes = num_bytes

    def take(self, num_bytes: int) -> SimulatedBlock | None:
        used_bytes = self.used_bytes  # which also takes back what was given
        if self.num_bytes is not None and used_bytes + num_bytes > self.num_bytes:
            return None
        self._free.get(num_bytes, []).sort(key=lambda free: -self.last_ms(free[1]))
        return super().take(num_bytes)

    def last_ms(self, last_uses: tuple[TimedEvent, ...]) -> float:
        return max((self.device.event_ms(event.marked) for event in last_uses), default=0.0)


# -- the framework ----------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What happened in a step; times from its start."""

    peak_bytes: int
    forward_ms: float
    turn_ms: float
    backward_ms: float
    copies: list[tuple[str, float, float, int]]
    stalls: list[tuple[str, float, float]]
    in_use: list[tuple[float, int]]  # when a kernel that takes time began, and the bytes allocated then


class Trainer:
    """Trains the model of a case. `step` runs one step; `finish` looks for wrong numbers, races and leaks."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.device = TimedDevice(case.profile.link, case.host_lead_ms)
        self.tier = TimedTier(self.device, case.host_bytes)
        self.engine = SwapEngine(self.device, [self.tier], case.limits())
        self.base = self.allocate(case.profile.base_bytes)
        self.outside: list[SimulatedBuffer] = []
        self.in_use: list[tuple[float, int]] = []
        self.made: dict[Any, Any] = {}  # key of a value -> what forward made
        self.read: list[tuple[Any, Any]] = []  # key of a value, what backward or replay read

    def step(self) -> Step:
        device, profile = self.device, self.case.profile
        device.sync()
        device.peak_bytes = device.allocated_bytes
        device.copies, device.stalls, self.in_use = [], [], []
        times = [self.now()]
        calls: list[RegionCall] = []
        result: list[SimulatedBuffer] = []  # what the last region gave, held by the loop over the regions
        for region, chosen in zip(profile.regions, self.case.decision, strict=True):
            self.outside.append(self.allocate(region.outside_bytes - self.outside_bytes()))
            self.run(f"before {region.path}", region.before_ms)
            result = []
            calls.append(RegionCall(self, region, chosen, len(calls)))
            result = calls[-1].forward()
        times.append(self.now())
        del result  # it is in the turn's own peak
        working = self.allocate(profile.turn.peak_bytes)
        self.run("turn", profile.turn.ms, writes=[working])
        del working
        times.append(self.now())
        while calls:
            call = calls.pop()
            call.backward()
            self.run(f"after {call.region.path}", call.region.after_ms)
            self.outside.pop()
        times.append(self.now())
        spans = [end - start for start, end in itertools.pairwise(times)]
        return Step(
            device.peak_bytes,
            *spans,
            [(name, start - times[0], end - times[0], size) for name, start, end, size in device.copies],
            [(name, start - times[0], ms) for name, start, ms in device.stalls],
            [(start - times[0], size) for start, size in self.in_use],
        )

    def finish(self) -> None:
        del self.base
        self.device.finish()
        self.engine.join()
        self.device.check_clean()
        wrong = [(key, self.made[key], got) for key, got in self.read if self.made[key] != got]
        assert not wrong, f"forward made and backward read something else: {wrong[0]}"
        assert self.tier.used_bytes == 0

    def now(self) -> float:
        return self.device.done_ms(self.device.compute_lane)

    def outside_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self.outside)

    def allocate(self, num_bytes: int) -> SimulatedBuffer:
        return self.device.allocate(num_bytes, self.device.current_stream())

    def run(
        self,
        name: str,
        ms: float,
        reads: list[SimulatedBuffer] | None = None,
        writes: list[SimulatedBuffer] | None = None,
    ) -> None:
        if ms:
            self.in_use.append((self.now(), self.device.allocated_bytes))
        self.device.kernel_ms = ms
        self.device.kernel(reads or [], writes or [], name=name)

    def look(self, buffer: SimulatedBuffer, seen: Callable[[Any], None]) -> None:
        self.device.kernel_ms = 0.0
        self.device.kernel([buffer], fn=seen, name="look")


class Residual:
    """What autograd keeps of a value: the buffer itself, a handle of the engine, or neither, until it was made again."""

    def __init__(self, buffer: SimulatedBuffer | None = None, handle: Handle | None = None) -> None:
        self.buffer = buffer
        self.handle = handle
        self.is_missing = buffer is None and handle is None
        self.is_saved = buffer is not None and buffer.num_bytes > 0


class RegionCall:
    """One call of a block: plain, or as `checkpoint` runs it. A value is (op, which of its results), an input (-1, which)."""

    def __init__(self, trainer: Trainer, region: Region, decision: choices.RegionDecision, index: int) -> None:
        self.trainer = trainer
        self.engine = trainer.engine
        self.region = region
        self.decision = decision
        self.index = index
        self.is_managed = not decision.is_plain
        self.group: Any = None
        self.tells = False  # the engine of residuals that are not swapped
        self.arguments: dict[int, SimulatedBuffer] = {}
        self.scope: dict[tuple[int, int], SimulatedBuffer] = {}  # the variables of the function
        self.kept: dict[tuple[int, int], SimulatedBuffer | Handle] = {}  # by the policy, in the record
        self.pending: dict[
            tuple[int, int], SimulatedBuffer
        ] = {}  # residuals that are to be recomputed, while forward runs
        self.graph: dict[tuple[int, int], Residual] = {}  # autograd's
        self.inputs: dict[int, Residual] = {}  # as the region packed them
        self.runs: set[int] = set()
        self.takes: set[int] = set()
        self.takes_inputs: set[int] = set()

    # Forward.

    def forward(self) -> list[SimulatedBuffer]:
        """The results that are alive when the function ends."""
        self.receive_inputs()
        for index, op in enumerate(self.region.ops):
            self.run_op(index, self.share(self.region.forward_ms, index))
            for number, value in enumerate(op.makes):
                self.trainer.look(self.scope[index, number], self.noting((index, number)))
                self.keep((index, number), value)
            self.drop_variables(index)
            if not self.is_managed:
                self.drop_arguments(index)
        if not self.region.ops:
            self.trainer.run("forward", self.region.forward_ms)
        if self.is_managed:
            self.end_forward()
        self.arguments.clear()
        results = list(self.scope.values())
        self.scope.clear()
        return results

    def receive_inputs(self) -> None:
        for number, each in enumerate(self.region.inputs):
            self.arguments[number] = self.trainer.allocate(each.value.num_bytes)
            self.trainer.run(f"input {self.index} {number}", 0.0, writes=[self.arguments[number]])
            self.trainer.look(self.arguments[number], self.noting((-1, number)))
            if each.value.is_residual and not self.is_managed:
                self.graph[-1, number] = Residual(self.arguments[number])

    def run_op(self, index: int, ms: float) -> None:
        op = self.region.ops[index]
        made = {}
        for other in [index, *self.region.parts().get(index, [])] if op.part is None else []:
            for number, value in enumerate(self.region.ops[other].makes):
                made[other, number] = self.trainer.allocate(value.num_bytes)
        temporary = self.trainer.allocate(op.temporary_bytes)
        self.trainer.run(f"op {self.index} {index}", ms, self.what_it_reads(index), [*made.values(), temporary])
        self.scope.update(made)

    def what_it_reads(self, index: int) -> list[SimulatedBuffer]:
        op = self.region.ops[index]
        buffers = [self.arguments[number] for number in op.reads_inputs]
        for read in op.reads:
            if self.region.ops[read].makes:
                buffers += [self.scope[read, number] for number in range(len(self.region.ops[read].makes))]
            else:
                buffers += self.what_it_reads(read)  # a view
        return buffers

    def keep(self, key: tuple[int, int], value: StorageFacts) -> None:
        """The policy is asked about a result; then autograd saves it, if it is a residual."""
        buffer = self.scope[key]
        if not self.is_managed:
            if value.is_residual:
                self.graph[key] = Residual(buffer)
            return
        if self.decision.ops[key[0]] in ("save", "swap"):
            self.kept[key] = buffer
        elif value.is_residual:
            self.graph[key] = Residual()
            self.pending[key] = buffer
        if key in self.kept and value.is_residual:
            self.swap_out(key)
        if value.is_residual and value.num_bytes:
            self.tell(value.num_bytes, is_swapped=isinstance(self.kept.get(key), Handle))
        if key in self.kept and value.is_residual:
            kept = self.kept[key]
            handle = Handle(kept.slot, self.group) if isinstance(kept, Handle) else None
            self.graph[key] = Residual(None if handle else buffer, handle)

    def tell(self, num_bytes: int, *, is_swapped: bool) -> None:
        """The engine hears of residuals that are not swapped, if it has heard of any group before."""
        if not self.tells:
            self.tells = self.engine.has_groups()
            if self.tells:
                self.open_group()
        if self.tells and not is_swapped:
            self.engine.keep(self.group, num_bytes)

    def swap_out(self, key: tuple[int, int]) -> None:
        buffer = self.kept[key]
        if self.decision.ops[key[0]] == "swap" and isinstance(buffer, SimulatedBuffer):
            self.kept[key] = self.swap(buffer) or buffer

    def swap(self, buffer: SimulatedBuffer) -> Handle | None:
        """None for what is too small."""
        if not buffer.num_bytes:
            return None
        group = self.open_group()
        if buffer.num_bytes < self.trainer.case.min_bytes:
            return None
        return Handle(self.engine.save(buffer, buffer.num_bytes, group, self.region.path, lambda: 0), group)

    def open_group(self) -> Any:
        if self.group is None:
            self.group = self.engine.new_group(self.region.path)
        return self.group

    def end_forward(self) -> None:
        """What nothing can ask for is dropped; what only the replay needs leaves now; the inputs are packed."""
        for index in {index for index, _ in self.pending}:
            self.need(index)
        for key in sorted(self.kept):
            if key[0] in self.takes:
                self.swap_out(key)
            else:
                del self.kept[key]
        for number, each in enumerate(self.region.inputs):
            if each.value.is_residual or self.pending:
                handle = self.swap(self.arguments[number]) if self.decision.inputs[number] == "swap" else None
                self.inputs[number] = Residual(None if handle else self.arguments[number], handle)
        if self.pending and self.group is not None:
            handles = [self.inputs[number].handle for number in sorted(self.takes_inputs)]
            handles += [kept if isinstance(kept, Handle) else None for _, kept in sorted(self.kept.items())]
            self.engine.expect(self.group, [handle.slot for handle in handles if handle is not None])
        self.pending.clear()
        if self.tells:
            self.engine.end_forward(self.group)

    def need(self, index: int) -> None:
        """Somebody reads the results of an op in the second run."""
        if self.decision.ops[index] in ("save", "swap"):
            self.takes.add(index)
        elif index not in self.runs:
            self.runs.add(index)
            self.takes_inputs.update(self.region.ops[index].reads_inputs)
            for read in self.region.ops[index].reads:
                self.need(read)

    def drop_variables(self, index: int) -> None:
        """The function is past an op: results go that it does not look at any more."""
        for op, number in list(self.scope):
            if self.region.ops[op].makes[number].freed_after == index:
                del self.scope[op, number]

    def drop_arguments(self, index: int) -> None:
        for number, each in enumerate(self.region.inputs):
            if each.value.freed_after == index:
                del self.arguments[number]

    # Backward.

    def backward(self) -> None:
        region, trainer = self.region, self.trainer
        asked_at = {key: self.asked_at(key) for key in self.graph}
        if self.runs:
            self.replay(asked_at)
        # Of inputs that residuals are, those that the replay has not brought back already.
        waiting = {n for n, each in enumerate(region.inputs) if each.value.is_residual and self.is_managed}
        waiting -= set(self.arguments)
        working = trainer.allocate(max(region.backward_peak_bytes - region.residual_bytes, 0))
        trainer.device.hidden_bytes += working.num_bytes
        self.ask_inputs(number for number in waiting if self.asked_at((-1, number)) is None)
        for index in reversed(range(len(region.ops))):
            asked = [key for key in sorted(self.graph, reverse=True) if key[0] >= 0 and asked_at[key] == index]
            if any(self.graph[key].is_saved for key in asked):
                self.arrive()
            self.ask_inputs(number for number in waiting if self.asked_at((-1, number)) == index)
            reads = [*self.arguments.values(), *(self.ask(key) for key in asked)]
            trainer.run(f"backward {self.index} {index}", self.share(region.backward_ms, index), reads, [working])
            del reads
            for key in [key for key in self.graph if key[0] >= 0 and region.made_with(key[0]) == index]:
                del self.graph[key]
        if not region.ops:
            trainer.run("backward", region.backward_ms, list(self.arguments.values()), [working])
        trainer.device.hidden_bytes -= working.num_bytes
        for held in (self.graph, self.kept, self.inputs, self.arguments):
            held.clear()
        self.group = None

    def ask(self, key: tuple[int, int]) -> SimulatedBuffer:
        """Autograd unpacks a residual."""
        residual = self.graph[key]
        if residual.handle is not None:
            residual.buffer = self.engine.acquire(residual.handle)
        assert residual.buffer is not None
        self.trainer.look(residual.buffer, self.comparing(key))
        return residual.buffer

    def ask_inputs(self, numbers: Iterable[int]) -> None:
        for number in sorted(numbers, reverse=True):
            self.arguments[number] = self.unpacked(number)

    def unpacked(self, number: int) -> SimulatedBuffer:
        packed = self.inputs[number]
        buffer = packed.buffer if packed.handle is None else self.engine.acquire(packed.handle)
        assert isinstance(buffer, SimulatedBuffer)
        self.trainer.look(buffer, self.comparing((-1, number)))
        return buffer

    def arrive(self) -> None:
        if self.tells and self.is_managed:
            self.engine.arrive(self.group)

    def replay(self, asked_at: dict[tuple[int, int], Any]) -> None:
        """The function again. It leaves the missing values in the graph, and inputs that backward asks for in `arguments`."""
        missing = {key for key, residual in self.graph.items() if residual.is_missing}
        first = max(asked_at[key] for key in missing)
        if any(asked_at[key] >= first for key, residual in self.graph.items() if residual.is_saved and key[0] >= 0):
            self.arrive()
        if self.group is not None and not self.group.slots:
            self.arrive()
        self.arguments = {number: self.unpacked(number) for number in sorted(self.takes_inputs)}
        for index, op in enumerate(self.region.ops):
            if not missing:
                break  # it stops early
            if index in self.runs:
                self.run_op(index, op.forward_ms)
            elif index in self.takes:
                self.take(index)
            for number in range(len(op.makes)) if (index, 0) in self.scope else ():
                self.trainer.look(self.scope[index, number], self.comparing((index, number)))
                if (index, number) in missing:
                    missing.remove((index, number))
                    self.graph[index, number].buffer = self.scope[index, number]
            self.drop_variables(index)
        self.scope.clear()
        for number, each in enumerate(self.region.inputs):
            if not each.value.is_residual:
                self.arguments.pop(number, None)
        if self.group is not None:
            self.engine.arrive(self.group)

    def take(self, index: int) -> None:
        for number in range(len(self.region.ops[index].makes)):
            kept = self.kept[index, number]
            self.scope[index, number] = self.engine.acquire(kept) if isinstance(kept, Handle) else kept

    # Both.

    def share(self, ms: float, index: int) -> float:
        times = [op.forward_ms for op in self.region.ops]
        return ms * times[index] / sum(times) if any(times) else ms / len(times)

    def asked_at(self, key: tuple[int, int]) -> int | None:
        """The last op that reads a value, also through views; the op itself, or None for an input, if there is none."""
        source = ~key[1] if key[0] < 0 else key[0]
        readers = [index for index in range(len(self.region.ops)) if source in self.sources(index)]
        return max(readers, default=None if key[0] < 0 else key[0])

    def sources(self, index: int) -> set[int]:
        """What an op reads: ops, and inputs i as ~i; through views also what they look at."""
        op = self.region.ops[index]
        found = {*op.reads, *(~number for number in op.reads_inputs)}
        for read in op.reads:
            if not self.region.ops[read].makes:
                found |= self.sources(read)
        return found

    def noting(self, key: tuple[int, int]) -> Callable[[Any], None]:
        return lambda value: self.trainer.made.__setitem__((self.index, *key), value)

    def comparing(self, key: tuple[int, int]) -> Callable[[Any], None]:
        return lambda value: self.trainer.read.append(((self.index, *key), value))


# -- random cases -------------------------------------------------------------------------------------------------------------


def random_case(seed: int) -> Case:
    """A model of a few regions, a decision that can be carried out, and limits."""
    rng = random.Random(seed)
    shapes = [_random_region(rng, f"layers.{number}") for number in range(rng.randint(1, 3))]
    regions: list[Region] = []
    outside_bytes = 0
    for number in range(rng.randint(1, 6)):
        outside_bytes += rng.choice((0, 0, 0, 5, 20))
        path = f"layers.{number}" if rng.random() < 0.9 else "shared"
        call = sum(region.path == path for region in regions)
        regions.append(dataclasses.replace(rng.choice(shapes), path=path, call=call, outside_bytes=outside_bytes))
    speeds = (0.5, 1.0, 2.0, 4.0, 16.0)
    link = Link(rng.choice(speeds), rng.choice(speeds), rng.choice((None, 0.25, 0.5, 2.0)))
    turn = Turn(rng.choice((0.0, 1.0, 8.0)), rng.choice((0, 10, 100)))
    profile = StepProfile(tuple(regions), rng.choice((0, 100)), 0, 0.0, turn, link)
    by_shape: dict[Any, choices.RegionDecision] = {}
    decision = []
    for region in regions:
        chosen = by_shape.get(region.shape()) if rng.random() < 0.6 else None
        decision.append(chosen or _random_decision(rng, region))
        by_shape[region.shape()] = decision[-1]
    window_bytes = rng.choice((0, 1, 20, 60, 200, 1 << 30))
    return Case(
        profile,
        tuple(decision),
        window_bytes,
        prefetch_bytes=rng.choice((0, 1, 20, 60, 200, 1 << 30)),
        on_full=rng.choice(("wait", "wait", "keep")),
        first_window_bytes=rng.choice((None, None, window_bytes // 2)),
        min_bytes=rng.choice((0, 0, 4, 20)),
        host_bytes=rng.choice((None, None, None, 100)),
        host_lead_ms=rng.choice((0.0, 0.0, 2.0, 10.0, float("inf"))),
        num_steps=rng.randint(1, 4),
    )


def _random_region(rng: random.Random, path: str) -> Region:
    num_ops = rng.choice((0, 1, 2, 3, 4, 5, 6, 8))
    num_inputs = rng.choice((0, 1, 1, 2))
    reads = [_random_reads(rng, index) for index in range(num_ops)]
    is_view = [len(reads[index]) == 1 and rng.random() < 0.15 for index in range(num_ops)]
    reads_inputs = [tuple(i for i in range(num_inputs) if rng.random() < 0.25) for _ in range(num_ops)]
    last_read = {index: index for index in range(num_ops)} | {~index: 0 for index in range(num_inputs)}
    for index in reversed(range(num_ops)):
        used = last_read[index] if is_view[index] else index
        for read in (*reads[index], *(~each for each in reads_inputs[index])):
            last_read[read] = max(last_read[read], used)

    def value(index: int) -> StorageFacts:
        freed_after = rng.choice([None, *range(last_read[index], num_ops)][:4]) if num_ops else None
        return StorageFacts(rng.choice(SIZES), rng.random() < 0.5, freed_after)

    ops = []
    for index in range(num_ops):
        makes = () if is_view[index] else tuple(value(index) for _ in range(rng.choice((1, 1, 1, 2))))
        ms = 0.0 if is_view[index] else rng.choice((0.0, 0.25, 1.0, 2.0, 7.0))
        all_choices = ("save", "swap", "recompute")
        has_all = is_view[index] or rng.random() < 0.85
        chosen = all_choices if has_all else tuple(rng.sample(all_choices, rng.randint(1, 2)))
        temporary_bytes = rng.choice((0, 0, 8, 40))
        ops.append(
            ProfiledOp("", "op", index, 0, ms, makes, reads[index], reads_inputs[index], temporary_bytes, chosen)
        )
        whole = reads[index][0] if len(reads[index]) == 1 else index
        is_next = (
            all(op.part is not None for op in ops[whole + 1 : index]) and whole < index and ops[whole].part is None
        )
        if makes and has_all and is_next and ops[whole].makes and rng.random() < 0.4:
            others = tuple(dataclasses.replace(each, is_residual=False) for each in ops[whole].makes)
            ops[whole] = dataclasses.replace(ops[whole], makes=others, choices=("recompute",))
            own = tuple(dataclasses.replace(each, is_residual=True) for each in makes)
            ops[index] = dataclasses.replace(ops[index], makes=own, part=index)
    inputs = tuple(Input(value(~index), rng.random() < 0.8) for index in range(num_inputs))
    total_ms = sum(op.forward_ms for op in ops) or num_ops * 0.5
    region = Region(
        path,
        0,
        tuple(ops),
        inputs,
        forward_ms=total_ms * rng.choice((0.5, 1.0, 2.0)) if num_ops else 3.0,
        backward_ms=total_ms * rng.choice((1.0, 2.0, 4.0)) if num_ops else 5.0,
        forward_peak_bytes=0,
        backward_peak_bytes=0,
        before_ms=rng.choice((0.0, 0.0, 0.5, 4.0)),
        after_ms=rng.choice((0.0, 0.0, 0.5, 4.0)),
        may_be_plain=rng.random() < 0.9,
    )
    backward_peak_bytes = max(region.residual_bytes + rng.choice((-20, 0, 10, 100)), 0)
    return dataclasses.replace(region, backward_peak_bytes=backward_peak_bytes)


def _random_reads(rng: random.Random, index: int) -> tuple[int, ...]:
    earlier = range(max(index - 4, 0), index)
    return tuple(sorted(rng.sample(earlier, min(rng.choice((0, 1, 1, 2)), len(earlier)))))


def _random_decision(rng: random.Random, region: Region) -> choices.RegionDecision:
    if region.may_be_plain and rng.random() < 0.2:
        return choices.plain(region)
    favourite = rng.choice((None, "save", "swap", "swap", "recompute"))
    ops: list[str | None] = [None] * len(region.ops)
    needed = {index for index, op in enumerate(region.ops) if op.is_needed}
    for index in reversed(range(len(region.ops))):
        allowed = choices.allowed(region.ops[index])
        if index in needed or rng.random() < 0.4:
            ops[index] = favourite if favourite in allowed and rng.random() < 0.6 else rng.choice(allowed)
        if ops[index] == "recompute":
            needed.update(region.ops[index].reads)
    for whole, parts in region.parts().items():
        if ops[whole] == "recompute":
            for part in parts:
                ops[part] = "recompute"
    runs_again = "recompute" in ops
    inputs: list[str | None] = []
    for each in region.inputs:
        allowed = ("save", "swap") if each.may_swap else ("save",)
        is_needed = runs_again or each.value.is_residual
        inputs.append(rng.choice(allowed) if is_needed or rng.random() < 0.3 else None)
    return choices.RegionDecision(False, tuple(ops), tuple(inputs))


# -- the comparison -----------------------------------------------------------------------------------------------------------


def compare(case: Case, run_step: Callable[..., Any]) -> Trainer:
    """Train, and raise `MismatchError` where `run_step` of the timeline says something else."""
    trainer = Trainer(case)
    for number in range(1, case.num_steps + 1):
        happened = trainer.step()
        said = run_step(
            case.profile,
            case.decision,
            case.limits(),
            min_bytes=case.min_bytes,
            num_steps=number,
            host_bytes=case.host_bytes,
            host_lead_ms=case.host_lead_ms,
        )
        _check_equal(
            number, "copies", [(c.direction, c.start_ms, c.end_ms, c.num_bytes) for c in said.copies], happened.copies
        )
        _check_equal(number, "stalls", [(s.kind, s.start_ms, s.ms) for s in said.stalls], happened.stalls)
        _check_equal(number, "forward_ms", said.forward_ms, happened.forward_ms)
        _check_equal(number, "turn_ms", said.turn_ms, happened.turn_ms)
        _check_equal(number, "backward_ms", said.backward_ms, happened.backward_ms)
        _check_equal(number, "peak_bytes", said.peak_bytes, happened.peak_bytes)
        _check_equal(number, "bytes in use", _in_use(said, [ms for ms, _ in happened.in_use]), happened.in_use)
        _check_curves(number, said)
    trainer.finish()
    return trainer


def _check_equal(step: int, what: str, said: Any, happened: Any) -> None:
    if said != happened:
        raise MismatchError(f"step {step}, {what}: the timeline says {said}, in truth it is {happened}")


def _in_use(said: Any, times: list[float]) -> list[tuple[float, int]]:
    """What the timeline says of the bytes in use at these times."""
    starts = [moment.ms for moment in said.moments]
    return [(ms, said.moments[bisect.bisect_right(starts, ms) - 1].num_bytes) for ms in times]


def _check_curves(step: int, said: Any) -> None:
    highest = max(moment.num_bytes for moment in said.moments)
    _check_equal(step, "highest of its moments", highest, said.peak_bytes)
    lowest = min(min(moment[1:]) for moment in said.moments)
    _check_equal(step, "lowest of its categories", min(lowest, 0), 0)
    _check_equal(step, "regions", all(bytes_ >= 0 for curve in said.region_bytes for _, bytes_ in curve), True)


def smaller_cases(case: Case) -> Iterator[Case]:
    """Cases with a little less in them."""
    if case.num_steps > 1:
        yield dataclasses.replace(case, num_steps=case.num_steps - 1)
    for name, plain in (("host_bytes", None), ("host_lead_ms", 0.0), ("min_bytes", 0), ("first_window_bytes", None)):
        if getattr(case, name) != plain:
            yield dataclasses.replace(case, **{name: plain})
    profile = case.profile
    for index in range(len(profile.regions)):
        yield _with_regions(case, index, [], [])
        for region, chosen in _smaller_regions(profile.regions[index], case.decision[index]):
            yield _with_regions(case, index, [region], [chosen])
    for smaller in (
        dataclasses.replace(profile, turn=Turn()),
        dataclasses.replace(profile, base_bytes=0),
        dataclasses.replace(profile, link=profile.link and dataclasses.replace(profile.link, both_bytes_per_ms=None)),
    ):
        if smaller != profile:
            yield dataclasses.replace(case, profile=smaller)


def _with_regions(case: Case, index: int, regions: list[Region], decision: list[choices.RegionDecision]) -> Case:
    before, after = case.profile.regions[:index], case.profile.regions[index + 1 :]
    profile = dataclasses.replace(case.profile, regions=(*before, *regions, *after))
    chosen = (*case.decision[:index], *decision, *case.decision[index + 1 :])
    return dataclasses.replace(case, profile=profile, decision=chosen)


def _smaller_regions(region: Region, chosen: choices.RegionDecision) -> Iterator[tuple[Region, choices.RegionDecision]]:
    """Without the last op, without what lies around it, with one result, choice or time less."""
    if region.ops:
        ops = tuple(_freed_by(op, len(region.ops) - 1) for op in region.ops[:-1])
        inputs = tuple(dataclasses.replace(each, value=_freed_in(each.value, len(ops))) for each in region.inputs)
        yield (
            dataclasses.replace(region, ops=ops, inputs=inputs),
            dataclasses.replace(chosen, ops=chosen.ops[:-1]),
        )
    quiet = dataclasses.replace(region, before_ms=0.0, after_ms=0.0, outside_bytes=0)
    if quiet != region:
        yield quiet, chosen
    for index, op in enumerate(region.ops):
        for other in (
            dataclasses.replace(op, temporary_bytes=0),
            dataclasses.replace(op, makes=op.makes[:1]),
            dataclasses.replace(op, reads=op.reads[1:], part=None),
            dataclasses.replace(op, reads_inputs=()),
        ):
            if other != op:
                ops = (*region.ops[:index], other, *region.ops[index + 1 :])
                yield dataclasses.replace(region, ops=ops), chosen
        if chosen.ops[index] is not None:
            for choice in (None, "save"):
                if chosen.ops[index] != choice:
                    ops_ = (*chosen.ops[:index], choice, *chosen.ops[index + 1 :])
                    yield region, dataclasses.replace(chosen, ops=ops_)


def _freed_by(op: ProfiledOp, num_ops: int) -> ProfiledOp:
    return dataclasses.replace(op, makes=tuple(_freed_in(value, num_ops) for value in op.makes))


def _freed_in(value: StorageFacts, num_ops: int) -> StorageFacts:
    freed_after = value.freed_after
    return dataclasses.replace(
        value, freed_after=None if freed_after is None or freed_after >= num_ops else freed_after
    )


def smallest(case: Case, fails: Callable[[Case], bool], max_tries: int = 3_000) -> Case:
    """A case that fails, of which none that is a little smaller does."""
    tries = 0
    found = True
    while found and tries < max_tries:
        found = False
        for smaller in smaller_cases(case):
            tries += 1
            if _is_valid(smaller) and fails(smaller):
                case, found = smaller, True
                break
    return case


def _is_valid(case: Case) -> bool:
    outside = [region.outside_bytes for region in case.profile.regions]
    if outside != sorted(outside):
        return False
    try:
        for region, chosen in zip(case.profile.regions, case.decision, strict=True):
            choices.check(region, chosen)
    except ArgumentError:
        return False
    return True
