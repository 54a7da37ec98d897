"""Which framework this process works on.

Two facts are kept, and only here:

- the *chosen* platform: the instance that `get_platform()` returns. It may change while nothing is bound. It is kept as
  the global `platform` of the public module `hyper_parallel.platform.platform`, which users read and assign; None
  starts over.
- the *binding*: set once something was built on one framework (a wrapped model, a tensor handed to a public call, the
  import of `DFunction` or `DTensor`), with the call that did it. From then on asking for the other framework is an
  error, never a mix.

Invariant: _state.bound_since is None or _state.chosen is not None
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from typing import Any, ClassVar, Protocol, TypeVar, cast

from hyper_parallel._base import trace
from hyper_parallel._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    ComesLaterError,
    FrameworkMissingError,
    StateError,
    describe,
)
from hyper_parallel._base.extras import install_words
from hyper_parallel._base.log import get_logger
from hyper_parallel.platform.interface import Platform, PlatformType

HYPER_PARALLEL_PLATFORM = "HYPER_PARALLEL_PLATFORM"
HYPER_PARALLEL_PLATFORM_MINDSPORE = "mindspore"
HYPER_PARALLEL_PLATFORM_TORCH = "torch"

_CLASSES = {
    PlatformType.MINDSPORE: ("hyper_parallel.platform.mindspore.platform", "MindSporePlatform"),
    PlatformType.PYTORCH: ("hyper_parallel.platform.torch.platform", "TorchPlatform"),
}

_logger = get_logger("platform")


class _State:
    """What is chosen, and since when it is bound; without the one there is not the other."""

    def __init__(self) -> None:
        self._bound_since: str | None = None

    @property
    def chosen(self) -> Platform | None:
        return cast("Platform | None", _public().platform)

    @chosen.setter
    def chosen(self, platform: Platform | None) -> None:
        _public().platform = platform

    @property
    def bound_since(self) -> str | None:
        return None if self.chosen is None else self._bound_since

    @bound_since.setter
    def bound_since(self, call: str | None) -> None:
        self._bound_since = call


def _public() -> Any:
    return sys.modules["hyper_parallel.platform.platform"]  # imported with the package, and imports this module


_state = _State()
_lock = threading.RLock()


def get_platform() -> Platform:
    """Return the platform of this process.

    It is the one already chosen, else that of `HYPER_PARALLEL_PLATFORM`, else MindSpore, else PyTorch.

    Raises:
        ValueError: the variable has a value that names no framework.
        ImportError: the framework it names, or any framework at all, is not installed.
    """
    with _lock:
        if _state.chosen is not None:
            return _state.chosen
        wanted = _type_from_environment()
        if wanted is not None:
            return _choose(wanted)
        reasons = []
        for platform_type in (PlatformType.MINDSPORE, PlatformType.PYTORCH):
            try:
                return _choose(platform_type)
            except ImportError as error:
                reasons.append(f"{platform_type.display_name}: {error}".splitlines()[0])
                _logger.debug("%s cannot be used: %s", platform_type.display_name, error)
        raise FrameworkMissingError(
            "No framework can be used.",
            expected="PyTorch 2.8 or later, or MindSpore 2.10",
            got="; ".join(reasons).rstrip("."),
            do="Run `pip install 'torch>=2.8'`, or `pip install 'mindspore>=2.10,<2.11' 'numpy<2'`.",
        )


def communicating_platform() -> Platform:
    """Return the platform whose ranks are meant.

    It is that of `get_platform()`, unless nothing has bound the process yet and `torch.distributed` is up: a program on
    PyTorch, started by torchrun where MindSpore is installed as well, must not be told that it is rank 0 of 1.
    """
    with _lock:
        return _choose(PlatformType.PYTORCH) if _is_torchs_by_communication() else get_platform()


def imported_platform() -> Platform:
    """Return the platform of a program that has named none so far, and has no tensor or module to tell it by.

    It is that of `get_platform()`, unless nothing was chosen yet and only one framework has been imported: a program on
    PyTorch is one where MindSpore is installed as well.
    """
    with _lock:
        is_open = _state.chosen is None and _type_from_environment() is None
        imported = [kind for kind in PlatformType if kind.value in sys.modules]
        if is_open and len(imported) == 1:
            return _choose(imported[0])
        return communicating_platform()


def started_world_size() -> int | None:
    """Count the processes that communicate; None while communication was not started. Chooses no framework."""
    with _lock:
        if _state.chosen is None or _is_torchs_by_communication():
            distributed = _torchs_communication()
            return None if distributed is None else int(distributed.get_world_size())
        transport = getattr(_state.chosen, "transport", None)
        return int(_state.chosen.get_world_size()) if transport is not None and transport.is_up() else None


def device_type_here() -> str | None:
    """Name the accelerator that this process works on, or "cpu"; None while no framework can be asked. Chooses none."""
    with _lock:
        is_torchs = _is_torchs_by_communication()
        if _state.chosen is not None and not is_torchs:
            return str(_state.chosen.device_type())
        torch = sys.modules.get("torch")
        if torch is None or ("mindspore" in sys.modules and not is_torchs):
            return None
        return str(torch.accelerator.current_accelerator().type) if torch.accelerator.is_available() else "cpu"


def _is_torchs_by_communication() -> bool:
    """Say whether only `torch.distributed`, which is up, tells which framework is meant.

    MindSpore may have been imported or not.
    """
    is_open = _state.bound_since is None and _type_from_environment() is not PlatformType.MINDSPORE
    return is_open and _torchs_communication() is not None


def _torchs_communication() -> Any:
    """Return `torch.distributed` if it is up, else None."""
    distributed = sys.modules.get("torch.distributed")
    is_up = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if is_up else None


def get_torch_platform() -> Platform:
    """Choose PyTorch's platform from now on, and return it. An error once something is bound to MindSpore."""
    return _choose(PlatformType.PYTORCH)


