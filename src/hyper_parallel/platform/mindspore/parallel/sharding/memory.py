"""The memory of a unit on MindSpore's CPU. What it does when is the unit's; see `UnitMemory` in core.

All parameters travel in one message of bytes. Each whole parameter has a storage of its own, which is made empty and
filled again in place: what autograd has saved of it is on the same storage. MindSpore counts no writes, so changes of
the shards are found by a checksum of their bytes, and so are writes to whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor
from mindspore.common import dtype as mstype
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.parallel.sharding.cutting import offsets
from hyper_parallel.core.parallel.sharding.precision import MixedPrecision
from hyper_parallel.platform.communication.one_rank import OneRank
from hyper_parallel.platform.communication.reductions import Reduction
from hyper_parallel.platform.mindspore.communication import Communication
from hyper_parallel.platform.mindspore.dtypes import to_dtype
from hyper_parallel.platform.mindspore.parallel.sharding.gradients import UnitGradients
from hyper_parallel.platform.mindspore.parallel.sharding.parameters import UnitParameter, check_optimizers
from hyper_parallel.platform.mindspore.parallel.sharding.raw import boxes, bytes_of, checksum

__all__ = ["MindSporeUnitMemory"]

_ALIGNMENT = 16  # bytes; where each parameter begins in the message


class MindSporeUnitMemory:
    """See `UnitMemory`."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[UnitParameter],
        given: Sequence[Parameter],
        mesh: DeviceMesh,
        axis: str,
        replicate_axis: str | None,
        precision: MixedPrecision,
    ) -> None:
        self._name = name
        self.parameters = list(parameters)
        is_alone = len(mesh.ranks) == 1 and not Communication.transport.is_up()
        self._transport: Any = OneRank(Communication.transport) if is_alone else Communication.transport
        self._rank = mesh.get_local_rank(axis)
        self._axis_size = mesh.size(axis)
        self._group = None if is_alone else mesh.get_group(axis)
        self._replicas: tuple[Any, int] | None = None
        if replicate_axis is not None and not is_alone:
            self._replicas = mesh.get_group(replicate_axis), mesh.size(replicate_axis)
        self._param_dtype = None if precision.param is None else to_dtype(precision.param)
        self._gather_handle: Any = None
        self._received: Any = None
        self._is_checked = False
        self._filled_sum = 0
        self._given: dict[str, Tensor] = {}
        self.is_taken = False  # whether a node of the graph waits for what is given
        self.is_scheduled: Callable[[], bool] = bool  # whether a schedule runs, which looks for gradients on the tape
        self._gradients = UnitGradients(
            self.parameters,
            self._transport,
            self._group,
            self._axis_size,
            self._rank,
            self._replicas,
            None if precision.reduce is None else to_dtype(precision.reduce),
        )
        for parameter, whole in zip(self.parameters, given, strict=True):
            parameter.make_shard(whole, self._rank)
            parameter.make_whole(self._gathered_dtype(parameter.dtype))
        self.whole_bytes = sum(parameter.whole_bytes for parameter in self.parameters)
        self.reduced_bytes = sum(
            parameter.part.room * self._axis_size * int(parameter.whole.itemsize) for parameter in self.parameters
        )
        self._starts, self._sent_bytes = offsets(
            -(-parameter.part.room * parameter.whole.itemsize // _ALIGNMENT) * _ALIGNMENT
            for parameter in self.parameters
        )

    def _gathered_dtype(self, stored: Any) -> Any:
        return stored if self._param_dtype is None or stored not in mstype.float_type else self._param_dtype

    # -- gathered ------------------------------------------------------------------------------------------------------

    def begin_gather(self) -> None:
        if not self.parameters:
            return
        if not self._is_checked:
            self._is_checked = True
            check_optimizers(self.parameters)
        self._check_shards()
        message = np.zeros(self._sent_bytes, np.uint8)
        with _no_grad():
            for parameter, start in zip(self.parameters, self._starts, strict=True):
                values = parameter.local.data
                if values.dtype != parameter.whole.dtype:
                    values = values.to(parameter.whole.dtype)
                values = Communication.transport.contiguous(values)
                message[start : start + values.nbytes] = bytes_of(values)
            transport, sent = self._transport, Tensor(message)
            self._received, self._gather_handle = transport.launch(
                "all_gather_into_tensor", self._group, transport.launch_all_gather, sent, self._group
            )

    def end_gather(self) -> None:
        if not self.parameters:
            return
        self._gather_handle.wait()
        received, self._received, self._gather_handle = self._received, None, None
        rows = received.asnumpy().reshape(self._axis_size, self._sent_bytes)
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            parameter.allocate()
            for row, box in zip(rows, boxes(parameter.whole, parameter.part), strict=True):
                box[...] = row[start : start + box.size].reshape(box.shape)
        self._filled_sum = self._sum_of_own_parts()

    def forget_gather(self) -> None:
        if self.parameters:
            self._gather_handle.wait()
            self._received = self._gather_handle = None

    def free(self) -> None:
        is_written = self._sum_of_own_parts() != self._filled_sum
        for parameter in self.parameters:
            parameter.free()
        if is_written:
            raise StateError(
                "A parameter was written to inside forward or backward. The write is lost: what it reached goes away.",
                where=f"unit {self._name or 'of the whole cell'}: "
                + ", ".join(parameter.name for parameter in self.parameters),
                do="Write to parameters outside of forward, where they are shards: `ops.assign(p.to_local(), value)`.",
            )

    def _sum_of_own_parts(self) -> int:
        """Of this rank's part of each whole parameter: what is written to a parameter is, as a rule, all of it."""
        total = 0
        for parameter in self.parameters:
            total = checksum(boxes(parameter.whole, parameter.part)[self._rank], total)
        return total

    def show_whole(self) -> None:
        for parameter in self.parameters:
            parameter.show_plain()

    def show_shards(self) -> None:
        for parameter in self.parameters:
            parameter.show_shard()

    # -- changes from outside ------------------------------------------------------------------------------------------

    def version(self) -> int:
        """A checksum of all shards. Reading them takes a part of the time that gathering them takes."""
        total = 0
        for parameter in self.parameters:
            local = parameter.local
            if not local.is_meta:
                total = checksum(bytes_of(Communication.transport.contiguous(local.data)), total)
        return total

    def _check_shards(self) -> None:
        for parameter in self.parameters:
            parameter.check_in_place()
            local = parameter.local
            if local.is_meta:
                raise StateError(
                    "The parameters have no values: they are on the meta device.",
                    where=f"unit {self._name or 'of the whole cell'}",
                    do="Call `hp.materialize(model, seed=...)`, or load a checkpoint, before the first forward.",
                )
            expected = parameter.part.shape_of(self._rank)
            if tuple(local.shape) != expected or local.dtype != parameter.dtype:
                raise StateError(
                    "A shard was replaced by one of another shape or dtype.",
                    expected=f"{parameter.dtype} {list(expected)}",
                    got=f"{local.dtype} {list(local.shape)}",
                    where=parameter.name,
                )

    # -- gradients -----------------------------------------------------------------------------------------------------

    @property
    def is_trained(self) -> bool:
        return any(parameter.is_trained for parameter in self.parameters)

    def trained(self) -> list[UnitParameter]:
        """List the parameters that need a gradient now, and have their local ones need it, too."""
        found = self._gradients.trained()
        for parameter in found:
            if not parameter.local.requires_grad:
                parameter.local.requires_grad = True
        return found

    def leave(self, parameter: UnitParameter, grad: Tensor) -> None:
        """Leave a gradient of the whole parameter, as backward does."""
        self._gradients.leave(parameter.name, grad)

    def hold_gradients(self, weight: float | None) -> None:
        self._gradients.put_aside(weight)

    @property
    def holds_gradients(self) -> bool:
        return self._gradients.is_waiting

    @property
    def has_new_gradients(self) -> bool:
        return self._gradients.is_new

    @property
    def has_sums(self) -> bool:
        return self._gradients.has_sums

    def begin_reduce(self, weight: float | None) -> None:
        with _no_grad():
            self._gradients.begin_reduce(weight)

    def end_reduce(self) -> None:
        with _no_grad():
            self._gradients.end_reduce()

    def give_gradients(self, divisor: Any) -> None:
        with _no_grad():
            given = self._gradients.taken_sums(divisor)
        if not self.is_taken and self.is_scheduled():
            self._add_on_tape(given)
            return
        if given and not self.is_taken:
            raise StateError(
                "There are gradients that come too late: MindSpore takes them while backward passes the unit.",
                where=f"unit {self._name or 'of the whole cell'}: {', '.join(given)}",
                do="Use the unit in the last microbatch of the step, too; it may be multiplied by 0. After an "
                "error in a step, ask for `trainable_params()` anew.",
            )
        self._given.update(given)

    def _add_on_tape(self, given: dict[str, Tensor]) -> None:
        with _no_grad():
            for parameter in self.parameters:
                grad, local = given.get(parameter.name), parameter.local
                if grad is not None:
                    local._grad = grad if local._grad is None else local._grad + grad

    def take_given(self) -> dict[str, Tensor]:
        """Return what was given, by name."""
        given, self._given = self._given, {}
        return given

    def drop_gradients(self) -> None:
        self._gradients.drop()
        self._given = {}

    @property
    def num_ranks(self) -> int:
        return self._axis_size * (1 if self._replicas is None else self._replicas[1])

    @property
    def reduces_among(self) -> object:
        groups = [self._group] if self._replicas is None else [self._group, self._replicas[0]]
        return tuple(map(self._transport.name_of, groups))

    def total(self, weight: float) -> float:
        number = Tensor([weight], mindspore.float64)
        transport = self._transport
        with _no_grad():
            for group in [self._group] if self._replicas is None else [self._group, self._replicas[0]]:
                _, handle = transport.launch(
                    "all_reduce", group, transport.launch_all_reduce, number, Reduction.SUM, group
                )
                handle.wait()
        found: float = number.asnumpy().item()
        return found

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        self._transport.at_end_of_backward(function)
