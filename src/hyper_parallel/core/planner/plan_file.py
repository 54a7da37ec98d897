"""A plan as a file: JSON that a person can read and compare, with everything the plan was made for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyper_parallel._base.errors import ArgumentError, DamagedFileError, describe

FORMAT = "hyper_parallel memory plan"
VERSION = 1
_KINDS: dict[str, tuple[Any, str]] = {
    "facts": (dict, "a table"),
    "budget_bytes": (int, "a whole number"),
    "gap": ((int, float), "a number"),
    "setting": (dict, "a table"),
    "decision": (list, "a list"),
    "profile": (dict, "a table"),
}


def write(path: str | os.PathLike[str], data: dict[str, Any]) -> None:
    """Write whole or not at all."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps({"format": FORMAT, "version": VERSION, **data}, indent=1) + "\n")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The data of a plan file.

    Raises:
        FileNotFoundError: there is none.
        DamagedFileError: it is no plan, or not all of one.
        ValueError: it was written by a newer version.
    """
    try:
        data = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DamagedFileError("A plan file cannot be read.", got=str(error), where=str(path)) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise DamagedFileError("This file is no memory plan.", expected=f'"format": "{FORMAT}"', where=str(path))
    if data.get("version") != VERSION:
        raise ArgumentError(
            "A plan file is of another version.",
            expected=f"the number {VERSION}",
            got=describe(data.get("version")),
            where=str(path),
            do="Plan again with this version of the package.",
        )
    for name, (kind, words) in _KINDS.items():
        if not isinstance(data.get(name), kind):
            raise DamagedFileError(
                "A plan file lacks something.",
                expected=words,
                got=describe(data.get(name)),
                where=f"{name}, {path}",
                do="Plan again, and save the plan anew.",
            )
    return data


def first_difference(expected: Any, got: Any, where: str = "") -> tuple[str, str, str] | None:
    """Where two facts differ first, in words: place, expected, got; None if they are equal."""
    return next(_differences(expected, got, where), None)


def _differences(expected: Any, got: Any, where: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in expected:
            place = f"{where}: {key}" if where else str(key)
            if key not in got:
                yield place, _short(expected[key]), "nothing of that name"
            else:
                yield from _differences(expected[key], got[key], place)
        for key in got:
            if key not in expected:
                yield (f"{where}: {key}" if where else str(key)), "nothing of that name", _short(got[key])
    elif isinstance(expected, list) and isinstance(got, list):
        for index, (left, right) in enumerate(zip(expected, got, strict=False)):
            yield from _differences(left, right, f"{where}, number {index + 1}")
        if len(expected) != len(got):
            yield where, f"{len(expected)} of them", str(len(got))
    elif expected != got:
        yield where, _short(expected), _short(got)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
