"""The pure parts of checkpoints: tiling, checksums, plain values, who writes what, what is read, the manifest."""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections.abc import Iterator

import pytest

from hyper_parallel import DeviceMesh
from hyper_parallel._base.errors import DamagedFileError, HyperParallelError
from hyper_parallel.core.dtensor.boxes import Box, boxes_of
from hyper_parallel.core.parallel.saving.checksums import CHUNK_BYTES, combined
from hyper_parallel.core.parallel.saving.description import Described, Description, merged_spread
from hyper_parallel.core.parallel.saving.manifest import Manifest, SavedFile, SavedItem, SavedTensor
from hyper_parallel.core.parallel.saving.reading import Part, chunks_of, parts_of, runs_of
from hyper_parallel.core.parallel.saving.tiling import fault_of_tiling
from hyper_parallel.core.parallel.saving.values import from_json, to_json
from hyper_parallel.core.parallel.saving.writers import plan_writing, share_of_most, size_bytes
from support.campaign import share


def cells(box: Box) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(start, end) for start, end in zip(box.starts, box.ends, strict=True)))


# Tiling


def test_a_tiling_is_told_from_what_is_none_for_all_sets_of_boxes_of_a_small_tensor() -> None:
    """Every set of up to four boxes of a 2 x 3 tensor, held against counting its cells."""
    ranges = {length: [(a, b - a) for a in range(length) for b in range(a + 1, length + 1)] for length in (2, 3)}
    boxes = [Box((a, c), (b, d)) for a, b in ranges[2] for c, d in ranges[3]]
    whole = sorted(cells(Box((0, 0), (2, 3))))
    num_right = 0
    for count in range(5):
        for chosen in itertools.combinations_with_replacement(boxes, count):
            is_right = sorted(cell for box in chosen for cell in cells(box)) == whole
            assert (fault_of_tiling(chosen, (2, 3)) is None) == is_right, chosen
            num_right += is_right
    assert num_right == 34 - 7 - 1  # of 34 tilings in all, those of up to four boxes


def test_a_tiling_that_no_cut_separates_is_one() -> None:
    wheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert fault_of_tiling(wheel, (3, 3)) is None
    assert "overlap" in str(fault_of_tiling([*wheel[:-1], Box((1, 1), (2, 1))], (3, 3)))
    assert fault_of_tiling(wheel[:-1], (3, 3)) == "8 of 9 elements are there"


def test_numbers_and_tensors_without_elements_are_tiled() -> None:
    assert fault_of_tiling([Box((), ())], ()) is None
    assert fault_of_tiling([], ()) == "0 of 1 elements are there"
    assert "overlap" in str(fault_of_tiling([Box((), ()), Box((), ())], ()))
    assert fault_of_tiling([], (0, 3)) is None
    assert fault_of_tiling([Box((0, 0), (1, 3))], (0, 3)) is not None
    assert fault_of_tiling([Box((0,), (3,))], (1, 3)) is not None


@pytest.mark.parametrize("seed", share(400, 40))
def test_the_boxes_of_every_layout_tile(seed: int) -> None:
    rng = random.Random(seed)
    sizes = tuple(rng.randint(1, 4) for _ in range(3))
    ranks: list[object] = list(range(sizes[0] * sizes[1] * sizes[2]))
    mesh = DeviceMesh("cpu", _shaped(ranks, sizes), mesh_dim_names=("a", "b", "c"))
    axes = rng.sample(["a", "b", "c"], 3)
    layout = mesh.layout(
        *rng.choice([(axes[0], axes[1]), (tuple(axes), None), (None, (axes[2], axes[0])), (None, None)])
    )
    shape = rng.randint(0, 9), rng.randint(0, 9)
    spread = merged_spread(dict(boxes_of(layout, shape)))
    assert fault_of_tiling([box for box, _ in spread], shape) is None
    if 0 not in shape:
        assert sorted(rank for _, holders in spread for rank in holders) == sorted(
            rank for rank, box in boxes_of(layout, shape) if not box.is_empty
        )


def _shaped(flat: list[object], sizes: tuple[int, ...]) -> list[object]:
    if len(sizes) == 1:
        return flat
    step = len(flat) // sizes[0]
    return [_shaped(flat[at * step : (at + 1) * step], sizes[1:]) for at in range(sizes[0])]


# Checksums and values


