"""Patterns by which a user names several things at once: blocks of a plan, keys of a `ShardPlan`. One rule for both."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern fits.

    `*` stands for anything, dots included; `?` and `[...]` stand for one letter, as in Python's `fnmatch`. Capitals
    count.

    Example:
        >>> matching("*.mlp", ["layers.0.mlp", "layers.0.mlp.up", "mlp"])
        ['layers.0.mlp']
    """
    return [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
