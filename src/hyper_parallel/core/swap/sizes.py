"""Sizes as a person writes and reads them: "8GiB", "512 MiB", 1048576."""

from __future__ import annotations

import re
from fractions import Fraction

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.whole_numbers import as_int

_LETTERS = "kmgtp"
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000 ** (power + 1) for power, letter in enumerate(_LETTERS)},
    **{f"{letter}ib": 1024 ** (power + 1) for power, letter in enumerate(_LETTERS)},
}
_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
ACCEPTED = 'bytes as an integer, or a text such as "8GiB", "512 MiB", "1.5GB" (B, KB to PB, KiB to PiB)'


def parse_size(value: object, name: str) -> int:
    """Return the bytes that `value` stands for; `name` is the option it was given to, for the error.

    A fraction of a byte that a unit leaves ("0.3KiB") is rounded down.

    Raises:
        ArgumentError: the number is negative, or the text is no number with a known unit.
        ArgumentTypeError: neither an integer nor a text; a bool and a float are refused, too.

    Example:
        >>> parse_size("1.5 GiB", "host_budget")
        1610612736
    """
    if isinstance(value, str):
        return _parse_text(value, name)
    num_bytes = as_int(value)
    if num_bytes is None:
        raise ArgumentTypeError(f"{name} is no size.", expected=ACCEPTED, got=describe(value))
    if num_bytes < 0:
        raise ArgumentError(f"{name} is negative.", expected=ACCEPTED, got=describe(value))
    return num_bytes


def format_size(num_bytes: int) -> str:
    """Write the size in the largest binary unit that leaves at least 1, with up to two decimals.

    Example:
        >>> format_size(1610612736), format_size(700)
        ('1.5 GiB', '700 B')
    """
    sign, rest = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    if rest < 1024:
        return f"{sign}{rest} B"
    for power in range(1, len(_LETTERS) + 1):
        hundredths = round(Fraction(rest * 100, 1024**power))
        # Rounding comes first: 1023.999 MiB is "1 GiB", not "1024 MiB".
        if hundredths < 1024 * 100 or power == len(_LETTERS):
            break
    number = f"{hundredths / 100:.2f}".rstrip("0").rstrip(".")
    return f"{sign}{number} {_LETTERS[power - 1].upper()}iB"


def _parse_text(text: str, name: str) -> int:
    found = _FORM.fullmatch(text)
    unit = found[2].lower() if found else ""
    if found is None or unit not in _UNITS or ("." in found[1] and _UNITS[unit] == 1):
        raise ArgumentError(f"{name} is no size.", expected=ACCEPTED, got=describe(text), do=_hint(found, unit))
    return int(Fraction(found[1]) * _UNITS[unit])


def _hint(found: re.Match[str] | None, unit: str) -> str | None:
    letter = unit.removesuffix("i")
    if found is None or len(letter) != 1 or letter not in _LETTERS:
        return None
    # "8G" means 1024-based in some tools and 1000-based in others: we do not guess.
    return f'Write "{found[1]}{letter.upper()}iB" or "{found[1]}{letter.upper()}B".'
