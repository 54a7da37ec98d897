"""Who is missing: the words, for every combination of what ranks can answer, and the exchange over a store, without a framework."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_parallel._base.errors import CommunicationError
from hyper_parallel.platform.communication import board as board_module
from hyper_parallel.platform.communication import roll_call as roll_call_module
from hyper_parallel.platform.communication.answers import Answer, Failure, explain, ranks_in_words
from hyper_parallel.platform.communication.board import Board
from hyper_parallel.platform.communication.roll_call import CallEntry, RollCall

# The words

STATES = {
    "silent": (None, "does not answer"),
    "behind": (Answer(4, ("barrier",), 4, ""), "did not call it (its last call in this group was `barrier`; it is in no call now)"),
    "new": (Answer(0, (), 0, "`isend` of ranks 0, 1"), "did not call it (it has called nothing in this group; it is in `isend`"),
    "other": (Answer(5, ("barrier", "broadcast"), 4, ""), "called `broadcast` instead"),
    "ahead of another": (Answer(6, ("broadcast", "barrier"), 6, ""), "called `broadcast` instead"),
    "there": (Answer(5, ("barrier", "all_reduce"), 4, "`all_reduce` of ranks 0, 1, 2, 3"), ""),
    "done": (Answer(7, ("all_reduce", "barrier", "barrier"), 6, ""), ""),
    "long ago": (Answer(40, ("barrier",), 39, ""), ""),
}  # fmt: skip


def test_exactly_those_ranks_are_blamed_that_are_the_reason() -> None:
    for states in itertools.product(STATES, repeat=3):
        answers = {rank: STATES[state][0] for rank, state in enumerate(states) if STATES[state][0] is not None}
        answers[3] = Answer(5, ("all_reduce",), 4, "")
        error = explain(Failure("all_reduce", 5, 3, (0, 1, 2, 3)), answers, "Connection closed.\nMore.")
        first, second, third = str(error).splitlines()
        silent = re.search(r": ranks? ([\d, ]+) do(?:es)? not answer \(ended, or stopped\)", first)
        wanted = [str(rank) for rank in range(3) if states[rank] == "silent"]
        assert ([] if silent is None else silent[1].split(", ")) == wanted, states
        for rank, state in enumerate(states):
            words = STATES[state][1]
            assert state == "silent" or (f"rank {rank} {words or 'c'}" in first) == bool(words), states
        blamed = [rank for rank, state in enumerate(states) if STATES[state][1]]
        if blamed:
            silent_first = sorted(blamed, key=lambda rank, states=states: (states[rank] != "silent", rank))
            assert f"the output of {ranks_in_words(silent_first)}." in third
        else:
            assert first == "`all_reduce` did not finish, though every rank called it."
        assert second == "Expected ranks 0, 1, 2, 3 in call 5 of the group, got on rank 3: Connection closed."


def test_a_pair_names_its_other_rank_and_what_that_is_in() -> None:
    failure = Failure("irecv", 9, 1, (1, 0), is_pair=True)
    error = explain(
        failure, {0: Answer(0, (), 0, "`barrier` of ranks 0, 1"), 1: Answer(9, ("irecv",), 8, "")}, "Timed out"
    )
    assert "rank 0 did not meet it (it is in `barrier` of ranks 0, 1)" in str(error)
    assert "rank 0 does not answer" in str(explain(failure, {}, "Timed out"))


def test_of_what_gloo_says_only_what_happened_is_repeated() -> None:
    said = (
        "[/pytorch/third_party/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:947: Connection reset by peer. "
        "This is typically caused by a remote worker hanging or bugs in the application. GLHF! 🏖️"
    )
    error = explain(Failure("all_reduce", 2, 0, (0, 1)), {}, said)
    assert str(error).splitlines()[1].endswith("got on rank 0: Read error [127.0.0.1]:947: Connection reset by peer.")
    assert "no reason given" in str(explain(Failure("barrier", 1, 0, (0, 1)), {}, " \n"))


def test_a_store_that_is_silent_names_the_rank_that_holds_it() -> None:
    failure = Failure("barrier", 1, 2, (0, 2))
    assert "rank 0, which holds the store, does not answer" in str(explain(failure, None, "x", silent_holder=0))
    others = Failure("barrier", 1, 2, (1, 2))
    assert "could not be asked" in str(explain(others, None, "x", silent_holder=0))
    assert "could not be asked" in str(explain(failure, None, ""))


def test_many_ranks_are_not_all_listed() -> None:
    assert ranks_in_words(range(100)).endswith("14, 15, … (100 in all)")


def test_an_answer_survives_the_store() -> None:
    answer = Answer(5, ("barrier", "all_reduce"), 4, "`x`", ("", "float32[4]"))
    assert Answer.from_json(answer.to_json()) == answer
    assert Answer.from_json(answer.to_json().encode()) == answer


# The exchange


class FakeStore:
    """A store in memory. `hangs` and `is_gone` stand for what happens to one whose holder is stopped, or ends."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.counters: dict[str, int] = {}
        self.changed = threading.Condition()
        self.hangs = threading.Event()
        self.goes_on = threading.Event()
        self.is_gone = False
        self.users: set[int] = set()
        self.listeners: set[int] = set()  # who knows how many alarms there were, and hears of the next one

    def _enter(self) -> None:
        self.users.add(threading.get_ident())
        if self.hangs.is_set():
            self.goes_on.wait()
        if self.is_gone:
            raise RuntimeError("Broken pipe")

    def add(self, key: str, amount: int, /) -> int:
        self._enter()
        with self.changed:
            self.counters[key] = self.counters.get(key, 0) + amount
            if key == "hyper_parallel/alarms":
                self.listeners.add(threading.get_ident())
            return self.counters[key]

    def set(self, key: str, value: str, /) -> None:
        self._enter()
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str, /) -> bytes:
        self._enter()
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, 30)
            return self.values[key].encode()


