"""A policy made of rules: the first one that matches decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from hyper_parallel.core.activation_checkpoint.op_names import no_op
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy

if TYPE_CHECKING:
    from hyper_parallel.core.activation_checkpoint.matchers import Matcher

__all__ = ["Policy"]

_Rules: TypeAlias = "tuple[tuple[Matcher, CheckpointPolicy], ...]"


@dataclass(frozen=True, repr=False)
class Policy:
    """What happens to the result of each op: the first rule that matches, or `otherwise`. Made by `choose` and `save`.

    Example:
        >>> from hyper_parallel import policies as p
        >>> p.choose(p.swap(p.attention), p.save(p.matmuls))
        swap attention; save matmuls; recompute the rest
    """

    rules: _Rules
    otherwise: CheckpointPolicy
    # Per op: the rules that its name leaves open, and the answer if none of them matches. Most ops are decided by name.
    _by_op: dict[Any, tuple[_Rules, CheckpointPolicy]] = field(default_factory=dict, init=False, compare=False)
    # The answers that hold for every call of an op, by the op's id (`_by_op` has the op, so that no other gets it): who
    # looks here need not ask.
    answers: dict[int, CheckpointPolicy] = field(default_factory=dict, init=False, compare=False)
    # The ops that the name alone does not decide.
    asked: list[Any] = field(default_factory=list, init=False, compare=False)
    # For whoever asks: the views among those ops that need nothing done, and what runs them.
    passes: dict[int, Any] = field(default_factory=dict, init=False, compare=False)

    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        try:
            known = self._by_op.get(op)
        except TypeError:  # what cannot be a key
            raise no_op(op) from None
        if known is None:
            known = self._by_op[op] = self._of_op(op)
            if known[0]:
                self.asked.append(op)
            else:
                self.answers[id(op)] = known[1]
        for matcher, answer in known[0]:
            if matcher(ctx, op, *args, **kwargs):
                return answer
        return known[1]

    @property
    def is_pure(self) -> bool:
        """Whether the same op at the same place surely gets the same answer: no function of a user is asked."""
        return all(matcher.is_pure for matcher, _ in self.rules)

    def _of_op(self, op: Any) -> tuple[_Rules, CheckpointPolicy]:
        is_open: list[tuple[Matcher, CheckpointPolicy]] = []
        for matcher, answer in self.rules:
            known = matcher.of_op(op)
            if known:
                return tuple(is_open), answer
            if known is None:
                is_open.append((matcher, answer))
        return tuple(is_open), self.otherwise

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
