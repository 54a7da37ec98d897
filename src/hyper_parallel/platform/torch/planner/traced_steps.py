"""One step with every block run as a region that keeps nothing, to see its ops.

It tells what they read and make, and what of that backward needs.

The region's own record is read, so that the plan speaks of exactly the ops that a policy will be asked about.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.core.activation_checkpoint.options import Options
from hyper_parallel.core.activation_checkpoint.replacement import replace
from hyper_parallel.platform.torch.planner.applying import unwrap
from hyper_parallel.platform.torch.planner.meters import Clock
from hyper_parallel.platform.torch.planner.signature import autocast_now
from hyper_parallel.platform.torch.regions.arguments import saved_arguments
from hyper_parallel.platform.torch.regions.frame import Frame
from hyper_parallel.platform.torch.regions.recording import Record
from hyper_parallel.platform.torch.regions.surroundings import is_replaying
from hyper_parallel.platform.torch.regions.values import Origin, Value
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import CheckpointWrapper
from hyper_parallel.platform.torch.wrappers.replacement import TREE

# Sizes of what these give depend on values: another batch of the same shape has others.
_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class OpTimes(TorchDispatchMode):
    """Times the ops of a region.

    It lies outside of the regions' own modes, so it sees what they really run.
    """

    supports_higher_order_operators = True

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.ops: list[tuple[Any, Any, Any]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        begin = self.clock.now()
        result = func(*args, **(kwargs or {}))
        self.ops.append((func, begin, self.clock.now()))
        return result


class RecordedCall:
    """What one call of a block did in the step that was recorded.

    Attributes:
        ran_again: backward came to it, and needed what an op makes
        needed, needed_inputs: values that backward needs, of those an op made and of the arguments
        current: values that nothing in the region has written over
        shared: arguments that other calls are given, too, or that were there before the step: somebody holds them
            anyway
        freed_after: value -> the op after which nothing held it any more
        autocast: what the block was called under
    """

    def __init__(self, path: str, call: int) -> None:
        self.path = path
        self.call = call
        self.is_over = False
        self.ran_again = False
        self.record: Record | None = None
        self.needed: set[Value] = set()
        self.current: set[Value] = set()
        self.needed_inputs: set[Value] = set()
        self.shared: set[Value] = set()
        self.freed_after: dict[Value, int] = {}
        self.times: OpTimes | None = None
        self.autocast = "off"

    @property
    def inputs(self) -> list[Value]:
        """The arguments that have memory, each once."""
        known = [] if self.record is None else self.record.inputs
        return [value for value in dict.fromkeys(known) if value is not None]

    def forget_needed(self) -> None:
        """Forget what backward needs of a call that it does not come to: nothing of it is kept, whatever autograd
        saves.
        """
        self.needed, self.needed_inputs = set(), set()

    @property
    def is_dynamic(self) -> bool:
        return any(
            tag in getattr(op.func, "tags", ())
            for op in (() if self.record is None else self.record.ops)
            for tag in _DYNAMIC
        )


class _RecordedFrame(Frame):
    """A region that tells what it knows when its forward is over, before it forgets."""

    noted: RecordedCall
    _is_planned = True

    def _finish(self, record: Record) -> None:
        noted = self.noted
        noted.is_over = True
        noted.needed = {residual.value for ref in self._recomputed if (residual := ref()) is not None}
        noted.needed_inputs = {given.value for ref in self._from_inputs if (given := ref()) is not None}
        noted.current = {value for value in record.made() if record.is_current(value)}
        super()._finish(record)


class _RecordedOps(TorchDispatchMode):
    """Notes after which op a value was gone.

    It lies inside of the region's mode, so that it sees each op before the region does.
    """

    supports_higher_order_operators = True

    def __init__(self, noted: RecordedCall, record: Record) -> None:
        super().__init__()
        self._noted = noted
        self._record = record
        self._alive: dict[Value, None] = {}
        self._num_seen = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.note_made()
        self._note_gone()
        return func(*args, **(kwargs or {}))

    def note_made(self) -> None:
        """Note what the ops since the last call made.

        An op that writes in place ends what was there: the memory is counted once.
        """
        ops = self._record.ops
        for op in ops[self._num_seen :]:
            for _, written in op.targets:
                for value in [alive for alive in self._alive if alive.key == written.key]:
                    del self._alive[value]
                    self._noted.freed_after[value] = max(value.op, op.index - 1)
            self._alive.update(dict.fromkeys(op.makes))
        self._num_seen = len(ops)

    def _note_gone(self) -> None:
        for value in [value for value in self._alive if value.ref.expired()]:
            del self._alive[value]
            self._noted.freed_after[value] = self._num_seen - 1


@contextlib.contextmanager
def recording(
    model: nn.Module, blocks: dict[str, nn.Module], device: torch.device, *, swaps_inputs: bool = False
) -> Iterator[list[RecordedCall]]:
    """Make every call of a block a region that is noted in the list, in the order of the calls, while the block is
    open.
    """
    calls: list[RecordedCall] = []
    counts: dict[str, int] = {}
    options = Options(swap_inputs=swaps_inputs)

    def run(path: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or is_replaying():
            return block(*args, **kwargs)
        noted = RecordedCall(path, counts.get(path, 0))
        counts[path] = noted.call + 1
        calls.append(noted)
        noted.autocast = autocast_now(device)
        frame = _RecordedFrame(_watched(block, noted), saved_arguments(args, kwargs), None, options)
        noted.record = frame._recorded()
        frame.noted = noted
        times = noted.times = OpTimes(Clock(device))
        with times:
            return frame.forward(args, kwargs)

    # Around the blocks, as a plan will be: a block that is compiled stays compiled, and its hooks are in the region.
    wrappers: dict[nn.Module, nn.Module] = {
        block: CheckpointWrapper(block, checkpoint_fn=_bound(run, path)) for path, block in blocks.items()
    }
    replace(TREE, model, wrappers)
    try:
        yield calls
    finally:
        unwrap(model, wrappers)


def _bound(run: Any, path: str) -> Any:
    return lambda block, *args, **kwargs: run(path, block, args, kwargs)


def _watched(block: nn.Module, noted: RecordedCall) -> Any:
    """Wrap a call of the block, so that before each op it is noted what is still alive."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        if noted.is_over or noted.record is None:  # it runs again in backward: all is known by then
            noted.ran_again = True
            return block(*args, **kwargs)
        with _RecordedOps(noted, noted.record) as ops:
            result = block(*args, **kwargs)
        ops.note_made()
        return result

    watched.__self__ = block  # type: ignore[attr-defined]  # whose call it is
    return watched


def note_shared(calls: list[RecordedCall], held: set[int]) -> None:
    """Tell each call which of its arguments others are given, too, or are `held` by others in any case."""
    counts = Counter(value.ref.cdata for call in calls for value in call.inputs)
    for call in calls:
        call.shared = {value for value in call.inputs if counts[value.ref.cdata] > 1 or value.ref.cdata in held}


def is_made(value: Value | None) -> bool:
    return value is not None and value.origin is Origin.MADE
