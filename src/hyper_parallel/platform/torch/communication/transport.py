"""`torch.distributed` as a transport."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.platform.arguments import in_our_words
from hyper_parallel.platform.communication.board import Board
from hyper_parallel.platform.communication.handles import Handle
from hyper_parallel.platform.communication.reductions import Reduction
from hyper_parallel.platform.communication.roll_call import RollCall
from hyper_parallel.platform.communication.transport import Launched, Transport
from hyper_parallel.platform.torch.communication.pending import PendingTensor
from hyper_parallel.platform.torch.communication.staging import launch_staged_receive, launch_staged_send
from hyper_parallel.platform.torch.devices import Devices

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "xpu": "xccl"}

# The names changed in PyTorch 2.13, where the older ones warn.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)

# A wait on the host is made of pieces this long, between which it can be told that it is in vain.
_PIECE = timedelta(seconds=0.5)


class TorchTransport(Transport):
    tensor_type = torch.Tensor
    looks_before = True  # gloo ends a process that is sent more than it has room for
    reductions = (
        {
            dist.ReduceOp.SUM: Reduction.SUM,
            dist.ReduceOp.AVG: Reduction.AVG,
            dist.ReduceOp.MAX: Reduction.MAX,
            dist.ReduceOp.MIN: Reduction.MIN,
            dist.ReduceOp.PRODUCT: Reduction.PROD,
        }
        if dist.is_available()
        else {}
    )

    def __init__(self) -> None:
        self._roll_call = RollCall(0, None)
        self._known_world: Callable[[], Any] = lambda: None
        self._store_of_saves: tuple[Callable[[], Any], Any] = (lambda: None, None)
        self._timeout: timedelta | None = None

    # Groups

    @property
    def roll_call(self) -> RollCall:
        world = dist.group.WORLD
        if self._known_world() is not world:  # started, or ended and started again, by us or by the program itself
            self._roll_call.stop()
            self._known_world = weakref.ref(world)
            store = _open_store()
            self._roll_call = RollCall(dist.get_rank(), store, self.is_up, _store_holder())
            self._close_board()
            self.board = _join_board(store)
        return self._roll_call

    def _close_board(self) -> None:
        board, self.board = self.board, None
        if board is not None:
            board.close()

    def store_of_saves(self) -> Any:
        if not self.is_up():
            return None
        of_world, store = self._store_of_saves
        if of_world() is not dist.group.WORLD:
            store = _open_store()
            self._store_of_saves = weakref.ref(dist.group.WORLD), store
        # The server of the store ends with the world's own object: who holds that may go on when the world has ended.
        return None if store is None else (store, c10d._get_default_store())

    def is_up(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    def rank(self) -> int:
        return dist.get_rank() if self.is_up() else 0

    def world(self) -> Any:
        return dist.group.WORLD

    def own_group(self, group: Any) -> Any:
        if isinstance(group, str):
            try:
                return c10d._resolve_process_group(group)
            except (RuntimeError, ValueError):
                return None
        return group if isinstance(group, dist.ProcessGroup) and group in c10d._world.pg_map else None

    def ranks_of(self, group: Any) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(group))

    def name_of(self, group: Any) -> str:
        return group.group_name

    def backend_of(self, group: Any) -> str:
        return dist.get_backend(group)

    def start(self, backend: str | None, **settings: Any) -> None:
        if backend is None:
            backend = _BACKENDS.get(Devices.device_type(), "gloo")
        self._timeout = settings["timeout"]
        given = {name: value for name, value in settings.items() if value is not None}
        with in_our_words("init_process_group", backend=backend, **given):
            dist.init_process_group(backend, **given)

    def end(self, group: Any) -> None:
        if group is None:
            self._close_board()
        dist.destroy_process_group(group)

    def new_group(
        self, ranks: tuple[int, ...], number: int, timeout: Any, options: Any, description: str | None
    ) -> Any:
        # Only members meet ("local synchronization"). PyTorch then names the group by the number of groups that this
        # process has, which is not the same on all members as soon as one of them is in another group: they would wait
        # for each other for ever.
        with _group_name(f"hyper_parallel_{'_'.join(map(str, ranks))}_{number}"):
            return dist.new_group(
                list(ranks),
                timeout=timeout or self._timeout,
                pg_options=options,
                use_local_synchronization=True,
                group_desc=description,
            )

    # Tensors

    def check_tensor(self, data: Any, call: str) -> None:
        super().check_tensor(data, call)
        if data.layout is not torch.strided:
            raise ArgumentTypeError(
                f"`{call}` takes a dense tensor.",
                expected="layout torch.strided",
                got=f"{data.layout}, {describe(data)}",
                do="Give `x.to_dense()`.",
            )

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        return _as_in_memory(tensor.detach()).contiguous()

    def is_writable_in_place(self, tensor: torch.Tensor) -> bool:
        is_as_in_memory = not (tensor.is_conj() or tensor.is_neg())
        return is_as_in_memory and tensor.is_contiguous() and type(tensor) is not PendingTensor

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return _as_in_memory(tensor.detach().clone(memory_format=torch.contiguous_format))

    def write(self, target: torch.Tensor, values: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(values)

    def zeros(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def is_floating(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() or tensor.is_complex()

    def cat(self, tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        return torch.cat(tuple(tensors), dim)

    def parts(self, tensor: torch.Tensor, num_parts: int, dim: int) -> list[torch.Tensor]:
        return list(tensor.split([tensor.shape[dim] // num_parts] * num_parts, dim))

    def where_equal(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left == right).to(left.dtype)

    def bytes_to_tensor(self, data: bytes, group: Any) -> torch.Tensor:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return tensor.to(_device_of(group))

    def ints_to_tensor(self, numbers: Sequence[int], group: Any) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=_device_of(group))

    def tensor_to_bytes(self, tensor: torch.Tensor) -> bytes:
        return tensor.cpu().numpy().tobytes()

    def pending(self, tensor: torch.Tensor, handle: Handle) -> torch.Tensor:
        return PendingTensor(tensor, handle)

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(function)

    # Communication

    def join(self, work: Any, entry: Any) -> None:
        if type(work) is not _HostWork:
            work.wait()
            return
        native = work.native
        while True:
            try:
                native.wait(_PIECE)
            except RuntimeError:
                if native.is_completed():
                    raise
                if self.roll_call.is_alarmed(entry):
                    raise RuntimeError(f"the wait was ended, since {entry.log.since or 'the store is gone'}") from None
            else:
                return

    def is_completed(self, work: Any) -> bool:
        return (work.native if type(work) is _HostWork else work).is_completed()

    def is_failure(self, error: Exception, is_pair: bool) -> bool:
        # Collectives start in a thread or on a stream: what is raised here is about the arguments, or a connection that
        # could not be made. A send on the CPU begins at once, and finds a connection that is closed. Under
        # TORCH_DISTRIBUTED_DEBUG=DETAIL all ranks meet in every call first.
        meets_others = is_pair or dist.get_debug_level() == dist.DebugLevel.DETAIL
        return isinstance(error, dist.DistError) or (meets_others and type(error) is RuntimeError)

    def launch_all_reduce(self, tensor: torch.Tensor, op: Reduction, group: Any) -> Launched:
        _check_reducible(tensor, op, group)
        work = dist.all_reduce(tensor, _NATIVE[op], group=group, async_op=True)
        return tensor, _work(work, tensor), None

    def launch_all_gather(self, tensor: torch.Tensor, group: Any, output: torch.Tensor | None = None) -> Launched:
        if output is None:
            output = tensor.new_empty((tensor.shape[0] * dist.get_world_size(group), *tensor.shape[1:]))
        sent, received = _sendable(tensor, group), _sendable(output, group)
        work = _all_gather(received, sent, group=group, async_op=True)
        return output, _work(work, tensor), None

    def launch_reduce_scatter(self, tensor: torch.Tensor, op: Reduction, group: Any) -> Launched:
        _check_reducible(tensor, op, group)
        num_ranks = dist.get_world_size(group)
        if tensor.device.type != "cpu":
            output = tensor.new_empty((tensor.shape[0] // num_ranks, *tensor.shape[1:]))
            work = _reduce_scatter(output, tensor, _NATIVE[op], group=group, async_op=True)
            return output, work, None
        # gloo's own is an all-reduce of which most is thrown away: twice the bytes. This adds up in the order of the
        # ranks, too.
        received = torch.empty_like(tensor)
        work = _work(dist.all_to_all_single(received, tensor, group=group, async_op=True), tensor)
        if num_ranks == 1:
            return received, work, None
        output = tensor.new_empty((tensor.shape[0] // num_ranks, *tensor.shape[1:]))
        combine = _COMBINED[op]

        def finish() -> None:
            parts = received.view(num_ranks, *output.shape)
            if op is Reduction.SUM and tensor.dtype in (torch.bfloat16, torch.float16):
                torch.sum(parts, 0, out=output)  # rounds once
                return
            first, second, *others = parts
            combine(first, second, out=output)
            for other in others:
                combine(output, other, out=output)

        return output, work, finish

    def launch_broadcast(self, tensor: torch.Tensor, src: int, group: Any) -> Launched:
        work = dist.broadcast(_sendable(tensor, group), src, group=group, async_op=True)
        return tensor, _work(work, tensor), None

    def launch_all_to_all(
        self, tensor: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int], group: Any
    ) -> Launched:
        output = tensor.new_empty((sum(output_splits), *tensor.shape[1:]))
        sent, received = _sendable(tensor, group), _sendable(output, group)
        work = dist.all_to_all_single(
            received, sent, list(output_splits), list(input_splits), group=group, async_op=True
        )
        return output, _work(work, tensor), None

    def launch_send(self, tensor: torch.Tensor, dst: int, group: Any, tag: int) -> Launched:
        if _is_staged(tensor, group):
            return tensor, launch_staged_send(tensor, dst, group, tag), None
        return tensor, dist.isend(tensor, dst, group=group, tag=tag), None

    def launch_receive(self, tensor: torch.Tensor, src: int, group: Any, tag: int) -> Launched:
        if _is_staged(tensor, group):
            return tensor, *launch_staged_receive(tensor, src, group, tag)
        return tensor, dist.irecv(tensor, src, group=group, tag=tag), None

    def launch_barrier(self, group: Any, device_ids: Any) -> Launched:
        is_gloo = dist.get_backend(group) == "gloo"
        if device_ids is None and not is_gloo and torch.accelerator.is_available():
            device_ids = [torch.accelerator.current_device_index()]  # what it takes in any case, with a warning
        work = dist.barrier(group=group, async_op=True, device_ids=device_ids)
        return None, _HostWork(work) if is_gloo else work, None


class _HostWork:
    """A collective on the CPU, for which the host waits.

    Sends and receives are not: a wait for one cannot be made in pieces.
    """

    __slots__ = ("native",)

    def __init__(self, native: Any) -> None:
        self.native = native


# Of two ranks' values. True and false are added and multiplied as "or" and "and".
_COMBINED = {
    Reduction.SUM: torch.add,
    Reduction.PROD: torch.mul,
    Reduction.MAX: torch.maximum,
    Reduction.MIN: torch.minimum,
}

_NATIVE = {reduction: native for native, reduction in TorchTransport.reductions.items()}

_naming = threading.Lock()


def _as_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has its values.

    PyTorch only notes of a conjugate or a negative that it is one, and what communicates does not look.
    """
    return tensor.resolve_conj().resolve_neg()


