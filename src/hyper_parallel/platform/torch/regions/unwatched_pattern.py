"""What one watched call of a region shows about the calls after it: in which order autograd saves, and what a second run does with each op.

Pure data of one call; see `unwatched_region` for what is done with it, and rules 13 to 17 in the README of this folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hyper_parallel.core.regions.rerun_plan import plan_replay
from hyper_parallel.platform.torch.regions.inputs import Inputs
from hyper_parallel.platform.torch.regions.local_parts import PLAIN_TYPES
from hyper_parallel.platform.torch.regions.module_paths import has_sharded_modules, modules_in
from hyper_parallel.platform.torch.regions.placeholders import View
from hyper_parallel.platform.torch.regions.random_state import GeneratorState
from hyper_parallel.platform.torch.regions.recording import Record
from hyper_parallel.platform.torch.regions.region_function import RegionFunction, module_of
from hyper_parallel.platform.torch.regions.surroundings import ParametersOfModule
from hyper_parallel.platform.torch.regions.values import (
    Argument,
    Constant,
    Origin,
    RecordedOp,
    Value,
)

_VALUE_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class NotThePattern(BaseException):  # not an Exception: the function under replay may catch those
    """A second run does something else than the watched call did."""


class SavedTensor(NamedTuple):
    """The n-th tensor that autograd saves.

    Attributes:
        is_dropped: it is made again; else it is kept
        is_taken: a second run takes it as the result of the op that made it
    """

    view: View
    is_dropped: bool
    is_taken: bool


class Taken(NamedTuple):
    """A result that is the n-th saved tensor, or looks otherwise at the same memory.

    Attributes:
        view: how the result looked
        is_exact: the saved tensor looked the same
        num_bytes: of that memory
    """

    number: int
    view: View
    is_exact: bool
    num_bytes: int

    def seen_in(self, tensor: torch.Tensor, *, is_dynamic: bool, is_fixed: bool) -> View:
        """How the result looks, whose memory a saved tensor has.

        Raises:
            NotThePattern: it cannot be told.
        """
        if not is_dynamic:
            return self.view
        num_bytes = tensor.untyped_storage().nbytes()
        if num_bytes == self.num_bytes:
            return self.view
        # All of its memory, with one size more or less: then the strides say what the others are.
        is_all = tensor.storage_offset() == 0 and tensor.numel() * tensor.element_size() == num_bytes
        if is_fixed or not self.is_exact or not is_all or tensor.stride() != self.view.stride:
            raise NotThePattern("a saved tensor has another size")
        return View.of(tensor)


class LeftOut(NamedTuple):
    """A result that nothing needs: a placeholder."""

    view: View
    num_bytes: int
    device: torch.device


class Step(NamedTuple):
    """What a second run does with an op.

    Attributes:
        runs: it runs; else `outputs` are its results: `Taken`, `LeftOut`, `Constant`, lists of these, or `Argument` for what it was given
        offset: how far its generator had come since the region began, where a random op before it does not run
        is_fixed: what it takes must be as large as in the watched call: its other results depend on that
    """

    func: Any
    runs: bool
    outputs: Any = None
    generator: torch.Generator | None = None
    offset: int | None = None
    is_fixed: bool = False


class Pattern(NamedTuple):
    """See the head of the file.

    It outlives the call, and leads to nothing of it.

    Attributes:
        name, module, modules: of the function; see `RegionFunction`
        is_dynamic: sizes in the region depend on values, and differ from call to call
        looks: of the arguments that are tensors
        require_grad: of the parameters and buffers
        has_writes: whether an op writes into what another one made
    """

    saved: tuple[SavedTensor, ...]
    steps: tuple[Step, ...]
    name: str
    module: nn.Module
    modules: list[nn.Module]
    is_dynamic: bool
    looks: tuple[Any, ...]
    require_grad: tuple[bool, ...]
    has_writes: bool

    def fits(self, function: Any, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a call with these arguments should be like the watched one."""
        is_same = module_of(function) is self.module and modules_in(self.module) == self.modules
        return is_same and looks_of(tensors) == self.looks


