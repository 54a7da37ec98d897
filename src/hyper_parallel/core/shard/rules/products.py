"""Rules of matrix products: einsums, with a summand or without."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.shard.letters import parse, strategies_of, terms_for
from hyper_parallel.core.shard.rule_answer import RuleAnswer, answered
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.strategies import P, Place, R, S, Strategy

__all__ = ["contraction", "einsum", "linear", "matmul", "summand_and_product"]


def contraction(equation: str, *tensors: Spec) -> RuleAnswer:
    """Multiply as an equation of named dims says, such as `"b m k, b k n -> b m n"`."""
    terms, output = _spelt(equation, tensors)
    lengths = _lengths(terms, tensors)
    return answered(
        tensors, strategies_of(_unstretched(terms, tensors, lengths), output), [lengths[name] for name in output]
    )


def matmul(x: Spec, y: Spec) -> RuleAnswer:
    """Multiply as `torch.matmul` does: vectors, matrices, stacks of them with broadcasting."""
    if 0 in (x.ndim, y.ndim):
        raise ArgumentError(
            "A matrix product needs dims.", expected="1 or more in each", got=f"shapes {x.shape} and {y.shape}"
        )
    left = ["k"] if x.ndim == 1 else ["...", "m", "k"]
    right = ["k"] if y.ndim == 1 else ["...", "k", "n"]
    output = [name for name in ("...", "m", "n") if name in left or name in right]
    return contraction(f"{' '.join(left)}, {' '.join(right)} -> {' '.join(output)}", x, y)


def linear(x: Spec, weight: Spec, bias: Spec | None = None) -> RuleAnswer:
    """Compute `x @ weight.T + bias`. Where the product is partial, the bias is added on the first rank alone."""
    equation = "... k, n k -> ... n" if weight.ndim == 2 else "... k, k -> ..."
    if bias is None:
        return contraction(equation, x, weight)
    return _with_summand(equation, [x, weight], bias, is_first=False)


def summand_and_product(equation: str, summand: Spec, *tensors: Spec) -> RuleAnswer:
    """Add a summand that is broadcast to the product: `addmm` and its kin."""
    return _with_summand(equation, tensors, summand, is_first=True)


def einsum(equation: str, *tensors: Spec) -> RuleAnswer:
    """Multiply as `torch.einsum` of its usual form does: letters without spaces, each at most once per operand."""
    compact = equation.replace(" ", "")
    if "->" not in compact:
        names = list(compact.replace("...", "").replace(",", ""))
        free = "".join(sorted(name for name in set(names) if names.count(name) == 1))
        compact = f"{compact}->{'...' if '...' in compact else ''}{free}"
    spaced = compact.replace("...", ".")
    spaced = "".join("->" if c == ">" else "" if c == "-" else "," if c == "," else f" {c} " for c in spaced)
    return contraction(spaced.replace(" . ", " ... "), *tensors)


def _with_summand(equation: str, tensors: Sequence[Spec], summand: Spec, is_first: bool) -> RuleAnswer:
    terms, output = _spelt(equation, tensors)
    lengths = _lengths(terms, tensors)
    shape = [lengths[name] for name in output]
    if summand.ndim > len(shape) or any(
        length not in (1, shape[len(shape) - summand.ndim + dim]) for dim, length in enumerate(summand.shape)
    ):
        raise ArgumentError("The summand does not fit the product.", expected=str(tuple(shape)), got=str(summand.shape))
    strategies = []
    for strategy in strategies_of(_unstretched(terms, tensors, lengths), output):
        place: Place = strategy.outputs[0]
        if isinstance(place, S):
            own = place.dim - (len(shape) - summand.ndim)
            place = S(own) if own >= 0 and summand.shape[own] == shape[place.dim] else R
        inputs = (place, *strategy.inputs) if is_first else (*strategy.inputs, place)
        strategies.append(Strategy(inputs, strategy.outputs))
    # A partial summand needs a partial product: a whole one would be counted once per rank.
    everything = [summand, *tensors] if is_first else [*tensors, summand]
    return answered(everything, [s for s in strategies if not _is_partial_average(s)], shape)


def _is_partial_average(strategy: Strategy) -> bool:
    # Partial by an average, the product would need the summand on every rank, which no conversion gives.
    return strategy.outputs[0] == P("avg")


def _spelt(equation: str, tensors: Sequence[Spec]) -> tuple[list[list[str]], list[str]]:
    inputs, output = parse(equation)
    return terms_for(inputs, output, [spec.ndim for spec in tensors])


def _lengths(terms: Sequence[Sequence[str]], tensors: Sequence[Spec]) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for term, spec in zip(terms, tensors, strict=True):
        for name, length in zip(term, spec.shape, strict=True):
            known = lengths.setdefault(name, length)
            if known == 1 and name.startswith("."):
                lengths[name] = length
            elif length != known and not (length == 1 and name.startswith(".")):
                raise ArgumentError(
                    "The global shapes do not fit together.",
                    expected=f"length {known} of the dim {name!r}",
                    got=f"{length} in {spec.shape}; all shapes: {', '.join(str(other.shape) for other in tensors)}",
                )
    return lengths


def _unstretched(terms: Sequence[Sequence[str]], tensors: Sequence[Spec], lengths: dict[str, int]) -> list[list[str]]:
    """Rename dims of length 1 that are stretched, so that they are not split with the others."""
    return [
        [name if spec.shape[i] == lengths[name] else f"{name}.{k}!" for i, name in enumerate(term)]
        for k, (term, spec) in enumerate(zip(terms, tensors, strict=True))
    ]
