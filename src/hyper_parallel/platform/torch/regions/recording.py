"""The forward of a region: every op is noted with the values it reads and makes, and the policy is asked about each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.core.activation_checkpoint.policy import ByOutput, CheckpointPolicy
from hyper_parallel.core.regions.module_calls import ModuleCall, ModuleCalls
from hyper_parallel.core.regions.policy import NO_ANSWERS, Answer, PlannedAnswer, PolicyContext, RegionPolicy
from hyper_parallel.platform.torch.regions.call_template import CallTemplate
from hyper_parallel.platform.torch.regions.compiled_code import (
    check_no_cuda_graph,
    check_not_in_compiled_code,
    cuda_graph_now,
)
from hyper_parallel.platform.torch.regions.local_parts import (
    PLAIN_TYPES,
    is_distributed,
    is_plain,
    local_tensor,
    storage_key,
    version_of,
)
from hyper_parallel.platform.torch.regions.module_paths import (
    CALL,
    ModulePaths,
    has_sharded_modules,
    is_sharding,
)
from hyper_parallel.platform.torch.regions.op_traits import CAST, TRAITS, OpTraits, traits_of, trimmed
from hyper_parallel.platform.torch.regions.placeholders import View
from hyper_parallel.platform.torch.regions.random_state import GeneratorState, drawing, generator_of
from hyper_parallel.platform.torch.regions.saved_values import Saved, Swappable, aliased, copied
from hyper_parallel.platform.torch.regions.surroundings import call_uncompiled
from hyper_parallel.platform.torch.regions.values import (
    Argument,
    Arguments,
    Constant,
    KnownOp,
    Origin,
    RecordedOp,
    Value,
    WeakStorages,
    is_available,
    sort,
)

_MADE, _INPUT, _OUTSIDE, _WRITTEN = Origin.MADE, Origin.INPUT, Origin.OUTSIDE, Origin.WRITTEN
_Tensor, _Parameter, _strided = torch.Tensor, torch.nn.Parameter, torch.strided
# The views that were met without a policy, by the op's id (TRAITS has the op, so that no other gets it), and what runs them.
_VIEWS: dict[int, Callable[..., Any]] = {}
_NOBODY_WAITS = contextlib.nullcontext()

_CUDNN_RNN = torch.ops.aten._cudnn_rnn.default


class Record:
    """The ops of one call, and the value that each storage has at the moment.

    Invariant: `_current` has the value of every storage that an op of the region has read or written; `_storages` has weak references to
    them, so that a key is never used for two.
    """

    def __init__(
        self,
        policy: RegionPolicy | None,
        paths: ModulePaths | None,
        keeps_random_state: bool,
        keeps_writes: bool = True,
        known: list[KnownOp | None] | None = None,
        has_names: bool = False,
        choices: list[Answer] | None = None,
    ) -> None:
        self.ops: list[RecordedOp] = []
        self.inputs: list[Value | None] = []
        self.kept: list[Value] = []  # what ops of the region made, and somebody wanted kept
        # storages of others that an op of the region wrote -> the value before the first write
        self.before_write: dict[int, Value] = {}
        # operators that are views of ordinary tensors, and here had to communicate to give a DTensor its shape
        self.views_that_communicate: set[Any] = set()
        # what no record can follow: tensors without a storage, kernels that PyTorch does not dispatch
        self.runs_everything = False
        # whether something other than ops reads or writes what ops have made: then they make it again, also what is kept
        self.is_touched = False
        # whether an op's result comes later than the op returns: replay must not end before who waits for it has run
        self.has_launches = False
        self._policy = policy
        # A plan is asked directly: its answers need no check, and nothing in it can be compiled.
        self._planned: PlannedAnswer | None = None if policy is None else policy.planned_answer
        # What a policy answers about every call of an op, by the op's id: it need not be asked about each.
        self._answers: dict[int, CheckpointPolicy] = NO_ANSWERS if policy is None else policy.answers
        # Views about which there is nothing to do but to run them, by the op's id.
        self.passes: dict[int, Callable[..., Any]] = _VIEWS if policy is None else policy.passes
        self.paths = paths
        self._calls = ModuleCalls(paths, CALL)
        self._known = known or []  # what the ops of the last call looked like
        self._num_known = len(self._known)
        self._has_news = False
        self._has_names = has_names  # whether no policy asks for the module of an op: that of `known` will do
        self._choices = choices  # what a plan said about the ops of `known`: nor is it asked while ops look like those
        self._keeps_random_state = keeps_random_state
        self._keeps_writes = keeps_writes  # whether a policy may keep what an in-place op wrote
        self.has_empty = False  # whether an op gave memory without contents
        self._current: dict[int, Value] = {}
        self._storages = WeakStorages()

    # -- values -------------------------------------------------------------------------------------------------------

    def add_input(self, tensor: torch.Tensor) -> Value | None:
        key = storage_key(tensor)
        value = None if key is None else self._current.get(key)
        if value is None and key is not None:
            value = self._new_value(_INPUT, -1, tensor)
            value.seen_version = version_of(tensor)
        self.inputs.append(value)
        return value

    def current(self, tensor: torch.Tensor) -> Value | None:
        """The value a tensor's storage has now; None if no op of the region has met it."""
        if type(tensor) not in PLAIN_TYPES:
            tensor = local_tensor(tensor)
        try:
            return self._current.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # no storage of its own
            return None

    def current_at(self, key: int) -> Value | None:
        """The same, by the storage's key."""
        return self._current.get(key)

    def made(self) -> list[Value]:
        """Every value that an op of the region has made."""
        return [value for op in self.ops for value in op.makes]

    def everything(self) -> tuple[frozenset[int], frozenset[Value]]:
        """A plan that leaves nothing out but what is kept: the ops to run, and the values to take."""
        values = {value for op in self.ops for value in (*op.reads, *op.makes)} | set(self.inputs)
        takes = {value for value in values if value is not None and is_available(value)}
        if self.is_touched:
            takes = {value for value in takes if value.op < 0 or self.ops[value.op].func is _CUDNN_RNN}
        runs = {op.index for op in self.ops if not op.makes or not takes.issuperset(op.makes)}
        return frozenset(runs), frozenset(takes)

    def has_news(self) -> bool:
        """Whether its ops do not look like those of the last call."""
        return self._has_news or len(self.ops) != self._num_known

    def is_current(self, value: Value) -> bool:
        return self._current.get(value.key) is value

    def _new_value(self, origin: Origin, op: int, tensor: torch.Tensor) -> Value:
        local = tensor if type(tensor) in PLAIN_TYPES else local_tensor(tensor)
        storage = local.untyped_storage()
        key = self._storages.add(storage)
        value = self._current[key] = Value(origin, op, key, storage.nbytes(), local.device, version_of(local))
        return value

    # -- ops ----------------------------------------------------------------------------------------------------------

    def run(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and note it."""
        if traits.is_view:
            return self._run_view(traits, args, kwargs)
        if traits.defaults:
            args = trimmed(args, traits.defaults)
        if not traits.is_common:
            return self._run_special(traits, args, kwargs)
        func = traits.func
        tensors: list[torch.Tensor] = []
        rest: list[Any] = []
        sort(args, kwargs, tensors, rest)
        ops = self.ops
        index = len(ops)
        known = self._known[index] if index < self._num_known else None
        if known is not None and known.func is func and known.has(rest):
            # The innermost module is looked for only where a policy may want to know it: for any op, as calls are counted.
            where = known.where
            if not self._has_names and (found := self._calls.innermost(3).count(func)) != where:
                where = found
            op = RecordedOp(index, func, self._read(tensors), known.rest, where)
            op.known = known
        else:
            self._note_news()
            op = RecordedOp(index, func, self._read(tensors), rest, self._calls.innermost(3).count(func))
            op.template = CallTemplate(args, kwargs)
        if self.has_empty:
            self._look_for_unseen(op.reads, [])
        if traits.is_random and self._keeps_random_state:
            with drawing:
                op.state = self._state_before(args, kwargs, tensors)
                result = traits.call(*args, **kwargs)
        else:
            result = traits.call(*args, **kwargs)
        op.outputs = (
            self._note_tensor(op, result, tensors)
            if type(result) is _Tensor
            else self._note_outputs(op, result, tensors)
        )
        ops.append(op)
        if self._choices is not None:
            op.policy = answer = self._choices[index]
            if answer.keeps:
                self._keep_results(op, answer, result, tensors)
        elif self._policy is not None:
            known_answer = self._answers.get(id(func))
            if known_answer is None or known_answer.keeps:
                self._ask(self._policy, op, result, tensors, args, kwargs)
        return result

    def _note_news(self) -> None:
        """From here on the ops do not look like those of the last call: what was said about those says nothing about these."""
        self._has_news = True
        if self._choices is not None:
            self._choices, self._has_names = None, False
            self._calls.catch_up((op.func, op.where) for op in self.ops)

    def _run_special(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that writes, or does something else that most do not."""
        func = traits.func
        arguments = Arguments(args, kwargs, traits.writes)
        versions, graph_before = None, None
        if not traits.has_schema:
            graph_before = cuda_graph_now()
            versions = [version_of(tensor) for tensor in arguments.tensors]
            self.runs_everything = True  # compiled code looks at the types of what it is given: no placeholders
        with drawing if traits.is_random and self._keeps_random_state else _NOBODY_WAITS:
            state = self._state_before(args, kwargs, arguments.tensors) if traits.is_random else None
            op = self._new_op(func, arguments, args, kwargs, state)
            if traits.is_out:
                check_not_in_compiled_code(func, str(op.place()))
            if arguments.written:
                self._copy_before_write(arguments)
            result = traits.call(*args, **kwargs)
        if versions is not None:  # nobody said what it writes
            check_no_cuda_graph(graph_before, "A region", str(op.place()))
            changed = [i for i, t in enumerate(arguments.tensors) if version_of(t) != versions[i]]
            arguments.written.extend(changed)
        if traits.must_run:
            op.must_run = True
        self.has_launches |= traits.is_launch
        if arguments.written:
            self._note_writes(op, arguments)
        op.outputs = self._note_outputs(op, result, arguments.tensors)
        if func is _CUDNN_RNN and isinstance(args[-1], torch.Tensor):
            self._keep_made(op, result)
        if traits.is_empty:
            self._note_empty(op)
        if func is CAST and isinstance(args[0], torch.nn.Parameter):
            for value in op.makes:
                value.is_weight_cast = True
        self.ops.append(op)
        if self._policy is not None and not traits.is_launch:  # what it will write is not there to be kept yet
            self._ask(self._policy, op, result, arguments.tensors, args, kwargs)
        return result

    def _keep_made(self, op: RecordedOp, result: tuple[torch.Tensor, ...]) -> None:
        """Keep all results, whatever a policy says: cuDNN has a random state of its own for dropout, which nobody can set back."""
        for tensor in result:
            value = self.current(tensor)
            if value is not None and value.op == op.index and value.kept is None:
                self._hold(value, Saved(aliased(tensor)))

    def _new_op(
        self,
        func: Any,
        arguments: Arguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: GeneratorState | None = None,
    ) -> RecordedOp:
        reads = self._read(arguments.tensors)
        if self.has_empty:
            self._look_for_unseen(reads, arguments.written)
        index = len(self.ops)
        known = self._known[index] if index < self._num_known else None
        if known is not None and known.func is func and known.has(arguments.rest):
            where = known.where
            if not self._has_names and (found := self._calls.innermost(4).count(func)) != where:
                where = found
            op = RecordedOp(index, func, reads, known.rest, where, state)
            op.known = known
            return op
        self._note_news()
        op = RecordedOp(index, func, reads, arguments.rest, self._calls.innermost(4).count(func), state)
        op.template = CallTemplate(args, kwargs)
        return op

    def _read(self, tensors: list[torch.Tensor]) -> list[Value | None]:
        """The values that an op reads."""
        current = self._current
        reads: list[Value | None] = []
        for tensor in tensors:
            try:
                if type(tensor) not in PLAIN_TYPES:
                    tensor = local_tensor(tensor)
                value = current.get(tensor.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError):  # no storage of its own
                reads.append(None)
                continue
            if value is None:
                value = self._new_value(_OUTSIDE, -1, tensor)
                value.seen_version = value.made_version
                if type(tensor) is not _Parameter:
                    value.alias = aliased(tensor)
            else:
                try:
                    value.seen_version = tensor._version
                except RuntimeError:  # an inference tensor
                    value.seen_version = -1
            reads.append(value)
        return reads

    def _note_empty(self, op: RecordedOp) -> None:
        for value in op.makes:
            if value.num_bytes > 0:
                value.is_empty = self.has_empty = True

    def _look_for_unseen(self, reads: list[Value | None], written: list[int]) -> None:
        """Memory that no op has written is read: a kernel has written it that no mode sees, and that must run again."""
        for position, value in enumerate(reads):
            if value is not None and value.is_empty and position not in written:
                self.runs_everything = True

    def _run_view(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A view is no value. A policy that saves it saves what it looks at."""
        result = traits.call(*args, **kwargs)
        return self.noted_view(traits, result, args, kwargs)

    def noted_view(self, traits: OpTraits, result: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(result) is not _Tensor and _has_communicated(result, args):
            arguments = Arguments(args, kwargs, traits.writes)
            op = self._new_op(traits.func, arguments, args, kwargs)
            op.must_run = True
            self.views_that_communicate.add(traits.func)
            op.outputs = self._note_outputs(op, result, arguments.tensors)
            self.ops.append(op)
            if self._policy is not None:
                self._ask(self._policy, op, result, arguments.tensors, args, kwargs)
            return result
        if self._policy is not None:
            answer = self._answers.get(id(traits.func))
            if answer is None:
                where = self._calls.innermost(4)
                answer = _answer_about_view(self._policy, traits.func, where, result, args, kwargs)
            elif not answer.keeps:
                self.passes[id(traits.func)] = traits.call
            if answer.keeps:
                # Of what it looks at, not of the view: that gets its version counter only when this mode is done.
                source = next((each for each in args if isinstance(each, torch.Tensor)), None)
                value = None if source is None else self.current(source)
                if source is not None and value is not None and value.origin is _MADE:
                    self._keep(value, source, answer)
        else:
            _VIEWS[id(traits.func)] = traits.call
        return result

    def _state_before(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> GeneratorState | None:
        if not self._keeps_random_state:
            return None
        drawing.is_used_by_regions = True
        generator = generator_of(args, kwargs, tensors)
        return None if generator is None else GeneratorState(generator)

    def _copy_before_write(self, arguments: Arguments) -> None:
        """Keep what a storage of somebody else's had in it: replay may have to begin with that."""
        for position in arguments.written:
            tensor = arguments.tensors[position]
            value = self.current(tensor)
            if value is None or value.origin not in (_INPUT, _OUTSIDE) or not is_plain(tensor):
                continue
            value.kept = Saved(copied(tensor))
            value.kept.seal()
            value.is_written = True
            self.before_write[value.key] = value

    def _note_writes(self, op: RecordedOp, arguments: Arguments) -> None:
        targets = []
        for position in arguments.written:
            tensor = arguments.tensors[position]
            key = storage_key(tensor)
            if key is None:
                op.must_run = self.runs_everything = True
                continue
            before = self._current.get(key)
            is_ours = before is None or before.origin is _MADE
            value = self._new_value(_MADE if is_ours else _WRITTEN, op.index, tensor)
            if not is_ours and is_plain(tensor):
                self._hold(value, Saved(aliased(tensor)))  # the owner holds this memory anyway
            targets.append((position, value))
        op.targets = tuple(targets)
        op.makes = tuple(value for _, value in targets)

    def _note_outputs(self, op: RecordedOp, result: object, tensors: list[torch.Tensor]) -> Any:
        if isinstance(result, torch.Tensor):
            found = self._note_tensor(op, result, tensors)
            if type(found) is Value:
                op.makes += (found,)
            return found
        if isinstance(result, (list, tuple)):
            return type(result)([self._note_outputs(op, each, tensors) for each in result])
        # What always runs answers anew: the handle of a collective is of that one collective.
        return Constant(None if op.must_run else result)

    def _note_tensor(self, op: RecordedOp, tensor: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        if type(tensor) is not _Tensor or tensor.layout is not _strided:
            return self._note_special(op, tensor, tensors)
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        for read in op.reads:
            if read is not None and read.key == key:
                return self._note_special(op, tensor, tensors)
        self._storages.addresses.append(storage._weak_ref())
        try:
            version = tensor._version
        except RuntimeError:  # an inference tensor
            version = -1
        value = self._current[key] = Value(_MADE, op.index, key, storage.nbytes(), tensor.device, version)
        view = None if op.known is None else op.known.view
        value.view = View.of(tensor) if view is None else view.or_own(tensor)
        if tensor.is_cpu:
            for argument in tensors:
                if not argument.is_cpu:
                    # Brought to the host to be looked at: kept there, so that the device need not be waited for again.
                    self._hold(value, Saved(aliased(tensor)))
                    break
        return value

    def _note_special(self, op: RecordedOp, tensor: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        """A result that is one of the arguments, an alias of one, or no ordinary tensor."""
        for position, argument in enumerate(tensors):
            if argument is tensor:
                return Argument(position)
        key = storage_key(tensor)
        if key is None or not is_plain(tensor):
            op.must_run = True
            if key is None:
                self.runs_everything = True
                return Constant(None)
        if any(value is not None and value.key == key for value in op.reads):
            op.must_run = True  # an alias that the operator's schema does not tell about
            return Constant(None)
        value = self._new_value(_MADE, op.index, tensor)
        value.view = View.of(tensor if is_plain(tensor) else local_tensor(tensor))
        if tensor.is_cpu and not all(argument.is_cpu for argument in tensors):
            self._hold(value, Saved(aliased(tensor)))  # see `_note_tensor`
        return value

    # -- policy -------------------------------------------------------------------------------------------------------

    def _ask(
        self,
        policy: RegionPolicy,
        op: RecordedOp,
        result: object,
        tensors: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        answer: Answer | None = self._answers.get(id(op.func)) if self._choices is None else self._choices[op.index]
        if answer is None and self._planned is not None:
            module = op.where.module if self.paths is None else self.paths.below(op.where.module)
            answer = self._planned(op.func, module, op.where, result)
        elif answer is None:
            context = PolicyContext(False, op.module, op.occurrence, result, op.call, op.occurrence_in_call)
            answer = ask(policy, context, op.func, args, kwargs)
        op.policy = answer
        if answer.keeps:
            self._keep_results(op, answer, result, tensors)

    def _keep_results(self, op: RecordedOp, answer: Answer, result: object, tensors: list[torch.Tensor]) -> None:
        """Keep what an op gave, as its policy says."""
        if type(op.outputs) is Value and not op.targets and type(answer) is CheckpointPolicy:  # as most ops have
            self._keep(op.outputs, result, answer)
            return
        found: list[tuple[Value, torch.Tensor]] = []
        _pair(op.outputs, result, found)
        if op.targets and self._keeps_writes:
            found += [(value, tensors[position]) for position, value in op.targets]
        for value, tensor in found:
            own = answer.of_output(op.makes.index(value)) if isinstance(answer, ByOutput) else answer
            if own.keeps:
                self._keep(value, tensor, own)

    def _keep(self, value: Value, tensor: torch.Tensor, answer: CheckpointPolicy) -> None:
        if value.kept is not None or not is_plain(tensor):
            return
        if value.num_bytes == 0 and not is_distributed(tensor):  # other ranks may have more: all keep it, or none
            return
        if not answer.swaps:
            self._hold(value, Saved(aliased(tensor)))
        elif not value.is_weight_cast:
            self._hold(value, Swappable(aliased(tensor)))

    def _hold(self, value: Value, saved: Saved) -> None:
        value.kept = saved
        self.kept.append(value)


def ask(
    policy: RegionPolicy, context: PolicyContext, func: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CheckpointPolicy:
    """Ask a policy about an op. A function of the user's may run in it."""
    answer: CheckpointPolicy = call_uncompiled(policy.answer, context, func, args, kwargs)
    return answer


def _answer_about_view(
    policy: RegionPolicy, func: object, call: ModuleCall, result: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CheckpointPolicy:
    where = call.count(func)
    context = PolicyContext(False, call.name, where.occurrence, result, call.number, where.occurrence_in_call)
    return ask(policy, context, func, args, kwargs)


class RegionMode(TorchDispatchMode):
    """What the modes of both runs have in common."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._may_shard = has_sharded_modules()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch would put a wrapper around the handler that costs more than the handler. The compiler does not look into this
        # package anyway: see `compiled_code`.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code is one op


class RecordingMode(RegionMode):
    """Sees every op of a region's forward."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        record = self._record
        call = record.passes.get(id(func))
        if call is not None and not self._may_shard:
            result = call(*args, **kwargs) if kwargs else call(*args)
            if type(result) is _Tensor:  # as most views give
                return result
            return record.noted_view(TRAITS[id(func)], result, args, kwargs or {})
        traits = TRAITS.get(id(func)) or traits_of(func)
        if traits.is_invisible or (self._may_shard and is_sharding(2)):
            return traits.call(*args, **(kwargs or {}))
        return record.run(traits, args, kwargs or {})


def _has_communicated(result: object, args: tuple[Any, ...]) -> bool:
    """Whether a view of a DTensor is none: its shape needed other placements first."""
    first = result[0] if isinstance(result, (list, tuple)) and result else result
    return (
        isinstance(first, torch.Tensor)
        and is_distributed(first)
        and storage_key(first) not in [storage_key(each) for each in args if isinstance(each, torch.Tensor)]
    )


def _pair(outputs: Any, result: Any, found: list[tuple[Value, torch.Tensor]]) -> None:
    if isinstance(outputs, Value):
        found.append((outputs, result))
    elif isinstance(outputs, (list, tuple)) and not isinstance(outputs, (Argument, Constant)):
        for each, tensor in zip(outputs, result, strict=True):
            _pair(each, tensor, found)