class World:
    """Ranks of one process: each has its own roll call, and the store between them."""

    def __init__(self, size: int) -> None:
        self.store = FakeStore()
        self.ranks = tuple(range(size))
        self.calls = [RollCall(rank, self.store, store_holder=0) for rank in self.ranks]

    def enter(self, rank: int, call: str, group: str = "world", ranks: tuple[int, ...] | None = None) -> CallEntry:
        roll_call = self.calls[rank]
        return roll_call.enter(roll_call.log(group, ranks or self.ranks), call)

    def close(self) -> None:
        self.store.goes_on.set()
        for roll_call in self.calls:
            roll_call.stop()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(roll_call_module, "POLL_S", 0.02)
    monkeypatch.setattr(roll_call_module, "GRACE_S", 10)  # nobody waits for it where all answer
    monkeypatch.setattr(roll_call_module, "CLOSE_S", 10)
    made = World(4)
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("roll call")]


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def all_ready(world: World) -> None:
    """Every rank has made one good call, and its clerk is listening."""
    for rank in world.ranks:
        record = world.enter(rank, "barrier")
        record.log.num_done = 1
    wait_until(lambda: len(world.store.listeners) == len(world.ranks))


def test_a_rank_that_did_not_call_is_named_with_its_last_call(world: World) -> None:
    all_ready(world)
    records = {rank: world.enter(rank, "all_reduce") for rank in (0, 1, 3)}
    error = world.calls[0].explain(records[0], RuntimeError("Timed out"))
    assert isinstance(error, CommunicationError)
    assert "rank 2 did not call it (its last call in this group was `barrier`; it is in no call now)." in str(error)
    # The others hear of it, and their waits are in vain from then on.
    assert all(world.calls[rank].is_alarmed(records[rank]) for rank in (1, 3))
    assert "rank 2 did not call it" in str(world.calls[1].explain(records[1], RuntimeError("ended")))
    # The late one is told at once.
    with pytest.raises(CommunicationError, match="cannot run: `all_reduce` failed on rank 0 in this group before"):
        world.enter(2, "all_reduce")


def test_a_rank_that_called_something_else_is_named_with_it(world: World) -> None:
    all_ready(world)
    records = [world.enter(rank, "broadcast" if rank == 1 else "all_reduce") for rank in world.ranks]
    assert "rank 1 called `broadcast` instead" in str(world.calls[3].explain(records[3], RuntimeError("x")))
    text = str(world.calls[1].explain(records[1], RuntimeError("x")))
    assert all(f"rank {rank} called `all_reduce` instead" in text for rank in (0, 2, 3))


