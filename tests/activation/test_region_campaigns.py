"""Campaigns on regions: random programs, recomputation that differs, failures at every call, leaks, threads."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.swap import engines
from hyper_parallel.core.swap.engine import SwapEngine
from hyper_parallel.platform.torch.regions import recomputation
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
from support import region_ops
from support.campaign import share
from support.region_programs import (
    ModuleRunner,
    Program,
    Runner,
    all_features,
    check_no_mode_left,
    differences,
    draw,
    flush_aborted_backward,
    report,
)
from support.swapping import Swapping, check_nothing_left
from support.tally import TalliesCalls

# -- the same results -------------------------------------------------------------------------------------------------------


def test_random_programs_give_what_they_give_without_regions(on_disk: Swapping) -> None:
    """Reliability: a gradient differs under a policy. Outputs, gradients, buffers and generators, bit for bit."""
    runner, met, reports, num_wrong = Runner(checkpoint), Counter[str](), [], 0
    seeds = share(10_000, 300)
    for seed in seeds:
        program = draw(seed)
        met.update(program.features())
        plain = runner.run(program, managed=False)
        try:
            is_wrong = bool(differences(plain, runner.run(program, managed=True)))
        except Exception:
            is_wrong = True
        if is_wrong:
            num_wrong += 1
            if len(reports) < 3:
                reports.append(report(runner, program) or f"seed {seed}: wrong once, right when it was run again")
    assert num_wrong == 0, f"{num_wrong} of {len(seeds)} programs are wrong; the first:\n" + "\n\n".join(reports)
    at_least = len(seeds) // 50
    assert {name: met[name] for name in all_features() if met[name] < at_least} == {}, "hardly met"
    assert {answer: runner.answers[answer] for answer in CheckpointPolicy if runner.answers[answer] < at_least} == {}
    assert on_disk.offloaded_bytes > 0
    assert on_disk.loaded_bytes > 0


def test_recorded_ops_that_run_without_their_function_give_the_same(on_disk: Swapping) -> None:
    """The same programs with modules as regions, three times: the function again, the proof that it has nothing unseen, its ops alone."""
    num_runs, num_wrong, reports = Counter[str](), 0, []
    run_recorded = recomputation.run_recorded

    def counting(*args: Any, **kwargs: Any) -> Any:
        num_runs["tried"] += 1
        found = run_recorded(*args, **kwargs)
        num_runs["done"] += 1
        return found

    seeds = share(10_000, 120)
    with mock.patch.object(recomputation, "run_recorded", counting):
        for seed in seeds:
            runner, program = ModuleRunner(checkpoint), draw(seed)
            plain = runner.run(program, managed=False)
            for number in range(3):
                try:
                    wrong = ", ".join(differences(plain, runner.run(program, managed=True)))
                except Exception as error:
                    wrong = repr(error)
                if wrong:
                    num_wrong += 1
                    reports.append(f"seed {seed}, run {number}: {wrong}\n{program.describe()}")
                    break
    assert num_wrong == 0, f"{num_wrong} of {len(seeds)} programs are wrong; the first:\n" + "\n\n".join(reports[:3])
    assert num_runs["done"] > len(seeds), num_runs


# -- recomputation that differs ---------------------------------------------------------------------------------------------

STEADY = ["sine", "product", "gelu", "softmax", "linear", "layer_norm", "matmul", "slices", "chunk", "where", "tied"]
# what the function does at its first call and at every later one, and the ops that the error may name
DRIFTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any], str]] = {
    "another op": (lambda t: t.sin(), lambda t: t.cos(), "sin|cos"),
    "another shape": (lambda t: t[:3].sin().sum() * t, lambda t: t[:4].sin().sum() * t, "sin|slice"),
    "another scalar": (lambda t: (t * 0.5).sin(), lambda t: (t * 0.75).sin(), "mul"),
    "another dtype": (lambda t: t.double().sin().float(), lambda t: t.half().sin().float(), "_to_copy|sin"),
    "another branch": (lambda t: t.sin(), lambda t: t.tanh().sin(), "sin|tanh"),
    "one op less": (lambda t: t.tanh().sin(), lambda t: t.sin(), "sin|tanh"),
    "another order": (lambda t: t.tanh() * t.sin(), lambda t: t.sin() * t.tanh(), "sin|tanh|mul"),
    "other values": (lambda t: (t * torch.tensor(0.5)).sin(), lambda t: (t * torch.tensor(0.75)).sin(), "mul"),
}
NO_MATRIX_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


class Drifting(TalliesCalls, nn.Module):
    """Does something else when it is called again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return DRIFTS[self.kind][self.num_calls > 1](t)


