"""One call of a region: its forward, and the passes of backward that ask for what it did not keep.

The README of this folder has one call from beginning to end, and who holds what. Beside this file: `region_function`
(what is called, and what is known of it), `inputs` (the tensors it is called with), `recomputation` (how a pass makes
values again), `second_call` (the function called again).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.activation_checkpoint.options import Options
from hyper_parallel.core.regions.arguments import SavedArguments
from hyper_parallel.core.regions.passes import Pass
from hyper_parallel.core.regions.policy import Observer, RegionPolicy
from hyper_parallel.platform.torch.regions.inputs import Inputs
from hyper_parallel.platform.torch.regions.leaving import (
    forget_waiting,
    launch_waiting,
    leave_later,
    note_save,
)
from hyper_parallel.platform.torch.regions.left_as_found import left_as_found
from hyper_parallel.platform.torch.regions.local_parts import PLAIN_TYPES, is_plain
from hyper_parallel.platform.torch.regions.placeholders import View
from hyper_parallel.platform.torch.regions.recomputation import Recomputation
from hyper_parallel.platform.torch.regions.recording import Record, RecordingMode
from hyper_parallel.platform.torch.regions.region_function import RegionFunction
from hyper_parallel.platform.torch.regions.region_swap import Arrival, RegionSwap, Swapped
from hyper_parallel.platform.torch.regions.residuals import FromInput, FromKept, Recomputed
from hyper_parallel.platform.torch.regions.saved_tensors import Kept, TensorSwap, changed_in_place
from hyper_parallel.platform.torch.regions.saved_values import Swappable, aliased
from hyper_parallel.platform.torch.regions.second_call import SecondCall
from hyper_parallel.platform.torch.regions.surroundings import check_not_traced, in_words, num_begun
from hyper_parallel.platform.torch.regions.unwatched_pattern import Watched, looks_of, tensors_held
from hyper_parallel.platform.torch.regions.values import Origin, Value
from hyper_parallel.platform.torch.swap.device import shown

_INPUT, _OUTSIDE = Origin.INPUT, Origin.OUTSIDE
_Tensor, _strided = torch.Tensor, torch.strided
_NO_PASS = -1  # what PyTorch gives as the number of the backward outside of one


class Frame:
    """Residuals hold it; it holds no residual and no autograd node.

    Fields:
        _is_planned: see `RegionFunction`; for those with a plan's policy in any case
        _record: the ops, from the call on; None after a forward of which nothing will be recomputed
        _passes: number of the backward -> what it has recomputed; guarded by `_lock`, as are replays
    """

    _is_planned = False

    def __init__(
        self, function: Callable[..., Any], arguments: SavedArguments, policy: RegionPolicy | None, options: Options
    ) -> None:
        is_planned = self._is_planned or (policy is not None and policy.planned_answer is not None)
        self._function = RegionFunction(function, policy, is_planned=is_planned)
        self.name = self._function.name
        self._options = options
        self._swap = RegionSwap(
            self._function.key,
            None if policy is None else policy.ahead_bytes,
            ends_forward=policy is not None and policy.ends_forward,
        )
        self._record: Record | None = self._function.new_record(options.preserve_rng_state)
        self._inputs = Inputs(arguments, self.name)
        self._second_call = SecondCall(self._function, self._inputs)
        self._recomputation = Recomputation(self._function, self._inputs, self._second_call, policy, options)
        self._recomputed: list[weakref.ref[Recomputed]] = []
        self._from_inputs: list[weakref.ref[FromInput]] = []
        self._observer: Observer | None = None if policy is None else policy.observer
        self._lock = threading.RLock()  # in backward every device has a thread of its own
        self._passes: dict[int, Pass] = {}

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._second_call.parameters.are_lazy:
            return self._function.call(*args, **kwargs)  # makes its parameters, as it will not do again
        record = self._recorded()
        for tensor in self._inputs.tensors:
            record.add_input(tensor)
        if self._options.preserve_rng_state:
            self._second_call.note_random_states()
        observer = self._observer
        looks = None if observer is None else looks_of(self._inputs.tensors)
        held = [] if observer is None else tensors_held(self._function.modules)
        begun = num_begun()
        launch_waiting()  # of a block around this region, which would wait for the end of this one
        packer = _Packer(self) if observer is None else _NotingPacker(self)
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(packer.pack, _unpack),
                RecordingMode(record),
            ):
                result = self._function.call(*args, **kwargs)
        except BaseException as error:
            forget_waiting()
            if (refused := in_words("A region", error, self.name)) is not None:
                raise refused from None
            raise
        finally:
            packer.frame = None  # autograd keeps the hooks as long as the graph
        with torch.no_grad():
            self._finish(record)
            if observer is not None and isinstance(packer, _NotingPacker):
                has_put = tensors_held(self._function.modules) != held
                self._tell(observer, record, packer, looks, is_ordinary=num_begun() == begun and not has_put)
        return result

    def _tell(
        self, observer: Observer, record: Record, packer: _NotingPacker, looks: Any, *, is_ordinary: bool
    ) -> None:
        """What this call has shown, while its record is there. `is_ordinary`: no region is inside, and no module got another tensor."""
        around = self._second_call.surroundings
        call = Watched(
            record=record,
            function=self._function,
            parameters=self._second_call.parameters,
            inputs=self._inputs,
            looks=looks,
            saved=packer.saved,
            dropped={each.value for each in _living(self._recomputed)},
            begin=self._second_call.random_states,
            is_ordinary=around.transform is None and not around.is_compiling and is_ordinary,
        )
        observer.observe(call)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps in place of a residual."""
        record = self._record
        value = None if record is None else record.current(tensor)
        if record is None or value is None or value.origin is _OUTSIDE:
            return Kept(tensor, self.name)
        origin = value.origin
        if origin is _INPUT:
            from_input = FromInput(self, value, tensor)
            self._from_inputs.append(weakref.ref(from_input))
            return from_input
        if value.is_empty:
            record.runs_everything = True  # filled by a kernel that no mode sees
        arrival = None
        if type(value.kept) is Swappable or type(value.kept) is Swapped:
            leaving = FromKept(tensor, record.ops[value.op].place())
            leave_later(functools.partial(self._leave, record, value.key, weakref.ref(leaving)), value.device)
            return leaving
        if value.device != self._swap.no_engine_on:
            arrival = self._told(value)
        if value.kept is not None:
            return FromKept(tensor, record.ops[value.op].place(), arrival)
        recomputed = Recomputed(self, value, tensor)
        num_writes = recomputed.version - value.made_version
        if num_writes > value.num_writes:
            value.num_writes = num_writes
        self._recomputed.append(weakref.ref(recomputed))
        return recomputed

    def _leave(self, record: Record, key: int, saved: weakref.ref[FromKept]) -> None:
        """The op that saved a residual is over: let it be swapped, as the op has left it."""
        residual, value = saved(), record.current_at(key)
        if residual is None or value is None or not residual.is_as_saved():
            return
        self._swap_out(record, value)
        if type(value.kept) is Swapped:
            residual.leave(value.kept)
        elif value.device != self._swap.no_engine_on:
            residual.arrival = self._told(value)

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """While the forward runs."""
        return None if self._record is None else self._record.current(tensor)

    def _told(self, value: Value) -> Arrival | None:
        """Tell the engine of a residual that stays here, if the forward swaps anything."""
        arrival = self._swap.arrival(value.device)
        if arrival is not None and type(value.kept) is not Swapped:
            arrival.hold(value)
        return arrival

    def _swap_out(self, record: Record, value: Value) -> None:
        """Something needs a value that a policy wants swapped: let it leave now."""
        if type(value.kept) is Swappable:
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                swapped = self._swap.swap(value.kept, value.num_bytes, record.ops[value.op].place())
            if swapped is not None:
                value.kept = swapped

    def _finish(self, record: Record) -> None:
        """The forward is over: keep what backward can ask for, and nothing else."""
        launch_waiting()
        self._second_call.note_host_randomness()
        with torch._C._DisableTorchDispatch():  # nothing of this is an op of a region around this one
            for value in record.kept:
                # Also one that is swapped: it may have been written over while it was copied. Residuals have handles of their own.
                if not record.is_current(value):
                    value.kept = None  # written over since; plant: written-over
            self._follow_writes(record)
            recomputed = self._to_recompute(record)
            if recomputed and self._second_call.shows_tensors():
                record.runs_everything = True
            self._recomputation.plan(record, recomputed)
            slots = self._keep_for_replay(record)
            self._recomputation.note_checksums(recomputed)
        slots = self._keep_inputs(record, is_called_again=bool(recomputed)) + slots
        if recomputed:
            self._swap.expect(slots)
            for each in recomputed:
                each.let_go()
        else:
            self._record = None
        self._function.note_ops(record)
        self._swap.end_forward()

    def _follow_writes(self, record: Record) -> None:
        """Memory that was written after autograd saved it, which no version tells, is what was written there: so autograd reads it."""
        for each in _living(self._recomputed):
            value = record.current_at(each.value.key)
            if value is not None and value is not each.value and each.is_as_saved():
                each.value = value
                value.num_writes = max(value.num_writes, each.version - value.made_version)
        for each in _living(self._from_inputs):
            if record.is_current(each.value) or not each.is_as_saved():
                each.let_go()

    def _to_recompute(self, record: Record) -> list[Recomputed]:
        """The living residuals that no policy has kept after all."""
        recomputed: list[Recomputed] = []
        refs: list[weakref.ref[Recomputed]] = []
        for ref in self._recomputed:
            each = ref()
            if each is None:
                continue
            if each.value.kept is None:
                recomputed.append(each)
                refs.append(ref)
                continue
            self._swap_out(record, each.value)
            each.keep(record.ops[each.value.op].place())  # plant: policy-of-view
            each.let_go()
        self._recomputed = refs
        return recomputed

    def _keep_for_replay(self, record: Record) -> list[Any]:
        """Keep what replay takes, and drop the rest; the slots of what is swapped, in the order of asking."""
        takes = self._recomputation.takes
        slots: list[Any] = []
        kept = sorted(record.kept, key=lambda value: value.op)
        for value in (*kept, *record.before_write.values()):
            if value.kept is None:
                continue
            if value not in takes and not (value.is_written and self._keeps_before(value)):
                value.kept = None  # a residual that needs it has a reference of its own
                continue
            self._swap_out(record, value)
            if type(value.kept) is Swapped:
                slots.append(value.kept.slot)
            else:
                value.kept.seal()
        return slots

    def _keeps_before(self, value: Value) -> bool:
        """Whether what was in somebody else's memory before the region wrote there is kept.

        It is if everything may have to run after all, or if replay takes what was written: that may be written again by others.
        """
        takes = self._recomputation.takes
        return not self._function.reads_by_ops_only() or any(each.key == value.key for each in takes if each.op >= 0)

    def _keep_inputs(self, record: Record, is_called_again: bool) -> list[Any]:
        """Keep the inputs that backward needs; the slots of those that are swapped and that replay begins with."""
        function, takes = self._function, self._recomputation.takes
        swap = TensorSwap(function.module, self.name, self._swap.place) if self._options.swap_inputs else None
        swapped = self._inputs.keep(
            record,
            takes | {each.value for each in _living(self._from_inputs)},
            None if swap is None else swap.pack,
            is_called_again=is_called_again,
            reads_by_ops_only=function.reads_by_ops_only(),
        )
        return [slot for value, slot in swapped if value in takes]

    # -- backward -----------------------------------------------------------------------------------------------------

    def recomputed(self, residual: Recomputed) -> torch.Tensor:
        """A recomputed value, for one residual in one backward."""
        number = torch._C._current_graph_task_id()
        with self._lock:
            current = self._passes.get(number) or self._pass(number)
            value = residual.value
            if value not in current.found:
                if current.has_given(value):
                    current.keep_all()
                self._swap.note_replay()
                with left_as_found(), shown(f"recompute {self.name}"):
                    self._recomputation.run(self._recorded(), _living(self._recomputed), current)
                self._swap.note_replayed()
            tensor = current.take(value)
            if number == _NO_PASS:
                self.end_pass(number)
        if tensor is None:
            raise changed_in_place(self.where(residual.value))
        return tensor

    def input_tensor(self, value: Value) -> torch.Tensor:
        """An input, laid out as it was."""
        if not self._inputs.are_kept():  # the forward still runs, and somebody runs backward inside it
            return aliased(self._inputs.given(self._recorded(), value))
        number = torch._C._current_graph_task_id()
        with self._lock:
            index = self._inputs.index_of(value)
            if index is None:  # an op of the region wrote it after it was saved
                raise changed_in_place(f"an input of {self.name}")
            current = self._pass(number)
            with left_as_found():
                tensor = self._inputs.tensor(index, current)
            current.gave_input(index)
            if number == _NO_PASS:
                self.end_pass(number)
        return aliased(tensor)

    def where(self, value: Value) -> str:
        record = self._record
        return self.name if record is None else self._recomputation.where(record, value)

    def end_pass(self, number: int) -> None:
        with self._lock:
            self._passes.pop(number, None)

    def _pass(self, number: int) -> Pass:
        current = self._passes.get(number)
        if current is None:
            if number != _NO_PASS:
                # What a backward of this thread that raised has left is of no use any more.
                thread = threading.get_ident()
                for old in [key for key, each in self._passes.items() if each.thread == thread]:
                    del self._passes[old]
                torch.autograd.Variable._execution_engine.queue_callback(EndOfPass(self, number))
            current = self._passes[number] = Pass()
            asked = [self._inputs.index_of(each.value) for each in _living(self._from_inputs)]
            current.asking = Counter(index for index in asked if index is not None)
            current.will_replay = bool(_living(self._recomputed))
        return current

    def _recorded(self) -> Record:
        if self._record is None:
            raise StateError("A region has forgotten its ops.", where=self.name)
        return self._record


