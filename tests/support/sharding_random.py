"""Random models and steps, sharded, beside one process.

A seed gives a tree of small modules, which of them are units, and what a step does. `without` leaves features out, so
that a failing program can be made smaller.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn

from support.sharding import Of, Program, Run, Settings, differences
from support.sharding_reruns import WAYS

WIDTH = 4
FEATURES = (
    "regions", "no_grad", "twice", "dicts", "unused", "by rank", "tied", "frozen", "toggled", "groups", "accumulated",
    "weights", "forwards", "dropped", "evaluated", "edited", "input", "prefetch", "zero", "copies", "reduce",
)  # fmt: skip

# -- modules -----------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.factor)


class Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class ByRank(nn.Module):
    """Its two layers are parts of one unit, of which each rank uses its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[int(now["rank"]) % 2](x)


now = {"rank": 0, "microbatch": 0}  # whose data is computed with


def _dicts(self: Any, x: torch.Tensor) -> dict[str, Any]:
    return {"one": self.one(x), "none": None, "more": [self.two(x), x]}


def _merged(self: Any, x: torch.Tensor) -> torch.Tensor:
    found = self.inner(x)
    return found["one"] - found["more"][0] + found["more"][1]


def _without_gradients(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = self.child(x)
    return x * 0.5 + target


def _train_what_must_be(model: nn.Module) -> None:
    """Something is trained, and whether an output needs a gradient is the same on all ranks."""
    for module in (model[-1], *model.modules()):  # type: ignore[index]
        if module is model[-1] or type(module) is ByRank:  # type: ignore[index]
            module.requires_grad_(True)


class Drawn:
    """A program as it was drawn."""

    def __init__(self, seed: int, size: int, without: Set[str] = frozenset()) -> None:
        self.rng = random.Random(seed)
        self.without = without
        self.met: Counter[str] = Counter()
        self.seed = seed
        rng = self.rng
        self.model_seed = rng.randrange(1 << 30)
        self.units_seed = rng.randrange(1 << 30)
        num_copies = 2 if size == 4 and self.has("copies", 0.4) else 1
        self.settings = Settings(
            zero=rng.choice([1, 2, 3]) if self.has("zero", 0.8) else 3,
            prefetch=rng.choice([0, 2, 3]) if self.has("prefetch", 0.5) else 1,
            num_copies=num_copies,
            reduce=rng.choice(["each", "last"]) if self.has("reduce", 0.5) else None,
            num_steps=rng.choice([2, 3]),
        )
        self.num_microbatches = rng.choice([2, 3]) if self.has("accumulated", 0.6) else 1
        self.is_accumulated = self.num_microbatches > 1 or rng.random() < 0.3
        self.is_weighted = self.is_accumulated and self.has("weights", 0.5)
        self.num_forwards = rng.choice([2, 3]) if self.has("forwards", 0.3) else 1
        self.drops = self.num_forwards > 1 and self.has("dropped", 0.4)
        self.evaluates = self.has("evaluated", 0.3)
        self.edits = self.has("edited", 0.3)
        self.toggles = self.has("toggled", 0.3)
        self.needs_input_gradient = self.has("input", 0.3)

    def has(self, feature: str, chance: float) -> bool:
        drawn = self.rng.random() < chance and feature not in self.without
        self.met[feature] += drawn
        return drawn

    # -- the model -----------------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        self.rng.seed(self.model_seed)
        torch.manual_seed(self.model_seed)
        model = nn.Sequential(*(self._module(0) for _ in range(self.rng.choice([2, 3, 4]))), nn.Linear(WIDTH, 3))
        linears = [module for module in model.modules() if type(module) is Linear]
        if len(linears) > 1 and self.has("tied", 0.4):
            one, other = self.rng.sample(linears, 2)
            other.weight = one.weight
        if self.has("frozen", 0.4):
            for parameter in model.parameters():
                parameter.requires_grad_(self.rng.random() < 0.7)
        _train_what_must_be(model)
        return model

    def _module(self, depth: int) -> nn.Module:
        rng = self.rng
        kind = rng.random()
        if depth == 3 or kind < 0.3:
            return rng.choice(
                [
                    lambda: Linear(WIDTH, WIDTH, bias=rng.random() < 0.7),
                    lambda: Scale(WIDTH),
                    lambda: Scale(1),
                    lambda: Scale(),
                    lambda: nn.LayerNorm(WIDTH),
                ]
            )()
        if kind < 0.5:
            return nn.Sequential(*(self._module(depth + 1) for _ in range(rng.choice([1, 2, 3]))))
        child = self._module(depth + 1)
        if kind < 0.6:
            return Of(lambda self, x: x + self.child(x), child=child)
        if kind < 0.7 and self.has("regions", 1):
            way = WAYS[rng.choice(list(WAYS))]
            return Of(lambda self, x: way(self.child, x), child=child)
        if kind < 0.76 and self.has("no_grad", 1):
            return Of(_without_gradients, child=child)
        if kind < 0.83 and self.has("twice", 1):
            return Of(lambda self, x: self.child(self.child(x)), child=child)
        if kind < 0.9 and self.has("dicts", 1):
            return Of(_merged, inner=Of(_dicts, one=child, two=self._module(depth + 1)))
        if kind < 0.95 and self.has("unused", 1):
            number = rng.randrange(3)
            return Of(lambda self, x: self.child(x) if now["microbatch"] == number else x + 1, child=child)
        if self.has("by rank", 1):
            return ByRank()
        return child

    # -- its units -----------------------------------------------------------------------------------------------------

    def units(self, model: nn.Module) -> Sequence[Any]:
        """Inner modules first. What holds parameters is in a unit: the whole model is one, or all its children."""
        self.rng.seed(self.units_seed)
        rng = self.rng
        of_ranks = {id(inner) for module in model.modules() if type(module) is ByRank for inner in module.layers}
        containers = {id(module) for module in model.modules() if isinstance(module, nn.ModuleList)}
        share = rng.choice([0.2, 0.5, 1.0])
        top = [model] if rng.random() < 0.7 else list(model.children())
        chosen = [
            module
            for module in model.modules()
            if module is not model
            and all(module is not each for each in top)
            and id(module) not in of_ranks | containers
            and rng.random() < share
        ]
        units: list[Any] = [*reversed(chosen), *top]
        if len(top) > 2 and self.has("groups", 0.5):
            units[-2:] = [units[-2:]]
        return units

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, run: Run, model: nn.Module) -> None:
        rng = random.Random(self.seed + run.number)  # the same on every rank
        for microbatch in range(self.num_microbatches):
            now.update(rank=run.rank, microbatch=microbatch)
            weight = None
            if self.is_weighted:
                weight = float((run.rank * 3 + microbatch * 2 + run.number) % 4) + (run.rank == microbatch == 0)
            if self.is_accumulated:
                with run.microbatch(model, last=microbatch == self.num_microbatches - 1, weight=weight):
                    self._microbatch(run, model, rng, microbatch, is_empty=weight == 0)
            else:
                self._microbatch(run, model, rng, microbatch, is_empty=False)
            if self.evaluates and rng.random() < 0.5:
                with torch.no_grad():
                    run.losses.append(model(run.data(2, WIDTH, of=50)).sum().item())

    def _microbatch(self, run: Run, model: nn.Module, rng: random.Random, number: int, *, is_empty: bool) -> None:
        losses = []
        for forward in range(self.num_forwards):
            x = run.data(3, WIDTH, of=10 * number + forward).requires_grad_(self.needs_input_gradient)
            losses.append(model(x).square().mean() * (float("nan") if is_empty else 1.0))
        rng.shuffle(losses)
        if self.drops:
            losses.pop()
        while losses:
            run.backward(losses.pop())

    def between(self, model: nn.Module, number: int) -> None:
        rng = random.Random(self.seed + number)
        for parameter in list(model.parameters()):
            edits, toggles = self.edits and rng.random() < 0.2, self.toggles and rng.random() < 0.2
            if edits:
                with torch.no_grad():
                    parameter.mul_(0.9)
            if toggles and parameter.is_leaf:
                parameter.requires_grad_(not parameter.requires_grad)
        _train_what_must_be(model)

    def program(self) -> Program:
        return Program(self.model, self.units, self.step, self.between, self.is_weighted, largest=1e-10)


def wrong_of(seed: int, size: int, without: Set[str] = frozenset()) -> tuple[list[str], Counter[str]]:
    """What differs, and which features were met; runs on every rank."""
    drawn = Drawn(seed, size, without)
    # A forward whose backward never comes keeps its units whole for longer with zero=1 and 2.
    wrong = [text for text in differences(drawn.program(), drawn.settings) if not text.endswith(": step>")]
    return wrong, drawn.met


def many(seeds: Sequence[int], size: int) -> tuple[dict[int, list[str]], Counter[str]]:
    found: dict[int, list[str]] = {}
    met: Counter[str] = Counter()
    for seed in seeds:
        try:
            wrong, features = wrong_of(seed, size)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        met += features
        if wrong:
            found[seed] = wrong
    return found, met
