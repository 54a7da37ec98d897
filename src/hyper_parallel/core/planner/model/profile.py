"""What was measured of one step: regions, their ops, bytes and milliseconds. See `../README.md` for the words.

Everything here is plain data. What was measured goes to JSON and back unchanged (`step_as_dict`, `step_from_dict`);
what it was measured of is in a file as `plan_file` has it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hyper_parallel._base.errors import describe
from hyper_parallel.core.planner.model.abilities import Abilities, HostCost
from hyper_parallel.core.planner.model.choices import SWAP, Choice, choices_of
from hyper_parallel.core.planner.model.identity import DeviceKind, Identity


@dataclass(frozen=True)
class StorageFacts:
    """A storage that an op made, or that a region was given.

    Attributes:
        num_bytes: of the whole storage; 0 for one that somebody outside holds anyway (a mask that all blocks share)
        is_residual: plain autograd keeps it for backward
        freed_after: the op (by index in the region) after which nothing but autograd holds it; None: alive when the
            region ends
    """

    num_bytes: int
    is_residual: bool
    freed_after: int | None = None


@dataclass(frozen=True)
class Input:
    """A tensor that a region is given, and whether it may be swapped."""

    value: StorageFacts
    may_swap: bool = True


@dataclass(frozen=True)
class ProfiledOp:
    """One operator call of a region, as the profiling step saw it.

    Attributes:
        module: path of the innermost module, relative to the region's ("" is the region's own)
        name: as the framework prints the operator
        call: which call of that module within the region
        occurrence: which call of this operator within that call
        forward_ms: what running it again costs
        makes: the storages it made
        reads: indices of ops whose results it reads, each once, ascending
        reads_inputs: indices of inputs it reads
        temporary_bytes: what it allocates beside its results while it runs
        choices: what can be done with it; never empty
        result_metas: dtype and shape of each result, to recognise it: "float32[2, 8]"
        part: not None: no op of its own but one residual of the op it reads, by its place among all of them; it comes
            right after that op and its other parts. It has a choice of its own, but for one thing: what runs again
            makes all of its parts again
    """

    module: str
    name: str
    call: int
    occurrence: int
    forward_ms: float
    makes: tuple[StorageFacts, ...]
    reads: tuple[int, ...] = ()
    reads_inputs: tuple[int, ...] = ()
    temporary_bytes: int = 0
    choices: tuple[Choice, ...] = tuple(Choice)
    result_metas: tuple[str, ...] = ()
    part: int | None = None

    @property
    def key(self) -> tuple[str, int, str, int]:
        return self.module, self.call, self.name, self.occurrence

    @property
    def num_bytes(self) -> int:
        return sum(value.num_bytes for value in self.makes)

    @property
    def residual_bytes(self) -> int:
        return sum(value.num_bytes for value in self.makes if value.is_residual)

    @property
    def is_needed(self) -> bool:
        """Say whether backward needs one of its results."""
        return any(value.is_residual for value in self.makes)


@dataclass(frozen=True)
class Region:
    """One call of a block in forward order.

    Attributes:
        path: of the module
        call: which call of that module in the step
        forward_ms, backward_ms: of a plain run
        forward_peak_bytes: highest point of its plain forward above what was alive when it began
        backward_peak_bytes: highest point of its backward (run again or not) above what is alive when it begins, not
            counting its own residuals in that; so these are in it
        before_ms: what runs in forward between the region before and this one
        before_peak_bytes: highest point of that, counted as `forward_peak_bytes`, in which it is
        after_ms: what runs in backward between this one and the region before
        outside_bytes: kept for backward by what runs outside of all regions until this one begins
        may_be_plain: a region that must be managed whatever it costs has False
        note_bytes: what a region holds beside its values when it is not plain: states of random generators
        is_dynamic: sizes in it depend on values, so that another batch of the same shape has others
    """

    path: str
    call: int
    ops: tuple[ProfiledOp, ...]
    inputs: tuple[Input, ...]
    forward_ms: float
    backward_ms: float
    forward_peak_bytes: int
    backward_peak_bytes: int
    before_ms: float = 0.0
    after_ms: float = 0.0
    outside_bytes: int = 0
    before_peak_bytes: int = 0
    may_be_plain: bool = True
    note_bytes: int = 0
    is_dynamic: bool = False

    @property
    def residual_bytes(self) -> int:
        """Count what the region keeps when it is plain."""
        inputs = sum(given.value.num_bytes for given in self.inputs if given.value.is_residual)
        return inputs + sum(op.residual_bytes for op in self.ops)

    def made_with(self, index: int) -> int:
        """Find the op that makes what this entry stands for: itself, if it is no part."""
        op = self.ops[index]
        return index if op.part is None else op.reads[0]

    def parts(self) -> dict[int, list[int]]:
        """List, for each op that has parts, their indices."""
        found: dict[int, list[int]] = {}
        for index, op in enumerate(self.ops):
            if op.part is not None:
                found.setdefault(self.made_with(index), []).append(index)
        return found

    @property
    def may_swap(self) -> bool:
        return any(SWAP in op.choices for op in self.ops) or any(given.may_swap for given in self.inputs)

    def shape(self) -> tuple[Any, ...]:
        """Give what is equal for regions that differ in their times alone: they share one decision."""
        ops = tuple(dataclasses.replace(op, forward_ms=0.0) for op in self.ops)
        return ops, self.inputs, self.may_be_plain


def alike(regions: Sequence[Region]) -> list[list[int]]:
    """Group the numbers of regions of one shape: each can do what any other of its group does."""
    kinds: dict[object, list[int]] = {}
    for index, region in enumerate(regions):
        kinds.setdefault(region.shape(), []).append(index)
    return list(kinds.values())


@dataclass(frozen=True)
class Turn:
    """From the end of the last region's forward to the start of its backward."""

    ms: float = 0.0
    peak_bytes: int = 0  # above what is alive when it begins


