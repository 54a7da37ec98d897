"""One word per thing: a word that was retired does not come back, as the name of anything in `src`.

Example: the planner's measured op was called `Op`, as many other things are. It is `ProfiledOp` now, so in the planner

    class Op: ...                     fails: `Op` is retired in core.planner; the word is ProfiledOp
    # An op of the profile.           does not: prose is not looked at, there the word is plain English

Looked at are names that a program has: of variables, arguments, attributes, functions, classes, imports and files. To
retire a word: rename it, then add a row to RETIRED.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from support.sources import modules

FRAMEWORKS = ("torch", "mindspore")

EVERYWHERE = ("",)
PLANNER = ("core.planner", "platform.FW.planner", "report")
SHARDING = ("core.dtensor", "core.shard", "platform.FW.dtensor")


class Retired(NamedTuple):
    """A word that names nothing any more.

    `word` is a regular expression on whole names, without the underscore in front of a private one. `where` are folders
    and files of `src/hyper_parallel`, with dots; `FW` is either framework. `now` is the word that took its place. It is
    the name of something, unless `has_name` is False: then it says in words what to write.
    """

    word: str
    where: tuple[str, ...]
    now: str
    since: str
    has_name: bool = True


RETIRED = [
    # A loop's variable is what it is.
    Retired("each", EVERYWHERE, "what it is: a value, op, region, tensor, name, path", "2026-11", has_name=False),
    # The planner.
    Retired("Load", PLANNER, "RegionBytes", "2026-11"),
    Retired("Value", PLANNER, "StorageFacts", "2026-11"),
    Retired("Op", PLANNER, "ProfiledOp", "2026-11"),
    Retired("Swapped", PLANNER, "SwappedBytes", "2026-11"),
    Retired("Origin", PLANNER, "MadeWith", "2026-11"),
    Retired("Surroundings", PLANNER, "AutocastCheck", "2026-11"),
    Retired("Span", ("core.planner", "platform.FW.planner"), "MeasuredSpan", "2026-11"),
    Retired("Kinds", PLANNER, "ModuleTypes", "2026-11"),
    Retired("Block", ("core.planner.solve",), "RegionRows", "2026-11"),
    Retired("Search", ("core.planner.solve",), "Branching", "2026-11"),
    Retired("Search", ("core.planner.plan",), "SizeSearch", "2026-11"),
    Retired("Call", ("core.planner",), "TimelineRegion", "2026-11"),
    Retired("say", PLANNER, "report_progress", "2026-11"),
    Retired("Way", PLANNER, "HowBlocksRun", "2026-11"),
    # Distributed tensors and their operators.
    Retired("glue|Glue", EVERYWHERE, "DispatchBackend", "2026-11"),
    Retired("Asked|Prepared", SHARDING, "PreparedOp", "2026-11"),
    Retired("Decision", SHARDING, "RuleAnswer", "2026-11"),
    Retired("Slot", SHARDING, "ArgumentSlot", "2026-11"),
    Retired("Call", SHARDING, "DispatchedOp", "2026-11"),
    Retired("Exchange", SHARDING, "AllToAllStep", "2026-11"),
    # The ground floor, and what is above all floors.
    Retired("Span", ("platform.slicing", "platform.FW.tensors"), "SliceRange", "2026-11"),
    Retired("Exchange", ("platform.communication",), "ExchangeFn", "2026-11"),
    Retired("Record", ("platform.communication",), "CallEntry", "2026-11"),
    Retired("Span", ("report",), "Bar", "2026-11"),
    Retired("Block", ("platform.FW.demo",), "DemoBlock", "2026-11"),
    Retired("ways?|Ways?", ("platform.FW.demo", "cli"), "baselines", "2026-11"),
    Retired("part_of", EVERYWHERE, "backend", "2026-11"),
    # Swapping.
    Retired("Block", ("core.swap",), "HostBlock", "2026-11"),
    Retired("HeldTensor", EVERYWHERE, "PinnedAlias", "2026-11"),
    Retired("hand_made", EVERYWHERE, "by_hand", "2026-11"),
    Retired("quiet_swap", EVERYWHERE, "quiet_calls", "2026-11"),
    Retired("quiet_device", (*EVERYWHERE, "platform.FW.regions"), "no_engine_on", "2026-11"),
    # Regions: what is left of these stands in their own folders only.
    Retired("Pattern|Watched", EVERYWHERE, "Program", "2026-11"),
    Retired("Frame", EVERYWHERE, "RegionCall", "2026-11"),
    Retired("Recomputed|Dropped", EVERYWHERE, "RerunResidual", "2026-11"),
    Retired("FromKept", EVERYWHERE, "HereResidual", "2026-11"),
    Retired("FromInput", EVERYWHERE, "InputResidual", "2026-11"),
    Retired("NeedsEverything|NotThePattern", EVERYWHERE, "StartOver", "2026-11"),
    Retired("AllFound", EVERYWHERE, "RerunDone", "2026-11"),
    Retired("Occurrence", EVERYWHERE, "OpAt", "2026-11"),
    Retired("Traits", EVERYWHERE, "OpTraits", "2026-11"),
    Retired("KnownOp|StorageRef|NotAsRecordedError|has_unseen", EVERYWHERE, "nothing: it is gone", "2026-11", False),
]

# Folders whose words go with a later issue, by its subject. Retired words may stand there, and in what other folders
# import from there, unless a row names the folder itself. The list only gets shorter.
LATER = {
    "core.regions": "one kind of region call",
    "platform.FW.regions": "one kind of region call",
    "core.planner.search": "one planner loop",
    "core.planner.planning": "one planner loop",
}


class Use(NamedTuple):
    module: str
    line: int
    name: str
    row: Retired


def in_words(uses: list[Use]) -> str:
    """A line for each word of a module: where it stands, and what to write."""
    lines: dict[tuple[str, str, str], list[int]] = {}
    for use in uses:
        lines.setdefault((use.module, use.name, use.row.now), []).append(use.line)
    return "\n".join(
        f"{module}: `{name}` is retired there; write {now} (line {', '.join(map(str, sorted(set(found))))})"
        for (module, name, now), found in lines.items()
    )


def names_in(module: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Each name of a program, with its line. The file's own name is in line 1."""
    yield module.removesuffix(".__init__").rpartition(".")[2], 1
    for node in ast.walk(tree):
        for name in _names(node):
            yield name, getattr(node, "lineno", 1)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")  # the names that it imports are nodes of their own
    if isinstance(node, ast.alias):
        return [*node.name.split("."), *([node.asname] if node.asname else [])]
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return node.names
    if isinstance(node, ast.MatchClass):
        return node.kwd_attrs
    # Whatever else a node has as text of its own is a name, but for the value of a constant.
    texts = ("id", "attr", "arg", "name", "rest")
    return [name for field in texts if isinstance(name := getattr(node, field, None), str)]


