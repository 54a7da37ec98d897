"""Send and receive, and picklable objects over them."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any, ClassVar

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.platform.communication.collectives import launch_all_gather
from hyper_parallel.platform.communication.handles import Handle
from hyper_parallel.platform.communication.transport import Transport, check_rank
from hyper_parallel.platform.interface import Platform
from hyper_parallel.platform.opaque import Group, Tensor


class PointToPoint(Platform):
    transport: ClassVar[Transport]

    @classmethod
    def isend(cls, tensor: Tensor, dst: int | None = None, group: Group = None, tag: int = 0) -> Handle:
        """Start sending to world rank `dst`; returns a handle."""
        transport = cls.transport
        transport.check_tensor(tensor, "isend")
        group = transport.group(group, "isend")
        peer = _check_peer(transport, dst, group, "dst", "isend")
        return launch_send(transport, tensor, peer, group, tag)

    @classmethod
    def irecv(cls, tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> Handle:
        """Start receiving from world rank `src` into the tensor; returns a handle."""
        transport = cls.transport
        transport.check_tensor(tensor, "irecv")
        group = transport.group(group, "irecv")
        peer = _check_peer(transport, src, group, "src", "irecv")
        return launch_receive(transport, tensor, peer, group, tag)

    @classmethod
    def send_object_list(cls, obj_list: list[Any], dst: int | None = None, group: Group = None) -> None:
        """Send picklable objects to world rank `dst`."""
        transport = cls.transport
        _check_list(obj_list, "send_object_list")
        group = transport.group(group, "send_object_list")
        peer = _check_peer(transport, dst, group, "dst", "send_object_list")
        parts = [pickle.dumps(value) for value in obj_list]
        sizes = transport.ints_to_tensor([len(part) for part in parts], group)
        data = transport.bytes_to_tensor(b"".join(parts), group)
        for tensor in (sizes, data):
            launch_send(transport, tensor, peer, group, 0, "send_object_list").wait()

    @classmethod
    def recv_object_list(cls, obj_list: list[Any], src: int | None = None, group: Group = None) -> None:
        """Receive as many objects as the list has entries from world rank `src`, into the list."""
        transport = cls.transport
        _check_list(obj_list, "recv_object_list")
        group = transport.group(group, "recv_object_list")
        peer = _check_peer(transport, src, group, "src", "recv_object_list")
        sizes = transport.ints_to_tensor([0] * len(obj_list), group)
        launch_receive(transport, sizes, peer, group, 0, "recv_object_list").wait()
        lengths = [int(length) for length in sizes.tolist()]
        data = transport.bytes_to_tensor(bytes(sum(lengths)), group)
        launch_receive(transport, data, peer, group, 0, "recv_object_list").wait()
        received, start = transport.tensor_to_bytes(data), 0
        for position, length in enumerate(lengths):
            obj_list[position] = pickle.loads(received[start : start + length])  # noqa: S301 - of our own ranks
            start += length

    @classmethod
    def all_gather_object(cls, object_list: list[Any], obj: object, group: Group = None) -> None:
        """Put every rank's object into the list, in group order. The list has one entry per rank."""
        call, transport = "all_gather_object", cls.transport
        group = transport.group(group, call)
        ranks = transport.ranks_of(group)
        if not isinstance(object_list, list) or len(object_list) != len(ranks):
            raise ArgumentError(
                "`all_gather_object` fills a list.",
                expected=f"a list of {len(ranks)} entries",
                got=describe(object_list),
            )
        mine = pickle.dumps(obj)
        sizes, handle = launch_all_gather(transport, transport.ints_to_tensor([len(mine)], group), group, call)
        handle.wait()
        lengths = [int(length) for length in sizes.tolist()]
        longest = max(lengths)
        padded = transport.bytes_to_tensor(mine.ljust(longest, b"\0"), group)
        data, handle = launch_all_gather(transport, padded, group, call)
        handle.wait()
        received = transport.tensor_to_bytes(data)
        for position, length in enumerate(lengths):
            start = position * longest
            object_list[position] = pickle.loads(received[start : start + length])  # noqa: S301 - of our own ranks


def launch_send(transport: Transport, tensor: Any, peer: int, group: Any, tag: int, call: str = "isend") -> Handle:
    data = transport.contiguous(tensor)
    return transport.launch(call, group, transport.launch_send, data, peer, group, tag, peer=peer)[1]


def launch_receive(transport: Transport, tensor: Any, peer: int, group: Any, tag: int, call: str = "irecv") -> Handle:
    target, then = tensor, None
    if not transport.is_writable_in_place(tensor):
        target = transport.copy(tensor)
        then = partial(transport.write, tensor, target)
    return transport.launch(call, group, transport.launch_receive, target, peer, group, tag, peer=peer, then=then)[1]


def _check_peer(transport: Transport, rank: object, group: Group, name: str, call: str) -> int:
    peer = check_rank(rank, transport.ranks_of(group), name, call)
    if peer == transport.rank():
        raise ArgumentError(f"`{call}` is between two ranks.", expected=f"another rank than {peer}", got="itself")
    return peer


def _check_list(objects: object, call: str) -> None:
    if not isinstance(objects, list) or not objects:
        raise ArgumentTypeError(
            f"`{call}` takes a list.", expected="a list of at least one object", got=describe(objects)
        )
