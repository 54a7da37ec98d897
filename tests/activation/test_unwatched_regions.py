"""Regions whose forward no dispatch mode watches: the same results, and watched again where a call is not as the one before."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import configure_swap
from hyper_parallel._base.errors import StateError
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.regions.policy import RegionPolicy
from hyper_parallel.platform.torch.regions import unwatched_region, unwatched_second_run
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
from hyper_parallel.platform.torch.regions.unwatched_region import UnwatchedRegion
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import checkpoint_wrapper
from support.campaign import share
from support.region_programs import UnwatchedRunner, differences, draw
from support.swapping import Swapping

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default)
Grads = list[torch.Tensor]


class Saving(RegionPolicy):
    """A policy that saves some ops and recomputes the others, for a region that need not be watched."""

    is_pure = True

    def __init__(self, *saved: Any, is_dynamic: bool = False) -> None:
        self.saved = saved
        self.observer = UnwatchedRegion(is_dynamic=is_dynamic)

    def answer(self, context: Any, op: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in self.saved else CheckpointPolicy.MUST_RECOMPUTE

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.observer.call(module, self, args, kwargs)


class Block(nn.Module):
    """A linear layer whose result is saved through a view, a residual connection, and something in the middle that can be exchanged."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor] = F.gelu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.middle(self.up(self.norm(x))).sin())


def sample(seed: int = 1, num_rows: int = 4) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, num_rows, 8, requires_grad=True)


