"""Which modules of a model become regions: its repeated blocks, or those the user names."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.platform.torch.activation_checkpoint.activation_wrapper import ActivationWrapper


def find_blocks(model: nn.Module, regions: Sequence[str | type[nn.Module]] | None = None) -> dict[str, nn.Module]:
    """Paths and modules, in the order of the model; none inside another.

    Without `regions`: the members of every list or sequence of modules in which a class with submodules of its own stands at least
    twice; without such a list, the model's own children that have parameters.

    Raises:
        ValueError: nothing is found, a pattern matches nothing, or a block is wrapped already.
    """
    found = dict(_repeated("", model)) if regions is None else _named(model, regions)
    if not found and regions is None:
        found = {
            name: child for name, child in model.named_children() if _has_parameters(child) and _can_be_called(child)
        }
    if not found:
        raise ArgumentError(
            "No block was found in the model that could be planned.",
            expected="a list of equal modules, or children with parameters",
            got=type(model).__name__,
            do='Name the blocks: regions=["encoder.layer.*"], or their class.',
        )
    for name, module in found.items():
        if isinstance(module, ActivationWrapper):
            raise ArgumentError(
                "A block is wrapped already, and a plan wraps blocks itself.",
                got=type(module).__name__,
                where=name,
                do="Plan the model before wrapping it, or `remove` the plan that was applied.",
            )
    return found


def _repeated(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Members of lists with repeated classes; what is below such a member is part of it."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            classes = Counter(type(each) for each in child)
            members = [(f"{below}.{key}", each) for key, each in child.named_children() if _is_block(each, classes)]
            if members:
                yield from members
                continue
        yield from _repeated(below, child)


def _is_block(module: nn.Module, classes: Counter[type[nn.Module]]) -> bool:
    return classes[type(module)] > 1 and _has_parameters(module) and any(True for _ in module.children())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _can_be_called(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _named(model: nn.Module, regions: Sequence[str | type[nn.Module]]) -> dict[str, nn.Module]:
    if isinstance(regions, (str, type)):
        regions = [regions]
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: set[str] = set()
    for region in regions:
        if isinstance(region, str):
            matches = [
                name for name in modules if fnmatch.fnmatchcase(name, region) and "." not in _beyond(name, region)
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


def _beyond(name: str, pattern: str) -> str:
    """What a `*` may not match: a pattern has as many segments as the paths it means."""
    return "" if name.count(".") == pattern.count(".") else "."
