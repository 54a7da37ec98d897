"""Schedules as PyTorch's CSV, both ways, against PyTorch's own reader and writer, and what is wrong in its own schedules."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel import Schedule, ScheduleError
from hyper_parallel.core.parallel.pipeline.actions import Kind

MADE = {
    "gpipe": (3, 4), "one_f_one_b": (3, 4), "interleaved": (3, 4, 2), "zb_h1": (3, 4), "zbv": (3, 5), "dualpipe": (2, 4), "dualpipe_v": (2, 5),
}  # fmt: skip


@pytest.fixture
def theirs() -> Any:
    """PyTorch's module of schedules."""
    return pytest.importorskip("torch.distributed.pipelining.schedules", exc_type=ImportError)


@pytest.fixture
def of_theirs(theirs: Any) -> Any:
    """`of_theirs(name, p, m, v)`: the lists that one of PyTorch's schedules has, made without ranks; `options` as its own function's."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer", exc_type=ImportError)

    def make(name: str, p: int, m: int, v: int | None = None, **options: bool) -> list[list[Any]]:
        found: list[list[Any]] = visualizer.get_schedule_ops(name, p, m, num_stages_per_rank=v, **options)
        return found

    return make


def as_ours(lists: list[list[Any]]) -> Schedule:
    return Schedule.of([[str(action) for action in actions if action is not None] for actions in lists])


def made(name: str) -> Schedule:
    schedule: Schedule = getattr(hp.schedules, name)(*MADE[name])
    return schedule


def in_theirs(schedule: Schedule, theirs: Any) -> dict[int, list[Any]]:
    lines = schedule.to_csv().splitlines()
    return {rank: [theirs._Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(lines)}


# -- both ways -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("zero", [None, 0, 3])
def test_what_is_saved_is_read_again(name: str, zero: int | None, tmp_path: Path) -> None:
    schedule = made(name) if zero is None else made(name).lower(zero=zero)
    path = schedule.save(tmp_path / f"{name}.csv")
    assert Schedule.load(path) == schedule


@pytest.mark.parametrize("name", MADE)
def test_pytorch_reads_and_writes_every_action_as_we_do(name: str, theirs: Any) -> None:
    for line in made(name).lower(zero=3).to_csv().splitlines():
        for cell in line.split(","):
            assert str(theirs._Action.from_str(cell)) == cell


@pytest.mark.parametrize("name", sorted({*MADE} - {"dualpipe"}))
def test_pytorch_accepts_our_schedules(name: str, theirs: Any) -> None:
    schedule = made(name)
    homes = theirs._validate_schedule(
        in_theirs(schedule, theirs), schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    )
    assert homes == dict(enumerate(schedule.placement.routes[0]))


@pytest.mark.parametrize("name", sorted({*MADE} - {"dualpipe", "dualpipe_v"}))  # its simulation knows no pairs
def test_pytorch_simulates_our_sends_to_the_end(name: str, theirs: Any) -> None:
    lowered = made(name).lower()
    transfers = {Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B}
    lists = tuple(tuple(a for a in actions if a.is_compute or a.kind in transfers) for actions in lowered.ranks)
    done = theirs._simulate_comms_compute(
        in_theirs(replace(lowered, ranks=lists), theirs), lowered.placement.routes[0].__getitem__, lowered.num_stages
    )
    assert [sum(action is not None for action in done[rank]) for rank in sorted(done)] == [*map(len, lists)]


def test_pytorch_knows_no_stage_at_two_ranks(theirs: Any) -> None:
    actions = in_theirs(made("dualpipe"), theirs)
    with pytest.raises(AssertionError, match="is assigned to both rank"):
        theirs._validate_schedule(actions, 2, 2, 4)


def test_empty_cells_spaces_and_ends_of_lines_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "spaced.csv"
    path.write_bytes("\ufeff0F0, 0F1 ,,0B0,0B1\r\n,1F0,1B0,1F1,1B1\r\n\r\n".encode())
    schedule = Schedule.load(path)
    assert schedule == Schedule.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], name="spaced")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"0F0,0B0\n1F0,1Q0\n", "line 2, cell 2"), (b"0F0x\n", "line 1, cell 1"), (b"\xff\xfe\x00", "no CSV of a schedule"),
        (b'"0F0\n', "no CSV of a schedule"), (b"", "There is no forward"), (b"0F0;0B0\n", "line 1, cell 1"), (b"0F999999,0B0\n", "Microbatches are missing"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_schedule_is_refused_in_words(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.csv"
    path.write_bytes(content)
    with pytest.raises(hp.HyperParallelError, match=words) as raised:
        Schedule.load(path)
    assert isinstance(raised.value, ValueError)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Schedule.load(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="a folder"):
        Schedule.load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="a device or a pipe"):
        Schedule.load(tmp_path / "pipe")


# -- PyTorch's own -------------------------------------------------------------------------------------------------------------------

SIZES = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 5), (2, 8), (3, 4), (3, 6), (4, 2), (4, 8), (4, 10), (4, 16)]
SAME = {"GPipe": ("gpipe", None), "Interleaved1F1B": ("interleaved", 3), "ZBVZeroBubble": ("zbv", 2), "DualPipeV": ("dualpipe_v", 2)}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_ours_have_the_order_of_pytorchs_of_the_same_name_wherever_it_has_one(name: str, of_theirs: Any) -> None:
    ours, v = SAME[name]
    num_seen = 0
    for p, m in SIZES:
        try:
            lists = of_theirs(name, p, m, v)
        except ValueError:  # it has no such schedule
            continue
        num_seen += 1
        schedule = getattr(hp.schedules, ours)(p, m, *([v] if ours == "interleaved" else []))
        assert as_ours(lists).compute_only().ranks == schedule.ranks, (name, p, m)
    assert num_seen >= 5


THEIRS = {
    "GPipe": None,
    "LoopedBFS": 2,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


def verdicts(of_theirs: Any, name: str, **options: bool) -> dict[tuple[int, int], str]:
    """For each size that PyTorch has this schedule for, what is wrong with it, or an empty text."""
    found = {}
    for p, m in SIZES:
        try:
            lists = of_theirs(name, p, m, THEIRS.get(name), **options)
        except ValueError:
            continue
        try:
            as_ours(lists).check()
        except ScheduleError as error:
            found[p, m] = error.problems[0].reason
        else:
            found[p, m] = ""
    assert len(found) >= 5
    return found


@pytest.mark.parametrize("name", THEIRS)
def test_pytorchs_own_schedules_load_and_check(name: str, of_theirs: Any) -> None:
    assert set(verdicts(of_theirs, name).values()) == {""}


@pytest.mark.parametrize("name", sorted({*THEIRS} - {"GPipe"}))
def test_pytorchs_own_sends_and_leases_load_and_check(name: str, of_theirs: Any) -> None:
    assert set(verdicts(of_theirs, name, with_comms=True).values()) == {""}


def test_pytorchs_1f1b_is_wrong_as_data(of_theirs: Any) -> None:
    """The last rank begins with forward 1 of microbatches 0 to 3, and has a forward 4. Its runtime does not read that list."""
    lists = of_theirs("1F1B", 3, 4)
    assert [str(action) for action in lists[2] if action is not None][:3] == ["2F1", "2B0", "2F2"]
    with pytest.raises(ScheduleError) as raised:
        as_ours(lists).check()
    reasons = [(problem.rank, problem.reason) for problem in raised.value.problems]
    assert (2, "the forward of microbatch 0 at stage 2 is missing") in reasons
    assert (0, "the forward of microbatch 4 at stage 0 is missing") in reasons
    assert "" not in verdicts(of_theirs, "1F1B").values()


@pytest.mark.parametrize("name", sorted({*THEIRS} - {"GPipe"}))
def test_pytorchs_late_receives_hang_where_sends_block(name: str, of_theirs: Any) -> None:
    """`defer_pp_recv` puts receives behind sends that the other side waits for: it ends only where sends are buffered."""
    found = verdicts(of_theirs, name, with_comms=True, defer_pp_recv=True)
    hang = {size for size, reason in found.items() if "waits forever" in reason}
    assert {size for size, reason in found.items() if reason} == hang
    assert hang >= {size for size in found if min(size) >= 2 and size[1] >= 2 * size[0]}
