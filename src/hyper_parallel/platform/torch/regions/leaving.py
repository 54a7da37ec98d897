"""What is swapped leaves when the op that saved it is over: until then that op may write it.

Autograd saves what an op reads before its kernel runs, and some kernels write what they were given: the noise of RReLU, running statistics,
whatever a kernel of the user's does. No version counts that, as autograd itself reads the memory in backward only. So a copy is not made where a
tensor is saved, but when autograd has begun with the next op that saves anything, or when the block or region ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel._base.put_back import put_back_on_error
from hyper_parallel.platform.torch.swap.device import OnStream

_NOTHING = contextlib.nullcontext()
_NO_BACKWARD = -1  # what PyTorch gives as the number of the backward outside of one


class _Waiting(threading.local):
    """What this thread has saved and not let go yet.

    Fields:
        node: how many nodes autograd had made when it saved that; a node is made before its op saves anything
    """

    def __init__(self) -> None:
        self.launches: list[tuple[Callable[[], None], torch.device, Any]] = []  # with the stream that makes the tensor
        self.node = 0


_waiting = _Waiting()


def leave_later(launch: Callable[[], None], device: torch.device) -> None:
    """Call `launch` when the op that saves a tensor now is over, on the stream that the op runs on. It holds nothing that autograd keeps."""
    if torch._C._current_graph_task_id() != _NO_BACKWARD:
        launch()  # in a thread of autograd's there may be no next op
        return
    _waiting.node = torch.autograd._get_sequence_nr()
    _waiting.launches.append((launch, device, _stream_of(device)))


def note_save() -> None:
    """Autograd saves a tensor: what ops before this one have saved leaves."""
    if _waiting.launches and torch.autograd._get_sequence_nr() != _waiting.node:
        launch_waiting()


def launch_waiting() -> None:
    """All ops that have saved anything are over."""
    launches = _waiting.launches
    if launches:
        _waiting.launches = []
        for launch, device, stream in launches:
            # By then the user may be on another stream, whose events say nothing about that op.
            on = _NOTHING if _stream_of(device) == stream else OnStream(getattr(torch, device.type), stream)
            with put_back_on_error(on), on:
                launch()


def _stream_of(device: torch.device) -> Any:
    current = None if device.type == "cpu" else getattr(getattr(torch, device.type, None), "current_stream", None)
    return None if current is None else current(device)


def forget_waiting() -> None:
    """The block or region has failed: nothing more leaves."""
    _waiting.launches = []
