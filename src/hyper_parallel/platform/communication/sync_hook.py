"""The four hooks of a layer of experts, and how one of them meets a coordinator.

A layer calls them in this order: A, dispatch, B, experts, C, combine, D. Between A and B and between C and D a side
communicates, elsewhere it computes. Backward comes by in the opposite order, so what a hook entered in forward is what
it leaves there.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe

COMPUTE = "compute"
COMM = "comm"

# hook -> the role that forward leaves there, and the one that it enters
ROLES = {"A": (COMPUTE, COMM), "B": (COMM, COMPUTE), "C": (COMPUTE, COMM), "D": (COMM, COMPUTE)}


class Coordinator(Protocol):
    """What a hook asks of a coordinator; `HookCoordinator` is ours, any object that has these will do."""

    @property
    def enabled(self) -> bool: ...

    def notify_dispatched(self, role: str) -> None: ...

    def rendezvous(self, role: str) -> None: ...


class Hook(NamedTuple):
    """One of the hooks, as it is met.

    `Hook("B", is_backward=True)` enters the communication that undoes the dispatch.
    """

    name: str
    is_backward: bool

    def __str__(self) -> str:
        return f"hook {self.name} of {'backward' if self.is_backward else 'forward'}"


_thread = threading.local()


def hook_of_this_thread() -> Hook | None:
    """Return the hook that this thread is meeting a coordinator for; None where somebody calls the coordinator
    by hand.
    """
    return getattr(_thread, "hook", None)


def meet(hook: Hook, coordinator: Coordinator) -> None:
    """Tell the coordinator which role is left, and wait for the other side before the next one.

    Does nothing while the coordinator is disabled.
    """
    if not coordinator.enabled:
        return
    first, second = ROLES[hook.name]
    left, entered = (second, first) if hook.is_backward else (first, second)
    before = hook_of_this_thread()
    _thread.hook = hook
    try:
        coordinator.notify_dispatched(left)
        coordinator.rendezvous(entered)
    finally:
        _thread.hook = before


def check_hook(hook_name: object, coordinator: object, call: str) -> None:
    if not isinstance(hook_name, str):
        raise ArgumentTypeError(f"`{call}` takes the name of a hook.", expected=_NAMES, got=describe(hook_name))
    if hook_name not in ROLES:
        raise ArgumentError(f"`{call}` knows no such hook.", expected=_NAMES, got=describe(hook_name))
    if isinstance(coordinator, type) or not all(hasattr(coordinator, name) for name in _ASKED_FOR):
        raise ArgumentTypeError(
            f"`{call}` takes a coordinator.",
            expected="a HookCoordinator, or an object that has " + ", ".join(f"`{name}`" for name in _ASKED_FOR),
            got=describe(coordinator),
        )


_NAMES = "'A' (before dispatch), 'B' (after it), 'C' (before combine) or 'D' (after it)"
_ASKED_FOR = ("enabled", "notify_dispatched", "rendezvous")
