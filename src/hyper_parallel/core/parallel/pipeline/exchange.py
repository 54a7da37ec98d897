"""What stages hand to each other in a step: put by the one, taken by the other, sent in between from rank to rank.

Example: stage 0 puts the result of microbatch 3; `0SEND_F3` begins to send it; on the other rank `1RECV_F3` begins to
receive, and the forward of stage 1 takes it, waiting until it is there. Two stages of one rank put and take without the
other two.

The first time, and each time with `is_dynamic`, the form of a message goes ahead of it. Both ranks remember it by the
same name, and the one that sends holds every later message against it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.parallel.backend import ParallelBackend
from hyper_parallel.core.parallel.pipeline.actions import Action, Kind, partner
from hyper_parallel.core.parallel.pipeline.messages import Form
from hyper_parallel.core.parallel.pipeline.placement import Placement
from hyper_parallel.platform.interface import Platform
from hyper_parallel.platform.opaque import Device, Group, Tensor

__all__ = ["Exchange", "Name"]


class Name(NamedTuple):
    """Which message: what a stage gives for a microbatch, a result (FORWARD) or gradients of inputs (BACKWARD)."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        what = "The result" if self.kind is Kind.FORWARD else "The gradient of the input"
        return f"{what} of stage {self.stage} for microbatch {self.microbatch}"


class _Message(NamedTuple):
    form: Form
    tensors: Sequence[Tensor]
    handles: Sequence[Any] = ()  # to wait for before the tensors are read
    versions: Sequence[int] = ()  # of the tensors when they were put; none of what was received


class _Sending(NamedTuple):
    """One tensor on its way."""

    handle: Any
    name: Hashable
    tensor: Tensor
    version: int


class Exchange:
    """All messages of one rank. Lives as long as its pipeline, for the forms; a step that ends leaves no message."""

    def __init__(
        self,
        platform: Platform,
        backend: ParallelBackend,
        placement: Placement,
        *,
        device: Callable[[], Device],
        group: Group,
        world_ranks: Sequence[int],
        is_dynamic: bool,
    ) -> None:
        self._platform = platform
        self._backend = backend
        self._placement = placement
        self._device = device
        self._group = group
        self._world_ranks = world_ranks
        self._is_dynamic = is_dynamic
        # Where sends and receives stand in one queue, as on NCCL and on MindSpore, one that waits holds up the next.
        self._is_ahead = platform.get_backend(group) == "gloo" if len(world_ranks) > 1 else False
        self._forms: dict[Hashable, Form] = {}
        self._there: dict[Name, _Message] = {}
        self._on_their_way: list[_Sending] = []

    def put(self, name: Name, form: Form, tensors: Sequence[Tensor]) -> None:
        self._there[name] = _Message(form, tensors, versions=[self._backend.version(tensor) for tensor in tensors])

    def take(self, name: Name) -> tuple[Form, Sequence[Tensor]]:
        form, tensors, handles, versions = self._there.pop(name)
        _wait_for(handles)
        for tensor, version in zip(tensors, versions, strict=bool(versions)):
            self._check_unwritten(name, tensor, version)
        return form, tensors

    def launch_send(self, action: Action) -> None:
        name = _sent_by(action)
        form, tensors, _, versions = self._there.pop(name)
        self._launch_send(name, self._rank_at(partner(action)), form, tensors, versions)

    def launch_receive(self, action: Action) -> None:
        send = partner(action)
        name = _sent_by(send)
        self._there[name] = self._launch_receive(name, self._rank_at(send))

    def may_receive_ahead(self, action: Action) -> bool:
        """Tell whether a receive can be begun before its turn: it holds nothing up, and its form is known."""
        return self._is_ahead and not self._is_dynamic and _sent_by(partner(action)) in self._forms

    def send_gradient(self, name: Hashable, to: int, gradient: Tensor | None) -> None:
        """Begin to send a gradient of a weight, or that there is none."""
        tensors = [] if gradient is None else [gradient]
        form = Form(None, tuple(map(self._backend.meta, tensors)) or (None,))
        self._launch_send(name, to, form, tensors, [self._backend.version(tensor) for tensor in tensors])

    def receive_gradient(self, name: Hashable, source: int) -> Tensor | None:
        """Receive what another rank gave to `send_gradient` under this name."""
        _, tensors, handles, _ = self._launch_receive(name, source)
        _wait_for(handles)
        return tensors[0] if tensors else None

    def _launch_send(
        self, name: Hashable, rank: int, form: Form, tensors: Sequence[Tensor], versions: Sequence[int]
    ) -> None:
        known, to = None if self._is_dynamic else self._forms.get(name), self._world_ranks[rank]
        if known is None:
            if not self._is_dynamic:
                self._forms[name] = copy.deepcopy(form)  # as the other rank has it, whatever happens to a value in it
            self._platform.send_object_list([form], to, self._group)
        else:
            form.check_same(known, str(name))
        self._let_go(is_end=False)
        for tensor, version in zip(tensors, versions, strict=True):
            sending = _Sending(self._platform.isend(tensor, to, self._group), name, tensor, version)
            self._on_their_way.append(sending)

    def _launch_receive(self, name: Hashable, rank: int) -> _Message:
        form, source = None if self._is_dynamic else self._forms.get(name), self._world_ranks[rank]
        if form is None:
            found: list[Any] = [None]
            self._platform.recv_object_list(found, source, self._group)
            form = found[0]
            if not self._is_dynamic:
                self._forms[name] = form
        tensors = [self._backend.empty(meta, self._device()) for meta in form.metas if meta is not None]
        return _Message(form, tensors, [self._platform.irecv(tensor, source, self._group) for tensor in tensors])

    def join(self) -> None:
        """Wait until all that was sent is there. At the end of a step."""
        self._let_go(is_end=True)

    def _let_go(self, *, is_end: bool) -> None:
        """Let go of what has been sent; at the end, wait for all of it."""
        left = []
        for sending in self._on_their_way:
            if is_end:
                sending.handle.wait()
            elif not sending.handle.is_completed():
                left.append(sending)
                continue
            self._check_unwritten(sending.name, sending.tensor, sending.version)
        self._on_their_way = left

    def _check_unwritten(self, name: Hashable, tensor: Tensor, version: int) -> None:
        if self._backend.version(tensor) != version:
            raise StateError(
                f"{name} was written over before it was where it was to go.",
                do="Let the stage give a tensor that it does not write to later, for example `x.clone()`.",
            )

    def _rank_at(self, transfer: Action) -> int:
        return self._placement.rank_of(transfer.stage, transfer.microbatch or 0)

    def forget(self) -> None:
        """Let go of what a step that failed has left."""
        self._there.clear()
        self._on_their_way.clear()


def _sent_by(send: Action) -> Name:
    return Name(Kind.FORWARD if send.kind is Kind.SEND_F else Kind.BACKWARD, send.stage, send.microbatch or 0)


def _wait_for(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.wait()
