"""Decisions that a change of the planner must not change: kept profiles of five small models, and plans for them.

    PYTHONPATH=src:tests python tests/support/golden_plans.py --write-decisions

stores the decisions of today, where they shall be others than before.

`tests/data/profiles` has a profile of each model, made once on a CPU by `benchmarks/frontier.py --profiles` and never
anew: three blocks of each, four of the compiled ones (without a memory budget of the compiler). So all sizes and times
are fixed, and a plan is a matter of the planner alone: no model is run and nothing is proved.

`tests/data/golden_plans.json` has what was decided for four budgets of each. A decision has one line for each block,
with a letter for each op and, behind the bar, for each input:

    plain               nothing is done
    sw.r|w              s: save, w: swap, r: recompute, a dot: nothing of it is needed

A link to files is so fast beside a CPU that plans for it swap nearly all. So each profile is planned in three ways
(`WAYS`): as it was measured, as it could have been on an accelerator, whose link is the limit, and where nothing can be
swapped.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.plan.plan import MemoryPlan
from hyper_parallel.core.planner.plan.plan_file import profile_from_dict
from hyper_parallel.core.planner.plan.proof import first_margin, solved
from hyper_parallel.core.planner.search import choosing
from support.planner_cases import NO_HURRY

DATA = Path(__file__).resolve().parents[1] / "data"
PROFILES, DECISIONS = DATA / "profiles", DATA / "golden_plans.json"
NAMES = ("gpt2", "hf_llama", "llama", "llama_compiled", "moe")
# Between the smallest budget that can be met, 0, and what the plain step takes, 1.
PARTS = (0.0, 0.15, 0.4, 0.7)
_LETTERS = {"save": "s", "swap": "w", "recompute": "r", None: "."}


def as_on_an_accelerator(data: dict[str, Any]) -> None:
    """To copy what a block keeps takes 1.5 times as long as its forward, and a managed block costs the host something."""
    block = profile_from_dict(data).regions[0]
    bytes_per_ms = block.residual_bytes / (1.5 * block.forward_ms)
    data["link"] = {"out_bytes_per_ms": bytes_per_ms, "in_bytes_per_ms": bytes_per_ms, "both_bytes_per_ms": None}
    data["facts"] |= {
        "device": "cuda: none",
        "region_overhead_ms": 0.04 * block.forward_ms,
        "unwatched_overhead_ms": 0.01 * block.forward_ms,
    }


def without_a_link(data: dict[str, Any]) -> None:
    data["link"] = None


def as_measured(data: dict[str, Any]) -> None:
    pass


WAYS: dict[str, Callable[[dict[str, Any]], None]] = {
    "as measured": as_measured,
    "as on an accelerator": as_on_an_accelerator,
    "without a link": without_a_link,
}


def profile_of(name: str, way: str) -> StepProfile:
    data = json.loads(gzip.decompress((PROFILES / f"{name}.json.gz").read_bytes()))
    WAYS[way](data)
    return profile_from_dict(data)


def smallest_bytes(profile: StepProfile) -> int:
    """The smallest budget that can be met."""
    return choosing.smallest_budget(profile, first_margin(profile))


def budgets_of(profile: StepProfile) -> list[int]:
    smallest = smallest_bytes(profile)
    return [smallest + int(part * (profile.peak_bytes - smallest)) for part in PARTS]


def decided(profile: StepProfile, budget_bytes: int) -> dict[str, Any]:
    """What is planned, as it is stored."""
    with without_hurry():
        plan = solved(profile, budget_bytes, margin_bytes=first_margin(profile), time_limit_s=NO_HURRY)
    window, prefetch, ahead = plan.setting
    return {
        "budget_bytes": budget_bytes,
        "peak_bytes": plan.predicted.peak_bytes,
        "step_ms": plan.predicted.step_ms,
        "setting": [window, prefetch, *ahead],
        "blocks": lines_of(plan),
    }


def lines_of(plan: MemoryPlan) -> list[str]:
    """A line for each block."""
    return [
        "plain"
        if each.is_plain
        else "|".join("".join(map(_LETTERS.__getitem__, part)) for part in (each.ops, each.inputs))
        for each in plan.decision
    ]


@contextlib.contextmanager
def without_hurry() -> Iterator[None]:
    """A search ends where nothing is left to try, and not by the clock: on a busy machine, too."""
    with mock.patch.object(choosing, "_POLISH_S", NO_HURRY):
        yield


def solver_version() -> str:
    """Of what has the solver: another one may choose otherwise where two decisions are as good."""
    return ".".join(metadata.version("scipy").split(".")[:2])


def stored() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(DECISIONS.read_text())
    return data


def write_decisions() -> None:
    plans: dict[str, Any] = {}
    for name in NAMES:
        for way in WAYS:
            profile = profile_of(name, way)
            plans.setdefault(name, {})[way] = [decided(profile, each) for each in budgets_of(profile)]
            print(f"{name}, {way}")
    DECISIONS.write_text(json.dumps({"scipy": solver_version(), "plans": plans}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write-decisions", action="store_true", help=f"into {DECISIONS.name}, in place of what is there"
    )
    options = parser.parse_args()
    if not options.write_decisions:
        parser.error("nothing to do; --write-decisions writes the decisions of today")
    write_decisions()
    return 0


if __name__ == "__main__":
    sys.exit(main())
