"""Calls of everything public with values that make no sense. Each must end in words of ours, or work; nothing may fail in the depth.

    python -m support.wrong_values torch 0 8744      # framework, seeds; prints what failed raw, as JSON

A case is a seed: which call, which of its arguments are wrong, and with what. The others are plausible, so that calls get past their first line.
What a case may end in: a result; an error of our tree; Python's own TypeError at the call itself (number of arguments, abstract classes); what a
user's own function raises; memory that is not there.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import hyper_parallel as hp
from hyper_parallel._base.errors import HyperParallelError, describe
from hyper_parallel.platform.contract import OPERATIONS

SOURCE = str(Path(hp.__file__).parent)


class OwnError(Exception):
    """Of the "user"."""


class NoRepr:
    def __repr__(self) -> str:
        raise OwnError("repr")


class NoHash:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


class NoAttributes:
    def __getattr__(self, name: str) -> Any:
        raise OwnError(name)


class NoTruth:
    def __bool__(self) -> bool:
        raise OwnError("bool")

    def __eq__(self, other: object) -> Any:
        return self

    __hash__ = object.__hash__


def own_function(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else None


def raising(*args: Any, **kwargs: Any) -> Any:
    raise OwnError("called")


# Made anew for each call. Sizes are either small, or so large that no machine has them.
WRONG: list[Callable[[], Any]] = [
    lambda: None, lambda: True, lambda: 0, lambda: -1, lambda: 7, lambda: 10**30, lambda: -(2**63), lambda: 2**62, lambda: 2.5, lambda: float("nan"),
    lambda: float("inf"), lambda: 1j, lambda: "", lambda: "text", lambda: "a\0b", lambda: "\ud800", lambda: b"bytes", list, lambda: [None],
    lambda: ["a", 2], lambda: [-3], lambda: [2.5], lambda: (), lambda: (1, 2, 3), dict, lambda: {"a": 1}, lambda: {1: "a"}, lambda: {3},
    lambda: object(), lambda: NoHash, lambda: np.zeros((2, 3)), lambda: np.float32(2), lambda: np.array(["a"]), NoRepr, NoHash, NoAttributes, NoTruth,
    lambda: [NoRepr()], lambda: {"a": NoHash()}, lambda: own_function, lambda: raising, lambda: range(3), lambda: iter(()), lambda: slice(1, 2),
    lambda: Ellipsis, lambda: [[1], [2, 3]], lambda: lambda: 1,
]  # fmt: skip


# What frameworks say when their own check names the argument, or when memory is not there.
_ALLOWED = re.compile(
    r"NoHash\(\) takes no arguments|<lambda>\(\) takes 0 positional|\w+\(\): argument '|received an invalid combination of arguments|not enough memory|allocate"
)


class Call(NamedTuple):
    name: str
    make: Callable[[], Callable[..., Any]]  # a bound method gets a new object in each case


class Words:
    """What is plausible, by the name of an argument."""

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.platform: Any = getattr(hp, f"get_{framework}_platform")()
        self.mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))

    def tensor(self) -> Any:
        if self.framework == "torch":
            import torch

            return torch.ones(2, 4)
        import mindspore

        return mindspore.Tensor(np.ones((2, 4), np.float32))

    def module(self) -> Any:
        if self.framework == "torch":
            from torch import nn

            return nn.Sequential(nn.Linear(4, 4))
        from mindspore import nn as cells

        return cells.SequentialCell(cells.Dense(4, 4))

    def parameter(self) -> Any:
        return next(
            iter(
                self.platform.parameters_dict(self.module()).values()
                if self.framework == "torch"
                else self.module().get_parameters()
            )
        )

    def of_the_framework(self, thing: Any) -> set[str]:
        """What a module or tensor of ours hands on to the framework's: its words are those that its users know."""
        return {
            name for kind in type(thing).__mro__ if kind.__module__.startswith(self.framework) for name in vars(kind)
        }

    def wrong(self) -> list[Callable[[], Any]]:
        return [
            *WRONG,
            self.tensor,
            self.module,
            lambda: [self.tensor()],
            self.parameter,
            lambda: self.platform,
            lambda: self.mesh,
        ]

    def plausible(self, name: str) -> Any:
        tensors = "tensor data x input_tensor input_data param obj a b"
        known: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(tensors.split(), self.tensor), **dict.fromkeys(["module", "cell", "model"], self.module),
            "tensors": lambda: [self.tensor()], "container": lambda: [self.tensor()], "tree": lambda: {"a": 1}, "parameters": lambda: [self.parameter()],
            "param": self.parameter, "new_param": self.parameter, "fn": lambda: own_function, "function": lambda: own_function, "hook": lambda: own_function,
            "size": lambda: [2, 2], "shape": lambda: [2, 2], "size_list": lambda: [2, 2], "tensor_shape": lambda: [2, 2], "param_shape": lambda: [2, 2],
            "output_shape": lambda: [2, 4], "dtype": lambda: "float32", "cast_type": lambda: "float32", "dtype_str": lambda: "float32",
            "tensor_type": lambda: self.tensor().dtype, "param_type": lambda: self.tensor().dtype, "device": lambda: "cpu", "requires_grad": lambda: True,
            "mesh": lambda: self.mesh, "placements": lambda: [hp.Shard(0)], "layout": lambda: hp.layout("dp", None, mesh=self.mesh), "budget": lambda: "100%",
            "batch": self.tensor, "loss_fn": lambda: lambda y: y.sum(), "progress": lambda: False, "start": lambda: 0, "end": lambda: [2, 4],
            "begin": lambda: [0, 0], "stride": lambda: [1, 1], "dim": lambda: 0, "split_dim": lambda: 0, "split_size": lambda: 2, "index": lambda: 0,
            "group": lambda: None, "group_info": lambda: None, "rank_list": lambda: [0], "src": lambda: 0, "dst": lambda: 0, "op": lambda: "sum",
            "fill_value": lambda: 1.0, "max_norm": lambda: 1.0, "name": lambda: "text", "policy_fn": lambda: None, "micro_batch_num": lambda: 2,
            "param_name": lambda: "0.weight", "plan": dict, "device_type": lambda: "cpu", "mesh_shape": lambda: [1], "path": lambda: "a.json",
            "file_path": lambda: "a.safetensors", "make_batch": lambda: lambda n: self.tensor(), "at_most": lambda: 2, "step_fn": lambda: own_function,
            "verify": lambda: False,
        }  # fmt: skip
        return known.get(name, lambda: None)()


