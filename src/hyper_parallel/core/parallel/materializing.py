"""Models that are built without memory, and filled where they lie.

Rules:
1. A module's parameters are filled together, as whole tensors, by the initialisers that write to them: the module's
   own, then those of the modules around it, from the inside out.
2. Before that all generators are seeded by the module's name in the whole model. So its values depend on the seed and
   the name, not on what was filled before, on which rank, and how it is cut.
3. A rank keeps its box of each, and lets go of the whole before the next module begins.
4. A parameter that several modules have is filled where the model names it first. Copies of it in other stages get the
   values of the first stage that has one.
5. What nothing wrote to is an error that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

from hyper_parallel._base.errors import ArgumentError, StateError, describe
from hyper_parallel.core.parallel.parts import Part, parts_of
from hyper_parallel.core.parallel.seeds import check_seed, derived_seed, generators_put_back, seed_all
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.interface import Platform
from hyper_parallel.platform.opaque import Device, Module, Tensor
from hyper_parallel.platform.selection import backend, imported_platform

__all__ = ["Filling", "MaterializingBackend", "init_on_device", "materialize"]

# Of tensors in one error.
_MOST_NAMED = 8


class Filling(Protocol):
    """One call of `materialize` on the modules of this rank. Inside its `with` the modules hold no values."""

    def owners(self, root: Module) -> list[tuple[str, Module]]:
        """The modules with parameters or buffers of their own, by their names in the whole model, in its order."""

    def parameters(self, module: Module) -> dict[str, str]:
        """A module's own parameters: what each is called among all of its root's, and in the module."""

    def leave(self, module: Module, parameter: str) -> None:
        """Fill this parameter of a module not here but by `store`."""

    def fill(self, module: Module) -> list[str]:
        """Run the initialisers on whole tensors and keep this rank's boxes.

        Returns: what of the module's own tensors nothing wrote to.
        """

    def whole(self, module: Module, parameter: str) -> Tensor:
        """Run the initialisers again, and give one of the whole tensors."""

    def empty_whole(self, module: Module, parameter: str) -> Tensor:
        """A whole tensor to receive values into."""

    def store(self, module: Module, parameter: str, whole: Tensor) -> None:
        """Keep this rank's box of a whole tensor."""


class MaterializingBackend(Protocol):
    """How a framework's modules are filled. `initialisers` says in words what may fill a tensor."""

    folder: ClassVar[str] = "parallel.materializing"
    initialisers: ClassVar[str]

    def filling(self, roots: Sequence[Module], device: Device | None) -> AbstractContextManager[Filling]: ...

    def drawn_seed(self) -> int:
        """Draw a seed from the framework's own generator."""

    def seeds_differ(self, roots: Sequence[Module], seed: int) -> bool:
        """Say whether ranks that share a parameter have other seeds. All of them ask."""


def init_on_device(device: Device, include_buffers: bool = False) -> AbstractContextManager[None]:
    """Build modules whose parameters are on a device from the start: `with hp.init_on_device("meta"): ...`.

    On "meta" parameters have no memory, and `materialize` gives them some. (A constructor makes one at a time in memory
    that is given back at once; what nobody has written to takes none of the machine's.) Buffers are made as ever, with
    their values: many are computed in a constructor and nowhere else, such as the frequencies of a rotary embedding.
    They are small. Blocks may be nested, the innermost counts, and other threads build their modules as ever.

    Args:
        device: "meta", "cpu", or a device of the framework.
        include_buffers: put buffers there as well. On "meta" their values are lost, unless an initialiser of their
            module makes them again; `materialize` names those that nothing makes.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> with hp.init_on_device("meta"):
        ...     model = torch.nn.Linear(1000, 1000)
        >>> model.weight.is_meta
        True
    """
    found: AbstractContextManager[None] = imported_platform().init_on_device(device, include_buffers)
    return found


def materialize(model: Any, seed: int | None = None, *, device: Device | None = None) -> Any:
    """Give every parameter its initial values, each rank its own part, and return the model.

    Each module's own initialiser runs on its whole parameters, under generators that are seeded by `seed` and the
    module's name in the model; the rank keeps its part. So values are the same on every number of ranks and every
    layout, down to the bit, and no rank ever holds more than its parts and the whole tensors of one module.

    An initialiser is `reset_parameters()`, or `_init_weights(module)` of the model around it, as Hugging Face's models
    have. On MindSpore it is what a parameter was created with, then `reset_parameters()`.

    The values that were there are gone, also those of a model that was not built on "meta", and a second call with the
    same seed gives the same values again: call it before values are loaded. The framework's generators go on as if
    nothing had been drawn.

    Args:
        model: a module, a list of modules, a `PipelineStage`, a list of stages, or a `Pipeline`. Parameters may be
            plain, DTensors, or those of PyTorch's FSDP2. With stages all ranks call it.
        seed: the same on all ranks. Without one the first rank draws it, and all ranks call this.
        device: where plain parameters without memory go; the platform's device without.

    Raises:
        RuntimeError: a parameter or buffer that no initialiser writes to, by name; all others are filled then.
        ValueError: ranks gave different seeds, or two modules of a list have the same name.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> with hp.init_on_device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
        >>> model = hp.materialize(model, seed=0)
        >>> model[0].weight.device.type != "meta"
        True
    """
    parts = parts_of(model, "materialize")
    platform = platform_of(parts[0].module, call="materialize")
    ours = backend(platform, MaterializingBackend, "materialize")
    roots = [part.module for part in parts]
    number = _common_seed(platform, ours, roots, seed)
    with generators_put_back(platform), ours.filling(roots, device) as filling:
        _Run(platform, filling, parts, number, ours.initialisers).run()
    return model


