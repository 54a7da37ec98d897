"""What importing costs, what is public, and which way imports go."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import hyper_parallel
from support.interpreter import run_fresh
from support.sources import SOURCE, modules

# The floors of the house, from the ground up, and from left to right on each. A module imports its own room, those to the left of it and the floors
# below; imports inside of functions count. A module is in the room of the longest path that it begins with; `FW` stands for a framework.
FLOORS = [
    ["_version", "_base"],
    ["platform"],
    ["platform.FW"],  # its files and communication
    [
        "core.swap", "core.activation_checkpoint", "core.regions", "core.dtensor", "core.shard",
        "core.planner.model", "core.planner.solve", "core.planner.search", "core.planner.plan", "core.planner", "core.parallel",
    ],
    [
        "platform.FW.swap", "platform.FW.regions", "platform.FW.wrappers", "platform.FW.compat", "platform.FW.dtensor",
        "platform.FW.planner", "platform.FW.parallel",
    ],
    ["platform.FW.activation_checkpoint", "platform.FW.demo"],
    ["report", "integrations", "cli"],
]  # fmt: skip
ROOMS = [room for floor in FLOORS for room in floor]
CORE = FLOORS[3]  # knows no framework: it asks `platform.selection` for what lies above
FRAMEWORKS = ("torch", "mindspore")

# Every import inside of a function, as (module, what it imports): the reason. Three reasons count: a public object opens a feature that is made of
# it, a package is heavy and optional, and a command has to answer at once. There were 126 such imports before the house had floors.
OPENS = "a public object opens a feature that is made of it"
ANSWERS_AT_ONCE = "the command answers before it loads what it does"
LAZY = {
    ("cli", "cli.app"): "Typer, which may not be installed, is asked for in words first",
    ("cli.app", "cli.bench"): ANSWERS_AT_ONCE,
    ("cli.app", "cli.checkpoint"): ANSWERS_AT_ONCE,
    ("cli.app", "cli.demo"): ANSWERS_AT_ONCE,
    ("cli.app", "cli.doctor.command"): ANSWERS_AT_ONCE,
    ("cli.app", "cli.plan"): ANSWERS_AT_ONCE,
    ("cli.app", "cli.schedule"): ANSWERS_AT_ONCE,
    ("core.dtensor.mesh", "core.dtensor.layout"): OPENS,  # DeviceMesh.layout
    ("core.dtensor.mesh", "platform.torch.dtensor"): OPENS,  # DeviceMesh.to_torch, from_torch
    ("core.planner.plan.plan", "core.planner.plan.managed"): OPENS,  # MemoryPlan.run, apply(on_oom="replan")
    ("core.planner.plan.plan", "core.planner.plan.proof"): OPENS,  # MemoryPlan.verify
    ("core.planner.plan.plan", "report.page"): OPENS,  # MemoryPlan.report
    (
        "platform.mindspore.activations",
        "platform.mindspore.activation_checkpoint",
    ): OPENS,  # checkpoint, swap_wrapper, ...
    ("platform.mindspore.gradients", "platform.mindspore.dtensor.norms"): OPENS,  # clip_grad_norm_
    ("platform.mindspore.parameters", "platform.mindspore.dtensor"): OPENS,  # parameters that are distributed
    ("platform.mindspore.tensors", "core.dtensor.redistribution"): OPENS,  # get_tensor_transform
    ("platform.torch.activations", "platform.torch.activation_checkpoint"): OPENS,
    ("platform.torch.dtensor.tensor", "platform.torch.dtensor.conversion"): OPENS,  # DTensor.to_torch, from_torch
    ("platform.torch.gradients", "platform.torch.dtensor.norms"): OPENS,
    ("platform.torch.parameters", "platform.torch.dtensor"): OPENS,
    ("platform.torch.tensors", "core.dtensor.redistribution"): OPENS,
    (
        "platform.torch.wrappers.checkpoint_wrapper",
        "platform.torch.compat.reentrant",
    ): OPENS,  # CheckpointImpl.REENTRANT
}


class Import(NamedTuple):
    """One import of a module of ours."""

    module: str
    target: str
    is_inside: bool  # of a function

    def __str__(self) -> str:
        return f"{self.module} imports {self.target}" + (" inside of a function" if self.is_inside else "")


def room_of(module: str) -> str:
    for framework in FRAMEWORKS:
        if module == f"platform.{framework}" or module.startswith(f"platform.{framework}."):
            module = module.replace(f"platform.{framework}", "platform.FW", 1)
    rooms = [room for room in ROOMS if module == room or module.startswith(room + ".")]
    assert rooms, f"{module} is in no room: add it to FLOORS"
    return max(rooms, key=len)


def imports_of_ours(found: dict[str, ast.Module]) -> list[Import]:
    """Every import of this package's modules, wherever it stands. The package itself, whose names are loaded when they are used, does not count."""
    names = {name.removesuffix(".__init__") for name in found}

    def walk(tree: ast.AST, module: str, is_inside: bool) -> Iterator[Import]:
        for node in ast.iter_child_nodes(tree):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: imports name the whole path"
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [
                    each if each.removeprefix("hyper_parallel.") in names else node.module or "" for each in whole
                ]
            for target in dict.fromkeys(targets):
                if target.startswith("hyper_parallel."):
                    yield Import(module.removesuffix(".__init__"), target.removeprefix("hyper_parallel."), is_inside)
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk(node, module, is_inside or is_function)

    return [
        each for name, tree in found.items() if name not in ("__init__", "__main__") for each in walk(tree, name, False)
    ]


