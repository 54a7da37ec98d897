"""Every rule of MindSpore's operators on real ranks: values and gradients beside the same operator on whole tensors."""

from __future__ import annotations

import pytest

from support import processes
from support.campaign import share

pytest.importorskip("mindspore")

FAMILIES = ["elementwise", "products", "reductions", "views", "layers"]


def on_ranks(mesh: str, families: list[str], most: int) -> list[int]:
    from support.mindspore_dtensor_cases import check_families

    ranks = 2 if mesh == "2" else 4
    return processes.pool("mindspore", ranks).run(check_families, mesh, families, most, deadline_s=3000)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_values_and_gradients_are_those_of_one_device(mesh: str, family: str) -> None:
    # Few in every run: ranks of MindSpore wait for each other at full speed, and are slow on a small machine.
    most = len(share(200, 1 if (mesh, family) == ("2x2", "elementwise") else 2))
    assert min(on_ranks(mesh, [family], most)) >= 15
