"""Code that PyTorch's own compiler has made, inside of regions: one op to a policy, or refused. Each in a process of its own."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.interpreter import run_fresh

PROGRAM = """
import tempfile, threading, torch, torch._dynamo
import hyper_parallel as hp
from torch import nn
from support.training import same, train
hp.configure_swap(disk_dir=tempfile.mkdtemp(), min_bytes=1, window_bytes="64KiB", prefetch_bytes="256KiB")
torch.set_num_threads(1)
asked = set()
def swap(ctx, op, *args, **kwargs):
    asked.add(str(op))
    return hp.CheckpointPolicy.MUST_SWAP
ways = {
    "recompute": hp.checkpoint_wrapper,
    "swap": lambda block: hp.checkpoint_wrapper(block, policy_fn=swap),
    "swap_inputs": lambda block: hp.checkpoint_wrapper(block, swap_inputs=True),
    "swap wrapper": hp.swap_wrapper,
}
class Small(nn.Module):  # little to compile
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
    def forward(self, x):
        return x + nn.functional.dropout(self.layer(x), 0.1)
x = torch.randn(4, 16)
def blocks(wrap):
    torch.manual_seed(0)
    return nn.Sequential(*(wrap(Small(), number) for number in range(2)))
def plain():
    return train(blocks(lambda block, i: torch.compile(block)), x)
result = {"new": hasattr(torch._inductor.config, "wrap_inductor_compiled_regions")}
def every_other(way):
    # The first is compiled before the first region runs, and the second shares its code.
    model = blocks(lambda block, i: torch.compile(ways[way](block) if i else block))
    return [train(model, x), train(model, x)]
found = {"every other": every_other("swap")}
result["asked"] = sorted(asked)
expected = plain()
for way in ways:
    model = blocks(lambda block, i: ways[way](torch.compile(block)))
    found[way] = [train(model, x), train(model, x)]
def in_thread():
    torch.set_num_threads(1)
    asked.clear()
    layer = nn.Linear(16, 16)
    model = ways["swap"](torch.compile(layer))
    result["same in a thread"] = same(train(model, x), train(layer, x))
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
result["asked in a thread"] = sorted(asked)
result["same"] = {name: all(same(each, expected) for each in grads) for name, grads in found.items()}
"""

TOO_LATE = """
import torch, torch._dynamo
from support.training import same, train
torch.set_num_threads(1)
layer, x = torch.nn.Linear(16, 16), torch.randn(4, 16)
compiled = torch.compile(layer)
expected = train(compiled, x)
import hyper_parallel as hp
wrapper = hp.checkpoint_wrapper(compiled)
try:
    train(wrapper, x)
    text = ""
except RuntimeError as error:
    text = str(error)
