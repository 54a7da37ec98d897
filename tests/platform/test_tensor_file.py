"""Tensor files: what is written comes back, what was damaged is found, what is hostile runs nothing."""

from __future__ import annotations

import doctest
import errno
import importlib.util
import io
import itertools
import json
import os
import pickle
import random
import re
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from hyper_parallel._base import files
from hyper_parallel._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    DamagedFileError,
    FrameworkMissingError,
    StateError,
)
from hyper_parallel.platform import tensor_file
from hyper_parallel.platform.tensor_file import TensorRecord, TensorSpec, open_tensors, write_tensors

NUM_DAMAGES = 10_000 if os.environ.get("HYPER_PARALLEL_CAMPAIGN") == "full" else 1_000
HELPER = Path(__file__).with_name("killed_saves.py")
SEAL = b"hyper_parallel.seal"

_found = importlib.util.spec_from_file_location("killed_saves", HELPER)
assert _found is not None
assert _found.loader is not None
killed_saves = importlib.util.module_from_spec(_found)
_found.loader.exec_module(killed_saves)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def content_of(spec: TensorSpec) -> bytes:
    if spec.dtype == "BOOL":
        return bytes(i % 2 for i in range(spec.size_bytes))
    return bytes((7 * i + 3 * len(spec.name)) % 251 for i in range(spec.size_bytes))


def write(path: Path, specs: list[TensorSpec], metadata: dict[str, str] | None = None) -> dict[str, bytes]:
    contents = {spec.name: content_of(spec) for spec in specs}
    write_tensors(path, specs, contents.__getitem__, metadata=metadata)
    return contents


def load(path: Path) -> dict[str, bytes]:
    with open_tensors(path) as file:
        return {record.name: bytes(record.data) for record in file.read_all()}


