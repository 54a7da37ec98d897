"""A rank stalls, dies, or calls something else: the others end in time, name it and the call, and nothing is left of it.

200 injections, 160 on PyTorch and 40 on MindSpore; a share of each in every run, all of them with `HYPER_PARALLEL_CAMPAIGN=full`.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from support import processes
from support.campaign import share
from support.communicating import Here, backend_of
from support.processes import RankError

SIZE = 4
TORCH_CALL_S = 2  # on a busy machine, too, the good calls need much less
MINDSPORE_CALL_S = 7  # above the 3 s that the first call of a group may take
GRACE_S = 5  # what the specification gives beyond the timeout


def _tensor(here: Here) -> Any:
    return here.backend.tensor(np.ones((4, 2)))


def _backward(here: Here, injection: Injection, group: Any) -> None:
    """Forward is fine on all ranks; backward is what fails."""
    here.backend.grad_of(lambda x: here.platform.differentiable_all_reduce(x, "sum", group), _tensor(here))


CALLS = {
    "all_reduce": lambda here, injection, group: here.platform.all_reduce(_tensor(here), group),
    "all_gather_into_tensor": lambda here, injection, group: here.platform.all_gather_into_tensor(_tensor(here), group),
    "reduce_scatter_tensor": lambda here, injection, group: here.platform.reduce_scatter_tensor(_tensor(here), group, True)[1].wait(),
    "broadcast": lambda here, injection, group: here.platform.broadcast(_tensor(here), injection.victim, group),
    "all_to_all_single": lambda here, injection, group: here.platform.all_to_all_single(_tensor(here), (4, 2), group, True)[1].wait(),
    "barrier": lambda here, injection, group: here.platform.barrier(group),
    "differentiable_all_reduce": _backward,
    "differentiable_all_gather_concat": lambda here, injection, group: here.platform.differentiable_all_gather_concat(
        _tensor(here), group, len(injection.ranks), 1
    ),
    "all_gather_object": lambda here, injection, group: here.platform.all_gather_object([None] * len(injection.ranks), "x", group),
    "p2p_exchange": lambda here, injection, group: here.platform.p2p_exchange(_tensor(here), injection.peer_of(here.rank), group),
}  # fmt: skip

# What else the one rank calls: of another kind, so that the frameworks themselves would not take the one for the other.
OTHERS = {"all_reduce": "all_gather_into_tensor", "barrier": "all_gather_into_tensor", "p2p_exchange": "barrier"}


class Injection(NamedTuple):
    kind: str
    call: str
    victim: int
    ranks: tuple[int, ...]
    num_good: int

    def peer_of(self, rank: int) -> int:
        return self.ranks[self.ranks.index(rank) ^ 1]

    @property
    def failing(self) -> tuple[int, ...]:
        """The ranks that wait for the one that is missing."""
        if self.call == "p2p_exchange":
            return (self.peer_of(self.victim),)
        return tuple(rank for rank in self.ranks if rank != self.victim)

    @property
    def other(self) -> str:
        return OTHERS.get(self.call, "barrier")


def injection_of(seed: int) -> Injection:
    rng = random.Random(seed)
    kind = ("stall", "die", "other")[seed % 3]
    victim = rng.randrange(SIZE)
    ranks = rng.choice([(0, 1, 2, 3), (0, 1, 2, 3), tuple({victim, (victim + rng.randrange(1, SIZE)) % SIZE})])
    return Injection(kind, rng.choice(list(CALLS)), victim, tuple(sorted(ranks)), rng.randrange(4))


def inject(framework: str, injection: Injection, directory: str) -> tuple[str, float, Any]:
    """On every rank: (what the call said, how long it took, the sum over all ranks in a new group afterwards).

    On MindSpore instead of the last what the next call says: its CPU backend cannot go on.
    """
    backend = backend_of(framework)
    with backend.active():
        here = Here(backend, "world")
        text, elapsed_s = (
            _in_the_group(here, injection, Path(directory)) if here.rank in injection.ranks else ("outside", 0.0)
        )
        if injection.kind == "die":
            return text, elapsed_s, None
        if framework == "mindspore":
            return text, elapsed_s, _refusal(here)
        _wait_for("ended", injection.ranks, Path(directory))  # the next call must not begin before this one has ended
        here.platform.barrier()
        group = here.platform._create_group(range(SIZE))
        total = float(backend.numbers(here.platform.all_reduce(backend.tensor([1.0]), group))[0])
        here.platform.destroy_process_group(group)
        return text, elapsed_s, total


def _refusal(here: Here) -> str:
    try:
        here.platform.broadcast(_tensor(here), here.rank)  # which would not wait for anyone
    except RuntimeError as error:
        return str(error)
    return ""


def _in_the_group(here: Here, injection: Injection, directory: Path) -> tuple[str, float]:
    platform = here.platform
    group = platform.split_group(None, [injection.ranks], timeout=timedelta(seconds=TORCH_CALL_S))
    try:
        for _ in range(injection.num_good + 1):  # the first call connects the ranks
            platform.all_reduce(_tensor(here), group)
        # A rank that dies takes along what it has sent and the others have not read: none may still be in the last good call.
        _say_and_wait("good", here.rank, injection.ranks, directory)
        begin = time.monotonic()
        text = "fine"
        try:
            if here.rank == injection.victim:
                _misbehave(here, injection, group, directory)
            else:
                CALLS[injection.call](here, injection, group)
        except RuntimeError as error:
            text = str(error)
        elapsed_s = time.monotonic() - begin
        _say("ended", here.rank, directory)
        return text, elapsed_s
    finally:
        platform.destroy_process_group(group)


def _misbehave(here: Here, injection: Injection, group: Any, directory: Path) -> None:
    if injection.kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif injection.kind == "other":
        CALLS[injection.other](here, injection, group)
    else:
        if injection.call == "differentiable_all_reduce":
            here.platform.differentiable_all_reduce(_tensor(here), "sum", group)  # forward only
        _wait_for("ended", injection.failing, directory)


def _say(what: str, rank: int, directory: Path) -> None:
    (directory / f"{what}-{rank}").touch()


def _say_and_wait(what: str, rank: int, ranks: tuple[int, ...], directory: Path) -> None:
    _say(what, rank, directory)
    _wait_for(what, ranks, directory)


def _wait_for(what: str, ranks: tuple[int, ...], directory: Path) -> None:
    for _ in processes._until(time.monotonic() + 40):
        if all((directory / f"{what}-{rank}").exists() for rank in ranks):
            return
    raise AssertionError(f"Of ranks {ranks}, not all have said {what!r}.")


def pool_of(framework: str) -> processes.Pool:
    """On MindSpore all groups of a process have one timeout, so these ranks are no other test's."""
    return processes.pool(framework, SIZE, call_s=MINDSPORE_CALL_S if framework == "mindspore" else None)


