"""Devices and random state."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe


class Devices:
    @staticmethod
    def device_type() -> str:
        """Name the kind of accelerator that is there (`cuda`, `npu`, `xpu`), else `cpu`."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or not hasattr(getattr(torch, accelerator.type, None), "Stream"):
            return "cpu"  # also an accelerator without streams of its own (Apple's): nothing here could order its work
        return accelerator.type

    @staticmethod
    def device(index: int | None = None) -> torch.device:
        """Return the accelerator of that index, the current one for `None`; the CPU where there is none."""
        kind = Devices.device_type()
        if kind == "cpu":
            return torch.device("cpu")
        count = torch.accelerator.device_count()
        if index is None:
            return torch.device(kind, torch.accelerator.current_device_index())
        if not 0 <= index < count:
            raise ArgumentError(
                "There is no such device.", expected=f"an index from 0 to {count - 1}", got=describe(index)
            )
        return torch.device(kind, index)

    @staticmethod
    def get_device_handle() -> Any:
        """Return the framework's module for the device: `torch.cuda`, `torch.npu`, `torch.cpu`."""
        return getattr(torch, Devices.device_type())

    @staticmethod
    def get_rng_state() -> dict[str, torch.Tensor]:
        """Read every generator that operations of this process draw from by default.

        That is the CPU's and each accelerator's.
        """
        state = {"cpu": torch.get_rng_state()}
        kind = Devices.device_type()
        if kind != "cpu":
            handle = Devices.get_device_handle()
            for index in range(torch.accelerator.device_count()):
                state[f"{kind}:{index}"] = handle.get_rng_state(index)
        return state

    @staticmethod
    def set_rng_state(state: dict[str, torch.Tensor]) -> None:
        """Bring every generator back to where `get_rng_state` saw it."""
        if not isinstance(state, dict) or "cpu" not in state:
            raise ArgumentTypeError(
                "This is no random state.", expected="what `get_rng_state()` returned", got=describe(state)
            )
        kind = Devices.device_type()
        known = {"cpu"} | {
            f"{kind}:{index}" for index in range(torch.accelerator.device_count() if kind != "cpu" else 0)
        }
        if not set(state) <= known:
            raise ArgumentError(
                "The random state is of other devices.",
                expected="one of " + ", ".join(sorted(known)),
                got=", ".join(sorted(set(state) - known)),
            )
        for name, value in state.items():
            if name == "cpu":
                torch.set_rng_state(value)
            else:
                Devices.get_device_handle().set_rng_state(value, int(name.partition(":")[2]))

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Seed every generator, on the CPU and on every accelerator."""
        torch.manual_seed(seed)
