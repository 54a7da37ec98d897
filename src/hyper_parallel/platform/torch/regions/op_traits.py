"""What is known about an operator before it runs, whoever calls it with what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

CAST = torch.ops.aten._to_copy.default
_INVISIBLE = {torch.ops.aten.detach.default, torch.ops.prim.device.default}
# `recording` does more about them than about others.
_LOOKED_AT = {CAST, torch.ops.aten._cudnn_rnn.default}

# They share their input's memory and their schema does not say so.
_UNANNOTATED_VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh", "aten::alias"}
# They update the running statistics and their schema does not say so.
_BATCH_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
_RUNNING_STATISTICS: frozenset[int | str] = frozenset({3, 4, "running_mean", "running_var"})
# They change a tensor's storage itself, which no copy can stand for.
_CHANGES_STORAGE = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::set", "inductor::resize_storage_bytes_"}
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
# Every rank must take part, whatever this one needs.
_COLLECTIVES = ("c10d::", "_c10d_functional::", "c10d_functional::", "_dtensor::", "symm_mem::")
# What `torch.distributed` calls. All but these write what comes first, and their schema does not say so.
_LAUNCHES = "c10d::"
_WRITE_NOTHING = {"c10d::send", "c10d::barrier", "c10d::monitored_barrier_"}

_NO_DEFAULT = object()


@dataclass(frozen=True, slots=True, eq=False)
class OpTraits:
    """What is special about one operator: without another word, nothing is. Made once per operator, and never dropped: see `TRAITS`.

    Guarantees: all of it holds for every call of the operator. It depends on the operator and its schema alone, on no argument. `func` is
    held, so that no other operator gets its id. To read a field costs no call.

    Example:
        >>> traits = traits_of(torch.ops.aten.add_.Tensor)
        >>> sorted(traits.writes, key=str), traits.is_view, traits.is_common
        ([0, 'self'], False, False)
    """

    func: Any
    writes: frozenset[int | str] = frozenset()  # the arguments that it writes, by position and by name
    # Of its positional arguments, if PyTorch gives some of them in one call and not in another: see `trimmed`.
    defaults: tuple[Any, ...] = ()
    is_view: bool = False  # its result has the memory of an argument, which it does not write
    is_random: bool = False  # it may draw random numbers
    is_empty: bool = False  # its result has memory and no contents
    is_out: bool = False  # it writes into a result that it is given
    is_launch: bool = False  # it writes its first argument later: whoever waits for what it returns may read that
    is_invisible: bool = False  # autograd and checkpointing call it around ops: no policy is asked and nothing is made
    must_run: bool = False  # also where nothing needs what it makes
    has_schema: bool = True  # without one nobody knows what it writes
    call: Callable[..., Any] = field(init=False)  # runs it
    is_common: bool = field(init=False)  # there is nothing to do but to run it and to note it, and its random state

    def __post_init__(self) -> None:
        func = self.func
        is_overload = type(func) is torch._ops.OpOverload
        is_special = self.is_view or self.writes or self.must_run or self.is_empty or self.is_invisible
        object.__setattr__(self, "call", func._op if is_overload else func)  # what its __call__ calls
        object.__setattr__(self, "is_common", self.has_schema and not is_special and func not in _LOOKED_AT)


TRAITS: dict[int, OpTraits] = {}  # by the operator's id: its hash is written in Python


def traits_of(func: object) -> OpTraits:
    found = TRAITS.get(id(func))
    if found is None:
        found = TRAITS[id(func)] = _read_traits(func)
    return found


def _read_traits(func: Any) -> OpTraits:
    schema = getattr(func, "_schema", None)
    if schema is None:
        # A higher order operator (a compiled region) has no schema. Nobody says what it does, so assume that it draws random numbers.
        return OpTraits(func, is_random=True, has_schema=False)
    name = schema.name
    writes: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes |= {argument.name} if argument.kwarg_only else {position, argument.name}
    if name in _BATCH_NORMS:
        writes |= _RUNNING_STATISTICS
    is_launch = name.startswith(_LAUNCHES)
    if is_launch and name not in _WRITE_NOTHING:
        writes |= {0, schema.arguments[0].name}
    aliases = [output.alias_info for output in schema.returns]
    return OpTraits(
        func,
        writes=frozenset(writes),
        defaults=_defaults_of(schema),
        is_view=not writes and (name in _UNANNOTATED_VIEWS or any(alias is not None for alias in aliases)),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        is_empty=name in _EMPTY,
        is_out=any(argument.is_out for argument in schema.arguments),
        is_launch=is_launch,
        is_invisible=func in _INVISIBLE,
        must_run=name in _CHANGES_STORAGE or name.startswith(_COLLECTIVES),
    )


def _defaults_of(schema: Any) -> tuple[Any, ...]:
    """None in place of an optional tensor comes as an argument or not at all, depending on who calls: all before it then come or not, too."""
    arguments = [each for each in schema.arguments if not each.kwarg_only]
    if not any(str(each.type) == "Optional[Tensor]" and each.has_default_value() for each in arguments):
        return ()
    return tuple(each.default_value if each.has_default_value() else _NO_DEFAULT for each in arguments)


def trimmed(args: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments without those at the end that are as if they had not been given."""
    length = len(args)
    while length > 0:
        last, default = args[length - 1], defaults[length - 1]
        if isinstance(last, torch.Tensor) or type(last) is not type(default) or last != default:
            break
        length -= 1
    return args[:length]
