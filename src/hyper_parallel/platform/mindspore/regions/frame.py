"""One call of a region: its forward, and the passes of backward that ask for what it did not keep.

The README of this folder has one call from beginning to end, and what is particular to MindSpore.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from mindspore import Tensor, nn, saved_tensors_hooks
from mindspore.graph.api import _pynative_executor

from hyper_parallel._base.errors import StateError
from hyper_parallel._base.log import get_logger
from hyper_parallel.core.activation_checkpoint.options import Options
from hyper_parallel.core.regions.arguments import SavedArguments
from hyper_parallel.core.regions.functions import bare, engine_key, identity, region_name
from hyper_parallel.core.regions.host_randomness import HostRandomness
from hyper_parallel.core.regions.passes import Pass
from hyper_parallel.core.regions.policy import RegionPolicy
from hyper_parallel.core.regions.rerun_errors import other_ops, other_values
from hyper_parallel.core.regions.value_check import is_due
from hyper_parallel.platform.mindspore.regions.attributes import as_noted, note_attributes
from hyper_parallel.platform.mindspore.regions.cell_paths import paths_here, unwrapped
from hyper_parallel.platform.mindspore.regions.planning import ReplayEntries
from hyper_parallel.platform.mindspore.regions.precision import Precision, forget_casts
from hyper_parallel.platform.mindspore.regions.random_ops import SeedState
from hyper_parallel.platform.mindspore.regions.recording import (
    Node,
    Record,
    RecordedOp,
    RegionMode,
    Saves,
    Swappable,
)
from hyper_parallel.platform.mindspore.regions.region_swap import RegionSwap
from hyper_parallel.platform.mindspore.regions.replaying import (
    AllFound,
    NeedsEverything,
    Replay,
)
from hyper_parallel.platform.mindspore.regions.replays import Hooks, pack_around, replaying
from hyper_parallel.platform.mindspore.regions.residuals import FromInput, FromKept, Recomputed
from hyper_parallel.platform.mindspore.regions.saved_tensors import Kept, Swapped, TensorSwap
from hyper_parallel.platform.mindspore.regions.value_sums import value_sum
from hyper_parallel.platform.mindspore.swap.storages import aliased, storage_bytes, unseen

_logger = get_logger("region")
_NO_PASS = -1  # what MindSpore gives as the number of the backward outside of one
_SMALL_BYTES = 4096  # a tensor that no op has made and that is not larger is kept as it is
_NOTHING = contextlib.nullcontext()
# What MindSpore says when something wants to read the memory of a placeholder.
_PLACEHOLDER_READ = "meta"
# Functions and cells in which something reads what no op needs: nothing is left out there.
_reads_everything: weakref.WeakSet[Any] = weakref.WeakSet()


class Frame:
    """Residuals hold it; it holds no residual and no autograd node.

    Fields:
        _record: the ops, from the call on; None after a forward of which nothing will be recomputed
        _inputs: how to get each tensor argument back, when the forward is over
        _passes: number of the backward -> what it has recomputed; guarded by `_lock`, as are replays
    """

    def __init__(
        self, function: Callable[..., Any], arguments: SavedArguments, policy: RegionPolicy | None, options: Options
    ) -> None:
        cell = _cell_of(function)
        paths = paths_here(cell)
        self.name = region_name(function, cell, paths)
        self._function = function
        self._arguments = arguments
        self._policy = policy
        self._options = options
        self._cell = None if cell is None else weakref.ref(cell)
        self._identity = identity(function, cell)
        self._key = engine_key(self.name, self._identity)
        self._swap = RegionSwap(self._key)
        self._record: Record | None = Record(policy, paths, options.preserve_rng_state)
        self._inputs: list[Callable[[], Tensor] | None] = []
        self._requires_grad = [bool(tensor._requires_grad) for tensor in arguments.tensors]
        self._attributes = note_attributes(cell)
        self._precision = Precision()
        self._seeds: SeedState | None = None
        self._host_randomness: HostRandomness | None = None
        self._recomputed: list[weakref.ref[Recomputed]] = []
        self._from_inputs: list[weakref.ref[FromInput]] = []
        self._pending: list[Recomputed] = []
        self._entries: ReplayEntries | None = None
        self._value_sums: dict[Any, bytes] = {}
        self._lock = threading.RLock()
        self._passes: dict[int, Pass] = {}

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        record = self._recorded()
        for tensor in self._arguments.tensors:
            record.add_input(tensor)
        record.on_made = self._resolve
        if self._options.preserve_rng_state:
            self._seeds = SeedState()
            self._host_randomness = HostRandomness()
        packer = _Packer(self)
        try:
            with Hooks(packer.pack, _unpack, packer.pack_input), RegionMode(record) as mode:
                result = self._function(*args, **kwargs)
                mode.check()
            with unseen():
                self._finish(record)
        finally:
            record.on_made = None
            packer.frame = None  # autograd keeps the hooks as long as the graph
            for each in _living(self._recomputed):
                each.let_go()
        return result

    def pack_input(self, tensor: Tensor) -> Any:
        """What a region inside of this one keeps in place of an input. What nobody recognises stays: autograd does not save it."""
        record = self._record
        if record is None or record.node_of(tensor) is None:
            return Kept(tensor)
        return self.pack(tensor)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in place of a residual."""
        record = self._recorded()
        order = record.num_saved
        record.num_saved += 1
        if tensor.param_info is not None or storage_bytes(tensor) == 0:
            return Kept(tensor)
        node = record.node_of(tensor)
        if node is not None and node.base.op < 0:
            from_input = FromInput(self, node.base.position, tensor)
            self._from_inputs.append(weakref.ref(from_input))
            return from_input
        last = len(record.ops) - 1
        if node is not None:
            if node.base.kept is not None:
                self._swap_out(record, node.base)
                return FromKept(node.base.kept, tensor)
            return self._recompute(node, tensor, last)
        if record.is_in_primitive:
            pending = self._recompute((Saves(last), order), tensor, last)
            self._pending.append(pending)
            return pending
        if storage_bytes(tensor) <= _SMALL_BYTES:
            return Kept(tensor)
        return self._recompute((Saves(last), order), tensor, last)

    def _recompute(self, value: object, tensor: Tensor, saved_after: int) -> Recomputed:
        recomputed = Recomputed(self, value, tensor, saved_after)
        self._recomputed.append(weakref.ref(recomputed))
        return recomputed

    def _resolve(self, op: RecordedOp) -> None:
        """A primitive is done: what was saved while it ran may be its results."""
        for pending in self._pending:
            held = pending.held
            if held is None:
                continue
            address = held.data_ptr()
            for node in op.nodes:
                if node.source is None and node.num_bytes and _is_at(node, held, address):
                    pending.value = node
                    break
        self._pending.clear()

    def _swap_out(self, record: Record, node: Node) -> None:
        """Something needs a value that a policy wants swapped: let it leave now."""
        if type(node.kept) is Swappable:
            swapped = self._swap.swap(node.kept.tensor(), str(record.ops[node.op]))
            if swapped is not None:
                node.kept = swapped

    def _finish(self, record: Record) -> None:
        """The forward is over: keep what backward can ask for, and nothing else."""
        if self._host_randomness is not None:
            self._host_randomness.note_use()
            if not self._host_randomness.was_used:
                self._host_randomness = None
        recomputed = self._to_recompute(record)
        if self._identity in _reads_everything:
            record.runs_everything = True
        self._entries = ReplayEntries(record, _wanted(recomputed), self._options.early_stop)
        slots = self._keep_for_replay(record, self._entries.takes)
        self._note_value_sums(recomputed)
        slots = self._pack_inputs(record, bool(recomputed)) + slots
        if recomputed:
            self._swap.expect(slots)
        else:
            self._record = None
            self._seeds = None
            self._attributes = None

    def _to_recompute(self, record: Record) -> list[Recomputed]:
        """The living residuals that no policy has kept after all."""
        recomputed = []
        for each in _living(self._recomputed):
            node = each.value
            if isinstance(node, Node) and node.base.kept is not None and each.held is not None:
                self._swap_out(record, node.base)
                each.keep(FromKept(node.base.kept, each.held))
            else:
                recomputed.append(each)
        self._recomputed = [weakref.ref(each) for each in recomputed]
        return recomputed

    def _keep_for_replay(self, record: Record, takes: frozenset[Any]) -> list[Any]:
        """Keep what replay takes, and drop the rest; the slots of what is swapped, in the order of asking."""
        slots = []
        for op in record.ops:
            for node in op.nodes:
                if node.kept is None:
                    continue
                if node not in takes:
                    node.kept = None  # a residual that needs it has a reference of its own
                    continue
                self._swap_out(record, node)
                if isinstance(node.kept, Swapped):
                    slots.append(node.kept.slot)
        return slots

    def _note_value_sums(self, recomputed: list[Recomputed]) -> None:
        if recomputed and is_due(self._key):
            for each in recomputed:
                if each.held is not None:
                    self._value_sums[each.value] = value_sum(each.held)

    def _pack_inputs(self, record: Record, is_called_again: bool) -> list[Any]:
        """Give the inputs that backward needs to the hooks around this region; without any, keep them.

        The slots of those that are swapped and that replay begins with.
        """
        arguments = self._arguments
        slots: list[Any] = []
        pack = pack_around()
        if self._options.swap_inputs:
            pack = TensorSwap(None if self._cell is None else self._cell(), self.name, self._swap.place).pack
        asked = {each.position for each in _living(self._from_inputs)}
        for position, (tensor, is_direct) in enumerate(zip(arguments.tensors, arguments.is_direct, strict=True)):
            if not is_called_again and position not in asked:
                self._inputs.append(None)
                continue
            packed = pack(tensor) if is_direct and pack is not None else None
            packed = Kept(tensor) if packed is None else packed
            self._inputs.append(packed.tensor)
            slot = getattr(packed, "slot", None)
            if slot is not None and is_called_again:
                slots.append(slot)
        arguments.forget_tensors()
        return slots

    # -- backward -----------------------------------------------------------------------------------------------------

    def recomputed(self, residual: Recomputed) -> Tensor:
        """A recomputed value, for one residual in one backward."""
        number = _pynative_executor.get_current_autodiff_engine_id()
        with self._lock:
            current = self._pass(number)
            value = residual.value
            if value not in current.found:
                if current.has_given(value):
                    current.keep_all()
                self._replay(current)
            tensor: Tensor = current.take(value)
            if number == _NO_PASS:
                self.end_pass(number)
        return tensor

    def input_tensor(self, position: int) -> Tensor:
        """An input."""
        if not self._inputs:  # the forward still runs, and somebody runs backward inside it
            return aliased(self._arguments.tensors[position])
        number = _pynative_executor.get_current_autodiff_engine_id()
        with self._lock:
            current = self._pass(number)
            tensor = self._input(position, current)
            current.gave_input(position)
            if number == _NO_PASS:
                self.end_pass(number)
        return tensor

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
                _pynative_executor.queue_backward_final_callback(_EndOfPass(self, number))
            current = self._passes[number] = Pass()
            current.asking = Counter(each.position for each in _living(self._from_inputs))
            current.will_replay = bool(_living(self._recomputed))
        return current

    def _input(self, position: int, current: Pass) -> Tensor:
        if position not in current.inputs:
            unpack = self._inputs[position]
            if unpack is None:
                raise StateError("An input of a region is needed that was not kept.", where=self.name)
            current.inputs[position] = unpack()
        tensor: Tensor = current.inputs[position]
        return tensor

    def _replay(self, current: Pass) -> None:
        """Recompute every value that a living residual may ask for."""
        record = self._recorded()
        recomputed = _living(self._recomputed)
        wanted = _wanted(recomputed)
        entries = self._entries
        if entries is None or entries.wanted != set(wanted):
            entries = self._entries = ReplayEntries(record, wanted, self._options.early_stop)
        replay = None
        if not record.runs_everything:
            replay = self._try_to_leave_out(record, entries, wanted, current)
        if replay is None:
            record.runs_everything = True
            self._entries = entries = ReplayEntries(record, wanted, self._options.early_stop)
            replay = self._run_again(record, entries, wanted, current)
        self._check_found(record, replay, wanted)
        if self._value_sums:
            self._check_values(record, replay)
        current.put(replay.found, set(), Counter(each.value for each in recomputed))

    def _try_to_leave_out(
        self, record: Record, entries: ReplayEntries, wanted: dict[Any, int], current: Pass
    ) -> Replay | None:
        """Run what is needed; None if something reads what was left out."""
        try:
            return self._run_again(record, entries, wanted, current)
        except NeedsEverything as reader:
            cause = str(reader)
            _forget_frames(reader)
        except (RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, StateError) or _PLACEHOLDER_READ not in str(error):
                raise
            cause = str(error).strip().partition("\n")[0]
            _forget_frames(error)
        with contextlib.suppress(TypeError):  # what cannot be referred to weakly is looked at again each time
            _reads_everything.add(self._identity)
        _logger.info("%s: what was left out is read after all (%s); every op is run again", self.name, cause)
        return None

    def _run_again(self, record: Record, entries: ReplayEntries, wanted: dict[Any, int], current: Pass) -> Replay:
        options = self._options
        replay = Replay(
            record,
            entries.runs,
            entries.takes,
            wanted,
            self._policy,
            check_outputs=options.check_outputs,
            early_stop=options.early_stop,
            preserves_random_state=options.preserve_rng_state,
        )
        # First of all: to get them may mean another replay, of the region around this one.
        args, kwargs = self._arguments.rebuild(lambda position: self._replayed_input(position, replay, current))
        with (
            replaying(),
            _NOTHING if self._seeds is None else self._seeds.again(),
            _NOTHING if self._host_randomness is None else self._host_randomness.again(),
            as_noted(self._attributes),
            self._precision.again(),
            _recording_gradients(),
            saved_tensors_hooks(replay.pack, _unpack_again),
            RegionMode(replay) as mode,
        ):
            _pynative_executor.new_empty_graph()
            try:
                replay.begin()
                self._function(*args, **kwargs)
                mode.check()
            except AllFound as stop:
                forget_casts(replay.num_casting)
                _forget_frames(stop)
            except BaseException as error:
                if isinstance(error, NeedsEverything):
                    forget_casts(replay.num_casting)
                with contextlib.suppress(RuntimeError):  # an error of the framework may have ended it already
                    _pynative_executor.end_empty_graph()
                raise
            finally:
                replay.end()
            _pynative_executor.end_empty_graph()
        return replay

    def _replayed_input(self, position: int, replay: Replay, current: Pass) -> Tensor:
        tensor = aliased(self._input(position, current))
        if self._requires_grad[position]:
            tensor.requires_grad_()
        replay.bind_input(self._recorded().inputs[position], tensor)
        return tensor

    def _recorded(self) -> Record:
        if self._record is None:
            raise StateError("A region has forgotten its ops.", where=self.name)
        return self._record

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_found(self, record: Record, replay: Replay, wanted: dict[Any, int]) -> None:
        missing = min((_op_of(value) for value in wanted if value not in replay.found), default=None)
        if missing is None:
            return
        first = replay.first_missing or (record.ops[missing] if missing >= 0 else "what the function saves first")
        raise other_ops(replay, first, record.ops, self.name, lists_ops=self._options.debug)

    def _check_values(self, record: Record, replay: Replay) -> None:
        for value in sorted((value for value in self._value_sums if value in replay.found), key=_op_of):
            if value_sum(replay.found[value]) != self._value_sums[value]:
                index = _op_of(value)
                raise other_values(str(record.ops[index]) if index >= 0 else self.name)


