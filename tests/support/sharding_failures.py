"""A rank that stalls, dies or raises at any collective of a step. Runs in the workers of `support.processes`."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import hyper_parallel as hp
from hyper_parallel.platform.torch.communication import Communication
from support.sharding import Run, Settings, differences, mesh_of, shard
from support.sharding_programs import PROGRAMS, Stack, blocks_and_all

CALL_S = 2  # how long a call waits for other ranks
WAYS = ("raises", "dies", "stalls")


class Failure(NamedTuple):
    size: int
    victim: int
    way: str
    zero: int
    is_weighted: bool
    at: float  # which collective of two steps, as a share of all


def failure_of(seed: int) -> Failure:
    choose = random.Random(f"sharding {seed}")
    size = choose.choice([2, 2, 4])
    return Failure(
        size, choose.randrange(size), WAYS[seed % 3], choose.choice([1, 2, 3]), choose.random() < 0.3, choose.random()
    )


class OnPurposeError(Exception):
    """What the rank raises."""


def fail(failure: Failure, directory: str) -> tuple[str, float, list[str]]:
    """What this rank says, after how long, and what is wrong with a model that is trained afterwards."""
    Communication.transport._timeout = timedelta(seconds=CALL_S)  # as `init_process_group(timeout=...)` of ours does
    num = _train(failure, None, Path(directory))
    begin = time.monotonic()
    text = "fine"
    try:
        _train(failure, int(failure.at * num), Path(directory))
    except (OnPurposeError, RuntimeError) as error:
        text = str(error)
    elapsed_s = time.monotonic() - begin
    (Path(directory) / f"ended-{dist.get_rank()}").touch()
    _wait_for_all(failure, Path(directory))
    if failure.way == "dies":
        return text, elapsed_s, []
    hp.get_platform().destroy_process_group(mesh_of().get_group("dp"))
    return text, elapsed_s, differences(PROGRAMS["blocks and a model"], Settings(failure.zero, num_steps=2))


def _train(failure: Failure, fail_at: int | None, directory: Path) -> int:
    """Two steps, in which the victim fails at one collective; how many there are."""
    torch.manual_seed(0)
    model = Stack()
    shard(blocks_and_all(model), Settings(failure.zero))
    optimizer = torch.optim.AdamW(model.parameters())
    launch, count = Communication.transport.launch, 0

    def counted(*arguments: Any, **others: Any) -> Any:
        nonlocal count
        count += 1
        if count - 1 == fail_at and dist.get_rank() == failure.victim:
            _misbehave(failure, directory)
        return launch(*arguments, **others)

    with mock.patch.object(Communication.transport, "launch", counted, create=True):
        for step in range(2):
            run = Run(dist.get_rank(), step, is_sharded=True)
            for number in range(2):
                weight = 1.0 + number if failure.is_weighted else None
                with run.microbatch(model, last=number == 1, weight=weight):
                    run.backward(model(run.data(2, 4, of=number)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return count


def _misbehave(failure: Failure, directory: Path) -> None:
    if failure.way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if failure.way == "stalls":
        _wait_for_all(failure, directory)
    raise OnPurposeError("on purpose")


def _wait_for_all(failure: Failure, directory: Path) -> None:
    """Until the ranks that wait for the victim have ended, so that what they say is of it."""
    others = [rank for rank in range(failure.size) if rank != failure.victim]
    deadline = time.monotonic() + 40
    while not all((directory / f"ended-{rank}").exists() for rank in others):
        if time.monotonic() > deadline:
            raise AssertionError(f"Of the ranks {others}, not all have ended.")
        time.sleep(0.01)
