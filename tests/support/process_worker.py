"""What runs in the processes of `support.processes`: the nursery, and the workers that it forks.

A worker holds nothing between calls. After each it looks for what the function left: threads, and what its framework knows of
(bytes of the swap engine, process groups other than the world's).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from support.processes import Answer, free_port, log_of

_PR_SET_PDEATHSIG = 1


def nursery(framework: Framework, control: socket.socket) -> None:
    """Import the framework, then fork workers until the other end is closed. One thread, so that a fork copies all there is."""
    framework.load()
    gc.collect()
    gc.freeze()  # what is there now is no worker's garbage: their collections take a millisecond
    workers: set[int] = set()
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_ranks_") as directory:
        control.send(pickle.dumps(directory))
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
            if not message:
                break
            question, number = pickle.loads(message)  # noqa: S301 - of our own process
            if question == "fork":
                answer: int | None = _fork(number, framework, descriptors[0], directory, control)
                workers.add(answer)
            else:
                if question == "stop" and number in workers:
                    os.kill(number, signal.SIGKILL)  # not reaped yet, so the number is still its own
                answer = _exit_code(number, workers, is_ending=question == "stop")
            control.send(pickle.dumps(answer))
        for pid in list(workers):
            os.kill(pid, signal.SIGKILL)
            _exit_code(pid, workers, is_ending=True)


def _exit_code(pid: int, workers: set[int], *, is_ending: bool) -> int | None:
    if pid not in workers:
        return _ended.get(pid)
    found, status = os.waitpid(pid, 0 if is_ending else os.WNOHANG)
    if not found:
        return None
    workers.discard(pid)
    _ended[pid] = os.waitstatus_to_exitcode(status)
    return _ended[pid]


_ended: dict[int, int] = {}


def _fork(rank: int, framework: Framework, connection: int, directory: str, control: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            control.close()
            output = os.open(log_of(os.getpid(), directory), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            _work(rank, framework, Connection(connection))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(connection)
    _ended.pop(pid, None)
    return pid


def _work(rank: int, framework: Framework, connection: Connection) -> None:
    if sys.platform == "linux":  # the nursery may be killed while this process waits for another rank
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    world_size, port, call_s = pickle.loads(connection.recv_bytes())  # noqa: S301 - of our own process
    port = framework.open_world(rank, world_size, port)
    if rank == 0:
        connection.send_bytes(pickle.dumps(Answer(port)))
    framework.join_world(rank, world_size, framework.call_s if call_s is None else call_s)
    connection.send_bytes(pickle.dumps(Answer(None)))
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())  # noqa: S301 - of our own process
            arguments = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_run(framework, call, arguments))


def _run(framework: Framework, call: tuple[str, str | None, str], arguments: bytes) -> bytes:
    framework.reset()
    threads = set(threading.enumerate())
    try:
        function = _find(*call)
        args, kwargs = pickle.loads(arguments)  # noqa: S301 - of our own process
        result = function(*args, **kwargs)
        answer = pickle.dumps(Answer(result))
        del result, args, kwargs
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return pickle.dumps(Answer(None, f"raised {type(error).__name__}: {error}", text))
    gc.collect()
    left = [f"thread {each.name}" for each in set(threading.enumerate()) - threads if not each.daemon]
    left += framework.left_behind()
    return pickle.dumps(Answer(None, f"left behind: {', '.join(left)}")) if left else answer


def _find(module: str, file: str | None, name: str) -> Callable[..., Any]:
    """By file, so that a test may send a function of its own: test files are in no package."""
    if module not in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    if module not in sys.modules:
        spec = None if file is None else importlib.util.spec_from_file_location(module, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{module} ({file}) cannot be imported")
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


class Framework:
    """Processes without a framework, and what one with it does besides.

    `call_s`: how long a call waits for the other ranks, unless a pool says otherwise.
    """

    call_s = 300  # longer than any test: who waits for the workers has the deadline

    def load(self) -> None:
        """In the nursery: import what workers need. No threads, and no device."""

    def open_world(self, rank: int, world_size: int, port: int) -> int:
        """The port at which ranks meet: rank 0 gets 0 and finds a free one, the others are told."""
        return port

    def join_world(self, rank: int, world_size: int, call_s: int) -> None:
        """Wait for all ranks."""

    def reset(self) -> None:
        """Before each call: nothing depends on the calls before it."""

    def left_behind(self) -> list[str]:
        """After each call."""
        return []


class Torch(Framework):
    def load(self) -> None:
        import pytest  # noqa: F401 - test files import it
        import torch.distributed.checkpoint.state_dict
        import torch.distributed.fsdp
        import torch.distributed.tensor.parallel  # noqa: F401

        import hyper_parallel.core.activation_checkpoint
        import hyper_parallel.platform.torch.activation_checkpoint  # noqa: F401
        import support.swapping  # noqa: F401

    def open_world(self, rank: int, world_size: int, port: int) -> int:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, wait_for_workers=False)
        return int(self._store.port)

    def join_world(self, rank: int, world_size: int, call_s: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._store.port),
        )
        timeout = timedelta(seconds=call_s)
        dist.init_process_group("gloo", store=self._store, rank=rank, world_size=world_size, timeout=timeout)
        dist.barrier()

    def reset(self) -> None:
        import torch

        torch.manual_seed(0)

    def left_behind(self) -> list[str]:
        import torch.distributed as dist

        from support.swapping import check_nothing_left

        if not dist.is_initialized():
            return ["no process group: it was destroyed"]
        left = [
            f"process group {name} of ranks {dist.get_process_group_ranks(group)}"
            for group, name in dist.distributed_c10d._world.pg_names.items()
            if group is not dist.group.WORLD and group not in _kept_groups
        ]
        try:
            check_nothing_left()
        except AssertionError as error:
            left.append(str(error))
        return left


class MindSpore(Framework):
    """A process forked after the import of MindSpore, and before its first operator, works as one of its own does."""

    call_s = 60

    def load(self) -> None:
        import mindspore  # noqa: F401
        import pytest  # noqa: F401 - test files import it

        import support.backends  # noqa: F401

    def open_world(self, rank: int, world_size: int, port: int) -> int:
        self._port = port or free_port()  # MindSpore's store does not tell which port the kernel chose
        return self._port

    def join_world(self, rank: int, world_size: int, call_s: int) -> None:
        os.environ["HYPER_PARALLEL_PLATFORM"] = "mindspore"
        from hyper_parallel.platform.mindspore.platform import MindSporePlatform

        self._platform = MindSporePlatform()
        method = f"tcp://127.0.0.1:{self._port}"
        os.environ["MS_CPU_COMM_OP_TIMEOUT"] = str(call_s)
        self._platform.init_process_group(
            init_method=method, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        self._platform.barrier()  # the first communication connects the ranks, which takes seconds

    def reset(self) -> None:
        self._platform.manual_seed(0)

    def left_behind(self) -> list[str]:
        from hyper_parallel.platform.interface import EXISTING_COMM_GROUPS

        left = [key for key, group in EXISTING_COMM_GROUPS.items() if group not in _kept_groups]
        for key in left:
            del EXISTING_COMM_GROUPS[key]
        return [f"process group of ranks {key}" for key in left]


_kept_groups: set[Any] = set()


@functools.cache
def kept_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """A mesh of several axes, for functions that run here. Its process groups live as long as the worker.

    They cannot be ended after a call: DTensor remembers meshes, and takes the groups of an equal one that it has met before.
    """
    import torch.distributed as dist

    before = set(dist.distributed_c10d._world.pg_names)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    _kept_groups.update(set(dist.distributed_c10d._world.pg_names) - before)
    return mesh


@functools.cache
def kept_group(platform: Any, ranks: tuple[int, ...]) -> Any:
    """A group of the platform, for functions that run here. It lives as long as the worker: making one takes MindSpore a second."""
    group = platform._create_group(ranks)
    _kept_groups.add(group)
    return group


def keep_platform_groups() -> None:
    """The groups that the platform has cached so far live as long as the worker, for meshes of functions that run here."""
    from hyper_parallel.platform.interface import EXISTING_COMM_GROUPS

    _kept_groups.update(EXISTING_COMM_GROUPS.values())


def keep_all_groups() -> None:
    """All groups of torch.distributed that exist live as long as the worker: those of its meshes cannot be ended."""
    import torch.distributed as dist

    _kept_groups.update(dist.distributed_c10d._world.pg_names)


FRAMEWORKS = {"none": Framework, "torch": Torch, "mindspore": MindSpore}


def main() -> None:
    nursery(FRAMEWORKS[sys.argv[1]](), socket.socket(fileno=int(sys.argv[2])))
