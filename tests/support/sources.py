"""The package's sources as syntax trees, for tests that read them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import hyper_parallel

SOURCE = Path(hyper_parallel.__file__).parent


@functools.cache
def modules(source: Path = SOURCE) -> dict[str, ast.Module]:
    """Read every module of a source tree, by its path with dots. Who changes a tree makes one of its own.

    hazard: all trees are millions of objects, which every collection of garbage goes through. `tests/package/conftest.py`
    lets go of them when the tests of a file are over.
    """
    return {
        ".".join(path.relative_to(source).with_suffix("").parts): ast.parse(path.read_text(), str(path))
        for path in sorted(source.rglob("*.py"))
    }
