"""The largest batch: how much more a model trains on under a plan in the memory of a plain step.

The budget is what a plain step of a given size takes. `hp.largest` names a size and a plan; real steps are measured under that plan, and the next size
must be refused.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from frontier_models import MODELS, AnyLength, Built, Shape, gpt2, itself, loss_attribute, ready, token_batch
from frontier_results import Results, Row

import hyper_parallel as hp
from activation import Meter, measure, under
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel

GIB = 2**30


class Question(NamedTuple):
    """`plain_n`: the size whose plain step gives the budget."""

    unit: str
    plain_n: int
    at_most: int
    model: Any
    make_batch: Callable[[int], Any]
    loss_fn: Callable[[Any], torch.Tensor]
    setting: dict[str, Any]


def long_llama(device: str, dtype: torch.dtype) -> Question:
    """A sequence in steps; a few blocks, so that steps are short."""
    is_large = device == "cuda"
    step, at_most, blocks = (512, 128, 4) if is_large else (32, 32, 3)
    sizes = {**MODELS["llama"].sizes(device, {"blocks": blocks, "batch": 1, "length": step * at_most})}
    torch.manual_seed(0)
    model = ready(AnyLength(Shape(**sizes), device, dtype))

    def make_batch(n: int) -> torch.Tensor:
        return torch.randn(1, n * step, sizes["dim"], device=device, dtype=dtype)

    return Question(f"{step} tokens", 16 if is_large else 8, at_most, model, make_batch, itself, sizes)


def wide_gpt2(device: str, dtype: torch.dtype) -> Question:
    sizes = MODELS["gpt2"].sizes(device, {"batch": 1})
    built = gpt2(sizes, device, dtype)

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        return token_batch({**sizes, "batch": n}, device)

    return Question(
        f"sequences of {sizes['length']}",
        6 if device == "cuda" else 4,
        64,
        built.model,
        make_batch,
        loss_attribute,
        sizes,
    )


QUESTIONS = {"llama largest": long_llama, "gpt2 largest": wide_gpt2}


def asked(options: argparse.Namespace) -> list[str]:
    """Names of the questions about the models that are asked for."""
    return [name for name in QUESTIONS if name.partition(" ")[0] in options.models]


def run_largest(options: argparse.Namespace, results: Results) -> None:
    for name in asked(options):
        build = QUESTIONS[name]
        row: Row = {"model": name}
        if time.monotonic() > options.deadline:
            row["skipped"] = "no time left"
        else:
            question = build(options.device, options.dtype)
            results.settings[name] = question.setting
            try:
                row |= answer(question, options)
            except (hp.BudgetError, torch.OutOfMemoryError) as error:
                row["error"] = str(error)
            except Exception as error:
                row |= {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
                results.num_failures += 1
            del question
        results.add_largest(row)


def answer(question: Question, options: argparse.Namespace) -> Row:
    model, loss_fn = question.model, question.loss_fn
    meter = Meter(options.device)

    def measured(n: int, plan: Any = None) -> tuple[Row, float]:
        """Steps of a size, and all that is alive at their highest point."""
        built = Built("", model, question.make_batch(n), loss_fn, torch.nn.ModuleList())
        base = ProfiledModel(model, built.batch, loss_fn).base_bytes()
        with contextlib.nullcontext() if plan is None else under(plan, model):
            found = measure(meter, built.loss, built.batch, options.steps, options.warm)
        return found, base / GIB + found["peak_gib"]

    plain, budget_gib = measured(question.plain_n)
    _, one_more_gib = measured(question.plain_n + 1)
    budget_bytes = int(budget_gib * GIB)
    begin = time.perf_counter()
    found = hp.largest(
        model, question.make_batch, budget_bytes, at_most=question.at_most, loss_fn=loss_fn, progress=False
    )
    seconds = time.perf_counter() - begin
    managed, peak_gib = measured(found.n, found.plan)
    per_unit = managed["step_ms"] / found.n / (plain["step_ms"] / question.plain_n)
    return {
        "unit": question.unit, "budget_gib": budget_gib, "plain_n": question.plain_n, "plain_step_ms": plain["step_ms"],
        "plain_one_more_gib": one_more_gib, "n": found.n, "times_plain": found.n / question.plain_n, "peak_gib": peak_gib,
        "predicted_peak_gib": found.predicted_peak_bytes / GIB, "step_ms": managed["step_ms"], "time_per_unit_ratio": per_unit,
        "out_gb": managed["out_gb"], "seconds": seconds, "tried": [each._asdict() for each in found.tried],
        **next_size(question, found.n + 1, budget_bytes),
        "checks": {"it keeps its budget": peak_gib <= budget_gib, "a plain step with one more does not": one_more_gib > budget_gib},
        "plan": str(found.plan),
    }  # fmt: skip


def next_size(question: Question, n: int, budget_bytes: int) -> Row:
    """What a plan for the next size would say."""
    if n > question.at_most:
        return {"next_n": n, "next": "not asked for", "next_is_refused": None}
    try:
        hp.plan_memory(
            question.model, question.make_batch(n), budget=budget_bytes, loss_fn=question.loss_fn, progress=False
        )
    except hp.BudgetError as error:
        smallest = f"needs {error.smallest_bytes / GIB:.3f} GiB" if error.smallest_bytes else "runs out of memory"
        return {"next_n": n, "next": f"refused, {smallest}", "next_is_refused": True}
    return {"next_n": n, "next": "has a plan as well", "next_is_refused": False}
