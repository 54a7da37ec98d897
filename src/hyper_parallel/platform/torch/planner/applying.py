"""Carrying a plan out on a model: blocks are wrapped, and a policy gives every op the choice that was made for it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel._base.errors import ArgumentError, StateError
from hyper_parallel.core.activation_checkpoint.options import TAKEN
from hyper_parallel.core.activation_checkpoint.policy import ByOutput, CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.replacement import replace
from hyper_parallel.core.planner.model.blocks import check_unplanned
from hyper_parallel.core.planner.model.choices import RECOMPUTE, SAVE, SWAP, Choice
from hyper_parallel.core.planner.model.mismatches import MismatchError, Mismatches
from hyper_parallel.core.planner.plan.batch_fit import UNKNOWN_BATCH, BatchCheck, Fit, PlannedBatch
from hyper_parallel.core.regions.module_calls import Occurrence
from hyper_parallel.core.regions.policy import Answer, PolicyContext, RegionPolicy
from hyper_parallel.platform.torch.planner.blocks import COMPILE_BLOCKS, check_called
from hyper_parallel.platform.torch.planner.planned_block import PlannedBlock, planned_blocks
from hyper_parallel.platform.torch.planner.signature import autocast_now, tensor_meta
from hyper_parallel.platform.torch.planner.steps import device_of
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
from hyper_parallel.platform.torch.regions.compiled_code import is_in_compiled_call
from hyper_parallel.platform.torch.regions.op_traits import traits_of
from hyper_parallel.platform.torch.regions.repeated_call import checkpoint_by_framework
from hyper_parallel.platform.torch.regions.surroundings import is_replaying
from hyper_parallel.platform.torch.regions.unwatched_region import UnwatchedRegion
from hyper_parallel.platform.torch.wrappers.replacement import TREE

Key = tuple[str, int, str, int]
_UNPLANNED = object()
_LARGER = (
    'Plan with the largest batch that training has (`batch=` of a trainer\'s callback), or apply with on_oom="replan".'
)


class PlannedPolicy(RegionPolicy):
    """The policy of one region: it answers by the plan.

    What it is asked about an op and does not know is recomputed, and counted. `ahead_bytes`: what the region leaves
    room for in its backward, to be loaded for others; None: the engine decides.
    """

    is_pure = True  # it answers by the key alone

    def __init__(self, region: Any, decision: Any, mismatches: Mismatches, ahead_bytes: int | None = None) -> None:
        self._policies = {
            SAVE: CheckpointPolicy.MUST_SAVE,
            SWAP: CheckpointPolicy.MUST_SWAP,
            RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE,
        }
        self._default = CheckpointPolicy.PREFER_RECOMPUTE
        self.ahead_bytes = ahead_bytes
        self.ends_forward = False  # of a forward that swaps: nothing more of it comes after this region
        self._path = region.path
        self._is_dynamic = region.is_dynamic
        self._mismatches = mismatches
        self._saves_all = decision.is_plain
        choices = decision.ops
        if decision.is_plain:  # what backward needs, and no more: what a policy saves is held until the region ends
            choices = tuple(SAVE if op.is_needed else None for op in region.ops)
        pairs = [(op, choice) for op, choice in zip(region.ops, choices, strict=True) if op.part is None]
        self._choices: dict[Key, Choice | None] = {op.key: choice for op, choice in pairs}
        # What compiled code makes: result by result, where nothing of it is made again.
        self._by_output: dict[Key, Any] = {
            region.ops[index].key: ByOutput({region.ops[part].part: self._policies[choices[part]] for part in parts})
            for index, parts in region.parts().items()
            if all(choices[part] in (SAVE, SWAP) for part in parts)
        }
        self._result_metas: dict[Key, tuple[str, ...]] = {
            op.key: op.result_metas for op in region.ops if op.result_metas
        }
        # About views, which are never kept; `passes`: what runs them, as the region found out. See `Record`.
        self.answers = {}
        self.passes = {}
        self._names: dict[Any, str] = {}
        # What calls the region, if it need not be watched: not where ops come that nobody planned, which are counted.
        self.observer: UnwatchedRegion | None = None
        self.met: set[Key] | None = set()  # None when the first call with a batch like the plan's is over
        self.is_compared = True  # is this such a call?
        self.is_as_planned = True  # so far: every op that it was asked about was one of the plan

    def answer(
        self, context: PolicyContext, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CheckpointPolicy:
        """Answer for views alone: about all else `planned_answer` is asked."""
        return self._of_view(op)

    def planned_answer(self, op: Any, module: str, where: Occurrence, output: Any) -> Answer:
        """Answer for an op by its place.

        `module`: its path below the block; `where`: which call of that this is, and which of the op in that call.
        """
        name = self._names.get(op)
        if name is None:
            name = self._names[op] = "" if traits_of(op).is_view else str(op)
        if not name:
            return self._of_view(op)
        key = (module, where.call, name, where.occurrence_in_call)
        choice: Any = self._choices.get(key, _UNPLANNED)
        if choice is _UNPLANNED:
            self.is_as_planned, self.observer = False, None
            self._mismatches.note("ops that were not planned", expected="", got="", where="", may_raise=False)
            return self._policies[SAVE] if self._saves_all else self._default
        if self.met is not None and self.is_compared:
            self.met.add(key)
            if not self._is_as_profiled(key, output):
                self.is_as_planned = False
                return self._default
        if choice is None:
            return self._by_output.get(key, self._default)
        return self._policies[choice]

    def _of_view(self, op: Any) -> CheckpointPolicy:
        """Answer for a view: no plan has choices for views, so none is kept, and none is asked about again."""
        self._names[op] = ""
        self.answers[id(op)] = self._default  # `_names` holds the op, so that no other gets its id
        return self._default

    def _is_as_profiled(self, key: Key, output: Any) -> bool:
        """Say whether an op's results have the dtypes and shapes of the profile."""
        expected = self._result_metas.get(key)
        if expected is None:
            return True
        found = tuple(_metas(output))
        others = iter(found)  # compiled code hands on what it was given among what it makes
        if all(meta in others for meta in expected):
            return True
        self._mismatches.note(
            "ops of another shape",
            expected=" and ".join(expected),
            got=" and ".join(found),
            where=words(self._path, key),
            may_raise=not self._is_dynamic,
        )
        return False

    def check_all_met(self) -> None:
        """Note what was planned and not met, when the first call with a batch like the plan's is over."""
        if self.met is None or not self.is_compared:
            return
        met, self.met = self.met, None
        for key, choice in self._choices.items():
            if (choice in (SAVE, SWAP) or key in self._by_output) and key not in met:
                self._mismatches.note(
                    "planned ops that were not met",
                    expected="this op, which the plan has a choice for",
                    got="a forward without it",
                    where=words(self._path, key),
                    may_raise=not self._is_dynamic,
                )


