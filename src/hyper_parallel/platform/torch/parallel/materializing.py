"""Fills PyTorch modules: see the rules in `core/parallel/materializing.py`.

While a `TorchFilling` is open every parameter of the modules is on the meta device. Only the module that is being
filled has whole tensors, so an initialiser that reaches into other modules writes nothing there: what it does for them
is done when they are filled, since it runs again then.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedTensorMixin

from hyper_parallel._base.errors import ArgumentError, StateError, describe
from hyper_parallel.core.parallel.materializing import MaterializingBackend
from hyper_parallel.platform.torch.devices import Devices
from hyper_parallel.platform.torch.dtensor.movement import reduce_values
from hyper_parallel.platform.torch.parallel.places import (
    device_of,
    is_part,
    is_placeholder,
    layout_of,
    local_of,
    store,
    user_attributes,
    whole_copy,
)
from hyper_parallel.platform.torch.wrappers.activation_wrapper import ActivationWrapper

__all__ = ["BACKEND", "TorchFilling"]

# Names of modules that stand around one of the model; the model's own names are without them.
_WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"}


class _Slot(NamedTuple):
    """A place in a module where a tensor is registered."""

    table: dict[str, Any]
    key: str
    tensor: torch.Tensor


class _Module(NamedTuple):
    """A module with tensors of its own, and the modules around it from the inside out.

    `path` is its name as PyTorch has it, `name` the same without what stands around the model's own modules.
    """

    module: nn.Module
    around: tuple[nn.Module, ...]
    slots: list[_Slot]
    path: str
    name: str


class TorchFilling:
    """See `Filling`. `open` puts every tensor back into its place, filled or not."""

    def __init__(self, roots: Sequence[nn.Module], device: torch.device) -> None:
        self._roots = roots
        self._device = device
        self._modules: dict[int, _Module] = {}
        self._owners: dict[int, list[tuple[str, nn.Module]]] = {}
        # By a tensor's id: what stands for it meanwhile; the tensor that has its values now.
        self._without: dict[int, torch.Tensor] = {}
        self._filled: dict[int, torch.Tensor] = {}
        # By a module's id: parameters that are filled from elsewhere; what was filled with it.
        self._left: set[tuple[int, str]] = set()
        self._wanted: dict[int, list[_Slot]] = {}
        self._placeholders: set[int] = set()
        for root in roots:
            self._owners[id(root)] = list(self._found(root))

    def _found(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for path, module, around in _walk(root, "", ()):
            if id(module) in self._modules:
                continue
            name = _own_name(path, isinstance(root, DistributedDataParallel))
            slots = [
                _Slot(table, key, value)
                for table in (module._parameters, module._buffers)
                for key, value in table.items()
                if value is not None
            ]
            has_lost = [key for key, value in vars(module).items() if _is_lost(value)]
            if has_lost:
                raise StateError(
                    "A tensor that is neither a parameter nor a buffer has no memory, and nothing fills it.",
                    got=f"{', '.join(has_lost)} on the meta device",
                    where=name or "the root",
                    do='Build the model in `hp.init_on_device("meta")`, where only parameters are without memory.',
                )
            for slot in slots:
                if isinstance(slot.tensor, UninitializedTensorMixin):
                    raise StateError(
                        "A lazy module does not know its sizes yet.",
                        got=f"{type(module).__name__} without them",
                        where=name or "the root",
                        do="Call the model once, or build it with sizes.",
                    )
            if slots:
                self._modules[id(module)] = _Module(module, around, slots, path, name)
                yield name, module

    @contextmanager
    def open(self) -> Iterator[TorchFilling]:
        for found in self._modules.values():
            for slot in found.slots:
                if is_placeholder(slot.tensor):
                    self._placeholders.add(id(slot.tensor))
                if isinstance(slot.tensor, nn.Parameter) or is_placeholder(slot.tensor) or is_part(slot.tensor):
                    self._without.setdefault(id(slot.tensor), _without_memory(slot.tensor))
        try:
            for found in self._modules.values():
                self._clear(found)
            yield self
        finally:
            for found in self._modules.values():
                for slot in found.slots:
                    now = self._filled.get(id(slot.tensor), slot.tensor)
                    slot.table[slot.key] = slot.tensor
                    if now is not slot.tensor:
                        # Not by the table: recurrent layers take notice of it.
                        setattr(found.module, slot.key, now)
            self._settle()

    def _clear(self, found: _Module) -> None:
        """Let every slot of a module have what stands for its tensor, whatever an initialiser has put there."""
        for slot in found.slots:
            slot.table[slot.key] = self._without.get(id(slot.tensor), slot.tensor)

    def _settle(self) -> None:
        """Bring buffers to the parameters, and tell PyTorch's FSDP2 of memory that it did not make."""
        devices = {local_of(tensor).device for key, tensor in self._filled.items() if key in self._placeholders}
        if not devices:
            return
        device = devices.pop() if len(devices) == 1 else self._device
        for found in self._modules.values():
            for slot in found.slots:
                now = slot.table[slot.key]
                if slot.table is found.module._buffers and type(now) is torch.Tensor and not is_placeholder(now):
                    slot.table[slot.key] = now.to(device)
        for root in self._roots:
            for module in root.modules():
                if _is_fsdp2(module):
                    module._apply(lambda tensor: tensor, recurse=False)

    def owners(self, root: nn.Module) -> list[tuple[str, nn.Module]]:
        return self._owners[id(root)]

    def parameters(self, module: nn.Module) -> dict[str, str]:
        found = self._modules[id(module)]
        return {_joined(found.path, slot.key): slot.key for slot in found.slots if slot.table is module._parameters}

    def leave(self, module: nn.Module, parameter: str) -> None:
        self._left.add((id(module), parameter))

    def fill(self, module: nn.Module) -> list[str]:
        found = self._modules[id(module)]
        wanted = [
            slot
            for slot in found.slots
            if id(slot.tensor) not in self._filled and (id(module), slot.key) not in self._left
        ]
        self._wanted[id(module)] = wanted
        unwritten = []
        try:
            marks = self._run_initialisers(found, wanted)
            for slot, mark in zip(wanted, marks, strict=True):
                now = slot.table[slot.key]
                # A buffer with values keeps those that no initialiser makes again.
                if mark is None or mark.is_written(now):
                    self._store(slot, now, found)
                else:
                    unwritten.append(slot.key)
        finally:
            self._clear(found)
        return unwritten

    def whole(self, module: nn.Module, parameter: str) -> torch.Tensor:
        found = self._modules[id(module)]
        try:
            # What was filled before, and nothing else: so the draws are the same.
            self._run_initialisers(found, self._wanted[id(module)])
            made: torch.Tensor = found.module._parameters[parameter].detach()
            return made.contiguous()
        finally:
            self._clear(found)

    def empty_whole(self, module: nn.Module, parameter: str) -> torch.Tensor:
        slot = self._slot(module, parameter)
        return torch.empty(slot.tensor.shape, dtype=slot.tensor.dtype, device=device_of(slot.tensor, self._device))

    def store(self, module: nn.Module, parameter: str, whole: torch.Tensor) -> None:
        slot = self._slot(module, parameter)
        # The whole one is another tensor's, or was received for several.
        self._store(slot, whole.clone(), self._modules[id(module)])

    def _slot(self, module: nn.Module, parameter: str) -> _Slot:
        slots = self._modules[id(module)].slots
        return next(slot for slot in slots if slot.key == parameter and slot.table is module._parameters)

    def _store(self, slot: _Slot, now: torch.Tensor, found: _Module) -> None:
        if now.shape != slot.tensor.shape:
            raise StateError(
                "An initialiser has put a tensor of another shape in place of one.",
                expected=str(list(slot.tensor.shape)),
                got=str(list(now.shape)),
                where=f"{found.name}.{slot.key}",
            )
        self._filled[id(slot.tensor)] = store(slot.tensor, now.detach().to(slot.tensor.dtype), found.name)

    def _run_initialisers(self, found: _Module, wanted: Sequence[_Slot]) -> list[_Mark | None]:
        """Put whole tensors into the module, and run what may write to them."""
        self._clear(found)
        marks: list[_Mark | None] = []
        for slot in wanted:
            if id(slot.tensor) in self._without:
                whole: Any = torch.empty(
                    slot.tensor.shape, dtype=slot.tensor.dtype, device=device_of(slot.tensor, self._device)
                )
                mark = _Mark(whole)
                if isinstance(slot.tensor, nn.Parameter):
                    whole = nn.Parameter(whole, requires_grad=slot.tensor.requires_grad)
                    mark.parameter = whole
                whole.__dict__.update(user_attributes(slot.tensor))
                marks.append(mark)
            else:
                whole = whole_copy(slot.tensor)
                marks.append(None)
            slot.table[slot.key] = whole
        for owner, initialise in _initialisers(found.module, found.around):
            try:
                with torch.no_grad():
                    initialise()
            except Exception as error:
                raise StateError(
                    "An initialiser failed.",
                    got=f"{type(error).__name__}: {error}",
                    where=f"{type(owner).__name__}, when {found.name or 'the root'} was to be filled",
                    do="An initialiser may write to modules whose values are not there now, and not read them.",
                ) from error
        return marks


