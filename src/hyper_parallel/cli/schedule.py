"""A pipeline's schedule, made by name or read from a file: proved, simulated, drawn, written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.cli.build import UsageError, check_target
from hyper_parallel.core.parallel.pipeline import schedules
from hyper_parallel.core.parallel.pipeline.schedule import Schedule
from hyper_parallel.core.parallel.pipeline.simulation import Timeline
from hyper_parallel.core.parallel.pipeline.verdict import Report

_SIZES = {"-p": "ranks", "-m": "microbatches"}


@dataclass(frozen=True)
class Scheduled:
    """What the command shows."""

    schedule: Schedule
    report: Report
    timeline: Timeline
    written: dict[str, Path]  # "draw", "csv"

    def as_dict(self) -> dict[str, Any]:
        schedule, timeline = self.schedule, self.timeline
        return {
            "name": schedule.name,
            "ranks": schedule.num_ranks,
            "stages": schedule.num_stages,
            "microbatches": schedule.num_microbatches,
            "transfers": self.report.num_transfers,
            "time": timeline.time,
            "bubble": timeline.bubble,
            "idle": list(timeline.idle),
            "peak": list(timeline.peak),
            "most_unsharded": list(self.report.most_unsharded),
            "actions": [[str(action) for action in actions] for actions in schedule.ranks],
            **{name: str(path) for name, path in self.written.items()},
        }

    def __str__(self) -> str:
        idle = ", ".join(f"{rank}: {idle:g}" for rank, idle in enumerate(self.timeline.idle))
        lines = [
            f"{self.schedule.name}: {self.report}",
            f"time of a step: {self.timeline.time:g}, idle {self.timeline.bubble:.2%} of the time that ranks compute",
            f"idle time of rank: {idle}",
        ]
        words = {"draw": "The picture", "csv": "The schedule"}
        return "\n".join([*lines, *(f"{words[name]}: {path}" for name, path in self.written.items())])


def scheduled(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    chunks: int | None,
    zero: int | None,
    costs: list[str],
    draw: Path | None,
    csv: Path | None,
) -> Scheduled:
    """Make or read the schedule, prove it, and write what is asked for."""
    check_target(draw)
    check_target(csv)
    if draw is not None and csv is not None and draw.absolute() == csv.absolute():
        raise UsageError("The page and the schedule cannot be one file.", got=str(draw), do="Name another file.")
    table = dict(map(_cost, costs))
    schedule = _made(name, ranks, microbatches, chunks)
    if zero is not None:
        schedule = schedule.lower(zero=zero)
    found = Scheduled(schedule, schedule.check(), schedule.simulate(table), {})
    if draw is not None:
        found.written["draw"] = schedule.draw(draw, table)
    if csv is not None:
        found.written["csv"] = schedule.save(csv)
    return found


def _made(name: str, ranks: int | None, microbatches: int | None, chunks: int | None) -> Schedule:
    plain = name.replace("-", "_").lower()
    given = [ranks, microbatches, chunks]
    if plain not in schedules.__all__:
        if Path(name).suffix.lower() != ".csv":
            raise UsageError(
                "There is no such schedule.", expected=f"{', '.join(schedules.__all__)}, or a CSV file", got=name
            )
        if given != [None, None, None]:
            raise UsageError(
                "A file says itself how many ranks and microbatches it has.", do="Leave -p, -m and -v out."
            )
        if not Path(name).is_file():
            raise UsageError("There is no such file.", expected="a CSV file of a schedule", got=name)
        return Schedule.load(name)
    missing = [
        f"{option} ({words})" for (option, words), value in zip(_SIZES.items(), given, strict=False) if value is None
    ]
    if missing:
        raise UsageError(
            f"{plain} needs {' and '.join(missing)}.", do=f"Write hyper-parallel schedule {plain} -p 4 -m 16."
        )
    if chunks is not None and plain != "interleaved":
        raise UsageError(f"{plain} has a number of chunks of its own.", do="Leave -v out; it is for interleaved.")
    sizes = [ranks, microbatches, *([2 if chunks is None else chunks] if plain == "interleaved" else [])]
    made: Schedule = getattr(schedules, plain)(*sizes)
    return made


def _cost(text: str) -> tuple[str, float]:
    kind, _, number = text.partition("=")
    try:
        return kind, float(number)
    except ValueError:
        raise UsageError("This is no cost.", expected="KIND=TIME, such as F=1.5", got=text) from None
