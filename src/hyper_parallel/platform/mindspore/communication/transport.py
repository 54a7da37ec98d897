"""MindSpore's own communication as a transport.

On the CPU it is `host.py`: done when a call returns. On Ascend it is the framework's own calls with its own handles,
which no test of ours has run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mindspore
import mindspore.mint.distributed as dist
import numpy as np
from mindspore import Tensor, communication, mint
from mindspore.common import dtype as mstype
from mindspore.communication import GlobalComm
from mindspore.communication._comm_helper import _is_initialized
from mindspore.graph.api import _no_grad, _pynative_executor

from hyper_parallel._base.errors import ArgumentError, StateError, describe
from hyper_parallel.platform.communication.board import Board
from hyper_parallel.platform.communication.handles import Handle
from hyper_parallel.platform.communication.reductions import Reduction
from hyper_parallel.platform.communication.roll_call import RollCall
from hyper_parallel.platform.communication.transport import Launched, Transport
from hyper_parallel.platform.mindspore.communication import host, starting
from hyper_parallel.platform.mindspore.devices import Devices
from hyper_parallel.platform.mindspore.tensors import is_whole

_BACKENDS = {"cpu": "mccl", "npu": "hccl", "gpu": "nccl"}


class MindSporeTransport(Transport):
    tensor_type = Tensor
    looks_before = False  # nobody ends a wait here: the rank that began first would wait for its timeout
    reductions: ClassVar[dict[Any, Reduction]] = {}  # MindSpore's own names are strings: sum, max, min, prod

    def __init__(self) -> None:
        self._roll_call: RollCall | None = None
        self._store: Any = None
        self._store_of_saves: tuple[Any, Any] = None, None
        self._was_ended = False
        self._ranks: dict[str, tuple[int, ...]] = {}

    # Groups

    @property
    def roll_call(self) -> RollCall:
        if self._roll_call is None:
            store = None if self._store is None else starting.connect_again(self._store)
            # On the CPU messages do not say to which call or group they belong: those of a failed one would be taken
            # for later ones.
            self._roll_call = RollCall(self.rank(), store, self.is_up, 0, breaks_all=_is_host())
        return self._roll_call

    def store_of_saves(self) -> Any:
        if self._store is None or not self.is_up():
            return None
        of, store = self._store_of_saves
        if of is not self._store:
            store = starting.connect_again(self._store)
            self._store_of_saves = self._store, store
        return store, self._store

    def is_up(self) -> bool:
        return not self._was_ended and _is_initialized()

    # The group is named in every call: its default was fixed to Ascend's when MindSpore was imported.

    def rank(self) -> int:
        return communication.get_rank(GlobalComm.WORLD_COMM_GROUP) if self.is_up() else 0

    def world(self) -> str:
        return GlobalComm.WORLD_COMM_GROUP

    def own_group(self, group: object) -> Any:
        if not isinstance(group, str):
            return None
        return group if group == self.world() or group in self._ranks or self._adopt(group) else None

    def ranks_of(self, group: str) -> tuple[int, ...]:
        if group not in self._ranks:
            self._ranks[group] = tuple(dist.get_process_group_ranks(group))
        return self._ranks[group]

    def name_of(self, group: str) -> str:
        return group

    def backend_of(self, group: str) -> str:
        return _BACKENDS[Devices.device_type()]

    def start(self, backend: str | None, **settings: Any) -> None:
        if self._was_ended and Devices.device_type() == "cpu":
            raise StateError(
                "MindSpore on the CPU starts communication once in a process.",
                expected="a process in which it was not ended",
                got="one in which `destroy_process_group()` was called",
                do="Create and destroy groups of the world instead of the world itself.",
            )
        fitting = _BACKENDS[Devices.device_type()]
        if backend not in (None, fitting):
            raise ArgumentError("This backend does not fit the device.", expected=repr(fitting), got=describe(backend))
        self._store = starting.start(fitting, settings)
        if self._store is not None and _is_host():
            self.board = Board.join(self._store, self.rank(), len(self.ranks_of(self.world())))
        self._was_ended = False

    def end(self, group: Any) -> None:
        if group is None:
            self._was_ended = True
            if self.board is not None:
                self.board.close()
            self._roll_call = self._store = self.board = None
            self._ranks.clear()
            dist.destroy_process_group()
        else:
            _pynative_executor.sync()  # a send that is still queued would be lost
            self._ranks.pop(group, None)
            communication.destroy_group(group)

    def new_group(
        self, ranks: tuple[int, ...], number: int, timeout: object, options: object, description: str | None
    ) -> str:
        name = f"hyper_parallel_{'_'.join(map(str, ranks))}_{number}"
        communication.create_group(name, list(ranks), options)
        self._ranks[name] = ranks
        return name

    def _adopt(self, group: str) -> bool:
        """Take on a group that the program made by itself, if it is there; say whether it is."""
        try:
            self._ranks[group] = tuple(dist.get_process_group_ranks(group))
        except (RuntimeError, ValueError):
            return False
        if self.rank() not in self._ranks[group]:
            del self._ranks[group]
            return False
        return True

    # Tensors

    def contiguous(self, tensor: Tensor) -> Tensor:
        with _no_grad():
            return tensor if is_whole(tensor) else self.copy(tensor)

    def is_writable_in_place(self, tensor: Tensor) -> bool:
        return is_whole(tensor) if _is_host() else tensor.is_contiguous()

    def copy(self, tensor: Tensor) -> Tensor:
        with _no_grad():
            return host.copied(tensor) if _is_host() else tensor.contiguous().clone()

    def write(self, target: Tensor, values: Tensor) -> None:
        with _no_grad():
            if _is_host() and not is_whole(target):
                host.write(target, values)
            else:
                target.copy_(values)

    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return mint.zeros(tuple(shape), dtype=like.dtype)

    def is_floating(self, tensor: Tensor) -> bool:
        return tensor.dtype in mstype.float_type + mstype.complex_type

    def cat(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        return mint.cat(list(tensors), dim)

    def parts(self, tensor: Tensor, num_parts: int, dim: int) -> list[Tensor]:
        length = tensor.shape[dim] // num_parts
        return [mint.narrow(tensor, dim, position * length, length) for position in range(num_parts)]

    def where_equal(self, left: Tensor, right: Tensor) -> Tensor:
        if left.dtype == mindspore.bfloat16:  # which the CPU does not compare; float32 holds it exactly
            return (left.to(mindspore.float32) == right.to(mindspore.float32)).to(left.dtype)
        return (left == right).to(left.dtype)

    def bytes_to_tensor(self, data: bytes, group: object) -> Tensor:
        if not data:
            return mint.empty((0,), dtype=mindspore.uint8)
        return Tensor(np.frombuffer(data, dtype=np.uint8).copy())

    def ints_to_tensor(self, numbers: Sequence[int], group: object) -> Tensor:
        return Tensor(np.array(list(numbers), dtype=np.int64))

    def tensor_to_bytes(self, tensor: Tensor) -> bytes:
        return tensor.asnumpy().tobytes()

    def pending(self, tensor: Tensor, handle: Handle) -> Tensor:
        handle.wait()  # on Ascend the stream waits, not the host
        return tensor

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        _pynative_executor.queue_backward_final_callback(function)

    # Communication

    def join(self, work: Any, entry: object) -> None:
        work.wait()

    def is_completed(self, work: Any) -> bool:
        return False  # MindSpore's handles do not tell

    def is_failure(self, error: Exception, is_pair: bool) -> bool:
        # A call is over when it returns, so that this may be its end as well as its beginning.
        return isinstance(error, RuntimeError)

    def launch_all_reduce(self, tensor: Tensor, op: Reduction, group: str) -> Launched:
        if _is_host():
            host.check_dtype(tensor)
            host.all_reduce(tensor, op, group)
            return tensor, None, None
        return tensor, dist.all_reduce(tensor, host.NATIVE[op], group, async_op=True), None

    def launch_all_gather(self, tensor: Tensor, group: str) -> Launched:
        if _is_host():
            host.check_dtype(tensor)
            return host.all_gather(tensor, group), None, None
        output = mint.empty((tensor.shape[0] * len(self.ranks_of(group)), *tensor.shape[1:]), dtype=tensor.dtype)
        return output, dist.all_gather_into_tensor(output, tensor, group, async_op=True), None

    def launch_reduce_scatter(self, tensor: Tensor, op: Reduction, group: str) -> Launched:
        if _is_host():
            host.check_dtype(tensor)
            ranks = self.ranks_of(group)
            return host.reduce_scatter(tensor, op, ranks, ranks.index(self.rank()), group), None, None
        output = mint.empty((tensor.shape[0] // len(self.ranks_of(group)), *tensor.shape[1:]), dtype=tensor.dtype)
        return output, dist.reduce_scatter_tensor(output, tensor, host.NATIVE[op], group, async_op=True), None

    def launch_broadcast(self, tensor: Tensor, src: int, group: str) -> Launched:
        if _is_host():
            host.check_dtype(tensor)
            host.broadcast(tensor, src, group)
            return tensor, None, None
        return tensor, dist.broadcast(tensor, src, group, async_op=True), None

    def launch_all_to_all(
        self, tensor: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], group: str
    ) -> Launched:
        if _is_host():
            host.check_dtype(tensor)
            ranks = self.ranks_of(group)
            me = ranks.index(self.rank())
            return host.all_to_all(tensor, input_splits, output_splits, ranks, me, group), None, None
        output = mint.empty((sum(output_splits), *tensor.shape[1:]), dtype=tensor.dtype)
        work = dist.all_to_all_single(output, tensor, list(output_splits), list(input_splits), group, async_op=True)
        return output, work, None

    def launch_send(self, tensor: Tensor, dst: int, group: str, tag: int) -> Launched:
        if _is_host():
            host.check_dtype(tensor)
            host.send(tensor, dst, group)
            return tensor, None, None
        return tensor, dist.isend(tensor, dst, group, tag), None

    def launch_receive(self, tensor: Tensor, src: int, group: str, tag: int) -> Launched:
        if _is_host():
            host.check_dtype(tensor)
            host.receive(tensor, src, group)
            return tensor, None, None
        return tensor, dist.irecv(tensor, src, group, tag), None

    def launch_barrier(self, group: str, device_ids: Any) -> Launched:
        if _is_host():
            dist.barrier(group)
            return None, None, None
        return None, dist.barrier(group, async_op=True), None


@functools.cache  # a process works on one device, and asking MindSpore for it costs as much as the rest of a call
def _is_host() -> bool:
    return Devices.device_type() == "cpu"
