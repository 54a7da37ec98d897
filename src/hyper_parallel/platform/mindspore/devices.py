"""Devices and random state."""

from __future__ import annotations

import importlib
import secrets
from contextlib import AbstractContextManager
from typing import Any

import mindspore
import numpy as np
from mindspore.graph.api import _pynative_executor

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.platform.host_streams import HostEvent, HostStream, current_host_stream, host_stream_context

# MindSpore's names of devices -> the kinds that both frameworks' platforms speak of.
_KINDS = {"CPU": "cpu", "Ascend": "npu", "GPU": "gpu"}
_OTHER_NAMES = {"ascend": "Ascend", "npu": "Ascend", "gpu": "GPU", "cuda": "GPU"}

# `mindspore.common.seed` is hidden behind a function of the same name.
_seeds: Any = importlib.import_module("mindspore.common.seed")

_last_target = "CPU"


class Devices:
    @staticmethod
    def device_type() -> str:
        """Name the kind of device that MindSpore works on in this process: `npu` (Ascend), `gpu`, else `cpu`."""
        return _KINDS[_target()]

    @staticmethod
    def device(index: int | None = None) -> str:
        """Name the accelerator of that index, the current one for `None`; the CPU where there is none."""
        target = _target()
        if target == "CPU":
            return "CPU"
        handle = Devices.get_device_handle()
        if index is None:
            return f"{target}:{handle.current_device()}"
        count = handle.device_count()
        if not 0 <= index < count:
            raise ArgumentError(
                "There is no such device.", expected=f"an index from 0 to {count - 1}", got=describe(index)
            )
        return f"{target}:{index}"

    @staticmethod
    def get_device_handle() -> Any:
        """Return streams, events and counts of the device, under the names that `torch.cuda` and `torch.cpu` have."""
        return _HostHandle if _target() == "CPU" else _AcceleratorHandle

    @staticmethod
    def is_unseeded() -> bool:
        """Say whether nobody has given a seed: there is no state that could be brought back."""
        return _seeds._GLOBAL_SEED is None

    @staticmethod
    def get_rng_state() -> dict[str, Any]:
        """Read everything that random operations of this process draw from by default.

        On the CPU an operator's numbers come from a global seed and a counter per kind of operator; initial values of
        parameters come from NumPy's generator; on Ascend operators use the framework's generator.
        """
        if _seeds._GLOBAL_SEED is None:
            # Without a seed every operator draws its own from the system, and nothing could be brought back. A seed
            # from the system, once, is as random. NumPy's state is not touched.
            _seeds._GLOBAL_SEED = secrets.randbelow(2**31)
        return {
            "seed": _seeds._GLOBAL_SEED,
            "operators": dict(_seeds._KERNEL_SEED),
            "numpy": np.random.get_state(),
            "generator": mindspore.get_rng_state(),
        }

    @staticmethod
    def set_rng_state(state: dict[str, Any]) -> None:
        """Bring all of it back to where `get_rng_state` saw it.

        Not covered, as its state is out of reach: a primitive or cell that keeps a generator of its own and is used
        again, such as one `nn.Dropout` object.
        """
        if not isinstance(state, dict) or not {"seed", "operators", "numpy", "generator"} <= set(state):
            raise ArgumentTypeError(
                "This is no random state.", expected="what `get_rng_state()` returned", got=describe(state)
            )
        _seeds._GLOBAL_SEED = state["seed"]
        _seeds._KERNEL_SEED.clear()
        _seeds._KERNEL_SEED.update(state["operators"])
        np.random.set_state(state["numpy"])
        mindspore.set_rng_state(state["generator"])

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Seed operators, initial values, NumPy and data pipelines; a seed of any size and sign, as in PyTorch."""
        seed = int(seed) % 2**32  # NumPy takes no other
        mindspore.set_seed(seed)
        mindspore.manual_seed(seed)


def to_device(device: object) -> str:
    """Return MindSpore's name of a device: `cpu` and `meta` in any case, and the accelerator of this process."""
    target = _target()
    if isinstance(device, str):
        name, _, index = device.strip().lower().partition(":")
        if name == "meta" and not index:
            return "meta"
        if name == "cpu" and index in ("", "0"):
            return "CPU"
        # A process of MindSpore works on one accelerator, so an index can only be that one's.
        if (
            target != "CPU"
            and _OTHER_NAMES.get(name) == target
            and index in ("", str(_AcceleratorHandle.current_device()))
        ):
            return target
    accelerator = "" if target == "CPU" else f", or {Devices.device()!r}, the device of this process"
    raise ArgumentError("There is no such device.", expected=f"'cpu' or 'meta'{accelerator}", got=describe(device))


def to_device_or_none(device: object) -> str | None:
    return None if device is None else to_device(device)


def _target() -> str:
    global _last_target
    target: str = mindspore.get_current_device().device_target
    # Inside MindSpore's own `DeviceCtx("meta")` the current device is "meta", in every thread; the process still
    # works on the device it had.
    if target in _KINDS:
        _last_target = target
    return _last_target


class _HostHandle:
    """The CPU. MindSpore's own streams do nothing there, and each of its functions fails on the first call."""

    Stream = HostStream
    Event = HostEvent

    @staticmethod
    def current_stream(device: Any = None) -> HostStream:
        return current_host_stream()

    @staticmethod
    def stream(stream: HostStream | None) -> AbstractContextManager[None]:
        return host_stream_context(stream)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        _pynative_executor.sync()

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> str:
        return "cpu"


class _AcceleratorHandle:
    """Ascend (or GPU): the framework's own. Not run by our tests, which have no such device."""

    Stream = mindspore.runtime.Stream
    Event = mindspore.runtime.Event
    current_stream = staticmethod(mindspore.runtime.current_stream)
    stream = mindspore.runtime.StreamCtx
    synchronize = staticmethod(mindspore.runtime.synchronize)

    @staticmethod
    def device_count() -> int:
        context = mindspore.device_context
        return context.ascend.device_count() if _target() == "Ascend" else context.gpu.device_count()

    @staticmethod
    def current_device() -> int:
        return mindspore.get_current_device().device_id