def framework_as_fw(module: str) -> str:
    return re.sub(rf"^platform\.({'|'.join(FRAMEWORKS)})(?=\.|$)", "platform.FW", module)


def is_in(module: str, folder: str) -> bool:
    module = framework_as_fw(module)
    return folder in ("", module) or module.startswith(f"{folder}.")


def is_later(module: str) -> bool:
    return any(is_in(module, folder) for folder in LATER)


def is_retired_in(row: Retired, module: str) -> bool:
    """Whether a module may not use the word. In a folder of LATER only a row that names it counts."""
    return any(is_in(module, folder) and (not is_later(module) or is_later(folder)) for folder in row.where)


def names_of_later_folders(tree: ast.Module) -> set[str]:
    """What a module imports from a folder of LATER, and the names of the files there: these words are not its own."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            home = node.module.removeprefix("hyper_parallel.")
            for alias in node.names:
                if is_later(home) or is_later(f"{home}.{alias.name}"):
                    found |= {*home.split("."), alias.name, alias.asname or alias.name}
    return found


def retired_words(found: dict[str, ast.Module], rows: list[Retired] = RETIRED) -> list[Use]:
    """Every use of a retired word in a source tree."""
    uses = []
    for module, tree in found.items():
        own_rows = [(row, re.compile(row.word)) for row in rows if is_retired_in(row, module)]
        borrowed = names_of_later_folders(tree)
        for name, line in names_in(module, tree):
            if name not in borrowed:
                word = name.lstrip("_")
                uses += [Use(module, line, name, row) for row, pattern in own_rows if pattern.fullmatch(word)]
    return uses


def test_a_retired_word_names_nothing() -> None:
    uses = retired_words(modules())
    assert not uses, "\n" + in_words(uses)


def test_the_word_of_today_names_something() -> None:
    """So that a row does not send its reader to a word that nobody uses. Words of LATER come with their issue."""
    found = modules()
    names = {name.lstrip("_") for module, tree in found.items() for name, _ in names_in(module, tree)}
    left = {row for row in RETIRED if is_left_to_later(row, found)}
    missing = [row.now for row in RETIRED if row.has_name and row.now not in names and row not in left]
    assert not missing, ", ".join(missing)


def is_left_to_later(row: Retired, found: dict[str, ast.Module]) -> bool:
    pattern = re.compile(row.word)
    there = {module: tree for module, tree in found.items() if is_later(module)}
    return any(pattern.fullmatch(name.lstrip("_")) for module in there for name, _ in names_in(module, there[module]))


def test_a_folder_that_waits_for_a_later_issue_still_has_retired_words() -> None:
    found, everywhere = modules(), [row._replace(where=tuple(LATER)) for row in RETIRED]
    uses = retired_words({module: tree for module, tree in found.items() if is_later(module)}, everywhere)
    having = {folder for folder in LATER for use in uses if is_in(use.module, folder)}
    assert set(LATER) - having == set(), "its issue is done: take the folder off LATER"


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("core.planner.model.profile", "class Op:\n    pass"),
        ("core.planner.model.timeline", "class _Call(NamedTuple):\n    pass"),
        ("core.planner.solve.rows", "from hyper_parallel.core.planner.solve.block import Block"),
        ("platform.mindspore.planner.meters", "def f(spans):\n    return [spans.Span(1)]"),
        ("platform.torch.planner.profiling", "def f(say=None):\n    pass"),
        ("platform.torch.dtensor.glue", ""),
        ("core.swap.config", "[each for each in ()]"),
        ("core.swap.config", "for index, each in enumerate(()):\n    pass"),
        ("core.swap.config", "f'{each.name}'"),
        ("cli.bench", "g(ways=1)"),
        ("core.shard.user_rule", "self._glue.run()"),
        ("core.shard.user_rule", "import hyper_parallel.core.shard.glue"),
        ("platform.torch.regions.frame", "self.quiet_device = None"),  # the row names this folder of LATER
    ],
)
def test_a_planted_word_is_found(module: str, text: str) -> None:
    tree = ast.parse(text)
    assert retired_words({module: tree}), f"{text!r} in {module}"


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("core.swap.config", "# each\nx = 'each of them, say'\ndef f():\n    '''Of each Block.'''"),
        ("core.swap.slot", "class Slot:\n    pass"),  # swapping keeps the word
        ("report.numbers", "class Block:\n    pass"),
        ("core.regions.passes", "for each in ():\n    pass"),  # goes with a later issue
        ("core.planner.planning", "say('profiling')"),
        ("platform.torch.planner.steps", "from hyper_parallel.platform.torch.regions.values import Value\nValue()"),
        ("core.swap.config", "teach = reached = each_of = 1"),  # whole words only
    ],
)
def test_a_word_in_prose_of_another_folder_or_of_a_later_issue_is_left_alone(module: str, text: str) -> None:
    assert retired_words({module: ast.parse(text)}) == []


def test_an_error_names_the_places_and_the_word_to_write() -> None:
    uses = retired_words({"core.swap.pool": ast.parse("class Block:\n    pass\n\nBlock()\nBlock()")})
    assert in_words(uses) == "core.swap.pool: `Block` is retired there; write HostBlock (line 1, 4, 5)"


def test_no_row_stands_twice() -> None:
    assert len({(row.word, row.where) for row in RETIRED}) == len(RETIRED)


def test_every_folder_of_the_tables_is_there() -> None:
    found = {framework_as_fw(module.removesuffix(".__init__")) for module in modules()}
    named = {*LATER, *(folder for row in RETIRED for folder in row.where if folder)}
    assert {folder for folder in named if not any(is_in(module, folder) for module in found)} == set()
