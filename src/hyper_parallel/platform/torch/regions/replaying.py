"""A region's function runs again: op by op the record says what to run, what to take, and what to leave out.

The rules are numbered in the README of this folder; comments here name them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from hyper_parallel._base.errors import StateError, describe
from hyper_parallel.core.regions.policy import PolicyContext, RegionPolicy
from hyper_parallel.platform.torch.regions.checksums import find_difference, storage_checksum
from hyper_parallel.platform.torch.regions.local_parts import (
    PLAIN_TYPES,
    is_plain,
    local_tensor,
    storage_key,
    version_of,
)
from hyper_parallel.platform.torch.regions.module_paths import is_sharding
from hyper_parallel.platform.torch.regions.op_traits import TRAITS, OpTraits, traits_of, trimmed
from hyper_parallel.platform.torch.regions.placeholders import (
    NeedsEverything,
    View,
    has_placeholder,
    placeholder,
    view_of_placeholder,
)
from hyper_parallel.platform.torch.regions.random_state import drawing
from hyper_parallel.platform.torch.regions.recording import Record, RegionMode, ask
from hyper_parallel.platform.torch.regions.saved_values import aliased, copied
from hyper_parallel.platform.torch.regions.values import (
    Argument,
    Arguments,
    Constant,
    Origin,
    RecordedOp,
    Value,
    WeakStorages,
    replaced,
    same_rest,
    sort,
)

_MADE, _OUTSIDE, _WRITTEN = Origin.MADE, Origin.OUTSIDE, Origin.WRITTEN
_Tensor = torch.Tensor
_TURNED = {
    torch.ops.aten.lt.Tensor: torch.ops.aten.gt.Tensor,
    torch.ops.aten.gt.Tensor: torch.ops.aten.lt.Tensor,
    torch.ops.aten.le.Tensor: torch.ops.aten.ge.Tensor,
    torch.ops.aten.ge.Tensor: torch.ops.aten.le.Tensor,
}


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
        _sums: of what was found, when it was
        _copies: arguments as the function gets them, with what they are copies of

    Args:
        looks: whether memory is given to ops alone, so that whatever else reads or writes it is met (rule 19)
    """

    def __init__(
        self,
        record: Record,
        runs: Collection[int],
        takes: Collection[Any],
        wanted: set[Value],
        policy: RegionPolicy | None,
        *,
        check_outputs: bool,
        early_stop: bool,
        restores_random_state: bool,
        checks_outside: bool = True,
        looks: bool = False,
    ) -> None:
        self.record = record
        self.found: dict[Value, torch.Tensor] = {}
        self.first_missing: RecordedOp | None = None
        self.first_unknown: str | None = None
        self._runs = runs
        self._takes = takes
        self._wanted = wanted
        self._policy = None if policy is None or policy.is_pure else policy
        self._check_outputs = check_outputs
        self._early_stop = early_stop
        self._restores_random_state = restores_random_state
        self._checks_outside = checks_outside
        self._looks = looks
        self._sums: dict[Value, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._storages: dict[int | None, int] = {}
        self._states: dict[int, Value] = dict(record.before_write)  # plant: replay-begins
        self._refs = WeakStorages()
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
        is_taken = value in self._takes
        if self._looks or not is_taken:
            made = placeholder(view, value.num_bytes, value.device, known)
            self._input_storages[value] = local_tensor(made).untyped_storage()
            self._empty.add(self._bind(made, value))
            if is_taken and value not in self._elsewhere:
                self._elsewhere[value] = local_tensor(tensor()).untyped_storage()
            return made
        storage = self._elsewhere.get(value, known)
        result = self._argument(tensor()) if storage is None else view.on(storage, value.device)
        self._input_storages[value] = local_tensor(result).untyped_storage()
        self._bind(result, value)
        return result

    def _argument(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for an argument: a copy if the function may write it, as that would be the second time."""
        if not self.record.is_touched or not is_plain(tensor):
            return aliased(tensor)
        self._copies.append((copied(tensor), tensor))
        return self._copies[-1][0]

    def has_written_arguments(self) -> bool:
        """Whether the function has changed an argument, and no op did. Waits for the device."""
        return any(
            not _has_same_bytes(copy, tensor, local_tensor(copy).untyped_storage().nbytes())
            for copy, tensor in self._copies
        )

    def has_written_found(self) -> bool:
        """Whether something has changed a value that was found, and no op did. Waits for the device."""
        if not self._sums:
            return False
        values = [value for value in self._sums if version_of(self.found[value]) <= self._versions[value]]
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            now = [storage_checksum(self.found[value], value.num_bytes) for value in values]
            return find_difference([self._sums[value] for value in values], now) is not None

    # -- ops ----------------------------------------------------------------------------------------------------------

    def run(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        func = traits.func
        if traits.is_view and func not in self.record.views_that_communicate:
            return self._run_view(traits, args, kwargs)
        if traits.defaults:
            args = trimmed(args, traits.defaults)
        tensors: list[torch.Tensor] = []
        rest: list[Any] = []
        sort(args, kwargs, tensors, rest)
        keys: list[int | None] = []
        values: list[Value | None] = []
        storages, states = self._storages, self._states
        for tensor in tensors:
            key = storage_key(tensor)
            keys.append(key)
            known = storages.get(key)  # what this run has met: see `_value_at`
            values.append(self._value_at(key, tensor) if known is None else states[known])
        op = self._match(func, values, tensors, rest)
        if op is None and func in _TURNED and len(tensors) == 2 and has_placeholder(tensors):
            # Of two operands Python asks the subclass first: `a > placeholder` comes as `placeholder < a`.
            op = self._match(_TURNED[func], values[::-1], tensors[::-1], rest[::-1])
            if op is not None:
                traits, args = traits_of(op.func), args[::-1]
                tensors.reverse()
                keys.reverse()
        if op is None:
            if traits.is_view:
                return self._run_view(traits, args, kwargs)
            return self._run_unknown(traits, args, kwargs)
        if op.index in self._runs or op.must_run:
            result = self._run_again(op, traits, args, kwargs, tensors, keys)
        else:
            result = self._leave_out(op.outputs, tensors)
            for position, value in op.targets:
                self._rebind(tensors[position], value)
                if value in self._takes:
                    self._elsewhere[value] = value.kept.memory()
        if self._policy is not None:
            self._ask_again(self._policy, op, result, args, kwargs)
        if self._early_stop and len(self.found) == len(self._wanted):
            raise AllFound
        return result

    def _run_view(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if has_placeholder(args):
            return view_of_placeholder(traits.func, args, kwargs)
        result = traits.call(*args, **kwargs)
        return self.noted_view(result)

    def noted_view(self, result: Any) -> Any:
        for tensor in (result,) if isinstance(result, torch.Tensor) else result:
            key = storage_key(tensor)
            value = self._value_at(key, tensor)
            if value is not None and value in self._wanted and value not in self.found:
                self._note_met(value, key, tensor)
        if self._early_stop and len(self.found) == len(self._wanted):
            raise AllFound
        return result

    def _run_again(
        self,
        op: RecordedOp,
        traits: OpTraits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        keys: list[int | None],
    ) -> Any:
        by_id: dict[int, torch.Tensor] = {}
        elsewhere, empty = self._elsewhere, self._empty
        for tensor, key, value in zip(tensors, keys, op.reads):  # noqa: B905 - one of each; see `_match`
            if elsewhere and value is not None and value in elsewhere:
                by_id[id(tensor)] = View.of(tensor).on(elsewhere[value], tensor.device)
                continue
            if empty and key in empty:
                raise NeedsEverything(str(op))
            if value is None or value.origin is _MADE:
                continue
            if (
                value.origin is _OUTSIDE
                and key == value.key
                and version_of(tensor) != value.seen_version
                and (self._checks_outside or isinstance(tensor, nn.Parameter))
            ):
                raise _changed(tensor, value, op)
            if value.is_written:
                raise _gone(op, tensor)
        if op.targets:
            self._copy_before_write(op, tensors, by_id)
        if by_id:
            args, kwargs = replaced(args, by_id), replaced(kwargs, by_id)
        if op.state is not None and self._restores_random_state:
            with drawing:
                op.state.restore()  # plant: replay-draws
                result = traits.call(*args, **kwargs)
        else:
            result = traits.call(*args, **kwargs)
        for position, value in op.targets:
            tensor = tensors[position]
            self._rebind(tensor, value)
            self._collect(value, by_id.get(id(tensor), tensor), num_writes=1)
        outputs = op.outputs
        if type(outputs) is Value and type(result) is _Tensor:
            self._note_result(op, outputs, result)
            return result
        return self._note_outputs(op, outputs, result, tensors)

    def _copy_before_write(self, op: RecordedOp, tensors: list[torch.Tensor], by_id: dict[int, torch.Tensor]) -> None:
        for position, value in op.targets:
            tensor = tensors[position]
            if storage_key(by_id.get(id(tensor), tensor)) not in self._own:  # plant: replay-copies
                # Written once already, in forward: what runs again writes into a copy.
                by_id[id(tensor)] = self._copied(by_id.get(id(tensor), tensor))
                self._elsewhere[value] = local_tensor(by_id[id(tensor)]).untyped_storage()
            elif id(tensor) in by_id or value.origin is _WRITTEN:
                # The function may know the tensor from elsewhere, too, and read it there.
                self._elsewhere[value] = local_tensor(by_id.get(id(tensor), tensor)).untyped_storage()

    def _note_result(self, op: RecordedOp, value: Value, result: torch.Tensor) -> None:
        if self._check_outputs and not _looks_like(result, value.view):
            raise self._other_result(op, value, result)
        self._own.add(self._bind(result, value))
        if value in self._wanted and value not in self.found:
            self._find(value, result, value.num_writes)

    def _note_outputs(self, op: RecordedOp, outputs: Any, result: object, tensors: list[torch.Tensor]) -> Any:
        if type(outputs) is Value:
            if not isinstance(result, torch.Tensor):
                raise self._other_result(op, outputs, result)
            self._note_result(op, outputs, result)
            return result
        if isinstance(outputs, Argument):
            return tensors[outputs.position]
        if isinstance(outputs, Constant):
            return result if outputs.value is None else outputs.value
        if isinstance(outputs, (list, tuple)):
            if not isinstance(result, (list, tuple)) or len(result) != len(outputs):
                raise self._other_result(op, outputs, result)
            return type(result)(
                [self._note_outputs(op, each, got, tensors) for each, got in zip(outputs, result, strict=True)]
            )
        return result

    def _leave_out(self, outputs: Any, tensors: list[torch.Tensor]) -> Any:
        """The result of an op that does not run: taken (rule 2), or a placeholder (rule 3)."""
        if type(outputs) is Value:
            if outputs in self._takes and self._looks:
                self._elsewhere[outputs] = outputs.kept.memory()
            elif outputs in self._takes:
                # Not an alias: with its version counter a write into `taken`, which goes to a copy, would count as one here.
                taken = outputs.view.on(outputs.kept.memory(), outputs.device)
                self._bind(taken, outputs)
                return taken
            empty = placeholder(outputs.view, outputs.num_bytes, outputs.device)
            self._empty.add(self._bind(empty, outputs))
            return empty
        if isinstance(outputs, Argument):
            return tensors[outputs.position]
        if isinstance(outputs, Constant):
            return outputs.value  # rule 7
        return type(outputs)([self._leave_out(each, tensors) for each in outputs])

    def _run_unknown(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op that forward did not run with these values (rule 4)."""
        func = traits.func
        arguments = Arguments(args, kwargs, traits.writes)
        if self.first_unknown is None:
            missing = self.first_missing = self._first_not_met()
            self.first_unknown = str(func)
            if missing is not None and missing.func is func:
                self.first_unknown += f" with {_difference(missing.rest, arguments.rest)}"
        by_id: dict[int, torch.Tensor] = {}
        for position, tensor in enumerate(arguments.tensors):
            value = self._value_at(storage_key(tensor), tensor)
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
                self._own.add(self._refs.add(local_tensor(tensor).untyped_storage()))
        return result

    def _write_unknown(self, tensor: torch.Tensor, by_id: dict[int, torch.Tensor]) -> None:
        """Let an op that is not in the record write a tensor: into a copy, if the memory is not of this run."""
        key = storage_key(tensor)
        if key is None:
            return
        source = by_id.get(id(tensor), tensor)
        storage = local_tensor(tensor).untyped_storage()
        value = Value(_MADE, -1, self._refs.add(storage), storage.nbytes(), tensor.device)  # one that no op knows
        if storage_key(source) not in self._own:
            by_id[id(tensor)] = self._copied(source)
        if id(tensor) in by_id:
            self._elsewhere[value] = local_tensor(by_id[id(tensor)]).untyped_storage()
        self._rebind(tensor, value)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same look at a copy of the whole storage, which this run may write."""
        copy = copied(tensor)
        self._own.add(self._refs.add(local_tensor(copy).untyped_storage()))
        return copy

    # -- which op it is -------------------------------------------------------------------------------------------------

    def _match(
        self, func: object, values: list[Value | None], tensors: list[torch.Tensor], rest: list[Any]
    ) -> RecordedOp | None:
        """The recorded op that this one is (rule 1)."""
        ops = self.record.ops
        index = self._next
        if index < len(ops):
            op = ops[index]
            if (
                op.func is func
                and op.reads == values
                and (op.known.has(rest) if op.known is not None else same_rest(op.rest, rest))
            ):  # nearly always
                self._next = index + 1
                self._met[index] = 1
                return op
            if self._is_same(op, func, values, tensors, rest, in_order=True):
                self._next += 1
                self._met[op.index] = 1
                return op
        for op in ops:
            if not self._met[op.index] and self._is_same(op, func, values, tensors, rest, in_order=False):
                if self.first_missing is None and op.index > self._next:
                    self.first_missing = ops[self._next]
                self._met[op.index] = 1
                self._next = op.index + 1
                return op
        # Once more what was met already: where forward had a result at hand (autocast's casts) and this run makes it again.
        for op in ops:
            is_repeatable = self._met[op.index] and op.state is None and not op.targets
            if is_repeatable and self._is_same(op, func, values, tensors, rest, in_order=False):
                return op
        return None

    def _is_same(
        self,
        op: RecordedOp,
        func: object,
        values: list[Value | None],
        tensors: list[torch.Tensor],
        rest: list[Any],
        *,
        in_order: bool,
    ) -> bool:
        if op.func is not func or len(op.reads) != len(values):
            return False
        if op.reads == values:  # values have no equality of their own: the same ones
            return same_rest(op.rest, rest)
        if not in_order or not same_rest(op.rest, rest):
            return False
        for recorded, value, tensor in zip(op.reads, values, tensors, strict=True):
            if recorded is value:
                continue
            # A tensor that the forward did not have: an index made from a list, a weight that autocast had cast before the region and casts again.
            if recorded is None or recorded.origin is not _OUTSIDE or value is not None:
                return False
            if not _has_same_contents(tensor, recorded):
                return False
            self._bind(tensor, recorded)
        return True

    def _value_at(self, key: int | None, tensor: torch.Tensor) -> Value | None:
        """The value of a tensor, whose storage is at `key`."""
        if key is None:
            return None
        # What the function knows from outside (a parameter, a buffer, a result that the module kept) stands for itself.
        value = self._states.get(self._storages.get(key, key))
        if value is None:
            value = self.record.current_at(key)
            if value is not None and value.origin is _MADE:
                if version_of(tensor) != value.seen_version:
                    return None
                self._note_met(value, key, tensor)
        return value

    def _note_met(self, value: Value, key: int | None, tensor: torch.Tensor) -> None:
        if (
            value in self._wanted
            and value not in self.found
            and key not in self._empty
            and value not in self._elsewhere
        ):
            self._collect(value, tensor)

    def _first_not_met(self) -> RecordedOp | None:
        return next((op for op in self.record.ops[self._next :] if not self._met[op.index]), None)

    # -- bookkeeping ----------------------------------------------------------------------------------------------------

    def _bind(self, tensor: torch.Tensor, value: Value) -> int:
        local = tensor if type(tensor) in PLAIN_TYPES else local_tensor(tensor)
        storage = local.untyped_storage()
        key: int = storage._cdata
        storages = self._storages
        if key not in storages:
            self._refs.addresses.append(storage._weak_ref())
        storages[key] = value.key
        self._states[value.key] = value
        if self._empty:
            self._empty.discard(key)
        return key

    def _rebind(self, tensor: torch.Tensor, value: Value) -> None:
        """An in-place op made `value` of a tensor's storage."""
        key = storage_key(tensor)
        if key is not None:
            if key not in self._storages:
                self._refs.add(local_tensor(tensor).untyped_storage())
            self._storages[key] = value.key
            self._states[value.key] = value

    def _collect(self, value: Value, tensor: torch.Tensor, num_writes: int = 0) -> None:
        """`num_writes`: those of the op itself, which are counted when it is done; in forward it may have counted them elsewhere (`.data`)."""
        if value in self._wanted and value not in self.found:
            self._find(value, tensor, max(num_writes, value.num_writes))

    def _find(self, value: Value, tensor: torch.Tensor, num_writes: int) -> None:
        found = self.found[value] = aliased(tensor)
        self._versions[value] = version_of(tensor) + num_writes
        if self._looks and value.device.type != "meta":
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                self._sums[value] = storage_checksum(found, value.num_bytes)

    # -- checks -----------------------------------------------------------------------------------------------------------

    def _ask_again(
        self, policy: RegionPolicy, op: RecordedOp, result: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if op.policy is None or id(op.func) in policy.answers:
            return
        context = PolicyContext(True, op.module, op.occurrence, result, op.call, op.occurrence_in_call)
        answer = ask(policy, context, op.func, args, kwargs)
        if answer is not op.policy:
            raise StateError(
                "A policy changed its mind between forward and recomputation.",
                expected=f"{op.policy.name}, as in forward",
                got=answer.name,
                where=str(op),
                do="Let the policy decide by the op, ctx.module and ctx.occurrence; what it counts itself differs in the two runs.",
            )

    def _other_result(self, op: RecordedOp, outputs: Any, result: Any) -> StateError:
        expected = _words(outputs.view) if isinstance(outputs, Value) else f"{len(outputs)} results"
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
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._may_shard and is_sharding(2):
            return func(*args, **(kwargs or {}))
        traits = TRAITS.get(id(func)) or traits_of(func)
        replay = self._replay
        if traits.is_invisible or replay is None:
            if types and has_placeholder(args):
                return view_of_placeholder(func, args, kwargs or {})
            return traits.call(*args, **(kwargs or {}))
        if traits.is_view and not types:  # no placeholders, and nothing distributed
            result = traits.call(*args, **kwargs) if kwargs else traits.call(*args)
            if type(result) is _Tensor and result.untyped_storage()._cdata in replay._storages:
                return result  # of what an op of this run made: that was looked at when it was made
            return replay.noted_view(result)
        return replay.run(traits, args, kwargs or {})


def _changed(tensor: torch.Tensor, value: Value, op: RecordedOp) -> StateError:
    return StateError(
        "A tensor that is needed to recompute was changed in place after the forward.",
        expected=f"version {value.seen_version}",
        got=f"version {version_of(tensor)}",
        where=f"{op}, {describe(tensor)}",
        do="Run backward before the change, or let the policy save this op.",
    )


def _gone(op: RecordedOp, tensor: torch.Tensor) -> StateError:
    return StateError(
        "What a region changed in place is needed as it was before, and was not kept.",
        where=f"{op}, {describe(tensor)}",
        do="Run the step again: from now on it is kept.",
    )


def _has_same_contents(tensor: torch.Tensor, recorded: Value) -> bool:
    """Whether a tensor that the forward did not read is bit for bit one from outside that it did read, and has not been changed since.

    A parameter stands for itself only, and so does what was changed: nobody knows any more what the forward read.
    """
    alias = recorded.alias
    if alias is None or version_of(alias) != recorded.seen_version:
        return False
    storages = [local_tensor(each).untyped_storage() for each in (alias, tensor)]
    if alias.device != tensor.device or any(each.nbytes() != recorded.num_bytes for each in storages):
        return False
    return _has_same_bytes(alias, tensor, recorded.num_bytes)


def _has_same_bytes(left: torch.Tensor, right: torch.Tensor, num_bytes: int) -> bool:
    whole = View(torch.uint8, torch.Size([num_bytes]), (1,), 0, False, False)
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        one, other = (whole.on(local_tensor(each).untyped_storage(), left.device) for each in (left, right))
        return torch.equal(one, other)  # waits for the device, where one is there


def _difference(then: list[Any], now: list[Any]) -> str:
    """What is another one in an op that comes in place of the same op."""
    numbers = [f"{b!r} for {a!r}" for a, b in zip(then, now, strict=False) if not same_rest([a], [b])]
    return ", ".join(numbers) or "another tensor, or other numbers in one"


def _looks_like(tensor: torch.Tensor, view: View) -> bool:
    local = tensor if type(tensor) is _Tensor else local_tensor(tensor)
    return bool(local.dtype is view[0] and local.size() == view[1] and local.stride() == view[2])


def _words(view: View) -> str:
    return f"{str(view.dtype).removeprefix('torch.')}{list(view.size)}"
