"""Operations whose part of the package is not there yet: each says so, on every framework that lacks it."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.platform.contract import OPERATIONS, How
from support import backends
from support.backends import Backend
from support.outcomes import refuses

LATER = [
    pytest.param(backend, operation, id=f"{backend.name}-{operation.name}", marks=pytest.mark.covers(operation.name))
    for operation in OPERATIONS
    for backend in backends.ALL
    if operation.comes_with is not None
]


@pytest.mark.parametrize(("backend", "operation"), LATER, indirect=["backend"])
def test_it_says_what_it_comes_with(backend: Backend, platform: Any, operation: Any) -> None:
    with refuses(backend, operation.name) as caught:
        found = getattr(platform, operation.name)
        assert operation.how is not How.PROPERTY, "a property raises as soon as it is read"
        found(1, 2, group=None)
    assert operation.name in str(caught.value)
    assert operation.comes_with in str(caught.value)
    assert isinstance(caught.value, NotImplementedError)
