"""Names that a user gives as patterns: one rule for blocks of a plan and for keys of a `ShardPlan`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that fit. `*` stands for anything, dots included; `?` and `[...]` for one letter, as in Python's `fnmatch`; capitals count.

    Example:
        >>> matching("*.mlp", ["layers.0.mlp", "layers.0.mlp.up", "mlp"])
        ['layers.0.mlp']
    """
    return [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
