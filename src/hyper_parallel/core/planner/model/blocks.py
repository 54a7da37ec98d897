"""Which modules of a model become regions of a plan: its repeated blocks, or those the user names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel.platform.opaque import Module
from hyper_parallel.platform.patterns import matching


class ModuleTypes(NamedTuple):
    """What the search for blocks needs to know of a framework's modules."""

    sequences: tuple[type, ...]  # of modules
    mappings: tuple[type, ...]  # of names to modules
    not_called: tuple[type, ...]  # containers without a forward
    wrapper: type
    children: Callable[[Any], Iterable[tuple[str, Any]]]  # each once, by name
    parameters: Callable[[Any], Iterable[Any]]
    modules: Callable[[Any], Iterable[tuple[str, Any]]]  # all below a module, by path; itself as ""


def find_blocks(types: ModuleTypes, model: Module, regions: Sequence[str | type] | None = None) -> dict[str, Any]:
    """Find the modules that become regions: paths and modules, in the order of the model; none inside another.

    `regions`: paths, classes, or patterns in which `*` stands for anything, dots included (see `patterns`).

    Without it the blocks are the members of every list or sequence of modules in which a class with submodules of its
    own stands at least twice; and of every such dict in whose members there is no such list (it may hold whole models,
    by name). Where there are none of these, they are the model's own children that have parameters; of a list or a
    dict, which is never called itself, its members: `ModuleList(LSTM, LSTM)`.

    Raises:
        ValueError: nothing is found, a pattern matches nothing, or a block is wrapped already.
    """
    found = dict(_repeated(types, "", model)) if regions is None else _named(types, model, regions)
    if not found and regions is None:
        found = dict(_own(types, "", model))
    if not found:
        raise ArgumentError(
            "No block was found in the model that could be planned.",
            expected="a list of equal modules, or children with parameters",
            got=type(model).__name__,
            do='Name the blocks: regions=["encoder.layer.*"], or their class.',
        )
    for name, module in found.items():
        if isinstance(module, types.wrapper):
            raise ArgumentError(
                "A block is wrapped already, and a plan wraps blocks itself.",
                got=type(module).__name__,
                where=name,
                do="Plan the model before wrapping it, or `remove` the plan that was applied.",
            )
    return found