class PlannedCall:
    """Runs a planned block in place of its wrapper: the calls of a step in turn, each with its own decision."""

    def __init__(
        self,
        regions: Sequence[Any],
        decisions: Sequence[Any],
        mismatches: Mismatches,
        is_announced: bool,
        ahead_bytes: Sequence[int | None] = (),
        autocast_check: AutocastCheck | None = None,
        *,
        by_framework: bool = False,
        is_unwatched: bool = False,
    ) -> None:
        self._autocast_check = autocast_check
        self._calls: list[tuple[PlannedPolicy | None, bool] | None] = []
        ahead_bytes = ahead_bytes or [None] * len(regions)
        for region, decision, ahead in zip(regions, decisions, ahead_bytes, strict=True):
            if decision.is_plain and not is_announced:
                self._calls.append(None)
            elif by_framework and not is_announced and decision.is_whole:
                self._calls.append((None, False))
            else:
                policy = PlannedPolicy(region, decision, mismatches, ahead)
                policy.ends_forward = is_announced and region is regions[-1]
                if is_unwatched and not decision.is_plain:
                    policy.observer = UnwatchedRegion(is_dynamic=region.is_dynamic)
                self._calls.append((policy, SWAP in decision.inputs))
        self._number = 0
        self._is_larger = False  # the batch of this step, than the plan's

    def begin(self, fit: Fit) -> None:
        """Start over: the next call is the first of a step, with a batch that compares with the plan's like this."""
        self._number = 0
        self._is_larger = fit is Fit.LARGER
        for policy, _ in filter(None, self._calls):
            if policy is not None:
                policy.is_compared = fit is Fit.SAME

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_forward():
            return module(*args, **kwargs)
        planned = (None, False) if self._is_larger else self._calls[self._number % len(self._calls)]
        self._number += 1
        if planned is None:
            return module(*args, **kwargs)
        policy, swap_inputs = planned
        taken = TAKEN & kwargs.keys()
        if taken:
            module = functools.partial(module, **{name: kwargs.pop(name) for name in taken})
        if self._is_larger:  # as little memory as can be had without a plan
            return checkpoint(module, *args, **kwargs)
        if policy is None:
            return checkpoint_by_framework(module, *args, **kwargs)
        try:
            if (unwatched := policy.observer) is not None:
                result = unwatched.call(module, policy, args, kwargs)
            else:
                result = checkpoint(module, *args, policy_fn=policy, swap_inputs=swap_inputs, **kwargs)
            policy.check_all_met()
        except MismatchError as error:
            if self._autocast_check is not None:
                self._autocast_check.check(error)
            raise
        return result


