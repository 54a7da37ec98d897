"""What a user's budget means in bytes."""

from __future__ import annotations

import math
import re

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.swap.sizes import format_size, parse_size

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_DECIMAL = re.compile(r"\s*\d+(?:\.\d+)?\s*([KMGTP]B)\s*", re.IGNORECASE)
_LEAST_BYTES = 1024  # less is a slip of the pen: the percent sign or the unit is missing
_DO = 'Write it as "24GiB", "40%" or "auto".'
_EXPECTED = 'bytes, a size such as "24GiB", a part of the activations such as "40%", or "auto"'


def is_percentage(budget: object) -> bool:
    """Say whether the budget is a part of the activations."""
    return isinstance(budget, str) and _PERCENT.fullmatch(budget) is not None


def budget_bytes(budget: int | str, profile: StepProfile, free_bytes: int) -> int:
    """Turn a budget into bytes for everything that is alive at the highest point of a step.

    A percentage is of the unmanaged activation peak, and comes on top of what is alive when forward begins. `"auto"`:
    what is free now and what is alive already, less 5 %.

    Raises:
        ValueError, TypeError: it is none of these.
    """
    part, num_bytes = check_budget(budget)
    if part is not None:
        return profile.base_bytes + int(part * profile.activation_peak_bytes)
    if num_bytes is not None:
        return num_bytes
    return int((profile.base_bytes + free_bytes) * 0.95)


def check_budget(budget: int | str) -> tuple[float | None, int | None]:
    """Read a budget: the part of the activations that is asked for, or the bytes; neither for `"auto"`.

    Raises:
        ValueError, TypeError: it is none of these.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise ArgumentTypeError(
            "`budget` is how much memory may be used.", expected=_EXPECTED, got=describe(budget), do=_DO
        )
    if budget == "auto":
        return None, None
    percent = _PERCENT.fullmatch(budget) if isinstance(budget, str) else None
    if percent is not None:
        part = float(percent.group(1)) / 100
        if not (math.isfinite(part) and part > 0):
            raise ArgumentError("`budget` leaves nothing for activations.", expected="more than 0%", got=str(budget))
        return part, None
    try:
        num_bytes = parse_size(budget, "budget")
    except ValueError as error:
        raise ArgumentError("`budget` was not understood.", expected=_EXPECTED, got=describe(budget), do=_DO) from error
    if num_bytes <= 0:
        raise ArgumentError("`budget` leaves no room at all.", expected="more than 0 bytes", got=describe(budget))
    if num_bytes < _LEAST_BYTES:
        raise ArgumentError(
            "`budget` is a number of bytes, and no step fits into so few.",
            expected=f"{_LEAST_BYTES} bytes or more",
            got=describe(budget),
            do=f'Did you mean "{num_bytes}%", or "{num_bytes}GiB"?',
        )
    return None, num_bytes


def budget_note(budget: int | str) -> str | None:
    """Say what somebody may not know who wrote the budget like this."""
    part, num_bytes = check_budget(budget)
    if part is not None and part > 1:
        return f"A budget of {budget} is more than the plain step needs: 100% are all of its activations."
    decimal = _DECIMAL.fullmatch(budget) if isinstance(budget, str) else None
    if decimal is not None and num_bytes is not None:
        unit = decimal.group(1)
        return f"{budget} are {format_size(num_bytes)}: {unit} counts in thousands, {unit[0]}iB in 1024s."
    return None


def reserve_bytes(reserve: int | str) -> int:
    """Turn what a user wants to keep free into bytes."""
    num_bytes = parse_size(reserve, "reserve")
    if num_bytes < 0:
        raise ArgumentError("`reserve` is negative.", expected="0 bytes or more", got=describe(reserve))
    return num_bytes
