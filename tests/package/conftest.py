"""What tests of the package share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import sources


@pytest.fixture(scope="module", autouse=True)
def trees_are_let_go() -> Iterator[None]:
    """Else they would slow down every test that asks for a collection of garbage."""
    yield
    sources.modules.cache_clear()
