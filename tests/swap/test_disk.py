"""The disk tier and its streams: nothing is left behind, nothing hangs, and a failed write is never read."""

from __future__ import annotations

import _thread
import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel._base.errors import ArgumentError, DamagedFileError, StateError
from hyper_parallel.core.swap import disk_stream
from hyper_parallel.core.swap.disk import DiskBlock, DiskFile, DiskTier
from hyper_parallel.core.swap.disk_stream import DiskEvent, DiskStream, HostComputeStream
from hyper_parallel.core.swap.pool import Growth
from support.interpreter import run_fresh

KIB, MIB = 1024, 1024**2
SMALL = Growth(min_bytes=64 * KIB, max_bytes=MIB, share=1 / 8)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, 16 * MIB, growth=SMALL)
    yield tier
    tier.close()
    assert os.listdir(tmp_path) == []


@pytest.fixture
def streams() -> Iterator[Callable[[str], DiskStream]]:
    """Makes streams whose threads end with the test."""
    made: list[DiskStream] = []

    def make(name: str = "test-stream") -> DiskStream:
        made.append(DiskStream(name))
        return made[-1]

    yield make
    for stream in made:
        stream.close(timeout_s=10)


@pytest.fixture
def stream(streams: Callable[[str], DiskStream]) -> DiskStream:
    return streams("test-stream")


def taken(tier: DiskTier, num_bytes: int) -> DiskBlock:
    block = tier.take(num_bytes)
    assert block is not None
    return block


def giving(data: bytes | bytearray) -> Callable[[], memoryview]:
    return lambda: memoryview(data)


def written(stream: DiskStream, tier: DiskTier, data: bytes) -> DiskBlock:
    block = taken(tier, len(data))
    stream.launch_write(block, giving(data)).join(10)
    return block


def contents(stream: DiskStream, block: DiskBlock) -> bytes:
    target = bytearray(block.num_bytes)
    stream.launch_read(block, giving(target)).join(10)
    return bytes(target)


def open_files(directory: Path) -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith(str(directory)):
            found.append(target)
    return found