class Block(nn.Module):
    def __init__(self, seed: int, kind: str) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.state = region_ops.State(seed, torch.float32)
        self.seed = seed
        self.before = choose.choices(STEADY, k=choose.randint(0, 3))
        self.after = choose.choices(STEADY, k=choose.randint(1, 3))
        self.drifting = Drifting(kind)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for name in self.before:
            a = region_ops.OPS[name](self.state, random.Random(self.seed), a, b)
        a = self.drifting(a)
        for name in self.after:
            a = region_ops.OPS[name](self.state, random.Random(self.seed), a.sin(), b)
        return a


def drift_found(seed: int, kind: str, swapping: Swapping) -> str | None:
    """None if the difference was found and named; else what happened."""
    choose = random.Random(seed)
    block = Block(seed, kind)
    a, _, b = block.state.inputs(0)
    policy = choose.choice([None, NO_MATRIX_PRODUCTS, lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE])
    is_module = choose.random() < 0.5
    function = block if is_module else lambda a, b: block.forward(a, b)
    with swapping.configured(check="values") if kind == "other values" else contextlib.nullcontext():
        out = checkpoint(function, a, b, policy_fn=policy)
        try:
            out.sum().backward()
        except RuntimeError as error:
            said = str(error)
        else:
            return "no error"
    if not re.search(rf"aten\.({DRIFTS[kind][2]})", said):
        return f"the op is not named: {said}"
    if not re.search("drifting" if is_module else "Drifting|drifting|region", said):
        return f"the place is not named: {said}"
    return None


def test_a_recomputation_that_differs_is_found_and_named(on_disk: Swapping) -> None:
    """Reliability: recomputation not deterministic. 300 injected differences, values only included."""
    kinds, missed = list(DRIFTS), []
    for seed in range(304):
        kind = kinds[seed % len(kinds)]
        found = drift_found(seed, kind, on_disk)
        if found is not None:
            missed.append(f"seed {seed}, {kind}: {found}")
        flush_aborted_backward()
    assert missed == [], f"{len(missed)} of 304 not found or not named; the first: " + "\n".join(missed[:3])


def test_a_recomputation_that_does_not_differ_raises_nothing_when_values_are_compared(on_disk: Swapping) -> None:
    """No false alarm: the same programs without a difference, with `check="values"`."""
    runner, wrong = Runner(checkpoint), []
    with on_disk.configured(check="values"):
        for seed in share(2_000, 60):
            wrong += [found for found in [report(runner, draw(50_000 + seed))] if found is not None]
            assert len(wrong) < 3, "\n\n".join(wrong)
    assert wrong == [], "\n\n".join(wrong)


# -- failures ---------------------------------------------------------------------------------------------------------------


class InjectedError(Exception):
    pass


