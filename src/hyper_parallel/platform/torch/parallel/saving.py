"""Saving's PyTorch part: what a module and an optimizer hold, and tensors as bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel.core.dtensor.boxes import Box, boxes_of, chunk_range
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.parallel.saving.backend import Group, Held, SavingBackend
from hyper_parallel.core.parallel.saving.description import Spread, merged_spread
from hyper_parallel.platform.torch.checkpoint_files import CODES, DTYPES
from hyper_parallel.platform.torch.communication import Communication
from hyper_parallel.platform.torch.dtensor.tensor import DTensor

# What stands between a module and its name once it is compiled, or wrapped by PyTorch's own checkpoint wrapper.
_WRAPPED = re.compile(r"(^|\.)(?:_orig_mod|_checkpoint_wrapped_module)(?=\.)")


class TorchSaving:
    """See `SavingBackend`."""

    folder: ClassVar[str] = SavingBackend.folder
    name: ClassVar[str] = "PyTorch"

    def rank(self) -> int:
        return Communication.transport.rank()

    def num_ranks(self) -> int:
        transport = Communication.transport
        return len(transport.ranks_of(transport.world())) if transport.is_up() else 1

    def store(self) -> Any:
        return Communication.transport.store_of_saves()

    def tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        found = {}
        for name, value in _bare(module).state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                if value is not None:
                    raise ArgumentTypeError(
                        "A module keeps state that is no tensor (`get_extra_state`).",
                        expected="tensors",
                        got=describe(value),
                        where=name,
                        do="Give it as `extra` of `hp.save`.",
                    )
                continue
            found[_clean(name)] = value
        return found

    def parameters(self, module: nn.Module) -> dict[str, torch.Tensor]:
        return {_clean(name): value for name, value in _bare(module).named_parameters()}

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    def held(self, tensor: torch.Tensor, where: str, *, is_written: bool) -> Held:
        spread: Spread | None = None
        shape = tuple(tensor.shape)
        local: Any = tensor
        if isinstance(tensor, DTensor):
            layout = tensor._spec.layout
            _check_no_partial(layout.partial, where)
            spread, local = _spread_of_layout(layout, shape), tensor._local
        elif hasattr(tensor, "_local_tensor"):
            spread, local = _native_spread(tensor, where), tensor._local_tensor
        local = local.detach()
        _check_storable(local, where, is_written=is_written)
        box = Box((0,) * len(shape), shape)
        if spread is not None:
            box = _own_box(spread, self.rank(), shape)
            if tuple(local.shape) != box.sizes and not (box.is_empty and local.numel() == 0):
                raise StateError(
                    "A distributed tensor's part is not the one that its layout says.",
                    expected=str(list(box.sizes)),
                    got=str(list(local.shape)),
                    where=where,
                )
        return Held(CODES[local.dtype], shape, spread, box, local)

    def bytes_of(self, local: torch.Tensor) -> Any:
        host = local.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return host.reshape(-1).view(torch.uint8).numpy()

    def own_bytes(self, local: torch.Tensor) -> Any | None:
        if local.device.type != "cpu" or not local.is_contiguous() or local.is_conj() or local.is_neg():
            return None
        return local.detach().reshape(-1).view(torch.uint8).numpy()

    def note_written(self, local: torch.Tensor) -> None:
        torch.autograd.graph.increment_version(local)

    def write(self, local: torch.Tensor, dtype: str, data: Any) -> None:
        values = torch.from_numpy(data).view(DTYPES[dtype]).reshape(local.shape)
        with torch.no_grad():
            local.copy_(values)

    def launch_copy(self, local: torch.Tensor, box: Box, out: Any) -> bool:
        if local.device.type == "cpu":
            return False
        part = local[tuple(slice(start, end) for start, end in zip(box.starts, box.ends, strict=True))]
        torch.from_numpy(out).view(local.dtype).reshape(box.sizes).copy_(part, non_blocking=True)
        return True

    def join_device(self, tensors: Sequence[torch.Tensor]) -> None:
        for device in {tensor.device for tensor in tensors if tensor is not None and tensor.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def host_memory(self, num_bytes: int, tensors: Sequence[torch.Tensor]) -> Any:
        is_pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        return torch.empty(max(1, num_bytes), dtype=torch.uint8, pin_memory=is_pinned).numpy()

    def optimizer(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> TorchOptimizerState:
        return TorchOptimizerState(self, optimizer, parameters)


class TorchOptimizerState:
    """See `OptimizerState`."""

    def __init__(self, saving: TorchSaving, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
            raise ArgumentTypeError(
                "This is no optimizer of PyTorch.", expected="a torch.optim.Optimizer", got=describe(optimizer)
            )
        self._saving = saving
        self._optimizer = optimizer
        self._params: dict[str, Any] = {}
        self._groups: list[list[str]] = []
        self._made: dict[tuple[str, str], torch.Tensor] = {}
        names: dict[int, str] = {}
        for name, value in parameters.items():  # a tied one has its first name
            names.setdefault(id(value), name)
        for index, group in enumerate(optimizer.param_groups):
            self._groups.append([])
            for param in group["params"]:
                known = names.get(id(param))
                if known is None:
                    raise ArgumentError(
                        "The optimizer trains a parameter that the model has not.",
                        expected="parameters of the model that is saved or loaded",
                        got=describe(param),
                        where=f"group {index} of the optimizer",
                        do="Give the model that the optimizer was made for, as it is now.",
                    )
                self._params[known] = param
                self._groups[-1].append(known)

    def groups(self) -> list[Group]:
        made = []
        for names, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            options = {key: _number(value) for key, value in group.items() if key != "params"}
            made.append(Group(list(names), options))
        return made

    def states(self) -> dict[str, dict[str, Any]]:
        state = self._optimizer.state
        return {name: dict(state[param]) for name, param in self._params.items() if state.get(param)}

    def targets(
        self, wanted: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]], *, strict: bool
    ) -> dict[tuple[str, str], Held]:
        found = {}
        for param, states in wanted.items():
            if param not in self._params:
                continue
            there = self._optimizer.state.get(self._params[param], {})
            for name, (dtype, shape) in states.items():
                tensor = there.get(name)
                if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
                    tensor = self._new(self._params[param], dtype, shape, f"state {name!r} of {param}")
                self._made[param, name] = tensor
                found[param, name] = self._saving.held(tensor, f"state {name!r} of {param}", is_written=True)
        return found

    def _new(self, param: Any, dtype: str, shape: tuple[int, ...], where: str) -> torch.Tensor:
        kind = DTYPES.get(dtype)
        if kind is None:
            raise ArgumentError("PyTorch has no such dtype.", got=dtype, where=where)
        with torch.no_grad():
            if shape == tuple(param.shape):
                return torch.zeros_like(param, dtype=kind, requires_grad=False)
            if hasattr(param, "to_local") and math.prod(shape) != 1:
                raise ArgumentError(
                    "State of an optimizer that is shaped otherwise than its distributed parameter needs a place.",
                    expected=f"state of shape {list(param.shape)}",
                    got=str(list(shape)),
                    where=where,
                    do="Run one step of the optimizer before the load, so that its state is there.",
                )
            # A count of steps lives on the host, unless the optimizer runs as one kernel or in a graph.
            group = next(group for group in self._optimizer.param_groups if any(p is param for p in group["params"]))
            is_on_device = shape != () or group.get("fused") or group.get("capturable")
            return torch.zeros(shape, dtype=kind, device=param.device if is_on_device else "cpu")

    def assign(self, values: Mapping[str, Mapping[str, Any]], options: Mapping[str, Mapping[str, Any]]) -> None:
        states: dict[str, dict[str, Any]] = {}
        for (param, name), tensor in self._made.items():
            states.setdefault(param, {})[name] = tensor
        for param, plain in values.items():
            states.setdefault(param, {}).update(plain)
        for name, param in self._params.items():
            if name in states:
                self._optimizer.state[param] = states[name]
            elif name in options:  # saved before its first step
                self._optimizer.state.pop(param, None)
        for names, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            known = next((options[name] for name in names if name in options), {})
            for key, value in known.items():
                if isinstance(group.get(key), torch.Tensor):
                    with torch.no_grad():
                        group[key].fill_(value)
                else:
                    group[key] = value


def _number(value: object) -> object:
    """A learning rate may be a tensor, for graphs; it is saved as its number."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _bare(module: Any) -> Any:
    """The module that a user means, without DDP's wrapper around it."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in getattr(module, "_modules", {}):
            module = module._orig_mod
        else:
            break
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError("A model is a module.", expected="a torch.nn.Module", got=describe(module))
    return module


def _clean(name: str) -> str:
    return _WRAPPED.sub(r"\1", name).replace("..", ".").lstrip(".")


def _check_storable(local: torch.Tensor, where: str, *, is_written: bool) -> None:
    if local.device.type == "meta":
        raise ArgumentError(
            "A tensor has no memory (it lives on the meta device).",
            where=where,
            do="Give it memory first: `platform.init_parameters(model, 0)` or `model.to_empty(device=...)`."
            if is_written else "Give it values first.",
        )  # fmt: skip
    if local.layout is not torch.strided:
        raise ArgumentError("A sparse tensor has no place in a checkpoint.", got=describe(local), where=where)
    if local.dtype not in CODES:
        raise ArgumentError(
            "A tensor's dtype has no place in a safetensors file.",
            got=describe(local),
            where=where,
            do="Cast it before saving.",
        )


def _check_no_partial(partial: object, where: str) -> None:
    if partial:
        raise ArgumentError(
            "A distributed tensor is not reduced yet, so no rank has its values.",
            got=f"partial over {partial}",
            where=where,
            do="Redistribute it first.",
        )


def _own_box(spread: Spread, rank: int, shape: tuple[int, ...]) -> Box:
    for box, ranks in spread:
        if rank in ranks:
            return box
    return Box((0,) * len(shape), (0,) * len(shape))


@lru_cache(maxsize=65536)
def _spread_of_layout(layout: Layout, shape: tuple[int, ...]) -> Spread:
    return merged_spread(dict(boxes_of(layout, shape)))


def _native_spread(tensor: Any, where: str) -> Spread:
    """Of PyTorch's own DTensor."""
    placements = []
    for placement in tensor.placements:
        if placement.is_partial():
            _check_no_partial(str(placement), where)
        factor = getattr(placement, "split_factor", None)
        placements.append((getattr(placement, "dim", None), factor))
    mesh = tensor.device_mesh
    return _spread_of_placements(
        tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape), tuple(placements), tuple(tensor.shape)
    )


@lru_cache(maxsize=65536)
def _spread_of_placements(
    ranks: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[tuple[int | None, int | None], ...],
    shape: tuple[int, ...],
) -> Spread:
    # A strided shard (FSDP around tensor parallel) splits what axes to the right of it have split before.
    order = sorted(range(len(placements)), key=lambda axis: (placements[axis][1] is not None, axis))
    boxes = {}
    for rank, coordinate in zip(ranks, np.ndindex(*mesh_shape), strict=True):
        starts, sizes = [0] * len(shape), list(shape)
        for axis in order:
            dim = placements[axis][0]
            if dim is not None:
                further, sizes[dim] = chunk_range(sizes[dim], mesh_shape[axis], coordinate[axis])
                starts[dim] += further
        boxes[rank] = Box(tuple(starts), tuple(sizes))
    return merged_spread(boxes)


BACKEND: SavingBackend = TorchSaving()
