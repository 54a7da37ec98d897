"""Tensor-level swapping: what autograd saves inside a block goes through the swap engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mindspore import Parameter, Tensor, nn

from hyper_parallel.core.activation_checkpoint.policy import keeps_tensor
from hyper_parallel.core.regions.functions import engine_key
from hyper_parallel.core.regions.saved_tensors import OfSavedTensors, SavedTensors, checked_policy
from hyper_parallel.core.swap.slot import Handle
from hyper_parallel.platform.mindspore.regions.cell_paths import paths_here, unwrapped
from hyper_parallel.platform.mindspore.regions.replays import Hooks, is_replaying
from hyper_parallel.platform.mindspore.swap import engines as swap_engines
from hyper_parallel.platform.mindspore.swap.device import flat, tensor_on
from hyper_parallel.platform.mindspore.swap.storages import (
    Look,
    aliased,
    storage_address,
    storage_bytes,
)

_CAST = "Cast"


def base_check_fn(tensor: object) -> bool:
    """Whether a value may be swapped: a tensor with memory that is no parameter. MindSpore saves a parameter as a plain tensor that
    still has its `param_info`."""
    if not isinstance(tensor, Tensor) or isinstance(tensor, Parameter) or tensor.param_info is not None:
        return False
    return storage_bytes(tensor) > 0


class AsyncSaveOnCpu(Hooks):
    """A block inside which saved tensors are swapped: to pinned host memory from an accelerator, to disk from the CPU.

    They move by themselves. In a thread with a current group (`SwapManager().set_current_group_name`) its `storage` joins that
    group with the first tensor that is saved, so that the group's calls reach what is saved here, too.

    Args:
        policy_fn: asked with each eligible tensor; `MUST_SAVE`, `PREFER_SAVE` or True keep it, everything else swaps it.
        module: whose parameters and buffers are never swapped, and whose path errors show: "layers.3.mlp", or its class where
            no model around it is running.
        name: what errors show instead.

    Example:
        >>> import mindspore
        >>> def loss(x):
        ...     with AsyncSaveOnCpu():
        ...         return (x.exp() * x).sum()
        >>> gradient = mindspore.grad(loss)(mindspore.ops.ones((1024, 1024)))

    Attributes:
        storage: its `swap_storage[number]` has the `SwapTensor` of each swapped tensor, in the order of saving.
        add_to_storage: whether the storage has joined a group.
        count_idx, pack_count: how many tensors were swapped.
        unpack_count: how often backward has asked for one of them.
    """

    add_to_storage = OfSavedTensors[bool]()
    count_idx = OfSavedTensors[int]()
    pack_count = OfSavedTensors[int]()
    unpack_count = OfSavedTensors[int]()

    def __init__(
        self,
        policy_fn: Callable[[Tensor], Any] | None = None,
        *,
        module: nn.Cell | None = None,
        name: str | None = None,
    ) -> None:
        self._has_name = bool(name)
        # The hooks live as long as the graph. They belong to the recorder, which does not know this object.
        self._recorder = SavedTensorSwap(
            checked_policy(policy_fn), module, name or ("block" if module is None else _class_name(module))
        )
        super().__init__(self._recorder.pack, self._recorder.unpack)

    def __enter__(self) -> None:
        self._recorder.look_up_parameters()
        if not self._has_name:
            self._recorder.look_up_path()
        super().__enter__()

    @property
    def storage(self) -> Any:
        """What this block has put aside, as a `Storage` that shows its swapped tensors; None once backward has asked for all of them."""
        saved = self._recorder.saved
        return None if saved.are_all_back else saved.storage

    @storage.setter
    def storage(self, storage: object) -> None:
        self._recorder.saved.storage = storage

    @property
    def policy_fn(self) -> Callable[[Tensor], Any] | None:
        """Asked with each eligible tensor; from here on another one, if it is assigned."""
        return self._recorder.policy_fn

    @policy_fn.setter
    def policy_fn(self, policy_fn: Callable[[Tensor], Any] | None) -> None:
        self._recorder.policy_fn = checked_policy(policy_fn)


# Address of a storage -> the slot that has it, as long as the slot holds the storage itself: only then does the address surely mean it.
# So what one op makes and the next ones save moves once.
_slots: dict[int, tuple[weakref.ref[Any], Any]] = {}


def living_slot(engine: object, tensor: Tensor) -> Any:
    """The slot that already has a tensor's storage; None if there is none, or its copy is done and the storage was let go of."""
    known = _slots.get(storage_address(tensor))
    if known is None or known[1] is not engine:
        return None
    slot = known[0]()
    return slot if slot is not None and slot.source is not None else None


def note_slot(engine: object, tensor: Tensor, slot: object) -> None:
    key = storage_address(tensor)

    def forget(ref: weakref.ref[Any], slots: dict[int, Any] = _slots) -> None:  # given: names are gone when Python ends
        known = slots.get(key)
        if known is not None and known[0] is ref:
            slots.pop(key, None)

    _slots[key] = (weakref.ref(slot, forget), engine)


