"""Programs that break those who recompute today: each gives the plain gradients, bit for bit, or a clear error."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import operator
import random
import re
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.platform.torch.activation_checkpoint import AsyncSaveOnCpu, swap_wrapper
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
from support.interpreter import run_fresh
from support.region_programs import check_no_mode_left, flush_aborted_backward
from support.swapping import Swapping, check_nothing_left, gradients
from support.training import Block, make_model, same, train

Function = Callable[..., Any]


def mix_of(*answers: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    """A policy that answers by op and occurrence, the same way in every run."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return answers[zlib.crc32(f"{op} {ctx.occurrence}".encode()) % len(answers)]

    return policy


SAVE_MIX = mix_of(CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
SWAP_MIX = mix_of(CheckpointPolicy.MUST_SWAP, CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE)
SWAP_ALL = mix_of(CheckpointPolicy.MUST_SWAP)


def nested(function: Function, *args: Any, **kwargs: Any) -> Any:
    def inner(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, policy_fn=SWAP_MIX, **kwargs)

    return checkpoint(inner, *args, **kwargs)


REGIONS: dict[str, Function] = {
    "no policy": checkpoint,
    "save mix": functools.partial(checkpoint, policy_fn=SAVE_MIX),
    "swap mix": functools.partial(checkpoint, policy_fn=SWAP_MIX),
    "nested": nested,
    "swap_inputs": functools.partial(checkpoint, swap_inputs=True),
}
REALLY_SWAPS = ("swap mix", "nested", "swap_inputs")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For a few numbers the threads of one op only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=REGIONS)
def region(request: pytest.FixtureRequest) -> Iterator[Function]:
    """`checkpoint` in each manner; what it may have put around ops must be gone afterwards."""
    yield REGIONS[request.param]
    flush_aborted_backward()
    check_no_mode_left()


class InRegion(nn.Module):
    def __init__(self, inner: nn.Module, region: Function) -> None:
        super().__init__()
        self.inner = inner
        self.region = region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.region(self.inner, *args, **kwargs)


def managed(model: nn.Sequential, region: Function) -> nn.Sequential:
    return nn.Sequential(*(InRegion(block, region) for block in model))


def check_right_or_raises(step: Callable[..., Any], region: Function, *, may_raise: bool = False) -> None:
    """`step(call, in_place)` as in plain PyTorch: the same result, or an error where that raises (or `may_raise`).

    Where plain PyTorch raises, the result of the program without the in-place change is right as well.
    """
    try:
        expected = step(plainly, True)
    except RuntimeError:
        flush_aborted_backward()
        expected, may_raise = step(plainly, False), True
    try:
        found = step(region, True)
    except RuntimeError as error:
        assert may_raise, error  # noqa: PT017 - an error is one of two right ends
        assert re.search("(?i)changed in place|inplace operation", str(error))  # noqa: PT017
    else:
        assert same(found, expected)


def plainly(function: Function, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# -- the list that swapping is tested with ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", REGIONS)
def test_blocks_in_regions_give_the_plain_gradients(swapping: Swapping, how: str) -> None:
    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    plain = train(model, x)
    ours = managed(model, REGIONS[how])
    for _ in range(4):
        assert same(train(ours, x), plain)
    assert (swapping.offloaded_bytes > 0) == (how in REALLY_SWAPS)
    assert (swapping.loaded_bytes > 0) == (how in REALLY_SWAPS)


def test_one_region_around_all_blocks_gives_the_plain_gradients(swapping: Swapping, region: Function) -> None:
    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    plain = train(model, x)
    assert same(train(InRegion(model, region), x), plain)


@pytest.mark.parametrize("options", [{"policy_fn": SWAP_ALL}, {"swap_inputs": True}], ids=["swap all", "swap_inputs"])
def test_parameters_buffers_and_views_of_them_are_never_swapped(swapping: Swapping, options: Any) -> None:
    """Rule 3: `nn.Linear` saves `weight.t()`, which is no Parameter."""
    layer = nn.Linear(64, 64, bias=False).to(swapping.kind)
    checkpoint(layer, swapping.randn(2, 64, requires_grad=True), **options).sum().backward()
    assert swapping.offloaded_bytes <= 2 * 64 * 4, "the input or the result at most"


def test_a_weight_cast_by_autocast_is_not_swapped_and_cast_again(swapping: Swapping, region: Function) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False).to(swapping.kind)
    x = swapping.randn(2, 64)
    low = torch.float16 if swapping.kind == "cuda" else torch.bfloat16

    def step(call: Function) -> list[torch.Tensor]:
        layer.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        with torch.autocast(swapping.kind, low):
            out = call(layer, call(layer, leaf))  # the second use finds the cast of the first in autocast's cache
        out.float().sum().backward()
        return [leaf.grad, layer.weight.grad.clone()]

    assert same(step(region), step(plainly))
    assert swapping.offloaded_bytes <= 6 * 2 * 64 * 4, "activations, no weight"


