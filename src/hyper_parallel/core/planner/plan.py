"""The plan a user holds: what is saved, recomputed and swapped, what that costs, and how it gets onto a model."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel.core.planner import plan_file
from hyper_parallel.core.planner.choices import Decision, RegionDecision
from hyper_parallel.core.planner.profile import StepProfile
from hyper_parallel.core.planner.settings import Setting
from hyper_parallel.core.planner.table import plan_table
from hyper_parallel.core.swap.config import SwapSetting, configure_swap, current_config
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.selection import part_of

_ON_MISMATCH = ("error", "recompute")


@dataclass(frozen=True)
class Predicted:
    """What a step under a plan takes. Bytes of everything alive at the highest point, base included."""

    peak_bytes: int
    step_ms: float


@dataclass(frozen=True)
class Measured:
    """What steps under a plan took."""

    peak_bytes: int
    step_ms: float | None = None


class MemoryPlan:
    """Made by `plan_memory`, or loaded. `print(plan)` shows it.

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
        self._applied: weakref.WeakKeyDictionary[Any, tuple[Any, SwapSetting | None]] = weakref.WeakKeyDictionary()

    # -- what it says ---------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether the model fits as it is: applying changes nothing."""
        return all(each.is_plain for each in self.decision)

    @property
    def has_swaps(self) -> bool:
        return any("swap" in each.ops or "swap" in each.inputs for each in self.decision)

    @property
    def base_bytes(self) -> int:
        return self.profile.base_bytes

    def __str__(self) -> str:
        return plan_table(self)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "facts": self.profile.facts,
            "budget_bytes": self.budget_bytes,
            "predicted": vars(self.predicted),
            "measured": None if self.measured is None else vars(self.measured),
            "gap": self.gap,
            "setting": self.setting._asdict(),
            "decision": [
                {"plain": True}
                if each.is_plain
                else {"plain": False, "ops": list(each.ops), "inputs": list(each.inputs)}
                for each in self.decision
            ],
            "profile": {**self.profile.as_dict(), "facts": {}},
        }

    # -- on a model -----------------------------------------------------------------------------------------------------

    def apply(self, model: Any, *, on_mismatch: str = "error") -> MemoryPlan:
        """Let `model` train inside the budget from now on; `remove` undoes it. Its names and parameters stay as they are.

        Args:
            model: the model that was planned, or one with the same parameters.
            on_mismatch: in the first step, an op that was planned and does not come, or comes with another shape or dtype, is an
                "error"; with "recompute" it is recomputed and counted in `stats`.

        Raises:
            ValueError: the model is another one; the first difference is named.
            StateError: the plan is applied to it already.
        """
        if on_mismatch not in _ON_MISMATCH:
            raise ArgumentError(
                "`on_mismatch` has no such choice.", expected=" or ".join(_ON_MISMATCH), got=describe(on_mismatch)
            )
        if model in self._applied:
            raise StateError("The plan is applied to this model already.", do="Call `plan.remove(model)` first.")
        part = _part(model, "MemoryPlan.apply")
        self._check_facts(part.model_facts(model))
        applied = part.Applied(model, self.profile.regions, self.decision, on_mismatch)
        try:
            setting = self._configure() if self.has_swaps else None
        except BaseException:
            applied.remove()
            raise
        self._applied[model] = (applied, setting)
        return self

    def remove(self, model: Any) -> None:
        """Put the model back as it was before `apply`.

        Raises:
            StateError: the plan is not applied to it.
        """
        if model not in self._applied:
            raise StateError("The plan is not applied to this model.", do="Call `plan.apply(model)` first.")
        applied, setting = self._applied.pop(model)
        applied.remove()
        if setting is not None:
            setting.undo()

    def _configure(self) -> SwapSetting:
        """The plan's windows; the user's tiers stay."""
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

    def _check_facts(self, facts: dict[str, Any]) -> None:
        expected = {name: self.profile.facts[name] for name in facts if name in self.profile.facts}
        difference = plan_file.first_difference(expected, facts)
        if difference is not None:
            where, wanted, got = difference
            raise ArgumentError(
                "The plan was made for another model or device.",
                expected=wanted,
                got=got,
                where=where,
                do="Plan this model: `hp.plan_memory(model, batch, budget=...)`.",
            )

    def stats(self, model: Any) -> dict[str, int]:
        """What was met that the plan does not know, or knows otherwise, since it was applied."""
        if model not in self._applied:
            raise StateError("The plan is not applied to this model.", do="Call `plan.apply(model)` first.")
        return dict(self._applied[model][0].mismatches.counts)

    def verify(self, model: Any, batch: Any, *, loss_fn: Callable[[Any], Any] | None = None) -> MemoryPlan:
        """Run steps under the plan and compare: the plan with what was measured, solved again if it was above the budget.

        The model is left as it was, with the plan applied only if it was before.
        """
        from hyper_parallel.core.planner.planning import verified

        was_applied = model in self._applied
        if was_applied:
            self.remove(model)
        plan = verified(self, _part(model, "MemoryPlan.verify"), model, batch, loss_fn)
        if was_applied:
            plan.apply(model)
        return plan

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page: memory over one step before and after, by choice and by block; copies with waits; step time under
        other budgets (solved within 15 s); the tables per block and module."""
        from hyper_parallel.report.page import write_report

        write_report(self, path)

    # -- as a file ------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, with what it was made for."""
        plan_file.write(path, self.as_dict())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> MemoryPlan:
        """A plan that was saved. Whether it fits a model is checked when it is applied, and for a batch by `check`.

        Raises:
            FileNotFoundError, DamagedFileError: there is no plan in the file.
        """
        from hyper_parallel._base.errors import DamagedFileError

        data = plan_file.read(path)
        try:
            profile = StepProfile.from_dict({**data["profile"], "facts": data["facts"]})
            decision = tuple(
                RegionDecision(True, (None,) * len(region.ops), (None,) * len(region.inputs))
                if each["plain"]
                else RegionDecision(False, tuple(each["ops"]), tuple(each["inputs"]))
                for each, region in zip(data["decision"], profile.regions, strict=True)
            )
            measured = None if data["measured"] is None else Measured(**data["measured"])
            return MemoryPlan(
                profile, decision, Setting(**data["setting"]), data["budget_bytes"], Predicted(**data["predicted"]),
                measured, data["gap"],
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFileError(
                "A plan file lacks something.", got=f"{type(error).__name__}: {error}", where=str(path)
            ) from error

    def check(self, model: Any, batch: Any) -> None:
        """Whether the plan was made for this model and a batch that looks like this one.

        Raises:
            ValueError: it was not; the first difference is named.
        """
        self._check_facts(_part(model, "MemoryPlan.check").all_facts(model, batch))


def _part(model: Any, call: str) -> Any:
    """The planner's part of the model's framework."""
    if model is None:
        raise ArgumentTypeError(f"`{call}` needs a model.", expected="a module", got="None")
    return part_of(platform_of(model, call=call), "planner", call)
