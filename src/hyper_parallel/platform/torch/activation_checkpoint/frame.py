"""One call of a region: its forward, and the passes of backward that ask for what it did not keep.

How it works and who holds what: README of core/activation_checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from hyper_parallel._base.errors import StateError
from hyper_parallel._base.log import get_logger
from hyper_parallel.platform.regions.arguments import SavedArguments
from hyper_parallel.platform.regions.host_randomness import HostRandomness
from hyper_parallel.platform.regions.passes import Pass
from hyper_parallel.platform.torch.activation_checkpoint.checksums import checksum, find_difference
from hyper_parallel.platform.torch.activation_checkpoint.local_parts import (
    PLAIN_TYPES,
    is_plain,
    local_tensor,
)
from hyper_parallel.platform.torch.activation_checkpoint.module_paths import (
    ModulePaths,
    has_sharded_modules,
    modules_in,
    paths_here,
)
from hyper_parallel.platform.torch.activation_checkpoint.placeholders import (
    Attributes,
    NeedsEverything,
    View,
    another_placeholder,
    is_placeholder,
)
from hyper_parallel.platform.torch.activation_checkpoint.random_state import GeneratorState, set_back, states_of
from hyper_parallel.platform.torch.activation_checkpoint.recorded_ops import (
    NotAsRecordedError,
    Sources,
    can_run,
    run_recorded,
)
from hyper_parallel.platform.torch.activation_checkpoint.recording import (
    Record,
    RecordingMode,
    Swappable,
    aliased,
)
from hyper_parallel.platform.torch.activation_checkpoint.region_swap import RegionSwap, Swapped
from hyper_parallel.platform.torch.activation_checkpoint.replaying import AllFound, Replay, ReplayMode
from hyper_parallel.platform.torch.activation_checkpoint.residuals import FromInput, FromKept, Recomputed
from hyper_parallel.platform.torch.activation_checkpoint.saved_tensors import Kept, TensorSwap, changed_in_place
from hyper_parallel.platform.torch.activation_checkpoint.surroundings import (
    ParametersOfModule,
    Surroundings,
    check_not_traced,
    replaying,
)
from hyper_parallel.platform.torch.activation_checkpoint.swap_device import shown
from hyper_parallel.platform.torch.activation_checkpoint.values import KnownOp, Origin, Value, is_available, known_ops

_INPUT, _OUTSIDE = Origin.INPUT, Origin.OUTSIDE
_Tensor, _strided = torch.Tensor, torch.strided
_unsafe_view = torch.ops.aten._unsafe_view.default._op
_logger = get_logger("region")
_NOTHING = contextlib.nullcontext()
_NO_PASS = -1  # what PyTorch gives as the number of the backward outside of one
# What PyTorch's own kernels say when they want to read the memory of a placeholder.
_PLACEHOLDER_READ = ("Cannot access data pointer", "unallocated storage", "data is not allocated yet")
# Functions and modules that have been replayed with ops left out: nothing in them reads what no op needs.
_leaves_out: weakref.WeakSet[Any] = weakref.WeakSet()


class Options(NamedTuple):
    """How a region is run; see `checkpoint`."""

    swap_inputs: bool = False
    preserve_rng_state: bool = True
    check_outputs: bool = True
    debug: bool = False
    early_stop: bool = True


class _Proof:
    """Whether a function does anything that the ops of its record do not tell; None until somebody has looked."""

    has_unseen: bool | None = None


class _Known(NamedTuple):
    """What the ops of a function's last call looked like, and what the names of their modules depend on."""

    paths: ModulePaths | None
    answers: Any  # of the policy, which itself may lead to anything
    ops: list[KnownOp | None]
    proof: _Proof  # of these ops

    def names(self, paths: ModulePaths | None, answers: Any) -> bool:
        """Whether the names hold for a call under these."""
        return self.paths is paths and self.answers is answers


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


class _Input(NamedTuple):
    """A tensor argument: how it looked, and how to get it back (None: nobody needs it)."""

    value: Value | None
    view: View | None
    num_bytes: int
    requires_grad: bool
    is_leaf: bool
    unpack: Callable[[], torch.Tensor] | None