def _common_seed(platform: Platform, ours: MaterializingBackend, roots: Sequence[Module], seed: int | None) -> int:
    if seed is None:
        drawn: list[Any] = [ours.drawn_seed()]
        if platform.get_world_size() > 1:
            mine, drawn = drawn[0], [None] * platform.get_world_size()
            platform.all_gather_object(drawn, mine)
        return int(drawn[0])
    number = check_seed(seed)
    if ours.seeds_differ(roots, number):
        raise ArgumentError(
            "Ranks that share a parameter fill it from one seed.",
            expected="the same seed on all ranks",
            got=f"{describe(number)} here, and another one elsewhere",
        )
    return number


class _Place(NamedTuple):
    """Where a copy of a tied weight is: sorted, the first one's values are everybody's."""

    stage: int
    rank: int
    name: str


class _Run:
    """One call of `materialize`: who fills what, in which order."""

    def __init__(
        self, platform: Platform, filling: Filling, parts: Sequence[Part], seed: int, initialisers: str
    ) -> None:
        self._platform = platform
        self._filling = filling
        self._parts = parts
        self._seed = seed
        self._initialisers = initialisers
        self._rank = platform.get_rank()
        # A stage on this rank and a parameter's name in it -> its module's name, the module, its name there.
        self._homes: dict[tuple[int, str], tuple[str, Module, str]] = {}

    def run(self) -> None:
        owners: dict[str, Module] = {}
        # Modules with a parameter that no other stage has.
        own: list[tuple[int | None, str]] = []
        for part in self._parts:
            for name, module in self._filling.owners(part.module):
                if owners.setdefault(name, module) is not module:
                    raise _same_name(name)
                keys = self._filling.parameters(module)
                if part.stage is not None:
                    self._homes.update(((part.stage, full), (name, module, key)) for full, key in keys.items())
                    own += [(part.stage, name)] if keys.keys() - part.tied.keys() else []
        copies = self._copies(own)
        for places in copies.values():
            for place in _others(places):
                if place.rank == self._rank:
                    _, module, key = self._homes[place.stage, place.name]
                    self._filling.leave(module, key)
        unfilled: list[str] = []
        for name, module in owners.items():
            self._seed_for(name)
            unfilled += [f"{name}.{key}" if name else key for key in self._filling.fill(module)]
        if unfilled:
            more = len(unfilled) - _MOST_NAMED
            raise StateError(
                "Nothing writes initial values to some of the model's tensors.",
                expected=self._initialisers,
                got="none for " + ", ".join(unfilled[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else ""),
                do="Give the module an initialiser, or load these values: everything else is filled.",
            )
        for places in copies.values():
            self._copy(places)

    def _seed_for(self, name: str) -> None:
        seed_all(self._platform, derived_seed(self._seed, name))

    def _copies(self, own: list[tuple[int | None, str]]) -> dict[str, list[_Place]]:
        """Ask all ranks where copies of tied weights are, and whether names are those of the whole model."""
        if all(part.stage is None for part in self._parts):
            return {}
        tied_here = [
            (tied, _Place(part.stage, self._rank, name))
            for part in self._parts
            if part.stage is not None
            for name, tied in part.tied.items()
        ]
        everywhere: list[Any] = [(tied_here, own)]
        if self._platform.get_world_size() > 1:
            everywhere = [None] * self._platform.get_world_size()
            self._platform.all_gather_object(everywhere, (tied_here, own))
        stage_of: dict[str, int | None] = {}
        for stage, name in (entry for _, owned in everywhere for entry in owned):
            if stage_of.setdefault(name, stage) != stage:
                raise _same_name(name)
        found: dict[str, list[_Place]] = {}
        for tied, place in (entry for places, _ in everywhere for entry in places):
            found.setdefault(tied, []).append(place)
        return {tied: sorted(places) for tied, places in sorted(found.items()) if len(places) > 1}

    def _copy(self, places: Sequence[_Place]) -> None:
        """Bring the values of the first place to the others."""
        first, others = places[0], _others(places)
        mine = [place for place in others if place.rank == self._rank]
        if first.rank != self._rank and not mine:
            return
        if first.rank == self._rank:
            name, module, key = self._homes[first.stage, first.name]
            self._seed_for(name)
            whole = self._filling.whole(module, key)
            for rank in sorted({place.rank for place in others} - {self._rank}):
                self._platform.isend(whole, rank).wait()
        else:
            _, module, key = self._homes[mine[0].stage, mine[0].name]
            whole = self._filling.empty_whole(module, key)
            self._platform.irecv(whole, first.rank).wait()
        for place in mine:
            _, module, key = self._homes[place.stage, place.name]
            self._filling.store(module, key, whole)


def _same_name(name: str) -> ArgumentError:
    return ArgumentError(
        "Two modules have one name, and would begin with the same numbers.",
        expected="the names that modules have in the whole model, as `split_stages` keeps them",
        got=f"{name!r} twice",
        do="Build each stage so that its modules keep their names, or fill the stages yourself.",
    )


def _others(places: Sequence[_Place]) -> list[_Place]:
    """The places that wait for values: all ranks with the first stage make the same ones by themselves."""
    first = places[0]
    return [place for place in places if (place.stage, place.name) != (first.stage, first.name)]
