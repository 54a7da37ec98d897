"""What one call has put aside for backward: tensors that are moved by hand, and slots that the engine moves by itself.

The four calls mean the same for both as far as they can. Tensors moved by hand go through the states one by one. What
the engine saved itself is on its way out already, so that `launch_offload` has nothing to do; `launch_load` brings it
back early, and backward, which asks for each tensor, brings back the rest.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.core.swap.by_hand.tensor import SwapTensor, stream_of
from hyper_parallel.core.swap.engine import SwapEngine
from hyper_parallel.core.swap.slot import Group, Slot
from hyper_parallel.core.swap.states import Change
from hyper_parallel.platform.trees import leaves


class _Followed(NamedTuple):
    """A group of the engine, weakly: its slots hold it, and autograd's handles hold those."""

    engine: SwapEngine
    group: weakref.ref[Group]


@final
class Storage:
    """Values put aside for backward, under keys of the caller's choice; a key holds a list, in the order of saving.

    `swap_storage` has `SwapTensor`s, alone or in containers: the four calls act on all of them, or, if one of them is
    in a state that does not allow it, raise and act on none. An `AsyncSaveOnCpu` puts its swapped tensors there by
    number; they move by themselves, in any state. (A disk or device that fails in the middle leaves each tensor in the
    state that it has reached.) `save_storage` has what stays.

    Example:
        >>> import torch
        >>> storage = Storage()
        >>> storage.swap_storage["mlp"].append(SwapTensor(torch.ones(3), "mlp"))
        >>> storage.launch_offload()
        >>> storage.wait_offload()
        >>> storage.launch_load()
        >>> storage.wait_load()
        >>> storage.swap_storage["mlp"].pop().get_val()
        tensor([1., 1., 1.])
    """

    def __init__(self) -> None:
        self.save_storage: defaultdict[Any, list[Any]] = defaultdict(list)
        self.swap_storage: defaultdict[Any, list[Any]] = defaultdict(list)
        self._followed: list[_Followed] = []

    def launch_offload(self, copy_stream: Any = None) -> None:
        """Call `async_offload` of every tensor, first to last; two views of one memory move once."""
        launch_offload([self], copy_stream)

    def wait_offload(self) -> None:
        """Call `wait_offload` of every tensor."""
        wait_offload([self])

    def launch_load(self, copy_stream: Any = None) -> None:
        """Call `async_load` of every tensor, last to first: the order of backward."""
        launch_load([self], copy_stream)

    def wait_load(self) -> None:
        """Call `wait_load` of every tensor."""
        wait_load([self])

    def follow(self, engine: SwapEngine, group: Group) -> None:
        """Count what the engine saves in `group` as part of this storage."""
        if not isinstance(group, Group):
            raise ArgumentTypeError("A storage follows a group of an engine.", expected="a Group", got=describe(group))
        self._followed.append(_Followed(engine, weakref.ref(group)))


# Of several storages, as one: what two of them share moves once, and if one cannot move, none does.


def launch_offload(storages: Sequence[Storage], copy_stream: Any = None) -> None:
    moved: dict[int, Slot | None] = {}
    for tensor in _ready(storages, Change.LAUNCH_OFFLOAD):
        tensor._launch_offload(copy_stream, moved)


def wait_offload(storages: Sequence[Storage]) -> None:
    for tensor in _ready(storages, Change.FINISH_OFFLOAD):
        tensor.wait_offload()
    for followed, group in _groups(storages):
        followed.engine.wait_group_offload(group)


def launch_load(storages: Sequence[Storage], copy_stream: Any = None) -> None:
    for tensor in reversed(_ready(storages, Change.LAUNCH_LOAD)):
        tensor.async_load(copy_stream)
    for followed, group in reversed(_groups(storages)):
        followed.engine.launch_group_load(group, stream_of(followed.engine, copy_stream))


def wait_load(storages: Sequence[Storage]) -> None:
    for tensor in reversed(_ready(storages, Change.FINISH_LOAD)):
        tensor.wait_load()
    for followed, group in reversed(_groups(storages)):
        followed.engine.wait_group_load(group)


def launch_load_of_what_is_away(storages: Sequence[Storage]) -> None:
    """Launch the loads, as `launch_load`; tensors in a state that does not allow it are passed over."""
    for tensor in reversed(_tensors(storages)):
        tensor._launch_load_if_away()
    for followed, group in reversed(_groups(storages)):
        followed.engine.launch_group_load(group)


def _ready(storages: Sequence[Storage], change: Change) -> list[SwapTensor]:
    tensors = _tensors(storages)
    for tensor in tensors:
        tensor._check_can(change)
    return tensors


def _tensors(storages: Sequence[Storage]) -> list[SwapTensor]:
    """List the tensors of these storages in order, each of them once."""
    found: dict[SwapTensor, None] = {}
    for storage in storages:
        for key, kept in list(storage.swap_storage.items()):
            for leaf in leaves(kept):
                if not isinstance(leaf, SwapTensor):
                    raise ArgumentTypeError(
                        "`swap_storage` holds what is no SwapTensor.",
                        expected="a SwapTensor",
                        got=describe(leaf),
                        where=f"key {key!r}",
                        do="Append SwapTensor(value, label); a value that is no tensor is fine in one, too.",
                    )
                if not leaf.moves_by_itself:  # those are in the groups
                    found[leaf] = None
    return list(found)


def _groups(storages: Sequence[Storage]) -> list[tuple[_Followed, Group]]:
    return [
        (followed, group)
        for storage in storages
        for followed in storage._followed
        if (group := followed.group()) is not None
    ]