def calls(words: Words) -> list[Call]:
    found = [
        Call(f"platform.{each.name}", lambda name=each.name: getattr(words.platform, name))  # type: ignore[misc]
        for each in OPERATIONS
    ]
    for name in hp.__all__:
        value = getattr(hp, name)
        if inspect.ismodule(value):
            found += [
                Call(f"{name}.{each}", lambda each=member: each)
                for each, member in vars(value).items()
                if _is_ours(each, member, value)
            ]
        elif callable(value) and name not in _LEFT_OUT and not _is_error(value):
            found.append(Call(name, lambda value=value: value))
    objects = _objects(words)
    for name, make in objects.items():
        thing = make()
        for member in dir(type(thing)):
            special = member in ("__call__", "__eq__", "__or__", "__and__", "__getitem__", "__contains__")
            method = getattr(type(thing), member, None)
            if member in words.of_the_framework(thing) or (name, member) == ("plan", "report"):  # solves for 15 s
                continue
            if (special or not member.startswith("_")) and callable(method) and _lies_in_ours(type(thing), member):
                found.append(Call(f"{name}.{member}", lambda make=make, member=member: getattr(make(), member)))
    found.append(Call("describe", lambda: describe))
    return found


_LEFT_OUT = ("get_platform", "get_torch_platform", "get_mindspore_platform", "Platform")  # they have no arguments


def _is_error(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Exception)


def _is_ours(name: str, member: Any, module: Any) -> bool:
    return (
        not name.startswith("_")
        and callable(member)
        and getattr(member, "__module__", "").startswith("hyper_parallel.core.activation")
    )


def _lies_in_ours(kind: type, member: str) -> bool:
    owner = next((each for each in kind.__mro__ if member in vars(each)), object)
    return owner.__module__.startswith("hyper_parallel")


