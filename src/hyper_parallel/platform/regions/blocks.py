"""Which modules of a model become regions of a plan: its repeated blocks, or those the user names."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe


class Kinds(NamedTuple):
    """A framework's modules."""

    sequences: tuple[type, ...]  # of modules
    mappings: tuple[type, ...]  # of names to modules
    not_called: tuple[type, ...]  # containers without a forward
    wrapper: type
    children: Callable[[Any], Iterable[tuple[str, Any]]]  # each once, by name
    parameters: Callable[[Any], Iterable[Any]]
    modules: Callable[[Any], Iterable[tuple[str, Any]]]  # all below a module, by path; itself as ""


def find_blocks(kinds: Kinds, model: Any, regions: Sequence[str | type] | None = None) -> dict[str, Any]:
    """Paths and modules, in the order of the model; none inside another.

    Without `regions`: the members of every list or sequence of modules in which a class with submodules of its own stands at least
    twice, and of every such dict in whose members there is no such list (it may hold whole models, by name); without any, the model's own
    children that have parameters.

    Raises:
        ValueError: nothing is found, a pattern matches nothing, or a block is wrapped already.
    """
    found = dict(_repeated(kinds, "", model)) if regions is None else _named(kinds, model, regions)
    if not found and regions is None:
        found = {
            name: child
            for name, child in kinds.children(model)
            if _has_parameters(kinds, child) and not isinstance(child, kinds.not_called)
        }
    if not found:
        raise ArgumentError(
            "No block was found in the model that could be planned.",
            expected="a list of equal modules, or children with parameters",
            got=type(model).__name__,
            do='Name the blocks: regions=["encoder.layer.*"], or their class.',
        )
    for name, module in found.items():
        if isinstance(module, kinds.wrapper):
            raise ArgumentError(
                "A block is wrapped already, and a plan wraps blocks itself.",
                got=type(module).__name__,
                where=name,
                do="Plan the model before wrapping it, or `remove` the plan that was applied.",
            )
    return found


def check_unplanned(planned: Iterable[str], paths: Iterable[str]) -> None:
    """Refuse blocks at paths that are under a plan, or have something in them or around them that is. `planned`: where one is.

    Raises:
        StateError: the first one is named.
    """
    planned = list(planned)
    for path in paths:
        for name in planned:
            if f"{path}.".startswith(f"{name}.") or f"{name}.".startswith(f"{path}."):
                raise StateError(
                    "A plan is applied to this model already.",
                    expected="blocks without a plan",
                    got="one that is planned",
                    where=name,
                    do="Take that plan off first: `plan.remove(model)`.",
                )


def _repeated(kinds: Kinds, path: str, module: Any) -> Iterator[tuple[str, Any]]:
    """Members of lists with repeated classes; what is below such a member is part of it."""
    for name, child in kinds.children(module):
        below = f"{path}.{name}" if path else name
        found: list[tuple[str, Any]] = []
        if isinstance(child, kinds.sequences):
            found = _members(kinds, below, child)
        found = found or list(_repeated(kinds, below, child))
        if not found and isinstance(child, kinds.mappings):
            found = _members(kinds, below, child)
        yield from found


def _members(kinds: Kinds, path: str, container: Any) -> list[tuple[str, Any]]:
    """Those of a class that stands in it at least twice and has submodules of its own."""
    classes = Counter(type(each) for _, each in kinds.children(container))
    return [
        (f"{path}.{key}", each)
        for key, each in kinds.children(container)
        if classes[type(each)] > 1 and _has_parameters(kinds, each) and any(True for _ in kinds.children(each))
    ]


def _has_parameters(kinds: Kinds, module: Any) -> bool:
    return any(True for _ in kinds.parameters(module))


def _named(kinds: Kinds, model: Any, regions: Sequence[str | type]) -> dict[str, Any]:
    if isinstance(regions, (str, type)):
        regions = [regions]
    if not isinstance(regions, Iterable):
        raise ArgumentTypeError(
            "`regions` names the blocks of a model.",
            expected="a list of paths, patterns or module classes",
            got=describe(regions),
        )
    modules = {name: module for name, module in kinds.modules(model) if name}
    chosen: set[str] = set()
    for region in regions:
        if isinstance(region, str):
            # As many segments as the paths it means: a `*` matches no dot.
            matches = [
                name for name in modules if fnmatch.fnmatchcase(name, region) and name.count(".") == region.count(".")
            ]
        elif isinstance(region, type):
            matches = [name for name, module in modules.items() if isinstance(module, region)]
        else:
            raise ArgumentTypeError(
                "`regions` names the blocks of a model.",
                expected="paths, patterns or module classes",
                got=describe(region),
            )
        if not matches:
            raise ArgumentError(
                "A region matches no module of the model.",
                expected='paths such as "layers.0", patterns such as "layers.*", or module classes',
                got=repr(region),
                where=type(model).__name__,
            )
        chosen.update(matches)
    # A region inside another would be part of it.
    return {
        name: module
        for name, module in modules.items()
        if name in chosen and not any(name.startswith(f"{other}.") for other in chosen)
    }
