"""What decides about the ops of a region: one type, whether a user's function, rules or a plan does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

from hyper_parallel._base.errors import ArgumentError, describe
from hyper_parallel.core.activation_checkpoint.policies import as_policy_fn
from hyper_parallel.core.activation_checkpoint.policy import ByOutput, CheckpointPolicy, as_policy
from hyper_parallel.core.activation_checkpoint.rules import Policy
from hyper_parallel.core.regions.module_calls import Occurrence

Answer: TypeAlias = CheckpointPolicy | ByOutput
# (op, path of its module below the block, which call of the op it is, its result) -> what the plan says.
PlannedAnswer: TypeAlias = Callable[[Any, str, Occurrence, Any], Answer]

# Of who answers nothing once and for all. Regions compare it by identity and never write it.
NO_ANSWERS: Final[dict[int, CheckpointPolicy]] = {}
_NO_VIEWS: Final[dict[int, Callable[..., Any]]] = {}


class Observer(Protocol):
    """Who wants to know what a call of a region has done."""

    def observe(self, call: Any) -> None:
        """A call is over; `call` is what the framework's regions tell of it."""


class PolicyContext:
    """What a policy is told about an op beside its arguments.

    Attributes:
        is_recompute: False in forward, True when the function runs again.
        module: path of the innermost module that runs, from the outermost one; "" outside of modules.
        occurrence: how often this op ran before in this module in this call of the region.
        call: how many calls of this module came before the one that runs, in this call of the region. Calls in which no
            op ran but those of modules inside it do not count.
        occurrence_in_call: how often this op ran before in this call of the module.
        op_output: its result. When the function runs again there may be no memory behind it, only shape and dtype.
    """

    __slots__ = ("call", "is_recompute", "module", "occurrence", "occurrence_in_call", "op_output")

    def __init__(
        self,
        is_recompute: bool,
        module: str,
        occurrence: int,
        op_output: object,
        call: int = 0,
        occurrence_in_call: int = 0,
    ) -> None:
        self.is_recompute = is_recompute
        self.module = module
        self.occurrence = occurrence
        self.op_output = op_output
        self.call = call
        self.occurrence_in_call = occurrence_in_call

    def __repr__(self) -> str:
        when = "recompute" if self.is_recompute else "forward"
        return f"<{when}, module {self.module!r}, call {self.call}, occurrence {self.occurrence}>"


class RegionPolicy(ABC):
    """What decides about the ops of a region. Everything inside of a region asks this and knows no other kind of policy; None recomputes all.

    It holds no state of a call, and so may serve many regions, calls and threads. Rules and plans live as long as the model that they are
    about. A user's function becomes one when a call of a region begins (`region_policy`), which lives until that call's backward is over.

    Guarantees: what is in `answers` never changes and is never taken out. Who fills it holds the ops, so that no other gets their ids, and has
    `answers` and `passes` of its own.
    Assumes: of the same op at the same place it says the same in forward and when the function runs again. Unless it `is_pure` that is checked.

    Attributes:
        is_pure: that assumption is known to hold. It is not asked again, and recorded ops may run in place of the function
        is_asked: about some ops at each of their calls; else `answers` has all that came so far
        ahead_bytes: what the region leaves room for in its backward, to be loaded for others; None: the swap engine decides
        ends_forward: of a forward that swaps: nothing more of it comes after this region
        answers: by the id of an op, what it says about every call of that op. Who looks here need not ask
        passes: by the id of an op that is a view and needs nothing done, what runs it. The region notes it here
        planned_answer: if it is a plan, it is asked by this in place of `answer`: no context is made, and nothing checks what it says
        is_as_planned: all that it was asked about is in the plan: what it said about the ops of one call holds for any call with such ops
        observer: who is told what a call has done
    """

    is_pure: bool = False
    is_asked: bool = True
    ahead_bytes: int | None = None
    ends_forward: bool = False
    answers: dict[int, CheckpointPolicy] = NO_ANSWERS
    passes: dict[int, Callable[..., Any]] = _NO_VIEWS
    planned_answer: PlannedAnswer | None = None
    is_as_planned: bool = False
    observer: Observer | None = None

    @abstractmethod
    def answer(
        self, context: PolicyContext, op: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CheckpointPolicy:
        """What becomes of the result of an op that was called with these arguments.

        Raises:
            ArgumentError: a function of the user's raised a TypeError, or gave an answer that means nothing.
        """

    def __call__(self, ctx: PolicyContext, op: object, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Asked as a user's function is: it is given to `checkpoint` where a user gives one."""
        return self.answer(ctx, op, args, kwargs)


class UserPolicy(RegionPolicy):
    """A user's function `policy_fn(ctx, op, *args, **kwargs)`. It may count and look at anything, and answer in any word that `as_policy` knows."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def answer(
        self, context: PolicyContext, op: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CheckpointPolicy:
        try:
            answer = self._function(context, op, *args, **kwargs)
        except TypeError as error:
            raise _raised(error, context, op) from error
        try:
            return as_policy(answer)
        except TypeError:
            raise ArgumentError(
                "A policy gave an answer that means nothing.",
                expected="a CheckpointPolicy, True or False",
                got=describe(answer),
                where=f"{context.module or 'region'}, {op}",
                do="Return CheckpointPolicy.MUST_SAVE, MUST_RECOMPUTE or MUST_SWAP (or True to save, False for the default).",
            ) from None


class RulePolicy(RegionPolicy):
    """The rules of a `Policy`, which holds this object: there is one for all regions under it, and it remembers what rules say by name.

    Guarantees: no reference leads from here to the `Policy`.
    """

    def __init__(self, rules: Policy) -> None:
        self.is_pure = rules.is_pure
        self.is_asked = False  # so far: no op was met that its name does not decide
        self.answers = {}
        self.passes = {}
        self._by_op = rules.by_op

    def answer(
        self, context: PolicyContext, op: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CheckpointPolicy:
        try:
            left_open, answer = self._by_op.about(op)
            if not left_open:
                self.answers[id(op)] = answer  # `_by_op` holds the op
                return answer
            self.is_asked = True
            for matcher, own in left_open:
                if matcher(context, op, *args, **kwargs):
                    return own
        except TypeError as error:
            raise _raised(error, context, op) from error
        return answer


def region_policy(policy_fn: object) -> RegionPolicy | None:
    """What a region asks in place of what a user gave as `policy_fn`; None: it recomputes everything.

    Rules and plans give the same object each time, a function gives a new one.

    Raises:
        ArgumentTypeError, ArgumentError: see `as_policy_fn`.

    Example:
        >>> region_policy(["aten.mm"]) is region_policy(["aten.mm"])
        True
    """
    if policy_fn is None:
        return None
    if not isinstance(policy_fn, Policy):
        if isinstance(policy_fn, RegionPolicy):
            return policy_fn
        policy_fn = as_policy_fn(policy_fn)
        if not isinstance(policy_fn, Policy):
            return UserPolicy(policy_fn)
    known: list[RegionPolicy] = policy_fn.in_regions
    if not known:
        known.append(RulePolicy(policy_fn))
    return known[0]


def _raised(error: TypeError, context: PolicyContext, op: object) -> ArgumentError:
    # Not as a TypeError: PyTorch's binary operators take one for "the other operand may know", and forget it.
    return ArgumentError(
        "A policy raised an error.",
        got=f"{type(error).__name__}: {error}",
        where=f"{context.module or 'region'}, {op}",
        do="A policy is called as policy_fn(ctx, op, *args, **kwargs).",
    )
