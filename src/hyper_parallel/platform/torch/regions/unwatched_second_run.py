"""The second run of a region whose forward was not watched: what happens to each op, and to what autograd saves.

See rules 14 to 17 in the README of this folder; `unwatched_region` calls the function.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hyper_parallel._base.errors import StateError
from hyper_parallel.platform.torch.regions.local_parts import PLAIN_TYPES, storage_key, version_of
from hyper_parallel.platform.torch.regions.op_traits import TRAITS, OpTraits, traits_of
from hyper_parallel.platform.torch.regions.placeholders import (
    NeedsEverything,
    View,
    has_placeholder,
    is_placeholder,
    placeholder,
    view_of_placeholder,
)
from hyper_parallel.platform.torch.regions.random_state import drawing
from hyper_parallel.platform.torch.regions.recording import RegionMode
from hyper_parallel.platform.torch.regions.replaying import AllFound
from hyper_parallel.platform.torch.regions.saved_tensors import changed_in_place
from hyper_parallel.platform.torch.regions.saved_values import aliased
from hyper_parallel.platform.torch.regions.surroundings import (
    is_replaying,
)
from hyper_parallel.platform.torch.regions.unwatched_pattern import (
    LeftOut,
    NotThePattern,
    Pattern,
    Taken,
)
from hyper_parallel.platform.torch.regions.values import (
    Argument,
    Arguments,
    Constant,
)


class SecondRun:
    """What happens to ops and to what autograd saves while the function runs again. Without a pattern every op runs.

    Fields:
        _unmet: taken results, by the number of the saved tensor that they are -> their storage; none may be left, or it was another tensor
    """

    def __init__(
        self,
        name: str,
        wanted: set[int],
        views: list[View | None],
        versions: dict[int | None, set[int]],
        generators: set[torch.Generator],
        pattern: Pattern | None,
        taken: dict[int, torch.Tensor],
    ) -> None:
        self._name = name
        self._views = views
        self._versions = versions
        self.found: dict[int, torch.Tensor] = {}
        self.num_saved = 0
        self._wanted = wanted
        self._steps = () if pattern is None else pattern.steps
        self._is_dynamic = pattern is not None and pattern.is_dynamic
        self._has_pattern = pattern is not None
        self._has_writes = pattern is None or pattern.has_writes
        self._taken = taken
        self._unmet: dict[int, int | None] = {}
        self._num_ops = 0
        self._own: set[int | None] = set()  # storages that ops of this run have made
        self._generators = generators
        self._offsets: dict[torch.Generator, int] = {}

    def begin(self) -> None:
        """Generators are as they were when the region began."""
        generators = {step.generator for step in self._steps if step.offset is not None}
        with drawing:
            self._offsets = {each: each.get_offset() for each in generators if each is not None}

    def is_over(self) -> bool:
        return len(self.found) == len(self._wanted) and not self._unmet

    def op(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._num_ops
        self._num_ops = number + 1
        if not self._has_pattern:
            return self._run(traits, args, kwargs)
        if number >= len(self._steps) or self._steps[number].func is not traits.func:
            raise NotThePattern(f"{traits.func}, op {number}")
        step = self._steps[number]
        if not step.runs:
            return self._given(step.outputs, args, is_fixed=step.is_fixed)
        if step.offset is None or step.generator is None:
            return self._run(traits, args, kwargs)
        with drawing:
            step.generator.set_offset(self._offsets[step.generator] + step.offset)
            return self._run(traits, args, kwargs)

    def _run(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._versions:
            self._check_versions(traits, (*args, *kwargs.values()))
        if traits.writes:
            self._check_writes(traits, args, kwargs)
        if traits.is_random:
            self._check_generator(traits, args, kwargs)
        result = traits.call(*args, **kwargs)
        if not self._has_writes:
            return result
        if type(result) is torch.Tensor:
            self._own.add(result.untyped_storage()._cdata)
        elif isinstance(result, (list, tuple)):
            self._own.update(storage_key(each) for each in result if isinstance(each, torch.Tensor))
        return result

    def _check_versions(self, traits: OpTraits, arguments: Iterable[Any]) -> None:
        """Parameters and buffers that an op reads are as the forward saw them."""
        versions = self._versions
        for each in arguments:
            kind = type(each)
            if kind in PLAIN_TYPES:
                seen = versions.get(each.untyped_storage()._cdata)
                if seen is not None and version_of(each) not in seen:
                    raise changed_in_place(f"{self._name}, {traits.func}", min(seen), version_of(each))
            elif kind is list or kind is tuple:
                self._check_versions(traits, each)

    def _check_writes(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Only memory of this run is written: what the forward wrote elsewhere it has written."""
        arguments = Arguments(args, kwargs, traits.writes)
        if all(storage_key(arguments.tensors[place]) in self._own for place in arguments.written):
            return
        if self._has_pattern:
            raise NotThePattern(f"{traits.func} writes what this run did not make")
        raise StateError(
            "A region writes into an input or a buffer, and did not when it was watched.",
            expected="writes in every call, or in none",
            got=str(traits.func),
            where=self._name,
            do="Run the step again: from now on the region is watched.",
        )

    def _check_generator(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
        if all(each in self._generators for each in given):
            return
        if self._has_pattern:
            raise NotThePattern(f"{traits.func} draws from a generator of its own")
        raise StateError(
            "A region draws from a generator of its own, and did not when it was watched.",
            got=str(traits.func),
            where=self._name,
            do="Run the step again: from now on the region is watched.",
        )

    def _given(self, outputs: Any, args: tuple[Any, ...], *, is_fixed: bool) -> Any:
        if isinstance(outputs, Taken):
            tensor = self._taken[outputs.number]
            view = outputs.seen_in(tensor, is_dynamic=self._is_dynamic, is_fixed=is_fixed)
            storage = tensor.untyped_storage()
            self._unmet[outputs.number] = storage._cdata
            # Not an alias: its version counter is for those who have saved it.
            return view.on(storage, tensor.device)  # plant: unwatched-view
        if isinstance(outputs, LeftOut):
            return placeholder(*outputs)
        if isinstance(outputs, Constant):
            return outputs.value
        if isinstance(outputs, Argument):
            return args[outputs.position]
        return type(outputs)([self._given(each, args, is_fixed=is_fixed) for each in outputs])

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        number = self.num_saved
        self.num_saved = number + 1
        if number in self._unmet and storage_key(tensor) != self._unmet.pop(number):
            raise NotThePattern(f"saved tensor {number} is another one")
        if number < len(self._views):
            self._check_look(tensor, self._views[number], is_wanted=number in self._wanted)
        if number in self._wanted and number not in self.found:
            self.found[number] = aliased(tensor)
        if self.is_over():
            raise AllFound
        # The graph of a second run is never used, but by who runs backward inside of the region.
        return None if self._has_pattern else aliased(tensor)

    def _check_look(self, tensor: torch.Tensor, view: View | None, *, is_wanted: bool) -> None:
        """What autograd saves must look as in the forward, also where that has been kept: else this is another one."""
        if self._has_pattern and is_placeholder(tensor):
            if is_wanted:
                raise NeedsEverything("what autograd saves")
            return
        if view is None or (type(tensor) in PLAIN_TYPES and view.or_own(tensor) is view):
            return
        if self._has_pattern:
            raise NotThePattern("a saved tensor looks different")
        raise StateError(
            "Recomputation gave another result than forward.",
            expected=f"{str(view.dtype).removeprefix('torch.')}{list(view.size)}",
            got=f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
            where=self._name,
            do="Make the function give the same each time, or leave this block out of the plan (regions=).",
        )

    def unpack(self, packed: torch.Tensor | None) -> torch.Tensor:
        if packed is None and is_replaying():
            raise NotThePattern("a backward inside the region")
        if packed is None:
            raise StateError(
                "A backward goes into what was made while a region was recomputed, and of which nothing was kept.",
                where=self._name,
                do="Give what the module puts aside as a result of its forward, or run that backward first.",
            )
        return packed


class SecondMode(RegionMode):
    """Sees every op of a second run."""

    def __init__(self, run: SecondRun) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        traits = TRAITS.get(id(func)) or traits_of(func)
        if not traits.is_view and not traits.is_invisible:
            return self._run.op(traits, args, kwargs or {})
        if types and has_placeholder(args):
            return view_of_placeholder(func, args, kwargs or {})
        return traits.call(*args, **kwargs) if kwargs else traits.call(*args)