@dataclass(frozen=True)
class Link:
    """How fast copies go: bytes per millisecond, each way; `both`: each way while both are busy."""

    out_bytes_per_ms: float
    in_bytes_per_ms: float
    both_bytes_per_ms: float | None = None


@dataclass(frozen=True)
class StepProfile:
    """One plain step of a model, as it was measured. Nothing in it changes later.

    Attributes:
        regions: the calls of blocks, in forward order
        base_bytes: alive when forward begins, gradients already allocated
        peak_bytes: of the plain step, base included
        link: None: nothing can be swapped
        host: None: nobody has measured it, so that real steps do not ask for it either
        min_swap_bytes: a smaller storage stays on the device, whatever is chosen for it
        shared_input_bytes: of each storage that several regions are given
        keeps_output: whether the loop has the model's output in backward and in the next forward; None: nobody said, so
            it has not
        written: names of the parameters that a step writes, which a step that is repeated has to put back
        is_plain_measured: False: a plain step did not fit the device, so its peak and times were computed from one that
            recomputes
    """

    regions: tuple[Region, ...]
    base_bytes: int
    peak_bytes: int
    step_ms: float
    turn: Turn = Turn()
    link: Link | None = None
    identity: Identity = field(default=Identity(), hash=False)
    abilities: Abilities = field(default=Abilities())
    host: HostCost | None = None
    min_swap_bytes: int = 0
    shared_input_bytes: tuple[int, ...] = ()
    keeps_output: bool | None = None
    written: tuple[str, ...] = ()
    is_plain_measured: bool = True

    @property
    def activation_peak_bytes(self) -> int:
        return self.peak_bytes - self.base_bytes

    @property
    def device_kind(self) -> DeviceKind:
        return DeviceKind.of(self.identity.device)


_MEASURED = ("regions", "base_bytes", "peak_bytes", "step_ms", "turn", "link", "is_plain_measured")


def step_as_dict(profile: StepProfile) -> dict[str, Any]:
    """Turn what was measured of the step into JSON."""
    data = {name: value for name, value in dataclasses.asdict(profile).items() if name in _MEASURED}
    for region in data["regions"]:
        region["ops"] = tuple(_op_as_dict(op) for op in region["ops"])
    return data


def _op_as_dict(op: dict[str, Any]) -> dict[str, Any]:
    """Give an op's fields the keys that plan files have, in their order."""
    return {
        _IN_FILES.get(name, name): tuple(map(str, value)) if name == "choices" else value for name, value in op.items()
    }


def step_from_dict(data: dict[str, Any]) -> StepProfile:
    """Make a profile of what `step_as_dict` gave, from a file. It does not say what it was measured of.

    Raises:
        KeyError, TypeError, ValueError: it is not that.
    """
    regions = tuple(_region(region) for region in data["regions"])
    link = None if data["link"] is None else Link(**data["link"])
    rest = {name: data[name] for name in ("base_bytes", "peak_bytes", "step_ms")}
    rest["is_plain_measured"] = data.get("is_plain_measured", True)
    turn = checked(Turn(**data["turn"]))
    if link is not None and 0 in vars(checked(link)).values():
        raise ValueError(f"`link` is {describe(data['link'])}")
    return checked(StepProfile(regions=regions, turn=turn, link=link, **rest))


