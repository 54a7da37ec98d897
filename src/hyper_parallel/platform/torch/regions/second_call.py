"""A region's function is called again in backward, with everything around it as it was in forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.regions.host_randomness import HostRandomness
from hyper_parallel.core.regions.passes import Pass
from hyper_parallel.platform.torch.regions.attributes import as_noted, note_attributes
from hyper_parallel.platform.torch.regions.inputs import Inputs
from hyper_parallel.platform.torch.regions.left_as_found import left_as_found
from hyper_parallel.platform.torch.regions.placeholders import NeedsEverything
from hyper_parallel.platform.torch.regions.random_state import GeneratorState, set_back, states_of
from hyper_parallel.platform.torch.regions.region_function import RegionFunction
from hyper_parallel.platform.torch.regions.replaying import AllFound, Replay, ReplayMode
from hyper_parallel.platform.torch.regions.saved_values import aliased
from hyper_parallel.platform.torch.regions.surroundings import (
    ParametersOfModule,
    Surroundings,
    replaying,
)

_NOTHING = contextlib.nullcontext()


class SecondCall:
    """Made where the function is called the first time, and notes what is around it there.

    Attributes:
        surroundings, parameters: those of the first call
        random_states: of generators, when it began
    """

    def __init__(self, function: RegionFunction, inputs: Inputs) -> None:
        self.surroundings = Surroundings()
        self.parameters = ParametersOfModule(function.module, function.modules)
        self._attributes = note_attributes(function.module, function.modules)
        self._function = function
        self._inputs = inputs
        self.random_states: list[GeneratorState] = []
        self._host_randomness: HostRandomness | None = None

    def note_random_states(self) -> None:
        """The first call begins."""
        self.random_states = states_of([tensor for tensor in self._inputs.tensors if not tensor.is_cpu])
        self._host_randomness = HostRandomness()

    def note_host_randomness(self) -> None:
        """The first call is over."""
        if self._host_randomness is not None:
            self._host_randomness.note_use()
            if not self._host_randomness.was_used:
                self._host_randomness = None

    def shows_tensors(self) -> bool:
        """Whether others than ops are given the tensors of the call, so that none may be a placeholder.

        Who hooks into the modules gets real tensors in the second call, too; to compiled code a placeholder is another type than that it
        was compiled for.
        """
        return self._function.has_hooks() or self.surroundings.is_compiling or self._function.is_compiled()

    def run(self, replay: Replay, current: Pass) -> None:
        """Call the function, in a backward; `replay` says what each op does."""
        record = replay.record
        generators = {state.generator for state in self.random_states}
        generators |= {op.state.generator for op in record.ops if op.state is not None}
        # First of all: to get them may mean another replay, of the region around this one.
        with torch.enable_grad():
            args, kwargs = self._inputs.again(replay, current)
        # Who runs backward inside the region needs the residuals of the replay, too; nobody else does.
        pack = aliased if record.runs_everything else _forget
        states = set_back(generators)
        host = _NOTHING if self._host_randomness is None else self._host_randomness.again()
        attributes = as_noted(self._attributes)
        parameters = self.parameters.again()
        around = self.surroundings.again()
        with (
            left_as_found(states, host, attributes, parameters, around),
            replaying(),
            states,  # plant: replay-states
            host,
            attributes,
            parameters,
            around,  # last: it may turn the compiler on for what is called from here
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, _unpack_kept),
        ):
            for state in self.random_states:
                state.restore()
            try:
                with ReplayMode(replay), _no_torch_script(self._function.name):
                    self._function.call(*args, **kwargs)
            except AllFound:
                pass


def _forget(tensor: torch.Tensor) -> None:
    """The graph of a replay is never used: it need not hold anything."""


def _unpack_kept(packed: torch.Tensor | None) -> torch.Tensor:
    if packed is None:
        raise NeedsEverything("a backward inside the region")
    return packed


@contextlib.contextmanager
def _no_torch_script(where: str) -> Iterator[None]:
    """TorchScript turns what ends a replay, and what starts it over, into an error of its own; and it runs other ops the second time."""
    try:
        yield
    except RuntimeError as error:
        if "TorchScript interpreter" not in str(error):
            raise
        raise StateError(
            "TorchScript code in a region cannot be recomputed.",
            where=where,
            do="Put the region around the module it was made of, or let a policy save or swap all of it.",
        ) from None