@pytest.mark.parametrize("seed", range(20))
def test_the_checksum_of_parts_is_that_of_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    parts = [rng.randbytes(rng.choice([0, 1, 2, 7, 64, 1000, 4097])) for _ in range(rng.randint(0, 6))]
    assert combined((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 1.5, "text", b"\0\xff", [1, (2, 3)], {"a": {1: (2,)}, "b": []}, {(1, 2): {3}}, {"!tuple": 1}, (), {},
     float("inf"), 2**80],
)  # fmt: skip
def test_plain_values_come_back_as_they_were(value: object) -> None:
    back = from_json(json.loads(json.dumps(to_json(value, "extra"))))
    assert (back, type(back)) == (value, type(value))


def test_the_state_of_python_and_numpy_generators_is_plain() -> None:
    state = random.Random(1).getstate()
    assert from_json(json.loads(json.dumps(to_json(state, "extra")))) == state


def test_what_is_not_plain_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"extra\['a'\]\[1\]"):
        to_json({"a": [1, object()]}, "extra")
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(TypeError, match="nested too deeply"):
        to_json(endless, "extra")


# Who writes what


def whole(dtype: str, *shape: int, stage: int | None = None) -> Described:
    return Described(dtype, shape, None, stage)


def test_what_all_ranks_hold_is_written_once_and_evenly() -> None:
    tensors = {f"model/{number}": whole("F32", 1000, number + 1) for number in range(100)}
    tensors["model/large"] = whole("F32", 4096, 4096)
    plan = plan_writing([Description(tensors, {}, {})], [0] * 7)
    for key, tensor in tensors.items():
        written = [item.box for items in plan.items for item in items if item.key == key]
        assert fault_of_tiling(written, tensor.shape) is None
    assert share_of_most(plan) <= 1.2


def test_descriptions_travel_as_text() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    spread = merged_spread(dict(boxes_of(mesh.layout("dp", "tp"), (5, 3))))
    tensors = {"model/a": Described("BF16", (5, 3), spread, 2), "model/b": whole("F32")}
    description = Description(tensors, {"model/c": "model/a"}, {"model/a": "model/tied"})
    assert Description.from_text(description.to_text()) == description


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (whole("F32", 3, stage=0), "Two ranks have different tensors of one name"),
        (whole("BF16", 4, stage=0), "Two ranks have different tensors of one name"),
        (whole("F32", 4, stage=1), "Two stages of a pipeline call two weights by one name"),
        (Described("F32", (4,), ((Box((0,), (4,)), (1,)),), 0), "distributed on one rank and plain on another"),
    ],
)
def test_ranks_that_mean_different_tensors_are_told(second: Described, words: str) -> None:
    first = Description({"model/w": whole("F32", 4, stage=0)}, {}, {})
    with pytest.raises(ValueError, match=words):
        plan_writing([first, Description({"model/w": second}, {}, {})], [0, 1])


def test_a_part_that_no_rank_holds_is_an_error() -> None:
    half = Described("F32", (4,), ((Box((0,), (2,)), (0,)),), None)
    with pytest.raises(ValueError, match="do not make up the whole"):
        plan_writing([Description({"model/w": half}, {}, {})], [0])


def test_a_weight_that_stages_tie_is_saved_once_under_all_its_names() -> None:
    first = Description({"model/embed": whole("F32", 4, stage=0)}, {}, {"model/embed": "model/embed"})
    last = Description({"model/head": whole("F32", 4, stage=1)}, {}, {"model/head": "model/embed"})
    plan = plan_writing([first, last], [0, 1])
    assert sum(map(len, plan.items)) == 1
    assert plan.aliases == {"model/head": "model/embed"}


# Reading


