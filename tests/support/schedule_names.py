"""The schedules that tests run on ranks, by name, for p ranks and m microbatches."""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.core.parallel.pipeline import schedules
from hyper_parallel.core.parallel.pipeline.schedule import Schedule

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": schedules.gpipe,
    "one_f_one_b": schedules.one_f_one_b,
    "interleaved": lambda p, m: schedules.interleaved(p, m, 2),
    "zb_h1": schedules.zb_h1,
    "zbv": schedules.zbv,
    "dualpipe": schedules.dualpipe,
    "dualpipe_v": schedules.dualpipe_v,
}
