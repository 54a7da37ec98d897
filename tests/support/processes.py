"""Real processes for tests of parallel training: pools of workers that start once and are used by many tests.

    pool = processes.pool("torch", 2)
    gradients = pool.run(train, "ddp", deadline_s=20)  # what train("ddp") returned, one result per rank

A function is sent by module and name, its arguments and results are pickled. In the workers communication over loopback is up
(torch.distributed with gloo, or MindSpore's with mccl, which meets at a store and needs no scheduler), and the function runs on every rank at once.

What this guarantees:

- Every wait has a deadline. A rank that raises, hangs, ends or is killed makes `run` raise a `RankError` that names the rank,
  what it was running, and its traceback and output; a rank that hangs says where.
- A pool in which anything went wrong is thrown away; the next `run` gets new processes.
- After each call a worker looks for what the function left behind (see `process_worker`); that is a failure, too.
- No process and no file outlives this one, however it ends.

Importing a framework takes seconds. So a *nursery*, one process per framework, imports it once and forks the workers. It is the only
child of this process, and the one entry in `KEPT`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

KEPT: set[int] = set()  # processes that live from test to test; the search for leaked processes leaves them out

# Not with -m: the module would exist twice, once by its name.
_NURSERY = "from support import process_worker; process_worker.main()"
_START_S = 120.0  # to import a framework, on a machine that is busy
_ANSWER_S = 20.0  # for what takes milliseconds
_GRACE_S = 0.5  # after one rank has failed, for the others to say why they did
_STACKS_S = 10.0  # for a rank to write where it is
_NO_SERVER = "Failed to create the TCP server"  # of MindSpore: another process has taken the port meanwhile
_MOST_OUTPUT = 4000  # characters of a rank's output in an error


class RankError(RuntimeError):
    """What went wrong on which rank.

    Attributes:
        failures: rank -> what happened: "raised ValueError: …", "was ended by SIGKILL", "ended with exit code 3",
            "hangs", "left behind: …"
        results: rank -> what the others returned
    """

    def __init__(
        self, what: str, failures: dict[int, str], details: dict[int, str], results: dict[int, Any] | None = None
    ) -> None:
        self.failures = failures
        self.results = results or {}
        lines = [f"{what}: {len(failures)} of the ranks failed."]
        for rank in sorted(failures):
            lines.append(f"\nrank {rank} {failures[rank]}")
            if details.get(rank):
                lines.append(_indented(details[rank]))
        super().__init__("\n".join(lines))


def pool(framework: str, world_size: int, *, call_s: int | None = None) -> Pool:
    """The workers of a framework, `world_size` of them; always the same ones as long as they are healthy.

    `call_s`: how long a call waits for the other ranks. Else it is long enough for a machine that is busy.
    """
    if framework not in ("torch", "mindspore", "none"):
        raise ValueError(f"No workers for this framework.\nExpected 'torch', 'mindspore' or 'none', got {framework!r}.")
    key = framework, world_size, call_s
    if key not in _pools:
        _pools[key] = Pool(framework, world_size, call_s)
    return _pools[key]


def run_program(command: list[str], *, deadline_s: float, cwd: Path | None = None, **variables: str) -> str:
    """What a command prints, all its output; it and all that it started are ended at the deadline."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**worker_environment(), **variables},
            cwd=cwd,
            start_new_session=True,  # a group of its own, to end launchers with their workers
        )
        try:
            code: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    if code is None:
        raise AssertionError(f"{' '.join(command)}\ndid not end within {deadline_s:g} s. Its output:\n{text}")
    assert code == 0, f"{' '.join(command)}\nended with exit code {code}. Its output:\n{text}"
    return text


def free_port() -> int:
    """A port of loopback that nobody listens on now. For launchers that want a number; a pool lets the kernel choose."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def worker_environment() -> dict[str, str]:
    """This process's variables, changed for many small processes on one machine."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HYPER_PARALLEL_PLATFORM": "torch",
        "OMP_NUM_THREADS": "1",
        "GLOG_v": os.environ.get("GLOG_v", "3"),  # noqa: SIM112 - its name
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",  # these ranks are on the CPU, also where a GPU is
        # bfloat16 matrix products end the process on some CPUs without this; elsewhere it changes nothing.
        "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"),
    }


