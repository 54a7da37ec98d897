"""A policy made of rules: the first one that matches decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from hyper_parallel.core.activation_checkpoint.op_names import no_op
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy

if TYPE_CHECKING:
    from hyper_parallel.core.activation_checkpoint.matchers import Matcher

__all__ = ["Policy"]

Rules: TypeAlias = "tuple[tuple[Matcher, CheckpointPolicy], ...]"


class RulesByOp:
    """Rules, by the ops that they are asked about: most ops are decided by their name alone.

    Lives with a `Policy` and with what asks it in regions.

    Guarantees: each op is looked up by its name once. It is held from then on, so that no other op gets its id. No
    reference leads from here to the policy.
    """

    __slots__ = ("_known", "_otherwise", "_rules")

    def __init__(self, rules: Rules, otherwise: CheckpointPolicy) -> None:
        self._rules = rules
        self._otherwise = otherwise
        self._known: dict[Any, tuple[Rules, CheckpointPolicy]] = {}

    def about(self, op: object) -> tuple[Rules, CheckpointPolicy]:
        """Return the rules that the name of an op leaves open, and the answer if none of them matches.

        Raises:
            ArgumentTypeError: this is no op.
        """
        try:
            known = self._known.get(op)
        except TypeError:  # what cannot be a key
            raise no_op(op) from None
        if known is None:
            known = self._known[op] = self._by_name(op)
        return known

    def _by_name(self, op: object) -> tuple[Rules, CheckpointPolicy]:
        left_open: list[tuple[Matcher, CheckpointPolicy]] = []
        for matcher, answer in self._rules:
            known = matcher.of_op(op)
            if known:
                return tuple(left_open), answer
            if known is None:
                left_open.append((matcher, answer))
        return tuple(left_open), self._otherwise


@dataclass(frozen=True, repr=False)
class Policy:
    """Says what happens to an op's result: the first rule that matches, or `otherwise`. Made by `choose` and `save`.

    Example:
        >>> from hyper_parallel import policies as p
        >>> p.choose(p.swap(p.attention), p.save(p.matmuls))
        swap attention; save matmuls; recompute the rest
    """

    rules: Rules
    otherwise: CheckpointPolicy
    by_op: RulesByOp = field(init=False, compare=False)
    # What regions ask in place of this policy: one `RulePolicy` of core.regions, from the first region on. It is kept
    # here because it remembers what holds for all their calls. It does not lead back here: a policy that is made for
    # one call is gone with it.
    in_regions: list[Any] = field(default_factory=list, init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_op", RulesByOp(self.rules, self.otherwise))

    def __call__(self, ctx: object, op: object, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        left_open, answer = self.by_op.about(op)
        for matcher, own in left_open:
            if matcher(ctx, op, *args, **kwargs):
                return own
        return answer

    @property
    def is_pure(self) -> bool:
        """Tell whether the same op at the same place surely gets the same answer: no function of a user is asked."""
        return all(matcher.is_pure for matcher, _ in self.rules)

    def __reduce__(self) -> tuple[Any, ...]:
        return Policy, (self.rules, self.otherwise)

    def __repr__(self) -> str:
        rules = [f"{_WORDS[answer]} {matcher!r}" for matcher, answer in self.rules]
        last = _WORDS_OTHERWISE.get(self.otherwise, _WORDS[self.otherwise])
        return "; ".join([*rules, f"{last} {'the rest' if rules else 'everything'}"])


_WORDS = {
    CheckpointPolicy.MUST_SAVE: "save",
    CheckpointPolicy.PREFER_SAVE: "prefer to save",
    CheckpointPolicy.MUST_RECOMPUTE: "recompute",
    CheckpointPolicy.PREFER_RECOMPUTE: "prefer to recompute",
    CheckpointPolicy.MUST_SWAP: "swap",
}
# The default has the plain word here: it is what nearly every policy ends with.
_WORDS_OTHERWISE = {
    CheckpointPolicy.PREFER_RECOMPUTE: "recompute",
    CheckpointPolicy.MUST_RECOMPUTE: "always recompute",
}
