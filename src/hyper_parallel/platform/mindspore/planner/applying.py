"""Carrying a plan out on a model: each block that is not left plain is wrapped, and its calls run as was chosen.

A choice is for a whole call of a block: on the CPU MindSpore's primitives (`nn.Dense` is one) run in every
recomputation, whatever was saved, so that there is nothing to choose op by op.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mindspore import Tensor, nn
from mindspore.graph.api import _pynative_executor

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.activation_checkpoint.options import TAKEN
from hyper_parallel.core.activation_checkpoint.replacement import replace
from hyper_parallel.core.planner.model.blocks import check_unplanned
from hyper_parallel.core.planner.model.choices import RECOMPUTE, SWAP, Choice
from hyper_parallel.core.planner.model.mismatches import Mismatches
from hyper_parallel.core.planner.plan.batch_fit import UNKNOWN_BATCH, BatchCheck, Fit, PlannedBatch
from hyper_parallel.platform.mindspore.planner.planned_block import PlannedBlock, planned_blocks
from hyper_parallel.platform.mindspore.planner.signature import tensor_meta
from hyper_parallel.platform.mindspore.planner.steps import tensors_of
from hyper_parallel.platform.mindspore.regions.checkpoint import checkpoint
from hyper_parallel.platform.mindspore.regions.replays import is_replaying
from hyper_parallel.platform.mindspore.swap.storages import storage_address
from hyper_parallel.platform.mindspore.wrappers.replacement import TREE
from hyper_parallel.platform.mindspore.wrappers.swap_wrapper import AsyncSaveOnCpu

_LARGER = "Plan with the largest batch that training has."


class _HowBlockRuns(NamedTuple):
    """How one call of a block is run.

    `choice`: what is done with all of it; None: it runs as it is.
    """

    choice: Choice | None
    swaps_inputs: bool
    result_metas: tuple[str, ...]
    where: str


def _how(region: Any, decision: Any) -> _HowBlockRuns:
    """Read from the decision how a call of a block is run."""
    choice = None if decision.is_plain else decision.ops[0] or RECOMPUTE
    return _HowBlockRuns(choice, SWAP in decision.inputs, region.ops[0].result_metas, region.path)


class PlannedCall:
    """Runs a planned block in place of its wrapper: the calls of a step in turn, each in its own way."""

    def __init__(self, calls: Sequence[_HowBlockRuns], mismatches: Mismatches) -> None:
        self._calls = list(calls)
        self._mismatches = mismatches
        self._unchecked = set(range(len(calls)))
        self._number = 0
        self._fit = Fit.SAME

    def begin(self, fit: Fit) -> None:
        """Start over: the next call is the first of a step, with a batch that compares with the plan's like this."""
        self._number = 0
        self._fit = fit

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_forward():
            return module(*args, **kwargs)
        number = self._number % len(self._calls)
        self._number += 1
        how = self._calls[number]
        if self._fit is Fit.LARGER:  # as little memory as can be had without a plan
            return _recomputed(module, False, args, kwargs)
        if how.choice is None:
            result = module(*args, **kwargs)
        elif how.choice == SWAP:
            with AsyncSaveOnCpu(None if how.swaps_inputs else _keeps(args, kwargs), module=module):
                result = module(*args, **kwargs)
        else:
            result = _recomputed(module, how.swaps_inputs, args, kwargs)
        if self._fit is Fit.SAME and number in self._unchecked:
            self._unchecked.discard(number)
            self._check(number, how, result)
        return result

    def _check(self, number: int, how: _HowBlockRuns, result: Any) -> None:
        """Compare a block's results with those of the profile.

        If they differ in dtype or shape, the block is recomputed from now on.
        """
        found = metas_of(result)
        if found == how.result_metas:
            return
        self._calls[number] = how._replace(choice=RECOMPUTE, swaps_inputs=False)
        self._mismatches.note(
            "blocks of another shape", expected=" and ".join(how.result_metas), got=" and ".join(found), where=how.where
        )


class StepBegins:
    """Runs before a planned model's forward.

    The batch is compared with the plan's, and blocks count their calls from the first again.
    """

    def __init__(self, calls: Sequence[PlannedCall], check: BatchCheck) -> None:
        self._calls = calls
        self._check = check

    def __call__(self, model: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_forward():
            fit = self._check.fit(args, kwargs, is_training=bool(model.training))
            for call in self._calls:
                call.begin(fit)

    def __reduce__(self) -> Any:
        # As the blocks of a copy are the plain ones.
        return StepBegins, ((), BatchCheck(UNKNOWN_BATCH, Mismatches("error"), was_training=True, do=""))


def _is_forward() -> bool:
    """Say whether this is the forward of a step: neither an evaluation nor a region's that runs again."""
    return _pynative_executor.requires_grad() and not is_replaying()


def metas_of(output: object) -> tuple[str, ...]:
    """List dtype and shape of the tensors that a block gives."""
    return tuple(tensor_meta(tensor) for tensor in tensors_of(output))


def _recomputed(module: Any, swaps_inputs: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    taken = TAKEN & kwargs.keys()
    if taken:
        module = functools.partial(module, **{name: kwargs.pop(name) for name in taken})
    return checkpoint(module, *args, swap_inputs=swaps_inputs, **kwargs)


def _keeps(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], bool]:
    """Say which tensors stay on the device: what the block was given, since it is somebody else's."""
    given = {storage_address(tensor) for tensor in tensors_of((args, kwargs))}
    return lambda tensor: storage_address(tensor) in given


class Applied:
    """A plan on a model, from `attach` to `remove`.

    `batch`: the plan's, with which the batch of each step is compared; `was_training`: the mode it was planned in.

    Attributes:
        begins: is called when a step begins
        check: looks at its batch
    """

    def __init__(
        self,
        model: nn.Cell,
        regions: Sequence[Any],
        decision: Sequence[Any],
        on_mismatch: str,
        *,
        batch: PlannedBatch = UNKNOWN_BATCH,
        was_training: bool = True,
    ) -> None:
        self.mismatches = Mismatches(on_mismatch)
        cells = dict(model.cells_and_names())
        by_path: dict[str, list[_HowBlockRuns]] = {}
        for region, decided in zip(regions, decision, strict=True):
            by_path.setdefault(region.path, []).append(_how(region, decided))
        check_unplanned(planned_blocks(model), by_path)
        self._model = weakref.ref(model)  # a plan does not keep a model alive
        self._wrappers: dict[nn.Cell, nn.Cell] = {}
        self.check = BatchCheck(batch, self.mismatches, was_training=was_training, do=_LARGER)
        calls: list[PlannedCall] = []
        for path, ways in by_path.items():
            # Where a larger batch is not refused, blocks that the plan leaves alone are run again as well.
            if self.mismatches.raises and all(how.choice is None for how in ways):
                continue
            if path not in cells:
                raise ArgumentError("A planned block is not in the model.", expected=path, where=type(model).__name__)
            call = PlannedCall(ways, self.mismatches)
            self._wrappers[cells[path]] = PlannedBlock(cells[path], call)
            calls.append(call)
        replace(TREE, model, self._wrappers)
        self.begins = StepBegins(calls, self.check)
        self._hook = model.register_forward_pre_hook(self.begins, with_kwargs=True)

    @property
    def wrappers(self) -> list[nn.Cell]:
        return list(self._wrappers.values())

    def remove(self) -> None:
        """Put the blocks back where the wrappers are."""
        model = self._model()
        if model is not None:
            replace(TREE, model, {wrapper: block for block, wrapper in self._wrappers.items()})
        self._wrappers = {}
        self._hook.remove()