def test_a_rank_that_is_busy_in_another_group_is_named_with_that(world: World) -> None:
    all_ready(world)
    world.enter(2, "barrier", "pair", (2, 3))
    record = world.enter(0, "all_reduce")
    for rank in (1, 3):
        world.enter(rank, "all_reduce")
    text = str(world.calls[0].explain(record, RuntimeError("x")))
    assert "rank 2 did not call it" in text
    assert "it is in `barrier` of ranks 2, 3" in text


def test_a_rank_that_has_ended_does_not_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call_module, "GRACE_S", 2)
    all_ready(world)
    world.calls[2].stop()
    record = world.enter(0, "all_reduce")
    text = str(world.calls[0].explain(record, RuntimeError("Connection closed")))
    assert "rank 2 does not answer (ended, or stopped)" in text


def test_another_group_is_left_alone(world: World) -> None:
    all_ready(world)
    other = world.enter(1, "barrier", "pair", (0, 1))
    record = world.enter(0, "all_reduce")
    world.calls[0].explain(record, RuntimeError("x"))
    assert not world.calls[1].is_alarmed(other)
    assert world.enter(1, "barrier", "pair", (0, 1)).number == 2


def test_a_failed_pair_breaks_no_group_and_can_fail_again(world: World) -> None:
    all_ready(world)
    roll_call = world.calls[0]
    log = roll_call.log("world/pairs", world.ranks, is_pair=True)
    for _ in range(2):
        record = roll_call.enter(log, "irecv", (0, 1))
        assert "rank 1 did not meet it (it is in no call now)" in str(roll_call.explain(record, RuntimeError("x")))
    assert world.enter(1, "all_reduce").number == 2


def test_where_one_failure_breaks_everything_later_calls_in_any_group_are_refused(world: World) -> None:
    for roll_call in world.calls:
        roll_call._breaks_all = True
    all_ready(world)
    record = world.enter(0, "all_reduce")
    world.calls[0].explain(record, RuntimeError("x"))
    for rank in (0, 1):
        with pytest.raises(
            CommunicationError, match="(?s)cannot run: `all_reduce` failed on rank 0 before.*End the program"
        ):
            world.enter(rank, "barrier", "pair", (0, 1))


def test_a_store_that_hangs_holds_nobody_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call_module, "GRACE_S", 0.5)
    all_ready(world)
    world.store.hangs.set()
    record = world.enter(1, "all_reduce")
    begin = time.monotonic()
    text = str(world.calls[1].explain(record, RuntimeError("x")))
    assert "rank 0, which holds the store, does not answer" in text
    assert time.monotonic() - begin < 10, "the grace of this test is half a second, and the store hangs to its end"


def test_a_store_that_is_gone_names_its_holder_and_ends_the_waits_for_it(world: World) -> None:
    all_ready(world)
    record = world.enter(1, "all_reduce")
    other = world.enter(1, "barrier", "pair", (1, 2))
    world.store.is_gone = True
    wait_until(lambda: world.calls[1].is_alarmed(record))
    assert not world.calls[1].is_alarmed(other), "rank 0 is not in it"
    assert "rank 0, which holds the store, does not answer" in str(world.calls[1].explain(record, RuntimeError("x")))
    assert "could not be asked" in str(world.calls[1].explain(other, RuntimeError("x")))


def test_a_holder_that_ends_waits_until_the_others_have_let_go_of_the_store(world: World) -> None:
    all_ready(world)
    record = world.enter(1, "all_reduce")
    world.calls[0].stop()
    world.store.is_gone = True  # from now on every use would be noise
    wait_until(lambda: not any(roll_call._clerk.is_alive() for roll_call in world.calls[1:]))
    assert not any(roll_call._is_store_lost for roll_call in world.calls)
    assert not world.calls[1].is_alarmed(record), "what is on its way may still arrive"
    assert "rank 0, which holds the store, does not answer" in str(world.calls[1].explain(record, RuntimeError("x")))