def check(framework: str, seed: int, directory: Path) -> None:
    injection = injection_of(seed)
    pool = pool_of(framework)
    pids = list(pool.pids)
    timeout_s = TORCH_CALL_S if framework == "torch" else MINDSPORE_CALL_S
    arguments = (inject, framework, injection, str(directory))
    if injection.kind == "die":
        with pytest.raises(RankError) as caught:
            pool.run(*arguments, deadline_s=60, grace_s=30)
        assert caught.value.failures == {injection.victim: "was ended by SIGKILL"}, caught.value
        results = caught.value.results
        assert not pool.pids
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "nothing is left running"
    else:
        results = dict(enumerate(pool.run(*arguments, deadline_s=60, grace_s=30)))
        if framework == "torch":
            assert all(total == SIZE for _, _, total in results.values()), "the next calls are right"
        else:
            pool.close()
    for rank in injection.failing:
        text, elapsed_s, after = results[rank]
        if framework == "mindspore" and injection.kind != "die":
            assert "cannot run" in after, "no wrong numbers afterwards"
            assert "End the program" in after
        assert text.startswith(f"`{injection.call}` did not finish: "), (seed, injection, rank, text)
        assert elapsed_s < timeout_s + GRACE_S, (seed, injection, rank, elapsed_s, text)
        assert f"rank {injection.victim}" in text.splitlines()[0], (seed, injection, rank, text)
        assert re.search(expected_words(injection), text.splitlines()[0]), (seed, injection, rank, text)
        for other in injection.failing:
            assert f"rank {other} " not in text.splitlines()[0], (seed, injection, rank, text)