def looks_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
    """What the ops of a region depend on; None: not all are ordinary tensors."""
    if not all(type(each) in PLAIN_TYPES and each.layout is torch.strided for each in tensors):
        return None
    return tuple((each.size(), each.stride(), each.dtype, each.device, each.requires_grad) for each in tensors)


class Watched(NamedTuple):
    """A call of which every op was seen, when its forward is over.

    Attributes:
        saved: for each tensor that autograd saved, in order: its value, and how it looks; None: no ordinary tensor
        dropped: the values that are made again
        begin: the generators when it began
    """

    record: Record
    function: RegionFunction
    parameters: ParametersOfModule
    inputs: Inputs
    looks: tuple[Any, ...] | None
    saved: Sequence[tuple[Value | None, View] | None]
    dropped: Collection[Value]
    begin: Sequence[GeneratorState]
    is_ordinary: bool


def pattern_of(call: Watched, *, is_dynamic: bool) -> Pattern | None:
    """What the call shows; None: the calls after it must be watched, too."""
    record, function = call.record, call.function
    has_oddities = (
        record.runs_everything
        or record.has_launches
        or record.has_empty
        or bool(record.before_write)
        or bool(record.views_that_communicate)
    )
    if has_oddities or not call.is_ordinary or call.looks is None or None in call.saved:
        return None
    # What an op that is not PyTorch's own gives beside tensors may depend on anything.
    if any(getattr(op.func, "namespace", "") != "aten" and _has_numbers(op) for op in record.ops):
        return None
    if function.module is None or function.has_hooks() or function.is_compiled() or has_sharded_modules():
        return None
    if not call.inputs.are_all_kept() or not _reads_its_own(record, call.parameters):
        return None
    saved = [each for each in call.saved if each is not None]
    is_dynamic = is_dynamic or any(map(_tells_values, record.ops))
    try:
        steps = tuple(_steps(call, saved, is_dynamic))
    except _CannotBeLeftOutError:
        return None
    taken = {each.number for step in steps for each in _leaves(step.outputs) if isinstance(each, Taken)}
    return Pattern(
        saved=tuple(
            SavedTensor(view, value in call.dropped, number in taken) for number, (value, view) in enumerate(saved)
        ),
        steps=steps,
        name=function.name,
        module=function.module,
        modules=function.modules,
        is_dynamic=is_dynamic,
        looks=call.looks,
        require_grad=call.parameters.require_grad(),
        has_writes=any(op.targets for op in record.ops),
    )


def _tells_values(op: RecordedOp) -> bool:
    """Whether a number that Python gets, or a size, may depend on values: those of the watched call say nothing about another one."""
    if getattr(op.func, "namespace", "") not in ("aten", "prims") or _VALUE_TAGS & set(op.func.tags):
        return True
    leaves = list(_leaves(op.outputs))
    return not any(isinstance(each, (Value, Argument)) for each in leaves) and not all(map(_is_nothing, leaves))


class _CannotBeLeftOutError(Exception):
    """Memory is written that is kept, or a generator cannot be set."""


def _steps(call: Watched, saved: list[tuple[Value | None, View]], is_dynamic: bool) -> Iterable[Step]:
    kept = _kept(call, saved)
    # What a policy keeps and autograd does not save is not there in a call that nobody watches: it is made again.
    plan = plan_replay(
        call.record.ops,
        call.dropped,
        lambda value: value in kept or value.origin in (Origin.INPUT, Origin.OUTSIDE),
        stops=True,
    )
    written = {value.key for op in call.record.ops for _, value in op.targets}
    held = {value.key for value, _ in saved if value is not None} | {value.key for value in kept}
    if written & held or any(value.origin is not Origin.MADE for op in call.record.ops for _, value in op.targets):
        raise _CannotBeLeftOutError
    begin = {state.generator: state.state for state in call.begin}
    is_behind: set[torch.Generator] = set()  # generators that ops draw from which do not run
    for op in call.record.ops:
        runs = op.index in plan.runs or op.must_run
        outputs = None if runs else _outputs(op, kept, plan.takes, is_dynamic)
        generator, offset = None, None
        if op.state is not None:
            generator = op.state.generator
            if generator not in begin:
                raise _CannotBeLeftOutError
            if outputs is not None:
                is_behind.add(generator)
            elif generator in is_behind:
                offset = _offset(op.state, begin[generator], is_dynamic)
        is_fixed = is_dynamic and not all(isinstance(each, Taken) or _is_nothing(each) for each in _leaves(outputs))
        yield Step(op.func, outputs is None, outputs, generator, offset, is_fixed)


