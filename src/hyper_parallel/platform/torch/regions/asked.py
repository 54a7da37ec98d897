"""What a function asks PyTorch for, call by call: the numbers it gives, and which tensors. The same again gives the same again.

A dispatch mode would show every op, and costs the host as much as the ops do. A function mode shows what Python calls,
which is less by half, and costs less for each. So where nobody watches the ops of a region (an unwatched forward,
PyTorch's own checkpoint), this is what is compared: rule 18 in the README of this folder.

    with Asking(inputs, last) as asking:          # the forward
        function(*args)
    asked = asking.asked()
    ...
    with AskingAgain(asked, inputs, name) as again:   # in backward
        function(*args)
    again.check_end()

Tensors are numbered as they are met: the inputs, what calls give, what comes from outside. A call of the second run must
be the next call of the first one, with the same numbers in it. The first run may have had calls before that one which
the second need not make: a table that is there by now.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from hyper_parallel._base.errors import StateError
from hyper_parallel.platform.torch.regions.local_parts import PLAIN_TYPES, storage_key, version_of
from hyper_parallel.platform.torch.regions.saved_tensors import changed_in_place
from hyper_parallel.platform.torch.regions.surroundings import num_begun

_Tensor, _Parameter = torch.Tensor, nn.Parameter
_Access = types.MethodWrapperType  # `x.shape`, `x.data`, `x.requires_grad = ...`
# They stand for themselves in a note, as there is one type that equals them only.
_PLAIN = frozenset({str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis)})
_MOST_BYTES = 1 << 18  # of a tensor from outside that lies on the CPU and may be made anew: its contents are noted
_weak = weakref.ref
_detach, _set_grad_enabled = torch.Tensor.detach, torch._C._set_grad_enabled
_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


class Outside(NamedTuple):
    """A tensor that none of the noted calls gave.

    Attributes:
        ref: to it
        version: when the forward was over
        look: what can be told of it when it is gone: type, size, and the contents or the node that made it
        is_made: by something in the function that no function mode sees, such as a custom function or a kernel
    """

    ref: weakref.ref[torch.Tensor]
    version: int
    look: Any
    is_made: bool


class Asked(NamedTuple):
    """Of one run.

    Attributes:
        notes: of each call
        firsts: the number of the first tensor that each call gave; negative (-1 - number) where a second run may do without the call
        alive: the tensors that were there when the run was over, by id
        outside: by number
    """

    notes: list[Any]
    firsts: list[int]
    alive: dict[int, tuple[weakref.ref[torch.Tensor], int]]
    outside: dict[int, Outside]


class _Run(TorchFunctionMode):
    """Fields:
    _numbers: id -> the tensor and its number; an id may be that of another tensor by now
    is_paused: what is called now is not the function's
    """

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.is_paused = False
        self._numbers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._next = 0
        self._sequence = torch.autograd._get_sequence_nr()
        for each in inputs:
            self._number(each)

    def _number(self, tensor: torch.Tensor) -> int:
        number = self._next
        self._next = number + 1
        self._numbers[id(tensor)] = _weak(tensor), number
        return number

    def _nth(self, tensor: torch.Tensor) -> tuple[int]:
        """What stands for a tensor in a note."""
        entry = self._numbers.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return (entry[1],)
        return (self._met(tensor),)

    def _met(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that comes from outside."""
        raise NotImplementedError

    def _note(self, func: object, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, ...]:
        note = [func]
        numbers = self._numbers
        for each in args:
            kind = type(each)
            if kind is _Tensor or kind is _Parameter:
                entry = numbers.get(id(each))
                if entry is not None and entry[0]() is each:
                    note.append((entry[1],))
                else:
                    note.append((self._met(each),))
            elif kind is int or kind in _PLAIN:
                note.append(each)
            elif kind is float or kind is bool:
                note.append((kind, repr(each)))
            else:
                note.append(self._part(each))
        if kwargs:
            for name, each in kwargs.items():
                note += name, self._part(each)
        return tuple(note)

    def _part(self, value: Any) -> Any:
        """What is compared of an argument."""
        kind = type(value)
        if kind is int or kind in _PLAIN:
            return value
        if kind is _Tensor or isinstance(value, torch.Tensor):
            return self._nth(value)
        if isinstance(value, (bool, int, float, complex)):
            return kind, repr(value)  # 0.0 and -0.0 are two numbers, as are 1 and True; nan is one
        if isinstance(value, (list, tuple)):
            return kind, *map(self._part, value)
        if kind is slice:
            return slice, self._part(value.start), self._part(value.stop), self._part(value.step)
        if isinstance(value, dict):
            return dict, *(
                (name if type(name) is str else repr(name), self._part(each)) for name, each in value.items()
            )
        if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            return kind, getattr(value, "shape", None), str(value.dtype), hash(value.tobytes())
        return kind

    def _gave(self, result: object) -> None:
        kind = type(result)
        if kind is _Tensor or isinstance(result, torch.Tensor):
            entry = self._numbers.get(id(result))
            if entry is None or entry[0]() is not result:
                self._number(result)
        elif isinstance(result, (list, tuple)):
            for each in result:
                self._gave(each)

    def aside(self, hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """A hook of ours on what autograd saves: what it calls is not the function's."""

        def call(tensor: torch.Tensor) -> Any:
            was_paused, self.is_paused = self.is_paused, True
            try:
                return hook(tensor)
            finally:
                self.is_paused = was_paused

        return call

    def _made_here(self, tensor: torch.Tensor) -> bool:
        node = tensor.grad_fn
        return node is not None and node._sequence_nr() >= self._sequence


def _is_of_hook(func: object) -> bool:
    """Whether a hook of PyTorch's checkpoint calls, and not the function; or whoever, only whether there are gradients, which changes no value."""
    if func is _set_grad_enabled:
        return True
    return func is _detach and sys._getframe(2).f_code.co_filename == _CHECKPOINT_FILE


class Asking(_Run):
    """The first run. `last`: notes of the call before this one, with which this one shares what is the same."""

    def __init__(self, inputs: Iterable[torch.Tensor], last: list[Any] | None) -> None:
        super().__init__(inputs)
        self._known = last or []
        self._notes: list[Any] | None = None  # None: so far as known
        self._firsts: list[int] = []
        self._met_outside: list[tuple[int, Any, bool]] = []  # number, look, whether it is made here
        self._refs: list[weakref.ref[torch.Tensor]] = []  # to them

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_paused or ((func is _detach or func is _set_grad_enabled) and _is_of_hook(func)):
            return func(*args, **kwargs) if kwargs else func(*args)
        if type(func) is _Access and func.__name__ == "__get__":
            found = func(*args)
            if not isinstance(found, torch.Tensor):
                return found
            note = func.__self__, self._nth(args[0])
            first = self._next
            self._gave(found)
            self._add(note, first)
            return found
        note = self._note(func, args, kwargs)
        result = func(*args, **kwargs) if kwargs else func(*args)
        first = self._next
        if type(result) is _Tensor and id(result) not in self._numbers:  # as most are
            self._next = first + 1
            self._numbers[id(result)] = _weak(result), first
            self._add(note, first if result.requires_grad else -1 - first)
            return result
        self._gave(result)
        self._add(note, first if self._is_needed(result, first) else -1 - first)
        return result

    def _is_needed(self, result: object, first: int) -> bool:
        """Whether a second run must make the call: it has a gradient, or wrote something."""
        if isinstance(result, torch.Tensor):
            return self._next == first or result.requires_grad
        if isinstance(result, (list, tuple)):
            return any(self._is_needed(each, first) for each in result if isinstance(each, torch.Tensor))
        return result is None

    def _add(self, note: object, first: int) -> None:
        number = len(self._firsts)
        self._firsts.append(first)
        known, notes = self._known, self._notes
        if notes is not None:
            notes.append(note)
        elif number >= len(known) or known[number] != note:
            self._notes = [*known[:number], note]

    def _met(self, tensor: torch.Tensor) -> int:
        number = self._number(tensor)
        if type(tensor) is _Parameter:
            self._met_outside.append((number, _Parameter, False))
        else:
            is_made = self._made_here(tensor)
            self._met_outside.append((number, _look(tensor, is_made=is_made), is_made))
        self._refs.append(self._numbers[id(tensor)][0])
        return number

    def asked(self) -> Asked:
        """The run is over."""
        outside = {}
        for (number, look, is_made), ref in zip(self._met_outside, self._refs, strict=True):
            tensor = ref()
            outside[number] = Outside(ref, -1 if tensor is None else version_of(tensor), look, is_made)
        alive = {key: entry for key, entry in self._numbers.items() if entry[0]() is not None}
        self._numbers = {}  # hooks that autograd keeps lead here
        notes = self._notes
        if notes is None:
            notes = self._known if len(self._firsts) == len(self._known) else self._known[: len(self._firsts)]
        return Asked(notes, self._firsts, alive, outside)


class AskingAgain(_Run):
    """The second run. `checks_outside`: whether parameters are the user's own, and not exchanged by who shards them.

    Raises:
        StateError: it asks for something else.
    """

    def __init__(
        self, asked: Asked, inputs: Sequence[torch.Tensor], where: str, *, checks_outside: bool, may_skip: bool = True
    ) -> None:
        super().__init__(inputs)
        self._asked = asked
        self._where = where
        self._checks_outside = checks_outside
        self._may_skip = may_skip
        self._position = 0
        self._unmet = list(asked.outside)
        self._begun = num_begun()
        # Makes the error that was raised. Not the error: it has frames that have tensors whose graph leads here.
        self._error: Callable[[], StateError] | None = None
        self._strangers = -1  # tensors that the first run did not have

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_paused or ((func is _detach or func is _set_grad_enabled) and _is_of_hook(func)):
            return func(*args, **kwargs) if kwargs else func(*args)
        if type(func) is _Access and func.__name__ == "__get__":
            found = func(*args)
            if not isinstance(found, torch.Tensor):
                return found
            self._meet((func.__self__, self._nth(args[0])))
            self._gave(found)
            return found
        note = self._note(func, args, kwargs)
        position = self._position
        asked = self._asked
        if position < len(asked.notes) and asked.notes[position] == note:
            first = asked.firsts[position]
            self._next = first if first >= 0 else -1 - first
            self._position = position + 1
        else:
            self._meet(note)
        result = func(*args, **kwargs) if kwargs else func(*args)
        self._gave(result)
        return result

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)
        # The function may have caught it.
        if self._error is not None and not isinstance(error, StateError):
            raise self._error()

    def check_end(self) -> None:
        """The function has come to its end."""
        if self.is_paused:
            return
        rest = self._asked.firsts[self._position :]
        if any(first >= 0 for first in rest):
            self._raise(None)

    def _meet(self, note: object) -> None:
        notes, firsts = self._asked.notes, self._asked.firsts
        position = self._position
        while position < len(firsts) and notes[position] != note:
            if firsts[position] >= 0 or not self._may_skip:
                position = len(firsts)
                break
            position += 1
        if position >= len(firsts):
            if (
                num_begun() != self._begun
            ):  # a region inside, which was a plain call in the first run: what it calls itself is met here
                self.is_paused = True
                return
            self._raise(note)
        first = firsts[position]
        self._next = first if first >= 0 else -1 - first
        self._position = position + 1

    def _met(self, tensor: torch.Tensor) -> int:
        entry = self._asked.alive.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            number = entry[1]
            self._check_version(number, tensor)
        else:
            number = self._same_as(tensor)
        self._numbers[id(tensor)] = _weak(tensor), number
        return number

    def _same_as(self, tensor: torch.Tensor) -> int:
        is_made = self._may_skip and self._made_here(tensor)
        look = _look(tensor, is_made=is_made)
        for number in self._unmet:
            if _is_same(self._asked.outside[number], tensor, look, is_made=is_made):
                if not is_made:
                    self._check_version(number, tensor)
                self._unmet.remove(number)
                return number
        self._strangers -= 1
        return self._strangers

    def _check_version(self, number: int, tensor: torch.Tensor) -> None:
        seen = self._asked.outside.get(number)
        if seen is None or not (self._checks_outside or type(tensor) is not _Parameter):
            return
        then = seen.ref()
        if then is not None and version_of(then) != seen.version:
            where, version = f"{self._where}, which reads it again", version_of(then)
            self._error = functools.partial(changed_in_place, where, seen.version, version)
            raise self._error()

    def _raise(self, note: Any) -> NoReturn:
        position = self._position
        notes = self._asked.notes
        if note is not None:  # the call that it stands for, where there is one
            later = (index for index in range(position, len(notes)) if notes[index][0] == note[0])
            position = next(later, position) if self._may_skip else position
        expected = _words(notes[position]) if position < len(notes) else "the end of the function"
        got = "the end of the function" if note is None else _words(note)
        if got == expected:
            got = f"{got} with another tensor"
        self._error = functools.partial(
            StateError,
            "Recomputation did not do what forward did.",
            expected=expected,
            got=got,
            where=self._where,
            do="Let the function take the same way with the same numbers each time, or leave this block out of the plan (regions=).",
        )
        raise self._error()


