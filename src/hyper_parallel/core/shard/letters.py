"""Rules written as an einsum.

Dims that share a name are split together; a name that the output lacks leaves a partial sum.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.core.shard.strategies import P, Place, R, S, Strategy

__all__ = ["parse", "strategies_of", "terms_for"]

ELLIPSIS = "..."


def parse(equation: str) -> tuple[list[list[str]], list[str]]:
    """Return `"... k, n k -> ... n"` as lists of names per input and for the output.

    Raises:
        ValueError: it has no arrow, a name twice in one term, or a name in the output that no input has.
    """
    if not isinstance(equation, str):
        raise ArgumentTypeError(
            "This is not an equation of dims.", expected='a text such as "... k, n k -> ... n"', got=describe(equation)
        )
    left, arrow, right = equation.partition("->")
    inputs = [_names(term, equation) for term in left.split(",")]
    output = _names(right, equation)
    known = {name for term in inputs for name in term}
    missing = [name for name in output if name not in known]
    if not arrow or missing or not all(inputs):
        raise ArgumentError(
            "This is not an equation of dims.",
            expected='such as "... k, n k -> ... n", with every name of the output in an input',
            got=repr(equation) + (f"; {missing} is in the output only" if missing else ""),
            do="Name every dim; dims with one name are split together.",
        )
    return inputs, output


def _names(term: str, equation: str) -> list[str]:
    names = re.findall(r"\.\.\.|[A-Za-z_]\w*", term)
    rest = re.sub(r"\.\.\.|[A-Za-z_]\w*|\s", "", term)
    twice = sorted({name for name in names if names.count(name) > 1})
    if rest or twice:
        raise ArgumentError(
            "This is not an equation of dims.",
            expected='names apart by spaces, such as "... k, n k -> ... n"',
            got=f"{equation!r}: " + (f"{rest!r} is no name" if rest else f"{twice} twice in {term.strip()!r}"),
        )
    return names


def terms_for(inputs: list[list[str]], output: list[str], ndims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Spell `...` out as `.0`, `.1`, counted from the right, for inputs of these numbers of dims."""
    if len(inputs) != len(ndims):
        raise ArgumentError(
            "The equation does not fit the call.", expected=f"{len(inputs)} tensors", got=f"{len(ndims)}"
        )
    widest = 0
    spelt = []
    for term, ndim in zip(inputs, ndims, strict=True):
        extra = ndim - (len(term) - (ELLIPSIS in term))
        if extra < 0 or (extra > 0 and ELLIPSIS not in term):
            raise ArgumentError(
                "The equation does not fit the tensor.", expected=f"dims {' '.join(term)}", got=f"{ndim} dims"
            )
        widest = max(widest, extra)
        spelt.append(_spelt(term, extra))
    return spelt, _spelt(output, widest)


def _spelt(term: list[str], extra: int) -> list[str]:
    hidden = [f".{extra - 1 - i}" for i in range(extra)]
    return [letter for name in term for letter in (hidden if name == ELLIPSIS else [name])]


def strategies_of(
    inputs: Sequence[Sequence[str]], output: Sequence[str], *, is_linear: bool = True, unsplit: Sequence[str] = ()
) -> list[Strategy]:
    """Make one strategy per name, besides "all whole". With `is_linear` one partial input makes a partial output.

    An input may lack a name that others have (it is broadcast). Names in `unsplit`, and those that end with `!`, are
    never split.

    An input may lack a letter that others have (it is broadcast). Letters in `unsplit`, and those that end with `!`,
    are never split.
    """
    whole = Strategy((R,) * len(inputs), (R,))
    letters = dict.fromkeys([*output, *(name for term in inputs for name in term)])
    found = [whole]
    for letter in letters:
        if letter in unsplit or letter.endswith("!"):
            continue
        places: tuple[Place, ...] = tuple(S(list(term).index(letter)) if letter in term else R for term in inputs)
        found.append(Strategy(places, (S(list(output).index(letter)) if letter in output else P("sum"),)))
    if is_linear:
        for i in range(len(inputs)):
            for op in ("sum", "avg"):
                one = tuple(P(op) if k == i else R for k in range(len(inputs)))
                found.append(Strategy(one, (P(op),)))
    return found
