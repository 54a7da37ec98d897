"""Random programs, exceptions at every place and long runs on MindSpore. `HYPER_PARALLEL_CAMPAIGN=full` runs all of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore")

from mindspore import Tensor  # noqa: E402
from mindspore.graph.api import _pynative_executor  # noqa: E402

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy  # noqa: E402
from hyper_parallel.core.swap.config import configure_swap  # noqa: E402
from hyper_parallel.platform import selection  # noqa: E402
from hyper_parallel.platform.mindspore.activation_checkpoint import checkpoint_wrapper, swap_wrapper  # noqa: E402
from support.backends import MindSporeBackend  # noqa: E402
from support.campaign import share  # noqa: E402
from support.mindspore_programs import InjectedError, Injector, Program, make_cell  # noqa: E402
from support.mindspore_training import DRIVERS, differentiate, num_live_tensors  # noqa: E402
from support.swapping_state import check_nothing_left, offloaded_bytes  # noqa: E402

PAGE_KIB = 4


@pytest.fixture(autouse=True)
def on_disk(tmp_path: Path) -> Iterator[None]:
    with (
        MindSporeBackend().active(),
        configure_swap(disk_dir=tmp_path, min_bytes=1, window_bytes="64KiB", prefetch_bytes="256KiB"),
    ):
        yield
        gc.collect()
        check_nothing_left()
    selection._forget()


def test_random_programs_give_the_bits_of_the_plain_run() -> None:
    before = offloaded_bytes()
    wrong = []
    for number in share(1000, 90):
        program = Program(number)
        expected, found = program.gradients(plain=True), program.gradients()
        if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found, expected, strict=True)):
            wrong.append(str(program))
    assert not wrong, f"{len(wrong)} programs differ, the first: {wrong[0]}"
    assert offloaded_bytes() > before


def test_exceptions_anywhere_leave_nothing_behind() -> None:
    num_injected = 0
    programs = [Program(5000 + number) for number in range(20)]
    expected = [program.gradients(plain=True) for program in programs]
    lengths = []
    for program in programs:
        counter = Injector()
        program.gradients(counter)
        lengths.append(counter.count)
    live = num_live_tensors()
    for case in share(500, 60):
        which = case % len(programs)
        at = 1 + (case * 7919) % lengths[which]
        with pytest.raises(InjectedError):
            programs[which].gradients(Injector(at))
        _pynative_executor.set_grad_flag(False)  # an exception in backward leaves it as it was there
        num_injected += 1
        if case % 5 == 0:
            found = programs[which].gradients()
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found, expected[which], strict=True)), (
                f"after an exception at step {at} of {programs[which]}"
            )
    gc.collect()
    check_nothing_left()
    assert num_live_tensors() <= live + 2, f"after {num_injected} exceptions"


@pytest.mark.parametrize("driver", DRIVERS)
def test_many_steps_keep_no_tensor_and_no_more_memory_than_plain_steps(driver: str) -> None:
    num_steps = len(share(1000, 150))
    x = Tensor(np.random.RandomState(0).randn(16, 32).astype(np.float32))

    def policy(ctx: object, op: str, *args: object, **kwargs: object) -> CheckpointPolicy:
        return {"MatMul": CheckpointPolicy.MUST_SAVE, "Mul": CheckpointPolicy.MUST_SWAP}.get(
            op, CheckpointPolicy.MUST_RECOMPUTE
        )

    growth = {}
    for name, wrap in {
        "plain": lambda cell: cell,
        "recompute": checkpoint_wrapper,
        "mix": lambda cell: checkpoint_wrapper(cell, policy_fn=policy),
        "swap": swap_wrapper,
    }.items():
        cell = make_cell(32)
        cell.set_train()
        weights = cell.trainable_params()
        wrapped = wrap(cell)

        def step(wrapped: object = wrapped, weights: object = weights) -> None:
            differentiate(lambda y: wrapped(y).sum(), (x,), weights, driver)

        for _ in range(20):
            step()
        live, memory = num_live_tensors(), _resident_kib()
        for _ in range(num_steps):
            step()
        assert num_live_tensors() <= live, name
        growth[name] = (_resident_kib() - memory) / num_steps
    # Plain steps grow by some 40 KiB each on this CPU, in pages; nothing may grow much faster.
    print(f"KiB per step: {growth}")
    for name in ("recompute", "mix", "swap"):
        assert growth[name] <= growth["plain"] * 1.5 + 24, growth


def _resident_kib() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE_KIB