class Gate:
    """Memory that a job gets only when the gate is opened."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = data
        self.is_reached = threading.Event()
        self.is_open = threading.Event()

    def __call__(self) -> memoryview:
        self.is_reached.set()
        assert self.is_open.wait(30), "the test never opened the gate"
        return memoryview(self.data)


# -- the tier -------------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_back(tier: DiskTier, stream: DiskStream) -> None:
    rng = random.Random(0)
    data = [rng.randbytes(size) for size in (1, 511, 4096, 70_000, 3 * MIB + 7)]
    blocks = [written(stream, tier, each) for each in data]
    assert [contents(stream, block) for block in blocks] == data
    assert tier.used_bytes == sum(map(len, data))
    for block in blocks:
        tier.give(block)
    assert tier.used_bytes == 0
    assert contents(stream, written(stream, tier, b"again")) == b"again"


def test_a_block_of_several_parts_is_read_back(tier: DiskTier, stream: DiskStream) -> None:
    tier.budget_bytes = 4 * MIB
    blocks = [taken(tier, MIB) for _ in range(4)]
    tier.give(blocks[0])
    tier.give(blocks[2])
    data = random.Random(0).randbytes(2 * MIB - 9)
    block = written(stream, tier, data)
    assert len(block.parts) == 2
    assert contents(stream, block) == data


def test_past_the_budget_there_is_no_block(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 256 * KIB, growth=SMALL)
    blocks = [taken(tier, 64 * KIB) for _ in range(4)]
    assert tier.take(1) is None
    assert tier.stats().num_over_budget == 1
    assert tier.reserved_bytes == 256 * KIB
    tier.give(blocks[1])
    assert taken(tier, 64 * KIB)
    tier.close()


def test_a_full_disk_is_found_when_a_block_is_taken_and_asked_again_once_one_came_back(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reserve = os.posix_fallocate
    asked: list[int] = []
    is_full = False

    def fallocate(fd: int, offset: int, length: int) -> None:
        asked.append(length)
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    block = taken(tier, 64 * KIB)
    files = open_files(tmp_path)
    is_full = True
    assert tier.take(64 * KIB) is None
    assert tier.take(64 * KIB) is None
    assert len(asked) == 2, "a full disk is asked at every block"
    assert tier.stats().num_no_memory == 2
    assert "No space left" in str(tier.stats().failure)
    assert open_files(tmp_path) == files, "a file without space was left open"
    tier.give(block)
    is_full = False
    assert taken(tier, 128 * KIB)


def test_the_space_is_reserved_when_a_file_is_made(tier: DiskTier) -> None:
    file = taken(tier, MIB).parts[0].slab
    with file.in_use() as fd:
        assert os.fstat(fd).st_blocks * 512 >= MIB


def test_a_file_system_that_cannot_reserve_gets_a_sparse_file(
    tier: DiskTier, stream: DiskStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fallocate(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    block = written(stream, tier, b"x" * 5000)
    assert contents(stream, block) == b"x" * 5000
    with block.parts[0].slab.in_use() as fd:
        assert os.fstat(fd).st_size == block.parts[0].slab.num_bytes


@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_no_name_is_ever_seen_in_the_directory(
    tmp_path: Path, stream: DiskStream, monkeypatch: pytest.MonkeyPatch, has_tmpfile: bool
) -> None:
    seen: list[str] = []

    def looking(name: str) -> None:
        call = getattr(os, name)

        def look_and_call(*args: Any) -> Any:
            seen.extend(os.listdir(tmp_path))
            return call(*args)

        monkeypatch.setattr(os, name, look_and_call)

    if not has_tmpfile:
        plain_open = os.open

        def open_without(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            return plain_open(path, flags, *args, **options)

        monkeypatch.setattr(os, "open", open_without)
    for name in ("posix_fallocate", "pwritev", "preadv", "close"):
        looking(name)
    tier = DiskTier(tmp_path, 16 * MIB, growth=SMALL)
    for size in (100, MIB):
        assert contents(stream, written(stream, tier, bytes(size))) == bytes(size)
    assert seen == []
    assert len(open_files(tmp_path)) == 2
    tier.close()
    assert os.listdir(tmp_path) == []


def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from hyper_parallel.core.swap.disk import DiskTier
from hyper_parallel.core.swap.disk_stream import DiskStream
tier = DiskTier(sys.argv[1], 1 << 30)
block = tier.take(1 << 20)
DiskStream("killed").launch_write(block, lambda: memoryview(bytes(1 << 20))).join()
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_closing_closes_every_file_and_ends_the_use_of_its_blocks(tmp_path: Path, stream: DiskStream) -> None:
    tier = DiskTier(tmp_path, 16 * MIB, growth=SMALL)
    block = written(stream, tier, b"abc")
    taken(tier, MIB)
    assert len(open_files(tmp_path)) == 2
    tier.close()
    assert open_files(tmp_path) == []
    with pytest.raises(StateError, match="closed"):
        tier.take(1)
    with pytest.raises(StateError, match=f"closed while a block.*\n.*{tmp_path}"):
        contents(stream, block)
    tier.give(block)
    assert tier.stats().reserved_bytes == 0
    tier.close()


def test_closing_lets_a_job_under_way_finish_with_its_file(
    tmp_path: Path, stream: DiskStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, MIB, growth=SMALL)
    block = taken(tier, 1000)
    write, gate = os.pwritev, Gate(b"")

    def slow_write(fd: int, buffers: list[memoryview], offset: int) -> int:
        gate()
        return write(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slow_write)
    event = stream.launch_write(block, giving(bytes(1000)))
    assert gate.is_reached.wait(10)
    tier.close()
    assert len(open_files(tmp_path)) == 1
    gate.is_open.set()
    event.join(10)
    assert open_files(tmp_path) == []


def test_a_tier_that_is_forgotten_closes_its_files(tmp_path: Path, stream: DiskStream) -> None:
    tier = DiskTier(tmp_path, MIB, growth=SMALL)
    block = written(stream, tier, b"abc")
    gc.disable()  # references alone must do it: files and space are not to wait for the collector
    try:
        del tier
        assert contents(stream, block) == b"abc"  # a block keeps its file
        del block
        assert open_files(tmp_path) == []
    finally:
        gc.enable()


def test_trim_gives_the_space_of_unused_files_back(tier: DiskTier, stream: DiskStream, tmp_path: Path) -> None:
    kept, gone = written(stream, tier, b"a" * 64 * KIB), written(stream, tier, b"b" * MIB)
    gone.last_use = stream.launch_read(gone, giving(bytearray(MIB)))
    tier.give(gone)
    assert tier.trim() == MIB
    assert len(open_files(tmp_path)) == 1
    assert contents(stream, kept) == b"a" * 64 * KIB


def test_a_block_of_another_tier_is_refused(tier: DiskTier, tmp_path: Path) -> None:
    other = DiskTier(tmp_path, MIB, growth=SMALL)
    with pytest.raises(ArgumentError, match="not from this tier"):
        tier.give(taken(other, 1))
    other.close()


@pytest.mark.parametrize("directory", ["missing", "file", "/proc"])
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, directory: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=f"{directory}.*\n.*name another one"):
        DiskTier(tmp_path / directory, MIB)


def test_eight_threads_swap_through_two_streams_and_read_their_own_bytes(
    tier: DiskTier, streams: Callable[[str], DiskStream]
) -> None:
    out, back = streams("out"), streams("back")
    launching = threading.Lock()  # as the engine's: a copy and its waits are launched together
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(40):
                data = rng.randbytes(rng.choice([100, 5000, 70_000, rng.randint(1, 200_000)]))
                target = bytearray(len(data))
                block = taken(tier, len(data))
                with launching:
                    for event in block.last_uses:
                        out.wait_event(event)
                    out.launch_write(block, giving(data))
                    block.last_use = out.record_event()
                    if rng.random() < 0.3:
                        tier.give(block)  # before it was even written: the next one to write there waits
                        continue
                    back.wait_event(block.last_use)
                    loaded = back.launch_read(block, giving(target))
                    block.last_use = loaded
                if rng.random() < 0.5:
                    tier.give(block)  # before it was read, as above
                    loaded.join(10)
                else:
                    loaded.join(10)
                    tier.give(block)
                assert target == data
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "it hangs"
    if failures:
        raise failures[0]
    assert tier.used_bytes == 0


# -- jobs that fail -------------------------------------------------------------------------------------------------------


def failing_after(num_bytes: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full once it took that many bytes."""
    write, room = os.pwritev, num_bytes

    def write_some(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal room
        if room == 0:
            raise OSError(number, os.strerror(number))
        done = write(fd, [buffers[0][:room]], offset)
        room -= done
        return done

    monkeypatch.setattr(os, "pwritev", write_some)


def test_a_disk_that_fills_up_fails_the_write_and_nothing_else(
    tier: DiskTier, stream: DiskStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written(stream, tier, b"before")
    block = taken(tier, 10_000)
    failing_after(6000, errno.ENOSPC, monkeypatch)
    event = stream.launch_write(block, giving(b"x" * 10_000))
    read_failed = stream.launch_read(block, giving(bytearray(10_000)))
    read_before = stream.launch_read(before, giving(target := bytearray(6)))
    for _ in range(2):  # whoever joins is told
        with pytest.raises(StateError, match="The disk is full") as caught:
            event.join(10)
    text = str(caught.value)
    assert str(tier.directory) in text
    assert "9.77 KiB" in text
    assert f"errno {errno.ENOSPC}, ENOSPC" in text
    assert "Free space there, name another disk_dir, or lower disk_budget." in text
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert event.query()
    assert isinstance(event.error, StateError)
    with pytest.raises(StateError, match="its write failed"):
        read_failed.join(10)
    read_before.join(10)
    assert target == b"before"


def test_a_block_whose_last_write_failed_is_not_read_as_the_one_before(
    tier: DiskTier, stream: DiskStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = written(stream, tier, b"old")
    with monkeypatch.context() as patch:
        failing_after(0, errno.EIO, patch)
        event = stream.launch_write(block, giving(b"new"))
        with pytest.raises(StateError, match="The disk failed"):
            event.join(10)
    with pytest.raises(StateError, match="holds nothing"):
        contents(stream, block)
    stream.launch_write(block, giving(b"new")).join(10)
    assert contents(stream, block) == b"new"


def test_memory_of_the_block_before_is_not_read_from_a_new_one(tier: DiskTier, stream: DiskStream) -> None:
    tier.give(written(stream, tier, b"secret"))
    with pytest.raises(StateError, match="holds nothing"):
        contents(stream, taken(tier, 6))


def test_short_writes_and_reads_are_continued(
    tier: DiskTier, stream: DiskStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: write(fd, [buffers[0][:999]], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:777]], offset))
    data = random.Random(0).randbytes(10_000)
    assert contents(stream, written(stream, tier, data)) == data


def test_large_blocks_go_in_chunks_and_each_is_progress(
    tier: DiskTier, stream: DiskStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_stream, "CHUNK_BYTES", 1000)
    write, sizes, progress = os.pwritev, [], []

    def watched(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(len(buffers[0]))
        progress.append(stream.last_progress)
        stream.last_progress = 0.0
        return write(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", watched)
    data = random.Random(0).randbytes(2500)
    assert contents(stream, written(stream, tier, data)) == data
    assert sizes == [1000, 1000, 500]
    assert all(progress)


def test_a_disk_that_takes_no_bytes_is_an_error_and_no_endless_loop(
    tier: DiskTier, stream: DiskStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    with pytest.raises(StateError, match="takes no more bytes"):
        written(stream, tier, b"abc")


def test_a_file_that_was_cut_is_an_error(tier: DiskTier, stream: DiskStream) -> None:
    block = written(stream, tier, b"x" * 5000)
    with block.parts[0].slab.in_use() as fd:
        os.ftruncate(fd, 2000)
    with pytest.raises(DamagedFileError, match=f"got its end at 2000; {tier.directory}"):
        contents(stream, block)


def test_memory_of_another_size_is_an_error(tier: DiskTier, stream: DiskStream) -> None:
    block = taken(tier, 10)
    with pytest.raises(ArgumentError, match=f"Expected 10 bytes, got 9; {tier.directory}"):
        stream.launch_write(block, giving(bytes(9))).join(10)


def test_whatever_a_job_raises_is_told_and_the_stream_goes_on(tier: DiskTier, stream: DiskStream) -> None:
    def explode() -> memoryview:
        raise SystemExit("not today")

    event = stream.launch_write(taken(tier, 10), explode)
    with pytest.raises(StateError, match="SystemExit: not today"):
        event.join(10)
    assert contents(stream, written(stream, tier, b"abc")) == b"abc"


@pytest.mark.parametrize("is_full", [False, True])
def test_when_an_event_is_done_the_job_holds_no_memory_any_more(
    tier: DiskTier, stream: DiskStream, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    class Memory(bytearray):
        pass

    def finish(event: DiskEvent, error: BaseException | None) -> None:
        outcomes.append((error is not None, alive() is not None))  # when it is told, not a moment later
        tell(event, error)

    outcomes: list[tuple[bool, bool]] = []
    tell = DiskEvent.finish
    monkeypatch.setattr(DiskEvent, "finish", finish)
    if is_full:
        failing_after(100, errno.ENOSPC, monkeypatch)
    memory = Memory(1000)
    alive = weakref.ref(memory)
    gate = Gate(b"x")
    stream.launch_write(taken(tier, 1), gate)  # so that the test has let go of the memory when the job runs
    event = stream.launch_write(taken(tier, 1000), giving(memory))
    del memory
    gate.is_open.set()
    event.join_end(10)
    assert outcomes[-1] == (is_full, False)


# -- streams --------------------------------------------------------------------------------------------------------------


def test_jobs_of_a_stream_run_in_the_order_of_their_launch(tier: DiskTier, stream: DiskStream) -> None:
    block = taken(tier, 4)
    targets = [bytearray(4) for _ in range(200)]
    for number, target in enumerate(targets):
        stream.launch_write(block, giving(number.to_bytes(4, "big")))
        stream.launch_read(block, giving(target))
    stream.record_event().join(10)
    assert [int.from_bytes(target, "big") for target in targets] == list(range(200))


def test_an_event_is_done_after_the_job_before_it_and_not_earlier(tier: DiskTier, stream: DiskStream) -> None:
    assert stream.record_event().query()
    gate = Gate(b"abc")
    stream.launch_write(taken(tier, 3), gate)
    event = stream.record_event()
    assert gate.is_reached.wait(10)
    assert not event.query()
    gate.is_open.set()
    event.join(10)
    assert event.query()
    assert event.error is None


def test_a_stream_waits_for_an_event_of_another(tier: DiskTier, streams: Callable[[str], DiskStream]) -> None:
    out, back = streams("out"), streams("back")
    gate, block, target = Gate(b"abc"), taken(tier, 3), bytearray(3)
    back.wait_event(out.launch_write(block, gate))
    event = back.launch_read(block, giving(target))
    assert gate.is_reached.wait(10)
    time.sleep(0.05)  # a read that does not wait has long failed by then
    assert not event.query()
    gate.is_open.set()
    event.join(10)
    assert target == b"abc"


def test_waiting_for_a_job_that_failed_is_only_order(
    tier: DiskTier, streams: Callable[[str], DiskStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, back = streams("out"), streams("back")
    block = written(out, tier, b"abc")
    failing_after(0, errno.ENOSPC, monkeypatch)
    gate = Gate(b"x")
    failed = out.launch_write(taken(tier, 1), gate)
    back.wait_event(failed)
    event = back.launch_read(block, giving(target := bytearray(3)))
    gate.is_open.set()
    event.join(10)
    assert failed.error is not None
    assert target == b"abc"


class FakeEvent:
    """Of a device that is not the disk."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.is_done = threading.Event()
        self.failure: BaseException | None = None

    def query(self) -> bool:
        return self.is_done.is_set()

    def join(self) -> None:
        assert self.is_done.wait(30)
        if self.failure is not None:
            raise self.failure


def test_a_stream_waits_for_an_event_of_another_device(tier: DiskTier, stream: DiskStream) -> None:
    other = FakeEvent()
    stream.wait_event(other)
    event = stream.launch_write(taken(tier, 3), giving(b"abc"))
    time.sleep(0.05)
    assert not event.query()
    other.is_done.set()
    event.join(10)


def test_after_a_wait_that_failed_no_job_of_the_stream_runs(tier: DiskTier, stream: DiskStream) -> None:
    other = FakeEvent()
    other.failure = RuntimeError("the device is lost")
    stream.wait_event(other)
    block = taken(tier, 3)
    events = [stream.launch_write(block, giving(b"abc")) for _ in range(2)]
    other.is_done.set()
    for event in events:
        with pytest.raises(StateError, match="the device is lost"):
            event.join(10)
    assert not block.is_written


def test_a_stuck_job_is_an_error_at_the_deadline_and_names_itself(tier: DiskTier, stream: DiskStream) -> None:
    gate = Gate(b"abc")
    stuck = stream.launch_write(taken(tier, 3), gate)
    behind = stream.launch_write(taken(tier, 5000), giving(bytes(5000)))
    assert gate.is_reached.wait(10)
    with pytest.raises(StateError, match="The disk does not answer") as caught:
        behind.join(timeout_s=0.05)
    text = str(caught.value)
    assert f"write of 3 B in {tier.directory}" in text  # what is stuck
    assert "waiting for the write of 4.88 KiB" in text  # what was asked for
    assert "on test-stream" in text
    with pytest.raises(StateError, match="does not answer"):
        stream.close(timeout_s=0.05)
    gate.is_open.set()
    behind.join(10)
    stuck.join(10)


def test_the_deadline_begins_anew_with_every_progress() -> None:
    class Moving:
        name, running, num_looks = "moving", "a long write", 0

        @property
        def last_progress(self) -> float:
            self.num_looks += 1
            if self.num_looks == 5:
                event.finish(None)
            return time.monotonic()

    moving: Any = Moving()
    event = DiskEvent(moving, "a long write")
    event.join(timeout_s=0.01)
    assert moving.num_looks == 5


def test_progress_of_the_stream_that_is_waited_for_counts(
    tier: DiskTier, streams: Callable[[str], DiskStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_stream, "_WATCH_S", 0.001)
    out, back = streams("out"), streams("back")
    gate = Gate(b"abc")
    back.wait_event(out.launch_write(taken(tier, 3), gate))
    assert gate.is_reached.wait(10)
    deadline = time.monotonic() + 10
    while back.running is None and time.monotonic() < deadline:
        time.sleep(0.001)
    for _ in range(2):  # the first may be that its own job has begun
        back.last_progress = 0.0
        while back.last_progress == 0.0 and time.monotonic() < deadline:
            out.last_progress = time.monotonic()  # again and again: its first look may be still to come
            time.sleep(0.001)
        assert back.last_progress > 0.0
    gate.is_open.set()


def test_an_idle_thread_ends_and_the_next_job_starts_another(tier: DiskTier) -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "hyper-parallel-idle-stream"]

    stream = DiskStream("idle-stream", idle_s=0.01)
    assert threads() == []
    gate = Gate(b"abc")
    block = taken(tier, 3)
    event = stream.launch_write(block, gate)
    assert gate.is_reached.wait(10)
    assert len(threads()) == 1
    assert threads()[0].daemon
    gate.is_open.set()
    event.join(10)
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert threads() == []
    assert contents(stream, block) == b"abc"
    stream.close(10)
    assert threads() == []


def test_jobs_and_idle_ends_of_the_thread_do_not_miss_each_other(tier: DiskTier) -> None:
    stream = DiskStream("busy-stream", idle_s=0.0)  # it ends whenever it finds nothing to do
    block = taken(tier, 3)
    for _ in range(500):
        assert stream.launch_write(block, giving(b"abc")).join(10) is None
    stream.close(10)


def test_where_no_thread_can_be_started_nothing_was_launched(
    tier: DiskTier, stream: DiskStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(function: Callable[..., object], args: tuple[object, ...]) -> None:
        raise RuntimeError("can't start new thread")

    block = taken(tier, 3)
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            stream.launch_write(block, giving(b"abc"))
    assert stream.record_event().query()
    stream.launch_write(block, giving(b"xyz")).join(10)
    assert contents(stream, block) == b"xyz"


def test_where_only_one_thread_can_be_started_it_does_the_jobs(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stream = DiskStream("lonely-stream", idle_s=0.01)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    block = taken(tier, 3)
    stream.launch_write(block, giving(b"xyz")).join(10)
    assert contents(stream, block) == b"xyz"
    stream.close(10)


def test_the_compute_of_a_cpu_waits_by_joining_and_has_always_happened(
    tier: DiskTier, stream: DiskStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = HostComputeStream()
    event = compute.record_event()
    assert event.query()
    assert event.error is None
    event.join()
    gate = Gate(b"abc")
    written_ = stream.launch_write(taken(tier, 3), gate)
    threading.Timer(0.05, gate.is_open.set).start()
    compute.wait_event(written_)
    assert written_.query()
    failing_after(0, errno.ENOSPC, monkeypatch)
    with pytest.raises(StateError, match="full"):
        compute.wait_event(stream.launch_write(taken(tier, 3), giving(b"abc")))
    assert compute == HostComputeStream()
    assert hash(compute) == hash(HostComputeStream())


def test_a_stream_and_a_tier_go_on_in_a_forked_process_without_touching_the_parents_bytes(tmp_path: Path) -> None:
    # In an interpreter of its own: a process with the threads of a test run is a poor thing to fork.
    program = f"""
import os, threading, warnings
warnings.simplefilter("ignore")
from hyper_parallel.core.swap.disk import DiskTier
from hyper_parallel.core.swap.disk_stream import DiskStream

def attempt(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__ + ": " + str(error).splitlines()[0]
    return "no error"

def read(stream, block):
    target = bytearray(block.num_bytes)
    stream.launch_read(block, lambda: memoryview(target)).join(10)
    return target.decode()

tier = DiskTier({str(tmp_path)!r}, 1 << 20)
stream = DiskStream("forked")
block = tier.take(6)
stream.launch_write(block, lambda: memoryview(b"parent")).join(10)
gate, reached = threading.Event(), threading.Event()
def slow():
    reached.set()
    gate.wait(30)
    return memoryview(b"behind")
held = tier.take(6)
pending = stream.launch_write(held, slow)
reached.wait(10)
receive, send = os.pipe()
tier._pool._lock.acquire()      # another thread is inside the tier and the stream when the process forks
stream._lock.acquire()
pid = os.fork()
if pid == 0:
    own = [tier.take(6) for _ in range(8)]
    for each in own:
        stream.launch_write(each, lambda: memoryview(b"child!"))
    stream.record_event().join(10)
    tier.give(block)
    answers = [
        read(stream, own[-1]),
        attempt(lambda: pending.join(10)),
        attempt(lambda: stream.wait_event(pending)),
        attempt(lambda: read(stream, block)),
        str(tier.used_bytes),
    ]
    tier.close()
    os.write(send, json.dumps(answers).encode())
    os._exit(0)
tier._pool._lock.release()
stream._lock.release()
os.close(send)
with os.fdopen(receive) as pipe:
    answers = json.load(pipe)
os.waitpid(pid, 0)
gate.set()
pending.join(10)
result = [answers, read(stream, block), read(stream, held), tier.used_bytes]
stream.close()
tier.close()
"""
    outcome = run_fresh(program)
    assert isinstance(outcome, list), outcome
    answers, *parents = outcome
    assert answers == [
        "child!",
        "StateError: A disk job of the parent was waited for in a forked process.",
        "StateError: A disk job of the parent was waited for in a forked process.",
        "StateError: A block on disk was used in a forked process.",
        "48",
    ]
    assert parents == ["parent", "behind", 12]


def test_a_file_is_closed_once(tmp_path: Path) -> None:
    file = DiskFile(str(tmp_path), 4096)
    file.close()
    with open(os.devnull) as other:  # takes the number of the descriptor that was closed
        file.close()
        del file
        assert other.read() == ""
