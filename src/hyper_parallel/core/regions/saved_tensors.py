"""What a block that swaps what autograd saves counts and shows, on every framework."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.core.swap.by_hand.manager import SwapManager
from hyper_parallel.core.swap.by_hand.storage import Storage
from hyper_parallel.core.swap.by_hand.tensor import SwapTensor

T = TypeVar("T")


class SavedTensors:
    """Of one block: its storage, and how many tensors went and came back. It holds no tensor, and the graph holds it.

    Attributes:
        storage: the `Storage` that shows them; joins the thread's current group with the first tensor that autograd saves
        add_to_storage: whether it has joined
        count_idx, pack_count: how many tensors were swapped; the next one's number in `storage.swap_storage`
        unpack_count: how often backward has asked for one of them
    """

    def __init__(self) -> None:
        self.storage: Any = Storage()
        self.add_to_storage = False
        self.count_idx = 0
        self.pack_count = 0
        self.unpack_count = 0
        self._group: str | None = None  # None: nothing was saved so far

    def note_saved(self) -> None:
        """Autograd saves a tensor, which may stay."""
        if self._group is None:
            self._group = SwapManager().get_current_group_name()
        if self._group and not self.add_to_storage:
            SwapManager().add_storage(self._group, self.storage)
            self.add_to_storage = True

    def note_swapped(self, residual: Any, shape: object) -> None:
        shown = SwapTensor.saved(residual, f"{self._group or ''}::{shape}")
        self.storage.swap_storage[self.count_idx].append(shown)
        self.count_idx += 1
        self.pack_count += 1

    def note_asked(self) -> None:
        self.unpack_count += 1

    @property
    def are_all_back(self) -> bool:
        return 0 < self.pack_count <= self.unpack_count


class OfSavedTensors(Generic[T]):
    """An attribute of a block that its `SavedTensors` has. (These outlive the block, and do not know it.)"""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, block: Any, owner: type | None = None) -> T:
        if block is None:
            return self  # type: ignore[return-value]  # asked of the class
        value: T = getattr(block._recorder.saved, self._name)
        return value

    def __set__(self, block: Any, value: T) -> None:
        setattr(block._recorder.saved, self._name, value)


def checked_policy(policy_fn: object) -> Any:
    """What decides for each tensor whether it is swapped, or None."""
    if policy_fn is not None and not callable(policy_fn):
        raise ArgumentTypeError(
            "`policy_fn` is asked for each tensor.", expected="a callable or None", got=describe(policy_fn)
        )
    return policy_fn
