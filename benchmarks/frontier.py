"""Plans at several budgets, for several models, beside PyTorch's own ways: activation peak and step time, from one command.

    python benchmarks/frontier.py --out x.json               on a GPU: four models, each at budgets of its own and `min`; then `compiled`,
                                                             the first of them with torch.compile's memory budgets, and plans on compiled blocks
    python benchmarks/frontier.py --device cpu               small models, swapped to files
    python benchmarks/frontier.py --models gpt2,moe --budgets 60,min --budgets gpt2:45,min --sizes moe:blocks=6
    python benchmarks/frontier.py --models llama,compiled    beside each other: plans, PyTorch's checkpoints, budgets of torch.compile
    python benchmarks/frontier.py --largest                  how large a batch may be, plain and under a plan, in the same memory
    python benchmarks/frontier.py --draw x.json --picture x.svg

A percentage is of the plain activation peak; `min` is the peak of PyTorch's full checkpoint: a plan for that may be neither larger nor slower.
A model is profiled once, and all of its plans are made from that profile. Every way is measured between two plain runs, and its time is the ratio to
their mean; the peak is the highest of all steps, the time their median. A plan for `min` also takes turns with full checkpoint: it may be the same, and machines drift by more
than a hundredth in the minutes between two rows. What is promised is checked at the end.

`--profiles FOLDER` keeps the profile of each model there, compressed: from it plans can be made again, by other rules, on any machine.
`hyper_parallel.core.planner.plan.plan_file.profile_from_dict` takes what is in the file.

`--out` is written anew after each row; `--add` keeps the rows that an earlier file has of other models, each with its own commit. `--minutes`: what would begin later is
left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import gzip
import json
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from activation_modes import PEERS
from frontier_compiled import NAME, run_compiled
from frontier_models import MODELS, Built, Sizes
from frontier_results import FULL, Results, Row, checks_text, header, largest_line
from solving_ahead import Solver

import hyper_parallel as hp
from activation import Meter, applied, measure, under
from hyper_parallel.core.planner.plan.budget import budget_bytes
from hyper_parallel.core.planner.plan.plan_file import profile_as_dict
from hyper_parallel.core.planner.plan.proof import planned
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel

GIB = 2**30
COMPILED = {"compiled": NAME}  # what `--models` calls it, and what its rows are called
BESIDE = ("PyTorch selective, all matmuls", "PyTorch selective, as torchtitan")


class Bench:
    """One model, and rows of all that is measured of it.

    Attributes:
        as_plain: gives a context in which the model runs as it is without any way
        unmanaged_ratio: of a step that no plan manages to the plain one, where the two are not the same: predictions are to the former
    """

    def __init__(self, name: str, built: Built, options: argparse.Namespace, results: Results, solver: Solver) -> None:
        self.name = name
        self.built = built
        self.as_plain: Callable[[], Any] = contextlib.nullcontext
        self.unmanaged_ratio = 1.0
        self._options = options
        self._results = results
        self._solver = solver
        self._meter = Meter(options.device)
        self._plain_ms: float | None = None  # of the last plain run
        self._plain_gib: float | None = None
        self._profiled: Any = None
        self.profile: Any = None

    def plain(self) -> Row:
        def fill(row: Row) -> None:
            with self.as_plain():
                row |= self._measured(self._options.steps, self._options.warm)
            self._plain_ms, self._plain_gib = row["step_ms"], row["peak_gib"]
            row |= {"ratio": 1.0, "of_plain": 1.0}

        return self._fill({"way": "plain", "kind": "plain"}, fill)

    def way(self, name: str, kind: str, context: Callable[[], Any]) -> Row:
        """The model in a context."""

        def fill(row: Row) -> None:
            with context():
                measured = self._measured(self._options.steps, self._options.warm)
            row |= {**measured, **self._compared(measured)}

        return self._fill({"way": name, "kind": kind}, fill)

    def profile_once(self, about: str = "") -> bool:
        """Whether plans can be made. `about`: which of several profiles of the model it is, for the name of its file."""

        def fill(row: Row) -> None:
            begin = time.perf_counter()
            self._profiled = ProfiledModel(self.built.model, self.built.batch, self.built.loss_fn)
            self.profile = self._profiled.profile()
            row["seconds"] = time.perf_counter() - begin
            if self._options.profiles is not None:
                data = json.dumps(profile_as_dict(self.profile), separators=(",", ":")).encode()
                path = self._options.profiles / f"{file_name(f'{self.name} {about}'.strip())}.json.gz"
                path.write_bytes(gzip.compress(data, mtime=0))
            print(f"{self.name}: profiled in {row['seconds']:.1f} s", file=sys.stderr, flush=True)

        return "seconds" in self._fill({"way": "profile", "kind": "profile"}, fill, is_shown=False)

    def allowed(self, budget: str, *, least_gib: float | None) -> int | None:
        """Bytes of a budget; None: that of a rival, which is not known."""
        if budget != "min":
            return budget_bytes(f"{budget}%", self.profile, 0)
        return None if least_gib is None else int(self.profile.base_bytes + least_gib * GIB)

    def begin(self, budgets_bytes: Sequence[int | None]) -> None:
        """Have plans for these looked for, while something else is measured."""
        self._solver.begin(self.profile, [each for each in budgets_bytes if each is not None])

    def plan(
        self, name: str, budget: str, allowed_bytes: int | None, *, full: Callable[[], Any] | None = None, **about: Any
    ) -> Row:
        """The model under the plan for a budget; `full`: a context in which it runs under full checkpoint, to take turns with."""
        head = {"way": name, "kind": "plan", "budget": budget, **about}
        if allowed_bytes is None:
            row = {"model": self.name, **head, "skipped": "no rival to take the budget from"}
            self._results.add(row)
            return row
        base = self.profile.base_bytes
        head |= {"budget_gib": (allowed_bytes - base) / GIB, "base_gib": base / GIB}

        def fill(row: Row) -> None:
            model, solver = self.built.model, self._solver
            begin, before = time.perf_counter(), (solver.num_solved, solver.seconds, solver.waited_s)
            with self._profiled.preserved() as block, block:
                plan = planned(self.profile, allowed_bytes, self._profiled)
            num_solved, solve_s, waited_s = (
                now - then
                for now, then in zip((solver.num_solved, solver.seconds, solver.waited_s), before, strict=True)
            )
            prove_s = time.perf_counter() - begin - waited_s
            if self._options.plans is not None:
                plan.save(self._options.plans / f"{file_name(f'{self.name} {name}')}.json")
            with under(plan, model):
                measured = self._measured(self._options.steps, self._options.warm)
                fallbacks = plan.stats(model)
            compared = self._compared(measured)
            if full is not None and self._options.turns:
                compared["to_full"] = self._by_turns(functools.partial(under, plan, model), full)
            ratio = compared["ratio"]
            predicted_ratio = plan.predicted.step_ms / self.profile.step_ms * self.unmanaged_ratio
            predicted_gib = (plan.predicted.peak_bytes - base) / GIB
            row |= {
                **measured, **compared,
                "predicted_peak_gib": predicted_gib, "peak_deviation_gib": measured["peak_gib"] - predicted_gib,
                "predicted_ratio": predicted_ratio, "time_deviation": None if ratio is None else predicted_ratio / ratio - 1,
                "seconds": solve_s + prove_s, "solve_s": solve_s, "num_solved": num_solved, "fallbacks": fallbacks,
                "num_fallbacks": sum(fallbacks.values()), "gap": plan.gap, "setting": plan.setting._asdict(), "plan": str(plan),
            }  # fmt: skip

        return self._fill(head, fill)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _fill(self, head: Row, fill: Callable[[Row], None], *, is_shown: bool = True) -> Row:
        """A row in any case: with figures, or with the reason why there are none."""
        row: Row = {"model": self.name, **head}
        if time.monotonic() > self._options.deadline:
            row["skipped"] = "no time left"
        else:
            try:
                fill(row)
            except hp.BudgetError as error:
                base = 0 if self.profile is None else self.profile.base_bytes
                row |= {"error": str(error), "smallest_gib": (error.smallest_bytes - base) / GIB}
            except torch.OutOfMemoryError as error:
                row["error"] = f"out of memory: {error}"
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
                row["traceback"] = traceback.format_exc()
                self._results.num_failures += 1
            tidy()
        if is_shown or "error" in row or "skipped" in row:
            self._results.add(row)
        return row

    def _measured(self, steps: int, warm: int) -> Row:
        return measure(self._meter, self.built.loss, self.built.batch, steps, warm)

    def _by_turns(self, context: Callable[[], Any], other: Callable[[], Any]) -> float:
        """The time of a step in one context, to that in another: medians of all steps, as some have a collection of garbage in them."""
        own_ms: list[float] = []
        other_ms: list[float] = []
        for number in range(self._options.turns):
            turn = [(context, own_ms), (other, other_ms)]
            for each, times in turn if number % 2 else reversed(turn):  # what drifts is on both sides
                times += self._steps_in(each)
        return statistics.median(own_ms) / statistics.median(other_ms)

    def _steps_in(self, context: Callable[[], Any]) -> list[float]:
        built = self.built
        with context():
            self._meter.step(built.loss, built.batch)
            return [self._meter.step(built.loss, built.batch)["step_ms"] for _ in range(self._options.beside)]

    def _compared(self, measured: Row) -> Row:
        """With the plain runs directly before and after."""
        compared: Row = {"ratio": None, "of_plain": None, "plain_step_ms": None, "plain_peak_gib": self._plain_gib}
        if self._plain_ms is None or self._plain_gib is None:
            return compared
        before = self._plain_ms
        with self.as_plain():
            self._plain_ms = self._measured(self._options.beside, 0)["step_ms"]
        beside = (before + self._plain_ms) / 2
        return {
            **compared, "ratio": measured["step_ms"] / beside, "of_plain": measured["peak_gib"] / self._plain_gib, "plain_step_ms": beside,
        }  # fmt: skip


def file_name(words: str) -> str:
    return re.sub(r"[^0-9a-z.]+", "_", words)


def tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_model(name: str, options: argparse.Namespace, results: Results, solver: Solver) -> None:
    spec = MODELS[name]
    sizes = spec.sizes(options.device, options.sizes.get(name, {}))
    results.settings[name] = sizes
    budgets = options.budgets.get(name) or options.budgets.get("") or spec.budgets
    if time.monotonic() > options.deadline:
        results.add({"model": name, "way": "plain", "kind": "plain", "skipped": "no time left"})
        return
    try:
        built = spec.build(sizes, options.device, options.dtype)
    except (ImportError, torch.OutOfMemoryError) as error:  # the other models are measured all the same
        results.add({"model": name, "way": "plain", "kind": "plain", "error": f"{type(error).__name__}: {error}"})
        return
    bench = Bench(name, built, options, results, solver)
    bench.plain()
    as_full = functools.partial(applied, built, PEERS[FULL])
    full = bench.way(FULL, "peer", as_full)
    if not bench.profile_once():
        return
    allowed = {each: bench.allowed(each, least_gib=full.get("peak_gib")) for each in budgets}
    bench.begin(list(allowed.values()))
    for way in BESIDE:
        bench.way(way, "peer", functools.partial(applied, built, PEERS[way]))
    for budget in budgets:
        words = "memory of full checkpoint" if budget == "min" else f"{budget} %"
        bench.plan(f"plan, {words}", budget, allowed[budget], full=as_full if budget == "min" else None)


def names_of(options: argparse.Namespace) -> list[str]:
    """What the rows that are measured now are called."""
    if options.largest:
        from frontier_largest import asked

        return asked(options)
    return [COMPILED.get(each, each) for each in options.models]


def run(options: argparse.Namespace) -> Results:
    results = Results(options.device, commit=options.commit, out=options.out, measured_now=names_of(options))
    for path in options.add:
        results.keep(path)
    print(header(), flush=True)
    with Solver(options.workers, proves_smallest=options.prove_smallest).installed() as solver:
        if options.largest:
            from frontier_largest import run_largest

            run_largest(options, results)
            return results
        for name in options.models:
            if name in COMPILED:
                run_compiled(options, results, solver, Bench)
            else:
                run_model(name, options, results, solver)
            tidy()
    return results


# -- the command -----------------------------------------------------------------------------------------------------------


def of_model(text: str) -> tuple[str, list[str]]:
    """ "gpt2:50,min" -> "gpt2", ["50", "min"]; without a name: for all models."""
    name, has_name, rest = text.rpartition(":")
    if has_name and name not in MODELS:
        raise argparse.ArgumentTypeError(f"no such model: {name}; there are {', '.join(MODELS)}")
    return name, [each.strip() for each in rest.split(",")]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", type=lambda text: text.split(","), default=[*MODELS, *COMPILED])
    parser.add_argument(
        "--budgets", type=of_model, action="append", default=[], help="percent, or `min`: 50,min or gpt2:50,min"
    )
    parser.add_argument("--sizes", type=of_model, action="append", default=[], help="for example moe:blocks=6,batch=2")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--largest", action="store_true", help="the largest batches instead")
    what.add_argument("--draw", type=Path, help="measure nothing, draw what this file has")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--beside", type=int, default=3, help="plain steps between two ways, and steps of a turn")
    parser.add_argument("--turns", type=int, default=5, help="of a plan for `min` and full checkpoint")
    parser.add_argument(
        "--prove-smallest", action="store_true", help="where a budget is refused, look with real steps for the smallest"
    )
    parser.add_argument("--workers", type=int, help="processes that solve ahead of time")
    parser.add_argument("--minutes", type=float, default=9, help="what would begin later is left out")
    parser.add_argument("--commit", help="what is measured, where there is no git")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--add", type=Path, action="append", default=[], help="a file with rows of other models to keep"
    )
    parser.add_argument("--plans", type=Path, help="a folder for the plans, each with its profile")
    parser.add_argument("--profiles", type=Path, help="a folder for the profiles that plans are made from, as .json.gz")
    parser.add_argument("--picture", type=Path, help="an SVG of all models that were measured")
    options = parser.parse_args(arguments)
    if options.draw and not options.draw.is_file():
        parser.error(f"there is no file {options.draw}; --out writes one")
    for folder in filter(None, (options.plans, options.profiles)):
        if folder.exists() and not folder.is_dir():
            parser.error(f"{folder} is no folder")
    if options.turns < 0:
        parser.error(f"--turns is a number of turns, got {options.turns}; 0 leaves them out")
    for folder in filter(None, (options.plans, options.profiles)):
        folder.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        if name not in {**MODELS, **COMPILED}:
            parser.error(f"no such model: {name}; there are {', '.join([*MODELS, *COMPILED])}")
    options.budgets = dict(options.budgets)
    options.sizes = {name: as_sizes(each) for name, each in options.sizes}
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    if options.workers is None:
        options.workers = min(6, max((os.cpu_count() or 1) - 4, 0)) if options.device == "cuda" else 0
    options.deadline = time.monotonic() + options.minutes * 60
    return options


def as_sizes(texts: list[str]) -> Sizes:
    return {name: int(value) for name, _, value in (text.partition("=") for text in texts)}


def draw(result: dict[str, Any], path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "hooks"))
    import frontiers  # type: ignore[import-not-found]

    path.write_text(frontiers.picture(result))


def main() -> int:
    options = parse()
    if options.draw:
        draw(json.loads(options.draw.read_text()), options.picture or options.draw.with_suffix(".svg"))
        return 0
    with contextlib.ExitStack() as stack:
        if options.device == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells the terminal when it starts and stops
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(hp.configure_swap(disk_dir=directory))
        results = run(options)
    result = results.as_dict()
    print("", *map(largest_line, result["largest"]), checks_text(result), sep="\n", flush=True)
    if options.picture:
        draw(result, options.picture)
    return 1 if results.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
