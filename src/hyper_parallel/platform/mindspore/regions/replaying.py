"""A region's function runs again: op by op the record says what to run, what to take, and what to leave out.

The rules are numbered in the README of this folder; comments here name them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import FrameType
from typing import Any

from mindspore import Tensor, mint
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import StateError, describe
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.regions.policy import PolicyContext, RegionPolicy
from hyper_parallel.platform.mindspore.regions.cell_paths import num_casting_cells
from hyper_parallel.platform.mindspore.regions.random_ops import seeds_of, stand_in
from hyper_parallel.platform.mindspore.regions.recording import (
    SETTLED,
    Call,
    Constant,
    Node,
    Record,
    RecordedOp,
    Saves,
    Stop,
    outside_sums,
)
from hyper_parallel.platform.mindspore.swap.storages import (
    Look,
    aliased,
    copied,
    storage_address,
    storage_bytes,
    unseen,
    whole,
)

Wanted = Any  # a Node, or (Saves, which of them)


class AllFound(Stop):
    """Every needed value was met: the rest of the function need not run (rule 6)."""


class NeedsEverything(Stop):
    """What was left out is read after all (rule 5)."""


class Replay:
    """One run of the function.

    Fields:
        found: the wanted values met so far, as aliases
        _elsewhere: address of memory that is not of this run -> the copy that ops of this run write in its place
        _last_saved: index of the last op after which autograd saved something that is wanted
        num_casting: how many cells that cast were left by an exception of this run
    """

    def __init__(
        self,
        record: Record,
        runs: Collection[int],
        takes: Collection[Any],
        wanted: dict[Wanted, int],
        policy: RegionPolicy | None,
        *,
        check_outputs: bool,
        early_stop: bool,
        preserves_random_state: bool,
    ) -> None:
        self.found: dict[Wanted, Tensor] = {}
        self.first_missing: RecordedOp | None = None
        self.first_unknown: str | None = None
        self.num_casting = 0
        self._record = record
        self._runs = runs
        self._takes = takes
        self._wanted = wanted
        self._last_saved = max(wanted.values(), default=-1)
        self._policy = None if policy is None or policy.is_pure else policy
        self._check_outputs = check_outputs
        self._early_stop = early_stop
        self._preserves_random_state = preserves_random_state
        self._next = 0
        self._met = bytearray(len(record.ops))
        self._current = -1  # the op that was met last
        self._num_saved = 0
        self._key = f"{record.key}.again"
        self._newest: dict[int, set[Node]] = {}
        self._inputs_at: dict[int, Node] = {}
        self._elsewhere: dict[int, Tensor] = {}
        self._taken: set[Node] = set()
        self._base: FrameType | None = None

    def begin(self) -> None:
        """Called by who calls the function."""
        self._base = sys._getframe(1)

    def end(self) -> None:
        """The function is over: the caller's frame holds this object, and what the function was given."""
        self._base = None

    def has_met(self, op: RecordedOp) -> bool:
        return bool(self._met[op.index])

    # -- which value a tensor is -----------------------------------------------------------------------------------------

    def bind_input(self, node: Node, tensor: Tensor) -> None:
        if storage_bytes(tensor):
            self._inputs_at.setdefault(storage_address(tensor), node)

    def _node_of(self, tensor: Tensor) -> Node | None:
        node: Node | None = tensor._get_user_data(self._key)
        address = storage_address(tensor)
        if node is None:
            return self._inputs_at.get(address)
        if tensor.is_meta or node.num_bytes == 0:
            return node
        base = node.base
        if base.op < 0:
            return node if self._inputs_at.get(address) is base else None
        return node if base in self._newest.get(address, ()) else None

    def _bind(self, tensor: Tensor, node: Node, shared: Collection[int] = ()) -> None:
        """Let a tensor be a value. `shared`: addresses of what the op read: its result may share that memory in this run alone."""
        tensor._set_user_data(self._key, node)
        if tensor.is_meta or node.num_bytes == 0 or node.base.op < 0:
            return
        address = storage_address(tensor)
        if address in shared and address in self._newest:
            self._newest[address].add(node.base)
        elif node.source is None or address not in self._newest:
            self._newest[address] = {node.base}
        if node.source is None and address not in shared:
            self._inputs_at.pop(address, None)

    # -- ops ----------------------------------------------------------------------------------------------------------

    def run(self, call: Call) -> Any:
        self._stop_if_done()
        tensors, rest = call.sorted()
        values = [self._node_of(tensor) for tensor in tensors]
        op = self._match(call, tensors, values, rest)
        if op is None:
            return self._run_unknown(call, tensors)
        self._current = op.index
        self._num_saved = 0
        if op.index in self._runs or op.must_run:
            result = self._run_again(op, call, tensors)
        elif any(node in self._takes for node in op.nodes) or not op.nodes:
            result = self._take(op.outputs)
        else:
            result = self._leave_out(op, call, tensors)
        if self._policy is not None and op.policy is not None:
            self._ask_again(self._policy, op, op.policy, call, result)
        return result

    def may_raise(self, call: Call) -> bool:
        return not call.takes_lists and all(map(self._is_settled, call.sorted()[0]))

    def _is_settled(self, tensor: Tensor) -> bool:
        """Whether nobody waits for a tensor: neither for inputs, which are aliases here, nor parameters, numbers and copies of views."""
        node = self._node_of(tensor)
        if node is not None:
            base = node.base  # a view is as settled as what it looks at
            return base.op < 0 or not self._record.ops[base.op].takes_lists
        if tensor.param_info is not None or tensor.size <= 1 or tensor._get_user_data(SETTLED) is not None:
            return True
        return self._record.may_copy(tensor)

    def _stop_if_done(self) -> None:
        # Not before the op after which autograd saved the last of them: what is written by index until then is seen by nobody (README).
        if self._early_stop and len(self.found) == len(self._wanted) and self._current >= self._last_saved:
            self.leave(AllFound())

    def leave(self, exception: BaseException) -> None:
        if self._base is not None:
            self.num_casting = num_casting_cells(self._base)
        raise exception

    def _run_again(self, op: RecordedOp, call: Call, tensors: list[Tensor]) -> Any:
        replacements: dict[int, Tensor] = {}
        for position, tensor in enumerate(tensors):
            if tensor.is_meta:
                self.leave(NeedsEverything(str(op)))
            if self._elsewhere:
                elsewhere = self._elsewhere.get(storage_address(tensor))
                if elsewhere is not None:
                    replacements[id(tensor)] = Look.of(tensor).on(whole(elsewhere))
            if position in op.before_write and id(tensor) not in replacements:
                # Written once already, in forward: what runs again writes into a copy.
                mine = copied(op.before_write[position])
                self._elsewhere[storage_address(tensor)] = replacements[id(tensor)] = mine
        if op.redo is not None:
            # Another runs, since something must (see `RecordedOp.must_run`), and the kernel of the original is not to draw again.
            ran = call._replace(primitive=stand_in(call.primitive)).run()
            result = op.redo(tensors[0])
            for tensor, other in zip(result, ran, strict=True):
                if other._requires_grad:
                    tensor.requires_grad_()
        else:
            result = call.run(_replaced(call.args, replacements) if replacements else None)
        self._note_outputs(op, op.outputs, result, {storage_address(tensor) for tensor in tensors} - {0})
        return result

    def _note_outputs(self, op: RecordedOp, outputs: Any, result: Any, shared: Collection[int]) -> None:
        if isinstance(outputs, Node):
            if not isinstance(result, Tensor) or (self._check_outputs and not _looks_like(result, outputs.look)):
                raise self._other_result(op, outputs, result)
            self._bind(result, outputs, shared)
            self._collect(outputs, result)
        elif not isinstance(outputs, Constant):
            if not isinstance(result, (list, tuple)) or len(result) != len(outputs):
                raise self._other_result(op, outputs, result)
            for each, got in zip(outputs, result, strict=True):
                self._note_outputs(op, each, got, shared)

    def _collect(self, wanted: Wanted, tensor: Tensor) -> None:
        if wanted in self._wanted and wanted not in self.found:
            self.found[wanted] = aliased(tensor)

    def _take(self, outputs: Any) -> Any:
        """The result of an op that does not run: taken (rule 2), or a placeholder (rule 3)."""
        if isinstance(outputs, Constant):
            return outputs.value  # rule 7
        if not isinstance(outputs, Node):
            return type(outputs)([self._take(each) for each in outputs])
        if outputs not in self._takes:
            return self._placeholder(outputs)
        taken = aliased(outputs.kept.tensor())
        self._taken.add(outputs)
        self._bind(taken, outputs)
        self._collect(outputs, taken)
        return taken

    def _leave_out(self, op: RecordedOp, call: Call, tensors: list[Tensor]) -> Any:
        view = op.nodes[0] if len(op.nodes) == 1 else None
        if view is not None and view.source is not None and not any(tensor.is_meta for tensor in tensors):
            return self._run_again(op, call, tensors)  # costs nothing, and shows what it looks at
        return self._take(op.outputs)

    def _placeholder(self, node: Node) -> Tensor:
        """A tensor with everything but memory: whoever reads it gets an error of the framework, which starts the replay over."""
        with unseen(), _no_grad():
            # Not what `empty` gives itself: that waits for a kernel that never runs, and a primitive that reads it would wait for ever.
            empty = mint.empty(node.look.shape, dtype=node.look.dtype, device="meta").data
        self._bind(empty, node)
        return empty

    def _run_unknown(self, call: Call, tensors: list[Tensor]) -> Any:
        """An op that forward did not run with these values (rule 4)."""
        if self.first_unknown is None:
            self.first_unknown = call.name
            self.first_missing = next((op for op in self._record.ops[self._next :] if not self._met[op.index]), None)
        if any(tensor.is_meta for tensor in tensors):
            self.leave(NeedsEverything(call.name))
        return call.run()

    # -- what autograd saves ---------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Tensor | None:
        """Autograd saves something of the second run, whose graph nobody uses but a backward inside of the function."""
        wanted = (Saves(self._current), self._num_saved)
        self._num_saved += 1
        if wanted in self._wanted and wanted not in self.found and not tensor.is_meta:
            self.found[wanted] = aliased(tensor)
        return aliased(tensor) if self._record.runs_everything else None

    # -- which op it is -------------------------------------------------------------------------------------------------

    def _match(
        self, call: Call, tensors: list[Tensor], values: list[Node | None], rest: list[Any]
    ) -> RecordedOp | None:
        """The recorded op that this one is (rule 1)."""
        ops = self._record.ops
        outside = outside_sums(tensors, values)
        index = self._next
        if index < len(ops) and self._is_same(ops[index], call, values, rest, outside, in_order=True):  # nearly always
            self._next = index + 1
            self._met[index] = 1
            return ops[index]
        for op in ops:
            if (
                not self._met[op.index]
                and any(op.reads)
                and self._is_same(op, call, values, rest, outside, in_order=False)
            ):
                if self.first_missing is None and op.index > self._next:
                    self.first_missing = ops[self._next]
                self._met[op.index] = 1
                self._next = op.index + 1
                return op
        return None

    def _is_same(
        self,
        op: RecordedOp,
        call: Call,
        values: list[Node | None],
        rest: list[Any],
        outside: dict[int, bytes],
        *,
        in_order: bool,
    ) -> bool:
        if op.name != call.name or not _same_rest(op.rest, rest):
            return False
        if any(op.outside.get(position, found) != found for position, found in outside.items()):
            return False
        if op.reads != values and not (in_order and self._may_read(op, values)):
            return False
        return not (op.is_random and self._preserves_random_state) or op.redo is not None or op.seeds == _seeds(call)

    def _may_read(self, op: RecordedOp, values: list[Node | None]) -> bool:
        """Whether an op that reads these may be the recorded one, although kernels have made copies in one run alone.

        Copies are recognised by nobody. Of a placeholder there are none; and what comes back from elsewhere, an input or a result that was kept,
        may be laid out otherwise.
        """
        if len(op.reads) != len(values):
            return False
        for recorded, value in zip(op.reads, values, strict=True):
            if recorded is value:
                continue
            known = recorded or value
            is_input = known is not None and known.base.op < 0
            is_copied = recorded is None and any(value is each for each in op.depends_on)
            is_kept = recorded is not None and recorded.base in self._taken
            if (recorded is not None and value is not None) or not (is_input or is_copied or is_kept):
                return False
        return True

    # -- checks -----------------------------------------------------------------------------------------------------------

    def _ask_again(
        self, policy: RegionPolicy, op: RecordedOp, expected: CheckpointPolicy, call: Call, result: Any
    ) -> None:
        where = op.where
        context = PolicyContext(True, where.module, where.occurrence, result, where.call, where.occurrence_in_call)
        answer = policy.answer(context, call.name, call.args, call.kwargs)
        if answer is not expected:
            raise StateError(
                "A policy changed its mind between forward and recomputation.",
                expected=f"{expected.name}, as in forward",
                got=answer.name,
                where=str(op),
                do="Let the policy decide by the op, ctx.module and ctx.occurrence; what it counts itself differs in the two runs.",
            )

    def _other_result(self, op: RecordedOp, outputs: Any, result: Any) -> StateError:
        return StateError(
            "Recomputation gave another result than forward.",
            expected=str(outputs.look) if isinstance(outputs, Node) else f"{len(outputs)} results",
            got=str(Look.of(result)) if isinstance(result, Tensor) else describe(result),
            where=str(op),
            do="Make the function give the same each time, or let the policy save this op.",
        )


def _seeds(call: Call) -> Any:
    return seeds_of(call.primitive)


def _looks_like(tensor: Tensor, look: Look) -> bool:
    return bool(tensor.dtype == look.dtype and tensor.shape == look.shape)


def _replaced(arguments: Any, by_id: dict[int, Tensor]) -> Any:
    return type(arguments)(
        [
            by_id.get(id(each), each)
            if isinstance(each, Tensor)
            else _replaced(each, by_id)
            if type(each) in (list, tuple)
            else each
            for each in arguments
        ]
    )


def _same_rest(left: list[Any], right: list[Any]) -> bool:
    """Whether the arguments that are no tensors are the same; not-a-number equals itself."""
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if a is b:
            continue
        if type(a) is not type(b):
            return False
        try:
            if a != b and not (a != a and b != b):
                return False
        except (RuntimeError, ValueError, TypeError):  # what cannot be compared is not known to differ
            continue
    return True