class Frame:
    """Residuals hold it; it holds no residual and no autograd node.

    Fields:
        _record: the ops, from the call on; None after a forward of which nothing will be recomputed
        _inputs: the tensor arguments, when the forward is over
        _passes: number of the backward -> what it has recomputed; guarded by `_lock`, as are replays
    """

    def __init__(self, function: Callable[..., Any], arguments: SavedArguments, policy: Any, options: Options) -> None:
        module = _module_of(function)
        paths = paths_here(module)
        self.name = _name_of(function, module, paths)
        self._function = function
        self._arguments = arguments
        self._policy = policy
        self._options = options
        self._module = None if module is None else weakref.ref(module)
        self._identity = _identity(function, module)
        # Unlike the name it tells two blocks of one class apart: the engine learns by it what a forward saves last.
        self._key = f"{self.name} {id(self._identity):x}"
        self._swap = RegionSwap(self._key, getattr(policy, "ahead_bytes", None))
        self._known = _known.get(self._identity) or _Known(None, None, [], _Proof())
        self._named = paths, getattr(policy, "answers", None)
        asks = policy is not None and (self._named[1] is None or bool(policy.asked))
        self._record: Record | None = Record(
            policy,
            paths,
            options.preserve_rng_state,
            known=self._known.ops,
            has_names=not asks and self._known.names(*self._named),
        )
        self._inputs: list[_Input] = []
        self._surroundings = Surroundings()
        self._parameters = ParametersOfModule(module)
        self._random: list[GeneratorState] = []
        self._host_randomness: HostRandomness | None = None
        self._recomputed: list[weakref.ref[Recomputed]] = []
        self._from_inputs: list[weakref.ref[FromInput]] = []
        self._plan: Any = None
        self._num_planned = 0
        self._checksums: dict[Value, torch.Tensor] = {}
        self._lock = threading.RLock()  # in backward every device has a thread of its own
        self._passes: dict[int, Pass] = {}

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        record = self._recorded()
        for tensor in self._arguments.tensors:
            record.add_input(tensor)
        if self._options.preserve_rng_state:
            self._random = states_of([tensor for tensor in self._arguments.tensors if not tensor.is_cpu])
            self._host_randomness = HostRandomness()
        packer = _Packer(self)
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(packer.pack, _unpack),
                RecordingMode(record),
            ):
                result = self._function(*args, **kwargs)
        finally:
            packer.frame = None  # autograd keeps the hooks as long as the graph
        with torch.no_grad():
            self._finish(record)
        return result

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps in place of a residual."""
        record = self._record
        if record is None:
            return Kept(tensor, self.name)
        value = record.current(tensor)
        if value is None:
            return Kept(tensor, self.name)
        origin = value.origin
        if origin is _OUTSIDE:
            return Kept(tensor, self.name)
        if origin is _INPUT:
            from_input = FromInput(self, value, tensor)
            self._from_inputs.append(weakref.ref(from_input))
            return from_input
        if value.is_empty:
            record.runs_everything = True  # filled by a kernel that no mode sees
        if value.kept is not None:
            self._swap_out(record, value)
            return FromKept(value.kept, tensor, record.ops[value.op].place(), self._swap.arrival(value.device))
        recomputed = Recomputed(self, value, tensor)
        num_writes = recomputed.version - value.made_version
        if num_writes > value.num_writes:
            value.num_writes = num_writes
        self._recomputed.append(weakref.ref(recomputed))
        return recomputed

    def _swap_out(self, record: Record, value: Value) -> None:
        """Something needs a value that a policy wants swapped: let it leave now."""
        if type(value.kept) is Swappable:
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                swapped = self._swap.swap(value.kept, value.num_bytes, record.ops[value.op].place())
            if swapped is not None:
                value.kept = swapped

    def _finish(self, record: Record) -> None:
        """The forward is over: keep what backward can ask for, and nothing else."""
        self._note_host_randomness()
        with torch._C._DisableTorchDispatch():  # nothing of this is an op of a region around this one
            for op in record.ops:
                for value in op.makes:
                    # Also one that is swapped: it may have been written over while it was copied. Residuals have handles of their own.
                    if value.kept is not None and not record.is_current(value):
                        value.kept = None  # written over since
            recomputed = self._to_recompute(record)
            if recomputed and (self._has_hooks() or self._is_compiled()):
                # Who hooks into the modules gets real tensors in the second run, too; to compiled code a placeholder is another type
                # than that it was compiled for.
                record.runs_everything = True
            self._plan = self._plan_replay(record, {each.value for each in recomputed})
            self._num_planned = len(recomputed)
            slots = self._keep_for_replay(record)
            self._note_checksums(recomputed)
        needed = self._plan.takes
        if self._from_inputs:
            needed |= {each.value for each in _living(self._from_inputs)}
        slots = self._pack_inputs(record, needed) + slots
        if recomputed:
            self._swap.expect(slots)
        for each in recomputed:
            each.let_go()
        if not recomputed:
            self._record = None
        elif record.has_news() or not self._known.names(*self._named):
            proof = _Proof() if record.has_news() else self._known.proof
            _known[self._identity] = _Known(*self._named, known_ops(record.ops), proof)

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
            each.keep(record.ops[each.value.op].place())
            each.let_go()
        self._recomputed = refs
        return recomputed

    def _has_hooks(self) -> bool:
        module = None if self._module is None else self._module()
        if module is None:
            return False
        # The region's module itself may be called with hooks around it: those inside its forward matter.
        for each in modules_in(module):
            attributes = each.__dict__
            before, after = attributes.get("_forward_pre_hooks"), attributes.get("_forward_hooks")
            if not before and not after:
                continue
            # Those of tensor parallel and of FSDP2 redistribute and gather: they do not look.
            if any(
                not (getattr(hook, "__module__", None) or "").startswith("torch.distributed.")
                for hook in (*(before or {}).values(), *(after or {}).values())
            ):
                return True
        return False

    def _is_compiled(self) -> bool:
        """Whether code in the region was made by `torch.compile`, whatever the backend."""
        if self._surroundings.is_compiling:
            return True
        module = None if self._module is None else self._module()
        return module is not None and any(
            type(each).__name__ == "OptimizedModule" or getattr(each, "_compiled_call_impl", None) is not None
            for each in modules_in(module)
        )

    def _note_host_randomness(self) -> None:
        if self._host_randomness is not None:
            self._host_randomness.note_use()
            if not self._host_randomness.was_used:
                self._host_randomness = None

    def _plan_replay(self, record: Record, wanted: set[Value]) -> Any:
        ReplayPlan, plan_replay, _ = _core()  # noqa: N806 - a class
        if record.runs_everything and wanted:
            return ReplayPlan(*record.everything())
        return plan_replay(record.ops, wanted, is_available, stops=self._options.early_stop)

    def _keep_for_replay(self, record: Record) -> list[Any]:
        """Keep what replay takes, and drop the rest; the slots of what is swapped, in the order of asking."""
        takes = self._plan.takes
        slots: list[Any] = []
        kept = [value for op in record.ops for value in op.makes if value.kept is not None]
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
        return not self._is_proven() or any(each.key == value.key for each in self._plan.takes if each.op >= 0)

    def _is_proven(self) -> bool:
        """Whether nothing in the region reads what no op needs. Functions may do something else each time; modules rarely do."""
        return self._module is not None and self._identity in _leaves_out

    def _note_checksums(self, recomputed: list[Recomputed]) -> None:
        if recomputed and _core()[2](self._key):
            for each in recomputed:
                if each.value not in self._checksums and each.held is not None:
                    self._checksums[each.value] = checksum(_whole(each.held, each.value))

    def _pack_inputs(self, record: Record, needed: set[Value]) -> list[Any]:
        """Give the inputs that backward needs to the hooks around this region; without any, keep them.

        The slots of those that are swapped and that replay begins with.
        """
        arguments = self._arguments
        input_slots: list[Any] = []
        pack = _Hooks.around()
        if self._options.swap_inputs:
            module = None if self._module is None else self._module()
            pack = TensorSwap(module, self.name, self._swap.place).pack
        for value, tensor, is_direct in zip(record.inputs, arguments.tensors, arguments.is_direct, strict=True):
            unpack = None
            # One that was written in the region is either not needed, or a copy of what it was is kept in its value.
            may_be_read = len(self._recomputed) > 0 and (is_direct or not self._is_proven())
            if value is None or (value.kept is None and record.is_current(value) and (value in needed or may_be_read)):
                packed = pack(tensor) if is_direct and pack is not None else Kept(tensor, self.name)
                unpack = packed.tensor
                slot = getattr(packed, "slot", None)
                if slot is not None and value is not None and value in self._plan.takes:
                    input_slots.append(slot)
            view = View.of(tensor) if is_plain(tensor) else None
            num_bytes = 0 if value is None else value.num_bytes
            self._inputs.append(_Input(value, view, num_bytes, tensor.requires_grad, tensor.is_leaf, unpack))
        arguments.forget_tensors()
        return input_slots

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
                with shown(f"recompute {self.name}"):
                    self._replay(current)
            tensor = current.take(value)
            if number == _NO_PASS:
                self.end_pass(number)
        if tensor is None:
            raise changed_in_place(self.where(residual.value))
        return tensor

    def input_tensor(self, value: Value) -> torch.Tensor:
        """An input, laid out as it was."""
        if not self._inputs:  # the forward still runs, and somebody runs backward inside it
            return next(
                aliased(tensor)
                for known, tensor in zip(self._recorded().inputs, self._arguments.tensors, strict=True)
                if known is value
            )
        number = torch._C._current_graph_task_id()
        with self._lock:
            index = self._input_of(value)
            if index is None:  # an op of the region wrote it after it was saved
                raise changed_in_place(f"an input of {self.name}")
            current = self._pass(number)
            tensor = self._input_tensor(index, current)
            current.gave_input(index)
            if number == _NO_PASS:
                self.end_pass(number)
        return aliased(tensor)

    def where(self, value: Value) -> str:
        record = self._record
        return self.name if record is None or value.op < 0 else str(record.ops[value.op])

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
                torch.autograd.Variable._execution_engine.queue_callback(_EndOfPass(self, number))
            current = self._passes[number] = Pass()
            asked = [self._input_of(each.value) for each in _living(self._from_inputs)]
            current.asking = Counter(index for index in asked if index is not None)
            current.will_replay = bool(_living(self._recomputed))
        return current

    def _input_of(self, value: Value) -> int | None:
        """Which argument has a value; None if it has another one since."""
        return next((i for i, each in enumerate(self._inputs) if each.value is value and each.unpack is not None), None)

    def _input_tensor(self, index: int, current: Pass) -> torch.Tensor:
        if index not in current.inputs:
            each = self._inputs[index]
            if each.unpack is None:
                raise StateError("An input of a region is needed that was not kept.", where=self.name)
            tensor = each.unpack()
            if each.view is not None and View.of(tensor) != each.view:
                tensor = _laid_out(tensor, each.view, each.num_bytes)  # hooks of others may give back another layout
            current.inputs[index] = tensor
        return current.inputs[index]

    def _replay(self, current: Pass) -> None:
        """Recompute every value that a living residual may ask for."""
        if self._surroundings.transform == "torch.func.vmap":
            raise self._transformed()
        record = self._recorded()
        recomputed = _living(self._recomputed)
        wanted = {each.value for each in recomputed}
        changed = [value for value in self._plan.takes if value.kept is not None and value.kept.is_changed()]
        for value in changed:
            value.kept = None
        if changed or len(recomputed) != self._num_planned:
            self._plan = self._plan_replay(record, wanted)
            self._num_planned = len(recomputed)
            for value in self._plan.takes:
                if not is_available(value):  # it was there when the forward ended
                    raise changed_in_place(self.where(value))
        found = self._run_recorded(record, current, wanted)
        if found is not None:
            current.put(found, set(), Counter(each.value for each in recomputed))
            return
        replay = None if record.runs_everything else self._try_to_leave_out(record, current, wanted)
        if replay is None:
            record.runs_everything = True
            replay = self._run_everything(record, current, wanted)
        self._check_found(record, replay, wanted)
        if self._checksums:
            self._check_values(replay)
        current.put(replay.found, replay.written_over(), Counter(each.value for each in recomputed))

    def _run_recorded(self, record: Record, current: Pass, wanted: set[Value]) -> dict[Value, torch.Tensor] | None:
        """Run the recorded ops without the function, if that is known to be the same; None if it is not."""
        runs = self._plan.runs
        if not self._may_run_recorded(record) or not can_run(record.ops[index] for index in runs):
            return None
        proof = self._known.proof
        if proof.has_unseen is None:
            proof.has_unseen = not self._shows_everything(record, current)
        if proof.has_unseen:
            return None
        try:
            # First of all: to get them may mean another replay, of the region around this one.
            inputs = {
                value: self._tensor_of_input(value, current)
                for value in self._plan.takes
                if value.kept is None and value.origin is _INPUT
            }
            sources = Sources(inputs, self._parameters)
            return run_recorded(
                record.ops, runs, wanted, sources.tensor, restores_random_state=self._options.preserve_rng_state
            )
        except NotAsRecordedError:
            return None

    def _may_run_recorded(self, record: Record) -> bool:
        options = self._options
        return (
            self._module is not None  # what a function does may depend on what it has closed over
            and options.early_stop
            and not options.debug
            and not record.runs_everything
            and not record.has_launches
            and not record.before_write
            and not record.views_that_communicate
            and not record.has_news()
            and not self._checksums
            and self._surroundings.is_ordinary()
            and (self._policy is None or getattr(self._policy, "is_pure", False))
            and all(each.view is not None and each.view.outer is None for each in self._inputs)
            and not has_sharded_modules()
        )

    def _shows_everything(self, record: Record, current: Pass) -> bool:
        """Whether all that the function does is in the record: it runs again with placeholders for all tensors, and nothing reads one.

        A kernel that no mode sees would, wherever it gets its memory from.
        """
        try:
            replay = self._run_again(record, current, (frozenset(), frozenset()), set(), early_stop=False)
        except (NeedsEverything, Exception) as reader:
            _logger.info("%s: the function runs again in backward, not its ops (%s)", self.name, reader)
            return False
        return replay.first_unknown is None and all(replay.has_met(op) for op in record.ops)

    def _tensor_of_input(self, value: Value, current: Pass) -> torch.Tensor:
        index = self._input_of(value)
        if index is None:
            raise NotAsRecordedError
        return self._input_tensor(index, current)

    def _try_to_leave_out(self, record: Record, current: Pass, wanted: set[Value]) -> Replay | None:
        """Run what is needed; None if something reads what was left out, as ops that PyTorch does not see may."""
        try:
            replay = self._run_again(record, current, self._plan, wanted)
        except NeedsEverything as reader:
            cause: object = reader
        except RuntimeError as error:
            if isinstance(error, StateError) or not any(text in str(error) for text in _PLACEHOLDER_READ):
                raise
            cause = error
        else:
            _leaves_out.add(self._identity)
            return replay
        _leaves_out.discard(self._identity)
        _logger.info("%s: what was left out is read after all (%s); every op is run again", self.name, cause)
        return None

    def _run_everything(self, record: Record, current: Pass, wanted: set[Value]) -> Replay:
        try:
            return self._run_again(record, current, record.everything(), wanted)
        except NeedsEverything as reader:
            raise StateError(
                "An input of a region is read that was not kept.",
                where=f"{self.name}, {reader}",
                do="Run the step again: from now on it is kept.",
            ) from None

    def _run_again(
        self, record: Record, current: Pass, plan: tuple[Any, Any], wanted: set[Value], early_stop: bool = True
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
        )
        generators = {state.generator for state in self._random}
        generators |= {op.state.generator for op in record.ops if op.state is not None}
        # First of all: to get them may mean another replay, of the region around this one.
        with torch.enable_grad():
            args, kwargs = self._arguments.rebuild(lambda index: self._replayed_input(index, replay, current))
        # Who runs backward inside the region needs the residuals of the replay, too; nobody else does.
        pack = aliased if record.runs_everything else _forget
        replay.attributes = Attributes(None if self._module is None else self._module())
        if replay.has_placeholders:
            replay.attributes.remember()
        with (
            replaying(),
            set_back(generators),
            _NOTHING if self._host_randomness is None else self._host_randomness.again(),
            replay.attributes,
            self._parameters.again(),
            self._surroundings.again(),  # last: it may turn the compiler on for what is called from here
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, _unpack_kept),
        ):
            for state in self._random:
                state.restore()
            try:
                with ReplayMode(replay), _no_torch_script(self.name):
                    self._function(*args, **kwargs)
            except AllFound:
                pass
        return replay

    def _replayed_input(self, index: int, replay: Replay, current: Pass) -> torch.Tensor:
        each = self._inputs[index]
        if each.view is None or each.value is None:
            tensor = aliased(self._input_tensor(index, current))
        else:
            tensor = replay.input_tensor(each.value, each.view, lambda: self._input_tensor(index, current))
        tensor.requires_grad_(each.requires_grad)
        if each.is_leaf:
            return tensor
        # A leaf would be treated differently: autocast remembers leaves it has cast, and they cannot be written.
        with torch._C._DisableTorchDispatch():
            return _no_leaf(tensor)

    def _recorded(self) -> Record:
        if self._record is None:
            raise StateError("A region has forgotten its ops.", where=self.name)
        return self._record

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_found(self, record: Record, replay: Replay, wanted: set[Value]) -> None:
        missing = min((value.op for value in wanted if value not in replay.found), default=None)
        if missing is None:
            return
        if self._surroundings.transform is not None:
            raise self._transformed()
        first = replay.first_missing or record.ops[missing]
        listing = " `debug=True` lists the ops."
        if self._options.debug:
            lines = [f"  {'found  ' if replay.has_met(op) else 'missing'} {op}" for op in record.ops]
            listing = "\n".join(["", "Ops of the forward, and whether recomputation ran them:", *lines])
        raise StateError(
            "Recomputation did not do what forward did.",
            expected=str(first),
            got="the end of the function" if replay.first_unknown is None else f"{replay.first_unknown} instead",
            where=self.name,
            do="Let the function take the same way each time, or let the policy save what decides about it." + listing,
        )

    def _transformed(self) -> StateError:
        return StateError(
            "What a region did inside of a transform cannot be recomputed outside of it.",
            expected="a plain call",
            got=f"{self._surroundings.transform} around it",
            where=self.name,
            do="Let a policy save or swap all of this region, or call it without the region there.",
        )

    def _check_values(self, replay: Replay) -> None:
        values = sorted((value for value in self._checksums if value in replay.found), key=lambda value: value.op)
        found = [checksum(_whole(replay.found[value], value)) for value in values]
        index = find_difference([self._checksums[value] for value in values], found)
        if index is not None:
            raise StateError(
                "Recomputation gave other values than forward.",
                expected="the same bits",
                got="others",
                where=self.where(values[index]),
                do="Let the policy save this op, or the op before it that does not give the same result twice.",
            )


class _Packer:
    """The pack hook. It forgets the frame when the forward is over: autograd keeps hooks as long as the graph."""

    __slots__ = ("frame",)

    def __init__(self, frame: Frame) -> None:
        self.frame: Frame | None = frame

    def pack(self, tensor: torch.Tensor) -> Any:
        frame = self.frame
        # What a subclass is made of is its own business.
        if frame is None or not ((type(tensor) is _Tensor and tensor.layout is _strided) or is_plain(tensor)):
            return Kept(tensor, "region" if frame is None else frame.name)
        return frame.pack(tensor)


def _unpack(packed: Any) -> torch.Tensor:
    check_not_traced("region")
    tensor: torch.Tensor = packed.tensor()
    return tensor


def _forget(tensor: torch.Tensor) -> None:
    """The graph of a replay is never used: it need not hold anything."""


def _unpack_kept(packed: torch.Tensor | None) -> torch.Tensor:
    if packed is None:
        raise NeedsEverything("a backward inside the region")
    return packed


def _no_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor as the result of something, and no view."""
    if type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided:
        # To autograd this is an op like any other, and it is many times faster than a function of our own.
        result: torch.Tensor = _unsafe_view(tensor, tensor.size())
        if result.stride() == tensor.stride() and View.of(result) == View.of(tensor):
            return result
    made: torch.Tensor = _NoLeaf.apply(tensor)
    return made


