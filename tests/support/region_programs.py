"""Random programs over tensors and small modules, with nested regions, that run plainly and under any manner of saving.

A program is data: a list of steps, some of which are regions with steps of their own. Every step takes square tensors of one
size and gives one, and names its operands by numbers that are taken modulo what is there: any step can be left out, and a
failing program shrinks by that. `describe` prints the listing.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.regions.policy import UserPolicy
from hyper_parallel.platform.torch.activation_checkpoint import AsyncSaveOnCpu, swap_wrapper
from hyper_parallel.platform.torch.regions.unwatched_region import UnwatchedRegion
from support.region_ops import DIFFERENTIABLE_TWICE, FEATURE, OPS, SIZE, Cache, State

# -- what a program is ----------------------------------------------------------------------------------------------------


class Manner(NamedTuple):
    """How one region is run when the program is managed."""

    policy: str = "no policy"
    swap_inputs: bool = False
    around: str = "nothing"
    early_stop: bool = True
    seed: int = 0


class Step(NamedTuple):
    """An op of `support.region_ops` on two operands; `detail` seeds the choices inside the op."""

    op: str
    operands: tuple[int, int]
    detail: int


class Region(NamedTuple):
    """Steps that run inside a region, with the form of what goes in and comes out."""

    body: tuple[Any, ...]
    operands: tuple[int, ...]
    takes: str  # the form of the arguments
    gives: str  # the form of the result
    closes_over: bool  # whether the body reads tensors that are no arguments
    changes: str  # what the body changes in place
    manner: Manner


class Backward(NamedTuple):
    kind: str
    detail: int = 0


class Program(NamedTuple):
    seed: int
    steps: tuple[Any, ...]
    backward: Backward
    dtype: torch.dtype = torch.float32
    autocast: bool = False  # around the whole forward

    def features(self) -> set[str]:
        """Everything of the lists in this file that the program does."""
        found = {self.backward.kind, str(self.dtype).removeprefix("torch.")}
        if self.autocast:
            found.add("autocast around regions")
        found.update(_features(self.steps, depth=0))
        return found

    def num_steps(self) -> int:
        """Ops, those inside of regions included."""
        return sum(1 for _ in _ops(self.steps))

    def describe(self) -> str:
        head = f"program {self.seed}: {self.dtype}, {'under autocast, ' if self.autocast else ''}backward: {self.backward.kind}"
        return "\n".join([head, *_listing(self.steps, "  ")])


TAKES = ["positional", "keyword", "tuple", "list", "dict", "nested"]
GIVES = ["one tensor", "a tuple", "a list", "a dict", "tensors and others"]
CHANGES = ["nothing", "an input", "an input without a gradient", "a cache"]
POLICIES = ["no policy", "save all", "swap all", "recompute all", "a mix", "a list of ops"]
AROUND = ["nothing", "swap_wrapper around the region", "swap_wrapper in the region", "AsyncSaveOnCpu"]
BACKWARDS = [
    "backward",
    "backward twice",
    "two losses",
    "two losses, last first",
    "double backward",
    "backward in another thread",
    "two forwards",
    "two forwards, last first",
    "gradients of a subset",
]
SAVED_OPS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.sin.default,
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.native_layer_norm.default,
]
_FIXED = {
    "save all": CheckpointPolicy.MUST_SAVE,
    "swap all": CheckpointPolicy.MUST_SWAP,
    "recompute all": CheckpointPolicy.MUST_RECOMPUTE,
}
_ANSWERS = list(CheckpointPolicy)


def all_features() -> set[str]:
    """What a campaign must have met."""
    regions = {f"takes {form}" for form in TAKES} | {f"gives {form}" for form in GIVES}
    regions |= {f"changes {what}" for what in CHANGES[1:]} | {f"policy: {name}" for name in POLICIES}
    regions |= {f"around: {name}" for name in AROUND[1:]}
    regions |= {"swap_inputs", "runs on after the last residual", "a closure", "siblings"}
    regions |= {f"regions of depth {depth}" for depth in (1, 2, 3)}
    return regions | set(BACKWARDS) | set(FEATURE.values()) | {"float32", "float64", "autocast around regions"}


def _features(steps: Iterable[Any], depth: int) -> Iterator[str]:
    num_regions = 0
    for step in steps:
        if isinstance(step, Step):
            yield FEATURE[step.op]
            continue
        num_regions += 1
        yield f"regions of depth {depth + 1}"
        yield f"takes {step.takes}"
        yield f"gives {step.gives}"
        yield f"changes {step.changes}"
        yield f"policy: {step.manner.policy}"
        yield f"around: {step.manner.around}"
        yield from (["swap_inputs"] if step.manner.swap_inputs else [])
        yield from ([] if step.manner.early_stop else ["runs on after the last residual"])
        yield from (["a closure"] if step.closes_over else [])
        yield from _features(step.body, depth + 1)
    if num_regions > 1:
        yield "siblings"


def _ops(steps: Iterable[Any]) -> Iterator[Step]:
    for step in steps:
        if isinstance(step, Step):
            yield step
        else:
            yield from _ops(step.body)


def _listing(steps: Iterable[Any], indent: str) -> Iterator[str]:
    for step in steps:
        if isinstance(step, Step):
            yield f"{indent}{step.op}{step.operands} detail={step.detail}"
            continue
        manner = ", ".join(f"{k}={v}" for k, v in step.manner._asdict().items() if v != Manner._field_defaults[k])
        extras = [f"takes {step.takes}", f"gives {step.gives}"]
        extras += [f"changes {step.changes}"] * (step.changes != "nothing") + ["closure"] * step.closes_over
        yield f"{indent}region{step.operands} [{manner or 'plain manner'}] {', '.join(extras)}:"
        yield from _listing(step.body, indent + "    ")


# -- drawing ----------------------------------------------------------------------------------------------------------------


def draw(seed: int, *, without: frozenset[str] = frozenset(), num_steps: tuple[int, int] = (2, 5)) -> Program:
    """The program of a seed. `without`: features that it must not have."""
    choose = random.Random(seed)
    kind = choose.choice([kind for kind in BACKWARDS if kind not in without])
    allowed = [name for name in OPS if FEATURE[name] not in without]
    if kind == "double backward":
        allowed = [name for name in allowed if name in DIFFERENTIABLE_TWICE]
    autocast = kind != "double backward" and "autocast around regions" not in without and choose.random() < 0.06
    dtype = torch.float64 if not autocast and choose.random() < 0.1 else torch.float32
    steps = _draw_steps(choose, allowed, without, depth=0, num_steps=choose.randint(*num_steps))
    if not any(isinstance(step, Region) for step in steps):
        steps.insert(choose.randrange(len(steps) + 1), _draw_region(choose, allowed, without, depth=1))
    return Program(seed, tuple(steps), Backward(kind, choose.randrange(1000)), dtype, autocast)


def _draw_steps(
    choose: random.Random, allowed: list[str], without: frozenset[str], depth: int, num_steps: int
) -> list[Any]:
    steps: list[Any] = []
    for _ in range(num_steps):
        if depth < 3 and choose.random() < (0.5, 0.25, 0.2)[depth]:
            steps.append(_draw_region(choose, allowed, without, depth + 1))
        else:
            operands = (choose.randrange(100), choose.randrange(100))
            steps.append(Step(choose.choice(allowed), operands, choose.randrange(1000)))
    return steps


def _draw_region(choose: random.Random, allowed: list[str], without: frozenset[str], depth: int) -> Region:
    changes = [what for what in CHANGES if f"changes {what}" not in without]
    manner = Manner(
        policy=choose.choice([name for name in [*POLICIES, "a mix", "a mix"] if f"policy: {name}" not in without]),
        swap_inputs=choose.random() < 0.3,
        around=choose.choice([AROUND[0]] * 5 + AROUND[1:]),
        early_stop=choose.random() < 0.9,
        seed=choose.randrange(1000),
    )
    return Region(
        body=tuple(_draw_steps(choose, allowed, without, depth, choose.randint(2, 4))),
        operands=tuple(choose.randrange(100) for _ in range(choose.randint(1, 3))),
        takes=choose.choice(TAKES),
        gives=choose.choice(GIVES),
        closes_over=choose.random() < 0.3,
        changes=choose.choice(changes) if choose.random() < 0.4 else "nothing",
        manner=manner,
    )


# -- running ----------------------------------------------------------------------------------------------------------------


class Runner:
    """Runs programs. `answers` counts what the policies of managed runs answered."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint
        self.answers: Counter[CheckpointPolicy] = Counter()
        self.on_policy_call: Callable[[], None] = lambda: None
        self.phase = ""  # of the run that was begun last: "forward" or "backward"

    def run(
        self, program: Program, *, managed: bool, inside: contextlib.AbstractContextManager[Any] | None = None
    ) -> dict[str, torch.Tensor | None]:
        """Everything that the program computed or left behind, by name. `inside` is entered for forward and backward."""
        with _default_generator(program.seed):
            return _Execution(self, program, managed).outcome(inside or contextlib.nullcontext())

    def policy(self, manner: Manner) -> Any:
        if manner.policy == "no policy":
            return None
        if manner.policy == "a list of ops":
            return SAVED_OPS
        fixed = _FIXED.get(manner.policy)

        def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            self.on_policy_call()
            answer = fixed
            if answer is None:
                answer = _ANSWERS[zlib.crc32(f"{manner.seed} {op} {ctx.occurrence}".encode()) % len(_ANSWERS)]
            self.answers[answer] += 1
            return answer

        return policy_fn

    def call(self, region: Region, state: State, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The function as a region."""
        manner = region.manner
        options: dict[str, Any] = {"policy_fn": self.policy(manner), "swap_inputs": manner.swap_inputs}
        if not manner.early_stop:
            options["early_stop"] = False
        if manner.around == "swap_wrapper around the region":
            return swap_wrapper(lambda *a, **k: self.checkpoint(function, *a, **options, **k))(*args, **kwargs)
        if manner.around == "swap_wrapper in the region":
            return self.checkpoint(swap_wrapper(function), *args, **options, **kwargs)
        if manner.around == "AsyncSaveOnCpu":
            with AsyncSaveOnCpu(name=f"around {manner.seed}"):
                return self.checkpoint(function, *args, **options, **kwargs)
        return self.checkpoint(function, *args, **options, **kwargs)


class _Pure(UserPolicy):
    """A function that answers the same each time."""

    is_pure = True


class ModuleRunner(Runner):
    """Runs programs whose regions are modules, the same ones in each run: from the second on their recorded ops may run in backward.

    Policies say that they answer the same each time, as those of `hyper_parallel.policies` do.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        super().__init__(checkpoint)
        self._modules: dict[int, tuple[Region, _Called]] = {}

    def policy(self, manner: Manner) -> Any:
        policy = super().policy(manner)
        return _Pure(policy) if callable(policy) else policy

    def run(
        self, program: Program, *, managed: bool, inside: contextlib.AbstractContextManager[Any] | None = None
    ) -> dict[str, torch.Tensor | None]:
        try:
            return super().run(program, managed=managed, inside=inside)
        finally:
            for _, module in self._modules.values():
                module.functions = []  # they lead to graphs, which lead to the module

    def call(self, region: Region, state: State, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if id(region) not in self._modules:
            self._modules[id(region)] = region, _Called()
        module = self._modules[id(region)][1]
        return super().call(region, state, module, args, {**kwargs, "number": module.use(function, state)})


class UnwatchedRunner(ModuleRunner):
    """Runs programs whose regions are modules that are watched once: from the second run on no mode sees their forwards, where that can be.

    What a policy wants swapped is saved. `num_unwatched`: calls that were not watched.
    """

    def __init__(self, checkpoint: Callable[..., Any], *, is_dynamic: bool) -> None:
        super().__init__(checkpoint)
        self.num_unwatched = 0
        self._is_dynamic = is_dynamic
        self._policies: dict[int, Any] = {}

    def call(self, region: Region, state: State, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if region.manner.swap_inputs or region.manner.around != "nothing" or not region.manner.early_stop:
            return super().call(region, state, function, args, kwargs)
        if id(region) not in self._modules:
            self._modules[id(region)] = region, _Called()
            self._policies[id(region)] = self._saving(region.manner)
        module, policy = self._modules[id(region)][1], self._policies[id(region)]
        self.num_unwatched += policy.observer.is_unwatched
        return policy.observer.call(module, policy, args, {**kwargs, "number": module.use(function, state)})

    def _saving(self, manner: Manner) -> Any:
        given = self.policy(manner)

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if callable(given):
                answer = given(ctx, op, *args, **kwargs)
                return CheckpointPolicy.MUST_SAVE if answer.swaps else answer
            saves = given is not None and op in given
            return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.MUST_RECOMPUTE

        pure = _Pure(policy)
        pure.observer = UnwatchedRegion(is_dynamic=self._is_dynamic)
        return pure


class _Called(nn.Module):
    """A module that does what it is told, with the weights of a program."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Callable[..., Any]] = []

    def use(self, function: Callable[..., Any], state: State) -> int:
        """Which of the functions of this state, of which each forward makes one, to call."""
        if self._buffers.get("weight") is not state.weight:
            for name, tensor in (*state.leaves(), *state.buffers()):
                self._buffers[name.replace(".", " ")] = tensor
        self.functions.append(function)
        return len(self.functions) - 1

    def forward(self, *args: Any, number: int, **kwargs: Any) -> Any:
        return self.functions[number](*args, **kwargs)


@contextlib.contextmanager
def _default_generator(seed: int) -> Iterator[None]:
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


class _Execution:
    """One run of one program."""

    def __init__(self, runner: Runner, program: Program, managed: bool) -> None:
        self.runner = runner
        self.program = program
        self.managed = managed
        self.state = State(program.seed, program.dtype)
        self.found: dict[str, torch.Tensor | None] = {}
        self.returned: list[tuple[str, torch.Tensor]] = []  # what forwards returned, to be looked at again afterwards

    def outcome(self, inside: contextlib.AbstractContextManager[Any]) -> dict[str, torch.Tensor | None]:
        with inside:
            getattr(self, "_" + self.program.backward.kind.replace(", ", "_").replace(" ", "_"))()
        for name, tensor in self.returned:
            self._keep(f"{name}, after backward", tensor)
        for name, tensor in self.state.leaves():
            self._keep(f"gradient of {name}", tensor.grad)
        for name, tensor in self.state.buffers():
            self._keep(f"buffer {name}", tensor)
        self._keep("default generator", torch.get_rng_state())
        self._keep("explicit generator", self.state.generator.get_state())
        return self.found

    def _keep(self, name: str, tensor: torch.Tensor | None) -> None:
        self.found[name] = None if tensor is None else tensor.detach().clone()

    # -- forward

    def _forward(self, number: int = 0) -> list[torch.Tensor]:
        tensors = self.state.inputs(number)
        with torch.autocast("cpu", torch.bfloat16) if self.program.autocast else contextlib.nullcontext():
            self._run_steps(self.program.steps, tensors)
        torch.rand(1)  # what comes after the forward draws on, too
        for index, tensor in enumerate(tensors):
            self._keep(f"result {index} of forward {number}", tensor)
            self.returned.append((f"result {index} of forward {number}", tensor.detach()))
        return tensors

    def _losses(self, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Two losses that share a part of the graph, and always reach a leaf."""
        self.runner.phase = "forward"
        tensors = self._forward(number)
        self.runner.phase = "backward"
        half = max(len(tensors) // 2, 1)
        return self.state.loss(tensors[:half] + tensors[-1:]), self.state.loss(tensors[half - 1 :])

    def _run_steps(self, steps: Iterable[Any], tensors: list[torch.Tensor]) -> None:
        for step in steps:
            if isinstance(step, Step):
                a, b = (tensors[-1 - number % min(len(tensors), 4)] for number in step.operands)
                result = OPS[step.op](self.state, random.Random(step.detail), a, b)
                tensors.append(result if result.dtype is self.state.dtype else result.to(self.state.dtype))
            else:
                tensors.extend(self._run_region(step, tensors))

    def _run_region(self, region: Region, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        inputs = [tensors[-1 - number % min(len(tensors), 4)] for number in region.operands]
        around = list(tensors[-2:]) if region.closes_over else []
        target: Any = None
        if region.changes == "an input":
            target = inputs[0].clone()
        elif region.changes == "an input without a gradient":
            target = self.state.statics[region.manner.seed % len(self.state.statics)]
        elif region.changes == "a cache":
            target = Cache([inputs[0].detach()[:1]])

        def function(*args: Any, power: float = 1.0, **kwargs: Any) -> Any:
            *given, changed, scale, is_on = args
            inner = around + _taken(region.takes, given, kwargs)
            if changed is not None:
                inner.append(_change(changed, inner[-1]))
            if is_on:
                inner.append(inner[-1] * (scale * power))
            num_before = len(inner)
            self._run_steps(region.body, inner)
            return _given(region.gives, inner[num_before:] or inner[-1:])

        args, kwargs = _arguments(region.takes, inputs)
        args = (*args, target, 0.5 + len(inputs), region.manner.seed % 2 == 0)
        kwargs["power"] = 0.5
        call = functools.partial(self.runner.call, region, self.state) if self.managed else _call
        results = _results(region.gives, call(function, args, kwargs))
        if isinstance(target, torch.Tensor):
            # A static buffer is written again by others, after somebody may have saved it: only its content goes on.
            results.insert(0, target if region.changes == "an input" else target.clone())
        elif target is not None:
            results.insert(0, target.joined()[-1:].expand(SIZE, SIZE))
        return results

    # -- backward

    def _backward(self) -> None:
        first, second = self._losses()
        (first + second).backward()

    def _backward_twice(self) -> None:
        first, second = self._losses()
        loss = first + second
        loss.backward(retain_graph=True)
        loss.backward()

    def _two_losses(self) -> None:
        first, second = self._losses()
        first.backward(retain_graph=True)
        second.backward()

    def _two_losses_last_first(self) -> None:
        first, second = self._losses()
        second.backward(retain_graph=True)
        torch.rand(1)
        first.backward()

    def _double_backward(self) -> None:
        first, second = self._losses()
        leaves = [leaf for _, leaf in self.state.leaves()]
        grads = torch.autograd.grad(first + second, leaves, create_graph=True, allow_unused=True)
        for index, grad in enumerate(grads):
            self._keep(f"first gradient {index}", grad)
        self.state.loss([grad for grad in grads if grad is not None], bounded=True).backward()

    def _backward_in_another_thread(self) -> None:
        first, second = self._losses()
        failures: list[BaseException] = []
        num_threads = torch.get_num_threads()

        def work() -> None:
            torch.set_num_threads(num_threads)  # a thread begins with the default, and other sums with other numbers
            try:
                (first + second).backward()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        if failures:
            raise failures.pop()

    def _two_forwards(self) -> None:
        losses = [sum(self._losses(number)) for number in range(2)]
        for loss in losses:
            loss.backward()

    def _two_forwards_last_first(self) -> None:
        losses = [sum(self._losses(number)) for number in range(2)]
        for loss in reversed(losses):
            loss.backward()

    def _gradients_of_a_subset(self) -> None:
        first, second = self._losses()
        leaves = [leaf for _, leaf in self.state.leaves()]
        choose = random.Random(self.program.backward.detail)
        subset = choose.sample(leaves, choose.randint(1, len(leaves) - 1))
        grads = torch.autograd.grad(first + second, subset, allow_unused=True)
        for index, grad in enumerate(grads):
            self._keep(f"gradient {index} of the subset", grad)


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _change(target: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Change the argument in place, and read it."""
    if isinstance(target, Cache):
        target.append(tensor.detach()[1:2])
        return tensor * target.joined().sum().tanh()
    if target.requires_grad or target.grad_fn is not None:
        target.mul_(0.5).add_(tensor)
        return target.sin()
    if target.dtype is not tensor.dtype:
        tensor = tensor.to(target.dtype)
    target.index_copy_(0, torch.tensor([1, 3]), tensor.detach()[:2])
    return tensor * target.clone()


def _arguments(takes: str, inputs: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if takes == "positional":
        return tuple(inputs), {}
    if takes == "keyword":
        return (), {f"input_{index}": tensor for index, tensor in enumerate(inputs)}
    if takes == "tuple":
        return (tuple(inputs),), {}
    if takes == "list":
        return (list(inputs),), {}
    if takes == "dict":
        return (dict(enumerate(inputs)),), {}
    return ({"first": inputs[0], "rest": [tuple(inputs[1:]), None, "text"]},), {}


def _taken(takes: str, args: list[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    if takes == "positional":
        return list(args)
    if takes == "keyword":
        return list(kwargs.values())
    if takes in ("tuple", "list"):
        return list(args[0])
    if takes == "dict":
        return list(args[0].values())
    return [args[0]["first"], *args[0]["rest"][0]]


def _given(gives: str, tensors: list[torch.Tensor]) -> Any:
    if gives == "one tensor":
        return tensors[-1]
    if gives == "a tuple":
        return tuple(tensors)
    if gives == "a list":
        return list(tensors)
    if gives == "a dict":
        return dict(enumerate(tensors))
    return (tensors[-1], None, 3, {"rest": tensors[:-1]}, "text")


def _results(gives: str, result: Any) -> list[torch.Tensor]:
    if gives == "one tensor":
        return [result]
    if gives in ("a tuple", "a list"):
        return list(result)
    if gives == "a dict":
        return list(result.values())
    last, nothing, number, rest, text = result
    assert (nothing, number, text) == (None, 3, "text"), "what is no tensor came out changed"
    return [*rest["rest"], last]


# -- comparing and shrinking ------------------------------------------------------------------------------------------------


def differences(plain: dict[str, torch.Tensor | None], managed: dict[str, torch.Tensor | None]) -> list[str]:
    """Names of what is not bitwise the same."""
    names = list(dict.fromkeys([*plain, *managed]))
    return [name for name in names if name not in plain or name not in managed or not _same(plain[name], managed[name])]


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype is right.dtype and left.shape == right.shape and torch.equal(left, right)


def failure(runner: Runner, program: Program) -> str | None:
    """What is wrong with the managed run; None if it equals the plain one."""
    plain = runner.run(program, managed=False)
    try:
        managed = runner.run(program, managed=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    different = differences(plain, managed)
    return f"different: {', '.join(different)}" if different else None


def report(runner: Runner, program: Program) -> str | None:
    """Seed, what is wrong and a shrunk program; None if nothing is."""
    found = failure(runner, program)
    if found is None:
        return None
    small, why = shrink(program, lambda smaller: _kind_of_failure(runner, smaller), _kind(found))
    return f"seed {program.seed}: {found}\nshrunk ({why}):\n{small.describe()}"


def _kind_of_failure(runner: Runner, program: Program) -> str | None:
    try:
        found = failure(runner, program)
    except Exception:
        return None  # the smaller program is not legal in plain PyTorch either
    return None if found is None else _kind(found)


def _kind(found: str) -> str:
    return found.split(":")[0]


def shrink(
    program: Program, kind_of_failure: Callable[[Program], str | None], kind: str, limit: int = 400
) -> tuple[Program, str]:
    """A smaller program that fails in the same way."""
    num_runs, is_smaller = 0, True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(program):
            num_runs += 1
            if num_runs > limit:
                return program, f"{kind}, not fully"
            if kind_of_failure(candidate) == kind:
                program, is_smaller = candidate, True
                break
    return program, kind


def _smaller(program: Program) -> Iterator[Program]:
    for steps in _smaller_steps(program.steps):
        yield program._replace(steps=steps)
    if program.backward.kind != "backward":
        yield program._replace(backward=Backward("backward"))
    if program.autocast:
        yield program._replace(autocast=False)
    if program.dtype is not torch.float32:
        yield program._replace(dtype=torch.float32)


def _smaller_steps(steps: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    for index, step in enumerate(steps):
        before, after = steps[:index], steps[index + 1 :]
        yield before + after
        if not isinstance(step, Region):
            continue
        yield before + step.body + after
        for body in _smaller_steps(step.body):
            yield (*before, step._replace(body=body), *after)
        simple = step._replace(takes="positional", gives="one tensor", closes_over=False, changes="nothing")
        manner = step.manner
        simpler = [
            simple,
            step._replace(takes="positional"),
            step._replace(gives="one tensor"),
            step._replace(closes_over=False),
            step._replace(changes="nothing"),
            step._replace(operands=step.operands[:1]),
            step._replace(manner=Manner()),
            step._replace(manner=manner._replace(around="nothing")),
            step._replace(manner=manner._replace(swap_inputs=False)),
            step._replace(manner=manner._replace(early_stop=True)),
            *(
                step._replace(manner=manner._replace(policy=policy))
                for policy in ("no policy", "recompute all", "save all", "swap all")[
                    : 4 if manner.policy in ("a mix", "a list of ops") else 0
                ]
            ),
        ]
        for smaller in simpler:
            if smaller != step:
                yield (*before, smaller, *after)


def check_no_mode_left() -> None:
    """A region that raised took away what it had put around the user's ops."""
    assert torch._C._len_torch_dispatch_stack() == 0, "a dispatch mode is left"
    assert torch._C._len_torch_function_stack() == 0, "a function mode is left"
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, "saved-tensor hooks are left"
    assert torch.is_grad_enabled(), "gradients are left off"
    assert not torch.is_autocast_enabled("cpu"), "autocast is left on"


def flush_aborted_backward() -> None:
    """PyTorch keeps the queued part of a backward that raised, with all it saved, until the next backward of its threads: one for each device."""
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        torch.ones((), requires_grad=True, device=device).mul(2).backward()
