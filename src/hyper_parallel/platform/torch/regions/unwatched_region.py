"""A region whose forward runs without a dispatch mode: only what autograd saves comes to Python.

A mode costs the host more than the ops themselves; where an accelerator waits for the host, that is what a region costs.
What a call keeps, and what its second run leaves out, is known from an earlier call that was watched
(`unwatched_pattern`). That this one does the same is checked in the second run, op by op; where it does not, every op
runs again, and the next call is watched. See rules 13 to 18 in the README of this folder.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hyper_parallel._base.errors import StateError
from hyper_parallel._base.log import get_logger
from hyper_parallel.core.regions.arguments import SavedArguments
from hyper_parallel.core.regions.host_randomness import HostRandomness
from hyper_parallel.core.regions.policy import RegionPolicy
from hyper_parallel.core.swap.config import current_config
from hyper_parallel.platform.torch.regions.arguments import saved_arguments
from hyper_parallel.platform.torch.regions.asked import Asked, Asking, AskingAgain
from hyper_parallel.platform.torch.regions.attributes import as_noted, note_attributes
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
from hyper_parallel.platform.torch.regions.frame import EndOfPass
from hyper_parallel.platform.torch.regions.inputs import no_leaf
from hyper_parallel.platform.torch.regions.left_as_found import left_as_found
from hyper_parallel.platform.torch.regions.local_parts import PLAIN_TYPES, storage_key, version_of
from hyper_parallel.platform.torch.regions.module_paths import has_sharded_modules
from hyper_parallel.platform.torch.regions.placeholders import NeedsEverything, View
from hyper_parallel.platform.torch.regions.random_state import set_back, states_of
from hyper_parallel.platform.torch.regions.recomputation import reads_placeholder
from hyper_parallel.platform.torch.regions.region_function import has_hooks
from hyper_parallel.platform.torch.regions.replaying import AllFound
from hyper_parallel.platform.torch.regions.saved_tensors import changed_in_place
from hyper_parallel.platform.torch.regions.saved_values import aliased
from hyper_parallel.platform.torch.regions.surroundings import (
    ParametersOfModule,
    Surroundings,
    check_not_traced,
    check_surroundings,
    num_begun,
    replaying,
)
from hyper_parallel.platform.torch.regions.unwatched_pattern import (
    NotThePattern,
    Pattern,
    Watched,
    pattern_of,
)
from hyper_parallel.platform.torch.regions.unwatched_second_run import SecondMode, SecondRun
from hyper_parallel.platform.torch.swap.device import shown

_logger = get_logger("region")
_MOST_MISSES = 3  # calls that were not as the pattern says: then all are watched
_NO_PASS = -1  # what PyTorch gives as the number of the backward outside of one
_NOTHING = contextlib.nullcontext()
_strided = torch.strided


class UnwatchedRegion:
    """The calls of one region under one policy, which keeps some ops and swaps none.

    Set as the policy's `observer`, so that watched calls tell what they have seen. `is_dynamic`: sizes in it depend on values.
    """

    def __init__(self, *, is_dynamic: bool) -> None:
        self._is_dynamic = is_dynamic
        self._pattern: Pattern | None = None
        self._num_misses = 0
        self.last: list[Any] | None = None  # what the call before this one asked PyTorch for

    @property
    def is_unwatched(self) -> bool:
        """Whether the next call will be, if it is like the last."""
        return self._pattern is not None

    def observe(self, call: Watched) -> None:
        """A watched call is over."""
        if self._num_misses < _MOST_MISSES:
            self._pattern = pattern_of(call, is_dynamic=self._is_dynamic)

    def miss(self) -> None:
        """A call did something else than the pattern says."""
        self._pattern = None
        self._num_misses += 1

    def call(
        self, function: Callable[..., Any], policy: RegionPolicy, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        pattern = self._pattern
        if pattern is not None and _may_be_unwatched():
            with left_as_found():
                arguments = saved_arguments(args, kwargs)
                if pattern.fits(function, arguments.tensors):
                    frame = _Frame(self, function, pattern, arguments)
                    if frame.is_ordinary:
                        return frame.forward(args, kwargs)
        return checkpoint(function, *args, policy_fn=policy, **kwargs)


def _may_be_unwatched() -> bool:
    check_surroundings("A region")
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        and current_config().check is None
        and not has_sharded_modules()
    )


class _Frame:
    """One call. Residuals that are made again hold it; it holds none of them, and no autograd node.

    Fields:
        _views: of all that autograd saved; None where a second run may save something else
        _taken: what the second run takes, until it has; then only those residuals hold it that need it themselves
        _passes: number of the backward -> what it has made again and not given yet; guarded by `_lock`, as are second runs
    """

    def __init__(
        self, region: UnwatchedRegion, function: Callable[..., Any], pattern: Pattern, arguments: SavedArguments
    ) -> None:
        self.name = pattern.name
        self.is_as_seen = True
        self._region = region
        self._function = function
        self._pattern = pattern
        self._arguments = arguments
        self._inputs = [_Given(each) for each in arguments.tensors]
        self._surroundings = Surroundings()
        self._parameters = ParametersOfModule(pattern.module, pattern.modules)
        self._outside = self._parameters.tensors()
        self._versions = list(map(version_of, self._outside))
        self._random = states_of([each for each in arguments.tensors if not each.is_cpu])
        self._host_randomness: HostRandomness | None = HostRandomness()
        self._attributes = note_attributes(pattern.module, pattern.modules)
        self._num_saved = 0
        self._views: list[View | None] = []
        self._num_begun = num_begun()
        self._dropped: list[weakref.ref[_Dropped]] = []
        self._taken: dict[int, _Held | weakref.ref[_Held]] = {}
        self._lock = threading.RLock()
        self._passes: dict[int, dict[int, torch.Tensor]] = {}
        self._threads: dict[int, int] = {}  # number of the backward -> the thread it runs in
        self._asking = Asking(arguments.tensors, region.last)
        self._asked = Asked([], [], {}, {})
        arguments.forget_tensors()

    @property
    def is_ordinary(self) -> bool:
        around = self._surroundings
        is_plain = around.transform is None and not around.is_compiling
        return is_plain and self._parameters.require_grad() == self._pattern.require_grad

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packer = _Packer(self)
        asking = self._asking
        try:
            with torch.autograd.graph.saved_tensors_hooks(asking.aside(packer.pack), _unpack), asking:
                result = self._function(*args, **kwargs)
        finally:
            packer.frame = None  # autograd keeps the hooks as long as the graph
            del self._asking
        randomness = self._host_randomness
        if randomness is not None:
            randomness.note_use()
            if not randomness.was_used:
                self._host_randomness = None
        if self._num_saved != len(self._pattern.saved) or self._has_written():
            self._miss()
        if self.is_as_seen:
            self._asked = asking.asked()
            self._region.last = self._asked.notes
            for ref in self._dropped:
                if (dropped := ref()) is not None:
                    dropped.let_go()
        else:
            self._dropped, self._taken = [], {}  # nothing is made again
        return result

    def _has_written(self) -> bool:
        """Whether the forward has written a parameter, a buffer or an argument: a second one would write it twice."""
        return list(map(version_of, self._outside)) != self._versions or any(each.is_changed() for each in self._inputs)

    def pack(self, tensor: torch.Tensor) -> Any:
        number = self._num_saved
        self._num_saved = number + 1
        saved = self._pattern.saved
        is_ordinary = type(tensor) in PLAIN_TYPES and tensor.layout is _strided
        # What a region inside of this one saves comes here in the second run, and not now: from here on numbers say nothing.
        if number >= len(saved) or not is_ordinary or num_begun() != self._num_begun:
            self._miss()
            self._views.append(None)
            return _Held(tensor, self.name)
        view, is_dropped, is_taken = saved[number]
        seen = view.or_own(tensor)
        self._views.append(seen)
        if seen is not view and not (
            self._pattern.is_dynamic and seen.dtype is view.dtype and len(seen.size) == len(view.size)
        ):
            self._miss()  # whatever it is: it is kept
            return _Held(tensor, self.name)
        if is_dropped:
            dropped = _Dropped(self, number, tensor)
            self._dropped.append(weakref.ref(dropped))
            return dropped
        held = _Held(tensor, self.name)
        if is_taken:
            self._taken[number] = held
        return held

    def _miss(self) -> None:
        if self.is_as_seen:
            self.is_as_seen = False
            self._region.miss()

    # -- backward -----------------------------------------------------------------------------------------------------

    def made_again(self, number: int) -> torch.Tensor:
        """What was dropped, for one residual in one backward."""
        current = torch._C._current_graph_task_id()
        with self._lock:
            found = self._passes.get(current)
            if found is None or number not in found:
                if found is None and current != _NO_PASS:
                    self._forget_raised(current)
                    torch.autograd.Variable._execution_engine.queue_callback(EndOfPass(self, current))
                with left_as_found(), shown(f"recompute {self.name}"):
                    found = self._passes[current] = self._run_again()
            tensor = found.pop(number)  # plant: residual-number
            if current == _NO_PASS:
                self.end_pass(current)
        return tensor

    def end_pass(self, number: int) -> None:
        with self._lock:
            self._passes.pop(number, None)
            self._threads.pop(number, None)

    def _forget_raised(self, current: int) -> None:
        """What a backward of this thread that raised has left is of no use any more."""
        thread = threading.get_ident()
        for old in [number for number, each in self._threads.items() if each == thread]:
            self.end_pass(old)
        self._threads[current] = thread

    def _run_again(self) -> dict[int, torch.Tensor]:
        wanted = {each.number for ref in self._dropped if (each := ref()) is not None}
        found = self._as_seen(wanted)
        if found is None:
            found = self._everything(wanted)
        self._taken = {
            number: weakref.ref(held) if isinstance(held, _Held) else held for number, held in self._taken.items()
        }
        return found

    def _as_seen(self, wanted: set[int]) -> dict[int, torch.Tensor] | None:
        """The second run as the pattern says; None: it does something else."""
        if not self.is_as_seen or has_hooks(self._pattern.modules):
            return None
        held = {number: each if isinstance(each, _Held) else each() for number, each in self._taken.items()}
        if None in held.values():
            return None  # gone with what a backward before this one has used
        taken = {number: each.tensor() for number, each in held.items() if each is not None}
        run = self._second_run(wanted, self._pattern, taken)
        try:
            self._call_again(run)
        except (NotThePattern, NeedsEverything) as reason:
            cause = str(reason)  # the error itself would hold the frames that hold it
        except RuntimeError as error:
            if not reads_placeholder(error):
                raise
            cause = str(error)
        else:
            if run.is_over():
                return run.found
            cause = "it ended before all was met"
        _logger.info("%s: not as in the call that was watched (%s); every op is run again", self.name, cause)
        self._miss()
        return None

    def _everything(self, wanted: set[int]) -> dict[int, torch.Tensor]:
        run = self._second_run(wanted, None, {})
        self._call_again(run)
        if not run.is_over():
            raise StateError(
                "Recomputation did not come to all that the forward had saved.",
                expected=f"{self._num_saved} tensors",
                got=str(run.num_saved),
                where=self.name,
                do="Make the function do the same each time; random numbers come from PyTorch's, Python's or NumPy's own generators.",
            )
        return run.found

    def _second_run(self, wanted: set[int], pattern: Pattern | None, taken: dict[int, torch.Tensor]) -> SecondRun:
        generators = {state.generator for state in self._random}
        return SecondRun(self.name, wanted, self._views, self._seen_versions(), generators, pattern, taken)

    def _seen_versions(self) -> dict[int | None, set[int]]:
        """Of parameters and buffers, by their storage; none if all are as they were."""
        found: dict[int | None, set[int]] = {}
        if list(map(version_of, self._outside)) == self._versions:
            return found
        for tensor, version in zip(self._outside, self._versions, strict=True):
            found.setdefault(storage_key(tensor), set()).add(version)
        return found

    def _call_again(self, run: SecondRun) -> None:
        with torch.enable_grad():
            inputs = [each.again(self.name) for each in self._inputs]
            args, kwargs = self._arguments.rebuild(inputs.__getitem__)
        again = AskingAgain(self._asked, inputs, self.name, checks_outside=False)
        states = set_back({state.generator for state in self._random})
        host = _NOTHING if self._host_randomness is None else self._host_randomness.again()
        attributes = as_noted(self._attributes)
        parameters = self._parameters.again()
        around = self._surroundings.again()
        with (
            left_as_found(states, host, attributes, parameters, around),
            replaying(),
            states,  # plant: unwatched-states
            host,
            attributes,
            parameters,
            around,
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(again.aside(run.pack), run.unpack),
        ):
            for state in self._random:
                state.restore()  # plant: unwatched-draws
            run.begin()
            try:
                with SecondMode(run), again:
                    self._function(*args, **kwargs)
            except AllFound:
                return
            again.check_end()


class _Packer:
    """The pack hook. It forgets the frame when the forward is over: autograd keeps hooks as long as the graph."""

    __slots__ = ("frame",)

    def __init__(self, frame: _Frame) -> None:
        self.frame: _Frame | None = frame

    def pack(self, tensor: torch.Tensor) -> Any:
        return _Held(tensor, "region") if self.frame is None else self.frame.pack(tensor)


def _unpack(packed: Any) -> torch.Tensor:
    check_not_traced("region")
    tensor: torch.Tensor = packed.tensor()
    return tensor


class _Held:
    """A residual that is kept: a parameter as it is, all else without what leads to its node."""

    __slots__ = ("__weakref__", "_label", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, label: str) -> None:
        self._label = label
        is_parameter = type(tensor) is nn.Parameter and tensor.is_leaf
        self._tensor = tensor if is_parameter else aliased(tensor)
        self._version = version_of(tensor)

    def tensor(self) -> torch.Tensor:
        version = version_of(self._tensor)
        if version != self._version:
            raise changed_in_place(self._label, self._version, version)
        return self._tensor


class _Dropped:
    """A residual that is made again. It is held until the forward is over, and for good if that was not as the pattern says."""

    __slots__ = ("__weakref__", "_frame", "_held", "number")

    def __init__(self, frame: _Frame, number: int, tensor: torch.Tensor) -> None:
        self._frame = frame
        self._held: _Held | None = _Held(tensor, frame.name)
        self.number = number

    def let_go(self) -> None:
        """The forward is over."""
        self._held = None

    def tensor(self) -> torch.Tensor:
        return self._frame.made_again(self.number) if self._held is None else self._held.tensor()


class _Given:
    """An argument of the region."""

    __slots__ = ("_is_leaf", "_requires_grad", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = aliased(tensor)
        self._version = version_of(tensor)
        self._requires_grad = tensor.requires_grad
        self._is_leaf = tensor.is_leaf

    def is_changed(self) -> bool:
        return version_of(self._tensor) != self._version

    def again(self, where: str) -> torch.Tensor:
        version = version_of(self._tensor)
        if version != self._version:
            raise changed_in_place(f"an input of {where}", self._version, version)
        tensor = aliased(self._tensor).requires_grad_(self._requires_grad)
        return tensor if self._is_leaf else no_leaf(tensor)
