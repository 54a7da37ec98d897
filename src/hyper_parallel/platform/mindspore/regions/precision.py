"""Mixed precision around a region's function, which must be the same when it runs again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindspore._c_expression.amp import get_curr_amp_strategy
from mindspore.graph.api import _pynative_executor
from mindspore.nn.cell import MixedPrecisionType
from mindspore.train.amp import AmpDecorator


class Precision:
    """The casts that `auto_mixed_precision` makes where a region is called."""

    def __init__(self) -> None:
        self._strategy: Any = get_curr_amp_strategy()

    @contextmanager
    def again(self) -> Iterator[None]:
        strategy = self._strategy
        if not strategy:
            yield
            return
        with AmpDecorator(
            strategy.get_amp_level(), strategy.get_amp_dtype(), strategy.get_white_list(), strategy.get_black_list()
        ):
            yield


def forget_casts(num_cells: int) -> None:
    """Switch off the casts of cells (`to_float`) that an exception has left: MindSpore does so only where they return."""
    for _ in range(num_cells):
        _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)
