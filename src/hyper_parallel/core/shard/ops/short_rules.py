"""Rules in one line: an equation of named dims, or a list of what is right on one mesh axis.

The engine of `strategies.py` extends both to all axes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard, as_placement
from hyper_parallel.core.shard.letters import parse, strategies_of, terms_for
from hyper_parallel.core.shard.ops.parallel_ops import DistributedOp
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.strategies import Chosen, P, Place, R, S, Strategy, choose

__all__ = ["EinsumRule", "StrategyRule"]


class EinsumRule(DistributedOp):
    """A rule as an equation. Dims with one name are split together; a name that the output lacks leaves a partial sum.

    Args:
        op_name: the operator's name.
        equation: such as `"... k, n k -> ... n"`; one term per tensor argument.
        is_linear: whether the operator is linear in each of its tensors, so that a partial sum may go through it.

    Raises:
        ValueError: it is no such equation, or the name is taken.

    Example:
        >>> rule = EinsumRule("MyLinear", "... k, n k -> ... n")
    """

    def __init__(self, op_name: str, equation: str, *, is_linear: bool = False, override: bool = False) -> None:
        self._terms, self._output = parse(equation)
        self._is_linear = is_linear
        super().__init__(op_name, override=override)

    def choose_layouts(self, tensors: Sequence[Spec]) -> Chosen:
        terms, output = terms_for(self._terms, self._output, [spec.ndim for spec in tensors])
        return choose(tensors, strategies_of(terms, output, is_linear=self._is_linear), [len(output)])


class StrategyRule(DistributedOp):
    """A rule as a list of what is right on one mesh axis.

    For each strategy it has the placements of the tensor arguments, and those of the outputs.

    "All replicated" is always right and need not be listed.

    Raises:
        ValueError: strategies of different lengths, or the name is taken.

    Example:
        >>> rule = StrategyRule("MyScale", [([Shard(0), Replicate()], [Shard(0)])])
    """

    def __init__(
        self,
        op_name: str,
        strategies: Sequence[tuple[Sequence[Placement], Sequence[Placement]]],
        *,
        override: bool = False,
    ) -> None:
        if not _is_list(strategies):
            raise _no_strategies(strategies)
        if not strategies:
            raise ArgumentError("A rule needs a strategy.", expected="at least one", got="none")
        for strategy in strategies:
            if not isinstance(strategy, (tuple, list)) or len(strategy) != 2 or not all(map(_is_list, strategy)):
                raise _no_strategies(strategy)
        found = [Strategy(_places(inputs), _places(outputs)) for inputs, outputs in strategies]
        lengths = {(len(strategy.inputs), len(strategy.outputs)) for strategy in found}
        if len(lengths) != 1:
            raise ArgumentError(
                "The strategies of one rule are about the same tensors.",
                expected="as many inputs, and as many outputs, in each",
                got=", ".join(f"{inputs} to {outputs}" for inputs, outputs in sorted(lengths)),
                where=op_name,
            )
        ((num_inputs, self._num_outputs),) = lengths
        self._strategies = [Strategy((R,) * num_inputs, (R,) * self._num_outputs), *found]
        super().__init__(op_name, override=override)

    def choose_layouts(self, tensors: Sequence[Spec]) -> Chosen:
        num_inputs = len(self._strategies[0].inputs)
        if len(tensors) != num_inputs:
            raise ArgumentError(
                f"The rule of {self.op_name!r} is for another number of tensors.",
                expected=str(num_inputs),
                got=str(len(tensors)),
            )
        # The output is not there yet, and so its dims are not known: it is given as many as its strategies name.
        ndims = [
            max(
                (place.dim + 1 for strategy in self._strategies if isinstance(place := strategy.outputs[i], S)),
                default=0,
            )
            for i in range(self._num_outputs)
        ]
        return choose(tensors, self._strategies, ndims)


def _is_list(thing: object) -> bool:
    return isinstance(thing, (tuple, list))


def _no_strategies(got: object) -> ArgumentTypeError:
    return ArgumentTypeError(
        "A rule is made of strategies: the placements of the inputs, and those of the outputs.",
        expected="such as [([Shard(0), Replicate()], [Shard(0)])]",
        got=describe(got),
    )


def _places(placements: Sequence[Placement]) -> tuple[Place, ...]:
    found: list[Place] = []
    for given in placements:
        placement = as_placement(given)
        if isinstance(placement, Shard):
            if placement.dim < 0:
                raise ArgumentError(
                    "A strategy counts dims from the beginning.", expected="0 or more", got=repr(placement)
                )
            found.append(S(placement.dim))
        elif isinstance(placement, Partial):
            found.append(P(placement.op))
        elif isinstance(placement, Replicate):
            found.append(R)
        else:
            raise ArgumentTypeError(
                "A strategy is made of placements.",
                expected="hp.Shard, hp.Replicate or hp.Partial, or PyTorch's",
                got=describe(given),
            )
    return tuple(found)
