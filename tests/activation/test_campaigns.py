"""Campaigns on real tensors: aliases, in-place changes, failures, threads, leaks, bytes. Figures as the project promises them."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hyper_parallel.core.swap import engines
from hyper_parallel.core.swap.engine import SwapEngine
from hyper_parallel.platform.torch.activation_checkpoint import AsyncSaveOnCpu, swap_wrapper
from support.campaign import share
from support.random_tensors import TensorProgram
from support.region_programs import flush_aborted_backward
from support.swapping import Swapping, check_nothing_left, gradients


def unique_storage_bytes(run: Callable[[], torch.Tensor]) -> int:
    """Bytes of the storages that autograd saves, each once; held alive so that none is mistaken for another."""
    storages: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        detached = tensor.detach()
        storages[detached.untyped_storage()._cdata] = detached.untyped_storage()
        return detached

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in storages.values())


def test_aliases_give_plain_gradients_untouched_users_tensors_and_no_byte_twice(swapping: Swapping) -> None:
    num_programs = 0
    for seed in share(2_000, 300):
        program = TensorProgram(seed)
        x = program.input(swapping.kind)
        plain = gradients(program.loss, x)
        kept = [tensor.detach().clone() for tensor in program.kept]
        leaf = x.clone().requires_grad_()
        expected_bytes = unique_storage_bytes(lambda p=program, y=leaf: p.loss(y))
        moved = swapping.offloaded_bytes
        managed_leaf = x.clone().requires_grad_()
        with AsyncSaveOnCpu(name=f"program {seed}"):
            loss = program.loss(managed_leaf)
        assert swapping.offloaded_bytes - moved == expected_bytes > 0, f"seed {seed}"
        loss.backward()
        assert torch.equal(managed_leaf.grad, plain[0]), f"seed {seed}"
        assert all(torch.equal(a, b) for a, b in zip(program.kept, kept, strict=True)), f"seed {seed}"
        program.kept.clear()
        num_programs += 1
    assert num_programs >= 300


SAVES_OUTPUT = [torch.exp, torch.tanh, torch.sigmoid, lambda t: torch.softmax(t, -1), lambda t: t.abs().sqrt()]
SAVES_INPUT = [
    torch.sin,
    torch.cos,
    torch.square,
    lambda t: t * t,
    lambda t: t @ t,
    lambda t: torch.nn.functional.gelu(t),
]
CHANGES = [
    lambda t: t.mul_(2),
    lambda t: t.add_(1),
    lambda t: t.zero_(),
    lambda t: t[::2].fill_(3),
]


def test_a_saved_tensor_changed_in_place_raises_wherever_plain_pytorch_does(swapping: Swapping) -> None:
    num_errors = 0
    with swapping.configured(window_bytes="16MiB"):
        for seed in share(1_000, 250):
            choose = random.Random(seed)
            changes_output = choose.random() < 0.5
            op, change = choose.choice(SAVES_OUTPUT if changes_output else SAVES_INPUT), choose.choice(CHANGES)

            def run(x: torch.Tensor, op: Any = op, change: Any = change, changes_output: bool = changes_output) -> None:
                y = x * 1.5
                z = op(y)
                with torch.no_grad():
                    change(z if changes_output else y)
                z.sum().backward()

            for managed in (False, True):
                hooks = AsyncSaveOnCpu(name=f"program {seed}") if managed else contextlib.nullcontext()
                with pytest.raises(RuntimeError, match="changed in place" if managed else "inplace operation"), hooks:
                    run(swapping.randn(16, 16, seed=seed, requires_grad=True))
                num_errors += managed
    assert num_errors >= 250


def test_changes_that_plain_pytorch_allows_raise_nothing_and_give_its_gradients(swapping: Swapping) -> None:
    num_programs = 0
    for seed in share(1_000, 250):
        choose = random.Random(seed)
        op, change = choose.choice(SAVES_OUTPUT + SAVES_INPUT), choose.choice(CHANGES)
        when = choose.choice(["before it is saved", "a tensor nobody saved", "a copy", "a held result of add"])

        def loss(x: torch.Tensor, op: Any = op, change: Any = change, when: str = when) -> torch.Tensor:
            y = x * 1.5
            if when == "before it is saved":
                y = y.clone()
                change(y)
            z = op(y)
            if when == "a tensor nobody saved":
                change(torch.ones_like(z.detach()))
            elif when == "a copy":
                change(y.detach().clone())
            elif when == "a held result of add":
                w = z + 1
                change(w)
                return w.sum()
            return z.sum()

        def managed(x: torch.Tensor, loss: Any = loss, seed: int = seed) -> torch.Tensor:
            with AsyncSaveOnCpu(name=f"program {seed}"):
                return loss(x)

        x = swapping.randn(16, 16, seed=seed)
        assert all(torch.equal(a, b) for a, b in zip(gradients(managed, x), gradients(loss, x), strict=True)), (
            f"seed {seed}"
        )
        num_programs += 1
    assert num_programs >= 250


class InjectedError(Exception):
    pass


def test_an_exception_at_any_engine_call_leaks_nothing_and_the_next_step_is_right(swapping: Swapping) -> None:
    """Fails the n-th call of the engine, for every n, in several programs."""
    num_injections = 0
    for seed in share(50, 12):
        program = TensorProgram(seed)
        x = program.input(swapping.kind)
        plain = gradients(program.loss, x)
        n = 0
        while True:
            n += 1
            if not fail_nth_call(program, x, n):
                break
            num_injections += 1
            program.kept.clear()
            flush_aborted_backward()
            check_nothing_left()
        leaf = x.clone().requires_grad_()
        with AsyncSaveOnCpu():
            loss = program.loss(leaf)
        loss.backward()
        assert torch.equal(leaf.grad, plain[0]), f"seed {seed}"
        program.kept.clear()
    assert num_injections >= 100


def fail_nth_call(program: TensorProgram, x: torch.Tensor, n: int) -> bool:
    """Whether there was an n-th call, which then raised through the user's program."""
    count = 0
    originals = {
        name: getattr(SwapEngine, name)
        for name in ("save", "acquire", "_launch_offload", "_launch_load", "_launch_next")
    }

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == n:
                raise InjectedError
            return originals[name](*args)

        return call

    with mock.patch.multiple(SwapEngine, **{name: counting(name) for name in originals}):
        try:
            leaf = x.clone().requires_grad_()
            with AsyncSaveOnCpu():
                loss = program.loss(leaf)
            loss.backward()
        except InjectedError:
            return True
    return False


