"""What a profile was measured of: model, batch, framework and device, in words that can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"


class DeviceKind(Enum):
    """Where the tensors of a model are, as far as plans differ by it."""

    CPU = "cpu"  # What is swapped goes to files, and copies take cores from the step.
    ACCELERATOR = "accelerator"  # What is swapped goes to the memory of the host, which is ahead of the device.

    @classmethod
    def of(cls, device: str | None) -> DeviceKind:
        """Tell the kind of a device from its name. A profile that does not name one counts as an accelerator's."""
        return cls.CPU if device in ("cpu", "CPU") else cls.ACCELERATOR


@dataclass(frozen=True)
class Identity:
    """What one profile was measured of. A plan fits what has the same identity; it lives as long as the profile does.

    A field is None where nobody has said it: a framework may not have it, nor a file of an earlier version.

    Attributes:
        framework, version: of the framework: "torch", "2.13.0"
        device: "cpu", or the kind and the name: "cuda: NVIDIA H200"
        model: the name of its class
        parameters: what each one looks like, by its name: "float32[2, 8]", or "float32[2, 8], frozen"
        batch: a batch in which every tensor is replaced by what it looks like: ["int64[4, 512]"]
        batch_bytes: of all its tensors
        blocks: the paths of the modules that are regions
        is_training: the mode that the model was in
        autocast: the dtype that was cast to, or "off"
    """

    framework: str | None = None
    version: str | None = None
    device: str | None = None
    model: str | None = None
    parameters: Mapping[str, str] | None = None
    batch: Json = None
    batch_bytes: int | None = None
    blocks: tuple[str, ...] | None = None
    is_training: bool | None = None
    autocast: str | None = None

    @property
    def model_words(self) -> str:
        """Name the model in a sentence."""
        return "a model" if self.model is None else self.model
