"""The pools of processes that tests of parallel training use: what they find, and that they recover."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import processes
from support.processes import RankError

pytest.importorskip("torch")

TWO = processes.pool("torch", 2)


# What the workers run


def where_am_i(*args: Any, **kwargs: Any) -> dict[str, Any]:
    import torch.distributed as dist

    return {"rank": dist.get_rank(), "size": dist.get_world_size(), "pid": os.getpid(), "args": args, "kwargs": kwargs}


def sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total.item()


def raise_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise KeyError(f"no such layer on rank {rank}")
    dist.barrier()


def hang_on(rank: int) -> None:
    import torch.distributed as dist

    print("about to look for a lock", flush=True)
    if dist.get_rank() == rank:
        threading.Event().wait()
    dist.barrier()


def end_on(rank: int, code: int) -> None:
    import torch.distributed as dist

    print("these are the last words", flush=True)
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def kill_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_behind(what: str) -> None:
    import torch
    import torch.distributed as dist

    if what == "group":
        dist.new_group([0, 1])
    elif what == "thread":
        threading.Thread(target=time.sleep, args=(60,), name="left").start()
    elif what == "world":
        dist.destroy_process_group()
    else:
        import hyper_parallel as hp
        from hyper_parallel.core.swap.config import configure_swap

        leaf = torch.ones(64, requires_grad=True)
        with configure_swap(disk_dir=what, min_bytes=1):
            kept.append(hp.swap_wrapper(torch.exp)(leaf))


kept: list[Any] = []


def give_what_cannot_be_sent() -> Any:
    return lambda: None


class Nested:
    @staticmethod
    def function() -> str:
        return "found"


# Calls


def test_a_function_runs_on_every_rank_with_its_arguments() -> None:
    found = TWO.run(where_am_i, 1, (2, "three"), four=[5])
    assert [each["rank"] for each in found] == [0, 1]
    assert all(each["size"] == 2 and each["args"] == (1, (2, "three")) for each in found)
    assert all(each["kwargs"] == {"four": [5]} for each in found)
    assert [each["pid"] for each in found] == TWO.pids
    assert os.getpid() not in TWO.pids


def test_ranks_talk_to_each_other() -> None:
    assert TWO.run(sum_of_ranks) == [3.0, 3.0]


def test_workers_live_from_call_to_call() -> None:
    TWO.run(where_am_i)
    pids = TWO.pids
    TWO.run(where_am_i)
    assert TWO.pids == pids
    assert processes.pool("torch", 2) is TWO


def test_a_function_in_a_class_is_found() -> None:
    assert TWO.run(Nested.function) == ["found", "found"]


# What goes wrong, and that the next call is right


def check_healthy(broken: list[int]) -> None:
    assert not any(map(is_running, broken))
    assert TWO.run(sum_of_ranks) == [3.0, 3.0]
    assert not set(TWO.pids) & set(broken)


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in processes._until(time.monotonic() + 10):
        if condition():
            return
    raise AssertionError("it did not happen within 10 s")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_named_with_its_traceback(rank: int) -> None:
    TWO.run(where_am_i)
    pids = TWO.pids
    with pytest.raises(RankError) as caught:
        TWO.run(raise_on, rank, grace_s=3)  # time for the other one to reach the barrier
    text = str(caught.value)
    assert caught.value.failures[rank] == f"raised KeyError: 'no such layer on rank {rank}'"
    assert caught.value.failures[1 - rank] == f"hangs waiting for rank {rank}"
    assert "raise_on" in text.splitlines()[0]
    assert "in raise_on\n" in text
    assert "barrier" in text, "where the other rank waits"
    check_healthy(pids)


def test_a_rank_that_hangs_is_named_with_the_place() -> None:
    TWO.run(where_am_i)
    pids = TWO.pids
    with pytest.raises(RankError) as caught:
        TWO.run(hang_on, 1, deadline_s=2)
    assert caught.value.failures == {0: "hangs", 1: "hangs"}
    text = str(caught.value)
    assert "in hang_on" in text.partition("rank 1 hangs")[2]
    assert "in wait" in text.partition("rank 1 hangs")[2]
    assert "about to look for a lock" in text
    check_healthy(pids)


def test_a_rank_that_exits_is_named_with_its_code_and_its_last_words() -> None:
    TWO.run(where_am_i)
    pids = TWO.pids
    with pytest.raises(RankError, match="these are the last words") as caught:
        TWO.run(end_on, 1, 7)
    assert caught.value.failures[1] == "ended with exit code 7"
    check_healthy(pids)


def test_a_rank_that_is_killed_is_named_with_the_signal() -> None:
    TWO.run(where_am_i)
    pids = TWO.pids
    with pytest.raises(RankError) as caught:
        TWO.run(kill_on, 0)
    assert caught.value.failures[0] == "was ended by SIGKILL"
    check_healthy(pids)


def test_a_rank_that_died_between_calls_is_replaced() -> None:
    TWO.run(where_am_i)
    pids = TWO.pids
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: TWO._workers[1].has_ended())
    assert TWO.run(sum_of_ranks) == [3.0, 3.0]
    assert not set(TWO.pids) & set(pids)


def test_a_nursery_that_died_is_replaced_and_its_workers_die_with_it() -> None:
    pool = processes.pool("none", 2)
    (nursery,) = set(pool.run(os.getppid))  # which may have been there before this test
    assert nursery in processes.KEPT
    pids = pool.pids
    os.kill(nursery, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, pids)))
    assert pool.run(os.getpid) == pool.pids
    assert nursery not in processes.KEPT


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RankError, match="lambda"):
        TWO.run(give_what_cannot_be_sent)
    assert TWO.run(sum_of_ranks) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("group", "process group .* of ranks \\[0, 1\\]"),
        ("thread", "thread left"),
        ("world", "no process group"),
        ("bytes", "swap engine still holds bytes"),
    ],
)
def test_what_a_function_leaves_behind_is_a_failure(what: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=words) as caught:
        TWO.run(leave_behind, str(tmp_path) if what == "bytes" else what)
    assert sorted(caught.value.failures) == [0, 1]
    assert TWO.run(sum_of_ranks) == [3.0, 3.0]


# The end


@pytest.mark.parametrize("how", ["end", "kill"])
def test_nothing_outlives_the_process_that_started_it(how: str, tmp_path: Path) -> None:
    program = """
import os, sys
from support import processes
pool = processes.pool("none", 2)
print(*pool.run(os.getpid), *processes.KEPT, flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
"""
    environment = {**processes.worker_environment(), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, how], capture_output=True, text=True, timeout=60, env=environment
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    wait_until(lambda: not any(map(is_running, pids)))
    assert list(tmp_path.iterdir()) == []


def test_a_framework_without_workers_is_an_error() -> None:
    with pytest.raises(ValueError, match="'jax'"):
        processes.pool("jax", 2)


def test_a_program_that_hangs_is_ended_at_its_deadline() -> None:
    with pytest.raises(AssertionError, match="did not end within 1 s. Its output:\nhello"):
        processes.run_program(["sh", "-c", "echo hello; sleep 60"], deadline_s=1)


def test_a_program_that_fails_shows_its_output() -> None:
    with pytest.raises(AssertionError, match="exit code 3(.|\n)*bad luck"):
        processes.run_program([sys.executable, "-c", "print('bad luck'); exit(3)"], deadline_s=60)