class StepBegins:
    """Runs before a planned model's forward.

    The batch is compared with the plan's, and blocks count their calls from the first again.
    """

    def __init__(self, calls: Sequence[PlannedCall], check: BatchCheck) -> None:
        self._calls = calls
        self._check = check

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_forward():
            fit = self._check.fit(args, kwargs, is_training=model.training)
            for call in self._calls:
                call.begin(fit)

    def __reduce__(self) -> Any:
        # The blocks of a copy are plain and can be loaded without this package, and so can this hook, which does
        # nothing whatever it is given.
        return getattr, (contextlib.nullcontext(), "__exit__")


def _is_forward() -> bool:
    """Say whether this is the forward of a step: neither an evaluation nor a region's that runs again."""
    return torch.is_grad_enabled() and not is_replaying()


class AutocastCheck:
    """The autocast that blocks were profiled under, to tell why they do something else now.

    `autocast`: its dtype, "off", or None if nobody knows.
    """

    def __init__(self, device: torch.device, autocast: str | None) -> None:
        self._device = device
        self._autocast = autocast

    def check(self, error: MismatchError) -> None:
        """Look for the error's cause around the block that is being called.

        Raises:
            StateError: what is around it explains the error.
        """
        autocast = autocast_now(self._device)
        if self._autocast not in (None, autocast):
            raise StateError(
                "The model runs under another autocast than it was planned under.",
                expected=f"autocast {self._autocast}",
                got=autocast,
                where=error.where,
                do="Plan inside of the `with torch.autocast(...)` that training has around its forward.",
            ) from error
        if is_in_compiled_call():
            raise StateError(
                "A planned model was compiled as a whole, and the plan does not meet the ops that it was made for.",
                expected="compiled blocks, or no compiled code around them",
                got="torch.compile around planned blocks",
                where=error.where,
                do=COMPILE_BLOCKS,
            ) from error


