"""Tensor-level swapping: what autograd saves inside a block goes through the swap engine."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from hyper_parallel._base.errors import StateError, describe
from hyper_parallel.core.activation_checkpoint.policy import keeps_tensor
from hyper_parallel.core.regions.functions import engine_key
from hyper_parallel.core.regions.saved_tensors import OfSavedTensors, SavedTensors, checked_policy
from hyper_parallel.core.swap.slot import Handle
from hyper_parallel.platform.torch.regions.compiled_code import check_no_cuda_graph, cuda_graph_now
from hyper_parallel.platform.torch.regions.leaving import (
    forget_waiting,
    launch_waiting,
    leave_later,
    note_save,
)
from hyper_parallel.platform.torch.regions.left_as_found import left_as_found
from hyper_parallel.platform.torch.regions.local_parts import (
    PLAIN_TYPES,
    Outer,
    is_plain,
    local_tensor,
    storage_key,
)
from hyper_parallel.platform.torch.regions.module_paths import has_sharded_modules, paths_here, unwrapped
from hyper_parallel.platform.torch.regions.surroundings import (
    call_uncompiled,
    check_not_traced,
    check_surroundings,
    in_words,
    is_replaying,
)
from hyper_parallel.platform.torch.swap import engines as swap_engines
from hyper_parallel.platform.torch.swap.device import flat


def base_check_fn(tensor: object) -> bool:
    """Whether a value may be swapped: a tensor with memory that is neither a parameter nor a view of one."""
    if not isinstance(tensor, torch.Tensor):
        return False
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):  # plant: parameter-view
        return False
    return storage_bytes(tensor) > 0


def storage_bytes(tensor: torch.Tensor) -> int:
    try:
        return int(local_tensor(tensor).untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return 0  # tensors without a storage of their own: sparse, wrappers of other tensors


class AsyncSaveOnCpu(torch.autograd.graph.saved_tensors_hooks):
    """A block inside which saved tensors are swapped: to pinned host memory from an accelerator, to disk from the CPU.

    They move by themselves. In a thread with a current group (`SwapManager().set_current_group_name`) its `storage` joins that
    group with the first tensor that is saved, so that the group's calls reach what is saved here, too.

    Args:
        policy_fn: asked with each eligible tensor; `MUST_SAVE`, `PREFER_SAVE` or True keep it, everything else swaps it.
        module: whose parameters and buffers are never swapped, and whose path errors show: "layers.3.mlp", or its class where
            no model around it is running.
        name: what errors show instead.

    Example:
        >>> x = torch.randn(1024, 1024, requires_grad=True)
        >>> with AsyncSaveOnCpu():
        ...     loss = (x.exp() * x).sum()
        >>> loss.backward()

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
        policy_fn: Callable[[torch.Tensor], Any] | None = None,
        *,
        module: nn.Module | None = None,
        name: str | None = None,
    ) -> None:
        # The hooks live as long as the graph. They belong to the recorder, which does not know this object: a cycle between
        # them would keep a step's memory until the garbage collector runs.
        self._has_name = bool(name)
        self._recorder = SavedTensorSwap(
            checked_policy(policy_fn), module, name or ("block" if module is None else _class_name(module))
        )
        super().__init__(self._recorder.pack, self._recorder.unpack)  # plant: hooks-without-block

    def __enter__(self) -> None:
        check_surroundings("Swapping")
        launch_waiting()  # of a block around this one, which would wait for the end of this one
        self._recorder.watches_graphs, self._recorder.graph_before = True, cuda_graph_now()
        self._recorder.look_up_parameters()
        if not self._has_name:
            self._recorder.look_up_path()
        with left_as_found():
            super().__enter__()

    def __exit__(self, kind: object = None, *rest: Any) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()  # at once: in a function of Python's an interrupt could come before
        if kind is None:
            launch_waiting()
            return
        forget_waiting()
        refused = in_words("A block that is swapped", rest[0] if rest else None, self._recorder.name)
        if refused is not None:
            raise refused from None

    @property
    def storage(self) -> Any:
        """What this block has put aside, as a `Storage` that shows its swapped tensors; None once backward has asked for all of them."""
        saved = self._recorder.saved
        return None if saved.are_all_back else saved.storage

    @storage.setter
    def storage(self, storage: object) -> None:
        self._recorder.saved.storage = storage

    @property
    def policy_fn(self) -> Callable[[torch.Tensor], Any] | None:
        """Asked with each eligible tensor; from here on another one, if it is assigned."""
        return self._recorder.policy_fn

    @policy_fn.setter
    def policy_fn(self, policy_fn: Callable[[torch.Tensor], Any] | None) -> None:
        self._recorder.policy_fn = checked_policy(policy_fn)


