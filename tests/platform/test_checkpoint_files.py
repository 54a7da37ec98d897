"""Saving and loading through the platform: one text, every framework, one file for all."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.backends import Backend

covers = pytest.mark.covers
DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


def same(backend: Backend, left: Any, right: Any) -> bool:
    return (
        tuple(left.shape) == tuple(right.shape)
        and left.dtype == right.dtype
        and np.array_equal(backend.numbers(left), backend.numbers(right))
    )


@covers("save_checkpoint", "load_checkpoint")
def test_every_dtype_and_shape_comes_back_as_it_was(backend: Backend, platform: Any, tmp_path: Path) -> None:
    values = np.array([[0, 1, 2], [3, 5, 100]])
    tensors = {dtype: backend.tensor(values, dtype) for dtype in DTYPES}
    tensors |= {"scalar": backend.tensor(np.float32(2.5)), "empty": backend.tensor(np.zeros((0, 3)))}
    tensors |= {
        "turned": backend.tensor(values).T,
        "part": backend.tensor(values)[:, 1:],
        "ein Ümläut/'\"": backend.tensor([1.0]),
    }
    path = tmp_path / "all.safetensors"
    platform.save_checkpoint(tensors, path)
    loaded = platform.load_checkpoint(file_path=path, ckpt_format="safetensors")
    assert set(loaded) == set(tensors)
    assert isinstance(loaded, dict)
    assert loaded.verified
    assert [name for name in tensors if not same(backend, tensors[name], loaded[name])] == []


@covers("save_checkpoint", "load_checkpoint")
def test_a_module_saves_its_parameters_and_buffers(backend: Backend, platform: Any, tmp_path: Path) -> None:
    model = backend.model()
    platform.save_checkpoint(cell=model, file_path=str(tmp_path / "model.safetensors"))
    loaded = platform.load_checkpoint(str(tmp_path / "model.safetensors"))
    state = platform.get_model_state_dict(model)
    assert set(loaded) == set(state)
    assert all(np.array_equal(backend.numbers(loaded[name]), backend.numbers(state[name])) for name in state)
    other = backend.model()
    for name, parameter in platform.parameters_dict(other).items():
        platform.load_into_param(parameter, loaded[name])
    x = backend.tensor(np.ones((2, 3)))
    assert np.array_equal(backend.numbers(other(x)), backend.numbers(model(x)))


@covers("load_checkpoint")
def test_what_is_loaded_is_the_callers_own(backend: Backend, platform: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    platform.save_checkpoint({"x": backend.tensor([1.0, 2.0])}, path)
    loaded = platform.load_checkpoint(path)
    platform.save_checkpoint({"x": backend.tensor([3.0, 4.0])}, path)
    assert backend.numbers(loaded["x"]).tolist() == [1.0, 2.0]
    backend.numbers(loaded["x"] * 2)
    assert backend.numbers(platform.load_checkpoint(path)["x"]).tolist() == [3.0, 4.0]


@covers("save_checkpoint", "load_checkpoint")
def test_an_unknown_format_is_an_error_with_the_accepted_ones(backend: Backend, platform: Any, tmp_path: Path) -> None:
    for wrong in ("ckpt", "pickle", "", None):
        with pytest.raises(ValueError, match="safetensors"):
            platform.save_checkpoint({"x": backend.tensor([1.0])}, tmp_path / "x", wrong)
        with pytest.raises(ValueError, match="safetensors"):
            platform.load_checkpoint(tmp_path / "x", ckpt_format=wrong)
    assert list(tmp_path.iterdir()) == []


@covers("save_checkpoint")
@pytest.mark.parametrize(
    "wrong", [None, 3, [1.0], {"x": 1.0}, {"x": np.ones(2)}, {1: None}, collections.OrderedDict(x="text")]
)
def test_something_that_holds_no_tensors_is_refused_and_the_old_file_stays(
    backend: Backend, platform: Any, tmp_path: Path, wrong: Any
) -> None:
    path = tmp_path / "x.safetensors"
    platform.save_checkpoint({"x": backend.tensor([1.0])}, path)
    with pytest.raises(TypeError, match="(?s)xpected.*got"):
        platform.save_checkpoint(wrong, path)
    with pytest.raises(TypeError, match="path"):
        platform.save_checkpoint({"x": backend.tensor([1.0])}, None)
    assert backend.numbers(platform.load_checkpoint(path)["x"]).tolist() == [1.0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


@covers("save_checkpoint")
def test_parameters_without_data_are_refused_by_name(backend: Backend, platform: Any, tmp_path: Path) -> None:
    with platform.init_on_device("meta"):
        model = backend.model()
    with pytest.raises(ValueError, match=r"(?s)no data.*first\.weight"):
        platform.save_checkpoint(model, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


@covers("load_checkpoint")
def test_a_damaged_file_is_a_clear_error_and_a_missing_one_is_not_found(
    backend: Backend, platform: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    platform.save_checkpoint({"a": backend.tensor(np.ones(100)), "b": backend.tensor(np.ones(100))}, path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        platform.load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        platform.load_checkpoint(tmp_path / "absent.safetensors")
    with pytest.raises(TypeError, match="path"):
        platform.load_checkpoint(None)


@covers("load_checkpoint")
def test_a_file_of_another_program_loads_and_is_marked_unverified(
    backend: Backend, platform: Any, tmp_path: Path
) -> None:
    import safetensors.numpy

    path = tmp_path / "other.safetensors"
    safetensors.numpy.save_file({"x": np.arange(3, dtype=np.float32)}, path, metadata={"who": "someone"})
    loaded = platform.load_checkpoint(path)
    assert not loaded.verified
    assert loaded.metadata == {"who": "someone"}
    assert backend.numbers(loaded["x"]).tolist() == [0, 1, 2]


@covers("save_checkpoint")
def test_the_stock_library_reads_what_was_saved(backend: Backend, platform: Any, tmp_path: Path) -> None:
    import safetensors.numpy

    path = tmp_path / "ours.safetensors"
    platform.save_checkpoint({"x": backend.tensor([[1.0, 2.0]], "float16")}, path)
    assert safetensors.numpy.load_file(path)["x"].tolist() == [[1.0, 2.0]]


@covers("save_checkpoint", "load_checkpoint")
def test_one_framework_reads_what_the_other_wrote(backend: Backend, platform: Any, tmp_path: Path) -> None:
    from support.backends import ALL

    path = tmp_path / "shared.safetensors"
    platform.save_checkpoint({dtype: backend.tensor([0, 1, 7], dtype) for dtype in DTYPES}, path)
    for reader in ALL:
        if reader.missing():
            continue
        loaded = reader.platform.load_checkpoint(path)
        for dtype in DTYPES:
            assert loaded[dtype].dtype == reader.platform.str_to_dtype(dtype)
            assert reader.numbers(loaded[dtype]).astype(float).tolist() == ([0, 1, 1] if dtype == "bool" else [0, 1, 7])


SAVER = """
import sys
import numpy as np
from support.backends import ALL
backend = next(b for b in ALL if b.name == sys.argv[1])
step = 0
with backend.active():
    print("ready", flush=True)
    while True:
        step += 1
        tensors = {f"w{i}": backend.tensor(np.full(40_000, float(step))) for i in range(8)}
        backend.platform.save_checkpoint(tensors, sys.argv[2])
"""


@covers("save_checkpoint", "load_checkpoint")
def test_a_saver_killed_at_any_time_leaves_one_whole_checkpoint(
    backend: Backend, platform: Any, tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    platform.save_checkpoint({f"w{i}": backend.tensor(np.zeros(40_000)) for i in range(8)}, path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    random = np.random.default_rng(2026)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, backend.name, path], stdout=subprocess.PIPE, env=environment
        )
        try:
            assert process.stdout is not None
            while process.stdout.readline() not in (b"ready\n", b""):
                pass
            time.sleep(float(random.uniform(0.0, 0.2)))
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        loaded = platform.load_checkpoint(path)
        assert len(loaded) == 8
        assert len({float(v) for value in loaded.values() for v in np.unique(backend.numbers(value))}) == 1