torch._dynamo.reset()
result = [text, same(train(wrapper, x), expected)]
"""

PLANNED = """
import tempfile, torch
import hyper_parallel as hp
from hyper_parallel.core.planner.model.choices import RegionDecision, plain, recompute_all
from hyper_parallel.core.planner.plan.plan import MemoryPlan, Predicted
from hyper_parallel.core.planner.search.settings import Setting
from torch import nn
from support.training import same, train
torch.set_num_threads(1)
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.b(torch.sin(self.a(x)))
def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(Small() for _ in range(4)))
x = torch.randn(256, 64)
result = {}
with tempfile.TemporaryDirectory() as folder, hp.configure_swap(disk_dir=folder, min_bytes=1):
    in_place, around = blocks(), blocks()
    for block in in_place:
        block.compile()
    for index, block in enumerate(around):
        around[index] = torch.compile(block)
    for name, model in (("in place", in_place), ("around", around)):
        expected = train(model, x)  # compiled before anybody plans
        plan = hp.plan_memory(model, x, loss_fn=lambda y: y.square().mean(), budget="60%", progress=False)
        plan.apply(model)
        found = [train(model, x), train(model, x)]
        result[name] = {
            "same": all(same(each, expected) for each in found),
            "ops": sorted({op.name for region in plan.profile.regions for op in region.ops}),
            "is kept": plan.measured.peak_bytes <= plan.budget_bytes,
            "managed": sum(not each.is_plain for each in plan.decision),
            "counted": plan.stats(model),
        }
        plan.remove(model)
        assert same(train(model, x), expected)
    # Of what compiled code makes, a part swapped and a part saved, beside a block that is run again.
    profile = plan.profile
    whole, *parts = profile.regions[0].ops
    kept = ["swap" if index % 2 else "save" for index in range(len(parts))]
    mixed = RegionDecision(False, (None, *kept), tuple("save" for _ in profile.regions[0].inputs))
    decision = (mixed, recompute_all(profile.regions[1]), mixed, plain(profile.regions[3]))
    by_part = MemoryPlan(profile, decision, Setting(2**20, 2**20), profile.peak_bytes, Predicted(profile.peak_bytes, 1.0))
    by_part.apply(model)
    before = hp.SwapManager().stats()["offloaded_bytes"]
    found = train(model, x)
    swapped = sum(part.num_bytes for part, choice in zip(parts, kept, strict=True) if choice == "swap")
    result["by part"] = {
        "num_parts": len(parts),
        "choices": sorted({choice for part in parts for choice in part.choices}),
        "whole": list(whole.choices),
        "same": same(found, expected),
        "swapped": swapped,
        "offloaded": hp.SwapManager().stats()["offloaded_bytes"] - before,
        "counted": by_part.stats(model),
    }
    by_part.remove(model)
"""

needs_inductor = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler on the CPU",
)


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """No processes that compile; what the first process compiled is there for the second."""
    directory: Path = tmp_path_factory.mktemp("compiled")
    return {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(directory),
        "HYPER_PARALLEL_PLATFORM": "torch",
    }


@needs_inductor
def test_code_of_pytorchs_compiler_is_one_op_and_gives_the_gradients_of_the_compiled_plain_model(
    variables: dict[str, str],
) -> None:
    result = run_fresh(PROGRAM, **variables)
    if not result["new"]:
        pytest.skip("this PyTorch cannot show compiled code as one op")
    assert result["asked"] == result["asked in a thread"] == ["inductor_compiled_code"]
    assert result["same"] == dict.fromkeys(result["same"], True)
    assert len(result["same"]) == 5
    assert result["same in a thread"]


@needs_inductor
def test_code_that_was_compiled_before_is_refused_and_right_after_what_the_error_says(
    variables: dict[str, str],
) -> None:
    text, is_same = run_fresh(TOO_LATE, **variables)
    assert "Compiled code runs in a region" in text
    assert "torch._dynamo.reset()" in text
    assert is_same


@needs_inductor
def test_compiled_blocks_are_planned_as_one_op_each_also_if_they_were_compiled_before(
    variables: dict[str, str],
) -> None:
    pytest.importorskip("scipy")
    if not hasattr(importlib.import_module("torch._inductor.config"), "wrap_inductor_compiled_regions"):
        pytest.skip("this PyTorch cannot show compiled code as one op")
    result = run_fresh(PLANNED, **variables)
    by_part = result.pop("by part")
    assert by_part["num_parts"] > 1
    assert by_part["whole"] == ["recompute"]
    assert by_part["choices"] == ["recompute", "save", "swap"]
    assert by_part["same"]
    assert by_part["offloaded"] == 2 * by_part["swapped"] > 0
    assert not any(by_part["counted"].values()), by_part["counted"]
    for name, found in result.items():
        assert {op.partition("[")[0] for op in found["ops"]} == {"inductor_compiled_code"}, name
        assert found["same"], name
        assert found["is kept"], name
        assert found["managed"] > 0, name
        assert not any(found["counted"].values()), found["counted"]
