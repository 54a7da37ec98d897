"""Operations whose part of the package is not there yet: each says so, on every framework."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.platform.contract import OPERATIONS, How
from support.backends import Backend
from support.outcomes import refuses

LATER = [operation for operation in OPERATIONS if operation.comes_with is not None]


@pytest.mark.parametrize("operation", [pytest.param(o, id=o.name, marks=pytest.mark.covers(o.name)) for o in LATER])
def test_it_says_what_it_comes_with(backend: Backend, platform: Any, operation: Any) -> None:
    with refuses(backend, operation.name) as caught:
        found = getattr(platform, operation.name)
        assert operation.how is not How.PROPERTY, "a property raises as soon as it is read"
        found(1, 2, group=None)
    assert operation.name in str(caught.value)
    assert operation.comes_with in str(caught.value)
    assert isinstance(caught.value, NotImplementedError)
