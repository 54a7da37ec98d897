"""MindSpore's dtypes by name, and what the CPU cannot do with them."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore.common import dtype as mstype

from hyper_parallel._base.errors import UnsupportedDeviceError
from hyper_parallel.platform.dtype_names import dtype_by_name
from hyper_parallel.platform.mindspore.devices import Devices

# `mstype` also holds types of lists, strings and the like; a tensor's are those of `all_types`.
_OF_TENSORS = frozenset(mstype.all_types)
DTYPES: dict[str, Any] = {
    name: value for name, value in vars(mindspore).items() if isinstance(value, mstype.Type) and value in _OF_TENSORS
}
_NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}  # the first of several names
# The CPU stores these and has no kernel for them: neither a cast nor a fill.
_ONLY_STORED_ON_CPU = frozenset({mstype.qint4x2, mstype.float8_e4m3fn, mstype.float8_e5m2, mstype.hifloat8})


def to_dtype(dtype: object) -> Any:
    """Find the dtype of a name, or take the dtype itself."""
    return dtype_by_name(dtype, DTYPES, mstype.Type)


def to_dtype_or(dtype: object, default: object) -> Any:
    return default if dtype is None else to_dtype(dtype)


def check_computable(call: str, *dtypes: Any) -> None:
    """Raise where the device only stores one of these dtypes."""
    if Devices.device_type() != "cpu":
        return
    for dtype in dtypes:
        if dtype in _ONLY_STORED_ON_CPU:
            raise UnsupportedDeviceError(
                f"MindSpore on the CPU stores {_NAMES[dtype]} and cannot compute with it.",
                expected="one of " + ", ".join(sorted(_NAMES[dtype] for dtype in _OF_TENSORS - _ONLY_STORED_ON_CPU)),
                got=_NAMES[dtype],
                where=call,
                do="Use another dtype, or an Ascend device.",
            )
