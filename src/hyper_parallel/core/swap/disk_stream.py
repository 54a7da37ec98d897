"""Streams of the disk: a thread that reads and writes blocks in order, and the compute stream of a CPU.

Guarantees:
    - jobs of one stream run in the order in which they were launched; a job that fails does not stop those after it
    - a job's event is done exactly once, after the job has let go of the memory it used
    - `join` returns or raises: at the latest when nothing has moved on the stream for `timeout_s`
    - a block whose write failed is never read as if it had been written
    - Ctrl-C at any place of a call leaves no lock taken: a job is launched or it is not. So no call from outside uses a
      lock, an event or a queue that is written in Python; see the README, "Ctrl-C"

Assumes that memory given to a job is not touched until its event is done; that is the window's work (O2, O7).

The thread is a daemon, begins with the first job and ends when there was none for a while: a program that swaps nothing
has no thread of ours, and none has to be stopped.
"""

from __future__ import annotations

import _thread
import contextlib
import copy
import errno
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, final

from hyper_parallel._base.errors import ArgumentError, DamagedFileError, HyperParallelError, StateError
from hyper_parallel.core.swap.device import Event
from hyper_parallel.core.swap.disk import DiskBlock, DiskFile
from hyper_parallel.core.swap.sizes import format_size

# Called by the stream's thread when the job runs, so that memory can be made ready or waited for there.
BytesOf: TypeAlias = Callable[[], memoryview]

CHUNK_BYTES = 8 * 1024**2  # long enough for full speed, short enough to show progress on a slow disk
JOIN_TIMEOUT_S = 60.0
IDLE_S = 2.0
_WATCH_S = 0.2  # how often a stream that waits for another looks whether that one moves


