"""What a meter measured of a part of a step."""

from __future__ import annotations

from typing import NamedTuple


class MeasuredSpan(NamedTuple):
    """A part of a step, from one mark to the next. Bytes are above what was in use at the step's first mark."""

    name: str
    level_bytes: int  # when it begins
    peak_bytes: int  # highest point within