def run_helper(*arguments: object) -> subprocess.Popen[str]:
    source = str(Path(tensor_file.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, str(HELPER), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )


# --- round trips


ALL_DTYPES = [TensorSpec(f"as {dtype}", dtype, (3, 8)) for dtype in reversed(tensor_file._BITS)]


def test_every_dtype_comes_back_as_it_was_written(target: Path) -> None:
    contents = write(target, ALL_DTYPES)
    with open_tensors(target) as file:
        assert file.verified
        assert sorted(file.specs) == sorted(ALL_DTYPES)
        for spec in file.specs:
            assert bytes(file.read(spec.name)) == contents[spec.name]


def test_the_known_dtypes_are_those_of_the_stock_library(target: Path) -> None:
    # Its own complaint lists them; a new one should be added here too.
    head = b'{"a":{"dtype":"NONE","shape":[],"data_offsets":[0,0]}}'
    target.write_bytes(struct.pack("<Q", len(head)) + head)
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.safe_open(target, framework="np")
    names = str(caught.value).split("expected one of ")[1].split(" at line")[0]
    assert sorted(tensor_file._BITS) == sorted(names.replace("`", "").split(", "))


@pytest.mark.parametrize(
    "specs",
    [
        [],
        [TensorSpec("scalar", "F64", ())],
        [TensorSpec("none", "F32", (0,)), TensorSpec("nothing", "F32", (4, 0)), TensorSpec("some", "F32", (2,))],
        [TensorSpec("", "U8", (1,))],
        [TensorSpec('Größe 重み "quoted" \\ \n\t\x00\x7f \U0001f600 ', "U8", (5,))],
        [TensorSpec("n" * 200_000, "U8", (5,))],
        [TensorSpec(f"layers.{i}.weight", "BF16", (i % 5, 3)) for i in range(3_000)],
        [TensorSpec("larger than a chunk", "U8", (tensor_file._CHUNK_BYTES * 2 + 11,))],
        [TensorSpec("hyper_parallel.seal", "U8", (1,))],
    ],
    ids=["no tensors", "0-d", "zero-size", "empty name", "odd name", "long name", "many", "large", "named as the seal"],
)
def test_unusual_tensors_come_back(target: Path, specs: list[TensorSpec]) -> None:
    contents = write(target, specs)
    assert load(target) == contents
    with open_tensors(target) as file:
        assert file.verified
        assert sorted(file.specs) == sorted(specs)
        assert {record[:3] for record in file.read_all()} == set(specs)


def test_metadata_comes_back_without_the_seal(target: Path) -> None:
    metadata = {"step": "12", "": "empty key", "ü": '"\\\n', "note": "hyper_parallel.seal is only text here"}
    write(target, [TensorSpec("a", "F32", (1,))], metadata)
    with open_tensors(target) as file:
        assert file.metadata == metadata
        assert file.verified


def test_numpy_arrays_are_accepted_as_content(target: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_tensors(target, [TensorSpec("a", "F32", (3, 4))], lambda name: array)
    with open_tensors(target) as file:
        assert np.array_equal(np.frombuffer(file.read("a"), np.float32).reshape(3, 4), array)


def test_an_empty_array_of_two_dims_is_accepted_as_content(target: Path) -> None:
    write_tensors(target, [TensorSpec("a", "F32", (0, 4))], lambda name: np.zeros((0, 4), np.float32))
    assert load(target) == {"a": b""}


def test_one_buffer_can_serve_all_tensors(target: Path) -> None:
    specs = [TensorSpec(str(i), "U8", (100,)) for i in range(5)]
    buffer = bytearray(100)

    def read(name: str) -> bytearray:
        buffer[:] = bytes([int(name)]) * 100
        return buffer

    write_tensors(target, specs, read)
    assert load(target) == {str(i): bytes([i]) * 100 for i in range(5)}


def test_each_tensor_is_read_once_in_the_order_of_the_file(target: Path) -> None:
    asked = []
    specs = [TensorSpec("x", "U8", (3,)), TensorSpec("y", "F64", (1,)), TensorSpec("z", "U8", (1,))]

    def read(name: str) -> bytes:
        asked.append(name)
        return bytes({"x": 3, "y": 8, "z": 1}[name])

    write_tensors(target, specs, read)
    with open_tensors(target) as file:
        assert asked == [spec.name for spec in file.specs] == ["y", "x", "z"]


def test_a_tensor_that_changes_while_it_is_saved_still_loads(target: Path) -> None:
    live = bytearray(100)

    def train_meanwhile(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        live[:] = bytes(byte + 1 for byte in live)
        return function(*args)

    with killed_saves.watched(train_meanwhile):
        write_tensors(target, [TensorSpec("a", "U8", (100,))], lambda name: live)
    assert len(set(load(target)["a"])) == 1
    assert live != bytes(100)


def test_short_writes_of_the_system_are_continued(target: Path) -> None:
    def seven_bytes_at_most(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(args[0], args[1][:7]) if name == "write" else function(*args)

    contents = {spec.name: content_of(spec) for spec in ALL_DTYPES}
    with killed_saves.watched(seven_bytes_at_most):
        write_tensors(target, ALL_DTYPES, contents.__getitem__)
    assert load(target) == contents


def test_the_example_in_the_docstring_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(tensor_file)
    assert results.attempted >= 2
    assert results.failed == 0


# --- other programs


def test_the_stock_library_reads_our_files_into_numpy(target: Path) -> None:
    dtypes = {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "I64": np.int64,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }
    specs = [TensorSpec(f"as {dtype}", dtype, (3, 5)) for dtype in reversed(dtypes)]
    contents = write(target, specs, {"step": "12"})
    loaded = safetensors.numpy.load_file(target)
    assert set(loaded) == set(contents)
    for spec in specs:
        array = loaded[spec.name]
        assert (array.dtype, array.shape) == (np.dtype(dtypes[spec.dtype]), (3, 5))
        assert array.tobytes() == contents[spec.name]
    with safetensors.safe_open(target, framework="np") as file:
        assert file.metadata()["step"] == "12"


def test_the_stock_library_reads_our_files_into_torch(target: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors_torch = pytest.importorskip("safetensors.torch")
    dtypes = {"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32}
    dtypes |= {"F64": torch.float64, "C64": torch.complex64}
    # Odd sizes, narrow first: only a layout that aligns each tensor can be read.
    specs = [TensorSpec(f"as {dtype}", dtype, (3,)) for dtype in dtypes] + [TensorSpec("scalar", "F32", ())]
    contents = write(target, specs)
    loaded = safetensors_torch.load_file(target)
    assert set(loaded) == set(contents)
    for spec in specs:
        tensor = loaded[spec.name]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtypes[spec.dtype], spec.shape)
        assert bytes(tensor.reshape(-1).view(torch.uint8).numpy()) == contents[spec.name]


def test_tensor_data_starts_at_a_multiple_of_eight(tmp_path: Path) -> None:
    for length in range(20):
        path = tmp_path / f"{length}.safetensors"
        write(path, [TensorSpec("n" * length, "F64", (1,))])
        assert struct.unpack("<Q", path.read_bytes()[:8])[0] % 8 == 0


def test_a_file_of_another_program_loads_unverified(target: Path) -> None:
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([True, False]), "0": np.zeros((0, 2))}
    safetensors.numpy.save_file(arrays, target, metadata={"format": "np"})
    with open_tensors(target) as file:
        assert not file.verified
        assert file.metadata == {"format": "np"}
        records = {record.name: record for record in file.read_all()}
        assert {name: (record.dtype, record.shape) for name, record in records.items()} == {
            "b": ("F32", (2, 3)),
            "a": ("BOOL", (2,)),
            "0": ("F64", (0, 2)),
        }
        assert {name: bytes(record.data) for name, record in records.items()} == {
            name: array.tobytes() for name, array in arrays.items()
        }
        del records


@pytest.mark.parametrize("head", [b"{}", b'{"__metadata__":null}', b' {"__metadata__":{}} \n'])
def test_a_foreign_file_without_tensors_loads(target: Path, head: bytes) -> None:
    target.write_bytes(struct.pack("<Q", len(head)) + head)
    with open_tensors(target) as file:
        assert (file.verified, file.specs, file.metadata, file.read_all()) == (False, (), {}, [])


def test_a_foreign_file_that_carries_a_copy_of_our_metadata_is_refused(target: Path) -> None:
    write(target, [TensorSpec("a", "U8", (4,))])
    with safetensors.safe_open(target, framework="np") as file:
        arrays, metadata = {"a": file.get_tensor("a") + 1}, file.metadata()
    safetensors.numpy.save_file(arrays, target, metadata=metadata)
    # The library shuffles the metadata: most times the header differs, but it can also come out the same.
    with pytest.raises(DamagedFileError):
        load(target)


# --- damage


def base_files(folder: Path) -> list[bytes]:
    """Small ones, so that headers, lengths and padding get their share of the damage."""
    path = folder / "base.safetensors"
    files = []
    for specs, metadata in [
        ([TensorSpec("w", "F32", (2, 3))], {}),
        (ALL_DTYPES, {"step": "12", "ü": "größe"}),
        ([], {}),
        ([TensorSpec(f"layers.{i}.weight", "F16", (i % 4, 7)) for i in range(40)], {"note": "x" * 300}),
        ([TensorSpec("a", "U8", (4096,)), TensorSpec("b", "U8", (4096,))], {}),
    ]:
        write(path, specs, metadata)
        files.append(path.read_bytes())
    return files


def bit_flip(rng: random.Random, content: bytearray) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def bit_flip_in_length(rng: random.Random, content: bytearray) -> None:
    content[rng.randrange(8)] ^= 1 << rng.randrange(8)


def bit_flip_in_header(rng: random.Random, content: bytearray) -> None:
    content[rng.randrange(8, 8 + struct.unpack("<Q", content[:8])[0])] ^= 1 << rng.randrange(8)


def printable_byte_in_header(rng: random.Random, content: bytearray) -> None:
    content[rng.randrange(8, 8 + struct.unpack("<Q", content[:8])[0])] = rng.randrange(32, 127)


def new_bytes(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content))
    stop = min(len(content), start + rng.choice([1, 2, 8, 64, 512]))
    content[start:stop] = rng.randbytes(stop - start)


def cut(rng: random.Random, content: bytearray) -> None:
    del content[rng.randrange(len(content)) :]


def cut_out(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content))
    del content[start : start + rng.choice([1, 8, 64, 512])]


def longer(rng: random.Random, content: bytearray) -> None:
    content += rng.randbytes(rng.choice([1, 8, 4096]))


def swapped_blocks(rng: random.Random, content: bytearray) -> None:
    size = rng.randint(1, max(1, min(len(content) // 3, rng.choice([4, 40, 400, 4000]))))
    first = rng.randrange(len(content) - 2 * size + 1)
    second = rng.randrange(first + size, len(content) - size + 1)
    content[first : first + size], content[second : second + size] = (
        content[second : second + size],
        content[first : first + size],
    )


def repeated_block(rng: random.Random, content: bytearray) -> None:
    size = rng.randint(1, max(1, min(len(content) // 3, rng.choice([4, 40, 400, 4000]))))
    source, place = (rng.randrange(len(content) - size + 1) for _ in range(2))
    content[place : place + size] = content[source : source + size]


def zeroed_block(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content))
    stop = min(len(content), start + rng.choice([1, 16, 512, 4096]))
    content[start:stop] = bytes(stop - start)


DAMAGES = [bit_flip, bit_flip_in_length, bit_flip_in_header, printable_byte_in_header, new_bytes, cut, cut_out]
DAMAGES += [longer, swapped_blocks, repeated_block, zeroed_block]


def test_every_damaged_file_is_found(tmp_path: Path) -> None:
    seed = 20240521
    print(f"seed {seed}, {NUM_DAMAGES} damages")
    rng = random.Random(seed)
    files = base_files(tmp_path)
    path = tmp_path / "damaged.safetensors"
    missed, done = [], 0
    for number, damage in zip(itertools.count(), itertools.cycle(DAMAGES)):
        original = rng.choice(files)
        content = bytearray(original)
        damage(rng, content)
        if content == original:
            continue
        path.write_bytes(content)
        try:
            load(path)
            missed.append((number, damage.__name__))
        except DamagedFileError:
            pass
        done += 1
        if done == NUM_DAMAGES:
            break
    assert done == NUM_DAMAGES
    assert missed == []


def test_every_single_bit_flip_of_a_small_file_is_found(target: Path) -> None:
    write(target, [TensorSpec("w", "F32", (2, 3)), TensorSpec("b", "U8", (0,))], {"step": "1"})
    content = bytearray(target.read_bytes())
    missed = []
    for place, bit in itertools.product(range(len(content)), range(8)):
        content[place] ^= 1 << bit
        target.write_bytes(content)
        try:
            load(target)
            missed.append((place, bit))
        except DamagedFileError:
            pass
        content[place] ^= 1 << bit
    assert missed == []


def test_every_cut_of_a_small_file_is_found(target: Path) -> None:
    write(target, [TensorSpec("w", "F32", (2, 3))])
    content = target.read_bytes()
    for length in range(len(content)):
        target.write_bytes(content[:length])
        with pytest.raises(DamagedFileError):
            load(target)


def without_traces(content: bytes, destroyed: tuple[int, ...]) -> bytes:
    """The traces of the seal, counted from 0, that are in `destroyed` get another last byte."""
    for number, trace in reversed(list(enumerate(re.finditer(rb"hyper_parallel\.seal|\t \t \t", content)))):
        if number in destroyed:
            last = b"1" if trace.group().endswith(b"l") else b" "
            content = content[: trace.end() - 1] + last + content[trace.end() :]
    return content


@pytest.mark.parametrize("left", range(6))
def test_a_file_with_one_trace_of_its_seal_left_is_still_sealed(target: Path, left: int) -> None:
    write(target, [TensorSpec("w", "F32", (2, 3))])
    destroyed = tuple(number for number in range(6) if number != left)
    target.write_bytes(without_traces(target.read_bytes(), destroyed))
    safetensors.numpy.load_file(target)  # the stock library sees nothing wrong
    with pytest.raises(DamagedFileError, match="the header that was sealed"):
        open_tensors(target)


def test_only_without_any_trace_of_the_seal_is_a_file_foreign(target: Path) -> None:
    write(target, [TensorSpec("w", "F32", (2, 3))])
    target.write_bytes(without_traces(target.read_bytes(), tuple(range(6))))
    with open_tensors(target) as file:
        assert not file.verified


def test_no_swap_of_two_blocks_removes_every_trace_of_the_seal(target: Path) -> None:
    # The one damage that cuts four traces at once and can still leave a header in valid JSON. All swaps there are.
    write(target, [])
    content = target.read_bytes()
    missed = []
    for size in range(1, len(content) // 2 + 1):
        for first in range(len(content) - 2 * size + 1):
            for second in range(first + size, len(content) - size + 1):
                left, right = content[first : first + size], content[second : second + size]
                swapped = content[:first] + right + content[first + size : second] + left + content[second + size :]
                if SEAL not in swapped and b"\t \t \t" not in swapped:
                    missed.append((first, second, size))
    assert missed == []


def test_a_block_of_text_over_the_whole_seal_is_found(target: Path) -> None:
    write(target, [TensorSpec("w", "F32", (2, 3))])
    content = target.read_bytes()
    start, stop = content.index(SEAL) + 3, content.rindex(SEAL) + 3
    text = b'":"'.center(stop - start, b"x")
    target.write_bytes(content[:start] + text + content[stop:])
    assert SEAL not in target.read_bytes()
    safetensors.numpy.load_file(target)
    with pytest.raises(DamagedFileError):
        open_tensors(target)


def test_a_checksum_in_capitals_is_damage(target: Path) -> None:
    write(target, [TensorSpec("w", "F32", (2, 3))])
    content = target.read_bytes()
    at = tensor_file._SUM_AT
    digits = content[at : at + 8]
    assert digits.upper() != digits, "take another tensor, whose checksum has a letter"
    target.write_bytes(content[:at] + digits.upper() + content[at + 8 :])
    with pytest.raises(DamagedFileError):
        open_tensors(target)


def test_no_tensor_is_handed_out_when_one_is_damaged(target: Path) -> None:
    write(target, [TensorSpec("good", "U8", (9,)), TensorSpec("bad", "U8", (9,))])
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    with open_tensors(target) as file:
        assert file.read("good").nbytes == 9
        with pytest.raises(DamagedFileError, match=r"(?s)model.safetensors is damaged.*checksum.*'bad', U8\[9\]"):
            file.read_all()
        with pytest.raises(DamagedFileError, match="'bad'"):
            file.read("bad")


# --- hostile files


def framed(head: bytes | str | dict[str, Any], data: bytes = b"") -> bytes:
    if isinstance(head, dict):
        head = json.dumps(head)
    text = head.encode() if isinstance(head, str) else head
    return struct.pack("<Q", len(text)) + text + data


def described(dtype: Any = "U8", shape: Any = (1,), offsets: Any = (0, 1), **more: Any) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}


class RunsWhenUnpickled:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.marker, "w")


def zip_of(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def forged_seal(sums: str) -> bytes:
    """A header with a right checksum of its own, and `sums` for the tensors."""
    head = tensor_file._header([TensorSpec("a", "U8", (1,))], {}, sums)
    at = tensor_file._SUM_AT
    return head[:at] + tensor_file._header_sum(head) + head[at + 8 :] + b"1"


def hostile_files(marker: str) -> dict[str, bytes]:
    bomb = pickle.dumps(RunsWhenUnpickled(marker))
    one = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    return {
        "empty": b"",
        "seven bytes": bytes(7),
        "only zeros": bytes(4096),
        "pickle": bomb,
        "pickle as header": framed(bomb),
        "zip with a pickle": zip_of("archive/data.pkl", bomb),
        "text": b"import os; os.system('true')  # " * 9,
        "header longer than the file": struct.pack("<Q", 10_000) + b"{}",
        "header of 2**64 - 1 bytes": struct.pack("<Q", 2**64 - 1) + b"{}",
        "header of 2**63 bytes": struct.pack("<Q", 2**63) + b"{}",
        "header of 200 MB": struct.pack("<Q", 200_000_000) + b"{}",
        "no header": framed(b""),
        "header is a list": framed(b"[]"),
        "header is a number": framed(b"7"),
        "header is null": framed(b"null"),
        "header is not UTF-8": framed(b'{"a\xff":1}'),
        "header is UTF-16": framed('{"a":1}'.encode("utf-16")),
        "header ends early": framed(b'{"a":'),
        "something after the header": framed(b"{}{}"),
        "NUL padding": framed(b"{}\0\0"),
        "nested lists": framed(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        "nested objects": framed(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        "nested where it is not looked at": framed(json.dumps(described(x="?")).replace('"?"', "[" * 999 + "]" * 999)),
        "a name twice": framed(b'{"a":' + one + b',"a":' + one + b"}", b"1"),
        "a name twice, once escaped": framed(b'{"a":' + one + b',"\\u0061":' + one + b"}", b"1"),
        "a key twice in the metadata": framed(b'{"__metadata__":{"k":"1","k":"2"}}'),
        "metadata twice": framed(b'{"__metadata__":{"k":"1"},"__metadata__":{"k":"2"}}'),
        "metadata that is not text": framed({"__metadata__": {"k": 1}}),
        "metadata that is a list": framed({"__metadata__": ["k"]}),
        "half a surrogate pair": framed(b'{"__metadata__":{"k":"\\ud800"}}'),
        "offsets that overlap": framed({"a": described()["a"], "b": described()["a"]}, b"1"),
        "offsets with a hole": framed({"a": described()["a"], "b": described(offsets=(2, 3))["a"]}, b"123"),
        "offsets turned round": framed(described(offsets=(1, 0)), b"1"),
        "offsets below zero": framed(described(offsets=(-1, 0)), b"1"),
        "offsets past the end": framed(described(shape=(9,), offsets=(0, 9)), b"1"),
        "three offsets": framed(described(offsets=(0, 1, 2)), b"1"),
        "offsets of 2**64": framed(described(offsets=(0, 2**64)), b"1"),
        "data behind the last tensor": framed(described(), b"1" * 9),
        "shape that overflows": framed(described(shape=(2**32, 2**32), offsets=(0, 0))),
        "shape that overflows beside a zero": framed(described(shape=(0, 2**40, 2**40), offsets=(0, 0))),
        "shape below zero": framed(described(shape=(-1, -1)), b"1"),
        "shape of NaN": framed(described(shape=(float("nan"),)), b"1"),
        "shape of a float": framed(described(shape=(1.0,)), b"1"),
        "shape with a million digits": framed(json.dumps(described(shape="?")).replace('"?"', "[" + "9" * 10**6 + "]")),
        "shape that is no list": framed(described(shape=1), b"1"),
        "shape and offsets that differ": framed(described(shape=(4,)), b"1"),
        "dtype unknown": framed(described(dtype="O"), b"1"),
        "dtype that names code": framed(described(dtype="os.system"), b"1"),
        "dtype in an object": framed(described(dtype={"U8": None}), b"1"),
        "dtype of another size": framed(described(dtype="F64"), b"1"),
        "dtype that ends within a byte": framed(described(dtype="F4", shape=(3,), offsets=(0, 2)), b"12"),
        "a tensor that is a list": framed({"a": ["U8", [1], [0, 1]]}, b"1"),
        "a tensor without a dtype": framed({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"1"),
        "a forged seal without checksums": forged_seal(""),
        "a forged seal with wrong checksums": forged_seal("00000000"),
    }


HOSTILE = sorted(hostile_files(""))


def test_there_are_at_least_thirty_hostile_files() -> None:
    assert len(HOSTILE) >= 30


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_and_runs_nothing(tmp_path: Path, target: Path, kind: str) -> None:
    marker = tmp_path / "executed"
    target.write_bytes(hostile_files(str(marker))[kind])
    with pytest.raises(DamagedFileError, match=r"model\.safetensors is damaged, or no safetensors file"):
        load(target)
    assert not marker.exists()


def test_the_hostile_pickle_runs_when_it_is_unpickled(tmp_path: Path) -> None:
    # Else the test above could not fail.
    pickle.loads(hostile_files(str(tmp_path / "executed"))["pickle"]).close()  # noqa: S301
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "kind",
    [
        "header longer than the file",
        "header is a list",
        "header is not UTF-8",
        "nested lists",
        "metadata that is a list",
        "offsets that overlap",
        "offsets with a hole",
        "offsets turned round",
        "offsets below zero",
        "offsets past the end",
        "data behind the last tensor",
        "shape of NaN",
        "shape that is no list",
        "dtype unknown",
        "a tensor without a dtype",
    ],
)
def test_a_file_the_stock_library_did_not_look_at_is_checked_too(
    target: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It opens the path by itself: another process may replace the file in between."""
    good = target.with_name("good.safetensors")
    write(good, [])
    real = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda path, framework: real(good, framework=framework))
    target.write_bytes(hostile_files("")[kind])
    with pytest.raises(DamagedFileError):
        load(target)


def test_a_list_in_place_of_a_description_is_named(target: Path) -> None:
    target.write_bytes(hostile_files("")["a tensor that is a list"])
    with pytest.raises(DamagedFileError, match="not described by a JSON object"):
        open_tensors(target)


@pytest.mark.parametrize("kind", ["a name twice", "three offsets"])
def test_a_refused_file_is_closed_while_the_error_is_kept(target: Path, kind: str) -> None:
    target.write_bytes(hostile_files("")[kind])
    with pytest.raises(DamagedFileError) as caught:
        open_tensors(target)
    own = Path("/proc/self/fd")
    assert str(target) not in [os.path.realpath(own / name) for name in os.listdir(own)]
    assert caught.value is not None


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match="a folder"):
        open_tensors(tmp_path)


def test_a_pipe_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DamagedFileError, match="a pipe"):
        open_tensors(tmp_path / "pipe")


def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_tensors(tmp_path / "nowhere.safetensors")


def test_without_the_package_the_error_names_the_extra(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(target, [])
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(FrameworkMissingError, match="pip install safetensors"):
        open_tensors(target)


def test_writing_needs_no_package_and_importing_no_framework(target: Path) -> None:
    program = (
        "import sys\n"
        "from hyper_parallel.platform.tensor_file import *\n"
        f"write_tensors({str(target)!r}, [TensorSpec('a', 'U8', (1,))], lambda name: b'1')\n"
        "print([name for name in ('torch', 'mindspore', 'numpy', 'safetensors', 'pickle') if name in sys.modules])"
    )
    source = str(Path(tensor_file.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.stdout.strip() == "[]"
    assert load(target) == {"a": b"1"}


# --- open files


def test_reading_after_close_is_an_error(target: Path) -> None:
    write(target, [TensorSpec("a", "U8", (1,))])
    with open_tensors(target) as file:
        pass
    with pytest.raises(StateError, match="closed"):
        file.read("a")
    file.close()


def test_a_view_that_outlives_the_file_keeps_its_content(target: Path) -> None:
    contents = write(target, [TensorSpec("a", "U8", (9_000,))])
    with open_tensors(target) as file:
        view = file.read("a")
    target.unlink()
    assert bytes(view) == contents["a"]
    del view


def test_an_open_file_keeps_its_content_when_it_is_replaced(target: Path) -> None:
    contents = write(target, [TensorSpec("a", "U8", (9_000,))])
    with open_tensors(target) as file:
        write(target, [])
        assert bytes(file.read("a")) == contents["a"]


def test_content_that_was_read_cannot_be_written_to(target: Path) -> None:
    write(target, [TensorSpec("a", "U8", (1,))])
    with open_tensors(target) as file, pytest.raises(TypeError):
        file.read("a")[0] = 1


def test_a_name_that_is_not_there_is_named(target: Path) -> None:
    write(target, [TensorSpec("a", "U8", (1,))])
    with open_tensors(target) as file, pytest.raises(ArgumentError, match="no tensor 'b'"):
        file.read("b")


def test_a_record_carries_the_spec_and_the_content(target: Path) -> None:
    write_tensors(target, [TensorSpec("a", "I16", (2,))], lambda name: b"1234")
    with open_tensors(target) as file:
        assert file.read_all() == [TensorRecord("a", "I16", (2,), memoryview(b"1234"))]


# --- wrong arguments


A = TensorSpec("a", "F32", (2, 3))


@pytest.mark.parametrize(
    ("specs", "content", "kind", "message"),
    [
        ([A, A], bytes(24), ArgumentError, "'a' cannot be used"),
        ([TensorSpec("__metadata__", "F32", ())], bytes(4), ArgumentError, "'__metadata__' cannot be used"),
        ([TensorSpec("a", "float32", ())], bytes(4), ArgumentError, r"'a' .*none of F64, .*Got float32\[\]"),
        ([TensorSpec("a", "F32", (-1,))], bytes(4), ArgumentError, r"'a' .*whole numbers.*Got F32\[-1\]"),
        ([TensorSpec("a", "F32", (1.0,))], bytes(4), ArgumentError, "'a' .*whole numbers"),  # type: ignore[arg-type]
        ([TensorSpec("a", "F32", (2**40, 2**40, 0))], b"", ArgumentError, "'a' .*too large"),
        ([TensorSpec("a", "F4", (3,))], bytes(2), ArgumentError, "'a' .*within a byte"),
        ([TensorSpec("\ud800", "F32", ())], bytes(4), ArgumentError, r"'\\ud800'"),
        ([TensorSpec(7, "F32", ())], bytes(4), ArgumentTypeError, "name.*got 7"),  # type: ignore[arg-type]
        ([A], bytes(20), ArgumentError, r"'a' has the wrong size.*Expected 24 bytes for F32\[2, 3\], got 20 bytes"),
        ([A], bytes(28), ArgumentError, "got 28 bytes"),
        ([A], [0] * 24, ArgumentTypeError, "'a' cannot be written"),
        ([A], np.zeros((3, 2), np.float32).T, ArgumentTypeError, "'a' .*contiguous"),
        ([A], np.zeros((2, 3), ">f4"), ArgumentError, "'a' is big-endian"),
        ([A], np.zeros(3, "datetime64[s]"), ArgumentTypeError, "'a' cannot be written"),
    ],
)
def test_a_tensor_that_cannot_be_stored_is_named_and_the_old_file_stays(
    target: Path, specs: list[TensorSpec], content: Any, kind: type[Exception], message: str
) -> None:
    target.write_bytes(b"old")
    with pytest.raises(kind, match=f"(?s){message}"):
        write_tensors(target, specs, lambda name: content)
    assert os.listdir(target.parent) == [target.name]
    assert target.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ({"step": 12}, ArgumentTypeError),
        ({12: "step"}, ArgumentTypeError),
        ({"hyper_parallel.seal": "1"}, ArgumentError),
        ({"hyper_parallel.seal.mine": "1"}, ArgumentError),
        ({"half": "\udfff"}, ArgumentError),
    ],
)
def test_metadata_that_cannot_be_stored_is_refused(target: Path, metadata: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        write_tensors(target, [], lambda name: b"", metadata=metadata)
    assert not target.exists()


def test_a_header_too_long_for_the_stock_library_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_MAX_HEADER_BYTES", 1_000)
    with pytest.raises(ArgumentError, match="at most 1000 bytes"):
        write(target, [], {"note": "x" * 1_000})
    assert not target.exists()


# --- where to write


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"its folder must exist.*nowhere/model.safetensors"):
        write(tmp_path / "nowhere" / "model.safetensors", [])


def test_a_folder_without_permission_is_named(target: Path) -> None:
    # Injected, since the superuser may write everywhere.
    def refuse(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "open" and args[0].endswith(".part"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return function(*args)

    with killed_saves.watched(refuse), pytest.raises(PermissionError, match=r"be writable.*model.safetensors"):
        killed_saves.save(target, 1)
    assert os.listdir(target.parent) == []


def test_a_folder_as_target_is_refused_before_any_tensor_is_read(tmp_path: Path) -> None:
    def read(name: str) -> bytes:
        raise RuntimeError("read")

    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="plain file"):
        write_tensors(tmp_path / "folder", [A], read)
    assert os.listdir(tmp_path) == ["folder"]


def test_a_pipe_as_target_is_refused_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="plain file"):
        write(tmp_path / "pipe", [])
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_gets_the_mode_of_the_umask(target: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write(target, [])
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o666, 0o754])
def test_a_replaced_file_keeps_its_mode(target: Path, mode: int) -> None:
    target.write_bytes(b"old")
    target.chmod(mode)
    write(target, [])
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert load(target) == {}


def test_a_private_file_is_never_readable_by_others_while_it_is_replaced(target: Path) -> None:
    target.write_bytes(b"old")
    target.chmod(0o600)
    seen = []

    def read(name: str) -> bytes:
        [part] = killed_saves.parts(target.parent)
        seen.append(stat.S_IMODE((target.parent / part).stat().st_mode))
        return bytes(24)

    write_tensors(target, [A], read)
    assert seen == [0o600]


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_written_through(tmp_path: Path, dangling: bool) -> None:
    real, link = tmp_path / "storage" / "real.safetensors", tmp_path / "link.safetensors"
    real.parent.mkdir()
    if not dangling:
        write(real, [])
    link.symlink_to(Path("storage") / real.name)
    contents = write(link, [A])
    assert link.is_symlink()
    assert not real.is_symlink()
    assert load(real) == contents
    assert os.listdir(real.parent) == [real.name]


def test_a_relative_path_holds_while_the_working_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)

    def read(name: str) -> bytes:
        monkeypatch.chdir(tmp_path / "other")
        return bytes(24)

    write_tensors("model.safetensors", [A], read)
    assert load(tmp_path / "model.safetensors") == {"a": bytes(24)}


# --- saves that do not end


def test_a_save_killed_at_any_file_call_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    with run_helper("kill", tmp_path) as helper:
        output, _ = helper.communicate(timeout=60)
    assert helper.returncode == 0
    found = json.loads(output)
    print(found)
    # Each of the kinds was met, else the helper did not stop where it should.
    assert found["kills"] == found["old"] + found["new"] >= 60
    assert min(found["old"], found["new"], found["left_over"]) >= 4


def save_that_fails(target: Path, stop_at: int, kind: type[BaseException]) -> tuple[list[str], bool]:
    """The file calls that were made, and whether the save raised."""
    made: list[str] = []

    def fail(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        made.append(name)
        if len(made) == stop_at:
            if name == "close":  # the system closes a descriptor even when it reports an error
                function(*args)
            raise kind(errno.EIO, "injected")
        return function(*args)

    try:
        with killed_saves.watched(fail):
            killed_saves.save(target, 2)
    except kind:
        return made, True
    return made, False


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_save_that_fails_at_any_file_call_leaves_the_old_file_and_nothing_else(
    target: Path, kind: type[BaseException]
) -> None:
    killed_saves.save(target, 2)
    new = target.read_bytes()
    killed_saves.save(target, 1)
    old = target.read_bytes()
    failed_at = []
    for stop_at in itertools.count(1):
        target.write_bytes(old)
        made, raised = save_that_fails(target, stop_at, kind)
        assert killed_saves.parts(target.parent) == [], made
        # From the replacement on, the new file is there whatever fails.
        is_new = "replace" in made[: stop_at - 1] or not raised
        assert target.read_bytes() == (new if is_new else old), made
        if len(made) < stop_at:
            break
        failed_at.append(made[stop_at - 1])
        # A folder that cannot be searched for leftovers, or a file system without locks, is no reason not to save.
        assert raised == (kind is KeyboardInterrupt or failed_at[-1] not in ("listdir", "flock")), made
    calls = {"listdir", "stat", "open", "flock", "fstat", "lseek", "write", "fchmod", "fsync", "replace", "close"}
    assert set(failed_at) == calls


@pytest.mark.parametrize("kind", [OSError(errno.ENOSPC, "full"), RuntimeError("device lost"), KeyboardInterrupt()])
def test_a_read_that_raises_leaves_the_old_file_and_nothing_else(target: Path, kind: BaseException) -> None:
    killed_saves.save(target, 1)
    old = target.read_bytes()

    def read(name: str) -> bytes:
        if name == "b":
            raise kind
        return bytes(24)

    with pytest.raises(type(kind)) as caught:
        write_tensors(target, [A, TensorSpec("b", "U8", (1,))], read)
    assert caught.value is kind
    assert os.listdir(target.parent) == [target.name]
    assert target.read_bytes() == old


def test_a_full_disk_leaves_the_old_file_and_says_so(target: Path) -> None:
    killed_saves.save(target, 1)
    old = target.read_bytes()
    room = 1_500

    def fill_up(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        nonlocal room
        if name == "write":
            if room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            args = (args[0], args[1][:room])
            room -= len(args[1])
        return function(*args)

    with killed_saves.watched(fill_up), pytest.raises(OSError, match=r"No space left.*unchanged.*model") as caught:
        killed_saves.save(target, 2)
    assert caught.value.errno == errno.ENOSPC
    assert room == 0
    assert os.listdir(target.parent) == [target.name]
    assert target.read_bytes() == old


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_no_error(target: Path, number: int) -> None:
    def no_folder_sync(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode):
            raise OSError(number, "cannot")
        return function(*args)

    with killed_saves.watched(no_folder_sync):
        killed_saves.save(target, 1)
    assert len(load(target)) == 3


def test_content_and_folder_are_synced_around_the_replacement(target: Path) -> None:
    steps = []

    def note(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name in ("write", "replace"):
            steps.append(name)
        elif name == "fsync":
            steps.append("sync folder" if stat.S_ISDIR(os.fstat(args[0]).st_mode) else "sync file")
        return function(*args)

    with killed_saves.watched(note):
        killed_saves.save(target, 1)
    assert [step for step, _ in itertools.groupby(steps)] == ["write", "sync file", "replace", "sync folder"]


# --- leftovers and other writers


def test_leftovers_of_a_dead_writer_are_removed_by_the_next_save(target: Path) -> None:
    mine = target.with_name(f".{target.name}.0123abcd.part")
    others = [
        target.with_name(name)
        for name in (
            ".other.safetensors.0123abcd.part",
            f".{target.name}.0123abcd.party",
            f".{target.name}.0123ABCD.part",
            f".{target.name}.0123abcde.part",
            f"{target.name}.0123abcd.part",
            ".modelxsafetensors.0123abcd.part",
        )
    ]
    for path in [mine, *others]:
        path.write_bytes(b"left over")
    write(target, [])
    assert not mine.exists()
    assert all(path.exists() for path in others)


def test_the_file_of_a_live_writer_stays_and_its_save_succeeds(target: Path) -> None:
    def read(name: str) -> bytes:
        # A lock belongs to one opening of the file, so this counts as another writer.
        before = killed_saves.parts(target.parent)
        write(target, [])
        assert killed_saves.parts(target.parent) == before
        assert len(before) == 1
        assert load(target) == {}
        return bytes(24)

    write_tensors(target, [A], read)
    assert load(target) == {"a": bytes(24)}
    assert os.listdir(target.parent) == [target.name]


def test_a_link_named_as_a_leftover_is_not_followed(target: Path) -> None:
    elsewhere = target.with_name("precious")
    elsewhere.write_bytes(b"precious")
    link = target.with_name(f".{target.name}.0123abcd.part")
    link.symlink_to(elsewhere)
    write(target, [])
    assert link.is_symlink()
    assert elsewhere.read_bytes() == b"precious"


def test_without_locks_a_save_works_and_leftovers_stay(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    leftover = target.with_name(f".{target.name}.0123abcd.part")
    leftover.write_bytes(b"left over")
    contents = write(target, [A])
    assert load(target) == contents
    assert leftover.exists()


def test_a_name_that_is_taken_is_not_used(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = target.with_name(f".{target.name}.aaaaaaaa.part")
    names = iter(["aaaaaaaa", "aaaaaaaa", "bbbbbbbb"])
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: next(names))
    monkeypatch.setitem(sys.modules, "fcntl", None)  # so that the file is not taken for a leftover
    taken.write_bytes(b"of another writer")
    contents = write(target, [A])
    assert load(target) == contents
    assert taken.read_bytes() == b"of another writer"
    assert next(names, None) is None


@pytest.mark.parametrize("still_locked", [True, False])
def test_a_new_file_that_another_writer_took_for_a_leftover_is_given_up(target: Path, still_locked: bool) -> None:
    import fcntl

    held: list[int] = []
    created: list[str] = []

    def take_the_first(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = function(*args)
        if name == "open" and args[0].endswith(".part"):
            created.append(args[0])
            if len(created) == 1:
                held.append(os.open(args[0], os.O_RDWR))
                fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not still_locked:
                    os.unlink(args[0])
                    os.close(held.pop())
        return result

    with killed_saves.watched(take_the_first):
        killed_saves.save(target, 1)
    for descriptor in held:
        os.close(descriptor)
    assert len(created) == 2
    assert len(load(target)) == 3
    assert os.listdir(target.parent) == [target.name]


def test_several_processes_that_save_to_one_target_leave_one_whole_file(target: Path) -> None:
    killed_saves.save(target, 1)
    whole = set()
    for fill in (1, 2, 3):
        other = target.with_name("other.safetensors")
        killed_saves.save(other, fill)
        whole.add(other.read_bytes())
        other.unlink()
    writers = [run_helper("race", target, fill, 100) for fill in (2, 3)]
    try:
        while any(writer.poll() is None for writer in writers):
            assert target.read_bytes() in whole
            load(target)
    finally:
        for writer in writers:
            writer.communicate(timeout=60)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert load(target)["b"] in (b"\2" * 700, b"\3" * 700)
    assert os.listdir(target.parent) == [target.name]