@final
class DiskEvent:
    """The end of one job of a `DiskStream`; without a stream: something that is done already.

    `error`: why the job failed, once it is done. `query` is then true as well: nothing will touch its memory any more.
    """

    __slots__ = ("_is_done", "_pid", "_stream", "_waiting", "error", "what")

    def __init__(self, stream: DiskStream | None, what: str) -> None:
        self.error: BaseException | None = None
        self.what = what
        self._stream = stream
        self._pid = os.getpid()
        self._is_done = stream is None
        self._waiting: deque[Any] = deque()  # a lock of each thread that waits, which `finish` opens

    def query(self) -> bool:
        return self._is_done

    def join(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Block until the job is done.

        Raises:
            StateError: the job failed; or nothing moved on its stream for `timeout_s`; or a forked process asks for a
                job of its parent.
            DamagedFileError: the file was cut.
        """
        self.join_end(timeout_s)
        if self.error is not None:
            # A copy: raising one object in two threads would mix up their tracebacks.
            raise copy.copy(self.error) from self.error.__cause__

    def join_end(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Block until the job is done, as `join`; one that failed is only over."""
        stream = self._stream
        if stream is None or self._is_done:
            return
        self.check_process()
        start = time.monotonic()
        left = timeout_s
        while not self.wait_end(max(left, 0)):
            still_s = time.monotonic() - max(start, stream.last_progress)
            left = timeout_s - still_s
            if left <= 0:
                raise StateError(
                    "The disk does not answer.",
                    expected=f"progress within {timeout_s:g} s",
                    got=f"none for {still_s:.1f} s, at: {stream.running or 'nothing'}",
                    where=f"waiting for the {self.what} on {stream.name}",
                    do="Check the disk (a network file system that hangs?), or name another disk_dir.",
                )

    def wait_end(self, timeout_s: float) -> bool:
        """Block until the job is done, or so long; return whether it is done."""
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        # Looked at after that: if it was not done then, `finish` comes to this lock.
        if not self._is_done:
            mine.acquire(timeout=timeout_s)
        with contextlib.suppress(ValueError):  # `finish` has taken it out
            self._waiting.remove(mine)
        return self._is_done

    def check_process(self) -> None:
        """Raise in a forked process: the thread that would do the job is not there."""
        if self._pid != os.getpid():
            raise StateError(
                "A disk job of the parent was waited for in a forked process.",
                where=self.what,
                do="Run forward and backward in one process.",
            )

    def finish(self, error: BaseException | None) -> None:
        self.error = error  # before the flag: whoever sees the event done sees why
        self._is_done = True
        while self._waiting:
            self._waiting.popleft().release()


class _Job:
    __slots__ = ("event", "run")

    def __init__(self, event: DiskEvent, run: Callable[[], None]) -> None:
        self.event = event
        self.run: Callable[[], None] | None = run


@final
class DiskStream:
    """Runs jobs in order in a thread of its own. Calls come from any thread, and none of them blocks but `close`."""

    def __init__(self, name: str, *, idle_s: float = IDLE_S) -> None:
        self.name = name
        self.idle_s = idle_s
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of the beginning and the end of the thread
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # None: the thread shall end
        self._is_started = False
        # Held by the thread that does jobs: if Ctrl-C comes when one was just started, a second one is started, and
        # waits for the end of the first.
        self._working = threading.Lock()
        self._worker: threading.Thread | None = None
        self._last = DiskEvent(None, "nothing")  # of the job launched last
        self._broken: BaseException | None = None  # an order that could not be kept; see `wait_event`
        self.running: str | None = None
        self.last_progress = time.monotonic()

    def launch_write(self, block: DiskBlock, source: BytesOf) -> DiskEvent:
        """Write all of `source()` into the block."""
        return self._launch(_what("write", block), lambda: self._write(block, source))

    def launch_read(self, block: DiskBlock, target: BytesOf) -> DiskEvent:
        """Fill `target()` with the block."""
        return self._launch(_what("read", block), lambda: self._read(block, target))

    def launch_call(self, what: str, function: Callable[[], None]) -> DiskEvent:
        """Call a function in its turn; what it raises is the event's error."""
        return self._launch(what, function)

    def record_event(self) -> DiskEvent:
        """Return the end of the last job: everything before it has happened then. Its `error` is of this job alone."""
        self._look_for_fork()
        return self._last

    def wait_event(self, event: Event) -> None:
        """Let later jobs begin after the event, whether or not what it marks has failed.

        If that cannot be known (`join` of an event of another kind raised), no later job of this stream runs: each
        fails with the reason. An order that is not kept would be wrong numbers.
        """
        self._look_for_fork()
        if event.query():
            return
        if isinstance(event, DiskEvent):
            event.check_process()
            if event._stream is self:
                return  # in order already
        self._launch("wait for another stream", lambda: self._wait(event))

    def close(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Do what was launched, end the thread and wait for that, as long as something moves.

        A later job starts a new thread.
        """
        self._look_for_fork()
        with self._lock:
            last = self._last
            if self._is_started:
                self._jobs.put(None)
        last.join_end(timeout_s)
        worker = self._worker  # of the last job at least
        if worker is not None:
            worker.join(timeout_s)

    # -- launching ----------------------------------------------------------------------------------------------------

    def _launch(self, what: str, run: Callable[[], None]) -> DiskEvent:
        self._look_for_fork()
        event = DiskEvent(self, what)
        job = _Job(event, run)
        with self._lock:
            if not self._is_started:
                # First: where no thread can be started, nothing was launched.
                _thread.start_new_thread(self._start, ())
                self._is_started = True
            self._last = event
            self._jobs.put(job)
        return event

    def _start(self) -> None:
        # In a thread: `Thread.start` waits for an event that is written in Python.
        worker = threading.Thread(target=self._work, name=f"hyper-parallel-{self.name}", daemon=True)
        try:
            worker.start()
        except RuntimeError:  # there can be no second thread: this one does the work
            self._work(is_helper=True)

    def _look_for_fork(self) -> None:
        # The child of a fork has this object and not its thread; a lock may be held for ever by a thread that is not
        # here.
        if self._pid != os.getpid():
            self._begin()

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _work(self, *, is_helper: bool = False) -> None:
        with self._working:
            self._worker = None if is_helper else threading.current_thread()
            while True:
                try:
                    job = self._jobs.get(timeout=self.idle_s)
                except queue.Empty:
                    job = None
                if job is not None:
                    self.running = job.event.what
                    self.last_progress = time.monotonic()
                    self._do(job)
                    continue
                with self._lock:
                    if self._jobs.empty():
                        # In the same breath as the look at the queue: the next job starts a new thread.
                        self._is_started = False
                        return

    def _do(self, job: _Job) -> None:
        error: BaseException | None = self._broken
        if error is None and job.run is not None:
            try:
                job.run()
            except BaseException as raised:
                error = _explained(raised, job.event.what)
        job.run = None  # lets go of the memory, before anyone is told
        self.running = None
        self.last_progress = time.monotonic()
        job.event.finish(error)

    def _write(self, block: DiskBlock, source: BytesOf) -> None:
        block.is_written = False
        self._copy(block, source(), _write_some)
        block.is_written = True

    def _read(self, block: DiskBlock, target: BytesOf) -> None:
        if not block.is_written:
            raise StateError(
                "A block on disk was read that holds nothing: it was not written, or its write failed.",
                where=_what("read", block),
            )
        self._copy(block, target(), _read_some)

    def _copy(self, block: DiskBlock, memory: memoryview, some: Callable[[int, memoryview, int], int]) -> None:
        if memory.nbytes != block.num_bytes:
            raise ArgumentError(
                "The memory is not of the block's size.",
                expected=f"{block.num_bytes} bytes",
                got=f"{memory.nbytes}",
                where=block.parts[0].slab.directory,
            )
        view = memory.cast("B")  # of contiguous memory only: anything else raises here
        begin = 0
        for file, offset, num_bytes in block.parts:
            with file.in_use() as fd:
                done = 0
                while done < num_bytes:
                    end = min(done + CHUNK_BYTES, num_bytes)
                    done += some(fd, view[begin + done : begin + end], offset + done)
                    self.last_progress = time.monotonic()
            begin += num_bytes

    def _wait(self, event: Event) -> None:
        if not isinstance(event, DiskEvent):
            try:
                event.join()
            except BaseException as error:
                if event.error is None:
                    self._broken = _explained(error, "wait for another stream")
                    raise
            return
        other = event._stream
        seen = other.last_progress if other is not None else 0.0
        # Without an end: going on would break the order. Whoever joins has a deadline, and it runs only while nothing
        # moves there.
        while not event.wait_end(_WATCH_S):
            if other is not None and other.last_progress != seen:
                seen = other.last_progress
                self.last_progress = time.monotonic()


@final
class HostMoment:
    """The time at which it is made: what computes in the calling thread has got there then."""

    __slots__ = ("_time_s",)

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def ms_since(self, earlier: HostMoment) -> float:
        return (self._time_s - earlier._time_s) * 1e3


@final
class HostComputeStream:
    """The compute of a CPU: it runs in the calling thread, so all before now has happened, and waiting is joining.

    `wait_event` raises what the event's `join` raises. All are equal: memory of the host belongs to no stream (O8).
    """

    def record_event(self) -> DiskEvent:
        return DiskEvent(None, "compute")

    def wait_event(self, event: Event) -> None:
        event.join()

    def record_time(self) -> HostMoment:
        return HostMoment()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostComputeStream)

    def __hash__(self) -> int:
        return hash(HostComputeStream)


def _write_some(fd: int, view: memoryview, offset: int) -> int:
    num_bytes = os.pwritev(fd, [view], offset)
    if num_bytes == 0:
        raise OSError(errno.EIO, "the disk takes no more bytes")
    return num_bytes


def _read_some(fd: int, view: memoryview, offset: int) -> int:
    num_bytes = os.preadv(fd, [view], offset)
    if num_bytes == 0:
        raise DamagedFileError(
            "A swap file was cut.",
            expected=f"{len(view)} bytes at {offset}",
            got=f"its end at {os.fstat(fd).st_size}",
            where=os.readlink(f"/proc/self/fd/{fd}"),
        )
    return num_bytes


def _what(verb: str, block: DiskBlock) -> str:
    file: DiskFile = block.parts[0].slab
    return f"{verb} of {format_size(block.num_bytes)} in {file.directory}"


def _explained(error: BaseException, what: str) -> BaseException:
    """Put an error into the user's words, without tracebacks: their frames hold the memory of the job."""
    explained = error
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        name = errno.errorcode.get(error.errno or 0, "unknown")
        explained = StateError(
            "The disk is full." if is_full else "The disk failed.",
            got=f"{error.strerror or error} (errno {error.errno}, {name})",
            where=what,
            do="Free space there, name another disk_dir, or lower disk_budget."
            if is_full
            else "Look at the disk, or name another disk_dir.",
        )
        explained.__cause__ = error
    elif not isinstance(error, HyperParallelError):
        explained = StateError("A disk job failed.", got=f"{type(error).__name__}: {error}", where=what)
        explained.__cause__ = error
    link: BaseException | None = explained
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return explained