class Applied:
    """A plan on a model, from `attach` to `remove`.

    `batch`: the plan's, with which the batch of each step is compared; `was_training`: the mode it was planned in.
    `ahead_bytes`: see `Setting`. `autocast`: see `AutocastCheck`.

    `by_framework`: blocks that are recomputed whole are so by the framework's own checkpoint, which knows no ops and so
    costs the host less. `is_unwatched`: where nothing is swapped, forwards run without a dispatch mode once they were
    seen. Where these two are None, both are so on an accelerator where nothing is swapped.

    Attributes:
        begins: is called when a step begins
        check: looks at its batch
    """

    def __init__(
        self,
        model: nn.Module,
        regions: Sequence[Any],
        decision: Sequence[Any],
        on_mismatch: str,
        *,
        batch: PlannedBatch = UNKNOWN_BATCH,
        was_training: bool = True,
        ahead_bytes: Sequence[int] = (),
        by_framework: bool | None = None,
        is_unwatched: bool | None = None,
        autocast: str | None = None,
    ) -> None:
        self.mismatches = Mismatches(on_mismatch)
        autocast_check = AutocastCheck(device_of(model), autocast)
        blocks = dict(model.named_modules())
        swaps = any(chosen.swaps for chosen in decision)
        is_light = not swaps and device_of(model).type != "cpu"
        by_framework = is_light if by_framework is None else by_framework
        is_unwatched = is_light if is_unwatched is None else is_unwatched and not swaps
        by_path: dict[str, list[int]] = {}
        for index, region in enumerate(regions):
            by_path.setdefault(region.path, []).append(index)
        self._wrappers: dict[nn.Module, nn.Module] = {}
        self.check = BatchCheck(batch, self.mismatches, was_training=was_training, do=_LARGER)
        calls: list[PlannedCall] = []
        check_unplanned(planned_blocks(model), by_path)
        check_called(model, [path for path in by_path if path in blocks])
        for path, indices in by_path.items():
            # Where something is swapped the last block tells the engine that backward has begun: a region that saves
            # all.
            is_announced = swaps and len(regions) - 1 in indices
            decisions = [decision[index] for index in indices]
            # Where a larger batch is not refused, blocks that the plan leaves alone are run again as well.
            if not is_announced and self.mismatches.raises and all(chosen.is_plain for chosen in decisions):
                continue
            if path not in blocks:
                raise ArgumentError("A planned block is not in the model.", expected=path, where=type(model).__name__)
            call = PlannedCall(
                [regions[index] for index in indices],
                decisions,
                self.mismatches,
                is_announced,
                [ahead_bytes[index] for index in indices] if ahead_bytes else (),
                autocast_check,
                by_framework=by_framework,
                is_unwatched=is_unwatched,
            )
            self._wrappers[blocks[path]] = PlannedBlock(blocks[path], call)
            calls.append(call)
        self._model = weakref.ref(model)  # a plan does not keep a model alive
        self.begins = StepBegins(calls, self.check)
        try:
            replace(TREE, model, self._wrappers)
            model.register_forward_pre_hook(self.begins, with_kwargs=True)
        except BaseException:  # wrapped whole, or not at all
            self.remove()
            raise

    @property
    def wrappers(self) -> list[nn.Module]:
        return list(self._wrappers.values())

    def remove(self) -> None:
        """Put the blocks back where the wrappers are."""
        model = self._model()
        if model is not None:
            unwrap(model, self._wrappers)
            forget_forward_pre_hook(model, self.begins)
        self._wrappers = {}


def forget_forward_pre_hook(model: nn.Module, hook: Any) -> None:
    """Take a hook off the model, also where Ctrl-C came before anybody had its handle."""
    for key in [key for key, known in model._forward_pre_hooks.items() if known is hook]:
        del model._forward_pre_hooks[key]
        model._forward_pre_hooks_with_kwargs.pop(key, None)


def unwrap(model: nn.Module, wrappers: dict[nn.Module, nn.Module]) -> None:
    """Put the blocks, the keys of `wrappers`, back where their wrappers are."""
    blocks = {wrapper: block for block, wrapper in wrappers.items()}
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child in blocks
    ]
    for parent, name, child in places:
        setattr(parent, name, blocks[child])


def words(path: str, key: Key) -> str:
    """Say where an op is: "layers.3.mlp, aten.exp.default"."""
    module, call, name, occurrence = key
    place = f"{path}.{module}" if module else path
    number = "" if occurrence == 0 else f" (number {occurrence + 1} there)"
    return f"{place}{f', call {call + 1}' if call else ''}, {name}{number}"


def _metas(output: Any) -> list[str]:
    """List dtype and shape of the tensors in an op's output: "float32[2, 8]"."""
    if isinstance(output, torch.Tensor):
        return [tensor_meta(output.dtype, output.shape)]
    if isinstance(output, (list, tuple)):
        return [meta for item in output for meta in _metas(item)]
    return []