def check_unplanned(planned: Iterable[str], paths: Iterable[str]) -> None:
    """Refuse blocks that are under a plan, or have something in them or around them that is.

    `planned`: the paths of modules that are under one.

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


def suggested(types: ModuleTypes, model: Module, blocks: Iterable[str], inside: str | None = None) -> list[str]:
    """List patterns of modules that could be planned as well, for a refusal's advice.

    With `inside`, the parts of that block; without it, what is in no block.
    """
    modules, planned = dict(types.modules(model)), list(blocks)
    if inside is not None:
        return [_pattern(path, planned) for path in _parts(types, inside, modules, is_only=len(planned) == 1)][:1]

    def is_free(path: str) -> bool:
        return not any(f"{path}.".startswith(f"{block}.") or f"{block}.".startswith(f"{path}.") for block in planned)

    free = [path for path, module in modules.items() if path and is_free(path) and _has_parameters(types, module)]
    lists = [path for path in free if isinstance(modules[path], (*types.sequences, *types.mappings))]
    tops = [path for path in free if not any(path.startswith(f"{other}.") for other in free)]
    return [f"{path}.*" for path in lists] or tops


def _parts(types: ModuleTypes, inside: str, modules: dict[str, Any], *, is_only: bool) -> Iterator[str]:
    """Find where a block may be split: at a list in it in which a class is repeated.

    A model's only block may also be split at its children.
    """
    for path, module in modules.items():
        if f"{path}.".startswith(f"{inside}.") and isinstance(module, (*types.sequences, *types.mappings)):
            members = [type(child) for _, child in types.children(module) if _has_parameters(types, child)]
            if len(members) > len(set(members)):
                yield f"{path}.*"
    if is_only and any(_has_parameters(types, child) for _, child in types.children(modules[inside])):
        yield f"{inside}.*"


def _pattern(path: str, planned: Sequence[str]) -> str:
    """Turn a path in one block into a pattern for all blocks: numbers in which their paths differ are left open."""
    paths = [block.split(".") for block in planned]
    return ".".join(
        "*" if part.isdecimal() and len({parts[place] for parts in paths if len(parts) > place}) > 1 else part
        for place, part in enumerate(path.split("."))
    )


def other_reference(types: ModuleTypes, model: Module, blocks: Iterable[Any]) -> str | None:
    """Find where the model holds one of the blocks a second time, in a Python list, tuple or dict.

    No wrapper would be put there.
    """
    wanted = {id(block) for block in blocks}
    for path, module in types.modules(model):
        for name, value in vars(module).items():
            values = value.values() if isinstance(value, dict) else value
            is_own = name.startswith("_")  # the framework's own tables
            if not is_own and isinstance(value, (list, tuple, dict)) and any(id(held) in wanted for held in values):
                return f"{path}.{name}" if path else name
    return None


def check_ran(types: ModuleTypes, model: Module, blocks: dict[str, Any], *, num_seen: int, num_ran: int) -> None:
    """Refuse a model whose blocks did not run, or ran from where no wrapper would be.

    `num_ran`: calls of blocks; `num_seen`: those through wrappers.

    Raises:
        ValueError: the reason is named.
    """
    other = other_reference(types, model, blocks.values()) if num_seen < num_ran else None
    if other is not None or (num_ran and not num_seen):
        raise ArgumentError(
            "Blocks run, but the model does not call them by the names that they have in it: "
            "it holds them by another reference, such as a Python list.",
            expected="calls of " + ", ".join(list(blocks)[:3]) + " by these names",
            got=f"{num_ran - num_seen} of {num_ran} calls by another reference" + (f", `{other}`" if other else ""),
            where=type(model).__name__,
            do="Call the blocks from a list of modules of the framework, and hold them nowhere else.",
        )
    if not num_seen:
        raise ArgumentError(
            "No block ran in the forward with gradients on.",
            expected="calls of " + ", ".join(list(blocks)[:3]),
            where=type(model).__name__,
            do='Name the blocks that run: regions=["encoder.layer.*"].',
        )


def _repeated(types: ModuleTypes, path: str, module: Module) -> Iterator[tuple[str, Any]]:
    """Find the members of lists with repeated classes; what is below such a member is part of it."""
    for name, child in types.children(module):
        below = f"{path}.{name}" if path else name
        found: list[tuple[str, Any]] = []
        if isinstance(child, types.sequences):
            found = _members(types, below, child)
        found = found or list(_repeated(types, below, child))
        if not found and isinstance(child, types.mappings):
            found = _members(types, below, child)
        yield from found


def _own(types: ModuleTypes, path: str, module: Module) -> Iterator[tuple[str, Any]]:
    """Find the children with parameters, and in place of a container that is never called those in it."""
    for name, child in types.children(module):
        below = f"{path}.{name}" if path else name
        if isinstance(child, types.not_called):
            yield from _own(types, below, child)
        elif _has_parameters(types, child):
            yield below, child


def _members(types: ModuleTypes, path: str, container: object) -> list[tuple[str, Any]]:
    """List the members of a class that is called, stands in the container at least twice and has submodules."""
    classes = Counter(type(child) for _, child in types.children(container))
    return [
        (f"{path}.{key}", child)
        for key, child in types.children(container)
        if classes[type(child)] > 1
        and not isinstance(child, types.not_called)
        and _has_parameters(types, child)
        and any(True for _ in types.children(child))
    ]


def _has_parameters(types: ModuleTypes, module: Module) -> bool:
    return any(True for _ in types.parameters(module))


def _named(types: ModuleTypes, model: Module, regions: Sequence[str | type]) -> dict[str, Any]:
    if isinstance(regions, (str, type)):
        regions = [regions]
    if not isinstance(regions, Iterable):
        raise ArgumentTypeError(
            "`regions` names the blocks of a model.",
            expected="a list of paths, patterns or module classes",
            got=describe(regions),
        )
    modules = {name: module for name, module in types.modules(model) if name}
    chosen: set[str] = set()
    for region in regions:
        if isinstance(region, str):
            matches = [name for name in matching(region, modules) if type(modules[name]) not in types.not_called]
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
                do=f"The model has {', '.join(list(modules)[:8])}{', …' if len(modules) > 8 else ''}.",
            )
        chosen.update(matches)
    # A region inside another would be part of it.
    return {
        name: module
        for name, module in modules.items()
        if name in chosen and not any(name.startswith(f"{other}.") for other in chosen)
    }
