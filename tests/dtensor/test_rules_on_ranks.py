"""Every operator's rule on real ranks: values and gradients beside the same operator on whole tensors."""

from __future__ import annotations

import pytest

from support import processes
from support.campaign import share
from support.dtensor_cases import FAMILIES, MESHES, check_family

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_values_and_gradients_are_those_of_one_device(mesh: str, family: str) -> None:
    ranks = 2 if mesh == "2" else 4
    counts = processes.pool("torch", ranks).run(check_family, mesh, family, len(share(400, 12)), deadline_s=600)
    assert min(counts) >= len(FAMILIES[family])
