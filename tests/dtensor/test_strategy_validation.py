"""PyTorch's own validation of strategies finds no wrong rule.

All samples and combinations: `HYPER_PARALLEL_CAMPAIGN=full`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from support import processes
from support.campaign import share

pytest.importorskip("torch")
if importlib.util.find_spec("torch.distributed.tensor._ops.strategy_validation") is None:
    pytest.skip("this PyTorch has no strategy validation", allow_module_level=True)


def check_rules(most_samples: int, most_combinations: int) -> Any:
    from support import strategy_validation  # here: only the worker imports PyTorch's test modules

    return strategy_validation.check_rules(most_samples, most_combinations)


def judged() -> Any:
    from support import strategy_validation

    return strategy_validation.judged()


def test_pytorchs_strategy_validation_finds_no_wrong_rule() -> None:
    found = processes.pool("none", 1).run(check_rules, len(share(10**6, 1)), len(share(10**6, 3)), deadline_s=3000)[0]
    print(f"{found.num_operators} operators, {found.counts}")
    assert not found.wrong, "\n".join(found.wrong)
    assert found.num_operators > 100
    assert found.counts["right"] > 300


def test_a_wrong_rule_would_be_found() -> None:
    said = processes.pool("none", 1).run(judged, deadline_s=120)[0]
    assert said == {"P -> P": False, "S(0) -> R": False, "S(0) -> S(1)": False, "S(0) -> S(0)": True}
