"""What a region asks: a user's function, rules and a plan are all one type, and become it in one place."""

from __future__ import annotations

import ast
import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hyper_parallel
from hyper_parallel import policies as p
from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.regions.policy import (
    NO_ANSWERS,
    PolicyContext,
    RegionPolicy,
    RulePolicy,
    UserPolicy,
    region_policy,
)

SAVE, DEFAULT = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
HERE = PolicyContext(False, "layers.0", 0, None)


def answer(policy: RegionPolicy | None, op: Any, *args: Any) -> CheckpointPolicy:
    assert policy is not None
    return policy.answer(HERE, op, args, {})


def saves_large(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return args == ("large",)


class Whole(RegionPolicy):
    """One that saves everything, as a plan may."""

    def answer(self, context: Any, op: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        return SAVE


def test_without_a_policy_nothing_is_asked() -> None:
    assert region_policy(None) is None


def test_a_function_is_asked_with_the_arguments_of_the_op_and_may_answer_in_its_own_words() -> None:
    policy = region_policy(saves_large)
    assert type(policy) is UserPolicy
    assert answer(policy, "MatMul", "large") is SAVE
    assert answer(policy, "MatMul", "small") is DEFAULT
    assert policy.is_asked
    assert not policy.is_pure
    assert policy.answers is NO_ANSWERS
    assert NO_ANSWERS == {}


def test_what_a_function_has_as_attributes_says_nothing_to_a_region() -> None:
    def function(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return True

    function.is_pure = True  # type: ignore[attr-defined]
    function.answers = {id("MatMul"): DEFAULT}  # type: ignore[attr-defined]
    function.ends_forward = True  # type: ignore[attr-defined]
    policy = region_policy(function)
    assert policy is not None
    assert (policy.is_pure, policy.answers, policy.ends_forward) == (False, {}, False)
    assert answer(policy, "MatMul") is SAVE


@pytest.mark.parametrize("wrong", [lambda ctx, op: None + 1, p.save(lambda ctx, op: None + 1)])
def test_a_type_error_in_a_function_of_the_users_comes_as_no_type_error(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="A policy raised an error(.|\n)*layers.0, MatMul") as caught:
        answer(region_policy(wrong), "MatMul")
    assert not isinstance(caught.value, TypeError)
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_answer_that_means_nothing_is_told_with_the_place() -> None:
    with pytest.raises(ArgumentError, match="means nothing(.|\n)*layers.0, MatMul"):
        answer(region_policy(lambda ctx, op: "save"), "MatMul")


def test_rules_are_asked_through_one_object_which_remembers_what_holds_for_every_call() -> None:
    rules = p.save(p.matmuls & p.larger_than("1MiB") | p.ops("Exp"))
    policy = region_policy(rules)
    assert type(policy) is RulePolicy
    assert policy is region_policy(rules)
    assert policy is not region_policy(p.save(p.matmuls & p.larger_than("1MiB") | p.ops("Exp")))
    exp, add = "Exp", "Add"
    assert (answer(policy, exp), answer(policy, add)) == (SAVE, DEFAULT)
    assert policy.answers == {id(exp): SAVE, id(add): DEFAULT}
    assert policy.is_pure
    assert not policy.is_asked
    assert rules(HERE, exp) is SAVE


def test_rules_that_the_name_leaves_open_are_asked_each_time() -> None:
    policy = region_policy(p.save(saves_large))
    assert [answer(policy, "MatMul", size) for size in ("large", "small", "large")] == [SAVE, DEFAULT, SAVE]
    assert policy is not None
    assert policy.is_asked
    assert not policy.is_pure
    assert policy.answers == {}


def test_a_list_of_ops_is_one_policy_in_every_call() -> None:
    assert region_policy(["MatMul"]) is region_policy(["MatMul"])
    assert answer(region_policy(["MatMul"]), "MatMul") is SAVE


def test_a_policy_of_regions_stays_what_it_is_and_can_be_given_where_a_user_gives_a_function() -> None:
    policy = Whole()
    assert region_policy(policy) is policy
    assert p.as_policy_fn(policy) is policy
    assert policy(HERE, "MatMul") is SAVE


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="This is no policy"):
        region_policy(p.matmuls)


def test_rules_that_were_made_for_one_call_are_gone_with_it() -> None:
    rules = p.save(lambda ctx, op, *args: True)
    policy = region_policy(rules)
    answer(policy, "MatMul")
    refs = weakref.ref(rules), weakref.ref(policy)
    gc.disable()
    try:
        del rules, policy
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_rules_that_regions_have_asked_are_copied_pickled_and_compared_as_before() -> None:
    rules = p.save(p.matmuls)
    fresh = pickle.dumps(rules)
    answer(region_policy(rules), "MatMul")
    assert pickle.dumps(rules) == fresh
    for other in (copy.copy(rules), copy.deepcopy(rules), pickle.loads(fresh)):  # noqa: S301
        assert other == rules
        assert hash(other) == hash(rules)
        assert region_policy(other) is not region_policy(rules)


def _asks_by_text(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        asks = isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
        if asks and ast.unparse(node.args[0]).split(".")[-1].strip("_") in ("policy", "policy_fn"):
            yield node.lineno


def test_nothing_in_a_region_asks_a_policy_whether_it_has_an_attribute() -> None:
    source = Path(hyper_parallel.__file__).parent
    folders = [*source.glob("platform/*/regions"), *source.glob("platform/*/planner"), source / "core" / "regions"]
    assert len(folders) == 5
    found = {
        f"{path.relative_to(source)}:{line}"
        for folder in folders
        for path in folder.rglob("*.py")
        for line in _asks_by_text(ast.parse(path.read_text()))
    }
    assert found == set()
    assert list(_asks_by_text(ast.parse('getattr(self._policy, "is_pure", False)'))) == [1]