def test_only_the_clerk_uses_the_store(world: World) -> None:
    all_ready(world)
    record = world.enter(0, "all_reduce")
    world.calls[0].explain(record, RuntimeError("x"))
    assert threading.get_ident() not in world.store.users
    assert len(world.store.users) == len(world.ranks)


def test_a_group_that_was_destroyed_is_forgotten(world: World) -> None:
    all_ready(world)
    world.enter(0, "barrier", "pair", (0, 1))
    world.calls[0].log("pair/pairs", (0, 1), is_pair=True)
    world.calls[0].forget("pair")
    assert list(world.calls[0].logs) == ["world"]


def test_a_rank_that_has_destroyed_the_group_still_tells_what_it_called_in_it(world: World) -> None:
    all_ready(world)
    records = [world.enter(rank, "all_reduce") for rank in world.ranks]
    world.calls[2].forget("world")
    assert "though every rank called it" in str(world.calls[0].explain(records[0], RuntimeError("x")))


def test_without_a_store_the_error_says_that_nobody_could_be_asked() -> None:
    roll_call = RollCall(0, None)
    record = roll_call.enter(roll_call.log("world", (0, 1)), "barrier")
    assert "could not be asked" in str(roll_call.explain(record, RuntimeError("x")))


def test_old_alarms_are_not_answered_by_a_new_process(world: World) -> None:
    world.store.counters["hyper_parallel/alarms"] = 3  # their records are long gone
    all_ready(world)
    record = world.enter(0, "all_reduce")
    for rank in (1, 2, 3):
        world.enter(rank, "all_reduce")
    assert "though every rank called it" in str(world.calls[0].explain(record, RuntimeError("x")))


def test_a_rank_that_called_it_with_another_size_is_named_with_both(world: World) -> None:
    all_ready(world)
    records = []
    for rank in world.ranks:
        roll_call = world.calls[rank]
        like = ("torch.float32", [8 if rank == 2 else 4])
        records.append(roll_call.enter(roll_call.log("world", world.ranks), "all_reduce", like=like))
    text = str(world.calls[0].explain(records[0], RuntimeError("Connection closed")))
    assert text.startswith(
        "`all_reduce` did not finish: rank 2 called it with float32[8], and this rank with float32[4]."
    )
    text = str(world.calls[2].explain(records[2], RuntimeError("x"))).splitlines()[0]
    assert all(f"rank {rank} called it with float32[4], and this rank with float32[8]" in text for rank in (0, 1, 3))


def test_a_call_that_could_not_begin_counts_and_is_named_as_that(world: World) -> None:
    all_ready(world)
    records = [world.enter(rank, "all_reduce") for rank in world.ranks]
    world.calls[1].refuse(records[1])
    assert records[1].log.num_done == 2
    text = str(world.calls[0].explain(records[0], RuntimeError("x")))
    assert "rank 1 called `all_reduce (it could not begin)` instead" in text


def test_a_rank_whose_first_call_comes_after_the_alarm_answers_it_and_its_call_fails(world: World) -> None:
    """It makes its first call in another group, and only then the one that has failed."""
    late = world.calls[3]
    records = []
    for rank in (0, 1, 2):
        record = world.enter(rank, "barrier")
        record.log.num_done = 1
        records.append(record)
    wait_until(lambda: len(world.store.listeners) == 3)
    answer: list[str] = []
    asking = threading.Thread(target=lambda: answer.append(str(world.calls[0].explain(records[0], RuntimeError("x")))))
    asking.start()
    wait_until(lambda: "hyper_parallel/alarm/1" in world.store.values)
    late.log("pair", (2, 3))
    asking.join()
    assert "rank 3 did not call it (it has called nothing in this group; it is in no call now)" in answer[0]
    wait_until(lambda: "world" in late.logs)
    with pytest.raises(CommunicationError, match="cannot run: `barrier` failed on rank 0"):
        world.enter(3, "barrier")


# The board


def boards(num_ranks: int) -> list[Board]:
    memory = mmap.mmap(-1, num_ranks * 64 * 128)
    return [Board(memory, rank) for rank in range(num_ranks)]


