"""The tour of `docs/architecture.md` is held to the code: what it names is there, and its walks go where it says."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "hyper_parallel"
PAGE = ROOT / "docs" / "architecture.md"

if not PAGE.is_file():
    pytest.skip("no documentation here: not a checkout", allow_module_level=True)

WALKS = {  # the head of a walk -> its name in `support.walks`, and the walk that it goes on as
    "One activation": ("activation", None),
    "One plan": ("plan", "One activation"),
    "One product of distributed tensors": ("matmul", "One all_reduce"),
    "One all_reduce": ("all_reduce", None),
}


class Named(NamedTuple):
    """A file that the page names in a list, with the functions and classes beside it."""

    file: str
    names: tuple[str, ...]


Functions = dict[str, list[str]]  # file -> the functions that were called there


def sections(text: str) -> dict[str, str]:
    """Head -> what stands below it, blocks of code left out."""
    parts = re.split(r"^## (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def named_in(section: str) -> list[Named]:
    """The files that the lists of a section name: each item is `file.py` `function` ...: words."""
    found = []
    for item in re.findall(r"^(?:\d+\.|-) (.*(?:\n +.*)*)", section, re.MULTILINE):
        for file, names in re.findall(r"`([\w/]+\.py)`((?:\s+`\w+`)*)", item):
            found.append(Named(file, tuple(re.findall(r"`(\w+)`", names))))
    return found


def paths_in(text: str) -> set[str]:
    """Every file and folder that the page names, wherever."""
    return set(re.findall(r"`([\w./]+(?:\.py|\.md|/))`", text))


def missing_paths(text: str) -> list[str]:
    return sorted(path for path in paths_in(text) if not ((SOURCE / path).exists() or (ROOT / path).exists()))


def folders_of(picture: str) -> set[str]:
    """The folders of the picture, one for each framework where it says FW."""
    found = set()
    for line in picture.splitlines()[1:]:
        within = re.search(r"((?:[\w.]+/)+):", line)
        folders = re.findall(r"(?:\w+/)+(?!:)(?=[ ,]|$)", line)
        found |= {(within[1] if within else "") + folder for folder in folders}
    return {folder.replace("FW", framework) for folder in found for framework in ("torch", "mindspore")}


def definitions(file: str) -> dict[str, set[str]]:
    """Each function and class of a file, at any depth, with the functions inside of it."""
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = found.setdefault(node.name, set() if isinstance(node, ast.ClassDef) else {node.name})
            if isinstance(node, ast.ClassDef):
                inside |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def wrong_names(named: list[Named]) -> list[str]:
    return [f"{file} has no {name}" for file, names in named for name in names if name not in definitions(file)]


def not_entered(named: list[Named], walk: Functions) -> list[str]:
    """What a walk is said to go through and does not: files, and functions (of a class, any of its own)."""
    wrong = [f"{file} is not entered" for file, _ in named if file not in walk]
    for file, names in named:
        known = definitions(file)
        for name in names:
            inside = known.get(name, set())
            if file in walk and inside and inside.isdisjoint(walk[file]):
                wrong.append(f"{name} of {file} is not called")
    return wrong


def most_unnamed(section: str) -> int:
    if "All are named" in section:
        return 0
    found = re.search(r"At\s+most\s+(\d+)\s+are\s+neither", section)
    assert found is not None, "the section says how many files it does not name"
    return int(found[1])


def num_entered(section: str) -> int:
    found = re.search(r"About\s+(\d+)\s+files\s+are\s+entered", section)
    assert found is not None, "the section says how many files the walk enters"
    return int(found[1])


@pytest.fixture(scope="module")
def page() -> dict[str, str]:
    return sections(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def walks() -> dict[str, Functions]:
    pytest.importorskip("torch")
    pytest.importorskip("scipy")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    environment.pop("HYPER_PARALLEL_PLATFORM", None)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "walks.py"), "--json"],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name: counted["functions"] for name, counted in json.loads(done.stdout.splitlines()[-1]).items()}


def test_every_file_and_folder_of_the_page_is_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(paths_in(text)) > 100
    assert missing_paths(text) == []


def test_the_picture_shows_folders_that_are_there_and_all_rooms() -> None:
    picture = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    shown = folders_of(picture)
    assert [folder for folder in sorted(shown) if not (SOURCE / folder).is_dir()] == []
    for within in ("core", "platform/torch", "platform/mindspore"):
        rooms = {f"{within}/{each.name}/" for each in (SOURCE / within).iterdir() if (each / "__init__.py").is_file()}
        assert rooms - shown == set()


def test_what_is_named_beside_a_file_is_defined_there(page: dict[str, str]) -> None:
    named = [each for section in page.values() for each in named_in(section)]
    assert len(named) > 100
    assert all(each.names for each in named)
    assert wrong_names(named) == []


@pytest.mark.parametrize("head", WALKS)
def test_a_walk_goes_through_what_the_page_names(head: str, page: dict[str, str], walks: dict[str, Functions]) -> None:
    assert not_entered(named_in(page[head]), walks[WALKS[head][0]]) == []


@pytest.mark.parametrize("head", WALKS)
def test_a_walk_is_as_long_as_the_page_says_and_few_of_its_files_are_not_named(
    head: str, page: dict[str, str], walks: dict[str, Functions]
) -> None:
    name, goes_on = WALKS[head]
    parts = [page[head], page["Helpers"], "" if goes_on is None else page[goes_on]]
    assert abs(len(walks[name]) - num_entered(page[head])) <= 5
    unnamed = set(walks[name]) - {each.file for part in parts for each in named_in(part)}
    assert len(unnamed) <= most_unnamed(page[head]), sorted(unnamed)


def test_helpers_help_in_some_walk(page: dict[str, str], walks: dict[str, Functions]) -> None:
    together: Functions = {}
    for walk in walks.values():
        for file, functions in walk.items():
            together.setdefault(file, []).extend(functions)
    assert not_entered(named_in(page["Helpers"]), together) == []


def test_what_is_not_so_would_be_found() -> None:
    text = (
        "## One\n\n1. `core/swap/gone.py` `x`: no.\n2. `core/swap/slot.py` `Slot` and\n"
        "   `core/swap/sizes.py` `no_such`: no.\n\nAbout 4 files are entered. At\nmost 3 are neither.\n"
    )
    section = sections(text)["One"]
    named = named_in(section)
    assert named == [
        Named("core/swap/gone.py", ("x",)),
        Named("core/swap/slot.py", ("Slot",)),
        Named("core/swap/sizes.py", ("no_such",)),
    ]
    assert missing_paths(text) == ["core/swap/gone.py"]
    assert wrong_names(named[1:]) == ["core/swap/sizes.py has no no_such"]
    assert (num_entered(section), most_unnamed(section)) == (4, 3)
    walk = {"core/swap/slot.py": ["move"]}
    assert not_entered(named[1:], walk) == ["core/swap/sizes.py is not entered"]
    assert not_entered(named[1:2], {"core/swap/slot.py": ["elsewhere"]}) == ["Slot of core/swap/slot.py is not called"]
    picture = "floors\n4  a part  platform/FW/: swap/ no/\n3  core/: regions/, dtensor/\n6 cli/\n"
    assert folders_of(picture) == {
        "platform/torch/swap/", "platform/torch/no/", "platform/mindspore/swap/", "platform/mindspore/no/",
        "core/regions/", "core/dtensor/", "cli/",
    }  # fmt: skip
