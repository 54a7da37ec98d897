"""What a meter says about a part of a step."""

from __future__ import annotations

from typing import NamedTuple


class MeasuredSpan(NamedTuple):
    """From one mark to the next; bytes above what was in use at the first mark."""

    name: str
    level_bytes: int  # when it begins
    peak_bytes: int  # highest point within
