"""The function that a region calls: whose it is, how it is named, and what its earlier calls have shown.

What is known outlives the calls, and ends with the module (or with the code of a function): the looks of the ops of the
last call, the proof that nothing happens beside them (rules 8 and 9 in the README of this folder), and whether leaving
ops out did no harm (rule 5).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.regions.functions import bare, engine_key, identity, region_name
from hyper_parallel.core.regions.policy import NO_ANSWERS, Answer, RegionPolicy
from hyper_parallel.platform.torch.regions.compiled_code import is_compiled
from hyper_parallel.platform.torch.regions.module_paths import (
    ModulePaths,
    modules_in,
    paths_below,
    paths_here,
)
from hyper_parallel.platform.torch.regions.recording import Record
from hyper_parallel.platform.torch.regions.values import KnownOp, known_ops

# Functions and modules that have been replayed with ops left out: nothing in them reads what no op needs.
_leaves_out: weakref.WeakSet[Any] = weakref.WeakSet()


class Proof:
    """Whether a function does anything that the ops of its record do not tell; None until somebody has looked."""

    has_unseen: bool | None = None


class _Known(NamedTuple):
    """What the ops of a function's last call looked like, and what the names of their modules depend on."""

    paths: ModulePaths | None
    answers: dict[int, CheckpointPolicy]  # of the policy, which itself may lead to anything
    ops: list[KnownOp | None]
    proof: Proof  # of these ops
    choices: list[Answer] | None = None  # of a plan about these ops; None: there is none, or it must be asked

    def names(self, paths: ModulePaths | None, answers: dict[int, CheckpointPolicy]) -> bool:
        """Whether the names hold for a call under these."""
        return self.paths is paths and self.answers is answers


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


class RegionFunction:
    """A function in one call.

    Attributes:
        call: the function itself
        module: what it is, or is a method of; None for all other functions
        modules: that, and all in it
        key: unlike the name it tells two blocks of one class apart: the engine learns by it what a forward saves last
        proof: of the ops of the call before this one

    `is_planned`: ops are told apart by where they are in the module, whatever is around it.
    """

    def __init__(self, call: Callable[..., Any], policy: RegionPolicy | None, *, is_planned: bool = False) -> None:
        module = module_of(call)
        self.call = call
        self.module = module
        self.modules = [] if module is None else modules_in(module)
        self._paths = paths_here(module)
        self.name = region_name(call, module, self._paths)
        if is_planned and module is not None:
            self._paths = paths_below(module, self.name)
        self._identity = identity(call, module)
        self.key = engine_key(self.name, self._identity)
        self._policy = policy
        self._answers = NO_ANSWERS if policy is None else policy.answers
        self._known = _known.get(self._identity) or _Known(None, NO_ANSWERS, [], Proof())
        self.proof = self._known.proof

    def new_record(self, keeps_random_state: bool) -> Record:
        policy, known = self._policy, self._known
        asks = policy is not None and policy.is_asked
        has_names = known.names(self._paths, self._answers)
        choices = known.choices if has_names else None
        has_names &= not asks or choices is not None
        return Record(policy, self._paths, keeps_random_state, known=known.ops, has_names=has_names, choices=choices)

    def note_ops(self, record: Record) -> None:
        """Remember what the ops of this call look like, for the next."""
        has_news = record.has_news()
        if has_news or not self._known.names(self._paths, self._answers):
            proof = Proof() if has_news else self.proof
            known = known_ops(record.ops)
            _known[self._identity] = _Known(self._paths, self._answers, known, proof, self._choices(record))

    def _choices(self, record: Record) -> list[Answer] | None:
        """What a plan said about each op, if it would say the same about any op that looks so: it knew all, and no module was called twice."""
        if self._policy is None or not self._policy.is_as_planned or any(op.where.call for op in record.ops):
            return None
        choices = [op.policy for op in record.ops if op.policy is not None]
        return choices if len(choices) == len(record.ops) else None

    def note_left_out(self, is_missed: bool) -> None:
        """Ops were left out of a replay, and something read what they would have made, or nothing did."""
        if is_missed:
            _leaves_out.discard(self._identity)
        else:
            _leaves_out.add(self._identity)

    def has_left_out(self) -> bool:
        """Whether it has run again with ops left out, and nothing missed them."""
        return self._identity in _leaves_out

    def reads_by_ops_only(self) -> bool:
        """Whether nothing in it reads what no op needs. Functions may do something else each time; modules rarely do."""
        return self.module is not None and self.has_left_out()

    def has_hooks(self) -> bool:
        """Whether somebody looks at what the modules in it are given, or give."""
        return has_hooks(self.modules)

    def is_compiled(self) -> bool:
        """Whether code in it was made by `torch.compile`, whatever the backend."""
        return any(map(is_compiled, self.modules))


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether somebody looks at what these modules are given, or give."""
    # The region's module itself may be called with hooks around it: those inside its forward matter.
    for each in modules:
        attributes = each.__dict__
        before, after = attributes.get("_forward_pre_hooks"), attributes.get("_forward_hooks")
        if not before and not after:
            continue
        # Those of tensor parallel and of FSDP2 redistribute and gather: they do not look.
        if any(
            not (getattr(hook, "__module__", None) or "").startswith("torch.distributed.")
            for hook in (*(before or {}).values(), *(after or {}).values())
        ):
            return True
    return False


def module_of(function: object) -> nn.Module | None:
    function = bare(function)
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
