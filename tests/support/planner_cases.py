"""Problems for the memory planner: small random ones with all their answers, and large ones that look like transformers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

from hyper_parallel.core.planner.model.abilities import Abilities
from hyper_parallel.core.planner.model.choices import Choice, Decision, RegionBytes, RegionDecision, allowed, bytes_of
from hyper_parallel.core.planner.model.problem import Cost, Problem, cost
from hyper_parallel.core.planner.model.profile import Input, Link, ProfiledOp, Region, StepProfile, StorageFacts, Turn

MB = 1_000_000
CHOICES = tuple(Choice)
NO_HURRY = 600.0  # seconds for a solver: what it finds must not depend on how busy the machine is


def op(
    num_bytes: int = 0, ms: float = 0.0, reads: tuple[int, ...] = (), *, needed: bool = True, **others
) -> ProfiledOp:
    """An op with one result; none where it has no bytes."""
    makes = (StorageFacts(num_bytes, needed),) if num_bytes else ()
    return ProfiledOp("", "op", 0, 0, ms, others.pop("makes", makes), reads, **others)


def region(*ops: ProfiledOp, inputs: tuple[Input, ...] = (), **others) -> Region:
    times = {"forward_ms": 10.0, "backward_ms": 20.0, "forward_peak_bytes": 0, "backward_peak_bytes": 0}
    return Region("block", 0, ops, inputs, **{**times, **others})


def problem(*regions: Region, budget: int = 10**9, window: int = 0, prefetch: int = 0, **others) -> Problem:
    """Without a word about it, the link takes a byte in a millisecond each way, and the turn takes no time."""
    facts = {"base_bytes": 0, "peak_bytes": 0, "step_ms": 0.0, "turn": Turn(), "link": Link(1.0, 1.0)}
    facts.update({name: others.pop(name) for name in list(others) if name in facts})
    return Problem(StepProfile(regions, **facts), budget, window, prefetch, **others)


# ---- small ones -------------------------------------------------------------------------------------------------------------------


def random_problem(seed: int) -> Problem:
    """Small enough to try every decision, and with everything that a profile can have."""
    rng = random.Random(seed)
    while True:
        found = _random_problem(rng)
        num_decisions = 1
        for each in found.profile.regions:
            num_decisions *= max(len(loads(each)), 1)
        if num_decisions <= 1000:
            return found


def _random_problem(rng: random.Random) -> Problem:
    num_regions = rng.choice((2, 2, 2, 3, 3, 4))
    most_ops = {2: 5, 3: 4, 4: 3}[num_regions]
    link = rng.choice((None, Link(1.0, 1.0), Link(2.0, 0.5), Link(0.5, 3.0), Link(5.0, 1.0), Link(20.0, 20.0)))
    regions = [_random_region(rng, rng.randint(2, most_ops)) for _ in range(num_regions)]
    if rng.random() < 0.5:  # some share a shape, with times and peaks of their own
        for index in range(1, num_regions):
            if rng.random() < 0.7:
                regions[index] = _with_other_times(rng, regions[0])
    profile = StepProfile(
        tuple(regions),
        base_bytes=rng.randint(0, 20),
        peak_bytes=0,
        step_ms=0.0,
        turn=Turn(rng.choice((0.0, 0.0, 3.0, 30.0)), rng.randint(0, 10)),
        link=link,
    )
    found = Problem(
        profile,
        budget_bytes=0,
        window_bytes=rng.choice((0, 2, 5, 12)),
        prefetch_bytes=rng.choice((0, 2, 5, 12)),
        region_overhead_ms=rng.choice((0.0, 0.5, 4.0)),
        margin_bytes=rng.choice((0, 0, 7)),
        turn_is_clear=rng.random() < 0.5,
    )
    everything = sum(each.residual_bytes + max(each.forward_peak_bytes, each.backward_peak_bytes) for each in regions)
    return dataclasses.replace(found, budget_bytes=profile.base_bytes + int(everything * rng.uniform(0.3, 0.8)))


def _random_region(rng: random.Random, num_ops: int) -> Region:
    inputs = tuple(
        Input(StorageFacts(rng.choice((0, 2, 5, 9)), rng.random() < 0.5), rng.random() < 0.7)
        for _ in range(rng.choice((0, 1, 1, 2)))
    )
    ops: list[ProfiledOp] = []
    for index in range(num_ops):
        if ops and ops[-1].choices == ("recompute",) and ops[-1].forward_ms and rng.random() < 0.7:
            whole = ops[-1].reads[0] if ops[-1].part is not None else index - 1
            ops.append(op(rng.randint(0, 15), 0.0, (whole,), choices=CHOICES, part=index))
            continue
        reads = tuple(each for each in range(index) if rng.random() < (0.8 if each == index - 1 else 0.3))
        kind = rng.random()
        if kind < 0.2:
            ops.append(op(0, rng.choice((0.0, 1.0)), reads, choices=rng.choice((CHOICES, ("recompute",)))))
            continue
        makes = tuple(StorageFacts(rng.randint(0, 15), rng.random() < 0.6) for _ in range(rng.choice((1, 1, 2))))
        every = rng.random() < 0.6
        chosen = CHOICES if every else tuple(each for each in CHOICES if rng.random() < 0.6) or ("save",)
        ops.append(op(0, round(rng.uniform(0.0, rng.choice((2.0, 8.0, 40.0))), 2), reads, makes=makes, choices=chosen))
    found = region(*ops, inputs=inputs, outside_bytes=rng.choice((0, 0, 4)), may_be_plain=rng.random() < 0.8)
    return _with_other_times(rng, found)


def _with_other_times(rng: random.Random, like: Region) -> Region:
    ops = tuple(
        dataclasses.replace(each, forward_ms=round(each.forward_ms * rng.uniform(0.9, 1.1), 2)) for each in like.ops
    )
    return dataclasses.replace(
        like,
        ops=ops,
        forward_ms=round(rng.uniform(0.0, 15.0), 1),
        backward_ms=round(rng.uniform(0.0, 20.0), 1),
        before_ms=rng.choice((0.0, 2.0)),
        after_ms=rng.choice((0.0, 3.0)),
        forward_peak_bytes=rng.randint(0, 15),
        backward_peak_bytes=rng.randint(0, 20),
    )


def candidates(each: Region) -> Iterator[RegionDecision]:
    """All that can be written down with the choices that ops have, sensible or not."""
    num_ops, num_inputs = len(each.ops), len(each.inputs)
    yield RegionDecision(True, (None,) * num_ops, (None,) * num_inputs)
    ops = itertools.product(*((*allowed(one), None) for one in each.ops))
    inputs = list(itertools.product((None, "save", "swap"), repeat=num_inputs))
    for pair in itertools.product(ops, inputs):
        yield RegionDecision(False, *pair)


def is_carried_out(each: Region, decision: RegionDecision) -> bool:
    """The rules of the README once more, apart from `choices.check`."""
    if decision.is_plain:
        return each.may_be_plain
    runs_again = "recompute" in decision.ops
    for one, choice in zip(each.ops, decision.ops, strict=True):
        if choice is None and one.is_needed:
            return False
        if choice == "recompute" and any(decision.ops[read] is None for read in one.reads):
            return False
        if one.part is not None and choice in ("save", "swap") and decision.ops[one.reads[0]] == "recompute":
            return False
    for one, choice in zip(each.inputs, decision.inputs, strict=True):
        if choice is None and (runs_again or one.value.is_residual):
            return False
        if choice == "swap" and not one.may_swap:
            return False
    return True


@functools.lru_cache(maxsize=512)
def loads(each: Region) -> dict[RegionBytes, RegionDecision]:
    """All decisions, one of each kind: what they cost depends on the load alone."""
    return {bytes_of(each, decision): decision for decision in candidates(each) if is_carried_out(each, decision)}


def all_costs(given: Problem) -> list[tuple[Cost, Decision]]:
    """Of every decision."""
    each = [loads(one).items() for one in given.profile.regions]
    found = []
    for combination in itertools.product(*each):
        chosen = [one for one, _ in combination]
        if given.can_swap or not any(one.swapped_bytes for one in chosen):
            found.append((cost(given, chosen), tuple(decision for _, decision in combination)))
    return found


def smaller(given: Problem) -> Iterator[Problem]:
    """Problems with a region, an op or an input less; what read it reads one less."""
    regions = given.profile.regions
    for index, each in enumerate(regions):
        if len(regions) > 1:
            yield _with_regions(given, regions[:index] + regions[index + 1 :])
        for number in range(len(each.ops)):
            ops = tuple(_without_read(one, number) for at, one in enumerate(each.ops) if at != number)
            yield _with_regions(given, (*regions[:index], dataclasses.replace(each, ops=ops), *regions[index + 1 :]))
        for number in range(len(each.inputs)):
            inputs = each.inputs[:number] + each.inputs[number + 1 :]
            yield _with_regions(
                given, (*regions[:index], dataclasses.replace(each, inputs=inputs), *regions[index + 1 :])
            )


def _with_regions(given: Problem, regions: tuple[Region, ...]) -> Problem:
    return dataclasses.replace(given, profile=dataclasses.replace(given.profile, regions=regions))


def _without_read(one: ProfiledOp, gone: int) -> ProfiledOp:
    reads = tuple(read - (read > gone) for read in one.reads if read != gone)
    return dataclasses.replace(one, reads=reads, part=one.part if reads else None)


# ---- large ones -------------------------------------------------------------------------------------------------------------------


class _Ops:
    """Ops of a block in the making, by name; sizes in MB and times in ms at a hidden size of 64 MB."""

    def __init__(self, rng: random.Random, scale: float, spread: float) -> None:
        self.ops: list[ProfiledOp] = []
        self._index: dict[str, int] = {}
        self._rng, self._scale, self._spread = rng, scale, spread

    def _about(self, value: float) -> float:
        return value * self._scale * (1 + self._spread * self._rng.uniform(-1, 1))

    def add(
        self, name: str, reads: tuple[str, ...], mb: float, ms: float, *, kept: bool = True, mask_mb: float = 0.0
    ) -> str:
        makes = [StorageFacts(int(self._about(mb) * MB), kept)]
        if mask_mb:
            makes.append(StorageFacts(int(self._about(mask_mb) * MB), True))
        return self._add(name, reads, self._about(ms), tuple(makes), CHOICES)

    def view(self, name: str, read: str) -> str:
        return self._add(name, (read,), 0.0, (), ("recompute",))

    def _add(
        self, name: str, reads: tuple[str, ...], ms: float, makes: tuple[StorageFacts, ...], choices: tuple[str, ...]
    ) -> str:
        indices = tuple(sorted({self._index[read] for read in reads}))
        self._index[name] = len(self.ops)
        self.ops.append(ProfiledOp("", name, 0, 0, ms, makes, indices, () if reads else (0,), 0, choices))
        return name

    def norm(self, name: str, reads: tuple[str, ...], mb: float) -> str:
        wide = self.add(f"{name}.float", reads, 2 * mb, 0.05)
        square = self.add(f"{name}.pow", (wide,), 2 * mb, 0.06, kept=False)
        mean = self.add(f"{name}.mean", (square,), 0.1, 0.04, kept=False)
        scale = self.add(f"{name}.rsqrt", (mean,), 0.1, 0.005)
        scaled = self.add(f"{name}.mul", (wide, scale), 2 * mb, 0.06, kept=False)
        narrow = self.add(f"{name}.to", (scaled,), mb, 0.05)
        return self.add(f"{name}.weight", (narrow,), mb, 0.05)

    def linear(self, name: str, read: str, mb: float, ms: float, *, kept: bool = False) -> str:
        return self.add(f"{name}.mm", (self.view(f"{name}.view", read),), mb, ms, kept=kept)

    def rotary(self, name: str, read: str, mb: float) -> str:
        heads = self.view(f"{name}.heads", read)
        even = self.add(f"{name}.cos", (heads,), mb, 0.05, kept=False)
        turned = self.add(f"{name}.neg", (self.view(f"{name}.half", heads),), mb / 2, 0.03, kept=False)
        odd = self.add(
            f"{name}.sin", (self.add(f"{name}.cat", (turned, heads), mb, 0.05, kept=False),), mb, 0.05, kept=False
        )
        return self.add(f"{name}.add", (even, odd), mb, 0.05)


def transformer_block(rng: random.Random, path: str, scale: float = 1.0, spread: float = 0.0) -> Region:
    """Attention with normed and rotated heads, then four experts; about 85 ops, 40 residuals, 2.3 GB and 26 ms at scale 1."""
    ops, hidden = _Ops(rng, scale, spread), 64.0
    normed = ops.norm("norm1", (), hidden)
    heads = {}
    for name, mb, ms in (("q", hidden, 1.1), ("k", hidden / 4, 0.3)):
        heads[name] = ops.rotary(
            f"rotary.{name}", ops.norm(f"norm.{name}", (ops.linear(name, normed, mb, ms),), mb), mb
        )
    values = ops.add("v.transpose", (ops.linear("v", normed, hidden / 4, 0.3),), hidden / 4, 0.03)
    attention = ops.add("attention", (heads["q"], heads["k"], values), hidden, 4.0, mask_mb=0.5)
    out = ops.linear("out", ops.view("merge", attention), hidden, 1.1)
    dropped = ops.add("dropout1", (out,), hidden, 0.06, kept=False, mask_mb=hidden / 2)
    middle = ops.add("add1", (dropped,), hidden, 0.06, kept=False)
    normed = ops.norm("norm2", (middle,), hidden)
    experts = []
    for number in range(4):
        gate = ops.linear(f"gate{number}", normed, 1.2 * hidden, 1.2, kept=True)
        up = ops.linear(f"up{number}", normed, 1.2 * hidden, 1.2, kept=True)
        act = ops.add(f"silu{number}", (gate,), 1.2 * hidden, 0.07)
        both = ops.add(f"mul{number}", (act, up), 1.2 * hidden, 0.08)
        experts.append(ops.add(f"down{number}", (both,), hidden, 1.2, kept=False))
    mixed = ops.add("mix", tuple(experts), hidden, 0.2, kept=False)
    dropped = ops.add("dropout2", (mixed,), hidden, 0.06, kept=False, mask_mb=hidden / 2)
    ops.add("add2", (dropped, middle), hidden, 0.06, kept=False)
    forward_ms = sum(each.forward_ms for each in ops.ops)
    residual_bytes = sum(each.residual_bytes for each in ops.ops)
    return Region(
        path,
        0,
        tuple(ops.ops),
        (Input(StorageFacts(int(hidden * scale * MB), True)),),
        forward_ms=forward_ms,
        backward_ms=2.2 * forward_ms,
        forward_peak_bytes=int(1.05 * residual_bytes),
        backward_peak_bytes=int(1.35 * residual_bytes),
    )


def transformer(num_blocks: int, *, differ: bool, seed: int = 0, gigabytes_per_s: float = 55.0) -> StepProfile:
    """Blocks that are all equal, or all of different sizes and proportions."""
    rng = random.Random(seed)
    if differ:
        regions = [
            transformer_block(rng, f"layers.{index}", scale=rng.uniform(0.4, 2.5), spread=0.4)
            for index in range(num_blocks)
        ]
    else:
        block = transformer_block(rng, "")
        regions = [dataclasses.replace(block, path=f"layers.{index}") for index in range(num_blocks)]
    kept = [0, *itertools.accumulate(each.residual_bytes for each in regions)]
    turn = Turn(30.0, 2000 * MB)
    base_bytes = 20_000 * MB
    peaks = [before + each.backward_peak_bytes for before, each in zip(kept, regions, strict=False)]
    speed = gigabytes_per_s * MB
    return StepProfile(
        tuple(regions),
        base_bytes,
        base_bytes + max(*peaks, kept[-1] + turn.peak_bytes),
        sum(each.forward_ms + each.backward_ms for each in regions) + turn.ms,
        turn,
        Link(speed, speed),
    )


def as_measured(profile: StepProfile) -> StepProfile:
    """With what a profile of a device has: forward peaks that hold all that ops make, a last region that is not swapped, regions of which the engine hears."""
    regions = []
    for each in profile.regions:
        made_bytes = sum(one.num_bytes for one in each.ops) + sum(one.value.num_bytes for one in each.inputs)
        regions.append(dataclasses.replace(each, forward_peak_bytes=max(each.forward_peak_bytes, made_bytes)))
    last = regions[-1]
    ops = tuple(dataclasses.replace(one, choices=tuple(c for c in one.choices if c != "swap")) for one in last.ops)
    inputs = tuple(dataclasses.replace(one, may_swap=False) for one in last.inputs)
    regions[-1] = dataclasses.replace(last, ops=ops, inputs=inputs)
    abilities = Abilities(loads_by_region=True, turn_is_clear=True)
    return dataclasses.replace(
        measured_of(profile, device="cuda: a device"), regions=tuple(regions), abilities=abilities
    )


def measured_of(profile: StepProfile, **changes: Any) -> StepProfile:
    """The profile, as if it had been measured of something else: `changes` are of its identity."""
    return dataclasses.replace(profile, identity=dataclasses.replace(profile.identity, **changes))