class Pool:
    """The workers of one framework and world size, see `pool`. They start with the first `run`."""

    def __init__(self, framework: str, world_size: int, call_s: int | None = None) -> None:
        self.framework = framework
        self.world_size = world_size
        self._call_s = call_s
        self._workers: list[_Worker] = []

    @property
    def pids(self) -> list[int]:
        """By rank; empty while there are no workers."""
        return [worker.pid for worker in self._workers]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        deadline_s: float = 120.0,
        grace_s: float = _GRACE_S,
        **kwargs: Any,
    ) -> list[Any]:
        """`function(*args, **kwargs)` on every rank at once: the results, by rank. `grace_s`: how long after one rank has failed
        the others may still answer.

        Raises:
            RankError: a rank raised, did not return before the deadline, ended, or left something behind.
        """
        __tracebackhide__ = True  # the traceback that matters is the worker's
        file = getattr(sys.modules[function.__module__], "__file__", None)
        call = pickle.dumps((function.__module__, file, function.__qualname__))
        arguments = pickle.dumps((args, kwargs))
        if any(worker.has_ended() for worker in self._workers):
            self.close()  # ended while idle: no fault of this call
        try:
            if not self._workers:
                self._start()
            for worker in self._workers:
                worker.send(call, arguments)
            what = f"{function.__module__}.{function.__qualname__}"
            return self._collect(what, time.monotonic() + deadline_s, grace_s=grace_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.stop()

    def _start(self) -> None:
        try:
            self._meet()
        except RankError as error:
            if _NO_SERVER not in str(error):
                raise
            self.close()
            self._meet()

    def _meet(self) -> None:
        nursery = _nursery(self.framework)
        for rank in range(self.world_size):
            self._workers.append(nursery.fork(rank))
        deadline = time.monotonic() + (_START_S if self.framework == "mindspore" else _ANSWER_S)
        first, *others = self._workers
        # The kernel chooses the port, and rank 0 has it already when the others hear of it: nobody else can take it. (On MindSpore
        # rank 0 has found it free, and takes it a moment later.)
        first.send(pickle.dumps((self.world_size, 0, self._call_s)))
        port = self._collect("starting rank 0", deadline, [first])[0]
        for worker in others:
            worker.send(pickle.dumps((self.world_size, port, self._call_s)))
        self._collect("joining the process group", deadline)

    def _collect(
        self, what: str, deadline: float, workers: list[_Worker] | None = None, grace_s: float = _GRACE_S
    ) -> list[Any]:
        """One answer of each worker."""
        __tracebackhide__ = True
        waiting = {worker.connection: worker for worker in workers or self._workers}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        details: dict[int, str] = {}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left_s):
                worker = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    answer = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]  # noqa: S301 - of our own worker
                except (EOFError, OSError):
                    failures[worker.rank] = worker.how_it_ended()
                    details[worker.rank] = worker.output()
                else:
                    if answer.failure is None:
                        results[worker.rank] = answer.result
                    else:
                        failures[worker.rank] = answer.failure
                        details[worker.rank] = answer.details + worker.output()
                if worker.rank in failures:
                    deadline = min(deadline, time.monotonic() + grace_s)
        hangs = f"hangs waiting for {_ranks(failures)}" if failures else "hangs"
        for worker in waiting.values():
            details[worker.rank] = worker.stacks()
            failures[worker.rank] = hangs
        if failures:
            raise RankError(what, failures, details, results)
        return [results[rank] for rank in sorted(results)]


class Answer(NamedTuple):
    """What a worker sends back. `failure` is None where all went well."""

    result: Any
    failure: str | None = None
    details: str = ""


def log_of(pid: int, directory: str) -> Path:
    """Where the output of a worker goes."""
    return Path(directory, f"{pid}.log")


