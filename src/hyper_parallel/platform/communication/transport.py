"""What a framework brings: its groups, and calls that start its own communication on tensors that are contiguous.

Names say whether the host blocks: `launch_x` starts and returns the result with what to wait for, `join` waits.
Everything else about communication is built on this, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, HyperParallelError, StateError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.platform.arguments import check_tensor
from hyper_parallel.platform.communication.answers import Failure, could_not_begin, ranks_in_words
from hyper_parallel.platform.communication.board import Board
from hyper_parallel.platform.communication.handles import Handle
from hyper_parallel.platform.communication.reductions import Reduction
from hyper_parallel.platform.communication.roll_call import CallEntry, Like, RollCall, in_words
from hyper_parallel.platform.opaque import Group, Tensor

# The result, the framework's own work (None: done already), and what is left to do on this rank once that is done.
Launched = tuple[Any, Any, Callable[[], object] | None]


class Transport(ABC):
    """One framework's communication: one object, for as long as the process lives.

    `tensor_type` is its class of tensors, `reductions` its own names of reductions.
    """

    tensor_type: ClassVar[type]
    reductions: ClassVar[dict[Any, Reduction]]
    board: Board | None = None  # where the backend cannot tell calls apart, and the ranks share memory
    looks_before: ClassVar[bool]  # whether a rank looks at the board before it sends anything; else when it is done

    # Groups

    @property
    @abstractmethod
    def roll_call(self) -> RollCall:
        """The logs of this process, as long as the world is the same."""

    @abstractmethod
    def is_up(self) -> bool: ...

    @abstractmethod
    def rank(self) -> int:
        """Return the world rank; 0 while nothing was started."""

    @abstractmethod
    def store_of_saves(self) -> Any:
        """Return a connection to the store at which the ranks met, for saves and loads alone; None where there is none.

        It lives as long as the world, and comes with an object: who holds that may use it when the world has ended.
        """

    @abstractmethod
    def world(self) -> Any:
        """Return the group of all ranks."""

    @abstractmethod
    def own_group(self, group: Group) -> Any:
        """Return the framework's group that this is, or is the name of; None if it is none."""

    @abstractmethod
    def ranks_of(self, group: Any) -> tuple[int, ...]:
        """Return world ranks in group order."""

    @abstractmethod
    def name_of(self, group: Any) -> str:
        """Return a name that is the same on all members, and another one for every group of one world."""

    @abstractmethod
    def backend_of(self, group: Any) -> str: ...

    @abstractmethod
    def start(self, backend: str | None, **settings: Any) -> None: ...

    @abstractmethod
    def end(self, group: Group) -> None:
        """End a group; None: all of them."""

    @abstractmethod
    def new_group(
        self, ranks: tuple[int, ...], number: int, timeout: object, options: object, description: str | None
    ) -> Any:
        """Make the number-th group of these ranks. Called by members only."""

    # Tensors

    @abstractmethod
    def contiguous(self, tensor: Tensor) -> Any: ...

    @abstractmethod
    def is_writable_in_place(self, tensor: Tensor) -> bool:
        """Say whether the framework's collectives write into this very tensor."""

    @abstractmethod
    def copy(self, tensor: Any) -> Any:
        """Return a contiguous tensor of its own."""

    @abstractmethod
    def write(self, target: object, values: object) -> None:
        """Copy values into a tensor, also through a view."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], like: object) -> Any: ...

    @abstractmethod
    def is_floating(self, tensor: Tensor) -> bool: ...

    @abstractmethod
    def cat(self, tensors: Sequence[Any], dim: int) -> Any: ...

    @abstractmethod
    def parts(self, tensor: Any, num_parts: int, dim: int) -> list[Any]:
        """Split a tensor into equal parts along a dim, as views."""

    @abstractmethod
    def where_equal(self, left: object, right: object) -> Any:
        """Return 1 where two tensors are equal, 0 elsewhere, in their dtype."""

    @abstractmethod
    def bytes_to_tensor(self, data: bytes, group: Group) -> Any: ...

    @abstractmethod
    def ints_to_tensor(self, numbers: Sequence[int], group: Group) -> Any: ...

    @abstractmethod
    def tensor_to_bytes(self, tensor: Tensor) -> bytes: ...

    @abstractmethod
    def pending(self, tensor: Tensor, handle: Handle) -> Any:
        """Return a tensor that waits for its handle when it is first used.

        Where the framework cannot do that, return the finished one.
        """

    @abstractmethod
    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        """Run a function once all of backward is done. Called inside backward."""

    # Communication

    @abstractmethod
    def join(self, work: object, entry: object) -> None:
        """Wait for the framework's work (on an accelerator: let the current stream wait)."""

    @abstractmethod
    def is_completed(self, work: Any) -> bool: ...

    @abstractmethod
    def launch_all_reduce(self, tensor: Any, op: Reduction, group: Any) -> Launched:
        """Start reducing in place; never AVG."""

    @abstractmethod
    def launch_all_gather(self, tensor: Any, group: Any) -> Launched:
        """Start concatenating along dim 0."""

    @abstractmethod
    def launch_reduce_scatter(self, tensor: Any, op: Reduction, group: Any) -> Launched:
        """Start reducing into equal parts of dim 0; never AVG."""

    @abstractmethod
    def launch_broadcast(self, tensor: Any, src: int, group: Any) -> Launched:
        """Start copying world rank `src`'s values, in place."""

    @abstractmethod
    def launch_all_to_all(
        self, tensor: Any, input_splits: Sequence[int], output_splits: Sequence[int], group: Any
    ) -> Launched:
        """Start exchanging rows of dim 0, so many to and from each rank."""

    @abstractmethod
    def launch_send(self, tensor: Any, dst: int, group: Any, tag: int) -> Launched: ...

    @abstractmethod
    def launch_receive(self, tensor: Any, src: int, group: Any, tag: int) -> Launched:
        """Start receiving, in place."""

    @abstractmethod
    def launch_barrier(self, group: Any, device_ids: Any) -> Launched: ...

    @abstractmethod
    def is_failure(self, error: Exception, is_pair: bool) -> bool:
        """Say whether what a `launch_x` raised is a communication that failed.

        Else this rank could not begin it, and has sent nothing.
        """

    # Built on the above

    def launch_equal_exchange(
        self, tensor: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], group: Group
    ) -> Launched:
        """Start exchanging equal parts, which all ranks have of one size; else as `launch_all_to_all`."""
        return self.launch_all_to_all(tensor, input_splits, output_splits, group)

    def check_tensor(self, data: object, call: str) -> None:
        """Check that this is a tensor of this rank's own values."""
        check_tensor(data, self.tensor_type, call)
        if type(data) is not self.tensor_type and hasattr(type(data), "to_local"):
            raise ArgumentTypeError(
                f"`{call}` takes this rank's own values, and not a distributed tensor.",
                expected="a plain tensor",
                got=describe(data),
                do="Give `x.to_local()`; or let the distributed tensor communicate: `x.redistribute(...)`.",
            )

    def group(self, group_info: Any, call: str) -> Any:
        """Find the framework's group of what a caller gives: a group, None for the world, or an object that has one.

        Raises:
            RuntimeError: nothing was started.
            ValueError: this is no group, or this rank is not in it.
        """
        if not self.is_up():
            raise StateError(
                f"`{call}` needs the other ranks, and communication was not started.",
                where="a process of its own: rank 0 of 1",
                do="Call `init_process_group()` first.",
            )
        if group_info is None:
            return self.world()
        found = self.own_group(group_info)
        if found is None:
            inner = getattr(group_info, "group", None)
            found = self.own_group(getattr(group_info, "group_name", None) if inner is None else inner)
            size = getattr(group_info, "rank_size", None)
            if found is not None and size is not None and size != len(self.ranks_of(found)):
                raise ArgumentError(
                    f"`{call}` got a group whose size is not the one it states.",
                    expected=f"rank_size {len(self.ranks_of(found))}",
                    got=str(size),
                )
        if found is None:
            raise ArgumentError(
                f"`{call}` needs a group that this rank is in.",
                expected="a group of the framework, None for all ranks, or an object with `group` or `group_name`",
                got=describe(group_info),
                where=f"rank {self.rank()}",
            )
        return found

    def launch(
        self,
        call: str,
        group: Group,
        start: Callable[..., Launched],
        *arguments: Any,
        peer: int | None = None,
        then: Callable[[], object] | None = None,
    ) -> tuple[Any, Handle]:
        """Start a communication by `start(*arguments)`; return its result and its handle.

        The call is logged; when it fails, the error says which rank is missing; the handle waits for it. `then` runs on
        this rank once all is there. `peer` is the other rank of a send or receive.
        """
        roll_call = self.roll_call
        name = self.name_of(group)
        if peer is None:
            log = roll_call.logs.get(name) or roll_call.log(name, self.ranks_of(group))
            entry = roll_call.enter(log, call, like=_like(start, arguments))
        else:
            name += "/pairs"
            log = roll_call.logs.get(name) or roll_call.log(name, self.ranks_of(group), is_pair=True)
            entry = roll_call.enter(log, call, (self.rank(), peer))
        try:
            if self.board is not None and peer is None:
                result, work, finish = self._start_agreed(self.board, entry, start, arguments)
            else:
                result, work, finish = start(*arguments)
        except Exception as error:
            if isinstance(error, _DisagreementError) or self.is_failure(error, peer is not None):
                raise roll_call.explain(entry, error) from error
            roll_call.refuse(entry)
            if isinstance(error, HyperParallelError):
                raise
            raise could_not_begin(Failure(call, entry.number, self.rank(), entry.ranks), error) from error
        if work is None:
            log.num_done = max(log.num_done, entry.number)
        return result, Handle(self, entry, work, _both(finish, then), arguments)

    def _start_agreed(self, board: Board, entry: CallEntry, start: Callable[..., Launched], arguments: Any) -> Launched:
        """Start a call of which all ranks must think the same; on MindSpore's CPU, finish it."""
        text = entry.call if entry.like is None else f"{entry.call} of {in_words(entry.like)}"
        board.write(entry.log.name, entry.number, text)
        if self.looks_before:
            _check_agreed(board, entry, text)
            return start(*arguments)
        launched = start(*arguments)
        _check_agreed(board, entry, text)
        return launched