class _NoLeaf(torch.autograd.Function):
    """The same tensor as the result of something."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        if is_placeholder(tensor):
            return another_placeholder(tensor)
        if not is_plain(tensor):
            return tensor.view_as(tensor)
        return View.of(tensor).on(local_tensor(tensor).untyped_storage(), tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _EndOfPass:
    """Called by autograd when a backward is over."""

    def __init__(self, frame: Frame, number: int) -> None:
        self._frame = weakref.ref(frame)
        self._number = number

    def __call__(self) -> None:
        frame = self._frame()
        if frame is not None:
            frame.end_pass(self._number)


class _Hooks:
    """A tensor as the saved-tensor hooks around a region have packed it."""

    def __init__(self, unpack: Callable[[Any], torch.Tensor], packed: Any) -> None:
        self._unpack = unpack
        self._packed = packed

    def tensor(self) -> torch.Tensor:
        return self._unpack(self._packed)

    @staticmethod
    def around() -> Callable[[torch.Tensor], Any] | None:
        found = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if found is None:
            return None
        pack, unpack = found
        return lambda tensor: _Hooks(unpack, pack(tensor))


@functools.cache
def _core() -> Any:
    """What a region needs of the core; an import costs in each call."""
    from hyper_parallel.core.activation_checkpoint.replay_plan import ReplayPlan, plan_replay
    from hyper_parallel.core.activation_checkpoint.value_check import is_due

    return ReplayPlan, plan_replay, is_due


@contextlib.contextmanager
def _no_torch_script(where: str) -> Iterator[None]:
    """TorchScript turns what ends a replay, and what starts it over, into an error of its own; and it runs other ops the second time."""
    try:
        yield
    except RuntimeError as error:
        if "TorchScript interpreter" not in str(error):
            raise
        raise StateError(
            "TorchScript code in a region cannot be recomputed.",
            where=where,
            do="Put the region around the module it was made of, or let a policy save or swap all of it.",
        ) from None


def _living(refs: list[Any]) -> list[Any]:
    return [each for ref in refs if (each := ref()) is not None]


def _whole(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    whole = View(torch.uint8, torch.Size([value.num_bytes]), (1,), 0, False, False)
    return whole.on(local_tensor(tensor).untyped_storage(), tensor.device)


def _laid_out(tensor: torch.Tensor, view: View, num_bytes: int) -> torch.Tensor:
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        storage = torch.empty(num_bytes, dtype=torch.uint8, device=tensor.device).untyped_storage()
        laid_out = view.on(storage, tensor.device)
        local_tensor(laid_out).copy_(local_tensor(tensor))
    return laid_out


def _bare(function: Any) -> Any:
    """What a functools.partial calls; every other function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _module_of(function: Any) -> nn.Module | None:
    function = _bare(function)
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _identity(function: Any, module: nn.Module | None) -> Any:
    """What is the same in the next step: the module, or the code of a function that may be made anew each time."""
    if module is not None:
        return module
    function = _bare(function)
    return getattr(getattr(function, "__func__", function), "__code__", type(function))


def _name_of(function: Any, module: nn.Module | None, paths: ModulePaths | None) -> str:
    if module is not None:
        return ("" if paths is None else paths.name(module)) or type(module).__name__
    return getattr(function, "__qualname__", None) or type(function).__name__