def _work(work: Any, tensor: torch.Tensor) -> Any:
    return _HostWork(work) if tensor.device.type == "cpu" and work is not None else work


def _device_of(group: Any) -> torch.device:
    """Return the device on which the group takes what is made from objects: the host, if it has a backend for it."""
    return torch.device("cpu") if any(device.type == "cpu" for device in group._device_types) else Devices.device()


def _is_staged(tensor: torch.Tensor, group: Any) -> bool:
    """Say whether a send or receive has to go through the host."""
    return tensor.device.type not in ("cpu", "meta") and _is_gloo(tensor, group)


def _is_gloo(tensor: torch.Tensor, group: Any) -> bool:
    try:
        return str(group._get_backend(torch.device(tensor.device.type)).name()) == "gloo"
    except RuntimeError:  # no backend for this device: its own error says so
        return False


# What gloo knows; of another dtype it finds out while it communicates, when a group is broken. Complex numbers go as
# pairs of real ones.
_OF_GLOO = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.complex128,
}  # fmt: skip


def _sendable(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the same memory, in a dtype that the group moves; the rows stay rows."""
    if tensor.dtype in _OF_GLOO or not _is_gloo(tensor, group):
        return tensor
    num_rows = tensor.shape[0] if tensor.ndim else 1
    return tensor.view(num_rows, tensor.numel() // max(num_rows, 1)).view(torch.uint8)


def _check_reducible(tensor: torch.Tensor, op: Reduction, group: Any) -> None:
    if tensor.dtype not in _OF_GLOO and _is_gloo(tensor, group):
        raise ArgumentTypeError(
            f"gloo cannot reduce this dtype ({op.value}).",
            expected=", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _OF_GLOO)),
            got=describe(tensor),
            where=f"rank {dist.get_rank()}; nothing was sent, and the group is as it was",
            do="Cast it first, for example with `x.float()`.",
        )


def _join_board(store: Any) -> Board | None:
    """Return the board of the world, for gloo alone.

    Whoever communicates first makes it, and nobody waits for a rank that does not communicate.
    """
    if store is None or dist.get_world_size() == 1 or not _is_gloo(torch.empty(0), dist.group.WORLD):
        return None
    try:
        is_first = store.add("hyper_parallel/board/asked", 1) == 1
        return Board.join(store, dist.get_rank(), dist.get_world_size(), is_first)
    except (RuntimeError, NotImplementedError, OSError):
        return None  # a store that cannot count, or memory that cannot be had: nothing is compared


def _open_store() -> Any:
    """Open a connection of its own to the store of the world, where PyTorch can make one.

    None where there is no store.
    """
    try:
        store = c10d._get_default_store()
    except (RuntimeError, ValueError, KeyError):
        return None
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        return store.clone()
    return store


def _store_holder() -> int | None:
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


@contextlib.contextmanager
def _group_name(name: str) -> Iterator[None]:
    with _naming:
        original = c10d._hash_ranks_to_str
        c10d._hash_ranks_to_str = lambda ranks: name
        try:
            yield
        finally:
            c10d._hash_ranks_to_str = original
