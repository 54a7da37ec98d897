"""Pipelines in which one rank fails: at any action, in a hook of either side of a pair, in the loss. Runs in the workers
of `support.processes`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.parallel.pipeline.exchange import Exchange
from hyper_parallel.core.parallel.pipeline.running import _Step
from support import pipeline_programs as programs
from support.schedule_names import SCHEDULES

CALL_S = 3  # how long a call waits for other ranks
HOOK_S = 3  # how long a side of a pair waits for the other one
STALL_S = 5


class Failure(NamedTuple):
    """What fails, where and how."""

    schedule: str
    num_ranks: int
    victim: int
    where: str  # "action", "hook", "loss"
    at: float  # which of them, as a share of all that come
    way: str  # "raises", "dies", "stalls"
    in_step: int


def failure_of(seed: int) -> Failure:
    choose = random.Random(f"failure {seed}")
    where = choose.choice(["action", "action", "action", "hook", "hook", "loss"])
    schedule = "dualpipe_v" if where == "hook" else choose.choice(sorted(SCHEDULES))
    num_ranks = 2 if where == "hook" else choose.choice([2, 2, 2, 4])
    victim = choose.randrange(num_ranks)
    way = ("raises", "dies", "stalls")[seed % 3]
    return Failure(schedule, num_ranks, victim, where, choose.random(), way, choose.randrange(2))


class Counted:
    """Fails at the `number`-th call, counted over all threads."""

    def __init__(self, number: int, way: str) -> None:
        self.number, self.way, self.count = number, way, 0
        self._lock = threading.Lock()

    def pass_by(self) -> None:
        with self._lock:
            is_here = self.count == self.number
            self.count += 1
        if not is_here:
            return
        if self.way == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.way == "raises":
            raise ValueError("on purpose")
        time.sleep(STALL_S)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.pass_by()
            return function(*args, **kwargs)

        return called


class FailingCoordinator(hp.HookCoordinator):
    """Passes by a `Counted` whenever a side enters or leaves a role."""

    counted: Counted | None = None

    def rendezvous(self, role: str) -> None:
        if self.counted is not None:
            self.counted.pass_by()
        super().rendezvous(role)

    def notify_dispatched(self, role: str) -> None:
        if self.counted is not None:
            self.counted.pass_by()
        super().notify_dispatched(role)


def run(seed: int) -> tuple[str, float, bool]:
    """What this rank raises, after how many seconds, and whether what was to fail has come."""
    failure = failure_of(seed)
    coordinator = FailingCoordinator(timeout=HOOK_S) if failure.where == "hook" else None
    schedule = SCHEDULES[failure.schedule](failure.num_ranks, 2 * failure.num_ranks)
    rank = hp.get_platform().get_rank()
    batch = [part for _ in range(failure.num_ranks) for part in programs.equal_batch(0)][: 2 * failure.num_ranks]
    make = (lambda: programs.Experts(coordinator, [])) if coordinator else (lambda: programs.Stage(programs.simple))
    stages = [
        hp.PipelineStage(_double(make()), index, schedule.num_stages) for index in schedule.placement.stages_on(rank)
    ]
    loss = Counted(-1, failure.way)
    pipeline = hp.Pipeline(stages, schedule, loss_fn=loss.around(programs.mean_square), coordinator=coordinator)
    action = Counted(-1, failure.way)
    begin = time.monotonic()
    with (
        mock.patch.object(_Step, "_do", action.around(_Step._do)),
        mock.patch.object(Exchange, "launch_receive", action.around(Exchange.launch_receive)),
    ):
        counted = {"action": action, "hook": Counted(-1, failure.way), "loss": loss}[failure.where]
        if coordinator is not None:
            coordinator.counted = counted
        try:
            pipeline.step_of(batch)  # in it, all that comes in a step is counted
            if rank == failure.victim:
                counted.number = int((1 + failure.in_step + failure.at) * counted.count)
            for _ in range(2):
                pipeline.step_of(batch)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - begin, counted.count > counted.number >= 0
    return "", time.monotonic() - begin, counted.count > counted.number >= 0


def _double(module: nn.Module) -> nn.Module:
    return module.double()
