"""Which cells of a model become regions; how they are found: `core/planner/model/blocks.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from mindspore import nn

from hyper_parallel.core.planner.model import blocks
from hyper_parallel.platform.mindspore.wrappers.activation_wrapper import ActivationWrapper


def _children(cell: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
    seen: set[nn.Cell] = set()
    for name, child in cell._cells.items():
        if child is not None and child not in seen:
            seen.add(child)
            yield name, child


_TYPES = blocks.ModuleTypes(
    sequences=(nn.CellList, nn.SequentialCell),
    mappings=(nn.CellDict,),
    not_called=(nn.CellList, nn.CellDict),
    wrapper=ActivationWrapper,
    children=_children,
    parameters=nn.Cell.get_parameters,
    modules=nn.Cell.cells_and_names,
)


suggested = functools.partial(blocks.suggested, _TYPES)
check_ran = functools.partial(blocks.check_ran, _TYPES)


def find_blocks(model: nn.Cell, regions: Sequence[str | type[nn.Cell]] | None = None) -> dict[str, nn.Cell]:
    """Find the cells that become regions: paths and cells, in the order of the model; none inside another.

    Raises:
        ValueError: nothing is found, a pattern matches nothing, or a block is wrapped already.
    """
    return blocks.find_blocks(_TYPES, model, regions)