class _Packer:
    """The pack hook. It forgets the frame when the forward is over: autograd keeps hooks as long as the graph."""

    __slots__ = ("frame",)

    def __init__(self, frame: Frame) -> None:
        self.frame: Frame | None = frame

    def pack(self, tensor: torch.Tensor) -> Any:
        frame = self.frame
        note_save()
        # What a subclass is made of is its own business.
        if frame is None or not ((type(tensor) is _Tensor and tensor.layout is _strided) or is_plain(tensor)):
            return Kept(tensor, "region" if frame is None else frame.name)
        return frame.pack(tensor)


class _NotingPacker(_Packer):
    """Notes the value of each tensor that autograd saves, and how the tensor looks; None for one that is not ordinary."""

    __slots__ = ("saved",)

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self.saved: list[tuple[Value | None, View] | None] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        frame = self.frame
        if frame is not None:
            is_ordinary = type(tensor) in PLAIN_TYPES and tensor.layout is _strided
            self.saved.append((frame.value_of(tensor), View.of(tensor)) if is_ordinary else None)
        return super().pack(tensor)


def _unpack(packed: Any) -> torch.Tensor:
    check_not_traced("region")
    tensor: torch.Tensor = packed.tensor()
    return tensor


class EndOfPass:
    """Called by autograd when a backward is over."""

    def __init__(self, frame: Any, number: int) -> None:
        self._frame = weakref.ref(frame)
        self._number = number

    def __call__(self) -> None:
        frame = self._frame()
        if frame is not None:
            frame.end_pass(self._number)


def _living(refs: list[Any]) -> list[Any]:
    return [each for ref in refs if (each := ref()) is not None]
