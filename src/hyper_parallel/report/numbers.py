"""Everything that a page shows, as numbers: the page is drawn from this, and has it as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel._base.errors import FrameworkMissingError
from hyper_parallel.core.planner.model.choices import (
    RECOMPUTE,
    SAVE,
    SWAP,
    Choice,
    RegionDecision,
    kept_bytes,
    recompute_ms,
    recomputed_bytes,
    swapped_bytes,
)
from hyper_parallel.core.planner.model.profile import Region
from hyper_parallel.core.planner.model.timeline import Timeline, plain_step
from hyper_parallel.core.planner.plan.budget_curve import CurvePoint, budget_curve
from hyper_parallel.core.planner.search.choosing import timeline_under
from hyper_parallel.report.stacks import Stacks, stacks_of

if TYPE_CHECKING:
    from hyper_parallel.core.planner.plan.plan import MemoryPlan

CURVE_SECONDS = 15.0


class Row(NamedTuple):
    """What happens to one block, or to one module in it."""

    name: str
    choice: str
    saved_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    recompute_ms: float


class Block(NamedTuple):
    row: Row
    modules: list[Row]


class Stretch(NamedTuple):
    """A time in which the link copies for one block, or compute waits: copies that follow each other are one."""

    block: str
    start_ms: float
    end_ms: float
    num_bytes: int


@dataclass(frozen=True)
class Step:
    """One step moment by moment, as the timeline foresees it."""

    forward_ms: float
    turn_ms: float
    backward_ms: float
    peak_bytes: int
    peak_ms: float
    stacks: Stacks

    @property
    def step_ms(self) -> float:
        return self.forward_ms + self.turn_ms + self.backward_ms

    def as_dict(self) -> dict[str, Any]:
        times = {"forward_ms": self.forward_ms, "turn_ms": self.turn_ms, "backward_ms": self.backward_ms}
        peak = {"peak_bytes": self.peak_bytes, "peak_ms": self.peak_ms}
        return {"step_ms": self.step_ms, **times, **peak, "moments": self.stacks.as_dict()}


@dataclass(frozen=True)
class Copies:
    """Both directions of the link, and when compute stood still for one."""

    out: list[Stretch]
    back: list[Stretch]
    waits: list[Stretch]

    def as_dict(self) -> dict[str, Any]:
        return {
            "out_bytes": sum(stretch.num_bytes for stretch in self.out),
            "back_bytes": sum(stretch.num_bytes for stretch in self.back),
            "wait_ms": sum(stretch.end_ms - stretch.start_ms for stretch in self.waits),
            **{name: [stretch._asdict() for stretch in getattr(self, name)] for name in ("out", "back", "waits")},
        }


@dataclass(frozen=True)
class Numbers:
    """All that one page shows, see the head of the file. Where `curve` is empty, `why_no_curve` says why."""

    plan: MemoryPlan
    before: Step
    after: Step
    copies: Copies
    blocks: list[Block]
    curve: list[CurvePoint]
    why_no_curve: str | None

    def as_dict(self) -> dict[str, Any]:
        plan = self.plan
        identity = plan.profile.identity
        return {
            "model": identity.model,
            "device": identity.device,
            "framework": f"{identity.framework or ''} {identity.version or ''}".strip(),
            "budget_bytes": plan.budget_bytes,
            "base_bytes": plan.base_bytes,
            "plain": {"peak_bytes": plan.profile.peak_bytes, "step_ms": plan.profile.step_ms},
            "predicted": vars(plan.predicted),
            "measured": None if plan.measured is None else vars(plan.measured),
            "gap": plan.gap,
            "setting": plan.setting._asdict(),
            "host": plan.host._asdict(),
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "copies": self.copies.as_dict(),
            "blocks": [
                {**block.row._asdict(), "modules": [row._asdict() for row in block.modules]} for block in self.blocks
            ],
            "curve": [point._asdict() for point in self.curve],
        }


def numbers_of(plan: MemoryPlan, *, curve_seconds: float = CURVE_SECONDS) -> Numbers:
    """Compute all that the page of a plan shows. Solving for other budgets may take `curve_seconds`."""
    before = plain_step(plan.profile)
    after = timeline_under(plan.profile, plan.decision, plan.setting)
    curve: list[CurvePoint] = []
    why = None
    try:
        mine = CurvePoint(plan.budget_bytes, plan.predicted.peak_bytes, plan.predicted.step_ms)
        curve = budget_curve(plan.profile, [mine], time_limit_s=curve_seconds)
    except FrameworkMissingError as error:
        why = error.what
    pairs = zip(plan.profile.regions, plan.decision, strict=True)
    blocks = [Block(_of_block(*pair), _of_modules(*pair)) for pair in pairs]
    return Numbers(plan, _step(before), _step(after), _copies(after), blocks, curve, why)


def _step(timeline: Timeline) -> Step:
    times = (timeline.forward_ms, timeline.turn_ms, timeline.backward_ms)
    return Step(*times, timeline.peak_bytes, timeline.peak_ms, stacks_of(timeline))


def _copies(timeline: Timeline) -> Copies:
    close_ms = timeline.step_ms / 1000  # a gap that nobody sees
    out, back = (
        _joined(
            (
                Stretch(timeline.paths[copy.region], copy.start_ms, copy.end_ms, copy.num_bytes)
                for copy in timeline.copies
                if copy.direction == direction
            ),
            close_ms,
        )
        for direction in ("offload", "load")
    )
    waits = [
        Stretch(timeline.paths[stall.region] if stall.region >= 0 else "", stall.start_ms, stall.start_ms + stall.ms, 0)
        for stall in timeline.stalls
    ]
    return Copies(out, back, waits)


def _joined(stretches: Iterable[Stretch], close_ms: float) -> list[Stretch]:
    joined: list[Stretch] = []
    for stretch in stretches:
        if joined and joined[-1].block == stretch.block and stretch.start_ms - joined[-1].end_ms <= close_ms:
            last = joined[-1]
            joined[-1] = last._replace(end_ms=stretch.end_ms, num_bytes=last.num_bytes + stretch.num_bytes)
        else:
            joined.append(stretch)
    return joined


def _of_block(region: Region, decision: RegionDecision) -> Row:
    saved, swapped, recomputed = (
        num_bytes(region, decision) for num_bytes in (kept_bytes, swapped_bytes, recomputed_bytes)
    )
    name = region.path if region.call == 0 else f"{region.path}, call {region.call + 1}"
    choice = "plain" if decision.is_plain else "managed"
    return Row(name, choice, saved, swapped, recomputed, recompute_ms(region, decision))


def _of_modules(region: Region, decision: RegionDecision) -> list[Row]:
    """Make one row per module of the block, in the order of their first op; what the block was given comes first."""
    rows: dict[str, Row] = {}

    def add(name: str, choice: Choice | None, num_bytes: int, residual_bytes: int, ms: float) -> None:
        row = rows.get(name, Row(name, "", 0, 0, 0, 0.0))
        if choice == SAVE:
            row = row._replace(saved_bytes=row.saved_bytes + num_bytes)
        elif choice == SWAP:
            row = row._replace(swapped_bytes=row.swapped_bytes + num_bytes)
        elif choice == RECOMPUTE:
            more_ms = row.recompute_ms + ms
            row = row._replace(recomputed_bytes=row.recomputed_bytes + residual_bytes, recompute_ms=more_ms)
        rows[name] = row

    for given, choice in zip(region.inputs, decision.inputs, strict=True):
        value = given.value
        if decision.is_plain:
            choice = SAVE if value.is_residual else None
        add("(input)", choice, value.num_bytes, value.num_bytes, 0.0)
    for op, choice in zip(region.ops, decision.ops, strict=True):
        num_bytes = op.num_bytes
        if decision.is_plain:
            choice, num_bytes = (SAVE, op.residual_bytes) if op.is_needed else (None, 0)
        add(op.module or "(the block itself)", choice, num_bytes, op.residual_bytes, op.forward_ms)
    return [row._replace(choice=_words(row, decision)) for row in rows.values()]


def _words(row: Row, decision: RegionDecision) -> str:
    if decision.is_plain:
        return "plain"
    names = ("saved", "swapped", "recomputed")
    chosen = [name for name, num in zip(names, row[2:5], strict=True) if num]
    return ", ".join(chosen) or "nothing kept"