def test_an_input_that_is_no_leaf_is_cast_as_often_again(swapping: Swapping, region: Function) -> None:
    """Autocast keeps the cast of a leaf, and casts other tensors each time: in recomputation, too."""
    low = torch.float16 if swapping.kind == "cuda" else torch.bfloat16
    x, weight = swapping.randn(16, 16, seed=1), swapping.randn(16, 16, seed=2)

    def function(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast(swapping.kind, low):
            return (nn.functional.linear(h, weight).relu() @ h).float().tanh()

    def step(call: Function) -> list[torch.Tensor]:
        return gradients(lambda x, weight: call(function, x * 2, weight).sum(), x, weight)

    assert same(step(region), step(plainly))


def test_a_weight_used_as_it_is_and_transposed_is_cast_alike_again(swapping: Swapping, region: Function) -> None:
    low = torch.float16 if swapping.kind == "cuda" else torch.bfloat16
    x, weight = swapping.randn(16, 16, seed=1), swapping.randn(16, 16, seed=2)

    def function(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(nn.functional.linear(h, weight).sin(), weight.t()).tanh()

    def step(call: Function) -> list[torch.Tensor]:
        def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            with torch.autocast(swapping.kind, low):
                return call(function, nn.functional.linear(x, weight), weight).float().sum()

        return gradients(loss, x, weight)

    assert same(step(region), step(plainly))


def test_a_residual_changed_in_place_inside_is_an_error_or_right(swapping: Swapping, region: Function) -> None:
    def step(call: Function, in_place: bool) -> list[torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            return (y.mul_(2) if in_place else y * 2).sum()

        return gradients(lambda t: call(function, t), swapping.randn(64, 64))

    check_right_or_raises(step, region)


def test_an_error_about_a_changed_residual_names_the_op(swapping: Swapping, region: Function) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y.mul_(2)
        return y

    x = swapping.randn(64, 64, requires_grad=True)
    out = region(function, x)
    try:
        out.sum().backward()
    except RuntimeError as error:
        assert re.search("(?is)changed in place.*exp|exp.*changed in place", str(error))  # noqa: PT017
    else:
        assert torch.equal(x.grad, x.detach().exp() * 2), "no error: then exp was recomputed"


@pytest.mark.parametrize("kept", ["view", "sigmoid_", "add_", "mul"])
@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP], ids=["save", "swap"])
def test_a_value_made_by_changes_in_place_can_be_kept_at_any_of_them(
    swapping: Swapping, kept: str, answer: CheckpointPolicy
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 0.5
        y.add_(x)
        y.sigmoid_()
        return y.view(4, 64).sin().sum()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return answer if str(op).split(".")[1] == kept else CheckpointPolicy.MUST_RECOMPUTE

    x = swapping.randn(16, 16)
    ours = gradients(lambda t: checkpoint(function, t, policy_fn=policy), x)
    assert same(ours, gradients(function, x))


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_function_that_marks_its_input_dirty(swapping: Swapping, region: Function, early_stop: bool) -> None:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(a)
            a.exp_()
            ctx.save_for_backward(a)
            return a

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * ctx.saved_tensors[0]

    def function(x: torch.Tensor) -> torch.Tensor:
        return (Exp.apply(x * 0.5).sin() + torch.ones_like(x).cos()).sum()

    options = {} if early_stop or region is nested else {"early_stop": False}
    x = swapping.randn(16, 16)
    assert same(gradients(lambda t: region(function, t, **options), x), gradients(function, x))


SAVES: dict[str, Function] = {"its output": torch.exp, "its input": torch.sin, "nothing": lambda t: t + 1}


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("what", ["output", "input"])
def test_a_change_in_place_after_the_region_is_as_in_plain_pytorch(
    swapping: Swapping, region: Function, saves: str, what: str
) -> None:
    def step(call: Function, in_place: bool) -> list[torch.Tensor]:
        leaf = swapping.randn(16, 16, requires_grad=True)
        h = leaf * 1.5
        out = call(SAVES[saves], h)
        if what == "output":
            out = out.mul_(2) if in_place else out * 2
        elif in_place:
            with torch.no_grad():
                h.mul_(2)
        out.sum().backward()
        return [out.detach(), leaf.grad]

    # Plain PyTorch has kept the output and needs no input; a region may have to recompute it from the input.
    check_right_or_raises(step, region, may_raise=(what, saves) == ("input", "its output"))


def test_a_slice_of_a_held_base_leaves_the_base_unchanged(swapping: Swapping, region: Function) -> None:
    """Rule 2: a user's tensor is never freed or written."""
    base = swapping.randn(64, 64)
    before = base.clone()
    leaf = base[8:24].detach().requires_grad_()
    loss = region(lambda t: (t * t).sum(), leaf)
    assert torch.equal(base, before)
    loss.backward()
    assert torch.equal(base, before)
    assert torch.equal(leaf.grad, 2 * before[8:24])


def test_the_users_input_can_be_read_between_forward_and_backward(swapping: Swapping, region: Function) -> None:
    x = swapping.randn(64, 64, requires_grad=True)
    loss = region(lambda t: (t * t).exp().sum(), x)
    total = x.detach().double().sum()
    loss.backward()
    assert torch.equal(x.detach().double().sum(), total)
    assert torch.equal(x.grad, gradients(lambda y: (y * y).exp().sum(), x)[0])


def test_an_abandoned_forward_and_a_retry(swapping: Swapping, region: Function) -> None:
    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    plain = train(model, x)
    ours = managed(model, region)
    out = ours(x)
    del out
    check_nothing_left()
    assert same(train(ours, x), plain)


@pytest.mark.parametrize("where", ["forward", "backward", "recomputation"])
def test_an_exception_in_the_middle_leaves_nothing_and_the_next_step_is_right(
    swapping: Swapping, region: Function, where: str
) -> None:
    num_calls = 0

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            nonlocal num_calls
            num_calls += 1
            if where == "forward" or (where == "recomputation" and num_calls > 1):
                raise KeyError("mine")
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if where == "recomputation":
                return grad
            raise KeyError("mine")

    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    plain = train(model, x)
    ours = managed(model, region)

    def fail() -> None:
        h = ours[0](x.detach().requires_grad_())
        h = region(lambda t: Failing.apply(t.tanh()).exp(), ours[1](h))
        ours[2](h).sum().backward()

    if where == "recomputation" and region in (REGIONS["save mix"], REGIONS["swap mix"], REGIONS["nested"]):
        with contextlib.suppress(KeyError):  # whether the function runs again depends on what the policy saves
            fail()
    else:
        with pytest.raises(KeyError, match="mine"):
            fail()
    flush_aborted_backward()
    gc.collect()
    check_nothing_left()
    check_no_mode_left()
    assert same(train(ours, x), plain)


def test_retain_graph_twice_and_a_third_time(swapping: Swapping, region: Function) -> None:
    model, x = make_model(swapping, 2), swapping.randn(4, 16, 32)

    def backward_three_times(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    assert same(backward_three_times(managed(model, region)), backward_three_times(model))


def test_a_second_backward_without_retain_graph_raises_as_plain_pytorch_does(
    swapping: Swapping, region: Function
) -> None:
    loss = region(lambda t: (t.sin() * t).sum(), swapping.randn(16, 16, requires_grad=True))
    loss.backward()
    with pytest.raises(RuntimeError, match="(?i)second time|already been freed|retain_graph"):
        loss.backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_before_and_between_steps(swapping: Swapping, region: Function, context: Any) -> None:
    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    plain = train(model, x)
    ours = managed(model, region)
    for _ in range(2):
        with context():
            ours(x)
        assert same(train(ours, x), plain)


def test_a_call_without_gradients_gives_plain_results(swapping: Swapping, region: Function) -> None:
    model, x = make_model(swapping, 1), swapping.randn(4, 16, 32)
    moved = swapping.offloaded_bytes
    with torch.no_grad():
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        found = managed(model, region)(x)
    assert torch.equal(found, expected)
    assert not found.requires_grad
    assert type(found) is torch.Tensor
    assert swapping.offloaded_bytes == moved


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_then_two_backwards_in_either_order(
    swapping: Swapping, region: Function, order: tuple[int, int]
) -> None:
    """Rule 11: every state belongs to one forward."""
    model = make_model(swapping)

    def run(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        inputs = [swapping.randn(4, 16, 32, seed=s, requires_grad=True) for s in (3, 4)]
        losses = [model(x).square().mean() for x in inputs]
        for index in order:
            losses[index].backward()
        return [*(x.grad for x in inputs), *(p.grad.clone() for p in model.parameters())]

    assert same(run(managed(model, region)), run(model))


def test_the_same_module_called_twice_in_a_forward(swapping: Swapping, region: Function) -> None:
    torch.manual_seed(0)
    block, x = Block().to(swapping.kind), swapping.randn(4, 16, 32)
    ours = InRegion(block, region)

    class Twice(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x))

    plain = train(Twice(block), x)
    assert same(train(Twice(ours), x), plain)
    assert same(train(InRegion(Twice(block), region), x), plain)


def test_tied_weights(swapping: Swapping, region: Function) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 32)
            self.block = Block()
            self.head = nn.Linear(32, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.block(self.embedding(ids)))

    torch.manual_seed(0)
    model = Tied().to(swapping.kind)
    ids = torch.arange(40, device=swapping.kind).reshape(2, 20) % 50

    def run(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        model(ids).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    assert same(run(InRegion(model, region)), run(model))


def test_backward_in_another_thread(swapping: Swapping, region: Function) -> None:
    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    plain = train(model, x)
    ours = managed(model, region)
    ours.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    leaf = x.detach().clone().requires_grad_()
    loss = ours(leaf).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(60)
    assert same([leaf.grad, *(p.grad for p in ours.parameters())], plain)


def test_ten_threads_train_ten_models(swapping: Swapping, region: Function) -> None:
    """Reliability: threads, several models."""
    failures: list[Any] = []

    def work(seed: int) -> None:
        weight = swapping.randn(32, 32, seed=seed)

        def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return ((x @ weight).tanh() @ weight.t()).exp().mean()

        for step in range(10):
            x = swapping.randn(16, 32, seed=seed * 100 + step)
            try:
                ours = gradients(lambda *tensors: region(plain, *tensors), x, weight)
            except Exception as error:
                failures.append((seed, step, error))
            else:
                if not same(ours, gradients(plain, x, weight)):
                    failures.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert failures == []


def test_a_function_that_returns_its_saved_tensor_as_gradient(swapping: Swapping, region: Function) -> None:
    class Echo(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return ctx.saved_tensors[0]

    for step in range(10):
        x = swapping.randn(64, 64, seed=step, requires_grad=True)
        region(lambda t: Echo.apply(t * 1.5).sum(), x).backward()
        noise = [torch.full((64, 64), float(i), device=swapping.kind) for i in range(8)]
        assert torch.equal(x.grad, (x.detach() * 1.5) * 1.5), f"step {step}, {len(noise)}"


def test_saved_tensors_asked_for_twice_in_one_backward(swapping: Swapping, region: Function) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (first,) = ctx.saved_tensors
            (second,) = ctx.saved_tensors
            return grad * (first + second)

    x = swapping.randn(64, 64, requires_grad=True)
    region(lambda t: Twice.apply(t * 1.5).sum(), x).backward()
    assert torch.equal(x.grad, (x.detach() * 1.5 + x.detach() * 1.5) * 1.5)


def test_bytes_at_the_last_step_are_those_of_the_third_with_the_collector_off(
    swapping: Swapping, region: Function
) -> None:
    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    ours = managed(model, region)
    gc.collect()
    gc.disable()
    try:
        tensors = []
        for _ in range(12):
            train(ours, x)
            check_nothing_left()
            tensors.append(sum(issubclass(type(obj), torch.Tensor) for obj in gc.get_objects()))
    finally:
        gc.enable()
    assert tensors[2] == tensors[-1]


def test_nothing_is_swapped_from_the_cpu_without_a_directory() -> None:
    """Rule 14: on a tensor that lives on the CPU a host swap is a no-op."""
    from hyper_parallel.core.swap import engines

    before = engines.total_stats().offloaded_bytes
    x = torch.randn(256, 256, requires_grad=True)
    checkpoint(lambda t: t.exp().sum(), x, policy_fn=SWAP_ALL, swap_inputs=True).backward()
    assert torch.equal(x.grad, x.detach().exp())
    assert engines.total_stats().offloaded_bytes == before


# -- random numbers ---------------------------------------------------------------------------------------------------------


def two_random_ops(x: torch.Tensor) -> torch.Tensor:
    first, second = torch.rand_like(x), torch.rand_like(x)
    return ((x * first).sin() * second).exp().sum()


def one_saved(policy: Any) -> Callable[..., Any]:
    """Save the first random op, recompute the second."""
    seen: Counter[bool] = Counter()

    def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is not torch.ops.aten.rand_like.default:
            return policy.PREFER_RECOMPUTE
        seen[ctx.is_recompute] += 1
        return policy.MUST_SAVE if seen[ctx.is_recompute] == 1 else policy.PREFER_RECOMPUTE

    return policy_fn


def seeded(loss: Function, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [*gradients(loss, x), torch.get_rng_state()]


def first_saved(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_first = op is torch.ops.aten.rand_like.default and ctx.occurrence == 0
    return CheckpointPolicy.MUST_SAVE if is_first else CheckpointPolicy.MUST_RECOMPUTE


def first_swapped(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_first = op is torch.ops.aten.rand_like.default and ctx.occurrence == 0
    return CheckpointPolicy.MUST_SWAP if is_first else CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize("policy", [first_saved, first_swapped])
def test_a_random_op_after_a_saved_one_is_recomputed_with_its_own_numbers(swapping: Swapping, policy: Any) -> None:
    """Rule 13: a saved random op leaves the generator as running it would have."""
    x = swapping.randn(16, 16)
    assert same(seeded(lambda t: checkpoint(two_random_ops, t, policy_fn=policy), x), seeded(two_random_ops, x))


def test_pytorchs_own_selective_checkpoint_draws_other_numbers_there(swapping: Swapping) -> None:
    """What the test above would be worth if it were not so."""
    x = swapping.randn(16, 16)
    contexts = functools.partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts,
        one_saved(torch.utils.checkpoint.CheckpointPolicy),
    )

    def theirs(t: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(two_random_ops, t, use_reentrant=False, context_fn=contexts)

    if torch.equal(seeded(theirs, x)[0], seeded(two_random_ops, x)[0]):
        pytest.skip("this PyTorch has mended it")


@pytest.mark.parametrize("source", ["python", "numpy"])
def test_host_randomness_decides_the_same_branch_again(swapping: Swapping, region: Function, source: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            drawn = random.random() if source == "python" else np.random.rand()
            x = x.sin() if drawn < 0.5 else x.tanh() * 1.5
        return x.sum()

    def run(loss: Function) -> list[torch.Tensor]:
        random.seed(5)
        np.random.seed(5)
        found = gradients(loss, swapping.randn(16, 16))
        return [*found, torch.tensor([random.random(), np.random.rand()])]

    assert same(run(lambda t: region(function, t)), run(function))


def test_an_explicit_generator_ends_as_in_the_plain_run(swapping: Swapping, region: Function) -> None:
    def run(call: Function) -> list[torch.Tensor]:
        generator = torch.Generator(swapping.kind).manual_seed(4)

        def function(x: torch.Tensor) -> torch.Tensor:
            mask = torch.rand(x.shape, generator=generator, device=x.device) < 0.5
            return (x.sin() * mask * torch.rand(x.shape, generator=generator, device=x.device)).exp().sum()

        found = gradients(lambda t: call(function, t), swapping.randn(16, 16))
        return [*found, generator.get_state()]

    assert same(run(region), run(plainly))


# -- nesting, second and double backward --------------------------------------------------------------------------------------

POLICIES: dict[str, Any] = {
    "no policy": None,
    "save mix": SAVE_MIX,
    "swap mix": SWAP_MIX,
    "swap all": SWAP_ALL,
    "list": [torch.ops.aten.mm.default],
}


def twice_differentiable(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ weight)
    return h * x.sin() + h.exp()


def in_depth(depth: int, policy: Any, swap_inputs: bool) -> Function:
    function = twice_differentiable
    for level in range(depth):
        options = {"policy_fn": policy if level % 2 == 0 else SWAP_MIX, "swap_inputs": swap_inputs}

        def around(x: Any, weight: Any, inner: Function = function, options: Any = options) -> torch.Tensor:
            return checkpoint(inner, x, weight, **options).tanh()

        function = around
    return function


def plain_in_depth(depth: int) -> Function:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = twice_differentiable(x, weight)
        for _ in range(depth):
            h = h.tanh()
        return h

    return function


def second_backward(function: Function, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    loss = function(x, weight).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad, weight.grad]


def double_backward(function: Function, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    grads = torch.autograd.grad(function(x, weight).sum(), (x, weight), create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    return [*(grad.detach() for grad in grads), x.grad, weight.grad]


def double_backward_twice(function: Function, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    grads = torch.autograd.grad(function(x, weight).sum(), (x, weight), create_graph=True)
    penalty = sum(grad.square().sum() for grad in grads)
    penalty.backward(retain_graph=True)
    penalty.backward()
    return [x.grad, weight.grad]


def third_order(function: Function, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    (first,) = torch.autograd.grad(function(x, weight).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), x, create_graph=True)
    second.sin().sum().backward()
    return [first.detach(), second.detach(), x.grad, weight.grad]


def two_losses(function: Function, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    out = function(x, weight)
    (out * 2).sum().backward(retain_graph=True)
    out.sin().sum().backward()
    return [x.grad, weight.grad]


def one_by_one(function: Function, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    out = function(x, weight)
    first = torch.autograd.grad(out.sum(), weight, retain_graph=True)
    second = torch.autograd.grad(out.sum(), x)
    return [*first, *second]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "order", [second_backward, double_backward, double_backward_twice, third_order, two_losses, one_by_one]
)
def test_every_order_of_backward_at_every_depth(swapping: Swapping, order: Function, depth: int) -> None:
    """Reliability: nesting, second and double backward, retain_graph; each with every policy."""

    def run(function: Function) -> list[torch.Tensor]:
        return order(
            function, swapping.randn(8, 8, seed=1, requires_grad=True), swapping.randn(8, 8, seed=2, requires_grad=True)
        )

    expected = run(plain_in_depth(depth))
    for name, policy in POLICIES.items():
        for swap_inputs in (False, True):
            assert same(run(in_depth(depth, policy, swap_inputs)), expected), f"{name}, swap_inputs={swap_inputs}"


def with_hooks(function: Function, h: torch.Tensor) -> torch.Tensor:
    with AsyncSaveOnCpu():
        return function(h)


INSIDE: dict[str, Function] = {
    "a region that swaps its inputs": REGIONS["swap_inputs"],
    "a region that swaps": functools.partial(checkpoint, policy_fn=SWAP_ALL),
    "AsyncSaveOnCpu": with_hooks,
    "swap_wrapper": lambda function, h: swap_wrapper(function)(h),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_what_is_swapped_inside_a_region_is_no_op_of_it(swapping: Swapping, region: Function, inside: str) -> None:
    """The swap engine makes tensors of its own: the region around must not take them for ops of the model."""

    def function(x: torch.Tensor, call: Function = plainly) -> torch.Tensor:
        h = x.sin()
        y = call(torch.exp, h)
        return ((h * y).sin() * h).sum()

    x = swapping.randn(16, 16)
    ours = gradients(lambda t: region(functools.partial(function, call=INSIDE[inside]), t), x)
    assert same(ours, gradients(function, x))


@pytest.mark.parametrize("inside", INSIDE)
def test_a_region_whose_only_op_is_swapped_by_another(swapping: Swapping, region: Function, inside: str) -> None:
    x = swapping.randn(16, 16)
    ours = gradients(lambda t: region(lambda h: INSIDE[inside](lambda u: u.sin().exp(), h).tanh(), t).sum(), x)
    assert same(ours, gradients(lambda t: t.sin().exp().tanh().sum(), x))


def swap_sums(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP if op is torch.ops.aten.add.Tensor else CheckpointPolicy.MUST_RECOMPUTE


def test_a_value_that_an_inner_region_swaps_when_it_ends_is_read_by_the_outer_one(
    swapping: Swapping, region: Function
) -> None:
    def inner(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = h.sin() + 1
        return total, total.exp()

    def outer(x: torch.Tensor, call: Function = plainly) -> torch.Tensor:
        total, power = call(inner, x)
        return ((total * total).sin() * power).sum()

    x = swapping.randn(16, 16)
    swaps = functools.partial(checkpoint, policy_fn=swap_sums)
    assert same(gradients(lambda t: region(functools.partial(outer, call=swaps), t), x), gradients(outer, x))


def test_a_policy_is_asked_about_ops_of_the_model_only(swapping: Swapping) -> None:
    asked: set[str] = set()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.add(str(op))
        return CheckpointPolicy.MUST_SWAP

    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda h: (h.sin() + 1).exp(), x, policy_fn=swap_sums, swap_inputs=True).cos()

    checkpoint(function, swapping.randn(16, 16, requires_grad=True), policy_fn=policy).sum().backward()
    assert asked == {"aten.sin.default", "aten.add.Tensor", "aten.exp.default", "aten.cos.default"}


def test_a_gradient_taken_inside_the_region(swapping: Swapping, region: Function) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        energy = (x.sin() * x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return (force * x.exp()).sum()

    x = swapping.randn(16, 16)
    assert same(gradients(lambda t: region(function, t), x), gradients(function, x))


def test_a_whole_training_step_inside_the_region(swapping: Swapping, region: Function) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        fast = x.detach().clone().requires_grad_()
        (fast.sin() * fast).sum().backward()
        return (x.exp() * fast.grad).sum()

    x = swapping.randn(16, 16)
    assert same(gradients(lambda t: region(function, t), x), gradients(function, x))


# -- arguments that change ----------------------------------------------------------------------------------------------------


class GrowingCache:
    """As Hugging Face's dynamic cache: a list of tensors per layer, appended to by `torch.cat`."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.num_seen = 0

    def update(self, key: torch.Tensor, layer: int) -> torch.Tensor:
        self.num_seen += key.shape[0]
        if layer == len(self.keys):
            self.keys.append(key)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], key])
        return self.keys[layer]


class StaticCache:
    """A buffer of full length, written by `index_copy_`."""

    def __init__(self, like: torch.Tensor) -> None:
        self.keys = torch.zeros(32, like.shape[1], device=like.device)
        self.num_seen = 0

    def update(self, key: torch.Tensor, layer: int) -> torch.Tensor:
        rows = torch.arange(self.num_seen, self.num_seen + key.shape[0], device=key.device)
        self.keys.index_copy_(0, rows, key.detach())
        self.num_seen += key.shape[0]
        return self.keys[: self.num_seen].clone() + key.mean()


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("by", ["position", "keyword", "closure of a list"])
def test_a_cache_that_the_region_appends_to(swapping: Swapping, region: Function, kind: str, by: str) -> None:
    """Rule 13: recomputation sees what forward saw, and what forward returned is unchanged."""

    def attend(x: torch.Tensor, weight: torch.Tensor, cache: Any = None) -> torch.Tensor:
        cache = cache[0] if isinstance(cache, list) else cache
        for layer in range(2):
            key = (x @ weight).tanh()
            seen = cache.update(key, layer)
            x = ((x @ seen.t()).softmax(-1) @ seen).sin()
        return x

    def run(call: Function) -> list[torch.Tensor]:
        x, weight = swapping.randn(4, 8, seed=1, requires_grad=True), swapping.randn(8, 8, seed=2, requires_grad=True)
        cache: Any = GrowingCache() if kind == "growing" else StaticCache(x)
        out, before = x, []
        for _ in range(3):
            if by == "keyword":
                out = call(attend, out, weight, cache=cache)
            else:
                out = call(attend, out, weight, cache if by == "position" else [cache])
            before.append(out.detach().clone())
        keys = cache.keys if kind == "growing" else [cache.keys]
        kept = [key.detach().clone() for key in keys]
        out.sum().backward()
        assert same([key.detach() for key in keys], kept), "backward changed the cache"
        return [*before, *kept, x.grad, weight.grad, torch.tensor(cache.num_seen)]

    assert same(run(region), run(plainly))


def test_a_list_that_the_region_fills_is_filled_once(swapping: Swapping, region: Function) -> None:
    collected: list[torch.Tensor] = []

    def function(x: torch.Tensor, into: list[torch.Tensor]) -> torch.Tensor:
        h = x.sin()
        into.append(h)
        return (h * len(into)).exp().sum()

    x = swapping.randn(16, 16, requires_grad=True)
    loss = region(function, x, collected)
    loss.backward()
    assert len(collected) == 1
    assert torch.equal(collected[0], x.detach().sin())
    assert torch.equal(x.grad, gradients(lambda t: t.sin().exp().sum(), x)[0])


READS = {
    "a sum": "float(hidden[-1].sum())",
    "its text": "len(repr(hidden[-1]))",
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("when", ["in recomputation", "after backward"])
def test_a_tensor_that_the_function_puts_elsewhere_in_recomputation_can_be_read_or_raises(read: str, when: str) -> None:
    """What nothing needs is not computed again; reading it must not end the process. (So: in one of its own.)"""
    now = READS[read]
    program = f"""
import torch
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
hidden = []
def function(x):
    hidden.append(x.cos())
    if len(hidden) > 1 and {when == "in recomputation"}:
        {now}
    return x.sin().exp()
x = torch.ones(4, 4, requires_grad=True)
checkpoint(function, x).sum().backward()
try:
    {now}
except RuntimeError as error:
    pass
result = bool(torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp()))
"""
    result = run_fresh(program)
    assert result is True or "RuntimeError" in result["error"]


def test_an_input_that_the_region_changes_in_place(swapping: Swapping, region: Function) -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        y = h.mul_(2).sin()
        return y * h

    def run(call: Function) -> list[torch.Tensor]:
        leaf = swapping.randn(16, 16, requires_grad=True)
        h = leaf * 1.5
        out = call(function, h)
        (out.sum() + h.cos().sum()).backward()
        return [out.detach(), h.detach(), leaf.grad]

    assert same(run(region), run(plainly))


def test_a_buffer_that_is_an_argument_and_known_to_the_function_besides(swapping: Swapping, region: Function) -> None:
    """Two names for one storage: recomputation writes into the same copy under both."""

    def run(call: Function) -> list[torch.Tensor]:
        known = torch.full((16, 16), 0.5, device=swapping.kind)

        def function(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
            buffer.add_(1)
            h = x * buffer.clone()
            known.mul_(0.5)
            return (h * known.clone()).sin()

        leaf = swapping.randn(16, 16, requires_grad=True)
        call(function, leaf, known).sum().backward()
        return [leaf.grad, known]

    assert same(run(region), run(plainly))


@pytest.mark.parametrize("first", ["argument", "closure"])
def test_a_leaf_that_is_an_argument_and_known_to_the_function_besides_is_cast_alike(
    swapping: Swapping, region: Function, first: str
) -> None:
    low = torch.float16 if swapping.kind == "cuda" else torch.bfloat16

    def run(call: Function) -> list[torch.Tensor]:
        known, weight = (swapping.randn(16, 16, seed=seed, requires_grad=True) for seed in (1, 2))

        def function(x: torch.Tensor) -> torch.Tensor:
            one, other = (x, known) if first == "argument" else (known, x)
            with torch.autocast(swapping.kind, low):
                return (nn.functional.linear(one, weight).relu() @ other).float().tanh().sin()

        call(function, known).sum().backward()
        return [known.grad, weight.grad]

    assert same(run(region), run(plainly))


def test_batch_norm_counts_each_forward_once(swapping: Swapping, region: Function) -> None:
    def run(call: Function) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()).to(swapping.kind)
        x = swapping.randn(16, 8)
        for _ in range(3):
            call(model, call(model, x)).square().mean().backward(retain_graph=True)
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    assert same(run(region), run(plainly))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_step_counter_counts_each_forward_once_with_two_forwards_alive(
    swapping: Swapping, region: Function, order: tuple[int, int]
) -> None:
    def run(call: Function) -> list[torch.Tensor]:
        steps = torch.zeros((), dtype=torch.int64, device=swapping.kind)

        def function(x: torch.Tensor) -> torch.Tensor:
            steps.add_(1)
            return x.sin() * steps.float().rsqrt()

        leaf, grads = swapping.randn(16, 16, requires_grad=True), []
        for _ in range(3):  # what a region has learned in one step must not harm the next
            losses = [call(function, leaf).sum() for _ in range(2)]
            grads += [torch.autograd.grad(losses[index], leaf)[0] for index in order]
        return [*grads, steps]

    assert same(run(region), run(plainly))


@pytest.mark.parametrize("how", ["optimizer", "in place"])
def test_parameters_changed_between_forward_and_backward_are_noticed(
    swapping: Swapping, region: Function, how: str
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16).to(swapping.kind)
    x = swapping.randn(4, 16, requires_grad=True)

    def step(call: Function) -> list[torch.Tensor]:
        layer.zero_grad(set_to_none=True)
        out = call(lambda t: layer(layer(t).tanh()).exp(), x)
        if how == "optimizer":
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
            for parameter in layer.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        else:
            with torch.no_grad():
                layer.weight.mul_(0.5)
        out.sum().backward()
        return [layer.weight.grad.clone()]

    with pytest.raises(RuntimeError, match="inplace operation"):
        step(plainly)
    flush_aborted_backward()
    with pytest.raises(RuntimeError, match="(?i)changed in place|in-?place operation"):
        step(region)


def test_a_module_that_fills_a_cache_in_its_first_call(swapping: Swapping, region: Function) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype).mul(0.1).cos()
            return (x.sin() * self.table).exp().sum()

    x = swapping.randn(16, 16)
    module = Rotary()
    expected = gradients(Rotary(), x)
    for _ in range(3):
        assert same(gradients(lambda t: region(module, t), x), expected)


# -- policies that misbehave --------------------------------------------------------------------------------------------------


def after_a_bad_policy(swapping: Swapping) -> None:
    flush_aborted_backward()
    gc.collect()
    check_no_mode_left()
    check_nothing_left()
    x = swapping.randn(16, 16)
    ours = gradients(lambda t: checkpoint(twice_differentiable, t, t, policy_fn=SWAP_MIX).sum(), x)
    assert same(ours, gradients(lambda t: twice_differentiable(t, t).sum(), x))


@pytest.mark.parametrize("nth", [1, 3])
def test_a_policy_that_raises_in_forward_leaves_nothing(swapping: Swapping, nth: int) -> None:
    num_asked = 0

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal num_asked
        num_asked += 1
        if num_asked == nth:
            raise KeyError("mine")
        return CheckpointPolicy.MUST_SWAP

    x = swapping.randn(16, 16, requires_grad=True)
    with pytest.raises(KeyError, match="mine"):
        checkpoint(twice_differentiable, x, x, policy_fn=policy)
    after_a_bad_policy(swapping)


def test_a_policy_that_raises_in_recomputation_leaves_nothing(swapping: Swapping) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if ctx.is_recompute:
            raise KeyError("mine")
        return CheckpointPolicy.MUST_SWAP if op is torch.ops.aten.mm.default else CheckpointPolicy.MUST_RECOMPUTE

    x = swapping.randn(16, 16, requires_grad=True)
    loss = checkpoint(twice_differentiable, x, x, policy_fn=policy).sum()
    with pytest.raises(KeyError, match="mine"):
        loss.backward()
    del loss
    after_a_bad_policy(swapping)


@pytest.mark.parametrize("answer", [None, "swap", 7, object, CheckpointPolicy])
@pytest.mark.parametrize("product", [torch.mm, operator.matmul], ids=["function", "operator"])
def test_a_policy_with_a_wrong_answer_is_an_error_that_shows_answer_and_op(
    swapping: Swapping, answer: Any, product: Function
) -> None:
    """Python's operators take a TypeError from inside for "not implemented": it must not get lost there."""
    x = swapping.randn(16, 16, requires_grad=True)
    with pytest.raises((TypeError, ValueError), match=r"(?s)CheckpointPolicy.*got.*aten\.mm"):
        checkpoint(product, x, x, policy_fn=lambda *args, **kwargs: answer)
    after_a_bad_policy(swapping)


@pytest.mark.parametrize(
    "change",
    [
        (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE),
        (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE),
        (CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE),
    ],
    ids=["save, then recompute", "recompute, then save", "swap, then recompute"],
)
def test_a_policy_that_changes_its_mind_is_right_or_an_error_that_names_the_op(swapping: Swapping, change: Any) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.mm.default:
            return change[ctx.is_recompute]
        return CheckpointPolicy.PREFER_RECOMPUTE

    x = swapping.randn(16, 16)
    try:
        found = gradients(lambda t: checkpoint(twice_differentiable, t, t, policy_fn=policy).sum(), x)
    except RuntimeError as error:
        assert "aten.mm" in str(error)  # noqa: PT017 - an error is one of two right ends
    else:
        assert same(found, gradients(lambda t: twice_differentiable(t, t).sum(), x))
    after_a_bad_policy(swapping)


@pytest.mark.parametrize(
    "name", [member.name for member in torch.utils.checkpoint.CheckpointPolicy] + ["True", "False"]
)
def test_pytorchs_own_answers_are_understood(swapping: Swapping, name: str) -> None:
    answer = {"True": True, "False": False}.get(name)
    if answer is None:
        answer = torch.utils.checkpoint.CheckpointPolicy[name]
    x = swapping.randn(16, 16)
    ours = gradients(
        lambda t: checkpoint(twice_differentiable, t, t, policy_fn=lambda *args, **kwargs: answer).sum(), x
    )
    assert same(ours, gradients(lambda t: twice_differentiable(t, t).sum(), x))
    # The second of them finds that what it saves is needed first in backward: where an engine outlives a test, it stays.
    swapped = swapping.offloaded_bytes > 0 or swapping.kept("needed first in backward") > 0
    assert swapped == ("OFFLOAD" in name)


@pytest.mark.parametrize("option", ["use_reentrant", "context_fn"])
def test_what_the_policy_owns_is_refused_by_name(option: str) -> None:
    with pytest.raises((TypeError, ValueError), match=option):
        checkpoint(torch.sin, torch.ones(2, requires_grad=True), **{option: True})


# -- functions and results of every form ----------------------------------------------------------------------------------------


class Holder:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * self.factor).exp()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.method(x)


def scaled(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return (x.sin() * factor).exp()


CALLABLES: dict[str, Function] = {
    "function": scaled,
    "lambda": lambda x: (x.sin() * 2.0).exp(),
    "partial": functools.partial(scaled, factor=2.0),
    "bound method": Holder(2.0).method,
    "callable object": Holder(2.0),
    "module": nn.Sequential(nn.Tanh(), nn.GELU()),
    "builtin": torch.exp,
}


def test_any_callable_can_be_a_region(swapping: Swapping, region: Function) -> None:
    x = swapping.randn(16, 16)
    for name, function in CALLABLES.items():
        ours = gradients(lambda t, f=function: region(f, t).sum(), x)
        assert same(ours, gradients(lambda t, f=function: f(t).sum(), x)), name


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    name: str


RESULTS: dict[str, tuple[Function, Function]] = {
    "tuple with none": (lambda x: (x.sin().exp(), None), lambda result: result[0]),
    "dict of lists": (lambda x: {"a": [x.sin(), {"b": x.exp()}], "n": 3}, lambda result: result["a"][1]["b"]),
    "object": (lambda x: Result(x.sin().exp(), "mine"), lambda result: result.hidden),
    "generator": (lambda x: (part.sin().exp() for part in x.exp().chunk(2)), lambda result: torch.cat(list(result))),
    "the input": (lambda x: (x, x.sin()), lambda result: result[0] * result[1]),
    "a view": (lambda x: x.sin().exp().t()[1:], lambda result: result),
    "detached": (lambda x: (x.sin().exp().detach(), x.sin()), lambda result: result[0] * result[1]),
    "one tensor twice": (lambda x: (lambda h: (h, h))(x.sin().exp()), lambda result: result[0] * result[1]),
}


def test_any_result_comes_out_as_it_is(swapping: Swapping, region: Function) -> None:
    x = swapping.randn(16, 16)
    for form, (function, pick) in RESULTS.items():
        plain, ours = function(x.clone().requires_grad_()), region(function, x.clone().requires_grad_())
        assert type(ours) is type(plain), form
        found = gradients(lambda t, f=function, p=pick: p(region(f, t)).sum(), x)
        assert same(found, gradients(lambda t, f=function, p=pick: p(f(t)).sum(), x)), form


def test_a_region_without_a_tensor_in_its_result_gives_it_unchanged(swapping: Swapping, region: Function) -> None:
    def function(x: torch.Tensor, result: Any) -> Any:
        x.sin().exp()
        return result

    for result in (None, 3, "text", (1, [2.5])):
        assert region(function, swapping.randn(16, 16, requires_grad=True), result) == result


def test_the_exception_of_the_function_comes_out_as_it_was_raised(swapping: Swapping, region: Function) -> None:
    error = KeyError("mine")

    def function(x: torch.Tensor) -> torch.Tensor:
        x.sin().exp()
        raise error

    with pytest.raises(KeyError) as caught:
        region(function, swapping.randn(16, 16, requires_grad=True))
    assert caught.value is error
    error.__traceback__ = None
    check_no_mode_left()


def test_arguments_that_are_no_tensors_arrive_unchanged(swapping: Swapping, region: Function) -> None:
    seen: list[Any] = []
    marker = object()

    def function(x: torch.Tensor, *rest: Any, flag: bool, **options: Any) -> torch.Tensor:
        seen.append((rest, flag, options))
        return x.sin().exp().sum()

    x = swapping.randn(16, 16, requires_grad=True)
    region(function, x, None, 3, marker, flag=True, name="text").backward()
    assert all(each == ((None, 3, marker), True, {"name": "text"}) for each in seen)
    assert torch.equal(x.grad, gradients(lambda t: t.sin().exp().sum(), x)[0])


def test_one_tensor_given_twice_is_one_tensor_inside(swapping: Swapping, region: Function) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert x is y
        return (x.sin() * y.exp()).sum()

    x = swapping.randn(16, 16)
    assert same(gradients(lambda t: region(function, t, t), x), gradients(lambda t: function(t, t), x))


def test_inputs_without_a_gradient_and_a_parameter_that_has_one(swapping: Swapping, region: Function) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(swapping.kind), swapping.randn(4, 16)

    def run(call: Function) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        call(model, x).exp().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    assert same(run(region), run(plainly))


def test_outputs_of_which_only_one_is_used(swapping: Swapping, region: Function) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin().exp(), x.cos().exp()

    x = swapping.randn(16, 16)
    for index in range(2):
        ours = gradients(lambda t, i=index: region(function, t)[i].sum(), x)
        assert same(ours, gradients(lambda t, i=index: function(t)[i].sum(), x))


def test_hooks_on_tensors_inside_run_once(swapping: Swapping, region: Function) -> None:
    seen: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        h.register_hook(lambda grad: seen.append(grad) or grad * 2)
        return h.exp().sum()

    def run(loss: Function) -> list[torch.Tensor]:
        seen.clear()
        found = gradients(loss, swapping.randn(16, 16))
        return [*found, *seen]

    ours, plain = run(lambda t: region(function, t)), run(function)
    assert same(ours, plain)


def batch_norm_of_arguments(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    return nn.functional.batch_norm(x.sin(), mean, variance, training=True).sin()


def other_memory(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    factor = torch.zeros_like(x)
    factor.set_(x.detach().cos())
    return (x.sin() * factor).exp()


def training_inside(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    weight = torch.ones_like(x, requires_grad=True)
    for _step in range(3):
        (weight * x.detach()).sin().sum().backward()
        weight.data -= 0.1 * weight.grad
        weight.grad = None
    return (x * weight.detach()).sin()


@pytest.mark.parametrize("function", [batch_norm_of_arguments, other_memory, training_inside])
def test_what_plain_pytorch_allows_is_not_refused(swapping: Swapping, region: Function, function: Function) -> None:
    def run(call: Function) -> list[torch.Tensor]:
        mean, variance = torch.zeros(16, device=swapping.kind), torch.ones(16, device=swapping.kind)
        found = gradients(lambda x: call(function, x * 1, mean, variance).sum(), swapping.randn(16, 16))
        return [*found, mean, variance]

    assert same(run(region), run(plainly))