def expected_words(injection: Injection) -> str:
    if injection.kind == "die":
        return "does not answer"
    if injection.call == "p2p_exchange":
        return "did not meet it"
    return "did not call it" if injection.kind == "stall" else f"called `{injection.other}` instead"


@pytest.mark.parametrize("seed", share(160, 9))
def test_the_others_name_the_rank_that_is_missing_on_pytorch(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    check("torch", seed, tmp_path)


@pytest.mark.parametrize("seed", share(40, 3))
def test_the_others_name_the_rank_that_is_missing_on_mindspore(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("mindspore")
    check("mindspore", 160 + seed, tmp_path)


def test_the_injections_are_of_all_kinds_and_calls() -> None:
    for seeds, least in ((range(200), 3), (range(9), 0)):
        injections = [injection_of(seed) for seed in seeds]
        assert {each.kind for each in injections} == {"stall", "die", "other"}
        assert all(sum(each.call == call for each in injections) >= least for call in CALLS)
    assert {injection_of(160 + seed).kind for seed in range(3)} == {"stall", "die", "other"}
    assert {each.victim for each in map(injection_of, range(9))} == {0, 1, 2, 3}


# A rank that is stopped does not answer, and neither does the store that it holds


def wait_for_a_stopped_rank(framework: str, victim: int, directory: str) -> tuple[str, float]:
    here = Here(backend_of(framework), "world")
    group = here.platform.split_group(None, [range(SIZE)], timeout=timedelta(seconds=TORCH_CALL_S))
    here.platform.barrier(group)
    _say_and_wait("good", here.rank, tuple(range(SIZE)), Path(directory))
    if here.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    begin = time.monotonic()
    text = "fine"
    try:
        here.platform.barrier(group)
    except RuntimeError as error:
        text = str(error)
    elapsed_s = time.monotonic() - begin
    here.platform.destroy_process_group(group)
    return text, elapsed_s


@pytest.mark.parametrize("victim", share(4, 1))
@pytest.mark.parametrize(("framework", "timeout_s"), [("torch", TORCH_CALL_S), ("mindspore", MINDSPORE_CALL_S)])
def test_a_rank_that_is_stopped_is_named_even_if_it_holds_the_store(
    framework: str, timeout_s: float, victim: int, tmp_path: Path
) -> None:
    pytest.importorskip(framework)
    with pytest.raises(RankError) as caught:
        pool_of(framework).run(
            wait_for_a_stopped_rank, framework, victim, str(tmp_path), deadline_s=timeout_s + GRACE_S + 10
        )
    assert caught.value.failures == {victim: "hangs"}
    for text, elapsed_s in caught.value.results.values():
        assert re.match(f"`barrier` did not finish: rank {victim}[^;]* does not answer", text)
        assert elapsed_s < timeout_s + GRACE_S, text


# Under msrun the ranks meet at its scheduler, where they cannot ask each other


def meet_again(framework: str) -> tuple[int, bytes]:
    from hyper_parallel.platform.mindspore.communication import starting

    here = Here(backend_of(framework), "world")
    store = starting._met_again(timedelta(seconds=20))
    if here.rank == 0:
        store.set("answer", "42")
    answer = store.get("answer")
    here.platform.barrier()
    return int(store.add("ranks", 1)) and here.rank, answer


def test_ranks_that_msrun_brought_together_get_a_store_at_which_they_can_ask_each_other() -> None:
    pytest.importorskip("mindspore")
    found = processes.pool("mindspore", 2).run(meet_again, "mindspore")
    assert [(rank, bytes(answer)) for rank, answer in found] == [(0, b"42"), (1, b"42")]
