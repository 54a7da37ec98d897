"""What one backward through a region has in hand."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any


class Pass:
    """What one backward has recomputed and not handed out yet."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.inputs: dict[int, Any] = {}
        self.asking: Counter[int] = Counter()  # how many residuals will still ask for which input
        self.will_replay = False
        self.found: dict[Any, Any] = {}
        self._changed: set[Any] = set()
        self._waiting: Counter[Any] = Counter()
        self._keeps_all = False

    def has_given(self, value: object) -> bool:
        return value in self._waiting and value not in self.found

    def keep_all(self) -> None:
        """Somebody asks twice: give nothing away before this backward ends."""
        self._keeps_all = True

    def put(self, found: dict[Any, Any], changed: set[Any], waiting: Counter[Any]) -> None:
        self.found = found
        self._changed = changed
        self._waiting = waiting
        self.will_replay = False
        for index in list(self.inputs):
            self._drop_input(index)

    def gave_input(self, index: int) -> None:
        self.asking[index] -= 1
        self._drop_input(index)

    def _drop_input(self, index: int) -> None:
        """Inputs come back once for a backward: they stay until all who need them have had them."""
        if self.asking[index] <= 0 and not self.will_replay and not self._keeps_all:
            self.inputs.pop(index, None)

    def take(self, value: object) -> Any | None:
        """The value for one residual, and for the last that waits for it the only reference; None if it was written over."""
        tensor = self.found[value]
        self._waiting[value] -= 1
        if self._waiting[value] <= 0 and not self._keeps_all:
            del self.found[value]
        return None if value in self._changed else tensor