_MOST = 2**53  # bytes, or ms: more than any machine has, and a float still has each of them
_PLAIN = {"str": str, "bool": bool, "dict": dict, "Choice": str}  # which word is a choice is told where it stands
# Plan files have other words for these. What is said of a damaged file has them, too: it speaks of what is in the file.
_IN_FILES = {"ProfiledOp": "Op", "StorageFacts": "Value", "result_metas": "looks"}
_Data = TypeVar("_Data")


def checked(data: _Data) -> _Data:
    """Give back what came from a file if its fields are of the kinds they should be: a dataclass itself takes anything.

    Raises:
        TypeError: one is not.
    """
    for name, kind in _kinds_of(type(data)):  # type: ignore[arg-type]  # a class can be a key
        of = type(data).__name__
        check_kind(getattr(data, name), kind, f"`{_IN_FILES.get(name, name)}` of {_IN_FILES.get(of, of)}")
    return data


def check_kind(value: object, kind: str, name: str) -> None:
    """Raise where a value from a file is not of its kind, in the words of an annotation.

    Numbers are finite, and none is below 0.

    Example:
        >>> check_kind([3, None], "tuple[int | None, ...]", "`sizes`")
    """
    if not is_of(value, kind):
        raise TypeError(f"{name} is {describe(value)}")


@functools.cache
def _kinds_of(cls: type) -> list[tuple[str, str]]:
    return [(declared.name, str(declared.type)) for declared in dataclasses.fields(cls)]


def is_of(value: Any, kind: str) -> bool:
    """Say whether a value from a file is of the kind: see `check_kind`."""
    if kind.endswith(" | None"):
        return value is None or is_of(value, kind.removesuffix(" | None"))
    if kind.startswith("tuple["):
        item_kind = kind.removeprefix("tuple[").removesuffix(", ...]")
        return isinstance(value, (tuple, list)) and all(is_of(item, item_kind) for item in value)
    if kind == "int":
        return type(value) is int and 0 <= value <= _MOST
    if kind == "float":
        return type(value) in (int, float) and 0 <= value <= _MOST
    return kind not in _PLAIN or isinstance(value, _PLAIN[kind])  # of others there are objects already


def _region(data: dict[str, Any]) -> Region:
    rest = {name: value for name, value in data.items() if name not in ("ops", "inputs")}
    inputs = tuple(
        checked(Input(checked(StorageFacts(**given["value"])), given["may_swap"])) for given in data["inputs"]
    )
    region = checked(Region(ops=tuple(_op(op) for op in data["ops"]), inputs=inputs, **rest))
    _check_wiring(region)
    return region


def _op(data: dict[str, Any]) -> ProfiledOp:
    lists: dict[str, Any] = {name: tuple(data[name]) for name in ("reads", "reads_inputs", "looks")}
    lists["choices"] = choices_of(data["choices"])
    rest = {name: value for name, value in data.items() if name not in lists and name != "makes"}
    lists["result_metas"] = lists.pop("looks")
    return checked(ProfiledOp(makes=tuple(checked(StorageFacts(**value)) for value in data["makes"]), **lists, **rest))


def _check_wiring(region: Region) -> None:
    """Raise ValueError where an index leads nowhere, or a choice is none."""
    num_ops, num_inputs = len(region.ops), len(region.inputs)
    values = [(given.value, f"input {index}") for index, given in enumerate(region.inputs)]
    for index, op in enumerate(region.ops):
        where = f"op {index}"
        values += [(value, where) for value in op.makes]
        if list(op.reads) != sorted({*op.reads}) or not all(read < index for read in op.reads):
            raise ValueError(f"`reads` of {where} of {region.path} is {describe(op.reads)}")
        if not all(read < num_inputs for read in op.reads_inputs):
            raise ValueError(f"`reads_inputs` of {where} of {region.path} is {describe(op.reads_inputs)}")
        if not op.choices or not {*op.choices} <= {*Choice}:
            raise ValueError(f"`choices` of {where} of {region.path} is {describe(op.choices)}")
        if op.part is not None and (not op.reads or region.ops[op.reads[0]].part is not None):
            raise ValueError(f"`part` of {where} of {region.path}: it reads {describe(op.reads)}, no op with parts")
    for value, where in values:
        if value.freed_after is not None and value.freed_after >= num_ops:
            raise ValueError(f"`freed_after` of {where} of {region.path} is {value.freed_after}, of {num_ops} ops")
