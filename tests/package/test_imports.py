"""What importing costs, what is public, and which way imports go."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel
from support.interpreter import run_fresh

SOURCE = Path(hyper_parallel.__file__).parent

# From the ground up; a layer imports itself and those below. A module belongs to the longest path that it begins with.
# The frameworks' distributed tensors lie beside their platforms, since only there a framework may be imported, and are made of layouts and rules:
# the rest of the platform reaches them inside calls only.
LAYERS = [
    "_version", "_base", "platform",
    "core.swap", "core.activation_checkpoint", "core.dtensor", "core.shard",
    "platform.torch.dtensor", "platform.mindspore.dtensor", "core.parallel", "core.planner",
    "report", "integrations", "cli", "__main__", "__init__",
]  # fmt: skip


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts)] = ast.parse(path.read_text(), str(path))
    return found


def layer_of(module: str) -> str:
    for layer in sorted(LAYERS, key=len, reverse=True):
        if module == layer or module.startswith(layer + "."):
            return layer
    raise AssertionError(f"{module} belongs to no layer: add it to LAYERS")


def module_level_imports(tree: ast.Module) -> list[str]:
    names = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def all_imports(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


def test_imports_go_down_only() -> None:
    wrong = []
    for module, tree in modules().items():
        for name in module_level_imports(tree):
            if name.startswith("hyper_parallel."):
                target = layer_of(name.removeprefix("hyper_parallel."))
                if LAYERS.index(target) > LAYERS.index(layer_of(module)):
                    wrong.append(f"{module} imports {name}")
    assert wrong == []


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
