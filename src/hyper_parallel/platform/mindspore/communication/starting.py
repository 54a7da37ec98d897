"""Starting MindSpore's communication, without its scheduler process where the ranks are told where to meet."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import socket
from datetime import timedelta
from typing import Any

import mindspore.communication as communication
import mindspore.communication.comm_func as comm_func
import mindspore.mint.distributed as dist
import mindspore.mint.distributed.distributed as mint_distributed
import numpy as np
from mindspore import Tensor
from mindspore.communication import GlobalComm
from mindspore.communication.management import _init_with_store
from mindspore.mint.distributed import TCPStore

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.platform.mindspore.devices import Devices

# How long a call of the CPU's backend waits for the other ranks, in seconds; 30 where it is not set. Read by MindSpore
# at its first use.
OP_TIMEOUT = "MS_CPU_COMM_OP_TIMEOUT"

# How long a request waits for an answer of the store, in seconds; 15 where it is not set. MindSpore holds Python's lock
# meanwhile: while rank 0, which has the store, is stopped or dying, no thread of any other rank runs. Who waits for a
# key asks again and again, and may wait longer.
_STORE_TIMEOUT, _STORE_TIMEOUT_S = "MS_RECEIVE_MSG_TIMEOUT", 3

_DEFAULT_TIMEOUT = timedelta(seconds=300)


def start(backend: str, settings: dict[str, Any]) -> Any:
    """Join the world; return the store at which the ranks met, or None where they have none (msrun on Ascend)."""
    timeout: timedelta = settings["timeout"] or _DEFAULT_TIMEOUT
    if settings["timeout"] is not None and backend == "mccl":
        os.environ.setdefault(OP_TIMEOUT, str(max(1, math.ceil(timeout.total_seconds()))))
    store, rank, num_ranks = settings["store"], settings["rank"], settings["world_size"]
    address = None
    if settings["init_method"] is not None and not isinstance(settings["init_method"], str):
        raise ArgumentTypeError(
            "`init_method` is an address.", expected='a text such as "env://"', got=describe(settings["init_method"])
        )
    if store is None and settings["init_method"] not in (None, "env://"):
        address = _address(settings["init_method"])
    elif store is None and "MS_ROLE" in os.environ:  # started by msrun: its scheduler knows everyone
        communication.init(backend)
        _name_the_world(backend)
        return _met_again(timeout) if backend == "mccl" else None
    elif store is None:
        address, rank, num_ranks = _from_environment(rank, num_ranks)
    if (as_int(rank) or 0) < 0 or (as_int(num_ranks) or 0) < 1 or as_int(rank) is None:
        raise ArgumentError(
            "A rank joins the others by its number.", expected="rank and world_size",
            got=f"rank {describe(rank)}, world_size {describe(num_ranks)}",
        )  # fmt: skip
    os.environ.setdefault(_STORE_TIMEOUT, str(_STORE_TIMEOUT_S))
    if store is None and address is not None:
        store = _kept(TCPStore(*address, num_ranks, rank == 0, timeout))
    _init_with_store(backend=backend, timeout=timeout, world_size=num_ranks, rank=rank, store=store)
    _name_the_world(backend)
    return store


def _met_again(timeout: timedelta) -> Any:
    """Make a store at which ranks that msrun's scheduler brought together can ask each other.

    None where it cannot be had. It is on the scheduler's host, where rank 0 is unless somebody has ordered the nodes in
    another way.
    """
    world, host = GlobalComm.WORLD_COMM_GROUP, os.environ.get("MS_SCHED_HOST", "127.0.0.1")
    rank, num_ranks = communication.get_rank(world), communication.get_group_size(world)
    if num_ranks == 1:
        return None
    store, port = None, 0
    if rank == 0:
        with contextlib.suppress(OSError, RuntimeError):  # another host's address: nobody can be asked
            with socket.create_server((host, 0)) as server:
                port = int(server.getsockname()[1])
            store = _kept(TCPStore(host, port, num_ranks, True, timeout, False))
    told = Tensor(np.array([0 if store is None else port], np.int64))
    dist.broadcast(told, 0, world)
    port = int(told.asnumpy()[0])
    return store if rank == 0 or port == 0 else _kept(TCPStore(host, port, num_ranks, False, timeout))


def connect_again(store: Any) -> Any:
    """Open a connection of its own to the same store."""
    return _kept(TCPStore(store.host, store.port, None, False, timedelta(seconds=5)))


def _kept(store: object) -> Any:
    """Let a store live as long as the process.

    The end of one meets the thread that serves it, which at times ends the process (SIGSEGV). Not on Ascend, where
    communication can be started again, and at the same address.
    """
    if Devices.device_type() == "cpu":
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store


def _name_the_world(backend: str) -> None:
    # MindSpore froze Ascend's name of the world into these defaults when it was imported.
    if backend != "hccl":
        for module in (mint_distributed, comm_func):
            for function in (module.get_cache_group_size, module.get_cache_group_rank):
                function.__defaults__ = (GlobalComm.WORLD_COMM_GROUP,)


def _address(init_method: object) -> tuple[str, int]:
    host, _, port = str(init_method).removeprefix("tcp://").rpartition(":")
    if not str(init_method).startswith("tcp://") or not host or not port.isdigit():
        raise ArgumentError(
            "`init_method` says where the ranks meet.",
            expected="'tcp://host:port' or 'env://'",
            got=describe(init_method),
        )
    return host, int(port)


def _from_environment(rank: int, num_ranks: int) -> tuple[tuple[str, int], int, int]:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise StateError(
            "The ranks do not know where to meet.",
            expected="a store, an init_method, msrun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            got=f"no {', '.join(missing)} in the environment",
            do="Start the program with `msrun`, or pass init_method='tcp://host:port', rank and world_size.",
        )
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank = int(os.environ["RANK"]) if rank < 0 else rank
    return address, rank, int(os.environ["WORLD_SIZE"]) if num_ranks < 1 else num_ranks