class _Mark:
    """A whole tensor as it was before the initialisers, to see afterwards whether they wrote all of it.

    Numbers begin as NaN. Of types without one any write counts.
    """

    def __init__(self, whole: torch.Tensor) -> None:
        self._has_nan = (whole.is_floating_point() or whole.is_complex()) and whole.element_size() > 1
        if self._has_nan:
            whole.fill_(float("nan"))
        self.parameter = whole
        self._version = whole._version

    def is_written(self, now: torch.Tensor) -> bool:
        if now.device.type == "meta":
            return False
        if not now.numel():
            return True
        if self._has_nan:
            numbers = torch.view_as_real(now.detach()) if now.is_complex() else now.detach()
            # By the largest number, which is NaN if one is: a mask would be as long as the tensor.
            return not bool(torch.isnan(numbers.amax()))
        return now is not self.parameter or now._version > self._version


def _walk(
    module: nn.Module, path: str, around: tuple[nn.Module, ...]
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Go through a module and those in it, outer ones first. Our own wrappers show the module in them as theirs."""
    if isinstance(module, ActivationWrapper):
        yield from _walk(module._checkpoint_wrapped_module, path, around)
        return
    yield path, module, around
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, _joined(path, key), (module, *around))


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _own_name(path: str, is_ddp: bool) -> str:
    parts = path.split(".")[1 if is_ddp else 0 :]
    return ".".join(part for part in parts if part not in _WRAPPERS)


def _initialisers(module: nn.Module, around: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    """What may write to a module's tensors, in the order in which a constructor does.

    First what modules do for themselves, from the inside out; then what a model around them does for each.
    """
    for owner in (module, *around):
        for name in ("reset_parameters", "_reset_parameters"):
            # Asked of the class: a wrapper answers for the module in it, which has its turn.
            if callable(getattr(type(owner), name, None)):
                yield owner, getattr(owner, name)
                break
    chain = (module, *around)
    for place, owner in enumerate(chain):
        for host in chain[place:]:
            if _initialises_modules(type(host)):
                yield owner, functools.partial(cast(Any, host)._init_weights, owner)
                break


def _initialises_modules(kind: type) -> bool:
    """Say whether models of this class have `_init_weights(module)`, as Hugging Face's do."""
    function = getattr(kind, "_init_weights", None)
    if not callable(function):
        return False
    given = inspect.signature(function).parameters.values()
    needed = [one for one in given if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return len(needed) == 2


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    made: Any = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    made.__dict__.update(user_attributes(tensor))
    return made


def _is_lost(value: object) -> bool:
    return isinstance(value, torch.Tensor) and is_placeholder(value)


def _is_fsdp2(module: nn.Module) -> bool:
    return callable(getattr(type(module), "_get_fsdp_state", None))


class TorchMaterializing:
    """See `MaterializingBackend`."""

    folder: ClassVar[str] = MaterializingBackend.folder
    initialisers: ClassVar[str] = "reset_parameters() of the module, or _init_weights(module) of a model around it"

    @contextmanager
    def filling(self, roots: Sequence[nn.Module], device: object) -> Iterator[TorchFilling]:
        for root in roots:
            for module in root.modules():
                if _is_fsdp2(module):
                    module.reshard()
        with TorchFilling(roots, _checked_device(device)).open() as filling:
            yield filling

    def drawn_seed(self) -> int:
        return int(torch.randint(2**48, ()).item())

    def seeds_differ(self, roots: Sequence[nn.Module], seed: int) -> bool:
        meshes = {}
        for root in roots:
            for parameter in root.parameters():
                layout = layout_of(parameter)
                if layout is not None and layout.mesh.size() > 1:
                    kind = layout.mesh.device_type
                    meshes[layout.mesh] = Devices.device() if kind == Devices.device_type() else torch.device(kind)
        for mesh, device in meshes.items():
            both = torch.tensor([seed, ~seed], dtype=torch.int64, device=device)
            if not torch.equal(reduce_values(both, mesh, mesh.axis_names, "max"), both):
                return True
        return False


def _checked_device(device: Any) -> torch.device:
    if device is None:
        return Devices.device()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError("There is no such device.", expected="for example 'cuda'", got=describe(device)) from error
    if found.type == "meta":
        raise ArgumentError("Values need memory.", expected="a device other than meta", got=describe(device))
    return found


BACKEND: MaterializingBackend = TorchMaterializing()
