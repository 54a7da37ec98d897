"""Random modules that count, draw, freeze and choose: every kind of region trains them as no region does."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils.checkpoint import checkpoint as checkpoint_of_pytorch

from support.campaign import share
from support.drifting import KINDS
from support.region_programs import flush_aborted_backward
from support.stateful import PARTS, Stateful, trained

_REENTRANT = "reentrant"


def is_wrong_by_pytorch(seed: int, expected: object, device: str) -> bool:
    """Whether PyTorch's own reentrant checkpoint does not train the module as no checkpoint does."""
    module = Stateful(seed).to(device)
    try:
        call = lambda x: checkpoint_of_pytorch(module, x, use_reentrant=True)  # noqa: E731 - an argument
        return bool(trained(module, call, seed, device) != expected)
    except Exception:
        return True


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_modules_count_draw_freeze_and_choose_is_trained_as_without_regions(device: str) -> None:
    """4,600 programs in full; what is wrong in PyTorch's own reentrant code as well is counted apart."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    met, wrong, num_of_pytorch = Counter[str](), [], 0
    seeds = share(4_600, 48)
    for seed in seeds:
        kind = list(KINDS)[seed % len(KINDS)]
        plain, module = Stateful(seed).to(device), Stateful(seed).to(device)
        met.update({name for name, _ in plain.parts})
        expected = trained(plain, plain, seed, device)
        try:
            found = trained(module, KINDS[kind](module), seed, device)
            said = "" if found == expected else "silently wrong"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            flush_aborted_backward()
        if said and kind == _REENTRANT and is_wrong_by_pytorch(seed, expected, device):
            num_of_pytorch += 1
        elif said:
            wrong.append(f"seed {seed}, {kind}, {plain.parts}: {said}")
    assert wrong == [], f"{len(wrong)} of {len(seeds)}; the first:\n" + "\n".join(wrong[:5])
    assert num_of_pytorch <= len(seeds) // 20
    assert set(met) == set(PARTS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("part", "freezes"),
    [
        ("counter_of_forwards", False),
        ("branch_on_a_counter", False),
        ("own_numpy_generator", False),
        ("layers_dropped_at_random", False),
        ("layer", True),
    ],
)
def test_what_one_part_counts_draws_or_freezes_is_as_without_regions(part: str, freezes: bool, kind: str) -> None:
    plain, module = (Stateful(7, (part,), freezes=freezes) for _ in range(2))
    expected = trained(plain, plain, 7, "cpu")
    assert trained(module, KINDS[kind](module), 7, "cpu") == expected