def test_ten_threads_with_several_forwards_alive_are_right(swapping: Swapping) -> None:
    num_steps = len(share(200, 20))
    wrong: list[Any] = []

    def work(thread: int) -> None:
        for step in range(num_steps):
            programs = [TensorProgram(thread * 1_000 + step * 2 + which) for which in range(2)]
            leaves, losses = [], []
            for program in programs:
                leaves.append(program.input(swapping.kind).requires_grad_())
                with AsyncSaveOnCpu(name=f"thread {thread}"):
                    losses.append(program.loss(leaves[-1]))
            for index in (0, 1) if step % 2 else (1, 0):
                losses[index].backward()
            for program, leaf in zip(programs, leaves, strict=True):
                if not torch.equal(leaf.grad, gradients(program.loss, leaf)[0]):
                    wrong.append((thread, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert wrong == []
    assert swapping.loaded_bytes > 0


def test_bytes_stay_the_same_over_many_steps_with_the_collector_off(swapping: Swapping) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(swap_wrapper(nn.Sequential(nn.Linear(32, 32), nn.GELU())) for _ in range(4))).to(
        swapping.kind
    )
    x = swapping.randn(16, 32)
    gc.collect()
    gc.disable()
    try:
        tensors, reserved = [], []
        for _ in share(1_000, 150):
            model.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            check_nothing_left()
            if len(tensors) < 3 or len(tensors) % 25 == 0:
                tensors.append(sum(issubclass(type(obj), torch.Tensor) for obj in gc.get_objects()))
            else:
                tensors.append(tensors[-1])
            reserved.append(sum(managed.tier.reserved_bytes for managed in engines.all_engines().values()))
    finally:
        gc.enable()
    assert tensors[2] == tensors[-1]
    assert reserved[2] == reserved[-1]


def allocated_peak(run: Callable[[], None]) -> int:
    """Peak of bytes allocated on the CPU inside `run`, from the profiler's allocator events, which are exact."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
    total = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def test_allocated_activation_bytes_on_the_cpu_fall_as_computed(tmp_path: Any) -> None:
    swapping = Swapping("cpu", tmp_path)
    num_blocks, rows, width = 12, 256, 256
    window = prefetch = 2 * rows * width * 4
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Tanh()) for _ in range(num_blocks)))
    managed = nn.Sequential(*(swap_wrapper(block) for block in plain))
    x = torch.randn(rows, width)
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def train(model: nn.Module) -> Callable[[], None]:
        return lambda: model(x).sum().backward()

    # Linear saves its input (of the first block: x itself, which stays), GELU its input, Tanh its result, which is the next
    # block's input: two storages a block.
    saved = num_blocks * 2 * rows * width * 4
    with swapping.configured(window_bytes=window, prefetch_bytes=prefetch):
        for _ in range(2):
            train(managed)()
        before = allocated_peak(train(plain))
        after = allocated_peak(train(managed))
    # Of what is saved, a window of sources, a window of loads and half a window of tail may be on the device; everything else must be gone.
    assert before >= saved
    assert after <= before - saved + window + prefetch + window // 2 + 4 * rows * width * 4
    assert swapping.offloaded_bytes > 0


def test_a_disk_that_fills_up_keeps_the_tensor_and_counts_it(tmp_path: Any) -> None:
    swapping = Swapping("cpu", tmp_path)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    program = TensorProgram(5)
    x = program.input("cpu")
    plain = gradients(program.loss, x)

    def managed(y: torch.Tensor) -> torch.Tensor:
        with AsyncSaveOnCpu():
            loss = program.loss(y)
        for entry in engines.all_engines().values():
            entry.engine.join()  # a copy that is under way when backward has what it needs is nobody's failure
        return loss

    with swapping.configured():
        with mock.patch("os.pwritev", full):
            assert torch.equal(gradients(managed, x)[0], plain[0])
        assert swapping.kept("the copy failed") > 0
        assert torch.equal(gradients(managed, x)[0], plain[0])
        program.kept.clear()
    with swapping.configured(disk_budget=1):
        assert torch.equal(gradients(managed, x)[0], plain[0])
        program.kept.clear()
    assert swapping.kept("no room in disk") > 0


def test_a_load_that_fails_is_a_clear_error_and_the_next_step_is_right(tmp_path: Any) -> None:
    swapping = Swapping("cpu", tmp_path)
    x = torch.randn(64, 64)

    def managed(y: torch.Tensor) -> torch.Tensor:
        with AsyncSaveOnCpu(name="my block"):
            return (y * 2).exp().sin().sum()

    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with swapping.configured(prefetch_bytes=1):
        leaf = x.clone().requires_grad_()
        loss = managed(leaf)
        for entry in engines.all_engines().values():
            entry.engine.join()
        with (
            mock.patch("os.preadv", broken),
            pytest.raises(RuntimeError, match="(?s)could not be brought back.*my block"),
        ):
            loss.backward()
        del loss
        assert torch.equal(gradients(managed, x)[0], gradients(lambda y: (y * 2).exp().sin().sum(), x)[0])
    assert os.listdir(tmp_path) == []
