"""The examples in docstrings run: they are shown in the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

import hyper_parallel
from support.interpreter import run_fresh

SOURCE = Path(hyper_parallel.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    for path in SOURCE.rglob("*.py")
    if "\n        >>> " in (text := path.read_text(encoding="utf-8")) or "\n    >>> " in text
)


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_examples_run(framework: str, tmp_path: Path) -> None:
    """Those of one framework in one process: a process works on one. Neutral ones name PyTorch where they name any."""
    pytest.importorskip(framework)
    other = {"torch": "mindspore", "mindspore": "torch"}[framework]
    of_this = f"hyper_parallel.platform.{framework}."
    names = [
        name for name in MODULES if (name.startswith(of_this) if framework == "mindspore" else f".{other}." not in name)
    ]
    program = f"""
import doctest, importlib, io, contextlib, os
modules = [importlib.import_module(name) for name in {names!r}]
os.chdir({str(tmp_path)!r})  # examples write files
failed, run = [], 0
for module in modules:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = doctest.testmod(module)
    run += found.attempted
    if found.failed:
        failed.append(said.getvalue())
result = {{"failed": failed, "run": run}}
"""
    found = run_fresh(program, HYPER_PARALLEL_PLATFORM=framework, OMP_NUM_THREADS="1")
    assert found.get("failed") == [], "\n".join(found.get("failed", [str(found)]))
    assert found["run"] > 0


def test_the_examples_are_of_many_modules() -> None:
    assert len(MODULES) > 30
