"""Policies for regions, by name.

A *matcher* says which ops are meant, a *policy* what happens to their results:

    from hyper_parallel import policies as p

    p.choose(p.swap(p.attention), p.save(p.matmuls & p.larger_than("1MiB")))

swaps what attention gives, saves large matrix products, and recomputes the rest. Matchers combine with `&`, `|` and
`~`, and any function `(ctx, op, *args, **kwargs) -> bool` can take part. In `choose` the first rule that matches
decides.

Matchers and policies hold no state of a run: the same op at the same place gets the same answer in the forward and in
recomputation, and one policy may serve many regions and threads. They are compared by content, and can be hashed,
pickled and copied. They look at names, shapes and sizes only, never at a tensor's values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.core.activation_checkpoint.matchers import (
    Matcher,
    as_matcher,
    attention,
    convolutions,
    every,
    in_module,
    larger_than,
    matmuls,
    ops,
    random_ops,
)
from hyper_parallel.core.activation_checkpoint.op_names import is_op
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy, as_policy
from hyper_parallel.core.activation_checkpoint.rules import Policy

__all__ = [
    "matmuls",
    "attention",
    "convolutions",
    "random_ops",
    "ops",
    "larger_than",
    "in_module",
    "every",
    "save",
    "swap",
    "recompute",
    "choose",
    "as_policy_fn",
    "Matcher",
    "Policy",
]


def save(matcher: object) -> Policy:
    """Save what `matcher` matches on the device (`MUST_SAVE`), recompute the rest.

    Example:
        >>> save(matmuls | attention)
        save matmuls | attention; recompute the rest
    """
    return choose((matcher, CheckpointPolicy.MUST_SAVE))


def swap(matcher: object) -> Policy:
    """Swap what `matcher` matches (`MUST_SWAP`), recompute the rest.

    Example:
        >>> swap(larger_than("16MiB"))
        swap larger_than("16 MiB"); recompute the rest
    """
    return choose((matcher, CheckpointPolicy.MUST_SWAP))


def recompute(matcher: object) -> Policy:
    """Recompute what `matcher` matches, whatever later rules or a plan say (`MUST_RECOMPUTE`), and the rest by default.

    Example:
        >>> choose(recompute(in_module("head")), save(matmuls))
        recompute in_module("head"); save matmuls; recompute the rest
    """
    return choose((matcher, CheckpointPolicy.MUST_RECOMPUTE))


def choose(*rules: Any, otherwise: object = CheckpointPolicy.PREFER_RECOMPUTE) -> Policy:
    """Let the first rule that matches decide; `otherwise` is for what none matches.

    Args:
        rules: `save(…)`, `swap(…)`, `recompute(…)`, other policies of this module, or pairs `(matcher, answer)`.
        otherwise: an answer: a `CheckpointPolicy`, True or False, or a member of PyTorch's enum.

    Raises:
        ArgumentTypeError: a rule, a matcher or an answer is none.
        ArgumentError: a policy with an `otherwise` of its own among the rules.

    Example:
        >>> choose(recompute(in_module("head")), (matmuls, CheckpointPolicy.PREFER_SAVE), otherwise=True)
        recompute in_module("head"); prefer to save matmuls; save the rest
    """
    found: list[tuple[Matcher, CheckpointPolicy]] = []
    for rule in rules:
        if isinstance(rule, Policy):
            _check_leaves_the_rest_open(rule)
            found += rule.rules
        elif isinstance(rule, tuple) and len(rule) == 2:
            found.append((as_matcher(rule[0]), as_policy(rule[1])))
        else:
            raise ArgumentTypeError(
                "This is no rule.",
                expected="save(…), swap(…), recompute(…) or a pair (matcher, answer)",
                got=describe(rule),
                do=f"Write save({rule!r}) or swap({rule!r})." if isinstance(rule, Matcher) else None,
            )
    return Policy(tuple(found), as_policy(otherwise))


def as_policy_fn(policy: Any) -> Callable[..., Any]:
    """Return the policy function `(ctx, op, *args, **kwargs) -> answer` that a user's `policy_fn` stands for.

    A function and a policy of this module stay what they are; a list, tuple or set of ops or their names means "save
    these, recompute the rest"; None means "recompute everything".

    Raises:
        ArgumentTypeError: anything else, or a list with an entry that is no op.
        ArgumentError: a list with a text that cannot be an op's name.

    Example:
        >>> as_policy_fn(["aten.mm", "aten.addmm"])
        save ops("aten.addmm", "aten.mm"); recompute the rest
    """
    if policy is None:
        return choose()
    if isinstance(policy, (list, tuple, set, frozenset)):
        return _policy_of_list(policy)
    if callable(policy) and not isinstance(policy, (Matcher, type)) and not is_op(policy):
        return policy  # type: ignore[no-any-return]  # `callable` narrows Any to itself
    raise ArgumentTypeError(
        "This is no policy.",
        expected="a function (ctx, op, *args, **kwargs), a policy of hyper_parallel.policies, a list of ops, or None",
        got=describe(policy),
        do=_policy_hint(policy),
    )


def _policy_hint(policy: object) -> str | None:
    if isinstance(policy, Matcher):
        return f"A matcher alone does not say what to do: write save({policy!r}) or swap({policy!r})."
    if isinstance(policy, str) or is_op(policy):
        return f"To save this op and recompute the rest, write [{policy!r}]."
    try:
        return f"For this answer to every op write choose(otherwise={as_policy(policy)})."
    except ArgumentTypeError:
        return None


def _policy_of_list(entries: Any) -> Policy:
    # The same one each time: regions remember what it has answered.
    try:
        return _known_policy(frozenset(entries))
    except TypeError:  # an entry that cannot be in a set is no op: see the error
        return save(_ops_of_list(entries))


@functools.lru_cache(maxsize=64)
def _known_policy(entries: frozenset[Any]) -> Policy:
    return save(_ops_of_list(entries))


def _ops_of_list(entries: Any) -> Matcher:
    for entry in entries:
        if isinstance(entry, (Matcher, Policy)):
            raise ArgumentTypeError(
                "A list of ops has a matcher or a policy in it.",
                expected="ops and names of ops",
                got=describe(entry),
                do="Combine matchers with `|`, as in save(matmuls | attention), and policies with choose(…).",
            )
    return ops(*entries)


def _check_leaves_the_rest_open(policy: Policy) -> None:
    if policy.otherwise is not CheckpointPolicy.PREFER_RECOMPUTE:
        raise ArgumentError(
            "A policy among the rules decides about every op, so that no rule after it could match.",
            expected="a policy without `otherwise`",
            got=repr(policy),
            do="Give `otherwise` to the outermost `choose`.",
        )