class _DisagreementError(RuntimeError):
    """Another rank called something else under this number."""


def _check_agreed(board: Board, entry: CallEntry, text: str) -> None:
    other = board.find_other(entry.log.name, entry.number, text, entry.ranks)
    if other is not None:
        raise _DisagreementError(f"rank {other[0]} began {other[1]}, and this rank {text}: they do not fit together")


# Calls in which every rank has a tensor of the same dtype and shape, and those for which as many elements will do.
_SAME_SHAPE = {"launch_all_gather", "launch_reduce_scatter"}
_SAME_SIZE = {"launch_all_reduce", "launch_broadcast", "launch_equal_exchange"}


def _like(start: Callable[..., Launched], arguments: Sequence[Any]) -> Like | None:
    name = start.__name__
    if name in _SAME_SIZE:
        return arguments[0].dtype, (arguments[0].numel(),)
    return (arguments[0].dtype, arguments[0].shape) if name in _SAME_SHAPE else None


def check_rank(rank: object, ranks: Sequence[int], name: str, call: str) -> int:
    """Return a world rank that is in the group."""
    if rank is None:
        raise ArgumentError(f"`{call}` needs `{name}`.", expected="a world rank", got="None")
    found = as_int(rank)
    if found is None or found not in ranks:
        raise ArgumentError(
            f"`{name}` of `{call}` is not a rank of the group.",
            expected=f"one of {ranks_in_words(ranks)}",
            got=describe(rank),
        )
    return found


def _both(first: Callable[[], object] | None, second: Callable[[], object] | None) -> Callable[[], object] | None:
    if first is None or second is None:
        return first or second

    def both() -> None:
        first()
        second()

    return both
