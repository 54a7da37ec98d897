"""A model under a plan that is made anew where memory runs out: a longer sequence came than the plan was made for.

Rules:

M1. A model has the plan it was given, and one for each batch that no plan was made for or that ran out of memory. A
    forward runs under the smallest of them whose batch this one is within (`batch_fit`); where there is none, one is
    made before the model runs. In a forward that is neither retried nor part of `run`, a batch that is larger is an
    error, as without any of this.
M2. A forward that runs out is undone (random generators, buffers, modes), planned anew for its own inputs within the
    same budget, and run again. That is exact: whatever is saved, swapped or recomputed, the values are the same bit for
    bit.
M3. `run` does so with a whole step, gradients included. What an optimizer has changed cannot be undone, so it steps
    afterwards. A step is repeated in the autocast that its forward ran under.
M4. While a plan is being made the model runs as it is: nothing here looks at its forwards.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel._base.errors import StateError
from hyper_parallel._base.log import get_logger
from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.plan.backend import PlannerBackend, StepState
from hyper_parallel.core.planner.plan.batch_fit import Fit, PlannedBatch
from hyper_parallel.core.planner.plan.budget import budget_bytes as parse_budget
from hyper_parallel.core.planner.plan.proof import planned
from hyper_parallel.core.planner.solve.solver import BudgetError
from hyper_parallel.core.swap.sizes import format_size
from hyper_parallel.platform.opaque import Module

if TYPE_CHECKING:
    from hyper_parallel.core.planner.plan.plan import MemoryPlan

_logger = get_logger("planner")
_MAX_PLANS = 4  # for one batch, each with less for activations than the one before
_LESS = 0.9  # of the room for activations, for each plan before it that ran out as well

WORDS = (
    'on_oom="replan" plans a forward anew that runs out of memory; this was the backward. '
    "plan.run(step_fn) covers the whole step: it would have restored everything, planned anew and repeated the step."
)


class _Sized(NamedTuple):
    batch_bytes: int
    plan: MemoryPlan
    batch: PlannedBatch


class ManagedModel:
    """A model on which the plan changes with the batch, by rules M.

    It lives from `apply` or the first `run` to `remove`.

    Attributes:
        current: the plan that is on the model now
        num_replans: how often one was made
    """

    def __init__(
        self, planner: PlannerBackend, model: Module, plan: MemoryPlan, *, on_mismatch: str, retries_forward: bool
    ) -> None:
        planner.check_alone("Planning anew where memory runs out")
        self.current = self._first = plan
        self.num_replans = 0
        self.retries_forward = retries_forward
        self._planner = planner
        self._model = weakref.ref(model)  # a plan does not keep a model alive
        self._device = planner.device_of(model)
        self._plans = [self._sized(plan)]
        self._on_mismatch = on_mismatch
        self._is_planning = False  # M4
        self._inputs: Any = None  # of the last forward in `run`
        self._autocast: Callable[[], Any] = contextlib.nullcontext  # of that forward: autocast
        self._run: StepState | None = None  # the state before the step that `run` runs
        self._forward = planner.patch_forward(model, self.forward)
        self._open = contextlib.ExitStack()
        plan.applied(model).check.tells = False
        if retries_forward:
            self._open.enter_context(planner.said_in_backward(WORDS))
        self._finalizer = weakref.finalize(model, self._open.close)

    def close(self) -> None:
        """Leave the model as it was, but for the plan that is on it."""
        self._forward.remove()
        self._finalizer()

    @property
    def plans(self) -> list[MemoryPlan]:
        return [sized.plan for sized in self._plans]

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run in place of the model's forward while the plan is applied."""
        if self._is_planning or not self._planner.is_first_forward():
            return original(*args, **kwargs)
        batch = self._planner.batch_of(args, kwargs)
        if self._run is not None:
            self._run.note_given((args, kwargs))
            self._inputs = batch
            self._autocast = self._planner.autocast_of(self._device)
        self._choose(batch, args, kwargs)
        if not self.retries_forward:
            return original(*args, **kwargs)
        state = self._step_state(with_gradients=False)
        state.note_given((args, kwargs))
        return self._until_it_fits(lambda: original(*args, **kwargs), state, lambda: batch, "forward")

    def _choose(self, batch: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put the plan on the model that M1 asks for."""
        model: Any = self._model()
        check = self.current.applied(model).check
        if check.fit(args, kwargs, is_training=self._planner.is_training(model)) is Fit.UNJUDGED:
            return
        chosen = next(
            (sized.plan for sized in self._plans if sized.batch.judged(args, kwargs).fit is not Fit.LARGER), None
        )
        if chosen is None and not (self.retries_forward or self._run is not None):
            check.tells = True
            try:
                check.fit(args, kwargs, is_training=self._planner.is_training(model))
            finally:
                check.tells = False
        elif chosen is None:
            _logger.info("no plan was made for a batch as large as %s; planning anew", self._planner.meta_of(batch))
            self._replan(batch, 1.0)
        elif chosen is not self.current:
            self.current.detach(model)
            self._attach(chosen)
            self.current.applied(model).begins(model, args, kwargs)

    def _attach(self, plan: MemoryPlan) -> None:
        plan.attach(self._model(), self._on_mismatch).check.tells = False
        self.current = plan

    def _sized(self, plan: MemoryPlan) -> _Sized:
        identity, planner = plan.profile.identity, self._planner
        batch = PlannedBatch(identity.batch, planner.meta_of, planner.forward_of(self._model()))
        return _Sized(identity.batch_bytes or 0, plan, batch)

    # -- a whole step --------------------------------------------------------------------------------------------------

    def run(self, step_fn: Callable[[], Any]) -> Any:
        """Run a whole step by M3, and give what `step_fn` gives."""
        if self._run is not None:
            raise StateError("`plan.run` was called inside of `plan.run`.", do="Run one step at a time.")
        state = self._run = self._step_state(with_gradients=True)
        try:
            try:
                return self._until_it_fits(step_fn, state, lambda: self._inputs, "step")
            finally:
                self._end_run(state)
        except BaseException:
            self._end_run(state)  # once more: Ctrl-C may have come as it ended
            raise

    def _end_run(self, state: StepState) -> None:
        self._run = None
        self._inputs = None
        self._autocast = contextlib.nullcontext
        state.close()

    def _step_state(self, *, with_gradients: bool) -> StepState:
        written = self.current.profile.written
        return self._planner.step_state(self._model(), with_gradients=with_gradients, written=written)

    def _until_it_fits(
        self, function: Callable[[], Any], state: StepState, inputs: Callable[[], Any], what: str
    ) -> Any:
        """Call the function; where memory runs out, put everything back, plan anew and call it again."""
        said, num_plans = "", 0
        for tried in range(_MAX_PLANS + 1):
            result, failure = self._planner.attempt(function, self._device)
            if failure is None:
                return result
            said = failure
            batch = inputs()
            if batch is None or tried == _MAX_PLANS:
                break
            state.restore()
            _logger.info("a %s ran out of memory; planning anew for %s", what, self._planner.meta_of(batch))
            self._replan(batch, _LESS**tried)
            num_plans += 1
        raise self._planner.out_of_memory(
            f"{said}\nMemory ran out in a {what}, "
            + (f"and again under {num_plans} plans made anew for it." if num_plans else "before the model ran.")
        )

    def _replan(self, batch: object, part_of_room: float) -> None:
        model = self._model()
        self.current.detach(model)
        self._is_planning = True
        try:
            with self._autocast():
                plan = self._planned(model, batch, part_of_room)
        except BaseException:
            self._attach(self.current)
            raise
        finally:
            self._is_planning = False
        plan.origin = self._first.origin
        others = [sized for sized in self._plans if sized.plan.profile.identity.batch != plan.profile.identity.batch]
        self._plans = sorted([*others, self._sized(plan)], key=lambda sized: sized.batch_bytes)
        self._attach(plan)
        self.num_replans += 1

    def _planned(self, model: Module, batch: object, part_of_room: float) -> MemoryPlan:
        first = self._first
        origin = first.origin
        profiled = self._planner.profiled(
            model,
            batch,
            (origin and origin.loss_fn) or self._planner.some_loss,
            regions=first.profile.identity.blocks,
            optimizer=origin and origin.optimizer,
            reserve_bytes=origin.reserve_bytes if origin else 0,
            keeps_output=bool(first.profile.keeps_output),
        )
        with profiled.preserved() as block, block:
            profile: StepProfile = profiled.profile()
            room = min(first.budget_bytes, parse_budget("auto", profile, self._planner.free_bytes(self._device)))
            allowed = profile.base_bytes + int((room - profile.base_bytes) * part_of_room)
            try:
                return planned(profile, allowed, profiled)
            except BudgetError as error:
                raise BudgetError(
                    "No plan fits this batch into the budget; "
                    "it is larger than those that were planned, or memory ran out.",
                    smallest_bytes=error.smallest_bytes,
                    expected=error.expected,
                    got=f"{allowed} ({format_size(allowed)}) for a batch of {self._planner.meta_of(batch)}",
                    where=error.where,
                    do="Leave such batches out, split them, or raise the budget.",
                ) from None
