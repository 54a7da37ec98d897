"""The fenced blocks of a Markdown page, with what the comments before them say.

    <!-- not run: needs a GPU -->       the next block is not run, and why
    <!-- raises: ValueError -->         the next block raises this; a text block after it shows (part of) the message
    <!-- prints -->                     the next block, of text, shows (part of) what the block before it printed
    <!-- process: mindspore -->         the next block starts a new process; the name is for the reader

A Python block with a title (```python title="train.py") is written as that file, not run.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

_MARK = re.compile(r"^\s*<!-- (not run|raises|prints|process)(?:: (.+?))? -->\s*$")
_FENCE = re.compile(r"^(\s*)(```+)\s*(\S*)(.*)$")
LANGUAGES = ("python", "sh", "text")


class Block(NamedTuple):
    language: str
    text: str
    line: int  # of its first line of text in the page
    marks: dict[str, str]
    title: str = ""


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of the page, in order.

    Raises:
        ValueError: a fence that does not end.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    marks: dict[str, str] = {}
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        mark, fence = _MARK.match(line), _FENCE.match(line)
        if mark:
            marks[mark[1]] = mark[2] or ""
        elif fence:
            indent, ticks, language, rest = fence.groups()
            start = number
            while number < len(lines) and lines[number].strip() != ticks:
                number += 1
            if number == len(lines):
                raise ValueError(f"{page}:{start}: a block that does not end")
            text = textwrap.dedent("\n".join(each.removeprefix(indent) for each in lines[start:number]))
            title = re.search(r'title="([^"]+)"', rest)
            found.append(Block(language, text, start + 1, marks, title[1] if title else ""))
            marks, number = {}, number + 1
        elif line.strip():
            marks = {}
    return found


class Step(NamedTuple):
    """What one block asks for."""

    kind: str  # "python", "file", "commands", "expect"
    text: str
    line: int
    about: str = ""  # the error that is raised; the file's name


def processes_of(blocks: list[Block]) -> list[list[Step]]:
    """Steps, grouped by the process they run in."""
    groups: list[list[Step]] = [[]]
    for block in blocks:
        if "process" in block.marks and groups[-1]:
            groups.append([])
        if "not run" in block.marks or block.text.startswith("--8<--"):
            continue
        if block.language == "python":
            kind, about = ("file", block.title) if block.title else ("python", block.marks.get("raises", ""))
            groups[-1].append(Step(kind, block.text, block.line, about))
        elif block.language == "sh":
            groups[-1].append(Step("commands", block.text, block.line))
        elif block.language == "text" and (
            "prints" in block.marks or (groups[-1] and groups[-1][-1].kind == "python" and groups[-1][-1].about)
        ):
            groups[-1].append(Step("expect", block.text, block.line))
    return [group for group in groups if group]


def complaints(blocks: list[Block]) -> list[str]:
    """What no test can look at: blocks of unknown languages, and blocks that are not run without a reason."""
    found = []
    for block in blocks:
        if block.language not in LANGUAGES:
            found.append(f"line {block.line}: a block of {block.language or 'no language'}: nobody knows how to run it")
        if "not run" in block.marks and len(block.marks["not run"]) < 10:
            found.append(f"line {block.line}: a block that is not run, without a reason")
    return found
