"""How a bug is planted: at a mark in the source, by a change of the statement that has it.

A mark is a word at the end of a line: `_wait(stream, event)  # plant: source-after-offload`, or
`# O1; plant: offload-after-producer` where there is a comment already. It belongs to the innermost statement that has
the line, so a statement may be broken into lines in any way. It names the place, not a bug: several bugs may change
one statement. Tests name no file of the source and repeat no text of it, but for new expressions:

    Bug("the source is dropped without a wait", "source-after-offload", removed)
    Bug("every input is a leaf", "leaf-input", condition("True"))
    Bug("a view begins where its storage does", "view-offset", value("0"))

Changes are below, each a function of the `Place`. `beside` loads the changed code beside the real one; `Bug.source` is
the changed file.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

SOURCE = Path(__file__).resolve().parents[2] / "src"
_MARK = re.compile(r"\S.*#.*\bplant: ([a-z0-9-]+)$")

Node = TypeVar("Node", bound=ast.AST)


class Place(NamedTuple):
    """A statement: where it is among those of its block."""

    block: list[ast.stmt]
    number: int

    @property
    def statement(self) -> ast.stmt:
        return self.block[self.number]

    def first(self, kind: type[Node]) -> Node:
        """The outermost node of a kind in the statement, itself included."""
        return next(node for node in ast.walk(self.statement) if isinstance(node, kind))


Change = Callable[[Place], None]


@dataclass(frozen=True)
class Bug:
    name: str
    mark: str
    change: Change

    @property
    def file(self) -> Path:
        """The one that has the mark, relative to `SOURCE`."""
        return _only(self.mark)[0]

    def tree(self) -> ast.Module:
        """Of the file, with the bug."""
        file, line = _only(self.mark)
        tree = ast.parse((SOURCE / file).read_text())
        self.change(_place(tree, line))
        return ast.fix_missing_locations(tree)

    def source(self) -> str:
        return ast.unparse(self.tree())


# -- changes --------------------------------------------------------------------------------------------------------------


def unchanged(place: Place) -> None:
    """No bug at all: what is found then is the test's own mistake."""


def removed(place: Place) -> None:
    place.block[place.number] = ast.Pass()


def later(place: Place) -> None:
    """After the statement that follows it."""
    place.block.insert(place.number + 1, place.block.pop(place.number))


def preceded_by(statement: str) -> Change:
    return lambda place: place.block.insert(place.number, ast.parse(statement).body[0])


def value(expression: str) -> Change:
    """What is assigned or returned."""
    return lambda place: setattr(place.statement, "value", _parsed(expression))


def condition(expression: str) -> Change:
    """What an `if` or a `while` asks, be it a statement or in an expression."""
    return lambda place: setattr(_asking(place), "test", _parsed(expression))


def turned_around(place: Place) -> None:
    """The condition."""
    asking = _asking(place)
    asking.test = ast.UnaryOp(ast.Not(), asking.test)


def argument(number: int, expression: str) -> Change:
    """One of the call's."""
    return lambda place: place.first(ast.Call).args.__setitem__(number, _parsed(expression))


def index(expression: str) -> Change:
    """What stands in the brackets."""
    return lambda place: setattr(place.first(ast.Subscript), "slice", _parsed(expression))


def without_operands(*numbers: int) -> Change:
    """Of the condition's `and` or `or`."""

    def change(place: Place) -> None:
        operation = place.first(ast.BoolOp)
        for number in numbers:
            operation.values[number] = ast.Constant(isinstance(operation.op, ast.And))  # says nothing there

    return change


def without_items(*numbers: int) -> Change:
    """Of the `with`."""

    def change(place: Place) -> None:
        items = place.first(ast.With).items
        items[:] = [item for number, item in enumerate(items) if number not in numbers]

    return change


def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def _asking(place: Place) -> Any:
    return next(node for node in ast.walk(place.statement) if isinstance(node, (ast.If, ast.While, ast.IfExp)))


# -- marks ----------------------------------------------------------------------------------------------------------------


@functools.cache
def _marks(folder: Path) -> dict[str, list[tuple[Path, int]]]:
    found: dict[str, list[tuple[Path, int]]] = {}
    for path in sorted(folder.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if mark := _MARK.search(line):
                found.setdefault(mark[1], []).append((path.relative_to(folder), number))
    return found


def marks() -> dict[str, list[tuple[Path, int]]]:
    """Each mark, with the files and lines where it stands."""
    return _marks(SOURCE)


def _only(mark: str) -> tuple[Path, int]:
    places = marks().get(mark, [])
    if len(places) != 1:
        where = "".join(f"\n{SOURCE / file}:{line}" for file, line in places)
        raise LookupError(f"`plant: {mark}` stands {len(places)} times in {SOURCE}; it must stand there once.{where}")
    return places[0]


def _place(tree: ast.Module, line: int) -> Place:
    places = [
        Place(block, number)
        for parent in ast.walk(tree)
        for _, block in ast.iter_fields(parent)
        if isinstance(block, list)
        for number, node in enumerate(block)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
    ]
    return max(places, key=lambda place: place.statement.lineno)


# -- loading --------------------------------------------------------------------------------------------------------------


def beside(bug: Bug, what: Any) -> types.ModuleType:
    """The module of a function or class as it is with the bug, beside the real one.

    It is loaded anew, and so is all that leads from it to the bug by imports at the top of modules; the rest is shared.
    """
    anew = _leading(what.__module__, bug.file)
    if not anew:
        raise LookupError(f"{bug.name}: the imports of {what.__module__} do not lead to {bug.file}.")
    loaded: dict[str, types.ModuleType] = {}

    def load(name: str) -> types.ModuleType:
        if name not in loaded:
            file = _file(name)
            module = loaded[name] = types.ModuleType(f"planted.{name}")
            sys.modules[module.__name__] = module  # dataclasses and annotations look their module up
            module.__dict__["__builtins__"] = {**vars(builtins), "__import__": load_for_import}
            tree = bug.tree() if file == bug.file else ast.parse((SOURCE / file).read_text())
            exec(compile(tree, str(SOURCE / file), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - our own source
        return loaded[name]

    def load_for_import(name: str, space: Any = None, own: Any = None, items: Any = (), level: int = 0) -> Any:
        """In place of `__import__`, for the modules that are loaded anew."""
        if items and name in anew:
            return load(name)
        module = builtins.__import__(name, space, own, items, level)
        changed = {item: load(f"{name}.{item}") for item in items or () if f"{name}.{item}" in anew}
        return types.SimpleNamespace(**{**vars(module), **changed}) if changed else module

    return load(what.__module__)


def _leading(start: str, file: Path) -> set[str]:
    """The modules on the ways from a module to a file, by imports; both ends included."""
    imports: dict[str, set[str]] = {}
    todo = [start]
    while todo:
        name = todo.pop()
        if name not in imports:
            imports[name] = _imports(name)
            todo += imports[name]
    found = {name for name in imports if _file(name) == file}
    while more := {name for name, used in imports.items() if used & found} - found:
        found |= more
    return found


@functools.cache
def _imports(name: str) -> set[str]:
    """What a module imports from, at its top, of our own."""
    body = ast.parse((SOURCE / _file(name)).read_text()).body
    named = [
        each
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module
        for each in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    ]
    return {each for each in named if (SOURCE / _file(each)).exists()}


def _file(name: str) -> Path:
    """Of a module, relative to `SOURCE`."""
    path = Path(*name.split("."))
    return path / "__init__.py" if (SOURCE / path).is_dir() else path.with_suffix(".py")