def get_mindspore_platform() -> Platform:
    """Choose MindSpore's platform from now on, and return it. An error once something is bound to PyTorch."""
    return _choose(PlatformType.MINDSPORE)


def platform_of(thing: object, *, call: str = "platform_of") -> Platform:
    """Return the platform of a module or tensor, to which the process is bound from now on.

    The framework is read from the object's class: the other framework is not imported. `call` is what the user called;
    it is named if something of the other framework comes later.

    Example:
        >>> import torch
        >>> platform_of(torch.nn.Linear(2, 2)).platform_type
        <PlatformType.PYTORCH: 'torch'>
    """
    platform_type = framework_of(thing)
    if platform_type is None:
        raise ArgumentTypeError(
            f"`{call}` cannot tell which framework its argument belongs to.",
            expected="a module or tensor of PyTorch or MindSpore",
            got=describe(thing),
        )
    with _lock:
        platform = _choose(platform_type, asked_by=f"{call}({type(thing).__name__})")
        bind(f"{call}({type(thing).__name__})")
        return platform


def bind(since: str) -> Platform:
    """Bind the process to the chosen platform, because of the call or import `since`; the first one is remembered."""
    with _lock:
        platform = get_platform()
        if _state.bound_since is None:
            _state.bound_since = since
            trace.emit("platform.bind", platform=platform.platform_type.value, since=since)
        return platform


def chosen_type() -> PlatformType | None:
    """Return the framework that this process works on; None as long as nobody has chosen."""
    chosen = _state.chosen
    return None if chosen is None else chosen.platform_type


class Backend(Protocol):
    """What a framework does for one part of the core. A part declares its own, with the methods that it calls."""

    folder: ClassVar[str]  # of the platform's own folder; the module there has the object as `BACKEND`


B = TypeVar("B", bound=Backend)


def backend(platform: Platform, kind: type[B], call: str) -> B:
    """Return the framework's object of this kind; its module is imported when it is first asked for.

    `call` is what the user called; the error names it.

    Example: `backend(platform_of(model), PlannerBackend, "plan_memory").free_bytes(device)`.

    Raises:
        NotImplementedError: this framework does not have that part yet.
    """
    module = f"hyper_parallel.platform.{platform.platform_type.value}.{kind.folder}"
    try:
        return cast(B, importlib.import_module(module).BACKEND)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ComesLaterError(
            f"`{call}` comes with the {kind.folder} on {platform.platform_type.display_name}, "
            "which this version does not have.",
            do="Use PyTorch, or upgrade hyper_parallel once the CHANGELOG lists it.",
        ) from error


def _choose(platform_type: PlatformType, asked_by: str | None = None) -> Platform:
    with _lock:
        chosen = _state.chosen
        if chosen is not None and chosen.platform_type is platform_type:
            return chosen
        if chosen is not None and _state.bound_since is not None:
            raise StateError(
                "One process works on one framework.",
                expected=f"{chosen.platform_type.display_name}, bound since `{_state.bound_since}`",
                got=platform_type.display_name,
                where=asked_by,
                do="Use the other framework in a process of its own, "
                "or set HYPER_PARALLEL_PLATFORM before the first call.",
            )
        module_name, class_name = _CLASSES[platform_type]
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != platform_type.value:
                raise
            raise FrameworkMissingError(
                f"{platform_type.display_name} is not installed.",
                where=asked_by,
                do=install_words(platform_type.value),
            ) from error
        _state.chosen = cast(Platform, getattr(module, class_name)())
        _state.bound_since = None
        trace.emit("platform.choose", platform=platform_type.value)
        return _state.chosen


def _type_from_environment() -> PlatformType | None:
    value = os.environ.get(HYPER_PARALLEL_PLATFORM, "")
    if value == "":
        return None
    try:
        return PlatformType(value.strip().lower())
    except ValueError:
        raise ArgumentError(
            f"{HYPER_PARALLEL_PLATFORM} names no framework.",
            expected=f"{HYPER_PARALLEL_PLATFORM_MINDSPORE!r} or {HYPER_PARALLEL_PLATFORM_TORCH!r}, in any case",
            got=repr(value),
            do=f"Set {HYPER_PARALLEL_PLATFORM} to one of the two, or unset it.",
        ) from None


def framework_of(thing: object) -> PlatformType | None:
    """Read from its class which framework an object is of; None for anything else. Imports and binds nothing."""
    for cls in type(thing).__mro__:
        root = cls.__module__.partition(".")[0]
        if root == "torch":
            return PlatformType.PYTORCH
        if root == "mindspore":
            return PlatformType.MINDSPORE
    return None


def _forget() -> None:
    """Start over, for tests: as if nothing had been chosen or bound."""
    with _lock:
        _state.chosen = None
        _state.bound_since = None