class Fuse:
    """Raises at the n-th call."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.n:
            raise InjectedError

    @property
    def is_blown(self) -> bool:
        return self.count >= self.n


class FailingOps(TorchDispatchMode):
    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self.fuse = fuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fuse()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def failing_policy(fuse: Fuse, runner: Runner) -> Iterator[None]:
    runner.on_policy_call = fuse
    try:
        yield
    finally:
        runner.on_policy_call = lambda: None


@contextlib.contextmanager
def failing_engine(fuse: Fuse) -> Iterator[None]:
    names = ("new_group", "save", "acquire", "keep", "end_forward", "_launch_offload", "_launch_load", "_launch_next")
    originals = {name: getattr(SwapEngine, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            fuse()
            return originals[name](*args, **kwargs)

        return call

    with mock.patch.multiple(SwapEngine, **{name: counting(name) for name in names}):
        yield


def small_program(seed: int, what: str) -> Program:
    """Few steps; where the policy or the engine is to fail, one that uses it."""
    without = frozenset({"backward in another thread"})
    if what != "op":
        without |= {"policy: no policy", "policy: a list of ops", "policy: recompute all"}
    if what == "engine call":
        without |= {"policy: save all"}
    drawn = (draw(90_000 + 100 * seed + again, without=without, num_steps=(1, 2)) for again in itertools.count())
    return next(program for program in drawn if program.num_steps() <= 4)


@pytest.mark.parametrize("what", ["op", "policy call", "engine call"])
def test_an_exception_anywhere_leaks_nothing_and_the_next_step_is_right(on_disk: Swapping, what: str) -> None:
    """Reliability: exception in forward, backward, hook or copy. Every n in fifty programs; four in every run."""
    runner, phases = Runner(checkpoint), Counter[str]()
    for seed in share(50, 4):
        program = small_program(seed, what)
        plain = runner.run(program, managed=False)
        n = 0
        while True:
            n += 1
            fuse = Fuse(n)
            inside = {"op": FailingOps, "engine call": failing_engine}.get(what)
            manager = failing_policy(fuse, runner) if inside is None else inside(fuse)
            where = f"seed {program.seed}, {what} {n}\n{program.describe()}"
            try:
                runner.run(program, managed=True, inside=manager)
            except InjectedError:
                phases[runner.phase] += 1
            except Exception as error:
                raise AssertionError(f"another error came out: {where}") from error
            else:
                assert not fuse.is_blown, f"an exception was swallowed: {where}"
                break
            flush_aborted_backward()
            check_no_mode_left()
            check_nothing_left()
            assert differences(plain, runner.run(program, managed=True)) == [], f"the next step: {where}"
    assert phases["forward"] >= 20
    assert phases["backward"] >= (0 if what == "policy call" else 20)


# -- leaks ------------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(h), 0.1)


def mixed(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op is torch.ops.aten.addmm.default:
        return CheckpointPolicy.MUST_SWAP if ctx.occurrence % 2 == 0 else CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_SWAP if op is torch.ops.aten.gelu.default else CheckpointPolicy.PREFER_RECOMPUTE


def nested(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, checkpoint(layer, x, policy_fn=mixed)).sin()

    return checkpoint(outer, x, policy_fn=[torch.ops.aten.sin.default])


TRAINED: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "recompute": lambda layer, x: checkpoint(layer, x),
    "selective save": lambda layer, x: checkpoint(layer, x, policy_fn=[torch.ops.aten.addmm.default]),
    "swap mix": lambda layer, x: checkpoint(layer, x, policy_fn=mixed),
    "nested": nested,
    "swap_inputs": lambda layer, x: checkpoint(layer, x, swap_inputs=True),
}


def num_living() -> tuple[int, int]:
    """Tensors, and objects of this package."""
    num_tensors = num_ours = 0
    for each in gc.get_objects():
        kind = type(each)
        num_tensors += issubclass(kind, torch.Tensor)
        # The worker of a disk's stream has its last copy in its hands until the next one comes.
        module = str(kind.__module__)  # of some classes in C it is no text
        num_ours += module.startswith("hyper_parallel") and not module.endswith("disk_stream")
    return num_tensors, num_ours


@pytest.mark.parametrize("how", TRAINED)
def test_what_lives_at_the_last_step_is_what_lived_at_the_third_with_the_collector_off(
    on_disk: Swapping, how: str
) -> None:
    torch.manual_seed(0)
    layers = [Layer() for _ in range(3)]
    x = on_disk.randn(8, 16)
    living, reserved = [], []
    gc.collect()
    gc.disable()
    try:
        for step in share(1_000, 150):
            for layer in layers:
                layer.zero_grad(set_to_none=True)
            h = x.clone().requires_grad_()
            for layer in layers:
                h = TRAINED[how](layer, h)
            h.square().mean().backward()
            if step % 5 == 0:
                dropped = TRAINED[how](layers[0], x.clone().requires_grad_())  # a forward without a backward
                del dropped
            del h
            check_nothing_left()
            living.append(num_living() if len(living) < 3 or step % 25 == 24 else living[-1])
            reserved.append(sum(managed.tier.reserved_bytes for managed in engines.all_engines().values()))
    finally:
        gc.enable()
    assert living[2] == living[-1]
    assert reserved[2] == reserved[-1]
    if how in ("swap mix", "nested", "swap_inputs"):
        assert on_disk.offloaded_bytes > 0


# -- threads ----------------------------------------------------------------------------------------------------------------

# The default generator and autocast's cache of casts are one for all threads: what uses them differs from run to run, managed
# or not.
SHARED_BY_THREADS = frozenset({
    "dropout",
    "random numbers inside",
    "random numbers decide a branch",
    "attention with dropout",
    "a part under autocast",
    "autocast around regions",
})  # fmt: skip


def test_ten_threads_train_with_regions_at_once(on_disk: Swapping) -> None:
    wrong: list[str] = []
    num_steps = len(share(200, 20))

    def work(thread: int) -> None:
        torch.set_num_threads(1)  # a thread begins with the default, and other sums with other numbers
        runner = Runner(checkpoint)
        for step in range(num_steps):
            program = draw(200_000 + thread * 1_000 + step, without=SHARED_BY_THREADS)
            try:
                plain = runner.run(program, managed=False)
                different = differences(plain, runner.run(program, managed=True))
            except Exception as error:
                wrong.append(f"thread {thread}, step {step}: {type(error).__name__}: {error}\n{program.describe()}")
                continue
            if [name for name in different if name != "default generator"]:
                wrong.append(f"thread {thread}, step {step}: {different}\n{program.describe()}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert wrong == [], f"{len(wrong)} of {10 * num_steps}; the first:\n{wrong[0]}"
    assert on_disk.loaded_bytes > 0
