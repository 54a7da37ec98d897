"""Compiled blocks: `torch.compile` with its own memory budgets, and plans on compiled blocks at the memory that each of these needed.

What is compiled with a budget saves less for backward, and a plan then swaps or recomputes what is left: plans are made on blocks compiled with no budget and
on blocks compiled with one that costs no time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from frontier_models import MODELS
from frontier_results import Results
from solving_ahead import Solver
from torch import nn

import hyper_parallel as hp

BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1)
UNDER_PLANS = (1.0, 0.7)
NAME = "llama compiled"


def run_compiled(options: argparse.Namespace, results: Results, solver: Solver, bench_class: Any) -> None:
    spec = MODELS["llama"]
    sizes = spec.sizes(options.device, options.sizes.get("llama", {}))
    results.settings[NAME] = {**sizes, "backend": options.backend}
    built = spec.build(sizes, options.device, options.dtype)
    bench = bench_class(NAME, built, options, results, solver)
    bench.as_plain = functools.partial(not_compiled, built.blocks)
    bench.plain()
    rivals = {
        budget: bench.way(words(budget), "compiled", functools.partial(alone, built.blocks, budget, options.backend))
        for budget in BUDGETS
    }
    # Code that is compiled before the first region is made cannot run in one.
    hp.checkpoint_wrapper(nn.Identity())
    for budget in UNDER_PLANS:
        # In the memory of its own budget there is nothing to do for a plan: it must not cost anything then.
        smaller = [each for each in BUDGETS if each < 1.0 and each <= budget]
        with compiled(built.blocks, budget, options.backend):
            if not bench.profile_once(f"budget {budget}"):
                continue
            allowed = {each: bench.allowed("min", least_gib=rivals[each].get("peak_gib")) for each in smaller}
            bench.begin(list(allowed.values()))
            bench.unmanaged_ratio = rivals[budget].get("ratio") or 1.0
            for each in smaller:
                name = f"plan on budget {budget}, memory of budget {each}"
                bench.plan(name, f"that of {each}", allowed[each], against=words(each), on=budget)


def words(budget: float) -> str:
    return f"torch.compile, budget {budget}"


@contextlib.contextmanager
def compiled(blocks: nn.ModuleList, budget: float, backend: str) -> Iterator[None]:
    """Within: blocks compiled in place, under a memory budget of the compiler."""
    import torch._functorch.config  # takes seconds

    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        for block in blocks:
            block.compile(backend=backend)
        try:
            yield
        finally:
            for block in blocks:
                block._compiled_call_impl = None
            torch._dynamo.reset()


@contextlib.contextmanager
def alone(blocks: nn.ModuleList, budget: float, backend: str) -> Iterator[None]:
    """As `compiled`, and as it is without this package: regions that were made before have compiled code called in a way they can see."""
    from torch._inductor import config

    name = "wrap_inductor_compiled_regions"
    unseen = config.patch({name: False}) if hasattr(config, name) else contextlib.nullcontext()
    with unseen, compiled(blocks, budget, backend):
        yield


@contextlib.contextmanager
def not_compiled(blocks: nn.ModuleList) -> Iterator[None]:
    """Within: blocks as they were before; what was compiled is kept."""
    kept = [block._compiled_call_impl for block in blocks]
    for block in blocks:
        block._compiled_call_impl = None
    try:
        yield
    finally:
        for block, implementation in zip(blocks, kept, strict=True):
            block._compiled_call_impl = implementation