# storage -> its slot, while both live: a second view of a storage moves nothing, nor does what one block makes and the
# next one saves as its input
Part = tuple[int, torch.Size, tuple[int, ...]]
_slots: dict[int, tuple[StorageWeakRef, weakref.ref[Any], int, Any, Any]] = {}


def living_slot(engine: object, tensor: torch.Tensor, part: Part | None) -> Any:
    """The slot that already has a tensor's storage as it is now; None if there is none. `part`: see `own_part`."""
    known = _slots.get(tensor.untyped_storage()._cdata)
    if (  # plant: known-storage
        known is not None and not known[0].expired() and known[2] == tensor._version and known[3] is engine
    ):
        return known[1]() if known[4] == part else None
    return None


def note_slot(engine: object, tensor: torch.Tensor, part: Part | None, slot: object) -> None:
    storage = tensor.untyped_storage()
    key = storage._cdata

    def forget(ref: weakref.ref[Any], slots: dict[int, Any] = _slots) -> None:  # given: names are gone when Python ends
        known = slots.get(key)
        if known and known[1] is ref:
            slots.pop(key, None)

    _slots[key] = (StorageWeakRef(storage), weakref.ref(slot, forget), tensor._version, engine, part)


def own_part(tensor: torch.Tensor) -> Part | None:
    """Which part of a storage a tensor's version is about; None: all of it.

    What `unsafe_chunk` and `unsafe_split` give (a GRU is made of them) are no views: each part counts its own writes, and that two of
    them have the same version does not say that the storage is the same.
    """
    counts = tensor if tensor._base is None else tensor._base
    if counts.numel() * counts.element_size() == counts.untyped_storage().nbytes():
        return None
    return counts.storage_offset(), counts.size(), counts.stride()