def gradients(module: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Grads:
    """Of the input and of all parameters that have one."""
    trained = [x, *(each for each in module.parameters() if each.requires_grad)]
    return list(torch.autograd.grad(call(x).square().sum(), trained))


def same(left: Grads, right: Grads) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@contextlib.contextmanager
def second_runs() -> Iterator[Counter[str]]:
    """How often the function ran again as the pattern says, and how often in full."""
    counts = Counter[str]()
    as_seen, everything = unwatched_region._Frame._as_seen, unwatched_region._Frame._everything

    def counting_as_seen(frame: Any, wanted: Any) -> Any:
        found = as_seen(frame, wanted)
        if found is not None:
            counts["as seen"] += 1
        return found

    def counting_everything(frame: Any, wanted: Any) -> Any:
        counts["in full"] += 1
        return everything(frame, wanted)

    with (
        mock.patch.object(unwatched_region._Frame, "_as_seen", counting_as_seen),
        mock.patch.object(unwatched_region._Frame, "_everything", counting_everything),
    ):
        yield counts


def watched_once(block: nn.Module, policy: Saving, x: torch.Tensor | None = None) -> None:
    """The region has shown what it does."""
    gradients(block, lambda t: policy.call(block, t), sample() if x is None else x)
    assert policy.observer.is_unwatched


# -- the same results -------------------------------------------------------------------------------------------------------

# What keeps most programs of the campaign from being unwatched; regions inside of regions stay, as do changes in place.
RARE = frozenset(
    {"closure", "changes an input", "changes an input without a gradient", "changes a cache", "random numbers",
     *(f"policy: {name}" for name in ("save all", "swap all"))}
)  # fmt: skip


def test_random_programs_give_what_they_give_without_regions(on_disk: Swapping) -> None:
    """The campaign of regions, each program four times: watched, and then not where that can be."""
    num_unwatched, num_wrong, reports = 0, 0, []
    seeds = share(10_000, 300)
    with second_runs() as counts:
        for seed in seeds:
            program = draw(seed, without=RARE if seed % 2 else frozenset())
            runner = UnwatchedRunner(checkpoint, is_dynamic=seed % 3 == 0)
            plain = runner.run(program, managed=False)
            for number in range(4):
                try:
                    wrong = ", ".join(differences(plain, runner.run(program, managed=True)))
                except Exception as error:
                    wrong = repr(error)
                if wrong:
                    num_wrong += 1
                    reports.append(f"seed {seed}, run {number}: {wrong}\n{program.describe()}")
                    break
            num_unwatched += runner.num_unwatched
    assert num_wrong == 0, f"{num_wrong} of {len(seeds)} programs are wrong; the first:\n" + "\n\n".join(reports[:3])
    assert num_unwatched > len(seeds)
    assert counts["as seen"] > len(seeds) // 4, counts
    assert counts["in full"] > 0, counts


@pytest.mark.parametrize("saved", [(), MATMULS, (aten.native_layer_norm.default,), (*MATMULS, aten.gelu.default)])
def test_gradients_are_those_of_the_plain_run_bit_for_bit(saved: tuple[Any, ...]) -> None:
    block, policy = Block(), Saving(*saved)
    with second_runs() as counts:
        for seed in range(4):
            x = sample(seed)
            assert same(gradients(block, block, x), gradients(block, lambda t: policy.call(block, t), x))
    assert policy.observer.is_unwatched
    assert counts == {"as seen": 3}


@pytest.mark.parametrize(
    ("saved", "runs"),
    [
        (MATMULS, {"native_layer_norm", "gelu", "sin"}),
        ((*MATMULS, aten.gelu.default, aten.sin.default), {"native_layer_norm"}),
        ((*MATMULS, aten.native_layer_norm.default, aten.gelu.default), {"sin"}),
        ((), {"native_layer_norm", "addmm", "gelu", "sin"}),
    ],
)
def test_only_what_backward_needs_and_nobody_kept_runs_again(saved: tuple[Any, ...], runs: set[str]) -> None:
    block, policy = Block(), Saving(*saved)
    watched_once(block, policy)
    ran: list[str] = []
    op = unwatched_second_run.SecondRun.op

    def noting(run: Any, traits: Any, args: Any, kwargs: Any) -> Any:
        if run._steps[run._num_ops].runs:
            ran.append(str(traits.func).split(".")[1])
        return op(run, traits, args, kwargs)

    loss = policy.call(block, sample()).sum()
    with mock.patch.object(unwatched_second_run.SecondRun, "op", noting):
        loss.backward()
    assert sorted(ran) == sorted(runs)


def test_memory_that_is_dropped_is_free_until_backward() -> None:
    alive: list[weakref.ref[Any]] = []

    def noted(t: torch.Tensor) -> torch.Tensor:
        made = torch.sin(t)
        alive.append(weakref.ref(made.untyped_storage()))
        return made

    block, policy = Block(noted), Saving(*MATMULS)
    watched_once(block, policy)
    alive.clear()
    loss = policy.call(block, sample()).sum()
    assert [each() for each in alive] == [None]
    loss.backward()


def test_nothing_is_left_when_the_graph_is_gone() -> None:
    block, policy = Block(), Saving(*MATMULS)
    watched_once(block, policy)
    gc.collect()
    gc.disable()
    try:
        for has_backward in (True, False):
            x = sample()
            frames = [each for each in gc.get_objects() if isinstance(each, unwatched_region._Frame)]
            loss = policy.call(block, x).sum()
            if has_backward:
                loss.backward()
            del loss
            assert [each for each in gc.get_objects() if isinstance(each, unwatched_region._Frame)] == frames == []
    finally:
        gc.enable()


# -- calls that are not as the one that was watched ---------------------------------------------------------------------------


def test_another_branch_runs_in_full_and_the_next_call_is_watched() -> None:
    branches = {"now": torch.erf}
    block, policy = Block(lambda t: branches["now"](t)), Saving(*MATMULS)
    watched_once(block, policy)
    branches["now"] = torch.atan
    x = sample(3)
    with second_runs() as counts:
        found = gradients(block, lambda t: policy.call(block, t), x)
    assert same(found, gradients(block, block, x))
    assert counts == {"in full": 1}
    assert not policy.observer.is_unwatched
    watched_once(block, policy)


def test_a_branch_that_saves_as_many_tensors_of_the_same_looks_is_told_apart() -> None:
    """Two layers in another order: what one of them kept is not taken for what the other one made."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.order = [0, 1]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in self.order:
                x = self.layers[index](x).sin() if index else self.layers[index](x.cos())
            return x

    block, policy = Twice(), Saving(*MATMULS)
    watched_once(block, policy)
    block.order = [1, 0]
    x = sample(3)
    assert same(gradients(block, lambda t: policy.call(block, t), x), gradients(block, block, x))


def test_after_three_calls_that_differ_all_are_watched() -> None:
    branches = {"number": 0}
    functions = (torch.sin, torch.cos, torch.erf, torch.atan, F.gelu, F.silu)
    block = Block(lambda t: functions[branches["number"] % len(functions)](t))
    policy = Saving(*MATMULS)
    for number in range(12):
        branches["number"] = number
        x = sample(number)
        assert same(gradients(block, lambda t: policy.call(block, t), x), gradients(block, block, x))
    assert not policy.observer.is_unwatched


def test_another_shape_is_watched_and_a_region_of_changing_sizes_is_not() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.where(x[..., 0].flatten() > 0)[0]
            out = torch.zeros_like(x).flatten(0, 1)
            return x + out.index_add(0, rows, self.layer(x.flatten(0, 1)[rows]).sin()).view_as(x)

    static, dynamic = Saving(*MATMULS), Saving(*MATMULS, is_dynamic=True)
    block, chosen = Block(), Chosen()
    watched_once(block, static)
    watched_once(chosen, dynamic)
    with second_runs() as counts:
        for seed in range(3):
            x = sample(seed, num_rows=5 + seed)
            assert same(gradients(block, lambda t: static.call(block, t), x), gradients(block, block, x))
    assert counts == {}
    with second_runs() as counts:
        for seed in range(2, 6):
            x = sample(seed)
            assert same(gradients(chosen, lambda t: dynamic.call(chosen, t), x), gradients(chosen, chosen, x))
    assert counts == {"as seen": 4}


def test_a_parameter_that_is_frozen_later_has_the_call_watched() -> None:
    block, policy = Block(), Saving(*MATMULS)
    watched_once(block, policy)
    block.up.weight.requires_grad_(False)
    x = sample(3)
    with second_runs() as counts:
        assert same(gradients(block, lambda t: policy.call(block, t), x), gradients(block, block, x))
    assert counts == {}


def test_a_region_that_is_put_inside_later_is_met_in_the_middle_of_a_call() -> None:
    block, policy = Block(), Saving(*MATMULS)
    watched_once(block, policy)
    inner = checkpoint_wrapper(block.down)
    block.down = inner
    for seed in range(3):
        x = sample(seed)
        assert same(gradients(block, lambda t: policy.call(block, t), x), gradients(block, block, x))


def test_hooks_on_modules_get_real_tensors() -> None:
    block, policy = Block(), Saving(*MATMULS, aten.native_layer_norm.default)
    watched_once(block, policy)
    given: list[float] = []
    block.up.register_forward_hook(lambda module, args, output: given.append(output.sum().item()))
    x = sample(3)
    expected = gradients(block, block, x)
    given.clear()
    assert same(gradients(block, lambda t: policy.call(block, t), x), expected)
    assert len(set(given)) == 1
    assert len(given) == 2


def test_under_another_mode_the_call_is_watched() -> None:
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    block, policy = Block(), Saving(*MATMULS)
    watched_once(block, policy)
    x = sample(3)
    expected = gradients(block, block, x)
    with second_runs() as counts, Passing():
        found = gradients(block, lambda t: policy.call(block, t), x)
    assert same(found, expected)
    assert counts == {}


def test_compared_values_have_the_call_watched() -> None:
    block, policy = Block(), Saving(*MATMULS)
    watched_once(block, policy)
    with second_runs() as counts, configure_swap(check="values"):
        gradients(block, lambda t: policy.call(block, t), sample(3))
    assert counts == {}


# -- what changes between forward and backward ---------------------------------------------------------------------------------


def test_a_parameter_that_is_changed_before_backward_raises() -> None:
    block, policy = Block(), Saving(aten.addmm.default)
    watched_once(block, policy)
    loss = policy.call(block, sample()).sum()
    with torch.no_grad():
        block.norm.weight.mul_(2)
    with pytest.raises(StateError, match="changed in place"):
        loss.backward()


def test_a_parameter_that_is_changed_when_its_gradient_is_there_does_no_harm() -> None:
    """An optimizer that steps in backward."""

    @torch.no_grad()
    def descend(parameter: torch.Tensor) -> None:
        parameter.add_(parameter.grad, alpha=-0.1)

    plain, block, policy = Block(), Block(), Saving(*MATMULS)
    watched_once(block, policy)
    for each in (plain, block):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
    for seed in range(3):
        x = sample(seed)
        plain(x).sum().backward()
        policy.call(block, x).sum().backward()
        assert same(list(plain.parameters()), list(block.parameters()))
        for parameter in (*plain.parameters(), *block.parameters()):
            parameter.grad = None


def test_an_input_that_is_changed_before_backward_raises() -> None:
    block, policy = Block(), Saving(*MATMULS)
    given = sample().detach().requires_grad_()
    watched_once(block, policy, given * 1)
    x = given * 1
    loss = policy.call(block, x).sum()
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(StateError, match="an input"):
        loss.backward()


def test_a_second_run_that_does_something_else_raises() -> None:
    calls = {"number": 0}

    def drifting(t: torch.Tensor) -> torch.Tensor:
        calls["number"] += 1
        return t[..., :8].sin().repeat(1, 1, 2) if calls["number"] >= 4 else t.sin()

    block, policy = Block(drifting), Saving(aten.addmm.default)
    watched_once(block, policy)
    calls["number"] = 2  # whatever the watched call made of it
    loss = policy.call(block, sample()).sum()
    with pytest.raises(StateError, match="Expected sin.*got __getitem__"):
        loss.backward()


class Acting(nn.Module):
    """Does what it is told, between two layers."""

    def __init__(self, act: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.randn(2, 4, 8))
        self.register_buffer("mean", torch.zeros(8))
        self.act, self.switch, self.count = act, False, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self, self.up(x).sin()).sin())


def mean_now_and_then(module: Any, t: torch.Tensor) -> torch.Tensor:
    if module.switch:
        with torch.no_grad():
            module.mean.lerp_(t.mean((0, 1)), 0.5)
    return t * (1 + module.mean)


def another_mean(module: Any, t: torch.Tensor) -> torch.Tensor:
    scaled = t * (1 + module.mean)
    module.mean = module.mean * 0.5 + t.detach().mean((0, 1))
    return scaled * (2 + module.mean)


ACTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a number of a tensor": lambda module, t: t * t.detach().abs().max().item(),
    "a branch by a tensor": lambda module, t: t.cos() if t.detach().sum() > 0 else t * 2,
    "a size by values": lambda module, t: t / t.detach()[t.detach() > 0].numel(),
    "a slice by values": lambda module, t: (
        t.flatten(0, 1)[: 1 + int(t.detach().sum() > 0) * 7].sin().sum() + t.sin().sum((0, 1))
    ),
    "an attribute that counts": lambda module, t: t * module.count,
    "a buffer that is written now and then": mean_now_and_then,
    "a buffer that is replaced": another_mean,
    "parameters in a list": lambda module, t: t * torch.cat([module.gate, module.gate], -1)[..., :8],
}


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("saved", [(), MATMULS, (*MATMULS, aten.sin.default)])
@pytest.mark.parametrize("act", ACTS)
def test_what_a_call_decides_by_values_or_by_its_module_is_what_its_own_forward_did(
    act: str, saved: tuple[Any, ...], is_dynamic: bool
) -> None:
    plain, block = Acting(ACTS[act]), Acting(ACTS[act])
    policy = Saving(*saved, is_dynamic=is_dynamic)
    for seed in range(6):
        x = sample(seed)
        found = []
        for each, call in ((plain, plain), (block, lambda t: policy.call(block, t))):
            each.switch, each.count = seed % 3 == 2, seed + 0.5
            loss = call(x).square().sum()
            if seed:  # what is changed before backward is not what the forward saw; the watched call says so
                each.count = -1.0
            trained = [x, *each.up.parameters(), *each.down.parameters()]
            found.append(list(torch.autograd.grad(loss, trained)))
            assert each.count == (-1.0 if seed else 0.5)
        assert same(*found), seed
        assert torch.equal(plain.mean, block.mean)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_parameter_that_is_frozen_between_forward_and_backward_or_no_longer_does_no_harm(is_frozen: bool) -> None:
    """As when a generator is trained against a discriminator."""
    block = Acting(lambda module, t: t * module.gate)
    policy = Saving(*MATMULS)
    for seed in range(3):
        x, found = sample(seed), []
        for call in (block, lambda t: policy.call(block, t)):
            block.gate.requires_grad_(not is_frozen)
            loss = call(x).square().sum()
            block.gate.requires_grad_(is_frozen)
            found.append(list(torch.autograd.grad(loss, [x, *block.up.parameters()])))
        assert same(*found)


def test_a_list_of_parameters_that_is_changed_before_backward_raises() -> None:
    block, policy = Acting(ACTS["parameters in a list"]), Saving(*MATMULS)
    watched_once(block, policy)
    loss = policy.call(block, sample()).sum()
    with torch.no_grad():
        block.gate.mul_(2)
    with pytest.raises(StateError, match="changed in place"):
        loss.backward()


def test_what_a_module_puts_aside_is_left_to_it() -> None:
    def put_aside(module: Any, t: torch.Tensor) -> torch.Tensor:
        module.aside = t.square().mean()
        return t

    plain, block, policy = Acting(put_aside), Acting(put_aside), Saving(*MATMULS)
    for seed in range(3):
        x, found = sample(seed), []
        for each, call in ((plain, plain), (block, lambda t: policy.call(block, t))):
            each.zero_grad()
            call(x).sum().backward(retain_graph=True)
            each.aside.backward()
            found.append([parameter.grad for parameter in each.parameters() if parameter.grad is not None])
        assert same(*found)
    assert not policy.observer.is_unwatched


def test_a_second_run_that_is_not_as_seen_leaves_no_garbage_and_a_backward_that_raises_no_pass() -> None:
    branches = {"now": torch.erf}
    block, policy = Block(lambda t: branches["now"](t)), Saving(*MATMULS)
    watched_once(block, policy)
    branches["now"] = torch.atan
    gc.collect()
    gc.disable()
    try:
        policy.call(block, sample()).sum().backward()
        assert [each for each in gc.get_objects() if isinstance(each, unwatched_region._Frame)] == []
        watched_once(block, policy)
        raises = {"now": True}

        def fail(gradient: torch.Tensor) -> None:
            if raises["now"]:
                raise ZeroDivisionError

        x = sample()
        x.register_hook(fail)
        loss = policy.call(block, x * 1).sum()
        (frame,) = (each for each in gc.get_objects() if isinstance(each, unwatched_region._Frame))
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                loss.backward(retain_graph=True)
            assert len(frame._passes) <= 1
        raises["now"] = False
        loss.backward()
        assert frame._passes == {}
    finally:
        gc.enable()


# -- random numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [(), MATMULS, (aten.rand_like.default, *MATMULS)])
def test_random_numbers_are_those_of_the_forward_and_generators_go_on_as_they_would(saved: tuple[Any, ...]) -> None:
    block, policy = Block(lambda t: t.sin() * torch.rand_like(t)), Saving(*saved)

    def step(call: Callable[[torch.Tensor], torch.Tensor], seed: int) -> Grads:
        x = sample(seed)
        torch.manual_seed(seed)
        return [*gradients(block, call, x), torch.rand(1)]

    with second_runs() as counts:
        for seed in range(4):
            assert same(step(block, seed), step(lambda t: policy.call(block, t), seed))
    assert counts == {"as seen": 3}


def test_a_random_op_after_one_that_is_saved_has_a_cpu_region_watched() -> None:
    """A generator of the CPU cannot be told to go on from there."""
    block = Block(lambda t: t * torch.rand_like(t) * torch.bernoulli(torch.full_like(t, 0.5)))
    policy = Saving(aten.rand_like.default)
    for seed in range(3):
        x = sample(seed)
        torch.manual_seed(seed)
        expected = gradients(block, block, x)
        torch.manual_seed(seed)
        assert same(gradients(block, lambda t: policy.call(block, t), x), expected)
    assert not policy.observer.is_unwatched


# -- backward, in all ways -------------------------------------------------------------------------------------------------------


def test_two_forwards_before_a_backward_that_keeps_the_graph_and_one_in_another_thread() -> None:
    block, policy = Block(), Saving(*MATMULS)
    watched_once(block, policy)
    inputs = [sample(seed) for seed in (5, 6)]
    expected = [gradients(block, block, x) for x in inputs]
    losses = [policy.call(block, x).square().sum() for x in inputs]
    trained = list(block.parameters())
    for loss, x, gradient in zip(losses, inputs, expected, strict=True):
        for _ in range(2):
            assert same(list(torch.autograd.grad(loss, [x, *trained], retain_graph=True)), gradient)
    found: list[Grads] = []
    thread = threading.Thread(target=lambda: found.append(list(torch.autograd.grad(losses[0], [inputs[0], *trained]))))
    thread.start()
    thread.join(60)
    assert same(found[0], expected[0])


def test_a_saved_tensor_that_is_looked_at_outside_of_a_backward_is_made_again() -> None:
    block, policy = Block(), Saving()
    watched_once(block, policy)
    x = sample(3)

    def saved_by_activation(result: torch.Tensor) -> torch.Tensor:
        nodes: list[Any] = [result.grad_fn]
        for node in nodes:  # grows
            if node.name() == "GeluBackward0":
                saved: torch.Tensor = node._saved_self
                return saved
            nodes += [each for each, _ in node.next_functions if each is not None]
        raise AssertionError("no activation in the graph")

    assert torch.equal(saved_by_activation(policy.call(block, x)), saved_by_activation(block(x)))


def test_under_autocast_the_casts_are_those_of_the_forward() -> None:
    block, policy = Block(), Saving(*MATMULS)

    def call(t: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return policy.call(block, t).float()

    def plain(t: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(t).float()

    with second_runs() as counts:
        for seed in range(3):
            x = sample(seed)
            assert same(gradients(block, call, x), gradients(block, plain, x))
    assert sum(counts.values()) == 2


# -- on a GPU ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "saved",
    [
        (),
        MATMULS,
        (*MATMULS, aten._scaled_dot_product_flash_attention.default),
        (*MATMULS, aten.native_dropout.default),
        (aten.native_dropout.default,),
    ],
)
def test_dropout_on_a_gpu_is_that_of_the_forward_whatever_else_is_saved_cuda(saved: tuple[Any, ...]) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(F.dropout(self.norm(x), 0.1)).view(2, 32, 3, 2, 32).permute(2, 0, 3, 1, 4)
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                a = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            a = F.dropout(self.out(a.transpose(1, 2).reshape(2, 32, 64)), 0.1)
            return x + F.dropout(a.sin(), 0.2)

    torch.manual_seed(0)
    block, policy = Attending().cuda().bfloat16(), Saving(*saved)

    def step(call: Callable[[torch.Tensor], torch.Tensor], seed: int) -> Grads:
        torch.manual_seed(seed)
        x = torch.randn(2, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return [*gradients(block, call, x), torch.rand(1, device="cuda")]

    with second_runs() as counts:
        for seed in range(4):
            assert same(step(block, seed), step(lambda t: policy.call(block, t), seed))
    assert counts == {"as seen": 3}
