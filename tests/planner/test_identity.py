"""What a profile was measured of: typed in the planner, one flat table in a plan file, in which nothing is lost."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hyper_parallel.core.planner.model.abilities import Abilities, HostCost
from hyper_parallel.core.planner.model.identity import DeviceKind, Identity
from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.plan.plan_file import facts_of, profile_as_dict, profile_from_dict
from support.made_plans import profile_of
from support.planner_cases import measured_of

# As PyTorch's profiles say it, in the order of a file.
ALL: dict[str, Any] = {
    "framework": "torch", "model": "Llama", "parameters": {"wq.weight": "float32[2, 8]", "norm": "float32[8], frozen"},
    "device": "cuda: H200", "batch": {"args": ["int64[4, 512]", None], "kwargs": {"scale": 0.5}}, "batch_bytes": 16384,
    "blocks": ["layers.0", "layers.1"], "training": False, "autocast": "bfloat16", "version": "2.13.0",
    "min_swap_bytes": 0, "loads_by_region": True, "turn_is_clear": True, "region_overhead_ms": 0.5,
    "unwatched_overhead_ms": 0.0, "keeps_output": False, "written": ["norm"], "shared_input_bytes": [4096],
}  # fmt: skip


def typed(facts: dict[str, Any]) -> StepProfile:
    return profile_from_dict({**profile_as_dict(profile_of()), "facts": facts})


def test_every_fact_of_a_file_has_its_place() -> None:
    profile = typed(ALL)
    assert profile.identity == Identity(
        framework="torch",
        version="2.13.0",
        device="cuda: H200",
        model="Llama",
        parameters=ALL["parameters"],
        batch=ALL["batch"],
        batch_bytes=16384,
        blocks=("layers.0", "layers.1"),
        is_training=False,
        autocast="bfloat16",
    )
    assert (profile.abilities, profile.host) == (Abilities(True, True), HostCost(0.5, 0.0))
    assert (profile.min_swap_bytes, profile.shared_input_bytes) == (0, (4096,))
    assert (profile.keeps_output, profile.written) == (False, ("norm",))


def test_facts_are_written_as_they_were_read() -> None:
    assert json.dumps(facts_of(typed(ALL))) == json.dumps(ALL)


def test_a_profile_comes_back_from_json_as_it_was() -> None:
    profile = dataclasses.replace(typed(ALL), is_plain_measured=False)
    assert profile_from_dict(json.loads(json.dumps(profile_as_dict(profile)))) == profile


@pytest.mark.parametrize("name", ALL)
def test_what_a_framework_or_an_earlier_version_does_not_say_is_not_written(name: str) -> None:
    facts = {key: value for key, value in ALL.items() if key != name}
    if name == "region_overhead_ms":
        del facts["unwatched_overhead_ms"]
    defaults: dict[str, Any] = {"min_swap_bytes": 0, "shared_input_bytes": []}  # these are always said
    assert facts_of(typed(facts)) == facts | ({name: defaults[name]} if name in defaults else {})


@pytest.mark.parametrize(
    ("name", "value"),
    [("parameters", []), ("training", 1), ("keeps_output", "yes"), ("written", [3]), ("region_overhead_ms", -1.0)],
)
def test_a_fact_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"`{name}` is "):
        typed({**ALL, name: value})


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("cpu", DeviceKind.CPU),
        ("CPU", DeviceKind.CPU),  # as the first versions wrote MindSpore's
        ("cuda: H200", DeviceKind.ACCELERATOR),
        ("Ascend: 910B", DeviceKind.ACCELERATOR),
        (None, DeviceKind.ACCELERATOR),
    ],
)
def test_the_kind_of_a_device_is_in_its_name(device: str | None, kind: DeviceKind) -> None:
    assert measured_of(profile_of(), device=device).device_kind is kind


def test_profiles_are_hashed_by_what_was_measured_and_compared_by_everything() -> None:
    left, right = profile_of("cpu"), profile_of("cuda: H200")
    assert hash(left) == hash(right)
    assert left != right