class SavedTensorSwap:
    """The hooks of one block. Holds no tensor: only handles do, and autograd holds those."""

    def __init__(
        self,
        policy_fn: Callable[[Tensor], Any] | None,
        module: nn.Cell | None,
        name: str,
        place: Callable[[str], Any] | None = None,
    ) -> None:
        self.policy_fn = policy_fn
        self._module = None if module is None else weakref.ref(module)
        self._name = name
        self._key = name if module is None else engine_key(name, module)
        self._find_place = place  # not a method of this object: a cycle would keep a step's memory
        self._owned: set[int] = set()  # storages of parameters and buffers
        self._owners: set[str] = set()  # the parameters' names, which are those of their nodes in the graph
        self._places: dict[str, Any] = {}  # device -> (engine, group, smallest size) or None
        # Held here, and so by the graph: its group has the storage as long as there is something to move.
        self.saved = SavedTensors()

    def look_up_parameters(self) -> None:
        """Now, not when wrapping: parameters are given other storages in the meantime."""
        cell = None if self._module is None else self._module()
        if cell is None:
            return
        parameters = list(cell.get_parameters())
        self._owners = {parameter.name for parameter in parameters}
        self._owned = {
            storage_address(tensor) for tensor in (*parameters, *cell.buffers()) if storage_bytes(tensor) > 0
        }

    def look_up_path(self) -> None:
        """Now, not when an error is raised: in backward the model is no longer running."""
        cell = None if self._module is None else self._module()
        paths = None if cell is None or is_replaying() else paths_here(cell)
        if cell is not None and paths is not None:
            self._name = paths.name(cell) or _class_name(cell)

    def pack(self, tensor: Tensor) -> Any:
        if is_replaying():  # a wrapper inside a region: nobody will ask for the residuals of the second run
            return None
        self.saved.note_saved()
        place = self._place(tensor)
        if place is None:
            return Kept(tensor)
        engine, group, _ = place
        residual = swapped(engine, group, tensor, lambda: _Label(self._name, tensor))
        self.saved.note_swapped(residual, tensor.shape)
        return residual

    def unpack(self, packed: Any) -> Tensor:
        if type(packed) is Swapped:
            self.saved.note_asked()
        return packed.tensor()

    def _place(self, tensor: Tensor) -> Any:
        """The engine and group that manage this tensor; None if it stays where it is."""
        if type(tensor) is not Tensor or not base_check_fn(tensor):
            return None
        device = str(tensor.device)
        if device not in self._places:
            self._places[device] = (self._find_place or self._open_place)(device)
        place = self._places[device]
        if place is None or storage_bytes(tensor) < place[2]:
            return None
        if storage_address(tensor) in self._owned or self._is_cast_of_parameter(tensor):
            return None
        if self.policy_fn is not None and keeps_tensor(self.policy_fn(tensor)):
            return None
        return place

    def _open_place(self, device: str) -> Any:
        found = swap_engines.engine_of(device)
        if found is None:
            return None
        engine, min_bytes = found
        group = engine.new_group(self._key)
        self.saved.storage.follow(engine, group)
        return engine, group, min_bytes

    def _is_cast_of_parameter(self, tensor: Tensor) -> bool:
        """Mixed precision saves a copy of a weight in another dtype: it is as old as the weight."""
        node = tensor._grad_node
        if node is None or node.name() != _CAST:
            return False
        source = node.next_functions[0][0]
        return source is not None and source.is_leaf() and source.name() in self._owners


class TensorSwap:
    """Swaps tensors that are not autograd's to save, such as the inputs of a region: `pack(tensor).tensor()` gives one back."""

    def __init__(self, module: nn.Cell | None, name: str, place: Callable[[str], Any]) -> None:
        self._recorder = SavedTensorSwap(None, module, name, place)
        self._recorder.look_up_parameters()

    def pack(self, tensor: Tensor) -> Any:
        return self._recorder.pack(tensor)


def swapped(engine: Any, group: Any, tensor: Tensor, label: Callable[[], object]) -> Swapped:
    """Hand a tensor's storage to the engine, or find it there."""
    slot = living_slot(engine, tensor)
    if slot is None:
        # The version of a storage is not known: MindSpore counts no writes on the CPU.
        slot = engine.save(flat(tensor), storage_bytes(tensor), group, label(), _no_version)
        note_slot(engine, tensor, slot)
    return Swapped(engine, Handle(slot, group), Look.of(tensor))


def _no_version() -> int:
    return 0


class _Label:
    """Names a tensor in errors; put into words only when one is raised."""

    __slots__ = ("_look", "_name", "_op")

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._name = name
        self._look = Look.of(tensor)
        node = tensor._grad_node
        self._op = None if node is None else node.name()

    def __str__(self) -> str:
        made_by = "" if self._op is None else f", made by {self._op}"
        return f"{self._name}, {self._look}{made_by}"


class Kept:
    """A saved tensor that stays. Without its graph: the tensor itself may come to lead to the node that holds this, and so to itself."""

    __slots__ = ("_saved",)

    def __init__(self, tensor: Tensor) -> None:
        self._saved = aliased(tensor)

    def tensor(self) -> Tensor:
        return self._saved


class Swapped:
    """A saved tensor that the engine has: its slot, and how the tensor looked at the storage."""

    __slots__ = ("__weakref__", "engine", "handle", "look")

    def __init__(self, engine: Any, handle: Any, look: Look) -> None:
        self.engine = engine
        self.handle = handle
        self.look = look

    @property
    def slot(self) -> Any:
        return self.handle.slot

    def another(self, look: Look) -> Swapped:
        """For another reader, so that the engine knows who still will ask."""
        return Swapped(self.engine, Handle(self.handle.slot, self.handle.group), look)

    def tensor(self) -> Tensor:
        return self.seen_in(self.engine.acquire(self.handle))

    def seen_in(self, buffer: object) -> Tensor:
        """The tensor, over a buffer that has what was in its storage."""
        return tensor_on(buffer, self.look)


def _class_name(cell: nn.Cell) -> str:
    return type(unwrapped(cell)).__name__