class _Worker:
    def __init__(self, nursery: _Nursery, rank: int, pid: int, connection: Connection, log: Path) -> None:
        self.rank = rank
        self.pid = pid
        self.connection = connection
        self._nursery = nursery
        self._log = log

    def send(self, *parts: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self._log, 0)  # an error shows the output of the call that failed
        with contextlib.suppress(BrokenPipeError):  # it has ended: whoever waits for its answer finds out how
            for part in parts:
                self.connection.send_bytes(part)

    def has_ended(self) -> bool:
        return self.connection.poll(0)  # it says nothing unasked

    def how_it_ended(self) -> str:
        code = self._nursery.exit_code(self.pid)
        if code is None:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def output(self) -> str:
        try:
            return self._log.read_text(errors="replace")[-_MOST_OUTPUT:]
        except OSError:
            return ""

    def stacks(self) -> str:
        """Where all its threads are, as it writes it when it gets the signal."""
        before = last = self.output()
        if self._is_stopped():
            return before
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        for _ in _until(time.monotonic() + _STACKS_S, pause_s=0.1):
            now = self.output()
            if now == last != before:  # it comes in pieces, each of them whole lines
                return now
            last = now
        return last

    def _is_stopped(self) -> bool:
        """Whether it was told to hold still (SIGSTOP): then it writes nothing."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def stop(self) -> None:
        self.connection.close()
        self._nursery.stop(self.pid)
        self._log.unlink(missing_ok=True)


class _Nursery:
    """The process that has imported a framework and forks workers."""

    def __init__(self, framework: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _NURSERY, framework, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={
                    **worker_environment(),
                    "HYPER_PARALLEL_PLATFORM": "mindspore" if framework == "mindspore" else "torch",
                },
                start_new_session=True,  # Ctrl-C is for this process alone: it ends the others
            )
        self._socket = ours
        KEPT.add(self._process.pid)
        self._directory = ""
        self._directory = self._answer(_START_S)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, rank: int) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self._ask(("fork", rank), [theirs.fileno()])
        return _Worker(self, rank, pid, Connection(ours.detach()), log_of(pid, self._directory))

    def exit_code(self, pid: int) -> int | None:
        """As in `subprocess`: negative for a signal; None if it runs."""
        for _ in _until(time.monotonic() + 2.0):
            code = self._ask(("exit_code", pid))
            if code is not None:
                return int(code)
        return None

    def stop(self, pid: int) -> None:
        if self.is_alive():  # else the workers have ended with it
            self._ask(("stop", pid))

    def close(self) -> None:
        self._socket.close()  # it ends its workers and itself
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)  # it was killed: else it did so itself
        KEPT.discard(self._process.pid)

    def _ask(self, question: tuple[Any, ...], descriptors: list[int] | None = None) -> Any:
        socket.send_fds(self._socket, [pickle.dumps(question)], descriptors or [])
        return self._answer(_ANSWER_S)

    def _answer(self, deadline_s: float) -> Any:
        self._socket.settimeout(deadline_s)
        try:
            answer = self._socket.recv(1 << 16)
        except TimeoutError:
            answer = b""
        if not answer:
            self.close()
            raise RuntimeError(f"The process that starts workers is gone or did not answer within {deadline_s:g} s.")
        return pickle.loads(answer)  # noqa: S301 - of our own process


_pools: dict[tuple[str, int, int | None], Pool] = {}
_nurseries: dict[str, _Nursery] = {}


def _nursery(framework: str) -> _Nursery:
    found = _nurseries.get(framework)
    if found is None or not found.is_alive():
        if found is not None:
            found.close()
        found = _nurseries[framework] = _Nursery(framework)
    return found


@atexit.register
def close_all() -> None:
    """End every worker and nursery. A later `run` starts new ones."""
    for each in _pools.values():
        with contextlib.suppress(Exception):
            each.close()
    while _nurseries:
        _nurseries.popitem()[1].close()


def _until(deadline: float, pause_s: float = 0.01) -> Iterator[None]:
    while time.monotonic() < deadline:
        yield
        time.sleep(pause_s)


def _ranks(failures: dict[int, str]) -> str:
    return ("rank " if len(failures) == 1 else "ranks ") + ", ".join(map(str, sorted(failures)))


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())