def _look(tensor: torch.Tensor, *, is_made: bool) -> Any:
    kind = type(tensor)
    if kind is _Parameter:
        return kind
    if is_made:
        return kind, tensor.dtype, tensor.device, tuple(tensor.shape), tensor.grad_fn.name()
    contents = None
    if kind is _Tensor and tensor.is_cpu and tensor.layout is torch.strided and tensor.nbytes <= _MOST_BYTES:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            contents = hash(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return kind, tensor.dtype, tensor.device, tuple(tensor.shape), contents


def _is_same(then: Outside, tensor: torch.Tensor, look: object, *, is_made: bool) -> bool:
    """Whether a tensor that the first run did not have is one that it had, or is like one that is there no more."""
    if then.is_made or is_made:
        return then.is_made and is_made and then.look == look
    before = then.ref()
    if before is None:
        return bool(then.look == look) and type(tensor) is not _Parameter
    key = storage_key(tensor)
    if type(before) not in PLAIN_TYPES or type(tensor) not in PLAIN_TYPES or key is None:
        return False
    is_alias = (before.dtype, before.shape, before.stride(), before.storage_offset()) == (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
    )
    if is_alias and key == storage_key(before):
        return True
    if _Parameter in (type(before), type(tensor)) or before.dtype != tensor.dtype or before.device != tensor.device:
        return False
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return torch.equal(before, tensor)  # waits for the device, where one is there


def _words(note: Any) -> str:
    func, *parts = note
    name = getattr(func, "__name__", str(func))
    return f"{name}({', '.join(map(_word, parts))})"


def _word(part: object) -> str:
    if type(part) is tuple and len(part) == 1 and type(part[0]) is int:
        return "tensor"
    if type(part) is tuple and part and isinstance(part[0], type):
        if len(part) == 2 and issubclass(part[0], (bool, int, float, complex)):
            return str(part[1])
        words = ", ".join(map(_word, part[1:]))
        return f"[{words}]" if issubclass(part[0], (list, tuple)) else f"{part[0].__name__}({words})"
    return part.__name__ if isinstance(part, type) else repr(part)


__all__ = ["Asked", "Asking", "AskingAgain"]