def _kept(call: Watched, saved: list[tuple[Value | None, View]]) -> dict[Value, Taken]:
    """What ops made and autograd keeps, with how it gets from there to a second run."""
    kept: dict[Value, Taken] = {}
    for number, (value, view) in enumerate(saved):
        if value is None or value.origin is not Origin.MADE or value in call.dropped or not hasattr(value, "view"):
            continue
        is_exact = value.view == view
        if value not in kept or (is_exact and not kept[value].is_exact):
            kept[value] = Taken(number, value.view, is_exact, value.num_bytes)
    return kept


def _outputs(op: RecordedOp, kept: dict[Value, Taken], takes: Collection[Any], is_dynamic: bool) -> Any:
    """The results of an op that does not run; None: it does after all, as nobody knows how they will look."""

    def given(output: Any) -> Any:
        if isinstance(output, Value):
            if output in kept and (output in takes or is_dynamic):
                return kept[output]
            return LeftOut(output.view, output.num_bytes, output.device)
        if isinstance(output, Argument):
            if output.position != 0:
                raise _CannotBeLeftOutError
            return output
        if isinstance(output, Constant):
            return output
        return type(output)([given(each) for each in output])

    found = given(op.outputs)
    # Where sizes change it runs, unless what is taken tells how large all else is.
    return found if not is_dynamic or any(isinstance(each, Taken) for each in _leaves(found)) else None


def _has_numbers(op: RecordedOp) -> bool:
    return any(isinstance(each, Constant) and each.value is not None for each in _leaves(op.outputs))


def _is_nothing(output: Any) -> bool:
    """Whether a result is the same whatever the sizes."""
    if isinstance(output, LeftOut):
        return output.num_bytes == 0
    return isinstance(output, Constant) and output.value is None


def _leaves(outputs: Any) -> Iterable[Any]:
    if isinstance(outputs, (list, tuple)) and not hasattr(outputs, "_fields"):
        for each in outputs:
            yield from _leaves(each)
    elif outputs is not None:
        yield outputs


def _offset(state: GeneratorState, begin: torch.Tensor, is_dynamic: bool) -> int:
    """Generators of a CPU cannot be told to go on from elsewhere; what a random op draws depends on its size."""
    if is_dynamic or state.generator.device.type != "cuda":
        raise _CannotBeLeftOutError
    before, now = (each.view(torch.int64) for each in (begin, state.state))
    if before[0] != now[0]:
        raise _CannotBeLeftOutError
    return int(now[1] - before[1])


def tensors_held(modules: Iterable[nn.Module]) -> list[int]:
    """The tensors that modules have as buffers or attributes, by id: whether a call has put others in their place."""
    held = (value for each in modules for value in (*vars(each).values(), *each._buffers.values()))
    return [id(value) for value in held if isinstance(value, torch.Tensor)]


def _reads_its_own(record: Record, parameters: ParametersOfModule) -> bool:
    """Whether what it reads from outside are parameters and buffers, which have a version that is looked at, or was made for this call alone."""
    own = parameters.by_storage().keys()
    return all(
        value.key in own or value.is_gone()
        for op in record.ops
        for value in op.reads
        if value is not None and value.origin is Origin.OUTSIDE
    ) and all(value is not None for op in record.ops for value in op.reads)


__all__ = [
    "LeftOut",
    "NotThePattern",
    "Pattern",
    "SavedTensor",
    "Step",
    "Taken",
    "Watched",
    "looks_of",
    "pattern_of",
    "tensors_held",
]