@pytest.mark.parametrize("seed", share(2000, 200))
def test_runs_and_chunks_are_those_of_a_part_counted_element_by_element(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against indices of a small item, with chunks of 16 bytes."""
    from hyper_parallel.core.parallel.saving import reading

    monkeypatch.setattr(reading, "CHUNK_BYTES", 16)
    rng = random.Random(seed)
    sizes = tuple(rng.randint(1, 7) for _ in range(rng.randint(0, 4)))
    element_bytes = rng.choice([1, 2, 4, 8])
    starts = tuple(rng.randrange(size) for size in sizes)
    inside = Box(starts, tuple(rng.randint(1, size - start) for size, start in zip(sizes, starts, strict=True)))
    at = tuple(rng.randrange(5) for _ in sizes)
    item = SavedItem(0, 0, Box(at, sizes), None)
    moved = Box(tuple(a + b for a, b in zip(inside.starts, at, strict=True)), inside.sizes)
    part = Part(item, moved)
    order = {cell: number for number, cell in enumerate(cells(Box((0,) * len(sizes), sizes)))}
    expected = [order[cell] * element_bytes + byte for cell in cells(inside) for byte in range(element_bytes)]
    assert [run.start + byte for run in runs_of(part, element_bytes) for byte in range(run.num_bytes)] == expected
    touched = {byte // 16 for byte in expected}
    assert touched <= set(chunks_of(part, element_bytes))
    if len(set(sizes)) == 1 and inside.sizes == sizes:
        assert touched == set(chunks_of(part, element_bytes))


@pytest.mark.parametrize("seed", share(1000, 100))
def test_the_parts_of_a_box_tile_it(seed: int) -> None:
    rng = random.Random(seed)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    splits = ["a", "b", ("a", "b"), ("b", "a"), None]
    shape = rng.randint(1, 9), rng.randint(1, 9)

    def boxes() -> list[Box]:
        first = rng.choice(splits)
        second = rng.choice([split for split in ("a", "b", None) if split is None or split not in (first or ())])
        return [box for _, box in boxes_of(mesh.layout(first, second), shape) if not box.is_empty]

    items = tuple(SavedItem(0, 0, box, None) for box in dict.fromkeys(boxes()))
    saved = SavedTensor("F32", shape, items)
    for wanted in boxes():
        parts = [part.box.inside(wanted) for part in parts_of(saved, wanted)]
        assert fault_of_tiling(parts, wanted.sizes) is None


# The manifest


def small_manifest() -> Manifest:
    tensors = {
        "model/a": SavedTensor("F32", (4,), (SavedItem(0, 64, Box((0,), (4,)), "00000000"),)),
        "model/none": SavedTensor("F32", (0,), ()),
        "model/large": SavedTensor(
            "U8", (CHUNK_BYTES + 1,), (SavedItem(0, 80, Box((0,), (CHUNK_BYTES + 1,)), "0" * 16),)
        ),
    }
    file = SavedFile("rank-00000.safetensors", 81 + CHUNK_BYTES, 64, 7)
    return Manifest("0123", 5.5, (file,), tensors, {"model/b": "model/a"}, None, {"step": 1}, {"ranks": 1})


def test_a_manifest_comes_back_as_it_was() -> None:
    manifest = small_manifest()
    assert Manifest.from_bytes(manifest.to_bytes(), "x") == manifest
    assert manifest.find("model/b") is manifest.find("model/a")


def test_every_bit_of_a_manifest_counts() -> None:
    content = small_manifest().to_bytes()
    for place in range(8 * len(content)):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(DamagedFileError):
            Manifest.from_bytes(bytes(changed), "x")
    for length in range(len(content)):
        with pytest.raises(DamagedFileError):
            Manifest.from_bytes(content[:length], "x")


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields["tensors"]["model/a"][2][0].__setitem__(1, 63),
        lambda fields: fields["tensors"]["model/a"][2][0].__setitem__(0, 1),
        lambda fields: fields["tensors"]["model/a"][2][0].__setitem__(0, -1),
        lambda fields: fields["tensors"]["model/a"][2][0].__setitem__(4, "00"),
        lambda fields: fields["tensors"]["model/a"][2].clear(),
        lambda fields: fields["tensors"]["model/a"].__setitem__(0, "F33"),
        lambda fields: fields["tensors"].pop("model/a"),
        lambda fields: fields["files"][0].__setitem__(0, "../x.safetensors"),
        lambda fields: fields["files"].append(fields["files"][0]),
        lambda fields: fields.pop("aliases"),
        lambda fields: fields.__setitem__("chunk_bytes", 1),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused_though_its_checksum_is_right(change) -> None:
    content = small_manifest().to_bytes()
    fields = json.loads(content)
    head = content[: content.index(b"\n") + 1]
    del fields["hyper_parallel.manifest"]
    change(fields)
    text = head[:36] + b"0" * 8 + head[44:] + json.dumps(fields).encode()[1:]
    text = text[:36] + b"%08x" % zlib.crc32(text) + text[44:]
    with pytest.raises(HyperParallelError, match="damaged"):
        Manifest.from_bytes(text, "x")


# On paper


def test_a_large_model_is_planned_evenly_on_many_simulated_ranks() -> None:
    """A sixteenth of what `benchmarks/checkpoints.py --paper` plans: 256 ranks in stages, shards and slices."""
    from support.paper_models import described_model, plans_of_reading

    descriptions, description_of, shares = described_model(layers=8, width=1024, pp=4, dp=8, tp=8, vocabulary=4096)
    plan = plan_writing(descriptions, description_of)
    loads = [sum(size_bytes(plan.tensors[item.key].dtype, item.box.sizes) for item in items) for items in plan.items]
    assert sum(loads) == sum(size_bytes(tensor.dtype, tensor.shape) for tensor in plan.tensors.values())
    assert max(load / share for load, share in zip(loads, shares, strict=True)) <= 1.2
    assert max(plans_of_reading(plan, descriptions, description_of, every=61)) <= 1.2
