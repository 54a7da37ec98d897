"""The table of platform operations, made from what the tests showed.

A test names the operations it shows with `@pytest.mark.covers("cat", …)`; one that shows a refusal does it inside
`refuses("all_reduce")`, which keeps the error's words. After a run over the whole platform folder the fresh outcomes are
compared with `src/hyper_parallel/platform/outcomes.json`: a table that says something else fails the run.
`--write-platform-table` brings the file up to date for the backends that ran.

What a test showed travels in its report (`user_properties`), because the process that ran it need not be the one that counts
(`pytest -n`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import platform as python_platform
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel._base.errors import ComesLaterError
from hyper_parallel.platform import contract
from support import backends

TABLE = Path(__file__).parents[2] / "src" / "hyper_parallel" / "platform" / "outcomes.json"

_PROPERTY = "platform outcome"  # in a report: backend or "neutral", operations it covers, what it saw refused

_refused_now: list[tuple[str, str, dict[str, str]]] = []  # by the test that runs now: backend, operation, cell
_tested: dict[str, Counter[str]] = defaultdict(Counter)  # backend -> operation -> passed tests
_failed: dict[str, set[str]] = defaultdict(set)
_refused: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
_reasons: dict[str, set[str]] = defaultdict(set)  # why tests were skipped
_per_backend: dict[str, Counter[str]] = defaultdict(Counter)  # backend or "neutral" -> outcome -> tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-platform-table", action="store_true", help="write the platform table from this run's outcomes"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_whole_run] = False


_whole_run = pytest.StashKey[bool]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    covered = {name for item in items for mark in item.iter_markers("covers") for name in mark.args}
    unknown = covered - set(contract.BY_NAME)
    if unknown:
        raise pytest.UsageError(f"`covers` names operations that the contract does not have: {sorted(unknown)}")
    # Only a run that collected every operation's tests may judge the table.
    config.stash[_whole_run] = covered == set(contract.BY_NAME) and not config.getoption("keyword", "")


@contextlib.contextmanager
def refuses(backend: backends.Backend, operation: str, error: type[Exception] = ComesLaterError) -> Iterator[Any]:
    """The operation raises this error here; its words go into the table."""
    with pytest.raises(error) as caught:
        yield caught
    if error is ComesLaterError:
        cell = {"state": "comes with", "text": contract.BY_NAME[operation].comes_with or ""}
    else:
        cell = {"state": "error", "text": " ".join(str(caught.value).splitlines()[:2])}
    _refused_now.append((backend.name, operation, cell))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    backend = getattr(item, "callspec", None) and item.callspec.params.get("backend")  # type: ignore[attr-defined]
    name = backend.name if backend else "neutral"
    names = [n for mark in item.iter_markers("covers") for n in mark.args]
    report.user_properties.append((_PROPERTY, [name, names, list(_refused_now)]))
    _refused_now.clear()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    shown = [value for name, value in report.user_properties if name == _PROPERTY]
    if not shown:  # a worker that died makes a report of its own
        return
    name, names, refused = shown[-1]
    for backend, operation, cell in refused:
        _refused[backend][operation] = cell
    if report.when == "call" and report.passed:
        _per_backend[name]["passed"] += 1
        for operation in names:
            _tested[name][operation] += 1
    elif report.failed:
        _per_backend[name]["failed"] += 1
        _failed[name].update(names)
    elif report.skipped:
        _per_backend[name]["skipped"] += 1
        _reasons[name].add(str(report.longrepr[2]).removeprefix("Skipped: "))


def fresh_columns() -> dict[str, dict[str, Any]]:
    columns = {}
    for backend in backends.ALL:
        if not _tested[backend.name]:
            continue
        cells: dict[str, Any] = {}
        for operation in contract.BY_NAME:
            if operation in _failed[backend.name]:
                cells[operation] = {"state": "failed"}
            elif operation in _refused[backend.name]:
                cells[operation] = _refused[backend.name][operation]
            elif _tested[backend.name][operation]:
                cells[operation] = {"state": "tested", "tests": _tested[backend.name][operation]}
        columns[backend.name] = {
            "title": backend.title,
            "date": datetime.date.today().isoformat(),
            "framework": _framework_version(backend),
            "python": python_platform.python_version(),
            "device": _device(backend),
            "cells": cells,
        }
    return columns


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):  # a worker of `pytest -n`: it has collected, another process counts
        config.workeroutput["whole run"] = config.stash[_whole_run]
        return
    if config.getoption("--write-platform-table"):
        table = json.loads(TABLE.read_text()) if TABLE.exists() else {"columns": {}}
        columns = table["columns"] | fresh_columns()
        table["columns"] = {backend.name: columns[backend.name] for backend in backends.ALL if backend.name in columns}
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
    elif config.stash[_whole_run] and exitstatus == 0:
        stale = _differences()
        if stale:
            config.stash[_stale] = stale
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    node.config.stash[_whole_run] |= bool(getattr(node, "workeroutput", {}).get("whole run"))


_stale = pytest.StashKey[list[str]]()


def _differences() -> list[str]:
    kept = json.loads(TABLE.read_text())["columns"] if TABLE.exists() else {}
    found = []
    for name, column in fresh_columns().items():
        old = kept.get(name, {"cells": {}})["cells"]
        found += [
            f"{name}: {op}: table {old.get(op)}, run {cell}"
            for op, cell in column["cells"].items()
            if old.get(op) != cell
        ]
        found += [f"{name}: {op}: no test" for op in contract.BY_NAME if op not in column["cells"]]
    return found


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.section("tests on each framework")
    titles = {backend.name: backend.title for backend in backends.ALL} | {
        "neutral": "no framework, or its own processes"
    }
    for name, title in titles.items():
        counts = _per_backend[name]
        text = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped") if counts[kind])
        if _reasons[name]:
            text += f" ({'; '.join(sorted(_reasons[name]))})"
        terminalreporter.write_line(f"{title}: {text or 'none'}")
    for line in config.stash.get(_stale, [])[:20]:
        terminalreporter.write_line(f"platform table out of date: {line}", red=True)
    if config.stash.get(_stale, []):
        terminalreporter.write_line(
            "Run the tests with --write-platform-table, look at the difference, and commit outcomes.json.", red=True
        )


def _framework_version(backend: backends.Backend) -> str:
    if backend.name.startswith("torch"):
        import torch

        return torch.__version__
    import mindspore

    return mindspore.__version__


def _device(backend: backends.Backend) -> str:
    if backend.name == "torch-cuda":
        import torch

        return torch.cuda.get_device_name()
    return "cpu"