def goes_up(each: Import) -> bool:
    source, target = room_of(each.module), room_of(each.target)
    return ROOMS.index(target) > ROOMS.index(source) or (source in CORE and target.startswith("platform.FW"))


def wrong_imports(found: dict[str, ast.Module]) -> list[str]:
    return [
        str(each)
        for each in imports_of_ours(found)
        if (each.is_inside or goes_up(each)) and (each.module, each.target) not in LAZY
    ]


def all_imports(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


def test_imports_go_down_and_to_the_left_only_and_stand_at_the_top() -> None:
    assert wrong_imports(modules()) == []


def test_the_exceptions_are_few_and_each_is_there_with_a_reason() -> None:
    there = {(each.module, each.target) for each in imports_of_ours(modules()) if each.is_inside}
    assert set(LAZY) == there
    assert len(LAZY) <= 25
    assert all(LAZY.values())


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core.swap.engine", "from hyper_parallel.core.planner.model.profile import StepProfile"),
        ("core.planner.solve.solver", "from hyper_parallel.core.planner.plan import plan"),
        ("core.regions.passes", "from hyper_parallel.platform.torch import tensors"),
        ("platform.torch.devices", "import hyper_parallel.core.swap.engine"),
        ("platform.mindspore.swap.device", "from hyper_parallel.platform.mindspore.regions.frame import Frame"),
        ("core.swap.sizes", "def f():\n    from hyper_parallel._base import log"),
        ("_base.errors", "from hyper_parallel.platform.trees import leaves"),
    ],
)
def test_a_planted_import_is_found(module: str, line: str) -> None:
    found = modules()
    body = [*found[module].body, *ast.parse(line).body]
    (wrong,) = wrong_imports({**found, module: ast.Module(body, [])})
    assert wrong.startswith(module)


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_a_framework_is_imported_only_in_its_own_folder(framework: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, tree in modules().items()
        for name in all_imports(tree)
        if name.partition(".")[0] == framework and not module.startswith(f"platform.{framework}.")
    ]
    assert wrong == []


def test_the_package_has_no_assert_since_it_vanishes_under_optimisation() -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert wrong == []


def test_importing_the_package_loads_no_framework_and_no_numpy() -> None:
    program = """
import hyper_parallel
result = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "mindspore", "numpy", "scipy", "rich", "typer"})
"""
    assert run_fresh(program) == []


def test_the_import_times_listing_shows_only_our_own_small_modules() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import hyper_parallel"],
        capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(SOURCE.parent)}, check=True,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if re.search(r"\|\s+hyper_parallel", line)]
    assert ours, done.stderr
    assert not re.search(r"\|\s+(torch|mindspore|numpy)\b", done.stderr)


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_every_public_name_can_be_reached_on_every_framework(framework: str) -> None:
    # In a process of its own: some names are a framework's own classes, and asking for one chooses the framework.
    program = """
import hyper_parallel
result = [name for name in hyper_parallel.__all__ if getattr(hyper_parallel, name) is None]
"""
    assert run_fresh(program, HYPER_PARALLEL_PLATFORM=framework) == []


def test_every_public_name_is_listed() -> None:
    assert set(hyper_parallel.__all__) <= set(dir(hyper_parallel))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hyper_parallel.no_such_name


def test_the_version_is_that_of_the_changelog() -> None:
    changelog = (SOURCE.parents[1] / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest
    assert newest.group(1) in (hyper_parallel.__version__, "Unreleased")
