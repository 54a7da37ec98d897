"""Checks of arguments that both backends make in the same words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, HyperParallelError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.platform.communication.answers import ranks_in_words
from hyper_parallel.platform.opaque import Module, Tensor


def check_size(size: object, name: str = "size") -> tuple[int, ...]:
    """Return a size as a tuple; it must be one tuple or list of whole numbers."""
    if not isinstance(size, (tuple, list)):
        raise ArgumentTypeError(f"`{name}` is one tuple or list.", expected="for example (2, 3)", got=describe(size))
    lengths = [as_int(number) for number in size]
    if any(length is None or length < 0 for length in lengths):
        raise ArgumentError(
            f"`{name}` holds the length of each dim.", expected="whole numbers from 0", got=describe(size)
        )
    return tuple(length for length in lengths if length is not None)


def check_flag(value: object, name: str) -> bool:
    if type(value) is not bool:
        raise ArgumentTypeError(f"`{name}` is yes or no.", expected="True or False", got=describe(value))
    return value


@contextmanager
def in_our_words(call: str, **arguments: Any) -> Iterator[None]:
    """Put errors of a call of the framework's, made inside of the block, into our words, with the call's arguments.

    For calls that check their arguments themselves. What the framework says about memory, which no argument is to blame
    for, stays as it is.
    """
    try:
        yield
    except HyperParallelError:
        raise
    except (
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        AssertionError,
        IndexError,
        RuntimeError,
        SystemError,
    ) as error:
        said = str(error).strip().partition("\n")[0]
        if "memory" in said.lower() or (type(error) is not RuntimeError and isinstance(error, RuntimeError)):
            raise
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
        raise kind(
            f"`{call}` cannot be carried out with these arguments.",
            got=", ".join(f"{name}={describe(value)}" for name, value in arguments.items()),
            where=f"in the framework's words: {said}",
        ) from error


def check_tensors(tensors: object, tensor_type: type, call: str) -> list[Any]:
    """Return several tensors as a list; they must come as a non-empty list or tuple."""
    if isinstance(tensors, tensor_type) or not isinstance(tensors, (list, tuple)):
        raise ArgumentTypeError(
            f"`{call}` takes several tensors.", expected="a list or tuple of tensors", got=describe(tensors)
        )
    if not tensors:
        raise ArgumentError(f"`{call}` takes several tensors.", expected="at least one", got="none")
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, tensor_type):
            raise ArgumentTypeError(
                f"`{call}` takes tensors only.", expected="a tensor", got=describe(tensor), where=f"position {position}"
            )
    return list(tensors)


def check_tensor(tensor: Tensor, tensor_type: type, call: str) -> Any:
    if not isinstance(tensor, tensor_type):
        raise ArgumentTypeError(f"`{call}` takes a tensor.", expected="a tensor", got=describe(tensor))
    return tensor


def check_module(module: Module, module_type: type, call: str) -> Any:
    if module is None:  # a ValueError: the argument was forgotten rather than mistaken
        raise ArgumentError(f"`{call}` needs a module.", expected=f"a {_path(module_type)}", got="None")
    if not isinstance(module, module_type):
        raise ArgumentTypeError(f"`{call}` needs a module.", expected=f"a {_path(module_type)}", got=describe(module))
    return module


def check_hook(module: Module, module_type: type, hook: object, call: str, **flags: Any) -> None:
    check_module(module, module_type, call)
    if not callable(hook):
        raise ArgumentTypeError(f"`{call}` takes a function.", expected="a callable", got=describe(hook))
    for name, value in flags.items():
        check_flag(value, name)


def check_stage_index(stage_index: object) -> int:
    stage = as_int(stage_index)
    if stage is None or stage < 0:
        raise ArgumentError("Stages are counted from 0.", expected="a stage of at least 0", got=describe(stage_index))
    return stage


def cache_key(ranks: Sequence[int]) -> str:
    """Return the key under which a group of these ranks is kept."""
    return str(tuple(sorted(ranks)))


def check_ranks(ranks: object, among: Sequence[int] | None, call: str, *, or_none: bool = False) -> tuple[int, ...]:
    """Return world ranks, sorted. Each stands there once and is in `among`; there is at least one, unless `or_none`."""
    if isinstance(ranks, (str, bytes)) or not hasattr(ranks, "__iter__"):
        raise ArgumentTypeError(
            f"`{call}` takes a list of world ranks.", expected="for example [0, 1]", got=describe(ranks)
        )
    given = list(ranks)
    found = [rank for rank in map(as_int, given) if rank is not None and (among is None or rank in among)]
    if len(found) != len(given):
        known = "whole numbers" if among is None else ranks_in_words(list(among))
        wrong = next(rank for rank in given if as_int(rank) not in found)
        raise ArgumentError(f"`{call}` got a rank that is not there.", expected=known, got=describe(wrong))
    if (not found and not or_none) or len(set(found)) != len(found):
        raise ArgumentError(
            f"`{call}` takes each rank once.", expected="at least one rank, and none twice", got=describe(given)
        )
    return tuple(sorted(found))


def check_same_shape(expected: Sequence[int], got: Sequence[int], call: str) -> None:
    if tuple(expected) != tuple(got):
        raise ArgumentError(
            f"`{call}` copies values of one shape.", expected=f"shape {list(expected)}", got=f"shape {list(got)}"
        )


def unknown_name(what: str, value: object, accepted: Iterable[str]) -> ArgumentError:
    return ArgumentError(what, expected="one of " + ", ".join(accepted), got=describe(value))


def _path(cls: type) -> str:
    return f"{cls.__module__.partition('.')[0]} {cls.__name__}"


def check_parameters(parameters: object, tensor_type: type, call: str) -> list[Any]:
    """Return tensors that come in any iterable as a list."""
    found = list(parameters) if hasattr(parameters, "__iter__") else [parameters]
    for value in found:
        if not isinstance(value, tensor_type):
            raise ArgumentTypeError(f"`{call}` takes a module or tensors.", expected="tensors", got=describe(value))
    return found


def check_norm_arguments(max_norm: Any, norm_type: Any) -> float:
    """Return the order of the norm as a float; `max_norm` must be a number that is not negative."""
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        try:
            number = float(value)
        except Exception:  # a text, a tensor of several, what raises on its own
            raise ArgumentTypeError(f"`{name}` is a number.", expected="a number", got=describe(value)) from None
        if number != number or number < 0 or (name == "norm_type" and number == 0):
            raise ArgumentError(f"`{name}` is a positive number.", expected="above 0", got=describe(value))
    return float(norm_type)


def found_parameter(result: object, search: Callable[[str], Any], new_param: object, parameter_type: type) -> Any:
    """Return which parameter to replace: `(owner, local name, parameter)`.

    None if a path, given as `(name, parameter)`, leads to none.
    """
    if not isinstance(new_param, parameter_type):
        raise ArgumentTypeError(
            "A parameter is replaced by a parameter.", expected="a Parameter", got=describe(new_param)
        )
    if isinstance(result, tuple) and len(result) == 3:
        return result
    if isinstance(result, tuple) and len(result) == 2:
        return search(result[0])
    raise ArgumentTypeError(
        "`result` says which parameter to replace.",
        expected="what `search_parameter_by_name` returned, or (name, parameter)",
        got=describe(result),
    )
