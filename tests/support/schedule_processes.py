"""Whether a schedule works, seen by processes that follow their lists: each rank is a process, each send waits until it is
received. Everything here runs in the workers of `support.processes`.

A tensor is a token here, as in `schedule_player`, a message its name over a socket. A rank that cannot go on, for want
of a token or because another message came than it expects, closes its sockets; so does one whose list is at its end.
Who waits for it then fails as well. Ranks that wait for each other do so until the deadline.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hyper_parallel.core.parallel.pipeline.actions import Action
from hyper_parallel.core.parallel.pipeline.schedule import Schedule
from support.schedule_player import GIVES, TAKES

_LENGTH = 32  # bytes of a message


class Rank:
    """One rank of one schedule."""

    def __init__(self, schedule: Schedule, rank: int, peers: dict[int, socket.socket], deadline: float) -> None:
        self._schedule, self._rank, self._peers, self._deadline = schedule, rank, peers, deadline
        self._last = schedule.num_stages - 1
        self._kinds = {action.kind.value for actions in schedule.ranks for action in actions}
        self._held: Counter[Any] = Counter()
        self._wanted: Counter[Any] = Counter()
        for stage in range(self._last + 1):
            for microbatch in range(schedule.num_microbatches):
                if schedule.placement.rank_of(stage, microbatch) == rank:
                    self._held["input", stage, microbatch] += stage == 0
                    self._held["sharded", stage, None] = self._wanted["sharded", stage, None] = 1
                    self._wanted["sum", stage, microbatch] = 1

    def works(self) -> bool:
        try:
            return all(self._does(action) for action in self._schedule.ranks[self._rank]) and self._held == self._wanted
        except OSError:  # a peer has closed, or the deadline has come
            return False
        finally:
            for peer in self._peers.values():
                peer.close()

    def _does(self, action: Action) -> bool:
        if action.kind.value.startswith("RECV"):
            return self._receives(action)
        parts = [(part.kind.value, part.stage, part.microbatch) for part in action.parts or (action,)]
        takes = Counter((taken, stage, number) for kind, stage, number in parts for taken in TAKES[kind])
        is_whole = not self._kinds & {"UNSHARD", "RESHARD"} or all(
            self._held["whole", stage, None] for kind, stage, _ in parts if kind in "FBIW"
        )
        if not takes <= self._held or not is_whole:
            return False
        self._held -= takes
        if action.kind.value.startswith("SEND"):
            return self._sends(action)
        for kind, stage, number in parts:
            self._give(kind, stage, number)
        return True

    def _give(self, kind: str, stage: int, number: int | None) -> None:
        self._held.update((given, stage, None if "SHARD" in kind else number) for given in GIVES.get(kind, []))
        self._held["owed", stage, None] |= kind in "BW" and "REDUCE_GRAD" in self._kinds
        if kind == "F" and stage == self._last:
            self._held["grad", stage, number] += 1
        elif kind == "F" or (kind in "BI" and stage > 0):
            to, here, there = (stage + 1, "output", "input") if kind == "F" else (stage - 1, "back", "grad")
            is_near = self._schedule.placement.rank_of(to, number or 0) == self._rank
            self._held[(there, to, number) if is_near else (here, stage, number)] += 1

    def _sends(self, action: Action) -> bool:
        to = action.stage + (1 if action.kind.value == "SEND_F" else -1)
        peer = self._peers.get(self._schedule.placement.rank_of(to, action.microbatch or 0))
        if peer is None:
            return False
        name = f"{to} {action.kind.value.replace('SEND', 'RECV')} {action.microbatch}"
        self._wait(peer).sendall(name.encode().ljust(_LENGTH))
        return self._wait(peer).recv(1) == b"+"

    def _receives(self, action: Action) -> bool:
        source = action.stage + (-1 if action.kind.value == "RECV_F" else 1)
        peer = self._peers.get(self._schedule.placement.rank_of(source, action.microbatch or 0))
        if peer is None:
            return False
        text = b""
        while len(text) < _LENGTH:
            part = self._wait(peer).recv(_LENGTH - len(text))
            if not part:
                return False
            text += part
        if text.decode().strip() != f"{action.stage} {action.kind.value} {action.microbatch}":
            return False
        self._held["input" if action.kind.value == "RECV_F" else "grad", action.stage, action.microbatch] += 1
        self._wait(peer).sendall(b"+")
        return True

    def _wait(self, peer: socket.socket) -> socket.socket:
        peer.settimeout(max(0.01, self._deadline - time.monotonic()))
        return peer


def work(schedules: Sequence[Schedule], deadline_s: float) -> list[bool]:
    """Whether this rank's list of each schedule comes to its end, with nothing left over. All run at the same time."""
    rank = dist.get_rank()
    results: dict[int, bool] = {}
    meshes = [_connected(rank, len(schedule.ranks)) for schedule in schedules]
    deadline = time.monotonic() + deadline_s

    def run(number: int) -> None:
        results[number] = Rank(schedules[number], rank, meshes[number], deadline).works()

    threads = [
        threading.Thread(target=run, args=[number])
        for number, schedule in enumerate(schedules)
        if rank < len(schedule.ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results.get(number, True) for number in range(len(schedules))]


def _connected(rank: int, num: int) -> dict[int, socket.socket]:
    """One socket to each other rank of a schedule. All ranks of the world call it."""
    server = socket.create_server(("127.0.0.1", 0))
    ports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ports, server.getsockname()[1])
    peers: dict[int, socket.socket] = {}
    with server:
        if rank < num:
            for other in range(rank):
                peers[other] = socket.create_connection(("127.0.0.1", ports[other]))
                peers[other].sendall(bytes([rank]))
            for _ in range(rank + 1, num):
                found, _address = server.accept()
                peers[found.recv(1)[0]] = found
        dist.barrier()
    return peers