class SavedTensorSwap:
    """The hooks of one block. Holds no tensor: only handles do, and autograd holds those."""

    def __init__(
        self,
        policy_fn: Callable[[torch.Tensor], Any] | None,
        module: nn.Module | None,
        name: str,
        place: Callable[[torch.device], Any] | None = None,
        *,
        swaps_at_once: bool = False,
    ) -> None:
        self.policy_fn = policy_fn
        self._module = None if module is None else weakref.ref(module)
        self.name = name
        self._key = name if module is None else engine_key(name, module)
        self._swaps_at_once = swaps_at_once  # what is given to it is not autograd's: no op is about to write it
        self._find_place = place  # not a method of this object: a cycle would keep a step's memory
        self._owned: set[int | None] = set()  # storages of parameters and buffers
        self._owners: set[int] = set()  # the parameters themselves, by id
        self._holders: list[dict[str, Any]] = []  # where sharding may put other parameters while the block runs
        self._places: dict[torch.device, Any] = {}  # device -> (engine, group, smallest size) or None
        self.watches_graphs, self.graph_before = False, None  # what ran before the block; see `check_no_cuda_graph`
        # Held here, and so by the graph: its group has the storage as long as there is something to move.
        self.saved = SavedTensors()

    def look_up_parameters(self) -> None:
        """Now, not when wrapping: sharded data parallel gives its parameters other storages in every forward."""
        module = None if self._module is None else self._module()
        if module is None:
            return
        parameters = [each for each in module.parameters() if not is_lazy(each)]
        buffers = [each for each in module.buffers() if not is_lazy(each)]  # plant: own-buffers
        has_lazy = any(map(is_lazy, (*module.parameters(), *module.buffers())))
        self._owners = {id(parameter) for parameter in parameters}
        self._owned = {storage_key(tensor) for tensor in (*parameters, *buffers)}
        # Kept by the graph like everything here, but they lead to no tensor of this forward.
        self._holders = [each._parameters for each in module.modules()] if has_sharded_modules() or has_lazy else []
        if has_lazy:
            self._holders += [each._buffers for each in module.modules()]

    def _look_again(self) -> None:
        """A sharded module inside the block has gathered its parameters since, or a lazy one has made them."""
        for holder in self._holders:
            for parameter in holder.values():
                if parameter is not None and id(parameter) not in self._owners and not is_lazy(parameter):
                    self._owners.add(id(parameter))
                    self._owned.add(storage_key(parameter))

    def look_up_path(self) -> None:
        """Now, not when an error is raised: in backward the model is no longer running."""
        module = None if self._module is None else self._module()
        paths = None if module is None or is_replaying() else paths_here(module)
        if module is not None and paths is not None:
            self.name = paths.name(module) or _class_name(module)

    def pack(self, tensor: torch.Tensor) -> Any:
        if is_replaying():  # a wrapper inside a region: nobody will ask for the residuals of the second run
            return Kept(tensor, self.name)
        note_save()
        self.saved.note_saved()
        place = self._place(tensor)
        if place is None:
            return Kept(tensor, self.name)
        if self.watches_graphs:
            check_no_cuda_graph(self.graph_before, "A block that is swapped", self.name)
        swapped = _Swapped(place, tensor, self.name)
        self.saved.note_swapped(swapped, tensor.shape)
        if self._swaps_at_once:
            swapped.launch()
        else:
            leave_later(_launch_of(weakref.ref(swapped)), tensor.device)
        return swapped

    def unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is _Swapped:
            self.saved.note_asked()
        check_not_traced(self.name)
        return packed.tensor()

    def _place(self, tensor: torch.Tensor) -> Any:
        """The engine and group that manage this tensor; None if it stays where it is."""
        if not is_plain(tensor) or tensor.is_inference():
            return None
        if not base_check_fn(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        device = tensor.device
        if device not in self._places:
            self._places[device] = (self._find_place or self._open_place)(device)
        place = self._places[device]
        if place is None or storage_bytes(tensor) < place[2]:
            return None
        self._look_again()
        if storage_key(tensor) in self._owned or self._is_cast_of_parameter(tensor):  # plant: parameter-cast
            return None
        if self.policy_fn is not None and keeps_tensor(call_uncompiled(self.policy_fn, tensor)):  # plant: policy-answer
            return None
        return place

    def _open_place(self, device: torch.device) -> Any:
        found = swap_engines.engine_of(device)
        if found is None:
            return None
        engine, min_bytes = found
        group = engine.new_group(self._key)
        self.saved.storage.follow(engine, group)
        return engine, group, min_bytes

    def _is_cast_of_parameter(self, tensor: torch.Tensor) -> bool:
        """Autocast saves a copy of a weight in another dtype: it is as old as the weight and is cast again if need be."""
        base = tensor if tensor._base is None else tensor._base
        node = base.grad_fn
        if node is None or node.name() != "ToCopyBackward0":
            return False
        source = node.next_functions[0][0]
        variable = getattr(source, "variable", None)
        return variable is not None and (isinstance(variable, nn.Parameter) or id(variable) in self._owners)


class TensorSwap:
    """Swaps tensors that are not autograd's to save, such as the inputs of a region: `pack(tensor).tensor()` gives one back."""

    def __init__(self, module: nn.Module | None, name: str, place: Callable[[torch.device], Any]) -> None:
        self._recorder = SavedTensorSwap(None, module, name, place, swaps_at_once=True)
        self._recorder.look_up_parameters()

    def pack(self, tensor: torch.Tensor) -> Any:
        return self._recorder.pack(tensor)


class _Label:
    """Names a tensor in errors; put into words only when one is raised."""

    __slots__ = ("dtype", "name", "op", "shape")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        node = tensor.grad_fn
        self.op = None if node is None else node.name()

    def __str__(self) -> str:
        made_by = "" if self.op is None else f", made by {self.op.removesuffix('0').removesuffix('Backward')}"
        return f"{self.name}, {str(self.dtype).removeprefix('torch.')}{list(self.shape)}{made_by}"


class Kept:
    """A saved tensor that stays.

    Detached: the tensor itself may lead to the node that holds this, and so to itself. A parameter leads nowhere, and autograd itself holds it as it is.
    """

    __slots__ = ("_label", "_outer", "_saved", "_version")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self._outer = None
        self._label = name
        if type(tensor) is nn.Parameter and tensor.is_leaf:
            self._saved: torch.Tensor = tensor
            self._version: int | None = None if tensor.is_inference() else tensor._version
            return
        if type(tensor) not in PLAIN_TYPES:
            self._outer = Outer.of(tensor)
            if self._outer is not None:
                tensor = local_tensor(tensor)
        with torch._C._DisableTorchDispatch() if type(tensor) in PLAIN_TYPES else contextlib.nullcontext():
            self._saved = tensor.detach()  # plant: kept-detached
        self._version = None if tensor.is_inference() else tensor._version

    def tensor(self) -> torch.Tensor:
        # Under saved-tensor hooks the framework does not look at versions itself.
        if self._version is not None and self._saved._version != self._version:  # plant: kept-version
            raise changed_in_place(f"{self._label}, {describe(self._saved)}", self._version, self._saved._version)
        return self._saved if self._outer is None else self._outer.around(self._saved)


class _Swapped:
    """A saved tensor that is managed: its slot, and which view of the storage it was. Until the op that saved it is over, the tensor itself."""

    __slots__ = (
        "__weakref__", "_alias", "_dtype", "_group", "_handle", "_label", "_offset", "_outer", "_part", "_size", "_stride", "_version", "engine",
    )  # fmt: skip

    def __init__(self, place: Any, tensor: torch.Tensor, name: str) -> None:
        self.engine, self._group, _ = place
        self._label = _Label(name, tensor)
        self._outer = Outer.of(tensor)
        tensor = local_tensor(tensor)
        self._dtype = tensor.dtype
        self._size = tensor.size()
        self._stride = tensor.stride()  # plant: view-stride
        self._offset = tensor.storage_offset()  # plant: view-offset
        self._part = own_part(tensor)
        self._version = tensor._version
        self._handle: Any = None
        with torch._C._DisableTorchDispatch():  # a region around this block must not take what is done here for its ops
            # It shares the version counter, not the graph.
            self._alias: torch.Tensor | None = tensor.detach()  # plant: swapped-alias

    @property
    def slot(self) -> Any:
        return self.handle.slot

    @property
    def handle(self) -> Any:
        """Whoever asks for it does so when the op is over."""
        self.launch()
        if self._handle is None:
            raise self._changed()
        return self._handle

    def launch(self) -> None:
        """The op that saved it is over."""
        alias = self._alias
        if alias is None or alias._version != self._version:
            return  # changed in place since: whoever asks for it is told so
        slot = living_slot(self.engine, alias, self._part)
        if slot is None:
            with torch._C._DisableTorchDispatch():
                slot = self.engine.save(
                    flat(alias), storage_bytes(alias), self._group, self._label, lambda: alias._version
                )
            note_slot(self.engine, alias, self._part, slot)
        self._handle, self._alias = Handle(slot, self._group), None

    def tensor(self) -> torch.Tensor:
        if self._alias is not None:
            if self._alias._version != self._version:
                raise self._changed()
            return self._alias if self._outer is None else self._outer.around(self._alias)
        with torch._C._DisableTorchDispatch():  # as in `launch`: a backward may run inside a region
            return self.seen_in(self.engine.acquire(self._handle))

    def _changed(self) -> StateError:
        return changed_in_place(str(self._label), self._version, None if self._alias is None else self._alias._version)

    def seen_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor, over a buffer that has what was in its storage."""
        with torch._C._DisableTorchDispatch():
            view = torch.empty(0, dtype=self._dtype, device=buffer.device)
            view.set_(buffer.untyped_storage(), self._offset, self._size, self._stride)
        return view if self._outer is None else self._outer.around(view)


def _launch_of(saved: weakref.ref[_Swapped]) -> Callable[[], None]:
    """What lets a saved tensor leave, if its graph still lives."""

    def launch() -> None:
        swapped = saved()
        if swapped is not None:
            swapped.launch()

    return launch


def _class_name(module: nn.Module) -> str:
    return type(unwrapped(module)).__name__


def changed_in_place(where: str, expected: object = None, got: object = None) -> StateError:
    return StateError(
        "A tensor saved for backward was changed in place.",
        expected=None if expected is None else f"version {expected}",
        got=None if got is None else f"version {got}",
        where=where,
        do="Replace the in-place call after it by one that makes a new tensor.",
    )
