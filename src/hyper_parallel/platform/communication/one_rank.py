"""Collectives of a process that is alone: communication was not started, and the mesh has this one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.communication.transport import Launched, Transport
from hyper_parallel.platform.opaque import Tensor

__all__ = ["OneRank"]


class _Done:
    """The handle of what was done at once."""

    def wait(self) -> None:
        pass


class OneRank:
    """What a sharded unit asks of a transport, for a group of one. What is sent is what comes back.

    Args:
        transport: of the framework, for what needs no other rank.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def launch(self, call: str, group: object, start: Callable[..., Launched], *arguments: Any) -> tuple[Any, _Done]:
        return start(*arguments)[0], _Done()

    def launch_all_gather(self, tensor: Tensor, group: object, output: Tensor | None = None) -> Launched:
        if output is None:
            return tensor, None, None
        self._transport.write(output, tensor)
        return output, None, None

    def launch_reduce_scatter(self, tensor: Tensor, op: object, group: object) -> Launched:
        return tensor, None, None

    def launch_equal_exchange(self, tensor: Tensor, sent: object, received: object, group: object) -> Launched:
        return tensor, None, None

    def launch_all_reduce(self, tensor: Tensor, op: object, group: object) -> Launched:
        return tensor, None, None

    def name_of(self, group: object) -> str:
        return "one rank"

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        self._transport.at_end_of_backward(function)
