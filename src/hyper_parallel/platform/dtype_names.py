"""Names of dtypes as people write them: `float32`, `torch.float32`, `mindspore.float32`, `Float32`, `bool_`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.platform.arguments import unknown_name

_PREFIXES = ("torch.", "mindspore.", "ms.", "mstype.")
# Where the two frameworks call one dtype by two names, each is accepted on both.
_OTHER_NAMES = {"bool_": "bool", "half": "float16", "float": "float32", "double": "float64", "long": "int64",
                "int": "int32", "short": "int16"}  # fmt: skip


def dtype_by_name(name: Any, dtypes: Mapping[str, Any], dtype_type: Any) -> Any:
    """Find the dtype that `name` (or the dtype itself) stands for, among `dtypes` by lower-case name."""
    if isinstance(name, dtype_type):
        return name
    if isinstance(name, str):
        bare = name.strip().lower()
        for prefix in _PREFIXES:
            bare = bare.removeprefix(prefix)
        for candidate in (bare, _OTHER_NAMES.get(bare, bare)):
            if candidate in dtypes:
                return dtypes[candidate]
    raise unknown_name("No dtype has this name.", name, sorted(dtypes))
