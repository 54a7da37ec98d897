"""The plan a user holds: what is saved, recomputed and swapped, what that costs, and how it gets onto a model."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hyper_parallel._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    DamagedFileError,
    HyperParallelError,
    StateError,
    describe,
)
from hyper_parallel.core.planner.model.choices import Decision, RegionDecision, choices_of, words_of
from hyper_parallel.core.planner.model.choices import check as check_decision
from hyper_parallel.core.planner.model.identity import Identity
from hyper_parallel.core.planner.model.profile import StepProfile, checked
from hyper_parallel.core.planner.plan import plan_file
from hyper_parallel.core.planner.plan.backend import Applied, planner_of
from hyper_parallel.core.planner.plan.batch_fit import PlannedBatch
from hyper_parallel.core.planner.plan.batch_words import check_loss_fn
from hyper_parallel.core.planner.plan.host_need import HostNeed, host_need
from hyper_parallel.core.planner.plan.table import html_of, plan_parts, text_of
from hyper_parallel.core.planner.search.settings import Setting
from hyper_parallel.core.swap.config import SwapSetting, configure_swap, current_config
from hyper_parallel.core.swap.sizes import format_size
from hyper_parallel.platform.opaque import Module

if TYPE_CHECKING:
    from hyper_parallel.core.planner.plan.managed import ManagedModel

_ON_MISMATCH = ("error", "recompute")
_ON_OOM = ("error", "replan")
_COMPARED = ("framework", "model", "parameters", "device", "batch")  # of an identity; the first difference is told
_MADE_FOR = {"batch": "batch", "device": "device", "framework": "framework"}  # what it begins with -> what differs then
_APPLY_FIRST = "Call `plan.apply(model)` first; after `plan.verify` go on with the plan that it gave."
_PLAN_AGAIN = "Plan again, and save the new plan."


@dataclass(frozen=True)
class Predicted:
    """What a step under a plan will take.

    Bytes are of everything alive at the highest point, base included.
    """

    peak_bytes: int
    step_ms: float


@dataclass(frozen=True)
class Measured:
    """What steps under a plan took.

    `plain_step_ms`: what plain ones took that were run by turns with them; None: those of the profile count.
    """

    peak_bytes: int
    step_ms: float | None = None
    plain_step_ms: float | None = None


@dataclass(frozen=True)
class MadeWith:
    """What a plan was made with beside the model and the batch, for making it anew.

    It is not in the file: these are objects of the program.
    """

    loss_fn: Callable[[Any], Any] | None
    optimizer: Any
    reserve_bytes: int


class MemoryPlan:
    """A plan for one model and one budget, made by `plan_memory` or loaded. `print(plan)` shows it.

    Attributes:
        profile: the plain step that was measured
        decision: for each region of the profile, what happens to each op
        setting: windows of the swap engine while the plan is applied
        budget_bytes: what the user allowed
        predicted: what a step will take; `measured`: what it took when the plan was verified, or None
    """

    def __init__(
        self,
        profile: StepProfile,
        decision: Decision,
        setting: Setting,
        budget_bytes: int,
        predicted: Predicted,
        measured: Measured | None = None,
        gap: float = 0.0,
    ) -> None:
        self.profile = profile
        self.decision = decision
        self.setting = setting
        self.budget_bytes = budget_bytes
        self.predicted = predicted
        self.measured = measured
        self.gap = gap
        self.origin: MadeWith | None = None
        self.note: str | None = None  # for whoever wrote the budget; not in the file
        self._managed: weakref.WeakKeyDictionary[Any, ManagedModel] = weakref.WeakKeyDictionary()
        self._last_stats: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
        self._applied: weakref.WeakKeyDictionary[Any, tuple[Applied, SwapSetting | None]] = weakref.WeakKeyDictionary()

    # -- what it says --------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """True where the model fits as it is: applying changes nothing."""
        return all(chosen.is_plain for chosen in self.decision)

    @property
    def has_swaps(self) -> bool:
        return any(chosen.swaps for chosen in self.decision)

    @property
    def base_bytes(self) -> int:
        return self.profile.base_bytes

    @property
    def peak_bytes(self) -> int:
        """The peak of a step under the plan: the measured one, where there is one."""
        return self.predicted.peak_bytes if self.measured is None else self.measured.peak_bytes

    @property
    def plain_step_ms(self) -> float:
        """What a plain step takes: those that were run by turns with the plan's, where there are such."""
        return (self.measured.plain_step_ms if self.measured else None) or self.profile.step_ms

    @property
    def predicted_to_plain(self) -> float:
        """What a step will take, as a multiple of a plain one."""
        return self.predicted.step_ms / self.profile.step_ms if self.profile.step_ms else 1.0

    @property
    def measured_to_plain(self) -> float | None:
        """What steps under the plan took, as a multiple of plain ones; None: they were not timed."""
        if self.measured is None or self.measured.step_ms is None:
            return None
        return self.measured.step_ms / self.plain_step_ms if self.plain_step_ms else None

    @cached_property
    def host(self) -> HostNeed:
        """How much of the host's memory, pinned, or of a disk is needed for what is swapped."""
        return host_need(self.profile, self.decision, self.setting)

    def __str__(self) -> str:
        return text_of(plan_parts(self))

    def __repr__(self) -> str:
        is_measured, to_plain = self.measured is not None, self.measured_to_plain
        words = [
            f"at most {format_size(self.budget_bytes)}",
            f"peak {format_size(self.peak_bytes)} {'measured' if is_measured else 'predicted'}",
        ]
        if self.is_empty:
            words.append("nothing is changed")
        elif to_plain is None:
            words.append(f"{self.predicted_to_plain:.2f} of the plain step's time predicted")
        else:
            words.append(f"{to_plain:.2f} of the plain step's time measured")
        return f"<MemoryPlan for {self.profile.identity.model_words}: {', '.join(words)}; print it for the table>"

    def _repr_html_(self) -> str:
        return html_of(plan_parts(self))

    def as_dict(self) -> dict[str, Any]:
        """Give everything, for JSON; what is asked for most comes first."""
        return {
            "budget_bytes": self.budget_bytes,
            "plain": {"peak_bytes": self.profile.peak_bytes, "step_ms": self.profile.step_ms},
            "predicted": vars(self.predicted),
            "measured": None if self.measured is None else vars(self.measured),
            "gap": self.gap,
            "setting": self.setting._asdict(),
            "host": self.host._asdict(),
            "facts": plan_file.facts_of(self.profile),
            "decision": [
                {"plain": True}
                if chosen.is_plain
                else {"plain": False, "ops": words_of(chosen.ops), "inputs": words_of(chosen.inputs)}
                for chosen in self.decision
            ],
            "profile": {**plan_file.profile_as_dict(self.profile), "facts": {}},
        }

    # -- on a model ----------------------------------------------------------------------------------------------------

    def apply(self, model: Module, *, on_mismatch: str = "error", on_oom: str = "error") -> MemoryPlan:
        """Let `model` train inside the budget from now on; `remove` undoes it.

        Its names and parameters stay as they are.

        Args:
            model: the model that was planned, or one with the same parameters.
            on_mismatch: a batch that is larger than the plan's in any dim is an "error" before it runs, in any step; so
                is, in the first step with a batch like the plan's, an op that was planned and does not come, or comes
                with another shape or dtype. With "recompute" these are recomputed and counted in `stats`.
            on_oom: with "replan", a batch that is larger is planned before it runs, within the same budget; and a
                forward that runs out of memory is planned again for its own arguments and repeated; its result is the
                same bit for bit. For the backward, too: `run`.

        Raises:
            ValueError: the model is another one; the first difference is named.
            StateError: this plan, or another one, is applied to it already; or "replan" where several ranks train
                together.
        """
        check_choices(on_mismatch=on_mismatch, on_oom=on_oom)
        planner_of(model, "MemoryPlan.apply")
        if model in self._applied or model in self._managed:
            raise StateError("The plan is applied to this model already.", do="Call `plan.remove(model)` first.")
        self.attach(model, on_mismatch)
        try:
            if on_oom == "replan":
                self._manage(model, on_mismatch, retries_forward=True)
        except BaseException:
            self.detach(model)
            raise
        return self

    def remove(self, model: Any) -> None:
        """Put the model back as it was before `apply`.

        Raises:
            StateError: the plan is not applied to it.
        """
        current = self._on(model)
        self._last_stats[model] = self.stats(model)
        current.detach(model)
        managed = self._managed.pop(model, None)
        if managed is not None:
            managed.close()

    def run(self, step_fn: Callable[[], Any], *, model: Module = None) -> Any:
        """Run one step, made to fit: if memory runs out, all is put back, planned again for this batch, and repeated.

        Random generators, buffers and gradients are put back, so the result is what it would have been with enough
        memory, bit for bit. Gradients that are there already when it begins are copied to the host for that; after
        `zero_grad(set_to_none=True)` there are none.

        Args:
            step_fn: runs forward and backward, and can be called again; what it gives is given back. The optimizer
                steps afterwards.
            model: which one, if the plan is applied to several.

        Raises:
            StateError: the plan is not applied, or `step_fn` had changed parameters when memory ran out.
            BudgetError (a ValueError): no plan fits this batch into the budget.

        Example:
            >>> import torch
            >>> blocks = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(2))
            >>> model = torch.nn.Sequential(torch.nn.Sequential(*blocks))
            >>> from hyper_parallel import plan_memory
            >>> loss_of = lambda y: y.square().sum()
            >>> plan = plan_memory(model, torch.ones(4, 8), loss_fn=loss_of, budget="100%", progress=False)
            >>> _ = plan.apply(model)
            >>> plan.run(lambda: loss_of(model(torch.ones(4, 8))).backward())
            >>> model[0][0][0].weight.grad is not None
            True
        """
        if not callable(step_fn):
            raise ArgumentTypeError("`run` is given a function.", expected="a callable", got=describe(step_fn))
        models = list({*self._applied, *self._managed}) if model is None else [model]
        if len(models) != 1:
            raise StateError(
                "Which model runs is not clear.",
                expected="a plan that is applied to one model",
                got=f"one that is applied to {len(models)}",
                do="Call `plan.apply(model)` first, or name the model: plan.run(step_fn, model=model).",
            )
        self._on(models[0])
        managed = self._managed.get(models[0]) or self._manage(models[0], "recompute", retries_forward=False)
        return managed.run(step_fn)

    def replans(self, model: Module) -> list[MemoryPlan]:
        """List the plans that were made anew for this model since the plan was applied, by the size of their
        batches.
        """
        self._on(model)
        return [plan for plan in self._managed[model].plans if plan is not self] if model in self._managed else []

    def _manage(self, model: Module, on_mismatch: str, *, retries_forward: bool) -> ManagedModel:
        from hyper_parallel.core.planner.plan.managed import ManagedModel

        planner = planner_of(model, "MemoryPlan.run")
        managed = ManagedModel(planner, model, self, on_mismatch=on_mismatch, retries_forward=retries_forward)
        self._managed[model] = managed
        return managed

    def _on(self, model: Module) -> MemoryPlan:
        """Find the plan that is on the model: this one, or one made anew in its place.

        Raises:
            StateError: none is.
        """
        try:
            current = self._managed[model].current if model in self._managed else self
            is_on = model in current._applied
        except TypeError:  # what cannot be a key is no model
            is_on = False
        if not is_on:
            raise StateError("The plan is not applied to this model.", do=_APPLY_FIRST)
        return current

    def attach(self, model: Module, on_mismatch: str) -> Applied:
        """Put this very plan on the model, and nothing around it; give what carries it out."""
        planner = planner_of(model, "MemoryPlan.apply")
        self._check_identity(planner.identity(model))
        identity = self.profile.identity
        ways: dict[str, Any] = {"was_training": identity.is_training is not False}
        ways["batch"] = PlannedBatch(identity.batch, planner.meta_of, planner.forward_of(model))
        # What the profile of this framework speaks of.
        if self.setting.ahead_bytes:
            ways["ahead_bytes"] = self.setting.ahead_bytes
        if self.profile.host is not None and self.profile.host.region_ms:
            ways["by_framework"] = True
        if identity.autocast is not None:
            ways["autocast"] = identity.autocast
        applied = planner.apply(model, self.profile.regions, self.decision, on_mismatch, **ways)
        applied.mismatches.is_in_another_mode = identity.is_training is False and planner.is_training(model)
        setting = None
        try:
            setting = self._configure() if self.has_swaps else None
            self._applied[model] = (applied, setting)
        except BaseException:
            self._applied.pop(model, None)
            applied.remove()
            if setting is not None:
                setting.undo()
            raise
        return applied

    def applied(self, model: Module) -> Applied:
        """Give what carries this very plan out on the model."""
        return self._entry(model)[0]

    def _entry(self, model: Module) -> tuple[Applied, SwapSetting | None]:
        try:
            found = self._applied.get(model)
        except TypeError:  # what cannot be a key is no model
            found = None
        if found is None:
            raise StateError("The plan is not applied to this model.", do=_APPLY_FIRST)
        return found

    def detach(self, model: Module) -> None:
        """Undo `attach`."""
        applied, setting = self._entry(model)
        del self._applied[model]
        try:
            applied.remove()
        finally:
            if setting is not None:
                setting.undo()

    def _configure(self) -> SwapSetting:
        """Configure the engine with the plan's windows; the user's tiers stay."""
        config = current_config()
        return configure_swap(
            host_budget=config.host_budget,
            disk_dir=config.disk_dir,
            disk_budget=config.disk_budget,
            window_bytes=self.setting.window_bytes,
            prefetch_bytes=self.setting.prefetch_bytes,
            min_bytes=config.min_bytes,
            on_full="wait",
            check=config.check,
        )

    def _check_identity(self, found: Identity) -> None:
        """Raise where `found`, as far as it says something, is not what the plan was made for."""
        own = self.profile.identity
        got = {name: value for name in _COMPARED if (value := getattr(found, name)) is not None}
        expected = {name: value for name in got if (value := getattr(own, name)) is not None}
        difference = plan_file.first_difference(expected, got)
        if difference is not None:
            where, wanted, words = difference
            what = next((kind for name, kind in _MADE_FOR.items() if where.startswith(name)), "model")
            raise ArgumentError(
                f"The plan was made for another {what}.",
                expected=wanted,
                got=words,
                where=where,
                do="Plan this model: `hp.plan_memory(model, batch, budget=...)`.",
            )

    def stats(self, model: Module) -> dict[str, int]:
        """Count what was met that the plan does not know, or knows otherwise, since it was applied; and how often a
        plan was made anew.

        If the plan is not applied any more, these are the numbers of the last time.
        """
        if model in self._last_stats and model not in self._applied and model not in self._managed:
            return dict(self._last_stats[model])
        counts = dict(self._on(model).applied(model).mismatches.counts)
        if model in self._managed and self._managed[model].num_replans:
            counts["plans made anew"] = self._managed[model].num_replans
        return counts

    def verify(self, model: Module, batch: object, *, loss_fn: Callable[[Any], Any] | None = None) -> MemoryPlan:
        """Run steps under the plan and give it with what they took; solved again if that was above the budget.

        Go on with the plan that comes back: `plan = plan.verify(model, batch)`. If a plan was applied before, that one
        is applied now. Else the model is left as it was.
        """
        from hyper_parallel.core.planner.plan.proof import verified

        check_loss_fn(loss_fn)
        planner = planner_of(model, "MemoryPlan.verify")
        was_applied = model in self._applied or model in self._managed
        replans = was_applied and model in self._managed and self._managed[model].retries_forward
        if was_applied:
            self.remove(model)
        if loss_fn is None and self.origin is not None:
            loss_fn = self.origin.loss_fn
        plan = verified(self, planner, model, batch, loss_fn)
        plan.origin = self.origin
        if was_applied:
            plan.apply(model, on_oom="replan" if replans else "error")
        return plan

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page.

        It shows memory over one step before and after, by choice and by block; copies with waits; step time under other
        budgets (solved within 15 s); and the tables per block and module.
        """
        from hyper_parallel.report.page import write_report

        write_report(self, path)

    # -- as a file -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, with what it was made for."""
        plan_file.write(path, self.as_dict())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> MemoryPlan:
        """Load a plan that was saved.

        Whether it fits a model is checked when it is applied, and for a batch by `check`.

        Raises:
            FileNotFoundError, DamagedFileError: there is no plan in the file.
        """
        data = plan_file.read(path)
        try:
            profile = plan_file.profile_from_dict({**data["profile"], "facts": data["facts"]})
            decision = tuple(
                RegionDecision(True, (None,) * len(region.ops), (None,) * len(region.inputs))
                if entry["plain"] is True
                else checked(RegionDecision(entry["plain"], choices_of(entry["ops"]), choices_of(entry["inputs"])))
                for entry, region in zip(data["decision"], profile.regions, strict=True)
            )
            for region, chosen in zip(profile.regions, decision, strict=True):
                check_decision(region, chosen)
            setting = Setting.from_dict(data["setting"], num_regions=len(profile.regions))
            predicted = checked(Predicted(**data["predicted"]))
            measured = None if data["measured"] is None else checked(Measured(**data["measured"]))
            return MemoryPlan(profile, decision, setting, data["budget_bytes"], predicted, measured, data["gap"])
        except HyperParallelError as error:
            raise DamagedFileError(
                f"A plan file cannot be carried out. {error.what}",
                expected=error.expected,
                got=error.got,
                where=", ".join(filter(None, (error.where, str(path)))),
                do=_PLAN_AGAIN,
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFileError(
                "A plan file lacks something.", got=f"{type(error).__name__}: {error}", where=str(path), do=_PLAN_AGAIN
            ) from error

    def check(self, model: Module, batch: object) -> None:
        """Raise where the plan was not made for this model and a batch that looks like this one.

        Raises:
            ValueError: it was not; the first difference is named.
        """
        self._check_identity(planner_of(model, "MemoryPlan.check").identity(model, batch))


def check_choices(*, on_mismatch: object = "error", on_oom: object = "error") -> None:
    """Check what `apply` is told, before anything else is done.

    Raises:
        ValueError: there is no such choice.
    """
    for name, value, known in (("on_mismatch", on_mismatch, _ON_MISMATCH), ("on_oom", on_oom, _ON_OOM)):
        if value not in known:
            raise ArgumentError(f"`{name}` has no such choice.", expected=" or ".join(known), got=describe(value))
