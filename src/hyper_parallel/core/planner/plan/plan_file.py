"""A plan as a file: JSON that a person can read and compare, with everything the plan was made for."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any, TextIO

from hyper_parallel._base import files
from hyper_parallel._base.errors import ArgumentError, DamagedFileError, describe
from hyper_parallel.core.planner.model.abilities import Abilities, HostCost
from hyper_parallel.core.planner.model.identity import Identity
from hyper_parallel.core.planner.model.profile import StepProfile, check_kind, is_of, step_as_dict, step_from_dict

FORMAT = "hyper_parallel memory plan"
VERSION = 1
_NO_PLAN = "This file is no memory plan."
_KINDS = {
    "facts": ("dict", "a table"),
    "budget_bytes": ("int", "a whole number of bytes"),
    "gap": ("float", "a number"),
    "setting": ("dict", "a table"),
    "decision": ("tuple[dict, ...]", "a list of tables"),
    "profile": ("dict", "a table"),
}
# What a plan was made for, in a file: one flat table, and nowhere else. A framework leaves out what it does not have;
# the batch is any JSON.
_FACTS = {
    "framework": "str", "version": "str", "model": "str", "parameters": "dict", "device": "str", "autocast": "str",
    "training": "bool",
    "loads_by_region": "bool", "turn_is_clear": "bool", "region_overhead_ms": "float", "unwatched_overhead_ms": "float",
    "min_swap_bytes": "int", "batch_bytes": "int", "shared_input_bytes": "tuple[int, ...]", "blocks": "tuple[str, ...]",
    "keeps_output": "bool", "written": "tuple[str, ...]",
}  # fmt: skip
_DEEPEST = 50  # a batch has a few levels; what goes through it calls itself


def write(path: str | os.PathLike[str], data: dict[str, Any]) -> None:
    """Write a plan file, whole or not at all."""
    files.write(path, (json.dumps({"format": FORMAT, "version": VERSION, **data}, indent=1) + "\n").encode())


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the data of a plan file.

    Raises:
        FileNotFoundError: there is none.
        DamagedFileError: it is no plan, or not all of one.
        ValueError: it was written by a newer version.
    """
    try:
        with files.opened(path) as descriptor, open(descriptor, encoding="utf-8", closefd=False) as file:
            data = _json(file, files.checked_path(path))
    except files.NotPlainError as error:
        raise DamagedFileError(_NO_PLAN, expected=error.expected, got=error.got, where=error.where) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise DamagedFileError(_NO_PLAN, expected=f'"format": "{FORMAT}"', where=str(path))
    if data.get("version") != VERSION:
        raise ArgumentError(
            "A plan file is of another version.",
            expected=f"the number {VERSION}",
            got=describe(data.get("version")),
            where=str(path),
            do="Plan again with this version of the package.",
        )
    for name, (kind, words) in _KINDS.items():
        if not is_of(data.get(name), kind):
            raise DamagedFileError(
                "A plan file lacks something.",
                expected=words,
                got=describe(data.get(name)),
                where=f"{name}, {path}",
                do="Plan again, and save the new plan.",
            )
    return data


def profile_as_dict(profile: StepProfile) -> dict[str, Any]:
    """Turn all of a profile into JSON: what was measured, and as `facts` what it was measured of."""
    data = step_as_dict(profile)
    is_plain_measured = data.pop("is_plain_measured")
    return {**data, "facts": facts_of(profile), "is_plain_measured": is_plain_measured}


def profile_from_dict(data: dict[str, Any]) -> StepProfile:
    """Make a profile of what `profile_as_dict` gave, in a file of this version or of an earlier one.

    Raises:
        KeyError, TypeError, ValueError: it is not that.
    """
    facts = data["facts"]
    _check_facts(facts)
    blocks = facts.get("blocks")
    host = None
    if "region_overhead_ms" in facts:
        host = HostCost(facts["region_overhead_ms"], facts.get("unwatched_overhead_ms"))
    return dataclasses.replace(
        step_from_dict(data),
        identity=Identity(
            framework=facts.get("framework"),
            version=facts.get("version"),
            device=facts.get("device"),
            model=facts.get("model"),
            parameters=facts.get("parameters"),
            batch=facts.get("batch"),
            batch_bytes=facts.get("batch_bytes"),
            blocks=None if blocks is None else tuple(blocks),
            is_training=facts.get("training"),
            autocast=facts.get("autocast"),
        ),
        abilities=Abilities(facts.get("loads_by_region", False), facts.get("turn_is_clear", False)),
        host=host,
        min_swap_bytes=facts.get("min_swap_bytes", 0),
        shared_input_bytes=tuple(facts.get("shared_input_bytes", ())),
        keeps_output=facts.get("keeps_output"),
        written=tuple(facts.get("written", ())),
    )


def facts_of(profile: StepProfile) -> dict[str, Any]:
    """Say what the profile was measured of, as a file has it."""
    identity, abilities, host = profile.identity, profile.abilities, profile.host
    facts = {
        "framework": identity.framework,
        "model": identity.model,
        "parameters": None if identity.parameters is None else dict(identity.parameters),
        "device": identity.device,
        "batch": identity.batch,
        "batch_bytes": identity.batch_bytes,
        "blocks": None if identity.blocks is None else list(identity.blocks),
        "training": identity.is_training,
        "autocast": identity.autocast,
        "version": identity.version,
        "min_swap_bytes": profile.min_swap_bytes,
        "loads_by_region": abilities.loads_by_region or None,
        "turn_is_clear": abilities.turn_is_clear or None,
        "region_overhead_ms": None if host is None else host.region_ms,
        "unwatched_overhead_ms": None if host is None else host.without_copies_ms,
        "keeps_output": profile.keeps_output,
        "written": list(profile.written) or None,
        "shared_input_bytes": list(profile.shared_input_bytes),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _check_facts(facts: dict[str, Any]) -> None:
    """Raise TypeError or ValueError where one of the facts could not be used."""
    for name, kind in _FACTS.items():
        if name in facts:
            check_kind(facts[name], kind, f"`{name}`")
    level: list[Any] = [facts]
    for _ in range(_DEEPEST):
        level = [
            item
            for holder in level
            if isinstance(holder, (dict, list))
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
    if level:
        raise ValueError(f"`facts` has more than {_DEEPEST} levels")


def _json(file: TextIO, path: str) -> Any:
    """Parse what the file holds.

    A plan has no NaN, no number of thousands of digits, and a few levels.

    Raises:
        DamagedFileError: it is not to be read, or no such JSON.
    """
    try:
        return json.loads(file.read(), parse_constant=_no_number)
    except RecursionError:
        why = "one that is nested too deep"
    except OSError as error:  # a file of /proc, a disk that breaks
        why = f"in the words of the system: {error.strerror or error}"
    except ValueError as error:  # no JSON, no UTF-8, too many digits
        why = str(error)
    raise DamagedFileError("A plan file cannot be read.", expected="JSON", got=why, where=path) from None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name}, which is no number")


def first_difference(expected: object, got: object, where: str = "") -> tuple[str, str, str] | None:
    """Find where two facts differ first, in words: place, expected, got; None if they are equal."""
    return next(_differences(expected, got, where), None)


def _differences(expected: object, got: object, where: str) -> Iterator[tuple[str, str, str]]:
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


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
