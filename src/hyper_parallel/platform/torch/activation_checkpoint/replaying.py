"""A region's function runs again: op by op the record says what to run, what to take, and what to leave out.

The rules are numbered in the README of core/activation_checkpoint; comments here name them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hyper_parallel._base.errors import StateError, describe
from hyper_parallel.platform.torch.activation_checkpoint.local_parts import local_tensor, storage_key, version_of
from hyper_parallel.platform.torch.activation_checkpoint.module_paths import is_sharding
from hyper_parallel.platform.torch.activation_checkpoint.placeholders import (
    NeedsEverything,
    View,
    is_placeholder,
    placeholder,
    view_of_placeholder,
)
from hyper_parallel.platform.torch.activation_checkpoint.recording import (
    INVISIBLE,
    PolicyContext,
    Record,
    RegionMode,
    aliased,
    ask,
    copied,
)
from hyper_parallel.platform.torch.activation_checkpoint.values import (
    Argument,
    Arguments,
    Constant,
    Fresh,
    Origin,
    RecordedOp,
    Value,
    replaced,
    same_rest,
    sort_arguments,
    traits_of,
)


class AllFound(BaseException):  # not an Exception: the function under replay may catch those
    """Every needed value was met: the rest of the function need not run (rule 6)."""


class Replay:
    """One run of the function.

    Fields:
        found: the wanted values met so far, as aliases
        _storages: storage of this run -> the forward's storage that it stands for; weak references keep the keys unique
        _states: storage of the forward -> the value it has at this point of the run
        _own: storages that ops of this run allocated, and may write
        _empty: storages of placeholders
        _elsewhere: values whose memory is not where Python's tensor says: writes into memory of others go to copies
    """

    def __init__(
        self,
        record: Record,
        runs: Collection[int],
        takes: Collection[Any],
        wanted: set[Value],
        policy: Any,
        *,
        check_outputs: bool,
        early_stop: bool,
        restores_random_state: bool,
    ) -> None:
        self.record = record
        self.found: dict[Value, torch.Tensor] = {}
        self.first_missing: RecordedOp | None = None
        self.first_unknown: str | None = None
        self._runs = runs
        self._takes = takes
        self._wanted = wanted
        self._policy = policy
        self._check_outputs = check_outputs
        self._early_stop = early_stop
        self._restores_random_state = restores_random_state
        self._storages: dict[int, int] = {}
        self._states: dict[int, Value] = dict(record.before_write)
        self._refs: list[StorageWeakRef] = []
        self._own: set[int] = set()
        self._empty: set[int] = set()
        self._elsewhere: dict[Value, torch.UntypedStorage] = {}
        self._versions: dict[Value, int] = {}
        self._input_storages: dict[Value, torch.UntypedStorage] = {}
        self._next = 0
        self._met = bytearray(len(record.ops))
        for value in record.before_write.values():
            if value in takes:
                self._elsewhere[value] = value.kept.memory()

    def has_met(self, op: RecordedOp) -> bool:
        return bool(self._met[op.index])

    def written_over(self) -> set[Value]:
        """Values that were found and that a later op of this run has changed in place, where plain autograd would notice."""
        # Fewer writes than in forward are no change: what counts them comes after the op, and the replay may have stopped there.
        return {value for value, tensor in self.found.items() if version_of(tensor) > self._versions[value]}

    # -- what the function is called with ------------------------------------------------------------------------------

    def input_tensor(self, value: Value | None, view: View, tensor: Callable[[], torch.Tensor]) -> torch.Tensor:
        """An argument: the tensor itself if an op of this run reads it, else a placeholder."""
        if value is None:
            return tensor()
        # Arguments that share a storage share it here, too: one may be written and the other read.
        known = self._input_storages.get(value)
        if value not in self._takes:
            made = placeholder(view, value.num_bytes, value.device, known)
            self._input_storages[value] = local_tensor(made).untyped_storage()
            self._empty.add(self._bind(made, value))
            return made
        storage = self._elsewhere.get(value, known)
        result = aliased(tensor()) if storage is None else view.on(storage, value.device)
        self._input_storages[value] = local_tensor(result).untyped_storage()
        self._bind(result, value)
        return result

    # -- ops ----------------------------------------------------------------------------------------------------------

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traits = traits_of(func)
        if traits.is_view and func not in self.record.views_that_communicate:
            return self._run_view(func, args, kwargs)
        arguments = sort_arguments(args, kwargs, traits)
        values = [self._value_of(tensor) for tensor in arguments.tensors]
        op = self._match(func, values, arguments)
        if op is None:
            if traits.is_view:
                return self._run_view(func, args, kwargs)
            return self._run_unknown(func, args, kwargs, arguments)
        if op.index in self._runs or op.must_run:
            result = self._run_again(op, args, kwargs, arguments)
        else:
            result = self._leave_out(op.outputs, arguments)
            for position, value in op.targets:
                self._rebind(arguments.tensors[position], value)
                if value in self._takes:
                    self._elsewhere[value] = value.kept.memory()
        self._ask_again(op, result, args, kwargs)
        self._stop_if_done()
        return result

    def _run_view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(is_placeholder(each) for each in args):
            return view_of_placeholder(func, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._note_met(self._value_of(tensor), tensor)
        self._stop_if_done()
        return result

    def _run_again(self, op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments) -> Any:
        by_id: dict[int, torch.Tensor] = {}
        for tensor, value in zip(arguments.tensors, op.reads, strict=True):
            self._check_unchanged(tensor, value, op)
            if value is not None and value in self._elsewhere:
                by_id[id(tensor)] = View.of(tensor).on(self._elsewhere[value], tensor.device)
            elif storage_key(tensor) in self._empty:
                raise NeedsEverything(str(op))
            elif value is not None and value.is_written:
                raise _gone(op, tensor)
        for position, value in op.targets:
            tensor = arguments.tensors[position]
            if storage_key(by_id.get(id(tensor), tensor)) not in self._own:
                # Written once already, in forward: what runs again writes into a copy.
                by_id[id(tensor)] = self._copied(by_id.get(id(tensor), tensor))
                self._elsewhere[value] = local_tensor(by_id[id(tensor)]).untyped_storage()
            elif id(tensor) in by_id or value.origin is Origin.WRITTEN:
                # The function may know the tensor from elsewhere, too, and read it there.
                self._elsewhere[value] = local_tensor(by_id.get(id(tensor), tensor)).untyped_storage()
        if op.state is not None and self._restores_random_state:
            op.state.restore()
        result = op.func(*replaced(args, by_id), **replaced(kwargs, by_id))
        for position, value in op.targets:
            tensor = arguments.tensors[position]
            self._rebind(tensor, value)
            self._collect(value, by_id.get(id(tensor), tensor))
        return self._note_outputs(op, op.outputs, result, arguments)

    def _note_outputs(self, op: RecordedOp, outputs: Any, result: Any, arguments: Arguments) -> Any:
        if isinstance(outputs, Fresh):
            if not isinstance(result, torch.Tensor):
                raise self._other_result(op, outputs, result)
            if self._check_outputs and not _looks_like(result, outputs.view):
                raise self._other_result(op, outputs, result)
            self._own.add(self._bind(result, outputs.value))
            self._collect(outputs.value, result)
            return result
        if isinstance(outputs, Argument):
            return arguments.tensors[outputs.position]
        if isinstance(outputs, Constant):
            return result if outputs.value is None else outputs.value
        if isinstance(outputs, (list, tuple)):
            if not isinstance(result, (list, tuple)) or len(result) != len(outputs):
                raise self._other_result(op, outputs, result)
            return type(result)(
                [self._note_outputs(op, each, got, arguments) for each, got in zip(outputs, result, strict=True)]
            )
        return result

    def _leave_out(self, outputs: Any, arguments: Arguments) -> Any:
        """The result of an op that does not run: taken (rule 2), or a placeholder (rule 3)."""
        if isinstance(outputs, Fresh):
            value, view = outputs
            if value in self._takes:
                taken = view.on(value.kept.memory(), value.device)
                self._bind(taken, value)
                return taken
            empty = placeholder(view, value.num_bytes, value.device)
            self._empty.add(self._bind(empty, value))
            return empty
        if isinstance(outputs, Argument):
            return arguments.tensors[outputs.position]
        if isinstance(outputs, Constant):
            return outputs.value  # rule 7
        return type(outputs)([self._leave_out(each, arguments) for each in outputs])

    def _run_unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments) -> Any:
        """An op that forward did not run with these values (rule 4)."""
        if self.first_unknown is None:
            self.first_unknown = str(func)
            self.first_missing = self._first_not_met()
        by_id: dict[int, torch.Tensor] = {}
        for position, tensor in enumerate(arguments.tensors):
            value = self._value_of(tensor)
            if value is not None and value in self._elsewhere:
                by_id[id(tensor)] = View.of(tensor).on(self._elsewhere[value], tensor.device)
            elif storage_key(tensor) in self._empty:
                raise NeedsEverything(str(func))
            if position in arguments.written:
                self._write_unknown(tensor, by_id)
        result = func(*replaced(args, by_id), **replaced(kwargs, by_id))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            key = storage_key(tensor) if isinstance(tensor, torch.Tensor) else None
            is_alias = key in self._storages or any(key == storage_key(each) for each in arguments.tensors)
            if key is not None and not is_alias:
                self._refs.append(StorageWeakRef(local_tensor(tensor).untyped_storage()))
                self._own.add(key)
        return result

    def _write_unknown(self, tensor: torch.Tensor, by_id: dict[int, torch.Tensor]) -> None:
        """Let an op that is not in the record write a tensor: into a copy, if the memory is not of this run."""
        key = storage_key(tensor)
        if key is None:
            return
        source = by_id.get(id(tensor), tensor)
        value = Value(Origin.MADE, -1, local_tensor(tensor).untyped_storage(), tensor.device)  # one that no op knows
        if storage_key(source) not in self._own:
            by_id[id(tensor)] = self._copied(source)
        if id(tensor) in by_id:
            self._elsewhere[value] = local_tensor(by_id[id(tensor)]).untyped_storage()
        self._rebind(tensor, value)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same look at a copy of the whole storage, which this run may write."""
        copy = copied(tensor)
        storage = local_tensor(copy).untyped_storage()
        self._refs.append(StorageWeakRef(storage))
        self._own.add(int(storage._cdata))
        return copy

    # -- which op it is -------------------------------------------------------------------------------------------------

    def _match(self, func: Any, values: list[Value | None], arguments: Arguments) -> RecordedOp | None:
        """The recorded op that this one is (rule 1)."""
        ops = self.record.ops
        if self._next < len(ops):
            op = ops[self._next]
            if self._is_same(op, func, values, arguments, in_order=True):
                self._next += 1
                self._met[op.index] = 1
                return op
        for op in ops:
            if not self._met[op.index] and self._is_same(op, func, values, arguments, in_order=False):
                if self.first_missing is None and op.index > self._next:
                    self.first_missing = ops[self._next]
                self._met[op.index] = 1
                self._next = op.index + 1
                return op
        # Once more what was met already: where forward had a result at hand (autocast's casts) and this run makes it again.
        for op in ops:
            is_repeatable = self._met[op.index] and op.state is None and not op.targets
            if is_repeatable and self._is_same(op, func, values, arguments, in_order=False):
                return op
        return None

    def _is_same(
        self, op: RecordedOp, func: Any, values: list[Value | None], arguments: Arguments, *, in_order: bool
    ) -> bool:
        if op.func is not func or len(op.reads) != len(values) or not same_rest(op.rest, arguments.rest):
            return False
        for recorded, value, tensor in zip(op.reads, values, arguments.tensors, strict=True):
            if recorded is value:
                continue
            # A tensor that the forward did not have: an index made from a list, a weight that autocast had cast before the region and casts
            # again. A parameter that the forward did not read stands for none of those it did.
            is_outside = recorded is not None and recorded.origin is Origin.OUTSIDE and value is None
            if not (in_order and is_outside and recorded is not None):
                return False
            if tensor.requires_grad and not (recorded.ref.expired() or storage_key(tensor) in self._own):
                return False
            if local_tensor(tensor).untyped_storage().nbytes() != recorded.num_bytes:
                return False
            self._bind(tensor, recorded)
        return True

    def _value_of(self, tensor: torch.Tensor) -> Value | None:
        key = storage_key(tensor)
        if key is None:
            return None
        # What the function knows from outside (a parameter, a buffer, a result that the module kept) stands for itself.
        value = self._states.get(self._storages.get(key, key))
        if value is None:
            value = self.record.current(tensor)
            if value is not None and value.origin is Origin.MADE:
                if version_of(tensor) != value.seen_version:
                    return None
                self._note_met(value, tensor)
        return value

    def _note_met(self, value: Value | None, tensor: torch.Tensor) -> None:
        if value is not None and value in self._wanted and value not in self.found:
            key = storage_key(tensor)
            if key not in self._empty and value not in self._elsewhere:
                self._collect(value, tensor)

    def _first_not_met(self) -> RecordedOp | None:
        return next((op for op in self.record.ops[self._next :] if not self._met[op.index]), None)

    # -- bookkeeping ----------------------------------------------------------------------------------------------------

    def _bind(self, tensor: torch.Tensor, value: Value) -> int:
        storage = local_tensor(tensor).untyped_storage()
        key = int(storage._cdata)
        self._stand_for(key, storage, value.ref.cdata)
        self._states[value.ref.cdata] = value
        self._empty.discard(key)
        return key

    def _rebind(self, tensor: torch.Tensor, value: Value) -> None:
        """An in-place op made `value` of a tensor's storage."""
        key = storage_key(tensor)
        if key is not None:
            self._stand_for(key, local_tensor(tensor).untyped_storage(), value.ref.cdata)
            self._states[value.ref.cdata] = value

    def _stand_for(self, key: int, storage: torch.UntypedStorage, forward_key: int) -> None:
        if key not in self._storages:
            self._refs.append(StorageWeakRef(storage))
        self._storages[key] = forward_key

    def _collect(self, value: Value, tensor: torch.Tensor) -> None:
        if value in self._wanted and value not in self.found:
            self.found[value] = aliased(tensor)
            self._versions[value] = version_of(tensor) + value.num_writes

    def _stop_if_done(self) -> None:
        if self._early_stop and len(self.found) == len(self._wanted):
            raise AllFound

    # -- checks -----------------------------------------------------------------------------------------------------------

    def _check_unchanged(self, tensor: torch.Tensor, value: Value | None, op: RecordedOp) -> None:
        if value is None or value.origin is not Origin.OUTSIDE or value in self._elsewhere:
            return
        if storage_key(tensor) == value.ref.cdata and version_of(tensor) != value.seen_version:
            raise StateError(
                "A tensor that is needed to recompute was changed in place after the forward.",
                expected=f"version {value.seen_version}",
                got=f"version {version_of(tensor)}",
                where=f"{op}, {describe(tensor)}",
                do="Run backward before the change, or let the policy save this op.",
            )

    def _ask_again(self, op: RecordedOp, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._policy is None or op.policy is None or getattr(self._policy, "is_pure", False):
            return
        policy = ask(self._policy, PolicyContext(True, op.module, op.occurrence, result), op.func, args, kwargs)
        if policy is not op.policy:
            raise StateError(
                "A policy changed its mind between forward and recomputation.",
                expected=f"{op.policy.name}, as in forward",
                got=policy.name,
                where=str(op),
                do="Let the policy decide by the op, ctx.module and ctx.occurrence; what it counts itself differs in the two runs.",
            )

    def _other_result(self, op: RecordedOp, outputs: Any, result: Any) -> StateError:
        expected = _words(outputs.view) if isinstance(outputs, Fresh) else f"{len(outputs)} results"
        return StateError(
            "Recomputation gave another result than forward.",
            expected=expected,
            got=describe(result) if not isinstance(result, torch.Tensor) else _words(View.of(result)),
            where=str(op),
            do="Make the function give the same each time, or let the policy save this op.",
        )


class ReplayMode(RegionMode):
    """Sees every op of the second run."""

    def __init__(self, replay: Replay | None) -> None:
        super().__init__()
        self._replay = replay

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._may_shard and is_sharding(2):
            return func(*args, **(kwargs or {}))
        if func in INVISIBLE or self._replay is None:
            if any(is_placeholder(each) for each in args):
                return view_of_placeholder(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))
        return self._replay.run(func, args, kwargs or {})


def _gone(op: RecordedOp, tensor: torch.Tensor) -> StateError:
    return StateError(
        "What a region changed in place is needed as it was before, and was not kept.",
        where=f"{op}, {describe(tensor)}",
        do="Run the step again: from now on it is kept.",
    )


def _looks_like(tensor: torch.Tensor, view: View) -> bool:
    local = local_tensor(tensor)
    return bool(local.dtype == view.dtype and local.size() == view.size and local.stride() == view.stride)


def _words(view: View) -> str:
    return f"{str(view.dtype).removeprefix('torch.')}{list(view.size)}"