def _objects(words: Words) -> dict[str, Callable[[], Any]]:
    from hyper_parallel.core.activation_checkpoint.matchers import Matcher

    matmuls = hp.policies.matmuls
    assert isinstance(matmuls, Matcher)
    found: dict[str, Callable[[], Any]] = {
        "mesh": lambda: words.mesh,
        "layout": lambda: hp.layout("dp", None, mesh=words.mesh),
        "shard": lambda: hp.Shard(0),
        "partial": lambda: hp.Partial(),
        "matcher": lambda: matmuls,
        "policy": lambda: hp.policies.save(matmuls),
        "manager": hp.SwapManager,
        "storage": hp.Storage,
        "swap_tensor": lambda: hp.SwapTensor(words.tensor()),
        "coordinator": lambda: hp.HookCoordinator(timeout=0.05),
        "wrapper": lambda: hp.checkpoint_wrapper(words.module()),
        "einsum_rule": lambda: hp.EinsumRule("campaign", "ab,bc->ac"),
        "dtensor": lambda: hp.distribute_tensor(words.tensor(), words.mesh, [hp.Shard(0)]),
    }
    with contextlib.suppress(ImportError):
        from support.made_plans import plan_of

        found["plan"] = plan_of
    usable = {}
    for name, make in found.items():
        with contextlib.suppress(HyperParallelError, TypeError):
            make()
            usable[name] = make
    return usable


def arguments(rng: random.Random, words: Words, function: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
    """At least one of them wrong."""
    wrong = words.wrong()
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [rng.choice(wrong)() for _ in range(rng.randint(0, 3))], {}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    given = [each for each in parameters if each.default is each.empty or rng.random() < 0.3]
    bad = {rng.randrange(len(given))} if given else set()
    bad |= {number for number in range(len(given)) if rng.random() < 0.15}
    by_name = False
    for number, each in enumerate(given):
        value = rng.choice(wrong)() if number in bad else words.plausible(each.name)
        if each.kind is each.VAR_POSITIONAL:
            args += [value for _ in range(rng.randint(0, 2))] if not by_name else []
        elif each.kind is each.VAR_KEYWORD:
            kwargs |= {rng.choice(("unknown", "dtype", "mesh")): value} if rng.random() < 0.3 else {}
        elif each.kind is each.KEYWORD_ONLY or (by_name and each.kind is not each.POSITIONAL_ONLY):
            kwargs[each.name] = value
        else:
            skipped = parameters.index(each) > len(args)
            if skipped:
                by_name, kwargs[each.name] = True, value
            else:
                args.append(value)
    return args, kwargs


def outcome(words: Words, call: Call, seed: int) -> str:
    """ "": fine. Else what was raised raw, and where."""
    rng = random.Random(seed)
    shown = call.name
    try:
        function = call.make()
        args, kwargs = arguments(rng, words, function)
        shown = f"{call.name}({', '.join([*map(describe, args), *(f'{name}={describe(value)}' for name, value in kwargs.items())])})"
        here = function(*args, **kwargs) if callable(function) else None
        if hasattr(here, "undo"):
            here.undo()
        elif inspect.isgenerator(here):
            here.close()
    except (HyperParallelError, OwnError, MemoryError):
        return ""
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame for frame in frames if frame.filename.startswith(SOURCE)]
        if not inside or _is_own(error) or any(map(_is_a_model, frames)) or _ALLOWED.search(str(error)):
            return ""
        last = inside[-1]
        if isinstance(error, OSError) and error.filename:
            return ""
        if last.filename.endswith("activation_checkpoint/transparent.py"):  # hands on what the user's own module says
            return ""
        place = f"{last.filename.removeprefix(SOURCE)[1:]}:{last.lineno}"
        depth = "" if frames[-1] is last else f" < {Path(frames[-1].filename).name}:{frames[-1].lineno}"
        return f"{place}{depth}: {type(error).__name__}: {str(error).strip()[:110]!r} in {shown[:230]}"
    return ""


def _is_a_model(frame: traceback.FrameSummary) -> bool:
    """Where a framework calls a module of the user's, who has to know what that takes."""
    return frame.name == "_call_impl" or (
        frame.name == "__call__" and frame.filename.endswith(("cell.py", "_checkparam.py"))
    )


def _is_own(error: BaseException) -> bool:
    """Whether what a user's object raised is all there is to it."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OwnError):
            return True
        at = at.__cause__ or at.__context__
    return False


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """What wrong calls may write to or print."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                yield
        finally:
            os.chdir(before)


def run(framework: str, seeds: range) -> list[str]:
    """What failed raw; the same calls for all frameworks, each in its turn."""
    with surroundings():
        words = Words(framework)
        every = calls(words)
        return [said for seed in seeds if (said := outcome(words, every[seed % len(every)], seed))]


if __name__ == "__main__":
    print("\n" + json.dumps(run(sys.argv[1], range(int(sys.argv[2]), int(sys.argv[3])))))