def test_the_board_finds_a_rank_that_began_another_call() -> None:
    first, second, third = boards(3)
    first.write("world", 1, "barrier")
    assert first.find_other("world", 1, "barrier", (0, 1, 2)) is None, "who has written nothing is not judged"
    second.write("world", 1, "all_reduce of float32[2]")
    third.write("world", 1, "barrier")
    assert first.find_other("world", 1, "barrier", (0, 1, 2)) == (1, "all_reduce of float32[2]")
    assert first.find_other("world", 1, "barrier", (0, 2)) is None
    assert second.find_other("world", 1, "all_reduce of float32[2]", (0, 1, 2)) == (0, "barrier")


def test_the_board_compares_the_same_call_of_the_same_group_only() -> None:
    first, second = boards(2)
    for number in range(1, 200):  # more than it has room for
        first.write("world", number, f"call {number}")
        assert first.find_other("world", number, f"call {number}", (0, 1)) is None
        assert first.find_other("other", number, "x", (0, 1)) is None
        second.write("world", number, f"call {number}")
        assert second.find_other("world", number, f"call {number}", (0, 1)) is None
    assert first.find_other("world", 3, "x", (0, 1)) is None, "too long ago"
    long = "all_gather_into_tensor of " + "1, " * 100
    first.write("world", 200, long)
    second.write("world", 200, long)
    assert first.find_other("world", 200, long, (0, 1)) is None


def join_all(store: FakeStore) -> list[Board | None]:
    found: list[Board | None] = [None] * 3
    threads = [
        threading.Thread(target=lambda rank=rank: found.__setitem__(rank, Board.join(store, rank, 3)))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_of_one_machine_share_a_board_and_others_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    together = join_all(FakeStore())
    assert all(together)
    together[0].write("world", 1, "barrier")
    assert together[2].find_other("world", 1, "broadcast", (0, 1, 2)) == (0, "barrier")

    here = threading.local()
    machine_of = {0: "here", 1: "here", 2: "there"}
    monkeypatch.setattr(board_module, "_machine", lambda: machine_of[here.rank])
    original = Board.join

    def join(store: FakeStore, rank: int, num_ranks: int) -> Board | None:
        here.rank = rank
        return original(store, rank, num_ranks)

    monkeypatch.setattr(Board, "join", join)
    apart = join_all(FakeStore())
    assert [board is not None for board in apart] == [True, True, False], "the third is on another machine"


def sealed_memory(num_bytes: int) -> int:
    descriptor = os.memfd_create("of another program", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


@pytest.mark.parametrize(
    "named", ["a file", "a file by its descriptor", "a file that was deleted", "shorter memory", "memory that can shrink",
              "a device", "nothing", "another text", "no text at all"]
)  # fmt: skip
def test_a_store_can_name_no_file_for_the_board_to_write_to(named: str, tmp_path: Path) -> None:
    num_bytes = 3 * 64 * 128
    file = tmp_path / "mine"
    file.write_bytes(bytes(range(256)) * (num_bytes // 256))
    before = file.read_bytes()
    if named == "shorter memory":
        descriptor = sealed_memory(num_bytes - 1)
    elif named == "memory that can shrink":
        descriptor = os.memfd_create("not sealed")
        os.ftruncate(descriptor, num_bytes)
    else:
        descriptor = os.open("/dev/null" if named == "a device" else file, os.O_RDWR)
    if named == "a file that was deleted":
        file.unlink()
    own = f"/proc/{os.getpid()}/fd/{descriptor}"
    path = {"a file": str(file), "nothing": f"{own}9999", "another text": f"{own}/../{descriptor}"}.get(named, own)
    store = FakeStore()
    try:
        store.set(
            "hyper_parallel/board", f"{board_module._machine()} {path}" if named != "no text at all" else "\udcff\0"
        )
        store.get = lambda key: store.values[key].encode(errors="surrogateescape")  # type: ignore[method-assign]
        assert Board.join(store, 1, 3) is None
        os.lseek(descriptor, 0, os.SEEK_SET)
        assert (
            named in ("shorter memory", "memory that can shrink", "a device")
            or os.read(descriptor, num_bytes) == before
        )
    finally:
        os.close(descriptor)