class _Packer:
    """The pack hook. It forgets the frame when the forward is over: autograd keeps hooks as long as the graph."""

    __slots__ = ("frame",)

    def __init__(self, frame: Frame) -> None:
        self.frame: Frame | None = frame

    def pack(self, tensor: Tensor) -> Any:
        with unseen():
            return Kept(tensor) if self.frame is None else self.frame.pack(tensor)

    def pack_input(self, tensor: Tensor) -> Any:
        return Kept(tensor) if self.frame is None else self.frame.pack_input(tensor)


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.tensor()
    return tensor


def _unpack_again(packed: Tensor | None) -> Tensor:
    if packed is None:
        raise NeedsEverything("a backward inside the region")
    return packed


class _EndOfPass:
    """Called by autograd when a backward is over."""

    def __init__(self, frame: Frame, number: int) -> None:
        self._frame = weakref.ref(frame)
        self._number = number

    def __call__(self) -> None:
        frame = self._frame()
        if frame is not None:
            frame.end_pass(self._number)


@contextlib.contextmanager
def _recording_gradients() -> Iterator[None]:
    """A block in which ops are recorded as in the forward, whatever runs backward has set."""
    flag, enabled = _pynative_executor.grad_flag(), _pynative_executor.enable_grad()
    _pynative_executor.set_grad_flag(True)
    _pynative_executor.set_enable_grad(True)
    try:
        yield
    finally:
        _pynative_executor.set_grad_flag(flag)
        _pynative_executor.set_enable_grad(enabled)


def _forget_frames(error: BaseException) -> None:
    """Let go of what the function had in hand: an exception that passes through MindSpore is not always freed."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None


def _is_at(node: Node, tensor: Tensor, address: int) -> bool:
    return bool(
        node.address == address
        and node.look.offset == 0
        and node.look.shape == tensor.shape
        and node.look.dtype == tensor.dtype
    )


def _wanted(recomputed: list[Recomputed]) -> dict[Any, int]:
    """The values to recompute, and the last op after which autograd saved each."""
    return {each.value: each.saved_after for each in sorted(recomputed, key=lambda each: each.saved_after)}


def _op_of(value: Any) -> int:
    return value.op if isinstance(value, Node) else value[0].op


def _living(refs: list[Any]) -> list[Any]:
    return [each for ref in refs if (each := ref()) is not None]


def _cell_of(function: object) -> nn.Cell | None:
    function = bare(function)
    owner = function if isinstance(function, nn.Cell) else getattr(function, "__self__", None)
    return unwrapped(owner) if isinstance(owner, nn.Cell) else None
