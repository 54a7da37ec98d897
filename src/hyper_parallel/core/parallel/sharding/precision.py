"""`MixedPrecision`: in which dtypes a sharded model computes and adds up gradients."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe

__all__ = ["MixedPrecision"]

_KNOWN = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a sharded model. Shards, their gradients and what an optimizer keeps stay as the model has them.

    Attributes:
        param: what forward and backward compute in; floating inputs of a unit are cast to it. None: as the model is.
        reduce: what gradients are sent in. Of bfloat16 and float16 the sums are taken in float32. None: the dtype of
            the gradients.
        output: what floating outputs of a unit are cast to. None: they stay.

    Example:
        `MixedPrecision(param="bfloat16", reduce="float32")` computes in bfloat16 and adds up gradients in float32.
    """

    param: str | None = None
    reduce: str | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise ArgumentTypeError(
                    f"`{field.name}` of MixedPrecision is the name of a dtype.",
                    expected='such as "bfloat16"',
                    got=describe(value),
                )
            if value not in _KNOWN:
                raise ArgumentError(
                    f"`{field.name}` of MixedPrecision is a floating dtype.", expected=" or ".join(_KNOWN), got=value
                )
