"""The memory of a unit on PyTorch. What it does when is the unit's; see `UnitMemory` in core.

Guarantees: memory is taken and given back on the stream of the caller, which has waited for every collective that uses
it. So nothing of one stream is handed to another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyper_parallel._base.errors import CommunicationError, StateError
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.parallel.sharding.cutting import offsets
from hyper_parallel.core.parallel.sharding.precision import MixedPrecision
from hyper_parallel.platform.communication.one_rank import OneRank
from hyper_parallel.platform.communication.reductions import Reduction
from hyper_parallel.platform.torch.communication import Communication
from hyper_parallel.platform.torch.communication.transport import TorchTransport
from hyper_parallel.platform.torch.dtypes import to_dtype
from hyper_parallel.platform.torch.parallel.sharding.gradients import UnitGradients
from hyper_parallel.platform.torch.parallel.sharding.parameters import Place, UnitParameter, check_optimizers

__all__ = ["TorchUnitMemory"]

_NOTHING = torch.empty(0)
_ALIGNMENT = 16  # bytes; where parameters of another dtype begin


@dataclass
class _SameDtype:
    """Parameters that are stored in one dtype and gathered in one: they lie beside each other everywhere."""

    stored: torch.dtype
    gathered: torch.dtype
    parameters: list[UnitParameter]
    room: int  # elements of one rank's part of all
    stored_at: int = 0  # byte offset in the shards
    sent_at: int = 0  # byte offset in one rank's part of the message
    whole_at: int = 0  # byte offset in the whole memory
    whole_room: int = 0  # elements


class TorchUnitMemory:
    """See `UnitMemory`."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[UnitParameter],
        values: Sequence[nn.Parameter],
        mesh: DeviceMesh,
        axis: str,
        replicate_axis: str | None,
        precision: MixedPrecision,
        device: torch.device,
        *,
        transport: TorchTransport | None = None,
    ) -> None:
        self._name = name
        self.parameters = list(parameters)
        self._precision = precision
        is_alone = len(mesh.ranks) == 1 and not Communication.transport.is_up()
        self._transport: Any = transport or (OneRank(Communication.transport) if is_alone else Communication.transport)
        self._rank = mesh.get_local_rank(axis)
        self._axis_size = mesh.size(axis)
        self._group = None if is_alone else mesh.get_group(axis)
        self._replicas: tuple[Any, int] | None = None
        if replicate_axis is not None and not is_alone:
            self._replicas = mesh.get_group(replicate_axis), mesh.size(replicate_axis)
        self._gather_handle: Any = None
        self._received = _NOTHING
        self._is_checked = False
        self._generation = 0
        self._whole_versions = 0
        self._gradients = UnitGradients(
            self.parameters,
            self._transport,
            self._group,
            self._axis_size,
            self._rank,
            self._replicas,
            None if precision.reduce is None else to_dtype(precision.reduce),
        )
        self._lay_out(values, device)

    # -- laid out once -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _lay_out(self, given: Sequence[nn.Parameter], device: torch.device) -> None:
        """Take memory for the shards, fill it from whole parameters, and make the shards of it."""
        device = next((parameter.device for parameter in given if parameter.device.type == "meta"), device)
        self._make_groups(device)
        by_name = dict(zip((parameter.name for parameter in self.parameters), given, strict=True))
        for parameter, place in self._places:
            whole = by_name[parameter.name]
            values = (whole._local if parameter.inner_spec is not None else whole).data
            if parameter.part.dim is not None:
                values = values.narrow(parameter.part.dim, *parameter.part.range_of(self._rank))
            place.copy_(values)
            parameter.set_shard(place.detach(), whole)
        self._make_wholes(device)

    def _make_groups(self, device: torch.device) -> None:
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[UnitParameter]] = defaultdict(list)
        for parameter in self.parameters:
            by_dtype[parameter.dtype, self._gathered_dtype(parameter.dtype)].append(parameter)
        self._groups = [
            _SameDtype(stored, gathered, members, sum(member.part.room for member in members))
            for (stored, gathered), members in by_dtype.items()
        ]
        stored = sent = 0
        for group in self._groups:
            group.stored_at, group.sent_at = stored, sent
            stored += _aligned(group.room * group.stored.itemsize)
            sent += _aligned(group.room * group.gathered.itemsize)
        self._sent_bytes = sent
        self._is_cast = any(group.stored is not group.gathered for group in self._groups)
        self._shards = torch.empty(stored, dtype=torch.uint8, device=device)
        self._places = list(self._laid_in(self._shards))
        self._generation += 1

    def _gathered_dtype(self, stored: torch.dtype) -> torch.dtype:
        wanted = self._precision.param
        return stored if wanted is None or not stored.is_floating_point else to_dtype(wanted)

    def _laid_in(self, memory: torch.Tensor) -> Iterator[tuple[UnitParameter, torch.Tensor]]:
        """Give each parameter with its place in the memory of the shards."""
        for group in self._groups:
            stored = memory[group.stored_at :][: group.room * group.stored.itemsize].view(group.stored)
            starts, _ = offsets(member.part.room for member in group.parameters)
            for member, start in zip(group.parameters, starts, strict=True):
                shape = member.part.shape_of(self._rank)
                yield member, stored[start : start + math.prod(shape)].view(shape)

    def _make_wholes(self, device: torch.device) -> None:
        """Make the whole parameters on memory that is let go of at once; it comes back with each gather.

        A parameter that is cut along dim 0 has room for parts of equal size, so that all of a group are filled by one
        call. Others are filled part by part.
        """
        total = 0
        for group in self._groups:
            group.whole_at = total
            group.whole_room = sum(self._whole_room(member) for member in group.parameters)
            total += _aligned(group.whole_room * group.gathered.itemsize)
        self.whole_bytes = total
        self.reduced_bytes = sum(parameter.part.room * parameter.dtype.itemsize for parameter in self.parameters)
        self.reduced_bytes *= self._axis_size
        self._storage = torch.UntypedStorage(total, device=device)
        self._filled_at_once: list[tuple[_SameDtype, list[int], list[torch.Tensor]]] = []
        self._filled_by_part: list[tuple[torch.Tensor, _SameDtype, int, int]] = []  # target, group, rank, offset
        for group in self._groups:
            self._make_group_wholes(group)
        # Where the message lies as the whole memory does, it is received right there.
        self._is_direct = self._axis_size == 1 or (
            [parameter.part.dim for parameter in self.parameters] == [0]
            and self._sent_bytes == self._groups[0].room * self._groups[0].gathered.itemsize
        )
        self._whole_memory = self._on_storage(torch.uint8, 0, (total,))
        self._storage.resize_(0)
        self._note_tensors()

    def _note_tensors(self) -> None:
        """Keep what is asked for in each step where it is found at once.

        speed: of 14 parameters the host asks 100 things a step (CPU, 2026-11-20: 40 us of 400).
        """
        self._locals = [parameter.local for parameter, _ in self._places]
        self._pointers = [place.data_ptr() for _, place in self._places]
        self._wholes = [parameter.whole_local for parameter in self.parameters]
        self._filled = [whole for whole in self._wholes if whole.numel()]
        self._filled_at = [whole.storage_offset() * whole.element_size() for whole in self._filled]
        self._gradients.note_trained()
        self._are_trained = [local.requires_grad for local in self._locals]
        self._places_in_modules = [
            (place.module._parameters, place.name, parameter.shard, parameter.whole, parameter.local)
            for parameter in self.parameters
            for place in parameter.places
        ]

    def _whole_room(self, member: UnitParameter) -> int:
        part = member.part
        return part.room * self._axis_size if part.dim == 0 else math.prod(part.shape)

    def _make_group_wholes(self, group: _SameDtype) -> None:
        at, sent_at = group.whole_at // group.gathered.itemsize, 0
        rows: list[torch.Tensor] = []
        for member in group.parameters:
            part = member.part
            old = member.whole
            local = self._on_storage(group.gathered, at, part.shape)
            member.set_whole(local, requires_grad=member.shard.requires_grad)
            if old is not None and old.grad is not None:
                member.whole.grad = old.grad
            # Writes go through other tensors on the same memory: those that backward saved are not seen to change.
            if part.dim == 0:
                rows.append(self._on_storage(group.gathered, at, (self._axis_size, part.room)))
            else:
                target = self._on_storage(group.gathered, at, part.shape)
                rows.append(torch.empty(0))
                for rank in range(self._axis_size if part.dim is not None else 1):
                    box = target if part.dim is None else target.narrow(part.dim, *part.range_of(rank))
                    if box.numel():
                        self._filled_by_part.append((box, group, rank, sent_at))
            at += self._whole_room(member)
            sent_at += part.room
        if all(member.part.dim == 0 for member in group.parameters):
            self._filled_at_once.append((group, [member.part.room for member in group.parameters], rows))
            return
        for member, row, start in zip(
            group.parameters, rows, offsets(member.part.room for member in group.parameters)[0], strict=True
        ):
            if member.part.dim == 0:
                self._filled_by_part += [(row[rank], group, rank, start) for rank in range(self._axis_size)]

    def _on_storage(self, dtype: torch.dtype, at: int, shape: Sequence[int]) -> torch.Tensor:
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return torch.empty(0, dtype=dtype, device=self._storage.device).set_(self._storage, at, shape, strides)

    # -- gathered ------------------------------------------------------------------------------------------------------

    def begin_gather(self) -> None:
        if not self.parameters:
            return
        if not self._is_checked:
            self._is_checked = True
            check_optimizers(self.parameters)
        self._take_in_changes()
        sent = self._shards
        if self._is_cast:
            sent = torch.empty(self._sent_bytes, dtype=torch.uint8, device=self._shards.device)
            for group in self._groups:
                stored = self._shards[group.stored_at :][: group.room * group.stored.itemsize].view(group.stored)
                cast = sent[group.sent_at :][: group.room * group.gathered.itemsize].view(group.gathered)
                cast.copy_(stored)
        transport, output = self._transport, None
        if self._is_direct:
            self._storage.resize_(self.whole_bytes)
            output = self._whole_memory
        self._received, self._gather_handle = transport.launch(
            "all_gather_into_tensor", self._group, transport.launch_all_gather, sent, self._group, output
        )

    def end_gather(self) -> None:
        if not self.parameters:
            return
        self._gather_handle.wait()
        if not self._is_direct:
            self._storage.resize_(self.whole_bytes)
            self._fill(self._received.view(self._axis_size, self._sent_bytes))
        self._received, self._gather_handle = _NOTHING, None
        self._whole_versions = self._sum_of_versions()

    def _fill(self, received: torch.Tensor) -> None:
        for group, rooms, rows in self._filled_at_once:
            torch.split_with_sizes_copy(self._rows_of(received, group), rooms, dim=1, out=rows)
        if self._filled_by_part:
            parts = {id(group): self._rows_of(received, group) for group in self._groups}
            for target, group, rank, start in self._filled_by_part:
                values = parts[id(group)][rank, start : start + target.numel()]
                target.copy_(values.view(target.shape))

    def _rows_of(self, received: torch.Tensor, group: _SameDtype) -> torch.Tensor:
        """All ranks' values of a group, one row for each rank."""
        part = received[:, group.sent_at : group.sent_at + group.room * group.gathered.itemsize]
        return part.view(group.gathered)

    def forget_gather(self) -> None:
        if not self.parameters:
            return
        with suppress(CommunicationError):  # whoever communicates next in the group is told
            self._gather_handle.wait()
        self._received, self._gather_handle = _NOTHING, None
        self._storage.resize_(0)

    def free(self) -> None:
        is_written = self._sum_of_versions() != self._whole_versions
        base = self._storage.data_ptr()
        is_elsewhere = [whole.data_ptr() - base for whole in self._filled] != self._filled_at
        self._storage.resize_(0)
        if is_elsewhere:  # parameter.data = x
            self._make_wholes(self._shards.device)
        if is_written or is_elsewhere:
            raise StateError(
                "A parameter was written to inside forward or backward. The write is lost: what it reached goes away.",
                where=f"unit {self._name or 'of the whole module'}: "
                + ", ".join(parameter.name for parameter in self.parameters),
                do="Write to parameters outside of forward, where they are shards: `with torch.no_grad(): p.mul_(2)`.",
            )

    def _sum_of_versions(self) -> int:
        return sum([whole._version for whole in self._wholes])

    @property
    def device(self) -> torch.device:
        return self._shards.device

    def add_places(self, parameter: UnitParameter, places: Sequence[Place]) -> None:
        """Note further modules that hold a parameter."""
        parameter.places += places
        self._note_tensors()
        self.put_shards()

    def show_whole(self) -> None:
        if [local.requires_grad for local in self._locals] != self._are_trained:
            for parameter in self.parameters:
                parameter.whole.requires_grad_(parameter.local.requires_grad)
            self._note_tensors()
        for held, name, _, whole, _ in self._places_in_modules:
            held[name] = whole

    def show_shards(self) -> None:
        is_replaced = self._is_replaced
        self.put_shards()
        if is_replaced:
            raise StateError(
                "A parameter was replaced inside forward or backward. What came in its place is lost.",
                where=f"unit {self._name or 'of the whole module'}",
                do="Replace parameters outside of forward, where they are shards.",
            )

    def put_shards(self) -> None:
        for held, name, shard, _, _ in self._places_in_modules:
            held[name] = shard

    @property
    def _is_replaced(self) -> bool:
        """Whether a module has something else than the shard or the whole parameter, or a shard has another tensor."""
        for held, name, shard, whole, local in self._places_in_modules:
            current = held.get(name)
            if (current is not shard and current is not whole) or shard._local is not local:
                return True
        return False

    # -- changes from outside ------------------------------------------------------------------------------------------

    def version(self) -> int:
        is_new = self._is_replaced or [local.data_ptr() for local in self._locals] != self._pointers
        return ((self._generation + is_new) << 40) + sum([local._version for local in self._locals])

    def _take_in_changes(self) -> None:
        """Bring values that were put somewhere else back into the memory of the shards.

        `parameter.data = x`, `load_state_dict(assign=True)`, `module.to(device)` and `hp.materialize` do that.
        """
        if self._is_replaced:
            for parameter in self.parameters:
                parameter.take_over()
            self._note_tensors()
        if [local.data_ptr() for local in self._locals] != self._pointers:
            moved = [pair for pair in self._places if pair[0].local.data_ptr() != pair[1].data_ptr()]
            self._check_alike()
            first = self.parameters[0].local
            is_elsewhere = first.device != self._shards.device or any(
                parameter.local.dtype is not parameter.dtype for parameter in self.parameters
            )
            if is_elsewhere:
                for parameter in self.parameters:
                    parameter.dtype = parameter.local.dtype
                self._make_groups(first.device)
                self._make_wholes(first.device)
                moved = self._places
            self._generation += 1
            for parameter, place in moved:
                place.copy_(parameter.local.data)
                parameter.local.data = place
            self._note_tensors()
        if self._shards.device.type == "meta":
            raise StateError(
                "The parameters have no values: they are on the meta device.",
                where=f"unit {self._name or 'of the whole module'}",
                do="Call `hp.materialize(model, seed=...)`, or load a checkpoint, before the first forward.",
            )

    def _check_alike(self) -> None:
        devices = {parameter.local.device for parameter in self.parameters}
        if len(devices) > 1:
            raise StateError(
                "The parameters of a unit lie on several devices.",
                where=", ".join(f"{parameter.name} on {parameter.local.device}" for parameter in self.parameters),
                do="Move the whole module, or give values to all of it: `hp.materialize(module)`.",
            )
        for parameter, place in self._places:
            if parameter.local.shape != place.shape:
                raise StateError(
                    "A shard was replaced by one of another shape.",
                    expected=str(tuple(place.shape)),
                    got=str(tuple(parameter.local.shape)),
                    where=parameter.name,
                )

    # -- gradients -----------------------------------------------------------------------------------------------------

    @property
    def is_trained(self) -> bool:
        return self._gradients.is_trained

    def hold_gradients(self, weight: float | None) -> None:
        self._gradients.put_aside(weight)

    @property
    def holds_gradients(self) -> bool:
        return self.has_new_gradients or self._gradients.has_aside

    @property
    def has_new_gradients(self) -> bool:
        return any(whole.grad is not None for whole in self._wholes)

    @property
    def has_sums(self) -> bool:
        return self._gradients.has_sums

    def begin_reduce(self, weight: float | None) -> None:
        self._gradients.begin_reduce(weight)

    def end_reduce(self) -> None:
        self._gradients.end_reduce()

    def give_gradients(self, divisor: Any) -> None:
        self._gradients.give(divisor)

    def drop_gradients(self) -> None:
        self._gradients.drop()

    @property
    def num_ranks(self) -> int:
        return self._axis_size * (1 if self._replicas is None else self._replicas[1])

    @property
    def reduces_among(self) -> object:
        groups = [self._group] if self._replicas is None else [self._group, self._replicas[0]]
        return tuple(map(self._transport.name_of, groups))

    def total(self, weight: float) -> torch.Tensor:
        """Add up a number over all ranks that share the gradients."""
        number = torch.tensor(weight, dtype=torch.float64, device=self._shards.device)
        transport = self._transport
        for group in [self._group] if self._replicas is None else [self._group, self._replicas[0]]:
            _, handle = transport.launch("all_reduce", group, transport.launch_all_reduce, number, Reduction.SUM, group)
            handle.wait()
        return number

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        self._transport.at_end_of_backward(function)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
